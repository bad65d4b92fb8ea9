"""What the router does with a request whose pair drains, is full, dies, or is away for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvflow.protocols.errors import Cause, Code
from kvflow.router.kvflow_engine import read_identity
from kvflow.router.workers import LONGEST_BACKOFF_S, Worker
from kvflow.testing.pair import until
from tests.fakes.servers import Front, Step, events_of, labelled, scripted, stream_of
from tests.fakes.service import BODY, FakeService, Meeting, Role, body
from tests.ports import free_port

STREAMED = {**BODY, "stream": True}
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
ONE = b'data: {"n": 1}\n\n'


def error_event(code: str, message: str) -> bytes:
    return b'data: {"error": {"code": "%b", "message": "%b"}}\n\n' % (
        code.encode(),
        message.encode(),
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", RETRIED)
async def test_another_decode_serves_what_one_refuses(
    prefill: Role, decode: Role, spare: Role, code: Code, stream: bool
) -> None:
    decode.service.failure = Cause(code, "not here")
    async with Front([prefill], [decode, spare]) as front:
        ask: Callable[..., Any] = front.events if stream else front.post
        answer = await ask("/generate", BODY)
        assert (answer[-1] if stream else answer)["output_ids"] == [2, 3, 4]
        [refused], [served] = decode.service.requests, spare.service.requests
        assert refused.room != served.room
        assert labelled(await front.metrics(), "kvflow_retries_total") == {(code,): 1}


@pytest.mark.parametrize(("code", "status"), FINAL.items())
async def test_what_another_pair_would_repeat_is_answered(
    prefill: Role, decode: Role, spare: Role, code: Code, status: int
) -> None:
    decode.service.failure = Cause(code, "so it is")
    async with Front([prefill], [decode, spare]) as front:
        error = await front.refused(status, "/generate", BODY)
    assert error["code"] == code and "so it is" in error["message"]
    assert not spare.service.requests


async def test_a_draining_prefill_is_left_out_and_its_decode_leg_closed(
    meeting: Meeting, prefill: Role, decode: Role
) -> None:
    async with (
        Role(FakeService("prefill", meeting)) as other,
        Front([prefill, other], [decode]) as front,
    ):
        prefill.pipeline.draining = True
        await front.post("/generate", BODY)
        [(dropped, _)] = prefill.service.refused
        rooms = {request.room for request in decode.service.requests}
        assert rooms - {dropped} == {other.service.requests[0].room}, "each try has a room"
        await decode.over(*rooms)  # the dropped leg may have ended before it began
        await until(lambda: not front.worker(prefill).up)
        await front.post("/generate", BODY)
        assert len(prefill.service.refused) == 1, "a worker that drains is not asked again"


async def test_a_decode_with_a_full_queue_is_passed_over(
    meeting: Meeting, prefill: Role, spare: Role
) -> None:
    async with (
        Role(FakeService("decode", meeting), max_requests=1) as full,
        Front([prefill], [full, spare]) as front,
    ):
        holding = asyncio.create_task(full.post("/generate", body()))
        await full.begun()
        await front.post("/generate", BODY)
        assert len(full.service.refused) == 1 and len(spare.service.requests) == 1
        assert front.worker(full).up, "a full worker is no lost one"
        meeting.come(7)
        await holding


async def test_when_every_pair_is_full_the_client_is_told_when_to_come_back(
    prefill: Role, decode: Role, spare: Role
) -> None:
    for role in (decode, spare):
        role.service.failure = Cause(Code.CAPACITY, "full")
    async with Front([prefill], [decode, spare]) as front:
        answer = await front.call("POST", "/generate", BODY)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert len(decode.service.requests) == len(spare.service.requests) == 1


async def test_the_one_pair_that_has_room_is_found(
    meeting: Meeting, prefill: Role, spare: Role, decode: Role
) -> None:
    prefill.service.failure = spare.service.failure = Cause(Code.CAPACITY, "full")
    async with (
        Role(FakeService("prefill", meeting)) as other,
        Front([prefill, other], [decode, spare]) as front,
    ):
        for _ in range(8):
            await front.post("/generate", BODY)


DIED = error_event("peer_lost", "prefill died")
FIRST_WORDS: dict[str, tuple[Step, ...]] = {
    "cut in its head": (b'data: {"te', None),
    "cut before its first event": (b": ka\n\n", None),
    "ended before its first event": (b"\n\n: ka\n\n",),
    "error event after empty lines": (b"\n", b"\n\n\n", DIED),
    "error event": (b": ka\n\n: ka\n\n", DIED),
}


@pytest.mark.parametrize("steps", FIRST_WORDS.values(), ids=FIRST_WORDS.keys())
async def test_a_stream_that_fails_before_its_first_token_is_one_stream_to_its_client(
    prefill: Role, decode: Role, steps: tuple[Step, ...]
) -> None:
    asked = asyncio.Event()
    async with (
        scripted(stream_of(asked.set, *steps)) as failing,
        Front([prefill], [failing, decode]) as front,
    ):
        grown = [event["output_ids"] for event in await front.events("/generate", BODY)]
    assert asked.is_set()
    assert grown[-1] == [2, 3, 4] and all(ids == grown[-1][: len(ids)] for ids in grown)


async def test_a_stream_that_began_and_finds_no_pair_ends_with_an_error_event(
    prefill: Role,
) -> None:
    full = scripted(stream_of(b": ka\n\n", error_event("capacity", "full")))
    async with full, Front([prefill], [full]) as front:
        [event] = await front.events("/generate", BODY)
    assert (event["error"]["code"], event["error"]["message"]) == ("capacity", "full")


@pytest.mark.parametrize("silence", [b": ka\n\n", b"\n\n"])
async def test_headers_and_silence_reach_the_client_before_the_first_token(
    prefill: Role, silence: bytes
) -> None:
    seen = asyncio.Event()
    async with (
        scripted(stream_of(silence, seen, ONE)) as slow,
        Front([prefill], [slow]) as front,
        front.opened("/generate", STREAMED) as answer,
    ):
        assert await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 20) == silence
        seen.set()
        assert await answer.read() == ONE


async def test_nothing_is_tried_again_after_the_first_token(prefill: Role, spare: Role) -> None:
    seen = asyncio.Event()
    async with (
        scripted(stream_of(ONE, b'data: {"ha', seen, None)) as dying,
        Front([prefill], [dying, spare]) as front,
        front.opened("/generate", STREAMED) as answer,
    ):
        assert await answer.content.readuntil(b"\n\n") == ONE
        seen.set()
        rest = await answer.read()
    [last] = events_of(rest)
    assert rest.startswith(b"data: {") and rest.endswith(b"\n\n")
    assert last["error"]["code"] == "peer_lost" and "was cut off" in last["error"]["message"]
    assert not spare.service.requests


async def test_a_prefill_that_dies_while_decode_sends_comments_is_noticed(
    prefill: Role, decode: Role
) -> None:
    begun = asyncio.Event()
    async with (
        scripted(stream_of(begun, None), "prefill") as dying,
        scripted(stream_of(b": ka\n\n", begun.set, asyncio.Event())) as silent,
        Front([dying, prefill], [silent, decode]) as front,
    ):
        events = await asyncio.wait_for(front.events("/generate", BODY), 20)
        assert events[-1]["output_ids"] == [2, 3, 4]


@pytest.mark.parametrize("early", [False, True], ids=["refused by 503", "nobody there"])
async def test_a_worker_that_comes_back_at_its_address_is_used_at_once(
    meeting: Meeting, prefill: Role, early: bool
) -> None:
    # While nobody has a port that the kernel gave, another test may get it.
    old_role = Role(FakeService("decode", meeting), port=free_port())
    async with old_role as old, Front([prefill], [old]) as front:
        await front.post("/generate", BODY)
        old.pipeline.draining = True
        if early:
            await old.stop()
        asking = asyncio.create_task(front.post("/generate", BODY))
        await until(lambda: front.router.waiting)
        await old.stop()
        async with Role(FakeService("decode", meeting), port=old.port):
            answer = await asyncio.wait_for(asking, 20)
        assert (answer["output_ids"], front.router.waiting) == ([2, 3, 4], 0)


async def test_the_wait_for_a_worker_is_bounded_in_time_and_number(
    prefill: Role, decode: Role
) -> None:
    await decode.stop()
    async with Front([prefill], [decode], retry_timeout_s=3600, max_waiting=1) as front:
        first = asyncio.create_task(front.post("/generate", BODY))
        await until(lambda: front.router.waiting, 20)
        error = await asyncio.wait_for(front.refused(503, "/generate", BODY), 20)
        assert error["code"] == "capacity" and "no decode worker is up" in error["message"]
        assert not first.done() and front.router.waiting == 1
        first.cancel()
        await asyncio.wait([first])
    async with Front([prefill], [decode], retry_timeout_s=0.2, max_waiting=1) as front:
        await asyncio.wait_for(front.refused(503, "/generate", BODY), 20)


async def test_the_last_error_is_told_where_a_check_comes_before_it_and_leaves_no_worker(
    prefill: Role, decode: Role
) -> None:
    """A check may find that decode lost its prefill before the failed request has its answer."""
    decode.service.gate.clear()
    async with Front([prefill], [decode], retry_timeout_s=0.2) as front:
        asking = asyncio.create_task(front.refused(502, "/generate", BODY))
        await until(lambda: decode.service.held)
        decode.service.failure = Cause(Code.PEER_LOST, "prefill is silent")
        decode.service.unavailable_reason = "8 pages are in quarantine, more than 0: no new room"
        front.worker(decode).check_due.set()
        await until(lambda: not front.worker(decode).up)
        decode.service.gate.set()
        assert (await asyncio.wait_for(asking, 20))["code"] == Code.PEER_LOST
        assert len(decode.service.requests) == 1
        error = await asyncio.wait_for(front.refused(503, "/generate", BODY), 20)
        assert "8 pages are in quarantine" in error["message"]


async def test_a_client_that_leaves_while_its_request_waits_is_forgotten(
    prefill: Role, decode: Role
) -> None:
    await decode.stop()
    async with Front([prefill], [decode]) as front:
        asking = asyncio.create_task(front.post("/generate", BODY))
        await until(lambda: front.router.waiting)
        asking.cancel()
        await asyncio.wait_for(front.router.idle.wait(), 20)
        assert front.router.waiting == 0


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
    prefill: Role, decode: Role, spare: Role
) -> None:
    async with Front([prefill], [decode, spare]) as front:
        worker = front.worker(decode)
        identity = {"disaggregation_mode": "decode", "incarnation": worker.incarnation}
        for _ in range(10):
            worker.mark_lost("reset", asyncio.get_running_loop().time())
        worker.mark_up(read_identity(identity))
        for _ in range(3):
            await front.post("/generate", BODY)
        assert len(spare.service.requests) == 3
        front.worker(spare).mark_down("away")
        await front.post("/generate", BODY)
        assert not worker.in_backoff(asyncio.get_running_loop().time()), "it has served a request"


async def test_what_does_not_finish_before_the_router_leaves_is_told_so(
    front: Front, decode: Role
) -> None:
    decode.service.gate.clear()
    async with front.opened("/generate", STREAMED) as streaming:
        assert b"data: {" in await asyncio.wait_for(streaming.content.readuntil(b"\n\n"), 20)
        asking = asyncio.create_task(front.refused(503, "/generate", BODY))
        await until(lambda: len(decode.service.requests) == 2)
        front.router.end_requests()
        error = await asyncio.wait_for(asking, 20)
        [last] = events_of(await streaming.read())
    for one in (error, last["error"]):
        assert one["code"] == "shutdown" and "did not finish in time" in one["message"]
    await decode.over(*(request.room for request in decode.service.requests))


async def test_a_decode_that_cuts_its_streams_off_is_in_backoff(prefill: Role) -> None:
    """It counted as one that had served them, and got its share of the next ones."""
    seen = asyncio.Event()
    cut_off = scripted(stream_of(b'data: {"text": "w2"}\n\n', seen, None))
    async with cut_off, Front([prefill], [cut_off]) as front:
        for _ in range(5):
            seen.clear()
            async with front.opened("/generate", STREAMED) as answer:
                assert b"w2" in await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 20)
                seen.set()
                assert b"peer_lost" in await asyncio.wait_for(answer.read(), 20)
        await asyncio.wait_for(front.router.idle.wait(), 20)
        assert front.worker(cut_off).in_backoff(asyncio.get_running_loop().time())
