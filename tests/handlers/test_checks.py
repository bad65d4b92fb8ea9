"""Verified transfers: what lands is what was sent, or the room fails with both sums."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvflow.handlers import prefill
from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.checksum import PageChecksums
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import Code, KvflowError
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.wire.codec import encode, parse_at_decode
from kvflow.protocols.wire.messages import ChunkDone, GrantId, Incarnation, Rank, Resync, RoomId
from kvflow.testing.pair import Pair, fill, small_layout, until
from kvflow.transports.control.memory import Fate, Frame
from kvflow.transports.data.fake import Fault
from kvflow.transports.data.local import LocalPlane
from tests.handlers.scenes import (
    WHY,
    assert_same_bytes,
    code_of,
    ledger,
    links,
    matched,
    record_of,
    sending,
)


class SlowSum:
    def __init__(self, pages: PageIndices) -> None:
        self.pages, self.cancelled, self.error = pages, False, ""
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.released: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.cancelled = True


class SlowChecksums(PageChecksums):
    def __init__(self, pool: PagedPool) -> None:
        super().__init__(pool)
        self.begun: list[SlowSum] = []

    def at_once(self, *_: object) -> bytes:
        return b""

    def begin(  # type: ignore[override]
        self, pages: PageIndices, served: object = None, page_sizes: object = ()
    ) -> SlowSum:
        self.begun.append(SlowSum(pages))
        return self.begun[-1]

    async def end(self, slow: SlowSum) -> None:
        slow.done.set_result(b"" if slow.cancelled else await super().begin(slow.pages).done)
        slow.released.set_result(None)

    def give_up(self, slow: SlowSum) -> None:
        slow.error = "the checksum took longer than 120 s"
        slow.done.set_result(b"")

    def release(self, slow: SlowSum) -> None:
        slow.released.set_result(None)

    async def close(self) -> None:
        if running := [slow.released for slow in self.begun if not slow.released.done()]:
            # A test that has failed does not end them, and its failure is to be seen.
            await asyncio.wait(running, timeout=10)


def verify(
    node: PrefillNode | DecodeNode, kind: type[PageChecksums] = PageChecksums
) -> PageChecksums:
    """As if it had been made with `verify_transfers`, with sums of one's own."""
    node._checksums = node.shell.checksums = sums = kind(node.pool)
    if isinstance(node, DecodeNode):
        node.shell.endpoint.core.verify = True
    return sums


