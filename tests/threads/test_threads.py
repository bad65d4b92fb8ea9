"""Engines without an event loop: both nodes in threads, real sockets, the local plane."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import numpy as np
import pytest
import uvloop

import kvflow
from kvflow.node.threads.node import NodeThread
from kvflow.protocols.errors import OwnershipError
from kvflow.protocols.limits import Timing
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity, UnprovenLoan
from kvflow.transports.control.memory import Network
from kvflow.transports.data.fake import FakeNetwork, FakePlane, Fault

PAGES, PAGE_SIZE, PATIENCE_S = 32, 4, 20.0
PROMPT = list(range(10))  # 2.5 pages
BUSY = kvflow.Cause(kvflow.Code.CAPACITY, "too long a queue")
Side = NodeThread[Any, Any, Any]


def pool(shared: bool = True, page_bytes: int = 64) -> kvflow.PagedPool:
    layout = kvflow.build_layout(
        [("k", "uint8", (page_bytes // PAGE_SIZE,))], page_size=PAGE_SIZE, num_pages=PAGES
    )
    return kvflow.PagedPool.allocate(layout, shared=shared)


def opened(
    prefill: kvflow.PrefillThread,
    decode: kvflow.DecodeThread,
    room: int = 7,
    pages: Sequence[int] = (0, 1, 2),
    **more: Any,
) -> kvflow.DecodeThreadRoom:
    return decode.open(room, prefill=[prefill.info], prompt=PROMPT, pages=pages, **more)


def announced(
    prefill: kvflow.PrefillThread, decode: kvflow.DecodeThread, room: int = 7, **more: Any
) -> kvflow.DecodeThreadRoom:
    return decode.announce(room, prefill=[prefill.info], prompt=PROMPT, **more)


def met(
    prefill: kvflow.PrefillThread, decode: kvflow.DecodeThread, pages: Sequence[int] = (0, 1, 2)
) -> tuple[kvflow.PrefillThreadRoom, kvflow.DecodeThreadRoom]:
    sending, target = prefill.open(7, prompt=PROMPT), opened(prefill, decode, pages=pages)
    wait_for(prefill, "matched", sending)
    return sending, target


@contextmanager
def engines(
    page_bytes: int = 64, rate: float | None = None
) -> Iterator[tuple[kvflow.PrefillThread, kvflow.DecodeThread]]:
    """Prefill's page p holds p + 1 everywhere; `rate` limits its writes, in bytes per second."""
    source, target = pool(page_bytes=page_bytes), pool(page_bytes=page_bytes)
    source.array("k")[:] = np.arange(1, PAGES + 1, dtype=np.uint8)[:, None, None]
    plane = kvflow.LocalPlane(None, rate)
    with (
        kvflow.PrefillThread(source, plane) as prefill,
        kvflow.DecodeThread(target, "local") as decode,
    ):
        yield prefill, decode
    assert prefill.pages.at_rest() and decode.pages.at_rest()
    source.close()
    target.close()


def fails(side: Side, room: object, error: type[kvflow.KvflowError], text: str = "") -> None:
    failed, _ = wait_for(side, "failed", room)
    assert isinstance(failed.error, error) and text in str(failed.error)
    assert failed.room.error is failed.error


def wait_for(side: Side, kind: str, room: object) -> tuple[kvflow.RoomEvent[Any], list[str]]:
    """Poll until it has happened. Returns the event, and the kinds of those before it."""
    before: list[str] = []
    deadline = monotonic() + PATIENCE_S
    while monotonic() < deadline:
        found = side.poll(timeout_s=0.1)
        for n, event in enumerate(found):
            if event.kind == kind and event.room is room:
                side._events.extendleft(reversed(found[n + 1 :]))  # for the next one who asks
                return event, before
            before.append(event.kind)
    raise TimeoutError(f"no {kind} of {room} within {PATIENCE_S:g} s, only {before}")


