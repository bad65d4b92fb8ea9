"""A router in front of vLLM servers: what each gets, what comes back, and what is tried again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from aiohttp import web

from kvflow.http.authorization import Keys
from kvflow.router.vllm_engine import VllmEngine
from tests.fakes.servers import Front, answers, labelled, serving
from tests.fakes.service import Role
from tests.fakes.vllm import (
    CHAT,
    COMPLETIONS,
    COUNT,
    MESSAGES,
    REQUESTS,
    RESPONSES,
    FakeVllm,
    ask,
    fleet,
)

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
async def front(p: FakeVllm, d: FakeVllm) -> AsyncIterator[Front]:
    async with fleet([p], [d]) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_gets_the_request_as_it_came_with_what_prefill_has_answered(
    p: FakeVllm, d: FakeVllm, front: Front, stream: bool
) -> None:
    asked: dict[str, Any] = {"min_tokens": 2, "temperature": 0, "logit_bias": {"5": 1.5}}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    answer = await ask(front, stream=stream, **asked)
    asked |= {**REQUESTS[COMPLETIONS], "stream": stream}
    [first], [second] = p.bodies, d.bodies
    limits = {"stream": False, "stream_options": None, "max_tokens": 1, "min_tokens": 0}
    assert first == {**asked, **limits, "kv_transfer_params": ASKED_OF_PREFILL}
    assert second == {**asked, "kv_transfer_params": p._given(first)}
    sent = b'"remote_blocks_expiry_time": 12345.678901234567'
    assert sent in d.raw[0], "the bytes that prefill sent"
    assert p.request_ids == d.request_ids and p.request_ids[0]
    if stream:
        assert answer[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat(p: FakeVllm, d: FakeVllm, front: Front, stream: bool) -> None:
    answer = await ask(front, CHAT, stream=stream, min_tokens=3)
    limits = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}
    assert p.bodies[0] | limits == p.bodies[0]
    asked = {**REQUESTS[CHAT], "stream": stream, "min_tokens": 3}
    assert d.bodies[0] == {**asked, "kv_transfer_params": d.params[0]}
    assert d.params[0]["remote_request_id"] == "cmpl-1-0-1a2b3c4d"
    if stream:
        assert answer[0]["choices"][0]["delta"]["role"] == "assistant"


LIMITS: dict[str, dict[str, Any]] = {
    MESSAGES: {"max_tokens": 1},
    RESPONSES: {"max_output_tokens": 1, "store": False},
}


@pytest.mark.parametrize("path", LIMITS)
async def test_other_chats_go_to_a_pair_too(
    p: FakeVllm, d: FakeVllm, front: Front, path: str
) -> None:
    asked = {**REQUESTS[path], "temperature": 0, "n": 2}
    answer = await front.post(path, asked)
    content = answer["content"] if path == MESSAGES else answer["output"][0]["content"]
    assert content[0]["text"] == "1 2 3 "
    sent = {**asked, "stream": False, **LIMITS[path], "kv_transfer_params": ASKED_OF_PREFILL}
    assert p.bodies == [sent]
    assert d.bodies == [{**asked, "kv_transfer_params": p._given(p.bodies[0])}]
    assert await decoded_alone(front) == {}


@pytest.mark.parametrize("path", LIMITS)
async def test_an_error_after_what_opens_a_stream_is_tried_elsewhere(
    p: FakeVllm, d: FakeVllm, path: str
) -> None:
    broken = FakeVllm()
    broken.failures.append(200)
    async with fleet([p], [broken, d]) as front:
        for _ in range(2):
            answer = await front.call("POST", path, {**REQUESTS[path], "stream": True})
            names = [line for line in answer.text.splitlines() if line.startswith("event: ")]
            assert len(set(names)) == len(names) - 2, "what opens it came once, the tokens thrice"
            assert "event: error" not in names
    assert not broken.failures and len(broken.bodies) + len(d.bodies) == 3


async def test_the_tokens_of_messages_are_counted_by_any_decode(p: FakeVllm, front: Front) -> None:
    # Whatever type the client calls it, a body reaches vLLM as JSON.
    raw = json.dumps(REQUESTS[MESSAGES])
    for kind in ("application/json", "text/plain"):
        counted = await front.post(COUNT, data=raw, headers={"Content-Type": kind})
        assert counted == {"input_tokens": 3}
    assert p.bodies == []


@pytest.mark.parametrize("more", [{"background": True}, {"previous_response_id": "resp-1"}])
async def test_stored_responses_are_refused_by_name(
    d: FakeVllm, front: Front, more: dict[str, Any]
) -> None:
    error = await front.refused(400, RESPONSES, {**REQUESTS[RESPONSES], **more})
    assert error["param"] == next(iter(more)) and "all items as input" in error["message"]
    assert d.bodies == []


async def test_tools_of_the_server_stay_at_decode(p: FakeVllm, d: FakeVllm, front: Front) -> None:
    function = {"type": "function", "name": "f", "parameters": {}}
    for tools in ([function], [function, {"type": "web_search_preview"}]):
        await front.post(RESPONSES, {**REQUESTS[RESPONSES], "tools": tools})
    assert (len(p.bodies), len(d.bodies)) == (1, 2)
    assert await decoded_alone(front) == {("server_tools",): 1}


async def test_the_official_client(client: openai.AsyncOpenAI) -> None:
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
    p: FakeVllm, d: FakeVllm, front: Front
) -> None:
    p.gate.clear()
    asking = asyncio.create_task(ask(front))
    await asyncio.wait_for(p.started.wait(), 20)
    workers = [front.worker(fake) for fake in (p, d)]
    assert ([worker.running for worker in workers], d.bodies) == ([1, 1], [])
    p.gate.set()
    await asyncio.wait_for(asking, 20)
    assert ([worker.running for worker in workers], len(d.bodies)) == ([0, 0], 1)


@pytest.mark.parametrize("connector", ["nixl", ""])
async def test_a_client_cannot_say_where_decode_reads(d: FakeVllm, connector: Any) -> None:
    p = FakeVllm(connector)
    async with fleet([p], [d]) as front:
        blocks = {"remote_port": 1, "remote_block_ids": [[1]]}
        mine = {"do_remote_prefill": True, "remote_host": "evil", **blocks}
        await ask(front, kv_transfer_params=mine)
        assert p.params == [ASKED_OF_PREFILL] and "evil" not in str(d.params)
        asked = {**REQUESTS[COMPLETIONS], "vllm_xargs": {"kv_transfer_params": "x"}}
        error = await front.refused(400, COMPLETIONS, asked)
        assert (error["param"], len(d.bodies)) == ("vllm_xargs", 1)
        await ask(front, vllm_xargs={"mine": 1})


async def test_a_prefill_with_nothing_to_transfer(
    d: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    p = FakeVllm("")
    async with fleet([p], [d]) as front:
        for _ in range(2):
            await ask(front)
        assert d.params == [None, None]
        assert await decoded_alone(front) == {("no_params",): 2}
    [told] = [line for line in caplog.messages if "kv-transfer-config" in line]
    assert p.url in told


async def decoded_alone(front: Front) -> dict[tuple[str, ...], float]:
    return labelled(await front.metrics(), "kvflow_router_decoded_alone_total")


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
    p: FakeVllm, d: FakeVllm, front: Front, reason: str, more: dict[str, Any]
) -> None:
    await front.post(COMPLETIONS, {**REQUESTS[COMPLETIONS], **more})
    assert (p.bodies, d.params) == ([], [None])
    assert await decoded_alone(front) == {(reason,): 1}
    assert (front.worker(p).served, front.worker(d).served) == (0, 1)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 1},
        {"n": None},
        {"prompt": ["a"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [*range(20000)]},
        {"echo": False},
    ],
    ids=["n 1", "no n", "one text", "token ids", "many token ids", "no echo"],
)
async def test_one_completion_goes_to_a_pair(
    p: FakeVllm, front: Front, more: dict[str, Any]
) -> None:
    await front.post(COMPLETIONS, {**REQUESTS[COMPLETIONS], **more})
    [asked] = p.bodies
    assert asked | more == asked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("held", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_the_leg_that_runs(
    p: FakeVllm, d: FakeVllm, front: Front, held: str, stream: bool
) -> None:
    at, other = (p, d) if held == "prefill" else (d, p)
    at.gate.clear()
    asking = asyncio.create_task(ask(front, stream=stream))
    await asyncio.wait_for(at.started.wait(), 20)
    asking.cancel()
    assert await asyncio.wait_for(at.aborted.get(), 20) == COMPLETIONS
    await asyncio.wait_for(front.router.idle.wait(), 20)
    assert [(one.running, one.up) for one in front.router.workers.all] == [(0, True)] * 2
    assert (other.aborted.qsize(), len(d.bodies)) == (0, held == "decode")


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_another_prefill_serves_what_one_fails(p: FakeVllm, d: FakeVllm, status: int) -> None:
    other = FakeVllm()
    p.failures.append(status)
    async with fleet([p, other], [d]) as front:
        await ask(front)
        assert (len(p.bodies), len(other.bodies), len(d.bodies)) == (1, 1, 1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("status", [200, 500, 503])
async def test_a_failure_of_decode_is_followed_by_a_new_prefill(
    p: FakeVllm, d: FakeVllm, status: int, path: str
) -> None:
    """200: inside of a stream, and of a chat after the event that says who speaks."""
    other = FakeVllm()
    d.failures.append(status)
    async with fleet([p], [d, other]) as front:
        events = await ask(front, path, stream=True)
        assert (len(p.bodies), len(d.bodies), len(other.bodies)) == (2, 1, 1)
    choices = [choice for event in events for choice in event["choices"]]
    openings = [one for one in choices if one.get("delta", {}).get("role") == "assistant"]
    assert len(openings) == (path == CHAT)


async def test_the_last_failure_is_the_answer(p: FakeVllm, d: FakeVllm, front: Front) -> None:
    d.failures.append(500)
    error = await front.refused(500, COMPLETIONS, REQUESTS[COMPLETIONS])
    assert (error["message"], error["code"]) == ("so it is", 500)
    assert len(p.bodies) == 1, "the same pair would repeat it"


async def test_what_vllm_refuses_is_answered_as_it_says_it(
    p: FakeVllm, d: FakeVllm, front: Front
) -> None:
    error = await front.refused(404, COMPLETIONS, REQUESTS[COMPLETIONS] | {"model": "other"})
    assert (error["type"], len(p.bodies), len(d.bodies)) == ("NotFoundError", 1, 0)
    error = await front.refused(400, COMPLETIONS, REQUESTS[COMPLETIONS] | {"min_tokens": 9})
    assert (error["type"], len(d.bodies)) == ("BadRequestError", 1), "decode has the limits"
    for raw in (b"[1]", b"{no"):
        await front.refused(400, COMPLETIONS, data=raw)


async def test_a_prefill_that_is_gone_is_left_out(d: FakeVllm) -> None:
    gone, other = FakeVllm(), FakeVllm()
    async with fleet([gone, other], [d]) as front:
        worker = front.worker(gone)
        await gone.stop()
        for _ in range(4):
            await ask(front)
        assert not worker.up
        assert "cannot be reached" in worker.reason
        assert len(other.bodies) == 4


async def test_a_prefill_that_answers_something_else_fails_the_pair(d: FakeVllm) -> None:
    p, other = FakeVllm(), FakeVllm()
    page = web.post(COMPLETIONS, answers("<html>", content_type="text/html"))
    async with serving(page) as strange, fleet([p, other], [d]) as front:
        front.worker(p).url = strange.url
        await ask(front)
        assert len(other.bodies) == len(d.bodies) == 1


async def test_the_same_beginning_goes_to_the_same_prefill(d: FakeVllm) -> None:
    fakes = [FakeVllm(), FakeVllm(), FakeVllm()]
    long = "All pages of a pool are of one size, and each has one owner. " * 8
    async with fleet(fakes, [d]) as front:
        for i in range(6):
            await ask(front, prompt=f"{long} Question {i}?")
        assert sorted(len(fake.bodies) for fake in fakes) == [0, 0, 6]


async def test_only_what_vllm_has_is_offered(front: Front) -> None:
    for path in ("/generate", "/flush_cache"):
        await front.refused(404, path)
    for path in ("/get_load", "/rooms/1"):
        await front.get(path, status=404)
    assert await front.get("/version") == {"version": "0.32.0"}
    await front.get("/health")
    assert (await front.get("/server_info"))["served_model_name"] == "m"


async def why_not(front: Front) -> str:
    return str((await front.get("/health", status=503))["error"]["message"])


async def test_what_is_no_vllm_is_told(
    decode: Role, d: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    d.healthy = False
    async with d, Front([decode], [d], engine=VllmEngine()) as front:
        said = await why_not(front)
    assert "/version answered 404: it is not a vLLM server" in said
    assert "without --engine vllm" in said and "/health answered 503" in said
    assert any(f"{d.url} is down: /health answered 503" in line for line in caplog.messages)


async def test_a_router_of_kvflow_s_workers_tells_of_the_other_engine(p: FakeVllm) -> None:
    async with p, Front([p], [p]) as front:
        said = await why_not(front)
    assert "/server_info answered 404: it is not a worker of kvflow" in said
    assert "--engine vllm" in said


async def test_a_key_that_vllm_does_not_take(p: FakeVllm, d: FakeVllm) -> None:
    p.api_key, d.api_key = "other", "ours"
    async with fleet([p], [d], keys=Keys("ours")) as front:
        assert "its API key is not the router's --api-key" in front.worker(p).reason
        assert front.worker(d).up