def slow_sums(node: PrefillNode | DecodeNode) -> SlowChecksums:
    sums = verify(node, SlowChecksums)
    assert isinstance(sums, SlowChecksums)
    return sums


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest_asyncio.fixture(params=["small sums at once", "all sums in threads"])
async def p(
    kvflow_pair: Pair, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    if request.param == "all sums in threads":
        monkeypatch.setattr("kvflow.memory.checksum.AT_ONCE_BYTES", 0)
    for node in kvflow_pair.nodes:
        verify(node)
    yield kvflow_pair


def flip(pool: PagedPool, page: int) -> None:
    (buffer,) = pool.layout.buffers
    byte = ctypes.c_uint8.from_address(buffer.address + page * buffer.page_bytes + 5)
    byte.value ^= 0x10


def corrupt(p: Pair, seq: int, page: int) -> None:
    """Change a byte of target page number `page` of the room when ChunkDone(`seq`) is under way;
    once: a slow decode asks for it again, and to flip a byte twice changes nothing."""
    fresh = True

    def rule(frame: Frame) -> Fate | None:
        nonlocal fresh
        message = frame.message
        room = p.decode.shell.rooms.get(message.grant) if isinstance(message, ChunkDone) else None
        if fresh and room is not None and isinstance(message, ChunkDone) and message.seq == seq:
            flip(p.decode.pool, int(room.pages[page]))
            fresh = False
        return None

    p.network.rules.append(rule)


async def checking(p: Pair, chunks: int = 1) -> tuple[PrefillRoom, DecodeRoom, SlowChecksums]:
    sums = slow_sums(p.decode)
    source, target = await sending(p, chunks=chunks)
    await until(lambda: len(sums.begun) == chunks)
    assert source.phase.name == "SUCCESS"
    return source, target, sums


@pytest.mark.parametrize("chunks", [1, 2, 5])
async def test_a_verified_room(p: Pair, chunks: int) -> None:
    sums: list[bytes] = []

    def rule(frame: Frame) -> None:
        if isinstance(frame.message, ChunkDone):
            sums.append(frame.message.checksum)

    p.network.rules.append(rule)
    source, target = await matched(p)
    pages = p.send_all(source, chunks=chunks)
    assert await target.landed() == b"handoff"
    assert_same_bytes(p, pages, target)
    target.close()
    assert len(set(sums)) == chunks and all(len(checksum) == 8 for checksum in sums)
    assert p.decode.counts.mismatched == 0


@pytest.mark.parametrize("p", ["small sums at once"], indirect=True)
async def test_small_chunks_are_verified_without_a_thread(
    p: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[PageIndices] = []
    begin = PageChecksums.begin

    def watched(sums: PageChecksums, pages: PageIndices, *of: Any) -> Any:
        begun.append(pages)
        return begin(sums, pages, *of)

    monkeypatch.setattr(PageChecksums, "begin", watched)
    corrupt(p, seq=1, page=3)
    _, target = await sending(p, chunks=2)
    with pytest.raises(KvflowError, match="chunk 1 of rank 0: checksum"):
        await target.landed()
    await p.rest()
    assert not begun and p.decode.counts.mismatched == 1
    # The same chunks in threads: the limit for a turn of the loop is used up.
    monkeypatch.setattr("kvflow.memory.checksum._TURN_BYTES", 0)
    corrupt(p, seq=1, page=3)
    _, target = await sending(p, chunks=2)
    with pytest.raises(KvflowError, match="chunk 1 of rank 0: checksum"):
        await target.landed()
    await p.rest()
    assert len(begun) == 4 and p.decode.counts.mismatched == 2


def in_pieces(p: Pair, pages: int) -> list[ChunkDone]:
    """Divide verified chunks into pieces of so many pages. Returns the list of all ChunkDone,
    without those that are said again: a decode on a busy machine asks for them.
    """
    p.prefill.shell._piece_pages = pages
    seen: list[ChunkDone] = []

    def rule(frame: Frame) -> None:
        message = frame.message
        if isinstance(message, ChunkDone) and message.seq == len(seen):
            seen.append(message)

    p.network.rules.append(rule)
    return seen


@pytest.mark.parametrize(("each", "counts"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5])])
async def test_a_verified_chunk_travels_in_pieces(p: Pair, each: int, counts: list[int]) -> None:
    seen = in_pieces(p, each)
    source, target = await matched(p)
    pages = p.send_all(source, chunks=1)
    assert await target.landed() == b"handoff"
    assert_same_bytes(p, pages, target)
    target.close()
    assert [message.pages for message in seen] == [(count,) for count in counts]
    assert [message.last for message in seen] == [False] * (len(counts) - 1) + [True]
    assert [message.handoff for message in seen] == [b""] * (len(counts) - 1) + [b"handoff"]
    assert len({message.checksum for message in seen}) == len(counts)
    await p.rest()