def test_a_room_from_open_to_released() -> None:
    with engines() as (prefill, decode):
        sending = prefill.open(7, prompt=PROMPT, context="request 1")
        room = opened(prefill, decode, pages=[9, 4, 7])
        assert sorted(decode.pages.busy(range(PAGES))) == [4, 7, 9]  # from the call on
        assert not decode.wait_released([4], timeout_s=0.0)
        assert decode.wait_released([5], timeout_s=0.0)
        matched, _ = wait_for(prefill, "matched", sending)
        assert matched.prefix_tokens == 0 and matched.room.context == "request 1"
        sending.send([1])
        sending.send(np.array([2, 3]), last=True, handoff=b"42")
        landed, before = wait_for(decode, "landed", room)
        assert landed.handoff == room.handoff == b"42" and room.landed and before == ["opened"]
        assert (decode.pool.array("k")[[9, 4, 7]] == prefill.pool.array("k")[[1, 2, 3]]).all()
        wait_for(decode, "released", room)
        _, before = wait_for(prefill, "released", sending)
        assert before == ["done"] and sending.done and sending.released and room.released
        assert decode.wait_released([9, 4, 7], timeout_s=0.0)
        assert prefill.wait_released([1, 2, 3], timeout_s=0.0)
        assert repr(room) == "<DecodeThreadRoom 7: released, 3 pages>"
        assert repr(sending) == "<PrefillThreadRoom 7: released, 0 pages to send>"
        again = prefill.open(7, prompt=PROMPT)  # the id is free again
        again.close()


def test_source_pages_are_busy_when_send_returns_until_the_write_has_ended() -> None:
    with engines(page_bytes=65536, rate=200_000) as (prefill, decode):
        sending, room = met(prefill, decode)
        sending.send([1, 2])
        assert list(prefill.pages.busy([1, 2, 3])) == [1, 2]
        assert not prefill.wait_released([2], timeout_s=0.0)
        room.close()  # from decode, in the middle of a write
        fails(prefill, sending, kvflow.AbortedError)
        assert prefill.wait_released([1, 2], PATIENCE_S)
        assert decode.wait_released([0, 1, 2], PATIENCE_S)
        fails(decode, room, kvflow.AbortedError)
        wait_for(decode, "released", room)
        with pytest.raises(kvflow.AbortedError):
            sending.send([3], last=True)
        wait_for(prefill, "released", sending)


@pytest.mark.parametrize(("prefix", "pages"), [(4, [5, 6]), (8, [5]), (10, [])])
def test_decode_has_a_part_of_the_prompt_or_all_of_it(prefix: int, pages: list[int]) -> None:
    with engines() as (prefill, decode):
        sending = prefill.open(7, prompt=np.array(PROMPT))
        room = opened(prefill, decode, pages=pages, prefix_tokens=prefix)
        matched, _ = wait_for(prefill, "matched", sending)
        assert matched.prefix_tokens == sending.prefix_tokens == prefix
        assert sending.left == len(pages)
        sending.send([1, 2][: len(pages)], last=True, handoff=b"42")
        assert wait_for(decode, "landed", room)[0].handoff == b"42"


def test_many_rooms_from_many_threads() -> None:
    with engines() as (prefill, decode):
        ranks = [prefill.info]

        def decodes(first: int) -> None:
            for n in range(first, first + 4):
                decode.open(n, prefill=ranks, prompt=[n, 1, 2, 3], pages=[n])

        def prefills(first: int) -> None:
            for n in range(first, first + 4):
                prefill.open(n, prompt=[n, 1, 2, 3])

        starts = [(work, first) for first in range(0, PAGES, 4) for work in (decodes, prefills)]
        threads = [threading.Thread(target=work, args=(first,)) for work, first in starts]
        for thread in threads:
            thread.start()
        landed = 0
        deadline = monotonic() + PATIENCE_S
        while landed < PAGES and monotonic() < deadline:
            for event in prefill.poll(timeout_s=0.01):
                if event.kind == "matched":
                    event.room.send([event.room.room], last=True)
            landed += sum(event.kind == "landed" for event in decode.poll())
        for thread in threads:
            thread.join()
        assert landed == PAGES
        assert (decode.pool.array("k") == prefill.pool.array("k")).all()


def test_closing_a_node_ends_its_rooms_and_says_so() -> None:
    with engines() as (prefill, decode):
        sending, room = met(prefill, decode)
        assert list(decode.close()) == [] == list(decode.close())
        kinds = [event.kind for event in decode.poll()]
        assert kinds[-2:] == ["failed", "released"] and room.released
        assert isinstance(room.error, kvflow.AbortedError) and room.error.code == "shutdown"
        fails(prefill, sending, kvflow.AbortedError)
        with pytest.raises(kvflow.MisuseError, match="the decode thread is closed"):
            opened(prefill, decode, 8)
        room.close()
        assert "closed" in repr(decode)
        with pytest.raises(kvflow.MisuseError, match="was started before"):
            decode.start()


