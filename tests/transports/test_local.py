"""What only shared memory has: identities, segments, mappings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import WriteOutcome
from kvflow.transports.data.local import LocalPlane
from tests.transports.peer_process import NUM_PAGES, Side, pages, spawned


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    opened = Side("local", "page_first", None)
    yield opened
    await opened.close()


@pytest.mark.parametrize("address", ["", "fd:", "fd:-1", "fd:1 ", "fd:1\n", "/dev/shm/x", "fd:99999", "fd:0"])
async def test_only_a_sealed_segment_of_that_process_is_opened(side: Side, address: str) -> None:
    async with spawned("local") as peer:
        with pytest.raises(TransferError):
            await side.plane.connect(msgspec.structs.replace(peer.address, locator=address), peer.layout)


async def test_a_reused_pid_is_told_apart(side: Side) -> None:
    async with spawned("local") as peer:
        identity = msgspec.structs.replace(peer.address.process, start_ticks=peer.address.process.start_ticks + 1)
        stranger = msgspec.structs.replace(peer.address, process=identity)
        with pytest.raises(TransferError, match="has ended"):
            await side.plane.connect(stranger, peer.layout)
        await asyncio.wait_for(side.plane.fence(stranger), 1)


async def test_offsets_from_the_wire_are_checked_against_the_real_segment(side: Side) -> None:
    async with spawned("local") as peer:
        (buffer,) = peer.layout.buffers
        for lie in (
            msgspec.structs.replace(buffer, address=buffer.address + 4096),
            msgspec.structs.replace(buffer, size_bytes=buffer.size_bytes + 4096),
            msgspec.structs.replace(buffer, address=1 << 62),
        ):
            with pytest.raises(LayoutError):
                await side.plane.connect(peer.address, msgspec.structs.replace(peer.layout, buffers=(lie,)))
        more_pages = msgspec.structs.replace(peer.layout, num_pages=NUM_PAGES + 1)
        with pytest.raises(LayoutError):
            await side.plane.connect(peer.address, more_pages)


async def test_a_child_of_the_writer_has_no_way_in(side: Side) -> None:
    async with spawned("local") as peer:
        await peer.connect(side)
        child = await peer.ask("fork")
        segment = side.pool.segment
        assert segment is not None
        inode = os.stat(f"/proc/self/fd/{segment.fd}").st_ino
        assert f" {inode} " in _mapped(peer.process.pid)
        assert f" {inode} " not in _mapped(child)
        peer.process.kill()
        await asyncio.wait_for(side.plane.fence(peer.address), 5)


def _mapped(pid: int) -> str:
    with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
        return "".join(line for line in file if "kvflow-pool" in line)


async def test_writing_on_after_the_receiver_died_is_harmless(side: Side) -> None:
    async with spawned("local") as peer:
        route = await side.plane.connect(peer.address, peer.layout)
    write = route.write(pages(0), pages(0))  # its memory lives as long as our mapping
    assert await asyncio.shield(write.done) is WriteOutcome.LANDED


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
    assert await asyncio.shield(route.write(pages(3), pages(5)).done) is WriteOutcome.LANDED
    assert (target.pages_bytes(pages(5)) == 9).all() and not target.pages_bytes(np.arange(5, dtype=np.int32)).any()
    for opened in (plane, other):
        await opened.close()


async def test_a_pool_outside_the_segment_is_not_exported(side: Side) -> None:
    elsewhere = PagedPool.allocate(build_layout([("k", "uint8", (64,))], page_size=16, num_pages=8))
    with pytest.raises(LayoutError, match="not in the pool's shared segment"):
        LocalPlane(side.pool.segment).export(elsewhere.layout)
    elsewhere.close()


async def test_connecting_before_export_is_refused(side: Side) -> None:
    with pytest.raises(LayoutError, match="export"):
        await LocalPlane(None).connect(side.address, side.layout)
