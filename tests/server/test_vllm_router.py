"""A router in front of vLLM servers: what goes to each of both, what comes back, and what is tried
again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from kvflow.http.authorization import Keys
from kvflow.router.router import Router
from kvflow.router.routes import router_app
from kvflow.router.vllm_engine import CHAT, VllmEngine
from tests.server.fake_service import Server, served
from tests.server.fake_vllm import FakeVllm, Fleet, fleet
from tests.server.test_measures import labelled

Session = aiohttp.ClientSession
COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "What is a page?", "max_tokens": 3}
CHAT_BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "What is a page?"}],
    "max_completion_tokens": 3,
}
ASKED_OF_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture
async def p() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
async def d() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
async def r(p: FakeVllm, d: FakeVllm) -> AsyncIterator[Fleet]:
    async with fleet([p], [d]) as made:
        yield made


async def post(
    session: Session, r: Fleet, body: Any = BODY, path: str = COMPLETIONS, **more: Any
) -> tuple[int, Any]:
    """`more`: further fields. A stream is a list of its events."""
    raw = body if isinstance(body, bytes) else json.dumps({**body, **more}).encode()
    async with session.post(r.server.make_url(path), data=raw) as answer:
        got = await answer.read()
        if answer.content_type != "text/event-stream":
            return answer.status, json.loads(got)
        lines = [line for line in got.decode().split("\n\n") if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]" or "error" in lines[-1]
        return answer.status, [
            json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"
        ]


def text_of(answer: Any) -> str:
    events = answer if isinstance(answer, list) else [answer]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(
        c.get("text") or c.get("delta", c.get("message", {})).get("content", "") for c in choices
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_gets_the_request_as_it_came_with_what_prefill_has_answered(
    p: FakeVllm, d: FakeVllm, r: Fleet, session: Session, stream: bool
) -> None:
    asked: dict[str, Any] = {
        "stream": stream,
        "min_tokens": 2,
        "temperature": 0,
        "seed": 7,
        "logit_bias": {"5": 1.5},
    }
    if stream:
        asked["stream_options"] = {"include_usage": True}
    status, answer = await post(session, r, **asked)
    assert (status, text_of(answer)) == (200, "1 2 3 ")
    [first], [second] = p.bodies, d.bodies
    limits = {"stream": False, "stream_options": None, "max_tokens": 1, "min_tokens": 0}
    assert first == {**BODY, **asked, **limits, "kv_transfer_params": ASKED_OF_PREFILL}
    assert second == {**BODY, **asked, "kv_transfer_params": p._given(first)}
    assert b'"remote_blocks_expiry_time": 12345.678901234567' in d.raw[0], (
        "the bytes that prefill sent"
    )
    assert p.request_ids == d.request_ids and p.request_ids[0]
    if stream:
        assert answer[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat(p: FakeVllm, d: FakeVllm, r: Fleet, session: Session, stream: bool) -> None:
    status, answer = await post(session, r, CHAT_BODY, CHAT, stream=stream, min_tokens=3)
    assert (status, text_of(answer)) == (200, "1 2 3 ")
    assert (
        p.bodies[0]["max_tokens"],
        p.bodies[0]["max_completion_tokens"],
        p.bodies[0]["min_tokens"],
    ) == (1, 1, 0)
    assert d.bodies[0] == {
        **CHAT_BODY,
        "stream": stream,
        "min_tokens": 3,
        "kv_transfer_params": d.params[0],
    }
    assert d.params[0]["remote_request_id"] == "cmpl-1-0-1a2b3c4d"
    if stream:
        assert answer[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_the_official_client(r: Fleet) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{r.server.url}/v1", api_key="none", max_retries=0
    ) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        done = await client.completions.create(model="m", prompt="a", max_tokens=2)
        assert done.choices[0].text == "1 2 "
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], max_tokens=2, stream=True
        )
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["", "1 ", "2 "]
        with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
            await client.completions.create(model="other", prompt="a")


async def test_decode_is_asked_when_prefill_has_answered(
    p: FakeVllm, d: FakeVllm, r: Fleet, session: Session
) -> None:
    p.gate.clear()
    asking = asyncio.create_task(post(session, r))
    await asyncio.wait_for(p.started.wait(), 5)
    assert (r.worker(p).running, r.worker(d).running, d.bodies) == (1, 1, [])
    p.gate.set()
    assert (await asyncio.wait_for(asking, 5))[0] == 200
    assert (r.worker(p).running, r.worker(d).running, len(d.bodies)) == (0, 0, 1)


@pytest.mark.parametrize("connector", ["nixl", ""])
async def test_a_client_cannot_say_where_decode_reads(
    d: FakeVllm, session: Session, connector: Any
) -> None:
    p = FakeVllm(connector)
    async with fleet([p], [d]) as r:
        mine = {
            "do_remote_prefill": True,
            "remote_host": "evil",
            "remote_port": 1,
            "remote_block_ids": [[1]],
        }
        assert (await post(session, r, kv_transfer_params=mine))[0] == 200
        assert p.params == [ASKED_OF_PREFILL] and "evil" not in str(d.params)
        status, answer = await post(session, r, vllm_xargs={"kv_transfer_params": "x"})
        assert (status, answer["error"]["param"]) == (400, "vllm_xargs")
        assert len(d.bodies) == 1
        assert (await post(session, r, vllm_xargs={"mine": 1}))[0] == 200


async def test_a_prefill_with_nothing_to_transfer(
    d: FakeVllm, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    p = FakeVllm("")
    async with fleet([p], [d]) as r:
        for _ in range(2):
            status, answer = await post(session, r)
            assert (status, text_of(answer)) == (200, "1 2 3 ")
        assert d.params == [None, None]
        assert await decoded_alone(session, r) == {"no_params": 2.0}
    told = [
        record.getMessage()
        for record in caplog.records
        if "kv-transfer-config" in record.getMessage()
    ]
    assert len(told) == 1 and r.at[p].url in told[0]


async def decoded_alone(session: Session, r: Fleet) -> dict[str, float]:
    async with session.get(r.server.make_url("/metrics")) as answer:
        found = labelled(await answer.text(), "kvflow_router_decoded_alone_total")
    return {labels[0]: value for labels, value in found.items()}


ALONE: dict[str, list[dict[str, Any]]] = {
    "completions": [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1, 2], [3]]}],
    "prompt_logprobs": [{"prompt_logprobs": 0}, {"echo": True}],
    "prompt_embeds": [{"prompt_embeds": "AAAA"}],
    "beam_search": [{"use_beam_search": True}],
    "truncation": [{"truncate_prompt_tokens": -1}],
}


@pytest.mark.parametrize(
    ("reason", "more"), [(why, more) for why in ALONE for more in ALONE[why]], ids=str
)
async def test_what_one_transfer_cannot_serve_decode_serves_alone(
    p: FakeVllm, d: FakeVllm, r: Fleet, session: Session, reason: str, more: dict[str, Any]
) -> None:
    assert (await post(session, r, **more))[0] == 200
    assert (p.bodies, d.params) == ([], [None])
    assert await decoded_alone(session, r) == {reason: 1.0}
    assert (r.worker(p).served, r.worker(d).served) == (0, 1)


@pytest.mark.parametrize(
    "more",
    [{"n": 1}, {"n": None}, {"prompt": ["a"]}, {"prompt": [1, 2, 3]}, {"echo": False}],
    ids=str,
)
async def test_one_completion_goes_to_a_pair(
    p: FakeVllm, r: Fleet, session: Session, more: dict[str, Any]
) -> None:
    assert (await post(session, r, **more))[0] == 200
    assert len(p.bodies) == 1


async def test_a_long_prompt_of_token_ids_is_one_prompt(
    p: FakeVllm, r: Fleet, session: Session
) -> None:
    assert (await post(session, r, prompt=list(range(20000))))[0] == 200
    assert p.bodies[0]["prompt"] == list(range(20000))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("held", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_the_leg_that_runs(
    p: FakeVllm, d: FakeVllm, r: Fleet, session: Session, held: str, stream: bool
) -> None:
    at, other = (p, d) if held == "prefill" else (d, p)
    at.gate.clear()
    asking = asyncio.create_task(post(session, r, stream=stream))
    await asyncio.wait_for(at.started.wait(), 5)
    asking.cancel()
    assert await asyncio.wait_for(at.aborted.get(), 5) == COMPLETIONS
    await asyncio.wait_for(r.router.idle.wait(), 5)
    assert (r.worker(p).running, r.worker(d).running, other.aborted.qsize()) == (0, 0, 0)
    assert r.worker(p).up and r.worker(d).up
    assert len(d.bodies) == (held == "decode")


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_another_prefill_serves_what_one_fails(
    p: FakeVllm, d: FakeVllm, session: Session, status: int
) -> None:
    other = FakeVllm()
    p.failures.append(status)
    async with fleet([p, other], [d]) as r:
        assert (await post(session, r))[0] == 200
        assert (len(p.bodies), len(other.bodies), len(d.bodies)) == (1, 1, 1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("status", [200, 500, 503])
async def test_a_failure_of_decode_is_followed_by_a_new_prefill(
    p: FakeVllm, d: FakeVllm, session: Session, status: int, path: str
) -> None:
    """200: inside of a stream, and of a chat after the event that says who speaks."""
    other = FakeVllm()
    d.failures.append(status)
    async with fleet([p], [d, other]) as r:
        body = CHAT_BODY if path == CHAT else BODY
        code, answer = await post(session, r, body, path, stream=True)
        assert (code, text_of(answer)) == (200, "1 2 3 ")
        assert (len(p.bodies), len(d.bodies), len(other.bodies)) == (2, 1, 1)
        roles = (
            [c["delta"].get("role") for event in answer for c in event["choices"]]
            if path == CHAT
            else ["assistant"]
        )
        assert roles.count("assistant") == 1


async def test_the_last_failure_is_the_answer(
    p: FakeVllm, d: FakeVllm, r: Fleet, session: Session
) -> None:
    d.failures.append(500)
    status, answer = await post(session, r)
    assert (status, answer["error"]["message"], answer["error"]["code"]) == (500, "so it is", 500)
    assert len(p.bodies) == 1, "the same pair would repeat it"


async def test_what_vllm_refuses_is_answered_as_it_says_it(
    p: FakeVllm, d: FakeVllm, r: Fleet, session: Session
) -> None:
    status, answer = await post(session, r, model="other")
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")
    assert (len(p.bodies), d.bodies) == (1, [])
    status, answer = await post(session, r, min_tokens=9)
    assert (status, answer["error"]["type"], len(d.bodies)) == (400, "BadRequestError", 1), (
        "decode has the limits"
    )
    assert (await post(session, r, b"[1]"))[0] == 400
    assert (await post(session, r, b"{no"))[0] == 400


async def test_a_prefill_that_is_gone_is_left_out(d: FakeVllm, session: Session) -> None:
    gone, other = FakeVllm(), FakeVllm()
    async with fleet([gone, other], [d]) as r:
        worker = r.worker(gone)
        async with served(web.Application()) as nothing:
            pass
        worker.url = nothing.url
        for _ in range(4):
            assert (await post(session, r))[0] == 200
        assert (
            not worker.up and "cannot be reached" in worker.reason
        ) or "Cannot connect" in worker.reason
        assert len(other.bodies) == 4


async def test_a_prefill_that_answers_something_else_fails_the_pair(
    d: FakeVllm, session: Session
) -> None:
    p, other = FakeVllm(), FakeVllm()

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    odd = web.Application()
    odd.add_routes([web.post(COMPLETIONS, page)])
    async with served(odd) as strange, fleet([p, other], [d]) as r:
        r.worker(p).url = strange.url
        assert (await post(session, r))[0] == 200
        assert len(other.bodies) == len(d.bodies) == 1


async def test_the_same_beginning_goes_to_the_same_prefill(d: FakeVllm, session: Session) -> None:
    fakes = [FakeVllm(), FakeVllm(), FakeVllm()]
    long = "All pages of a pool are of one size, and each has one owner. " * 8
    async with fleet(fakes, [d]) as r:
        for i in range(6):
            assert (await post(session, r, prompt=f"{long} Question {i}?"))[0] == 200
        assert sorted(len(fake.bodies) for fake in fakes) == [0, 0, 6]


async def test_only_what_vllm_has_is_offered(r: Fleet, session: Session) -> None:
    for method, path in [
        ("POST", "/generate"),
        ("POST", "/flush_cache"),
        ("GET", "/get_load"),
        ("GET", "/rooms/1"),
    ]:
        async with session.request(method, r.server.make_url(path)) as answer:
            assert answer.status == 404, path
    async with session.get(r.server.make_url("/version")) as answer:
        assert await answer.json() == {"version": "0.32.0"}
    async with session.get(r.server.make_url("/health")) as answer:
        assert answer.status == 200
    async with session.get(r.server.make_url("/server_info")) as answer:
        assert (await answer.json())["served_model_name"] == "m"


@asynccontextmanager
async def routed(prefills: list[str], decodes: list[str], **options: Any) -> AsyncIterator[Server]:
    router = Router(prefills, decodes, poll_s=3600, **options)
    await router.start()
    async with served(router_app(router)) as front:
        yield front
    await router.close()


async def health(session: Session, server: Server) -> str:
    async with session.get(server.make_url("/health")) as answer:
        return str((await answer.json())["error"]["message"])


async def test_what_is_no_vllm_is_told(
    decode_server: Server, d: FakeVllm, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    d.healthy = False
    async with (
        served(d.app) as sick,
        routed([decode_server.url], [sick.url], engine=VllmEngine()) as front,
    ):
        said = await health(session, front)
    assert (
        "/version answered 404: it is not a vLLM server" in said and "without --engine vllm" in said
    )
    assert "/health answered 503" in said
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"{sick.url} is down: /health answered 503" in line for line in lines)


async def test_a_router_of_kvflow_s_workers_tells_of_the_other_engine(
    p: FakeVllm, session: Session
) -> None:
    async with served(p.app) as server, routed([server.url], [server.url]) as front:
        assert "/server_info answered 404: it is not a worker of kvflow" in (
            said := await health(session, front)
        )
    assert "--engine vllm" in said


async def test_a_key_that_vllm_does_not_take(p: FakeVllm, d: FakeVllm, session: Session) -> None:
    p.api_key, d.api_key = "other", "ours"
    async with fleet([p], [d], keys=Keys("ours")) as r:
        assert "its API key is not the router's --api-key" in r.worker(p).reason
        assert r.worker(d).up