async def test_a_chunk_has_no_more_pieces_than_an_abort_ends_at_once(
    p: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflow.handlers.prefill._MOST_PIECES", 2)
    seen = in_pieces(p, 1)
    source, target = await matched(p)
    p.send_all(source, chunks=1)
    assert await target.landed() == b"handoff"
    target.close()
    assert [message.pages for message in seen] == [(3,), (2,)]
    await p.rest()


async def test_a_changed_byte_of_one_piece_fails_the_room(p: Pair) -> None:
    in_pieces(p, 1)
    corrupt(p, seq=3, page=3)
    _, target = await sending(p)
    with pytest.raises(KvflowError, match="chunk 3 of rank 0: checksum"):
        await target.landed()
    await p.rest()
    assert p.decode.counts.mismatched == 1


async def test_chunks_that_are_not_verified_are_not_divided(p: Pair) -> None:
    seen = in_pieces(p, 1)
    p.prefill.shell.checksums, p.decode.shell.endpoint.core.verify = None, False
    _, target = await sending(p)
    await target.landed()
    assert len(seen) == 1 and not seen[0].checksum
    target.close()


@pytest.mark.parametrize("how", ["aborted", "in error"])
async def test_pieces_of_an_ended_room_that_wait_for_their_turn_are_never_written(
    p: Pair, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_WRITES_AT_ONCE", 2)
    in_pieces(p, 1)
    plane = p.plane(p.prefill)
    if how == "aborted":
        plane.hold()
    else:
        plane.script(Fault.LATE)
    source, target = await sending(p)
    assert len(source.writes) == 5 and len(source.queued) == 3
    if how == "aborted":
        assert len(plane.started) == 2
        target.close(WHY)
    for waiting in (target.landed(), source.done()):
        assert await code_of(waiting) is (WHY.code if how == "aborted" else Code.TRANSFER_ERROR)
    await until(lambda: not source.writes and not p.prefill.pool.pages.held_pages)
    assert len(plane.started) == 2 and not source.queued
    if how == "aborted":
        await p.rest()
        assert source.phase.name == "ABORTED" and not source.bytes_landed
    else:
        assert source.phase.name == "LOST"
        await p.crash(p.prefill)
        await until(p.decode.pool.pages.at_rest)
        await p.add_prefill()


async def test_a_changed_byte_fails_the_room_on_both_sides(p: Pair) -> None:
    p.plane(p.prefill).hold()
    corrupt(p, seq=0, page=1)
    source, target = await sending(p, chunks=2)  # three pages and two
    p.plane(p.prefill).step(3)
    for waiting in (target.landed(), source.done()):
        sums = r"chunk 0 of rank 0: checksum [0-9a-f]{16} at prefill, [0-9a-f]{16} at decode"
        with pytest.raises(KvflowError, match=sums) as caught:
            await waiting
        assert caught.value.code is Code.TRANSFER_ERROR
    await p.rest()
    assert p.decode.counts.mismatched == 1
    assert target.phase.name == source.phase.name == "ABORTED"


async def test_a_changed_byte_of_the_last_chunk(p: Pair) -> None:
    corrupt(p, seq=2, page=4)
    source, target = await sending(p, chunks=3)
    with pytest.raises(KvflowError, match="chunk 2 of rank 0: checksum"):
        await target.landed()
    await p.rest()
    assert target.phase.name == "ABORTED" and source.phase.name == "SUCCESS"
    assert p.decode.counts.mismatched == 1 and p.network.seen["Abort"] == 0


async def test_chunks_are_summed_side_by_side_and_land_in_order(p: Pair) -> None:
    _, target, sums = await checking(p, chunks=3)
    for slow in reversed(sums.begun):
        assert record_of(target).state.filled == ((0,),) and not target.ended
        await sums.end(slow)
        await asyncio.sleep(0)
    assert await target.landed() == b"handoff"
    assert len(ledger(p.decode)) == p.decode.pool.pages.held_pages == 0
    target.close()


async def longer(growing: list[int], size: int) -> None:
    await until(lambda: len(growing) > size)


async def test_a_chunk_that_is_being_summed_is_not_asked_for_again(p: Pair) -> None:
    sums = slow_sums(p.decode)
    p.plane(p.prefill).hold()
    _, target = await sending(p, chunks=2)
    p.plane(p.prefill).step(3)
    await until(lambda: len(sums.begun) == 1)
    missing: list[int] = []  # the first chunk that each question asks for

    def listen(frame: Frame) -> Fate | None:
        if frame.to_prefill and isinstance(frame.message, Resync):
            missing.append(frame.message.rooms[0].next_seq)
        return None

    p.network.rules.append(listen)
    for n in range(3):  # the room stands still, and prefill is asked what became of it
        p.clock(p.decode).advance(10)
        await longer(missing, n)
    assert set(missing) == {1}
    p.plane(p.prefill).release()
    await until(lambda: len(sums.begun) == 2)
    asked = p.network.seen["Resync"]
    p.clock(p.decode).advance(10)  # both are here: there is nothing to ask for
    for slow in sums.begun:
        await sums.end(slow)
    await target.landed()
    assert p.network.seen["Resync"] == asked and len(sums.begun) == 2
    target.close()


async def test_an_abort_during_the_check_frees_no_page_that_is_read(p: Pair) -> None:
    _, target, sums = await checking(p, chunks=2)
    await sums.end(sums.begun[1])
    target.close(WHY)
    assert await code_of(target.landed()) is WHY.code  # at once
    await until(lambda: target.ended and not len(ledger(p.decode)))
    assert sums.begun[0].cancelled and p.decode.pages.free_pages == 64 - 5
    await sums.end(sums.begun[0])
    await p.rest()
    assert not p.decode.counts.mismatched


@pytest.mark.parametrize("agrees", [True, False])
async def test_prefill_dies_during_the_check(p: Pair, agrees: bool) -> None:
    """Its ChunkDone(last) proves its writes, so the room ends by its checksum."""
    _, target, sums = await checking(p)
    if not agrees:
        flip(p.decode.pool, int(target.pages[0]))
    await p.crash(p.prefill)
    await until(lambda: not links(p.decode))
    assert not target.ended
    await sums.end(sums.begun[0])
    if agrees:
        assert await target.landed() == b"handoff"
        target.close()
    else:
        assert await code_of(target.landed()) is Code.TRANSFER_ERROR
    await until(p.decode.pool.pages.at_rest)
    assert not p.left() and p.decode.counts.mismatched == (not agrees)


async def test_closing_decode_waits_for_the_check(p: Pair) -> None:
    _, target, sums = await checking(p)
    node = p.decodes.pop(0)
    closing = asyncio.ensure_future(node.close())
    assert await code_of(target.landed()) is Code.SHUTDOWN
    await until(lambda: not links(node))
    await turns(10)
    assert not closing.done() and sums.begun[0].cancelled
    assert not node.pool.pages.at_rest(), "a thread may read them"
    await sums.end(sums.begun[0])
    await closing
    assert node.pool.pages.at_rest()


async def test_source_pages_are_held_while_they_are_summed(p: Pair) -> None:
    sums = slow_sums(p.prefill)
    source, target = await sending(p)
    await until(lambda: source.bytes_landed == source.bytes_total)
    assert p.prefill.pool.pages.held_pages == 5 and p.network.seen["ChunkDone"] == 0
    target.close(WHY)
    assert await code_of(source.done()) is WHY.code
    assert sums.begun[0].cancelled
    assert source.phase.name == "DRAINING"
    assert p.prefill.pages.free_pages == 59
    await sums.end(sums.begun[0])
    await p.rest()
    assert source.phase.name == "ABORTED" and p.network.seen["ChunkDone"] == 0


async def test_closing_prefill_waits_for_its_sums(p: Pair) -> None:
    sums = slow_sums(p.prefill)
    source, target = await sending(p)
    await until(lambda: source.bytes_landed == source.bytes_total)
    node = p.prefills.pop(0)
    closing = asyncio.ensure_future(node.close())
    assert await code_of(target.landed()) is Code.SHUTDOWN
    await turns(10)
    assert not closing.done() and node.pool.pages.held_pages
    await sums.end(sums.begun[0])
    await closing
    assert node.pool.pages.at_rest() and not node.shell.endpoint.rooms


async def test_a_write_in_doubt_stays_in_doubt(p: Pair) -> None:
    p.plane(p.prefill).script(Fault.ERROR)
    source, target = await sending(p)
    assert await code_of(target.landed()) is await code_of(source.done()) is Code.TRANSFER_ERROR
    await until(lambda: source.phase.name == "LOST" and not p.prefill.pool.pages.held_pages)
    assert not p.decode.counts.mismatched and ledger(p.decode).quarantined_pages == 5
    await p.crash(p.prefill)
    await until(p.decode.pool.pages.at_rest)
    await p.add_prefill()


async def test_a_last_chunk_without_pages_waits_for_the_sums_before_it(p: Pair) -> None:
    sums = slow_sums(p.decode)
    source, target = await matched(p)
    pages = p.prefill.pages.take(len(target.pages), "engine")
    source.send(pages, last=False)
    source.send(pages[:0], last=True, handoff=b"handoff")
    await source.done()
    await until(lambda: len(sums.begun) == 2)
    await sums.end(sums.begun[1])
    assert not target.ended
    await sums.end(sums.begun[0])
    assert await target.landed() == b"handoff"
    target.close()
    p.prefill.pages.give_back(pages, "engine")


async def test_decode_verifies_and_prefill_does_not(p: Pair) -> None:
    p.prefill.shell.checksums = None
    _, target = await sending(p)
    with pytest.raises(KvflowError, match="prefill sends no checksum"):
        await target.landed()


async def test_prefill_verifies_and_decode_does_not(p: Pair) -> None:
    p.decode.shell.endpoint.core.verify = False
    _, target = await sending(p, chunks=3)
    assert await target.landed() == b"handoff"
    target.close()


async def test_what_cannot_be_summed_has_not_landed(
    p: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: Any = None  # where a store would be
    checksums = p.decode.shell.checksums
    assert isinstance(checksums, PageChecksums)
    monkeypatch.setattr(checksums._sums, "_stores", ([bad],))
    _, target = await sending(p)
    with pytest.raises(KvflowError, match="could not be computed"):
        await target.landed()


@pytest.mark.parametrize("chunks", [1, 2])
async def test_a_checksum_at_decode_that_does_not_come_back_ends_the_room(
    p: Pair, chunks: int
) -> None:
    sums = slow_sums(p.decode)
    plane = p.plane(p.prefill)
    plane.hold()
    source, target = await sending(p, chunks=chunks)
    plane.step(3 if chunks == 2 else 5)
    await until(lambda: len(sums.begun) == 1)
    sums.give_up(sums.begun[0])
    with pytest.raises(
        KvflowError, match=r"chunk 0 of rank 0: .* could not be computed: .* longer than 120 s"
    ) as seen:
        await target.landed()
    assert seen.value.code is Code.ENGINE_ERROR
    if chunks == 2:  # else its writes had all landed, and prefill is done
        assert await code_of(source.done()) is Code.ENGINE_ERROR
    plane.release()
    await until(lambda: target.ended and not len(ledger(p.decode)))
    waiting = asyncio.ensure_future(target.released())
    await turns(10)
    assert p.decode.pages.free_pages == 64 - len(target.pages) and not waiting.done(), (
        "a thread may read them"
    )
    sums.release(sums.begun[0])
    await waiting
    await p.rest()


@pytest.mark.parametrize("chunks", [1, 2])
async def test_a_checksum_at_prefill_that_does_not_come_back_ends_the_room_on_both_sides(
    p: Pair, chunks: int
) -> None:
    sums = slow_sums(p.prefill)
    source, target = await matched(p)
    pages = p.send_all(source, chunks=chunks)
    await until(lambda: source.bytes_landed == source.bytes_total)
    sums.give_up(sums.begun[0])
    for slow in sums.begun[1:]:
        await sums.end(slow)
    for waits in (source.done(), target.landed()):
        with pytest.raises(KvflowError, match="longer than 120 s") as seen:
            await waits
        assert seen.value.code is Code.TRANSFER_ERROR
    await until(lambda: target.ended and source.phase.name == "ABORTED")
    await until(lambda: not len(ledger(p.decode)))  # everything has landed: decode's pages are free
    waiting = asyncio.ensure_future(source.released())
    await turns(10)
    held = len(sums.begun[0].pages)
    assert p.prefill.pool.pages.held_pages == held <= len(pages) and not waiting.done(), (
        "a thread may read them"
    )
    sums.release(sums.begun[0])
    await waiting
    await p.rest()


async def test_a_room_is_released_when_its_last_write_has_ended_too(p: Pair) -> None:
    sums = slow_sums(p.prefill)
    plane = p.plane(p.prefill)
    plane.hold()
    source, target = await sending(p, chunks=2)
    first, second = sums.begun
    plane.step(len(first.pages))
    sums.give_up(first)
    with pytest.raises(KvflowError, match="longer than 120 s"):
        await source.done()
    sums.release(first)
    waiting = asyncio.ensure_future(source.released())
    await turns(10)
    assert not waiting.done(), "the second chunk is being written"
    plane.release()
    await sums.end(second)
    await waiting
    await target.released()
    await p.rest()


async def test_a_lost_chunk_is_sent_again_with_its_checksum(p: Pair) -> None:
    p.network.drop(ChunkDone)
    p.network.drop(Resync)
    _, target = await sending(p, chunks=3)
    assert await target.landed() == b"handoff"
    target.close()


@pytest.mark.parametrize("spoiled", [False, True])
async def test_over_shared_memory(spoiled: bool, kvflow_clean_loop: None) -> None:
    pools = [PagedPool.allocate(small_layout(256)) for _ in range(2)]
    planes = [LocalPlane(pool.segment) for pool in pools]
    async with (
        PrefillNode(pools[0], planes[0], verify_transfers=True) as prefill,
        DecodeNode(pools[1], planes[1], verify_transfers=True) as decode,
    ):
        pages = prefill.pages.take(200, "engine")
        for page in pages:
            fill(pools[0], [page], 1 + int(page) % 255)
        async with (
            prefill.room(7, range(800)) as source,
            await decode.room(7, [prefill.info], range(800)) as target,
        ):
            await source.matched()
            if spoiled:
                # Written, and not yet heard of.
                source.on_end(lambda: flip(pools[1], int(target.pages[199])))
            source.send(pages[:100])
            source.send(pages[100:], last=True, handoff=b"h")
            if spoiled:
                with pytest.raises(KvflowError, match="chunk 1 of rank 0: checksum"):
                    await target.landed()
            else:
                assert await target.landed() == b"h"
                assert (pools[0].pages_bytes(pages) == pools[1].pages_bytes(target.pages)).all()
        await until(decode.pool.pages.at_rest)
        assert decode.counts.mismatched == spoiled
        prefill.pages.give_back(pages, "engine")
    for pool in pools:
        pool.close()


def test_a_chunk_of_a_prefill_that_knows_no_checksums() -> None:
    message = ChunkDone(
        room=RoomId(7),
        grant=GrantId(1),
        source=Incarnation(3),
        target=Incarnation(5),
        rank=Rank(0),
        seq=0,
        pages=(2,),
        last=True,
        handoff=b"h",
        checksum=b"12345678",
    )
    older = msgspec.msgpack.encode(msgspec.msgpack.decode(encode(message))[:-1])
    assert parse_at_decode(older) == msgspec.structs.replace(message, checksum=b"")
