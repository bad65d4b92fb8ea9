"""What only shared memory has: identities, segments, mappings."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import msgspec
import numpy as np
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.layout import PoolLayout, build_layout
from kvflow.protocols.ports import PlaneAddress, WriteOutcome
from kvflow.testing.conformance.bench import let_write
from kvflow.transports.data import local
from kvflow.transports.data.local import LocalPlane
from kvflow.transports.data.route import BlockList
from kvflow.transports.data.write_thread import ThreadWrite
from tests.transports.peer_process import (
    NUM_PAGES,
    Peer,
    Side,
    end_of,
    local_planes,
    pages,
    spawned,
    until,
)

PLANE = "local"


class Copies:
    """A copier whose clock a test sets, and which notes how each block was copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.slow_s, self.cancelled = 0.0, 0.0, False
        self.how = ""
        self._copier = local._Copier()
        monkeypatch.setattr(local, "_copy_holding_gil", lambda *_: self._copied("h"))
        monkeypatch.setattr(local, "_copy_releasing_gil", lambda *_: self._copied("r"))
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def _copied(self, how: str) -> None:
        self.how += how
        self.now_s += self.slow_s if how == "r" else 0.0

    def run(self, *sizes: int) -> tuple[int, str]:
        """Bytes copied, and of each block whether the GIL was (h)eld or (r)eleased."""
        self.how = ""
        numbers = list(range(len(sizes)))
        copied = self._copier.copy(
            BlockList(numbers, numbers, list(sizes)), cast("ThreadWrite", self)
        )
        return copied, self.how


