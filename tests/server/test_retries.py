"""What the router does with a request whose pair drains, is full, dies, or is away for a while."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvflow.http.listening import bound_socket, listening_on
from kvflow.protocols.errors import Cause, Code
from kvflow.router.kvflow_engine import read_identity
from kvflow.router.router import Router
from kvflow.router.routes import router_app
from kvflow.router.workers import LONGEST_BACKOFF_S, Worker
from tests.server.fake_service import FakeService, Meeting, Role, Server, served

Session = aiohttp.ClientSession
BODY = {"text": "w1", "sampling_params": {"max_new_tokens": 3}}
RETRIED = [
    Code.SHUTDOWN,
    Code.CAPACITY,
    Code.PEER_LOST,
    Code.RENDEZVOUS,
    Code.REFUSED,
    Code.TRANSFER_ERROR,
]
FINAL = {
    Code.BAD_REQUEST: 400,
    Code.ENGINE_ERROR: 500,
    Code.DEADLINE: 504,
    Code.PROMPT_MISMATCH: 400,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routed:
    """A router, and where it answers."""

    def __init__(self, router: Router, server: Server) -> None:
        self.router, self.server = router, server

    def worker(self, server: Server) -> Worker:
        return next(worker for worker in self.router.workers.all if worker.url == server.url)


@asynccontextmanager
async def routed(
    prefills: list[Server], decodes: list[Server], **options: Any
) -> AsyncIterator[Routed]:
    router = Router(
        [s.url for s in prefills], [s.url for s in decodes], **{"poll_s": 3600, **options}
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.close)
        await router.start()
        yield Routed(router, await stack.enter_async_context(served(router_app(router))))


@pytest.fixture
async def spare(meeting: Meeting) -> Role:
    return Role(FakeService("decode", meeting))


@pytest.fixture
async def spare_server(spare: Role) -> AsyncIterator[Server]:
    async with served(spare.app) as server:
        yield server


async def post(session: Session, server: Server, **changes: Any) -> tuple[int, Any]:
    async with session.post(server.make_url("/generate"), json={**BODY, **changes}) as answer:
        raw = await answer.read()
        return answer.status, raw if answer.content_type == "text/event-stream" else json.loads(raw)


def events(raw: bytes) -> list[Any]:
    lines = [line for line in raw.decode().split("\n\n") if line and not line.startswith(":")]
    return [
        line if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
        for line in lines
    ]


def worker_app(generate: Handler, role: str = "decode", incarnation: str = "1") -> web.Application:
    """A healthy worker whose completions are `generate`."""

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"disaggregation_mode": role, "incarnation": incarnation})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes(
        [web.get("/server_info", info), web.get("/health", health), web.post("/generate", generate)]
    )
    return app


async def streamed(http: web.Request, *pieces: bytes) -> web.StreamResponse:
    """A stream of these pieces, and the end of the connection in the place of a `b""`."""
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await out.prepare(http)
    for piece in pieces:
        if not piece:
            assert http.transport is not None
            http.transport.abort()
            break
        await out.write(piece)
    return out


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", RETRIED)
async def test_another_decode_serves_what_one_refuses(
    prefill_server: Server,
    decode: Role,
    decode_server: Server,
    spare: Role,
    spare_server: Server,
    session: Session,
    code: Code,
    stream: bool,
) -> None:
    decode.service.failure = Cause(code, "not here")
    async with routed([prefill_server], [decode_server, spare_server]) as r:
        status, answer = await post(session, r.server, stream=stream)
        assert status == 200
        assert (events(answer)[-2] if stream else answer)["output_ids"] == [2, 3, 4]
        assert len(decode.service.requests) == len(spare.service.requests) == 1
        assert decode.service.requests[0].room != spare.service.requests[0].room
        async with session.get(r.server.make_url("/metrics")) as metrics:
            assert (
                f'kvflow_retries_total{{code="{code}"}} 1.0' in (await metrics.text()).splitlines()
            )


@pytest.mark.parametrize(("code", "status"), FINAL.items())
async def test_what_another_pair_would_repeat_is_answered(
    prefill_server: Server,
    decode: Role,
    decode_server: Server,
    spare: Role,
    spare_server: Server,
    session: Session,
    code: Code,
    status: int,
) -> None:
    decode.service.failure = Cause(code, "so it is")
    async with routed([prefill_server], [decode_server, spare_server]) as r:
        got, answer = await post(session, r.server)
    assert (got, answer["error"]["code"]) == (status, code)
    assert "so it is" in answer["error"]["message"]
    assert not spare.service.requests


async def test_a_draining_prefill_is_left_out_and_its_decode_leg_closed(
    meeting: Meeting,
    prefill: Role,
    prefill_server: Server,
    decode: Role,
    decode_server: Server,
    session: Session,
) -> None:
    other = Role(FakeService("prefill", meeting))
    async with (
        served(other.app) as other_server,
        routed([prefill_server, other_server], [decode_server]) as r,
    ):
        prefill.pipeline.draining = True
        assert (await post(session, r.server))[0] == 200
        first, second = decode.service.requests
        assert first.room != second.room
        assert await asyncio.wait_for(decode.service.ended.get(), 5) == first.room
        assert [room for room, _ in prefill.service.refused] == [first.room]
        async with asyncio.timeout(5):
            while r.worker(prefill_server).up:
                await asyncio.sleep(0.01)
        assert (await post(session, r.server))[0] == 200
        assert len(prefill.service.refused) == 1, "a worker that drains is not asked again"


async def test_a_decode_with_a_full_queue_is_passed_over(
    meeting: Meeting, prefill_server: Server, spare: Role, spare_server: Server, session: Session
) -> None:
    full = Role(FakeService("decode", meeting), max_requests=1)
    async with (
        served(full.app) as full_server,
        routed([prefill_server], [full_server, spare_server]) as r,
    ):
        held = {"text": "w1", "bootstrap_room": 1, "bootstrap_host": "h"}
        holding = asyncio.create_task(session.post(full_server.make_url("/generate"), json=held))
        await asyncio.wait_for(full.service.started.wait(), 5)
        assert (await post(session, r.server))[0] == 200
        assert len(full.service.refused) == 1 and len(spare.service.requests) == 1
        assert r.worker(full_server).up, "a full worker is no lost one"
        meeting.of(1).set_result(None)
        assert (await holding).status == 200


async def test_when_every_pair_is_full_the_client_is_told_when_to_come_back(
    prefill_server: Server,
    decode: Role,
    decode_server: Server,
    spare: Role,
    spare_server: Server,
    session: Session,
) -> None:
    for role in (decode, spare):
        role.service.failure = Cause(Code.CAPACITY, "full")
    async with (
        routed([prefill_server], [decode_server, spare_server]) as r,
        session.post(r.server.make_url("/generate"), json=BODY) as answer,
    ):
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert len(decode.service.requests) == len(spare.service.requests) == 1


async def test_the_one_pair_that_has_room_is_found(
    meeting: Meeting,
    prefill: Role,
    prefill_server: Server,
    spare: Role,
    spare_server: Server,
    decode_server: Server,
    session: Session,
) -> None:
    other = Role(FakeService("prefill", meeting))
    prefill.service.failure = spare.service.failure = Cause(Code.CAPACITY, "full")
    async with (
        served(other.app) as other_server,
        routed([prefill_server, other_server], [decode_server, spare_server]) as r,
    ):
        for _ in range(8):
            assert (await post(session, r.server))[0] == 200


FIRST_WORDS = {
    "cut in its head": (b'data: {"te', b""),
    "cut before its first event": (b": ka\n\n", b""),
    "ended before its first event": (b"\n\n: ka\n\n",),
    "error event after empty lines": (
        b"\n",
        b"\n\n\n",
        b'data: {"error": {"code": "peer_lost", "message": "prefill died"}}\n\n',
    ),
    "error event": (
        b": ka\n\n: ka\n\n",
        b'data: {"error": {"code": "peer_lost", "message": "prefill died"}}\n\n',
    ),
}


@pytest.mark.parametrize("pieces", FIRST_WORDS.values(), ids=FIRST_WORDS.keys())
async def test_a_stream_that_fails_before_its_first_token_is_one_stream_to_its_client(
    prefill_server: Server, decode_server: Server, session: Session, pieces: tuple[bytes, ...]
) -> None:
    asked = asyncio.Event()

    async def generate(http: web.Request) -> web.StreamResponse:
        asked.set()
        return await streamed(http, *pieces)

    async with (
        served(worker_app(generate)) as failing,
        routed([prefill_server], [failing, decode_server]) as r,
    ):
        status, raw = await post(session, r.server, stream=True)
    assert asked.is_set()
    assert status == 200
    grown = [event["output_ids"] for event in events(raw)[:-1]]
    assert grown[-1] == [2, 3, 4] and all(ids == grown[-1][: len(ids)] for ids in grown)
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_began_and_finds_no_pair_ends_with_an_error_event(
    prefill_server: Server, session: Session
) -> None:
    async def generate(http: web.Request) -> web.StreamResponse:
        return await streamed(
            http, b": ka\n\n", b'data: {"error": {"code": "capacity", "message": "full"}}\n\n'
        )

    async with served(worker_app(generate)) as full, routed([prefill_server], [full]) as r:
        status, raw = await post(session, r.server, stream=True)
    assert status == 200
    [event] = events(raw)
    assert (event["error"]["code"], event["error"]["message"]) == ("capacity", "full")


@pytest.mark.parametrize("silence", [b": ka\n\n", b"\n\n"])
async def test_headers_and_silence_reach_the_client_before_the_first_token(
    prefill_server: Server, session: Session, silence: bytes
) -> None:
    seen = asyncio.Event()

    async def generate(http: web.Request) -> web.StreamResponse:
        out = await streamed(http, silence)
        await seen.wait()
        await out.write(b'data: {"n": 1}\n\n')
        return out

    async with (
        served(worker_app(generate)) as slow,
        routed([prefill_server], [slow]) as r,
        session.post(r.server.make_url("/generate"), json={**BODY, "stream": True}) as answer,
    ):
        assert await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 5) == silence
        seen.set()
        assert await answer.read() == b'data: {"n": 1}\n\n'


async def test_nothing_is_tried_again_after_the_first_token(
    prefill_server: Server, spare: Role, spare_server: Server, session: Session
) -> None:
    seen = asyncio.Event()

    async def generate(http: web.Request) -> web.StreamResponse:
        out = await streamed(http, b'data: {"n": 1}\n\n', b'data: {"ha')
        await seen.wait()
        assert http.transport is not None
        http.transport.abort()
        return out

    async with (
        served(worker_app(generate)) as dying,
        routed([prefill_server], [dying, spare_server]) as r,
        session.post(r.server.make_url("/generate"), json={**BODY, "stream": True}) as answer,
    ):
        assert await answer.content.readuntil(b"\n\n") == b'data: {"n": 1}\n\n'
        seen.set()
        [last] = events(await answer.read())
    assert last["error"]["code"] == "peer_lost" and "was cut off" in last["error"]["message"]
    assert not spare.service.requests


async def test_a_prefill_that_dies_while_decode_sends_comments_is_noticed(
    meeting: Meeting, prefill_server: Server, decode: Role, decode_server: Server, session: Session
) -> None:
    begun = asyncio.Event()

    async def dying(http: web.Request) -> web.StreamResponse:
        await begun.wait()
        assert http.transport is not None
        http.transport.abort()
        return web.Response()

    async def silent(http: web.Request) -> web.StreamResponse:
        out = await streamed(http, b": ka\n\n")
        begun.set()
        await asyncio.Event().wait()
        return out

    async with (
        served(worker_app(dying, "prefill")) as first,
        served(worker_app(silent)) as other,
        routed([first, prefill_server], [other, decode_server]) as r,
    ):
        status, raw = await asyncio.wait_for(post(session, r.server, stream=True), 5)
        assert status == 200 and events(raw)[-2]["output_ids"] == [2, 3, 4]


@pytest.mark.parametrize("early", [False, True], ids=["refused by 503", "nobody there"])
async def test_a_worker_that_comes_back_at_its_address_is_used_at_once(
    meeting: Meeting, prefill_server: Server, session: Session, early: bool
) -> None:
    made = bound_socket("127.0.0.1", 0, "--port")
    port = made.getsockname()[1]
    old = Role(FakeService("decode", meeting))
    async with AsyncExitStack() as stack:
        life = await stack.enter_async_context(AsyncExitStack())
        await life.enter_async_context(listening_on(old.app, made))
        r = await stack.enter_async_context(routed([prefill_server], [Server(port)]))
        assert (await post(session, r.server))[0] == 200
        old.pipeline.draining = True
        if early:
            await life.aclose()
        asking = asyncio.create_task(post(session, r.server))
        async with asyncio.timeout(5):
            while not r.router.waiting:
                await asyncio.sleep(0.01)
        await life.aclose()
        again = Role(FakeService("decode", meeting))
        await stack.enter_async_context(
            listening_on(again.app, bound_socket("127.0.0.1", port, "--port"))
        )
        status, answer = await asyncio.wait_for(asking, 20)
        assert (status, answer["output_ids"]) == (200, [2, 3, 4])
        assert r.router.waiting == 0


async def test_the_wait_for_a_worker_is_bounded_in_time_and_number(
    prefill_server: Server, decode: Role, session: Session
) -> None:
    async with served(decode.app) as gone:
        pass
    async with routed([prefill_server], [gone], retry_timeout_s=3600, max_waiting=1) as r:
        first = asyncio.create_task(post(session, r.server))
        async with asyncio.timeout(20):
            while not r.router.waiting:
                await asyncio.sleep(0.01)
            status, answer = await post(session, r.server)
        assert (status, answer["error"]["code"]) == (503, "capacity")
        assert "no decode worker is up" in answer["error"]["message"]
        assert not first.done() and r.router.waiting == 1
        first.cancel()
        await asyncio.wait([first])
    async with routed([prefill_server], [gone], retry_timeout_s=0.2, max_waiting=1) as r:
        assert (await asyncio.wait_for(post(session, r.server), 20))[0] == 503


async def test_the_last_error_is_told_where_a_check_comes_before_it_and_leaves_no_worker(
    prefill_server: Server, decode: Role, decode_server: Server, session: Session
) -> None:
    """A decode that loses a prefill refuses what is new from that moment on.

    Where a check sees that before the failed request's own answer is there, no other try is made,
    and the client has waited for the first one."""
    decode.service.gate.clear()
    async with routed([prefill_server], [decode_server], retry_timeout_s=0.2) as r:
        asking = asyncio.create_task(post(session, r.server))
        async with asyncio.timeout(5):
            while not decode.service.held:
                await asyncio.sleep(0.01)
            decode.service.failure = Cause(Code.PEER_LOST, "prefill is silent")
            decode.service.unavailable_reason = (
                "8 pages are in quarantine, more than 0: no new room"
            )
            r.worker(decode_server).check_due.set()
            while r.worker(decode_server).up:
                await asyncio.sleep(0.01)
        decode.service.gate.set()
        status, answer = await asyncio.wait_for(asking, 5)
        assert (status, answer["error"]["code"]) == (502, Code.PEER_LOST)
        assert len(decode.service.requests) == 1
        status, answer = await asyncio.wait_for(post(session, r.server), 5)
        assert status == 503 and "8 pages are in quarantine" in answer["error"]["message"]


async def test_a_client_that_leaves_while_its_request_waits_is_forgotten(
    prefill_server: Server, decode: Role, session: Session
) -> None:
    async with served(decode.app) as gone:
        pass
    async with routed([prefill_server], [gone]) as r:
        asking = asyncio.create_task(post(session, r.server))
        async with asyncio.timeout(5):
            while not r.router.waiting:
                await asyncio.sleep(0.01)
            asking.cancel()
            await r.router.idle.wait()
        assert r.router.waiting == 0


async def test_the_backoff_of_a_worker_that_loses_every_connection_grows() -> None:
    worker = Worker("decode", "http://127.0.0.1:1")
    healthy = read_identity({"disaggregation_mode": "decode", "incarnation": "a"})
    worker.mark_up(healthy)
    backoffs = []
    for _ in range(20):
        worker.mark_lost("reset", 0.0)
        worker.mark_up(healthy)
        backoffs.append(next(s / 10 for s in range(1, 1000) if not worker.in_backoff(s / 10)))
    assert backoffs == sorted(backoffs) and backoffs[0] < 0.5 and backoffs[-1] == LONGEST_BACKOFF_S
    worker.mark_up(msgspec.structs.replace(healthy, incarnation="b"))
    assert not worker.in_backoff(0.0), "another process at the same address begins afresh"


async def test_a_worker_in_backoff_is_used_where_there_is_no_other(
    prefill_server: Server,
    decode_server: Server,
    spare: Role,
    spare_server: Server,
    session: Session,
) -> None:
    async with routed([prefill_server], [decode_server, spare_server]) as r:
        worker = r.worker(decode_server)
        identity = read_identity(
            {"disaggregation_mode": "decode", "incarnation": worker.incarnation}
        )
        for _ in range(10):
            worker.mark_lost("reset", asyncio.get_running_loop().time())
        worker.mark_up(identity)
        for _ in range(3):
            assert (await post(session, r.server))[0] == 200
        assert len(spare.service.requests) == 3
        r.worker(spare_server).mark_down("away")
        assert (await post(session, r.server))[0] == 200
        assert not worker.in_backoff(asyncio.get_running_loop().time()), "it has served a request"


async def test_what_does_not_finish_before_the_router_leaves_is_told_so(
    prefill_server: Server, decode: Role, decode_server: Server, session: Session
) -> None:
    decode.service.gate.clear()
    async with (
        routed([prefill_server], [decode_server]) as r,
        session.post(r.server.make_url("/generate"), json={**BODY, "stream": True}) as streaming,
    ):
        assert b"data: {" in await asyncio.wait_for(streaming.content.readuntil(b"\n\n"), 5)
        asking = asyncio.create_task(post(session, r.server))
        async with asyncio.timeout(5):
            while len(decode.service.requests) < 2:
                await asyncio.sleep(0.01)
        r.router.end_requests()
        status, answer = await asyncio.wait_for(asking, 5)
        [last] = events(await streaming.read())
    assert status == 503
    for error in (answer["error"], last["error"]):
        assert error["code"] == "shutdown" and "did not finish in time" in error["message"]
    for _ in range(2):
        await asyncio.wait_for(decode.service.ended.get(), 5)


async def test_a_decode_that_cuts_its_streams_off_is_in_backoff(
    prefill_server: Server, session: Session
) -> None:
    """It counted as one that had served them, and got its share of the next ones."""

    seen = asyncio.Event()

    async def cut_off(http: web.Request) -> web.StreamResponse:
        out = await streamed(http, b'data: {"text": "w2"}\n\n')
        await seen.wait()
        assert http.transport is not None
        http.transport.abort()
        return out

    async with (
        served(worker_app(cut_off)) as decode_server,
        routed([prefill_server], [decode_server]) as r,
    ):
        for _ in range(5):
            seen.clear()
            body = {**BODY, "stream": True}
            async with session.post(r.server.make_url("/generate"), json=body) as answer:
                assert b"w2" in await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 5)
                seen.set()
                assert b"peer_lost" in await asyncio.wait_for(answer.read(), 5)
        await asyncio.wait_for(r.router.idle.wait(), 5)
        assert r.worker(decode_server).in_backoff(asyncio.get_running_loop().time() + 0.5)
