"""The router: pairs, least loaded, what it does when a leg fails, and what a client that leaves
causes.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvflow.http.app import MAX_BODY_BYTES
from kvflow.http.large_bodies import MAX_REST_BYTES
from kvflow.protocols.errors import Cause, Code
from kvflow.router import legs, pairs
from kvflow.router.kvflow_engine import _Fields, _room_count
from kvflow.router.router import Router
from kvflow.router.routes import router_app
from kvflow.router.workers import Worker
from tests.server.fake_service import FakeService, Meeting, Role, Server, served

Session = aiohttp.ClientSession

BODY = {"text": "w1", "sampling_params": {"max_new_tokens": 3}}
MakeRouter = Callable[[list[Server], list[Server]], Awaitable[Server]]


@pytest.fixture
async def routed() -> AsyncIterator[MakeRouter]:
    async with AsyncExitStack() as stack:

        async def make(prefills: list[Server], decodes: list[Server]) -> Server:
            router = Router(
                [s.url for s in prefills], [s.url for s in decodes], retry_timeout_s=0, poll_s=3600
            )
            stack.push_async_callback(router.close)
            await router.start()
            return await stack.enter_async_context(served(router_app(router)))

        yield make


@pytest.fixture
async def server(routed: MakeRouter, prefill_server: Server, decode_server: Server) -> Server:
    return await routed([prefill_server], [decode_server])


async def post(session: Session, server: Server, document: Any = BODY) -> tuple[int, Any]:
    async with session.post(server.make_url("/generate"), json=document) as answer:
        return answer.status, json.loads(await answer.read())


async def test_both_legs_get_the_same_room_and_decode_answers(
    server: Server, prefill: Role, decode: Role, session: Session
) -> None:
    async with session.post(server.make_url("/generate"), json=BODY) as answer:
        document = json.loads(await answer.read())
        room = int(answer.headers["X-Kvflow-Room"])
    assert document["output_ids"] == [2, 3, 4]
    assert (
        [request.room for request in prefill.service.requests]
        == [request.room for request in decode.service.requests]
        == [room]
    )
    assert 0 <= room < 1 << 63
    assert decode.service.requests[0].prefill == "127.0.0.1:8998"


async def test_a_client_cannot_choose_the_meeting(
    server: Server, decode: Role, session: Session
) -> None:
    status, _ = await post(
        session,
        server,
        {**BODY, "bootstrap_host": "evil", "bootstrap_room": 1, "bootstrap_port": 1},
    )
    assert status == 200
    assert decode.service.requests[0].prefill == "127.0.0.1:8998"


async def test_streams_come_through_event_by_event(
    server: Server, decode: Role, session: Session
) -> None:
    decode.service.gate.clear()
    async with session.post(server.make_url("/generate"), json={**BODY, "stream": True}) as answer:
        first = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 5)
        assert json.loads(first.removeprefix(b"data: "))["output_ids"] == [2]
        decode.service.gate.set()
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_several_rooms_for_several_completions(
    server: Server, decode: Role, session: Session
) -> None:
    document = {"text": ["w1", "w2"], "sampling_params": {"max_new_tokens": 1, "n": 2}}
    status, answers = await post(session, server, document)
    assert status == 200
    assert [answer["output_ids"] for answer in answers] == [[2], [2], [3], [3]]
    assert len({request.room for request in decode.service.requests}) == 4


@pytest.mark.parametrize(
    ("body", "rooms"),
    [
        (b'{"text": "w1"}', 1),
        (b'{"text": ["w1", "w2"]}', 2),
        (b'{"input_ids": [1, 2, 3]}', 1),
        (b'{"input_ids": [[1], [2], [3]], "n": 2}', 6),
        (b'{"prompt": [[1], [2]], "n": 3}', 6),
        (b'{"text": "w1", "sampling_params": {"n": 4}}', 4),
        (b'{"text": ["w1", "w2"], "sampling_params": [{"n": 2}, {"n": 2}]}', 4),
        (b'{"text": "w1", "sampling_params": []}', 1),
    ],
)
def test_every_choice_of_every_prompt_has_a_room(body: bytes, rooms: int) -> None:
    assert _room_count(msgspec.json.decode(body, type=_Fields)) == rooms


@pytest.mark.parametrize("longest", [False, True], ids=["many short values", "one long value"])
async def test_workers_take_what_their_router_takes(
    prefill_server: Server, decode_server: Server, session: Session, longest: bool
) -> None:
    """The rooms of many completions make a body larger on its way.

    `user` is a field that nobody reads.
    """
    limit = MAX_BODY_BYTES if longest else MAX_REST_BYTES
    least = {"prompt": "w1", "n": 128, "max_tokens": 1}

    def body(size: int) -> io.BytesIO:
        user = "x" if longest else ["x", *["y" * 200] * ((size - 100) // 204)]
        short = json.dumps({**least, "user": user}).encode()
        return io.BytesIO(short.replace(b'x"', b"x" * (size - len(short) + 1) + b'"', 1))

    router = Router([prefill_server.url], [decode_server.url], retry_timeout_s=0, poll_s=3600)
    await router.start()
    headers = {"Content-Type": "application/json"}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.close)
        server = await stack.enter_async_context(served(router_app(router)))
        for size, wanted in ((limit, 200), (limit + 1, 413 if longest else 400), (limit, 200)):
            url = server.make_url("/v1/completions")
            async with session.post(url, data=body(size), headers=headers) as answer:
                found = json.loads(await answer.read())
            assert answer.status == wanted, found
        assert all(worker.up for worker in router.workers.all)
        assert [worker.served for worker in router.workers.all] == [2, 2]


async def test_the_least_loaded_worker_gets_the_request(
    routed: MakeRouter, meeting: Meeting, prefill_server: Server, session: Session
) -> None:
    busy, free = (Role(FakeService("decode", meeting)) for _ in range(2))
    async with served(busy.app) as first, served(free.app) as second:
        server = await routed([prefill_server], [first, second])
        busy.service.gate.clear()
        held = asyncio.create_task(post(session, server))
        await asyncio.wait_for(busy.service.started.wait(), 5)
        for _ in range(3):
            assert (await post(session, server))[0] == 200
        assert (len(busy.service.requests), len(free.service.requests)) == (1, 3)
        busy.service.gate.set()
        assert (await asyncio.wait_for(held, 5))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_when_prefill_refuses_decodes_leg_is_dropped(
    server: Server, prefill: Role, decode: Role, session: Session, stream: bool
) -> None:
    prefill.service.failure = Cause(Code.CAPACITY, "prefill is full")
    status, answer = await post(session, server, {**BODY, "stream": stream})
    assert status == 503
    assert "prefill is full" in answer["error"]["message"]
    await asyncio.wait_for(decode.service.ended.get(), 5)
    await asyncio.wait_for(decode.pipeline.idle.wait(), 5)


async def test_when_decode_refuses_prefills_leg_is_dropped(
    server: Server, prefill: Role, decode: Role, session: Session
) -> None:
    prefill.service.gate.clear()
    decode.service.failure = Cause(Code.CAPACITY, "decode is full")
    status, answer = await post(session, server)
    assert status == 503
    assert "decode is full" in answer["error"]["message"]
    await asyncio.wait_for(prefill.service.ended.get(), 5)
    await asyncio.wait_for(prefill.pipeline.idle.wait(), 5)


async def test_prefills_echo_of_decodes_failure_does_not_hide_it(
    server: Server, prefill: Role, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "ROOT_CAUSE_WAIT_S", 0.05)
    prefill.service.failure = Cause(Code.CLIENT_GONE, "decode aborted")
    status, answer = await post(session, server)
    assert status == 502
    assert answer["error"]["message"] == "decode ended the room and gave no reason within 0.05 s"


@pytest.mark.parametrize("held", ["prefill", "decode"])
async def test_a_client_that_leaves_drops_both_legs(
    server: Server, prefill: Role, decode: Role, session: Session, held: str
) -> None:
    (prefill if held == "prefill" else decode).service.gate.clear()
    request = asyncio.create_task(post(session, server, {**BODY, "stream": True}))
    await asyncio.wait_for(decode.service.started.wait(), 5)
    await asyncio.wait_for(prefill.service.started.wait(), 5)
    request.cancel()
    for role in (prefill, decode):
        await asyncio.wait_for(role.service.ended.get(), 5)
        await asyncio.wait_for(role.pipeline.idle.wait(), 5)


async def test_a_worker_that_is_gone_is_left_out_and_another_one_serves(
    routed: MakeRouter,
    meeting: Meeting,
    prefill_server: Server,
    decode_server: Server,
    session: Session,
) -> None:
    gone = Role(FakeService("decode", meeting))
    async with served(gone.app) as first:
        server = await routed([prefill_server], [first, decode_server])
    for _ in range(3):
        assert (await post(session, server))[0] == 200
    async with session.get(server.make_url("/server_info")) as answer:
        found = json.loads(await answer.read())
    assert [worker["up"] for worker in found.pop("workers")] == [True, False, True]
    assert found == {
        "role": "router",
        "served_model_name": "fake",
        "draining": False,
        "running": 0,
        "waiting": 0,
    }


async def test_nobody_left_is_a_clear_error(
    routed: MakeRouter, prefill: Role, decode_server: Server, session: Session
) -> None:
    async with served(prefill.app) as first:
        server = await routed([first], [decode_server])
    status, answer = await post(session, server)
    assert status == 502
    assert (
        "prefill" in answer["error"]["message"]
        and "cannot be reached" in answer["error"]["message"]
    )
    status, answer = await post(session, server)
    assert status == 503
    assert "no prefill worker is up (1 known): prefill http" in answer["error"]["message"]
    async with session.get(server.make_url("/health")) as health:
        assert health.status == 503


async def test_a_decode_that_dies_in_mid_stream_is_an_error_event(
    routed: MakeRouter, prefill_server: Server, session: Session
) -> None:
    seen = asyncio.Event()

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"disaggregation_mode": "decode"})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def generate(http: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(http)
        await out.write(b'data: {"n": 1}\n\n')
        await seen.wait()
        await out.write(b'data: {"half')
        assert http.transport is not None
        http.transport.abort()
        return out

    app = web.Application()
    app.add_routes(
        [web.get("/server_info", info), web.get("/health", health), web.post("/generate", generate)]
    )
    async with served(app) as dying:
        server = await routed([prefill_server], [dying])
        async with session.post(
            server.make_url("/generate"), json={**BODY, "stream": True}
        ) as answer:
            assert await answer.content.readuntil(b"\n\n") == b'data: {"n": 1}\n\n'
            seen.set()
            last = (await answer.read()).decode()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "peer_lost"
    assert last.endswith("\n\n")


async def test_workers_of_the_wrong_role_are_not_used(
    routed: MakeRouter, prefill_server: Server, decode_server: Server, session: Session
) -> None:
    server = await routed([decode_server], [prefill_server])
    async with session.get(server.make_url("/health")) as answer:
        assert answer.status == 503
        assert (
            "it is not a prefill worker: its disaggregation_mode is 'decode'"
            in json.loads(await answer.read())["error"]["message"]
        )


@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b"\xff", b'{"n": "x", "prompt": "a"}', b'{"prompt": [[1]], "n": 100000}']
)
async def test_bodies_that_cannot_be_routed_are_400(
    server: Server, session: Session, raw: bytes
) -> None:
    async with session.post(server.make_url("/v1/completions"), data=raw) as answer:
        assert answer.status == 400


async def test_fan_out_and_proxied_routes(server: Server, decode: Role, session: Session) -> None:
    status, _ = await post(session, server)
    assert status == 200
    room = decode.service.requests[0].room
    async with session.get(server.make_url(f"/rooms/{room}")) as answer:
        assert set(json.loads(await answer.read())) == {"prefill", "decode"}
    async with session.get(server.make_url("/get_load")) as answer:
        assert len(json.loads(await answer.read())) == 2
    async with session.get(server.make_url("/model_info")) as answer:
        assert json.loads(await answer.read())["model_path"] == "fake/model"
    async with session.post(server.make_url("/flush_cache")) as answer:
        assert answer.status == 200
    async with session.get(server.make_url("/rooms/1")) as answer:
        assert answer.status == 404


async def test_a_failed_write_followed_by_a_cancellation_still_drops_both_legs(
    prefill_server: Server, decode: Role, decode_server: Server, session: Session
) -> None:
    """What a client that leaves a full connection causes: the handler's write fails, and then it is
    cancelled.
    """
    worker = Worker("decode", decode_server.url)
    other = Worker("prefill", prefill_server.url)
    body = json.dumps({**BODY, "stream": True, "bootstrap_room": 1, "bootstrap_host": "h"}).encode()
    decode.service.gate.clear()
    held = [
        legs.Leg(session, one, "/generate", body, {"Content-Type": "application/json"})
        for one in (other, worker)
    ]

    async def handler() -> None:
        async with pairs.together(held[0], held[1], {}) as both:
            await both.answer()
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            raise ConnectionResetError

    with pytest.raises((ConnectionResetError, asyncio.CancelledError)):
        await asyncio.create_task(handler())
    assert (worker.running, other.running) == (0, 0)
    await asyncio.wait_for(decode.service.ended.get(), 5)
    await asyncio.wait_for(decode.pipeline.idle.wait(), 5)


async def test_a_request_may_take_longer_than_any_limit_of_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router(["http://127.0.0.1:1"], ["http://127.0.0.1:2"])
    timeout = router._session.timeout
    assert (timeout.total, timeout.sock_read) == (None, None) and timeout.sock_connect
    await router.close()