def test_a_loan_without_proof_is_returned_and_its_pages_stay_busy() -> None:
    network, planes, timing = Network(), FakeNetwork(), Timing(lost_after_s=0.3)
    source, target = pool(), pool()
    plane = FakePlane(planes)
    decode = kvflow.DecodeThread(target, FakePlane(planes), connect=network.connect, timing=timing)
    with decode:
        thread = decode._running()

        async def prefill() -> kvflow.PrefillNode:
            node = kvflow.PrefillNode(
                source, plane, bind=network.bind, pages=kvflow.ExternalPages(PAGES)
            )
            await node.start()
            return node

        node = thread.call(prefill)  # on the same loop: the network in memory is not for threads
        plane.script(Fault.STUCK)
        sending = decode.ask(lambda _: node.room(7, PROMPT))
        room = decode.open(7, prefill=[node.info], prompt=PROMPT, pages=[0, 1, 2])
        thread.call(sending.matched)
        decode.ask(lambda _: sending.send([1, 2, 3], last=True))

        async def close_both() -> None:
            plane.release()
            await node.close()

        stopped: list[Sequence[object]] = []
        closing = decode._close

        # prefill is closed after decode, on the loop that decode ends with.
        async def close() -> Sequence[object]:
            stopped.append(await closing())
            await close_both()
            return stopped[0]

        decode._close = close  # type: ignore[method-assign,assignment]
        (loan,) = decode.close()
        assert list(loan.pages) == [0, 1, 2]
    assert room.error is not None and not room.released
    assert not decode.wait_released([1], timeout_s=0.0) and "3 busy" in repr(decode)
    following = kvflow.DecodeThread(target, "local")  # over the same pool, with a store of its own
    assert following.pages.busy(range(PAGES)).tolist() == [0, 1, 2]


def test_decode_is_told_of_a_second_room_that_was_refused_while_the_first_drained() -> None:
    """As by `PrefillNode.room`: decode's half does not wait for a rendezvous."""
    network, planes, source, target = Network(), FakeNetwork(), pool(), pool()
    plane = FakePlane(planes)
    plane.drains_at_once = False
    plane.hold()
    with kvflow.PrefillThread(source, plane, bind=network.bind) as prefill:
        thread = prefill._running()

        async def decode() -> kvflow.DecodeNode:
            node = kvflow.DecodeNode(target, FakePlane(planes), connect=network.connect)
            await node.start()
            return node

        node = thread.call(decode)  # on the same loop: the network in memory is not for threads
        ranks = [prefill.info]
        sending = prefill.open(7, prompt=PROMPT)
        first = prefill.ask(lambda _: node.room(7, ranks, PROMPT))
        wait_for(prefill, "matched", sending)
        sending.send([1, 2, 3], last=True)
        prefill.ask(lambda _: first.close())
        wait_for(prefill, "failed", sending)
        with pytest.raises(kvflow.MisuseError, match="room 7 is in use"):
            prefill.open(7, prompt=PROMPT)
        prefill.ask(lambda _: plane.release())
        wait_for(prefill, "released", sending)
        second = prefill.ask(lambda _: node.room(7, ranks, PROMPT))
        with pytest.raises(kvflow.KvflowError, match="room 7 is in use") as told:
            thread.call(lambda: asyncio.wait_for(second.landed(), PATIENCE_S))
        assert told.value.code is kvflow.Code.ROOM_IN_USE
        thread.call(node.close)
    assert prefill.pages.at_rest()


def lost_loan(incarnation: int, writer: PlaneAddress | None = None) -> UnprovenLoan:
    return UnprovenLoan(
        writer=writer,
        incarnation=incarnation,
        control="tcp://gone:1",
        rank=0,
        room=3,
        lease=(5, 1),
        pages=np.array([1], np.int32),
    )


def test_pages_of_an_earlier_node_are_busy_until_its_loans_end() -> None:
    writer = PlaneAddress("elsewhere", "", ProcessIdentity("boot", "ns", 1, 1))
    loan = lost_loan(9, writer)
    with engines() as (prefill, decode):
        for side in (prefill, decode):
            side.pool.quarantine.add([loan], kvflow.ExternalPages(PAGES))
            assert side.pages.busy([0, 1, 2]).tolist() == [1]
            assert side.pool.pages.free_pages == PAGES - 1
        with pytest.raises(OwnershipError, match="page 1 is in quarantine"):
            opened(prefill, decode)
        with pytest.raises(OwnershipError, match="page 1 is in quarantine"):
            announced(prefill, decode, 6).offer([0, 1, 2])
        assert decode.pages.busy(range(PAGES)).tolist() == [1]
        sending = prefill.open(8, prompt=PROMPT)
        room = opened(prefill, decode, 8, [0, 2, 3])
        wait_for(prefill, "matched", sending)
        with pytest.raises(OwnershipError, match="page 1 is in quarantine"):
            sending.send([0, 1, 2], last=True)
        sending.send([2, 3, 4], last=True)
        wait_for(decode, "landed", room)
        for side in (prefill, decode):
            side.ask(lambda node: node.declare_dead(9, "it is off"))
            assert side.wait_released([1], PATIENCE_S) and not side.pool.unproven