def test_the_gil_is_released_after_each_burst_and_with_the_last_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies, burst = Copies(monkeypatch), local._BURST_BYTES
    assert copies.run(burst, burst // 2, burst // 2, 1, 1, 1) == (2 * burst + 3, "rhrhhr")
    assert copies.run(1) == (1, "r")


def test_a_cancelled_write_stops_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, burst = Copies(monkeypatch), local._BURST_BYTES
    copies.cancelled = True
    assert copies.run(burst - 1, 1, burst, burst) == (burst, "hr")


@pytest.mark.parametrize("copied", [1, 2, 3])
async def test_a_write_that_a_cancel_stops_in_its_last_slice_has_not_landed(
    copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = build_layout(
        [("k", "uint8", (local._BURST_BYTES,))], page_size=1, num_pages=3, order="page_first"
    )
    copy, copies = local._copy_releasing_gil, itertools.count(1)
    monkeypatch.setattr(local, "_LONG_S", 60.0)  # memory that is touched for the first time is slow
    async with local_planes(layout) as (source, target, _, pool):
        route = await source.connect(*target.export(pool.layout))

        def and_cancel(*block: int) -> None:
            copy(*block)
            if next(copies) == copied:
                write._cancelled = True
                source._thread.wake()

        monkeypatch.setattr(local, "_copy_releasing_gil", and_cancel)
        # The blocks are of one page each.
        write = cast("ThreadWrite", route.write(pages(0, 1, 2), pages(2, 1, 0)))
        assert await write.done is (WriteOutcome.LANDED if copied == 3 else WriteOutcome.CANCELLED)
        assert write.landed_bytes == copied * local._BURST_BYTES


def test_where_the_gil_is_long_in_coming_back_it_is_kept_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies, burst = Copies(monkeypatch), local._BURST_BYTES
    copies.slow_s = burst / 1e9 + 0.0009
    assert copies.run(burst, burst)[1] == "rr", "a slow copy is no sign of it"
    copies.slow_s = burst / 1e9 + 0.0011
    assert copies.run(burst, burst, burst)[1] == "rhr"
    copies.slow_s = 0.0
    assert [copies.run(burst, burst)[1] for _ in range(local._CROWDED_BURSTS + 1)].count(
        "hr"
    ) == local._CROWDED_BURSTS
    assert copies.run(burst, burst)[1] == "rr"


@pytest.mark.parametrize(
    "address", ["", "fd:", "fd:-1", "fd:1 ", "fd:1\n", "/dev/shm/x", "fd:99999", "fd:0"]
)
async def test_only_a_sealed_segment_of_that_process_is_opened(
    side: Side, address: str, peer: Peer
) -> None:
    with pytest.raises(TransferError):
        await side.plane.connect(
            msgspec.structs.replace(peer.address, locator=address), peer.layout
        )


async def test_a_pool_that_is_long_in_being_mapped_is_given_up(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping, map_peer = threading.Event(), local.map_peer

    def slowly(address: PlaneAddress, layout: PoolLayout) -> SharedSegment:
        assert mapping.wait(20)
        return map_peer(address, layout)

    monkeypatch.setattr(local, "map_peer", slowly)
    monkeypatch.setattr(local, "_CONNECT_S", 0.05)
    try:
        with pytest.raises(TransferError, match=r"could not be mapped within 0\.05 s"):
            await side.plane.connect(side.address, side.layout)
    finally:
        mapping.set()


async def test_a_pool_is_opened_for_its_owner_only(side: Side) -> None:
    segment = side.pool.segment
    assert segment is not None
    segment.claim(7)
    segment.claim(8)
    for owner in (7, 8):
        (
            await side.plane.connect(
                msgspec.structs.replace(side.address, owner=owner), side.layout
            )
        ).close()
    segment.disclaim(7)
    segment.disclaim(7)
    for owner in (7, 9, 2**64 - 1):
        with pytest.raises(TransferError, match=f"is not the pool of {owner:016x}"):
            await side.plane.connect(
                msgspec.structs.replace(side.address, owner=owner), side.layout
            )


async def test_a_segment_has_room_for_many_owners_and_no_more(side: Side) -> None:
    segment = side.pool.segment
    assert segment is not None
    for owner in range(1, 513):
        segment.claim(owner)
    with pytest.raises(LayoutError, match="512 nodes have claimed this segment"):
        segment.claim(513)
    (
        await side.plane.connect(msgspec.structs.replace(side.address, owner=512), side.layout)
    ).close()


async def test_a_reused_pid_is_told_apart(side: Side, peer: Peer) -> None:
    identity = msgspec.structs.replace(
        peer.address.process, start_ticks=peer.address.process.start_ticks + 1
    )
    stranger = msgspec.structs.replace(peer.address, process=identity)
    with pytest.raises(TransferError, match="has ended"):
        await side.plane.connect(stranger, peer.layout)
    await asyncio.wait_for(side.plane.fence(stranger), 20)


async def test_offsets_from_the_wire_are_checked_against_the_real_segment(
    side: Side, peer: Peer
) -> None:
    (buffer,) = peer.layout.buffers
    for lie in (
        msgspec.structs.replace(buffer, address=buffer.address + 4096),
        msgspec.structs.replace(buffer, size_bytes=buffer.size_bytes + 4096),
        msgspec.structs.replace(buffer, address=1 << 62),
    ):
        with pytest.raises(LayoutError):
            await side.plane.connect(
                peer.address, msgspec.structs.replace(peer.layout, buffers=(lie,))
            )
    (space,) = peer.layout.spaces
    more = msgspec.structs.replace(space, count=NUM_PAGES + 1)
    more_pages = msgspec.structs.replace(peer.layout, spaces=(more,))
    with pytest.raises(LayoutError):
        await side.plane.connect(peer.address, more_pages)


LAYOUT = build_layout([("k", "uint8", (64,))], page_size=16, num_pages=8)


@contextmanager
def targets(*layouts: PoolLayout) -> Iterator[list[tuple[PlaneAddress, PoolLayout, PagedPool]]]:
    """Pools that can be written to, each with its address and its layout as peers see it."""
    pools = [PagedPool.allocate(layout) for layout in layouts]
    try:
        yield [(*LocalPlane(pool.segment).export(pool.layout), pool) for pool in pools]
    finally:
        for pool in pools:
            pool.close()


def without_threads(plane: LocalPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: object, **__: object) -> None:
        raise AssertionError("a thread is asked")

    monkeypatch.setattr(plane._connecting, "run", run)


async def test_a_small_pool_of_a_known_layout_is_mapped_without_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with local_planes(LAYOUT) as (plane, _, source, _):
        with targets(LAYOUT, LAYOUT, LAYOUT) as peers:
            routes = [await plane.connect(*peers[0][:2])]
            without_threads(plane, monkeypatch)
            routes += [await plane.connect(*peer[:2]) for peer in peers[1:]]
            for i, (route, (_, _, pool)) in enumerate(zip(routes, peers, strict=True)):
                source.tensor("k").fill_(i + 1)
                assert await end_of(route.write(pages(3), pages(i))) is WriteOutcome.LANDED
                assert (pool.pages_bytes(pages(i)) == i + 1).all()
            for *_, pool in peers:
                written = np.count_nonzero(pool.pages_bytes(pages(*range(8))))
                assert written == LAYOUT.place_bytes[0], "one page each"


@pytest.mark.parametrize("why", ["large", "many", "another layout", "another pool of ours"])
async def test_a_pool_is_otherwise_mapped_in_a_thread(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = 16 if why == "another layout" else 8
    first = build_layout([("k", "uint8", (64,))], page_size=16, num_pages=8)
    second = build_layout([("k", "uint8", (64,))], page_size=16, num_pages=more)
    async with local_planes(LAYOUT) as (plane, _, source, _):
        with targets(first, second) as peers:
            await plane.connect(*peers[0][:2])
            if why == "large":
                monkeypatch.setattr(local, "_SMALL_BYTES", 64 * 16 * 8 - 1)
            if why == "many":
                monkeypatch.setattr(local, "_FEW_BUFFERS", 0)
            if why == "another pool of ours":
                plane.export(source.layout)
            without_threads(plane, monkeypatch)
            with pytest.raises(AssertionError, match="a thread is asked"):
                await plane.connect(*peers[1][:2])


async def test_a_known_layout_is_checked_against_each_segment() -> None:
    large = build_layout([("k", "uint8", (64,))], page_size=16, num_pages=64)
    async with local_planes(LAYOUT) as (plane, _, _, _):
        with targets(large, LAYOUT) as ((address, layout, _), (smaller, _, _)):
            await plane.connect(address, layout)
            with pytest.raises(LayoutError, match="ends at 65536, the peer's segment at 8192"):
                await plane.connect(smaller, layout)
            assert len(plane._routes) == 1


async def test_few_layouts_of_peers_are_remembered() -> None:
    layouts = [
        build_layout([("k", "uint8", (64,))], page_size=16, num_pages=8 + n)
        for n in range(local._PLANNERS + 2)
    ]
    async with local_planes(LAYOUT) as (plane, _, _, _):
        with targets(*layouts) as peers:
            for address, layout, _ in peers:
                await plane.connect(address, layout)
                await plane.connect(*peers[0][:2])
            kept = [layout.num_places for layout in plane._planners]
            assert kept == [layout.num_places for layout in (*layouts[3:], layouts[0])]


async def test_a_large_pool_is_unmapped_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_SMALL_BYTES", 0)
    closed, may_close, close = [], threading.Event(), SharedSegment.close_peer

    def unmapping() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if "local-unmap" in thread.name}

    before = unmapping()

    def slowly(segment: SharedSegment) -> None:
        assert may_close.wait(20)
        close(segment)
        closed.append(segment)

    monkeypatch.setattr(SharedSegment, "close_peer", slowly)
    async with local_planes(LAYOUT) as (plane, _, _, _):
        with targets(LAYOUT, LAYOUT) as peers:
            routes = [await plane.connect(*peer[:2]) for peer in peers]
            routes[0].close()
            closing = asyncio.create_task(plane.close())
            await until(lambda: routes[1].closed)
            assert not closed and not closing.done()
            may_close.set()
            await closing
            assert len(closed) == 2, "a plane is closed when nothing of its peers is mapped"
            await until(lambda: not unmapping() - before)


async def test_a_large_pool_is_unmapped_after_the_end_of_all_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "_SMALL_BYTES", 0)
    async with local_planes(LAYOUT) as (plane, _, _, _):
        with targets(LAYOUT) as ((address, layout, pool),):
            route = await plane.connect(address, layout)
            pool.tensor("k").fill_(7)
            plane._unmapping.close()
            route.close()
            assert repr(route._segment).endswith("closed>")
            assert (pool.pages_bytes(pages(0, 7)) == 7).all()


async def test_only_what_a_layout_needs_of_a_segment_is_mapped() -> None:
    larger = build_layout([("k", "uint8", (64,))], page_size=16, num_pages=64)
    async with local_planes(LAYOUT) as (plane, _, _, _):
        with targets(larger) as ((address, _, pool),):
            (buffer,) = LAYOUT.buffers
            placed = msgspec.structs.replace(buffer, address=0)
            route = await plane.connect(address, msgspec.structs.replace(LAYOUT, buffers=(placed,)))
            assert route._segment.size_bytes == 8192 < pool.layout.buffers[0].size_bytes


async def test_a_child_of_the_writer_has_no_way_in(side: Side, peer: Peer) -> None:
    await let_write(peer, side)
    child = await peer.ask("fork")
    segment = side.pool.segment
    assert segment is not None
    inode = os.stat(f"/proc/self/fd/{segment.fd}").st_ino
    assert f" {inode} " in _mapped(peer.process.pid)
    assert f" {inode} " not in _mapped(child)
    assert inode not in _open_inodes(peer.process.pid) | _open_inodes(child)
    peer.process.kill()
    await asyncio.wait_for(side.plane.fence(peer.address), 20)


def _open_inodes(pid: int) -> set[int]:
    """The inodes of the memfds that a process has open."""
    found = (f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd"))
    return {os.stat(path).st_ino for path in found if os.readlink(path).startswith("/memfd:")}


def _mapped(pid: int) -> str:
    with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
        return "".join(line for line in file if "kvflow-pool" in line)


async def test_writing_on_after_the_receiver_died_is_harmless(side: Side) -> None:
    async with spawned("local") as peer:
        route = await side.plane.connect(peer.address, peer.layout)
    write = route.write(pages(0), pages(0))  # its memory lives as long as our mapping
    assert await end_of(write) is WriteOutcome.LANDED


async def test_a_pool_of_a_users_own_tensors_can_send_and_not_receive(side: Side) -> None:
    layout = build_layout([("k", "uint8", (64,))], page_size=16, num_pages=8)
    private = PagedPool.allocate(layout, shared=False)
    plane = LocalPlane(private.segment)
    address, exported = plane.export(private.layout)
    with pytest.raises(TransferError, match="cannot be written to"):
        await side.plane.connect(address, exported)

    target = PagedPool.allocate(layout)
    other = LocalPlane(target.segment)
    route = await plane.connect(*other.export(target.layout))
    private.tensor("k")[3] = 9
    assert await end_of(route.write(pages(3), pages(5))) is WriteOutcome.LANDED
    assert (target.pages_bytes(pages(5)) == 9).all()
    assert not target.pages_bytes(np.arange(5, dtype=np.int32)).any()
    for opened in (plane, other):
        await opened.close()
    assert route.closed and not plane._routes, "what was mapped for it is let go of"


async def test_a_pool_outside_the_segment_is_not_exported(side: Side) -> None:
    elsewhere = PagedPool.allocate(build_layout([("k", "uint8", (64,))], page_size=16, num_pages=8))
    with pytest.raises(LayoutError, match="not in the pool's shared segment"):
        LocalPlane(side.pool.segment).export(elsewhere.layout)
    elsewhere.close()


async def test_connecting_before_export_is_refused(side: Side) -> None:
    with pytest.raises(LayoutError, match="export"):
        await LocalPlane(None).connect(side.address, side.layout)