def test_pages_that_go_to_quarantine_after_they_were_offered_end_their_room() -> None:
    loan = lost_loan(0x77)
    with engines() as (prefill, decode):
        sending = prefill.open(7, prompt=PROMPT)
        room = announced(prefill, decode)
        gate, thread = threading.Event(), decode._running()

        def stand_still() -> None:
            gate.wait(PATIENCE_S)

        thread.post(stand_still)
        room.offer([0, 1, 2])
        # Another node over the pool closes.
        decode.pool.quarantine.add([loan], kvflow.ExternalPages(PAGES))
        gate.set()
        fails(decode, room, kvflow.KvflowError, "page 1 is in quarantine")
        wait_for(decode, "released", room)
        wait_for(prefill, "failed", sending)
        assert list(decode.pages.busy(range(PAGES))) == [1] and not thread.errors
        decode.ask(lambda node: node.declare_dead(0x77, "it is off"))
        assert decode.wait_released([1], PATIENCE_S)


def test_refusals_reach_the_other_side() -> None:
    with engines() as (prefill, decode):
        room = opened(prefill, decode, 1)
        prefill.refuse(1, kvflow.Cause(kvflow.Code.CAPACITY, "no page is left"))
        fails(decode, room, kvflow.RefusedError, "no page is left")
        sending = prefill.open(2, prompt=PROMPT)
        decode.refuse(2, prefill=[prefill.info], cause=BUSY)
        fails(prefill, sending, kvflow.RefusedError, "too long a queue")
        assert prefill.ask(lambda node: len(node.shell.rooms)) == 0


def test_a_room_goes_to_the_group_it_names() -> None:
    source, other, target = pool(), pool(), pool()
    groups = [
        kvflow.PrefillThread(one, "local", dp_rank=i, dp_size=2)
        for i, one in enumerate((source, other))
    ]
    with groups[0], groups[1] as second, kvflow.DecodeThread(target, "local") as decode:
        every = [prefill.info for prefill in groups]
        named: dict[str, Any] = {"prefill": every, "prompt": PROMPT, "dp_rank": 1}
        for number, at_once in ((2, True), (4, False)):  # both would go to the first
            sending = second.open(number, prompt=PROMPT)
            if at_once:
                room = decode.open(number, pages=[0, 1, 2], **named)
            else:
                room = decode.announce(number, **named)
                room.offer([3, 4, 5])
            wait_for(second, "matched", sending)
            sending.send([1, 2, 3], last=True)
            wait_for(decode, "landed", room)
        sending = second.open(6, prompt=PROMPT)
        decode.refuse(6, prefill=every, cause=BUSY, dp_rank=1)
        fails(second, sending, kvflow.RefusedError, "too long a queue")
        lost = decode.announce(8, prefill=every, prompt=PROMPT, dp_rank=2)
        fails(decode, lost, kvflow.MisuseError, "dp_rank 2 is outside 0..1")


def test_a_decode_finds_its_prefill_by_name_on_any_loop() -> None:
    source, target = pool(), pool()
    resolve = kvflow.RegistryClient().resolve
    factory: Callable[[], Any] = uvloop.new_event_loop
    with (
        kvflow.PrefillThread(source, "local", registry_port=0, loop_factory=factory) as prefill,
        kvflow.DecodeThread(
            target, "local", resolve=resolve, loop_factory=factory, verify_transfers=False
        ) as decode,
    ):
        sending = prefill.open(7, prompt=PROMPT)
        room = decode.open(7, prefill=prefill.registry, prompt=PROMPT, pages=[0, 1, 2])
        wait_for(prefill, "matched", sending)
        sending.send([1, 2, 3], last=True)
        wait_for(decode, "landed", room)
        lost = decode.open(8, prefill="127.0.0.1:1", prompt=PROMPT, pages=[3, 4, 5])
        fails(decode, lost, kvflow.LostError)
        wait_for(decode, "released", lost)
        assert decode.wait_released([3, 4, 5], timeout_s=0.0)


def test_what_keeps_a_node_from_starting_is_raised_by_start() -> None:
    before = set(threading.enumerate())
    with pytest.raises(kvflow.MisuseError, match="not in shared memory"):
        kvflow.DecodeThread(pool(shared=False), "local").start()
    with kvflow.PrefillThread(pool(), "local") as prefill:
        port = int(prefill.info.control.rsplit(":", 1)[1])
        with pytest.raises(kvflow.MisuseError, match=str(port)):
            kvflow.PrefillThread(pool(), "local", port=port).start()
        with pytest.raises(kvflow.MisuseError, match="registry cannot listen"):
            kvflow.PrefillThread(pool(), "local", registry_port=port).start()
    assert not set(threading.enumerate()) - before


def test_a_thread_that_is_not_started_says_so() -> None:
    decode = kvflow.DecodeThread(pool(), "local")
    with pytest.raises(kvflow.MisuseError, match="the decode thread is not started"):
        decode.open(7, prefill=[], prompt=PROMPT, pages=[0, 1, 2])
    assert list(decode.close()) == [] and decode.poll() == []
    with pytest.raises(kvflow.MisuseError, match="was started before"):
        decode.start()


def test_a_thread_that_another_one_starts_takes_nothing_until_it_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starting, go_on = threading.Event(), threading.Event()
    start = kvflow.DecodeNode.start

    async def held(node: kvflow.DecodeNode) -> None:
        starting.set()
        await asyncio.to_thread(go_on.wait, PATIENCE_S)
        await start(node)

    monkeypatch.setattr(kvflow.DecodeNode, "start", held)
    decode = kvflow.DecodeThread(pool(), "local")
    starter = threading.Thread(target=decode.start)
    starter.start()
    try:
        assert starting.wait(PATIENCE_S)
        calls: list[Callable[[], object]] = [
            lambda: decode.open(7, prefill=[], prompt=PROMPT, pages=[0, 1, 2]),
            lambda: decode.announce(7, prefill=[], prompt=PROMPT),
            lambda: decode.ask(lambda node: node.peers()),
        ]
        for call in calls:
            with pytest.raises(kvflow.MisuseError, match="the decode thread is still starting"):
                call()
    finally:
        go_on.set()
        starter.join()
    assert decode.ask(lambda node: node.peers()) == []
    decode.close()
    assert decode.pages.at_rest() and decode.poll() == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"room": -1}, "room id -1 is not an unsigned 64-bit integer"),
        ({"prompt": []}, "the prompt is empty"),
        ({"pages": [0, 1]}, "room 7: 2 pages given, its prompt needs 3"),
        ({"pages": [0, 1, 1]}, "a page is given twice"),
        ({"pages": [0, 1, 32]}, r"page 32 is outside 0\.\.31"),
        (
            {"prefix_tokens": 3},
            "prefix_tokens 3 is neither a whole number of 4-token pages nor all of the 10 tokens",
        ),
        ({"prefill": "10.0.0.1:8998"}, "prefill '10.0.0.1:8998': this node was given no resolve"),
    ],
)
def test_misuse_of_open_is_raised_by_open(change: dict[str, Any], text: str) -> None:
    with kvflow.DecodeThread(pool(), "local") as decode:
        good = {"room": 7, "prefill": [], "prompt": PROMPT, "pages": [0, 1, 2]}
        given: dict[str, Any] = {**good, **change}
        with pytest.raises(kvflow.MisuseError, match=text):
            decode.open(given.pop("room"), **given)
        assert decode.pages.at_rest() and decode.poll() == []


def test_misuse_of_send_is_raised_by_send() -> None:
    with engines() as (prefill, decode):
        sending = prefill.open(7, prompt=PROMPT)
        with pytest.raises(kvflow.MisuseError, match="room 7 is in use"):
            prefill.open(7, prompt=PROMPT)
        with pytest.raises(kvflow.MisuseError, match=r"room 7: send\(\) before the matched event"):
            sending.send([1])
        opened(prefill, decode)
        wait_for(prefill, "matched", sending)
        cases: list[tuple[Any, dict[str, Any], str]] = [
            ([1, 2, 3, 4], {}, "room 7: chunk of 4 pages, 3 pages of decode's are left"),
            ([1], {"last": True}, "room 7: chunk of 1 pages, 3 pages of decode's are left"),
            ([], {}, "room 7: a chunk without pages that is not the last"),
            ([32], {}, r"room 7: page 32 is outside 0\.\.31"),
            ([[1]], {}, r"not shape \(1, 1\) of int64"),
            (["1"], {}, "not shape"),
        ]
        for pages, more, text in cases:
            with pytest.raises(kvflow.MisuseError, match=text):
                sending.send(pages, **more)
        with pytest.raises(kvflow.CapacityError, match="bytes of handoff"):
            sending.send([1, 2, 3], last=True, handoff=bytes(100 << 20))
        sending.send([1, 2, 3], last=True)
        with pytest.raises(kvflow.MisuseError, match=r"room 7: send\(\) after the last chunk"):
            sending.send([], last=True)
        wait_for(prefill, "done", sending)


def test_the_row_of_a_room_is_its_last_place_on_both_sides() -> None:
    kinds = [("k", "float32", (2,)), ("s", "float32", (5,), "row")]
    layout = kvflow.build_layout(kinds, page_size=PAGE_SIZE, num_pages=32, num_rows=4)
    source, into = kvflow.PagedPool.allocate(layout), kvflow.PagedPool.allocate(layout)
    source.array("s")[1] = 7
    with (
        kvflow.PrefillThread(source, "local") as prefill,
        kvflow.DecodeThread(into, "local") as decode,
    ):
        sending, target = prefill.open(7, prompt=PROMPT), announced(prefill, decode)
        for wrong, why in (
            ([0, 1, 2, 3], "4 pages and 0 rows given, its prompt needs 3 pages and 1 row"),
            ([34, 0, 1, 2], "place 0 of space 'pages' follows place 34 of space 'rows'"),
        ):
            for call in (lambda pages: opened(prefill, decode, 8, pages), target.offer):
                with pytest.raises(kvflow.MisuseError, match=why):
                    call(wrong)
        with pytest.raises(
            kvflow.MisuseError, match="3 pages and 0 rows given, its prompt needs 3 pages and 1 row"
        ):
            target.offer([0, 1, 2])
        target.offer([0, 1, 2, 34])
        wait_for(prefill, "matched", sending)
        for chunk, last, why in (
            ([4, 33], False, "a row in a chunk that is not the last"),
            ([4, 5, 6, 8], True, "chunk of 4 pages and 0 rows, 3 pages and 1 row of decode's"),
            ([33, 4, 5, 6], True, "place 4 of space 'pages' follows place 33 of space 'rows'"),
        ):
            with pytest.raises(kvflow.MisuseError, match=why):
                sending.send(chunk, last=last)
        sending.send([4, 5])
        with pytest.raises(
            kvflow.MisuseError,
            match="chunk of 1 pages and 0 rows, 1 pages and 1 row of decode's are left",
        ):
            sending.send([6], last=True)
        sending.send([6, 33], last=True)
        wait_for(decode, "landed", target)
        assert (into.array("s")[2] == 7).all()
        wait_for(prefill, "released", sending)
        wait_for(decode, "released", target)


def test_a_room_has_places_of_every_space_of_the_pool() -> None:
    spaces = [
        kvflow.Space("all", 32, PAGE_SIZE),
        kvflow.Space("window", 16, 2, window=4),
        kvflow.Space("state", 4, 0),
    ]
    layout = kvflow.build_layout(
        [
            StateKind("k", "uint8", (4,)),
            StateKind("w", "uint8", (2,), space="window"),
            StateKind("s", "float32", (5,), ROW),
        ],
        spaces=spaces,
    )
    source, into = kvflow.PagedPool.allocate(layout), kvflow.PagedPool.allocate(layout)
    for name in "kws":
        array = source.array(name)
        array[...] = np.arange(1, array.size + 1).reshape(array.shape) % 251
    ours = [4, 5, 6], [3, 1], [2]
    theirs = [9, 0, 7], [11, 15], [3]
    given, lent = (layout.numbered(list(map(np.array, places))) for places in (ours, theirs))
    with (
        kvflow.PrefillThread(source, "local") as prefill,
        kvflow.DecodeThread(into, "local") as decode,
    ):
        sending, target = prefill.open(7, prompt=PROMPT), announced(prefill, decode)
        assert target.counts == (3, 2, 1) and target.num_pages == 6
        for wrong, why in (
            (lent[::-1], "place 47 of space 'window' follows place 51 of space 'state'"),
            (lent[1:], "2 pages, 2 'window' pages and 1 row given, its prompt needs 3 pages, 2"),
            (np.append(lent[:-1], 20), "4 pages, 2 'window' pages and 0 rows given"),
        ):
            with pytest.raises(kvflow.MisuseError, match=why):
                target.offer(wrong)
        target.offer(lent)
        assert sorted(decode.pages.busy(range(layout.num_places))) == sorted(lent)
        wait_for(prefill, "matched", sending)
        assert sending.counts_left == (3, 2, 1) and sending.left == 6
        for wrong, why in (
            (given[4:], "a row in a chunk that is not the last"),
            (given[:4][::-1], "place 6 of space 'all' follows place 35 of space 'window'"),
        ):
            with pytest.raises(kvflow.MisuseError, match=why):
                sending.send(wrong)
        sending.send(given[[0, 1, 3]])
        assert sending.counts_left == (1, 1, 1)
        with pytest.raises(kvflow.MisuseError, match="1 'window' pages and 1 row of decode's are"):
            sending.send(given[[2, 4]], last=True)
        sending.send(given[[2, 4, 5]], last=True)
        wait_for(decode, "landed", target)
        for name, sent, landed in zip("kws", ours, theirs, strict=True):
            array = into.array(name)
            assert (array[landed] == source.array(name)[sent]).all()
            assert not array[np.setdiff1d(np.arange(len(array)), landed)].any()
        wait_for(prefill, "released", sending)
        wait_for(decode, "released", target)
        for side in (prefill, decode):
            assert side.ask(lambda node: node.counts.bytes_moved) == layout.room_bytes((3, 2, 1))
        again = opened(prefill, decode, 8, lent.tolist())
        assert sorted(decode.pages.busy(range(layout.num_places))) == sorted(lent)
        again.close()
        wait_for(decode, "released", again)
    assert prefill.pages.at_rest() and decode.pages.at_rest()


def test_a_room_is_announced_before_its_pages_are_there() -> None:
    with engines() as (prefill, decode):
        sending = prefill.open(7, prompt=PROMPT)
        room = announced(prefill, decode, context="queued")
        assert decode.pages.at_rest() and room.num_pages == 3 and room.context == "queued"
        with pytest.raises(kvflow.MisuseError, match="room 7: 1 pages given, its prompt needs 3"):
            room.offer([1])
        room.offer([9, 4, 7])
        assert sorted(decode.pages.busy(range(PAGES))) == [4, 7, 9]
        with pytest.raises(kvflow.MisuseError, match="its pages have been offered already"):
            room.offer([9, 4, 7])
        wait_for(decode, "opened", room)
        sending.close()
        wait_for(decode, "released", room)
        gone = announced(prefill, decode, 8)
        gone.close(BUSY)
        fails(decode, gone, kvflow.KvflowError, "too long a queue")
        gone.offer([1, 2, 3])
        wait_for(decode, "released", gone)
        assert decode.pages.at_rest()


def test_a_decode_is_told_that_prefill_has_begun() -> None:
    with engines() as (prefill, decode):
        sending = prefill.open(7, prompt=PROMPT)
        room = announced(prefill, decode)
        at_once = opened(prefill, decode, 8, [1, 2, 3])
        assert wait_for(decode, "opened", at_once)[1] == [], (
            "its pages were lent: nothing is waited for"
        )
        sending.begin()
        _, sooner = wait_for(decode, "begun", room)
        assert "opened" not in sooner
        room.offer([9, 4, 7])
        wait_for(decode, "opened", room)
        sending.close()
        sending.begin()
        for each in (room, at_once):
            each.close()
            wait_for(decode, "released", each)


@pytest.mark.parametrize("prefix_tokens", [0, PAGE_SIZE, len(PROMPT)])
def test_what_is_found_of_a_prompt_after_its_announcement_does_not_travel(
    prefix_tokens: int,
) -> None:
    with engines() as (prefill, decode):
        sending = prefill.open(7, prompt=PROMPT)
        room = announced(prefill, decode)
        with pytest.raises(
            kvflow.MisuseError, match="prefix_tokens 1 is neither a whole number of"
        ):
            room.offer([9, 4], prefix_tokens=1)
        mine = [9, 4, 7][-(-prefix_tokens // PAGE_SIZE) :]
        with pytest.raises(
            kvflow.MisuseError, match=f"room 7: {len(mine) + 1} pages given, its prompt needs"
        ):
            room.offer([*mine, 11], prefix_tokens=prefix_tokens)
        room.offer(mine, prefix_tokens=prefix_tokens)
        assert room.num_pages == len(mine)
        wait_for(prefill, "matched", sending)
        assert sending.prefix_tokens == prefix_tokens and sending.left == len(mine)
        sending.send([3, 1, 2][: len(mine)], last=True)
        wait_for(decode, "landed", room)
        wait_for(decode, "released", room)


def test_a_room_that_is_closed_as_it_lands_has_landed() -> None:
    with engines() as (prefill, decode):
        source, target = prefill.open(7, prompt=PROMPT), opened(prefill, decode)
        wait_for(decode, "opened", target)

        def close_as_it_ends(_: kvflow.DecodeNode) -> None:
            """Of all that can happen at that moment the earliest: no task has heard of the end."""
            handle = decode._rooms[target]
            assert handle is not None
            handle.on_end(handle.close)

        decode.ask(close_as_it_ends)
        wait_for(prefill, "matched", source)
        source.send([3, 4, 5], last=True, handoff=b"t")
        _, before = wait_for(decode, "released", target)
        assert before == ["landed"] and target.handoff == b"t" and target.error is None
        wait_for(prefill, "released", source)


def test_threads_that_close_at_once_all_see_it_closed() -> None:
    found: list[object] = []
    source = pool(shared=False)
    for _ in range(20):
        decode = kvflow.DecodeThread(source, FakePlane(FakeNetwork())).start()
        together = threading.Barrier(3)

        def close(
            decode: kvflow.DecodeThread = decode, together: threading.Barrier = together
        ) -> None:
            together.wait()
            try:
                found.append(decode.close())
            except BaseException as error:
                found.append(error)
                raise

        closing = [threading.Thread(target=close) for _ in range(3)]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
    source.close()
    assert found == [()] * 60 or found == [[]] * 60


def test_a_node_cannot_be_closed_from_its_own_thread() -> None:
    with engines() as (prefill, _), pytest.raises(kvflow.MisuseError, match="would block"):
        prefill.ask(lambda _: prefill.close())


def test_a_question_that_ends_processes_does_not_end_the_thread() -> None:
    def leave(_: object) -> None:
        raise SystemExit(3)

    with engines() as (prefill, _):
        with pytest.raises(SystemExit):
            prefill.ask(leave)
        assert prefill.ask(lambda node: node.role) == "prefill"


@pytest.mark.parametrize(
    ("field", "odd"),
    [
        *(("prefill", odd) for odd in (["tcp://127.0.0.1:1"], [None], None, 7)),
        *(("dp_rank", odd) for odd in ("0", 0.0, True, [0])),
    ],
)
def test_what_has_a_wrong_type_is_refused_where_it_is_passed(field: str, odd: Any) -> None:
    with engines() as (prefill, decode):
        named = {"prefill": [prefill.info], "dp_rank": None, field: odd}
        for call in (
            lambda: decode.open(7, prompt=PROMPT, pages=[1, 2, 3], **named),
            lambda: decode.announce(7, prompt=PROMPT, **named),
            lambda: decode.refuse(7, cause=kvflow.Cause(kvflow.Code.ABORTED), **named),
        ):
            with pytest.raises(kvflow.MisuseError, match=field):
                call()
        assert not decode._rooms and decode.pages.at_rest()


@pytest.mark.parametrize("cause", ["a text", 7, kvflow.Code.ABORTED])
def test_a_cause_that_is_none_is_refused_where_it_is_passed(cause: Any) -> None:
    with engines() as (prefill, decode):
        room = opened(prefill, decode)
        source = prefill.open(7, prompt=PROMPT)
        calls: list[Callable[[], object]] = [
            lambda: room.close(cause),
            lambda: source.close(cause),
            lambda: prefill.refuse(8, cause),
            lambda: decode.refuse(8, prefill=[prefill.info], cause=cause),
        ]
        for call in calls:
            with pytest.raises(kvflow.MisuseError, match="cause"):
                call()
        room.close()
        wait_for(decode, "released", room)


def test_a_handoff_that_is_no_bytes_is_refused_where_it_is_passed() -> None:
    with engines() as (prefill, decode):
        source, target = met(prefill, decode)
        odd: Any = "text"
        with pytest.raises(kvflow.MisuseError, match="handoff"):
            source.send([3, 4, 5], last=True, handoff=odd)
        source.send([3, 4, 5], last=True, handoff=b"t")
        wait_for(decode, "landed", target)
