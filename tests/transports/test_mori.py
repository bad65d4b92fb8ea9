"""What only mori has, over a stub of its calls."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.layout import Order, build_layout
from kvflow.protocols.ports import WriteOutcome
from kvflow.testing.conformance.peer import spawned
from kvflow.testing.conformance.station import NUM_PAGES, Side, pages
from kvflow.transports.data import locators
from kvflow.transports.data.locators import pack_locator
from kvflow.transports.data.mori import MAX_REGIONS, Description, MoriPlane, decode_description
from kvflow.transports.data.route import BlockList
from kvflow.transports.data.transfers import Transfer, TransfersRoute
from kvflow.transports.data.write_thread import ThreadWrite
from tests.transports import stub_mori
from tests.transports.peer_process import Peer, end_of, until
from tests.transports.stub_planes import Mori

PLANE = "tests.transports.stub_planes:Mori"
EVERYTHING = np.arange(NUM_PAGES, dtype=np.int32)


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    async with sides() as made:
        yield made


@asynccontextmanager
async def sides(order: Order = "page_first") -> AsyncIterator[Side]:
    side = Side(Mori().open, order)
    side.fill(1)
    try:
        yield side
    finally:
        await side.close()


def plane_of(side: Side) -> MoriPlane:
    assert isinstance(side.plane, MoriPlane)
    return side.plane


async def test_statuses_of_transfers_that_were_given_up_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MoriPlane, "close_grace_s", 0.2)
    # It would wait for its thread.
    monkeypatch.setattr(stub_mori.IOEngine, "remove_backend", lambda engine, kind: None)
    async with spawned(PLANE) as peer:
        side = Side(Mori().open)
        route = await side.plane.connect(peer.address, peer.layout)
        stub_mori.go_on.clear()
        try:
            write = route.write(EVERYTHING, EVERYTHING)
            await until(lambda: bool(plane_of(side).open))
            await side.plane.close()
            assert write.done.result() is WriteOutcome.UNPROVEN and "closed" in write.error
            del write, route
            gc.collect()
            held = [status for transfer in plane_of(side).open for status in transfer.handle[1]]
            assert held and all(status.InProgress() for status in held)
        finally:
            stub_mori.go_on.set()
        # The engine wrote into what is still there.
        await until(lambda: all(status.Succeeded() for status in held))
        monkeypatch.undo()
        await asyncio.to_thread(plane_of(side)._stop)
        side.pool.close()


async def test_a_transfer_is_held_until_its_last_status_is_written(side: Side) -> None:
    """It has one for each pair of regions, and the engine writes them in any order."""
    route = await side.plane.connect(side.address, side.layout)
    statuses = [stub_mori.TransferStatus() for _ in range(2)]
    codes = stub_mori.StatusCode
    for status in statuses:
        status.update(codes.IN_PROGRESS)
    transfer = Transfer(({}, statuses), 16)
    [known] = plane_of(side)._peers.values()
    plane_of(side).open.add(transfer)
    for ended in (statuses[1], statuses[0]):
        with pytest.raises(TransferError, match=r"a transfer to .* is under way"):
            known.release(transfer)
        assert plane_of(side).open == {transfer}
        ended.update(codes.SUCCESS)
    known.release(transfer)
    assert not plane_of(side).open
    route.close()


async def test_more_is_submitted_at_once_and_what_is_under_way_is_looked_at_soon(
    side: Side,
) -> None:
    route = await side.plane.connect(side.address, side.layout)
    assert isinstance(route, TransfersRoute)
    page_bytes = side.pool.layout.page_bytes
    write = ThreadWrite(route.thread, route, pages(0, 2), pages(1, 3), 2 * page_bytes)
    job = route.begin(write)
    stub_mori.go_on.clear()
    try:
        assert job.advance(page_bytes, False) == page_bytes and job.pause_s == 0.0
        assert job.advance(page_bytes, False) == page_bytes and 0.0 < job.pause_s < 0.01
        assert job.advance(page_bytes, False) == -1 and 0.0 < job.pause_s < 0.01
    finally:
        stub_mori.go_on.set()
    await until(lambda: job.advance(page_bytes, False) >= 0 and job.outcome is not None)
    assert job.outcome is WriteOutcome.LANDED and job.landed_bytes == 2 * page_bytes
    route.close()


async def test_blocks_outside_what_the_peer_has_registered_are_refused() -> None:
    async with sides("layer_first") as side, spawned(PLANE, "layer_first") as peer:
        first, *others = peer.layout.buffers
        lie = msgspec.structs.replace(others[-1], address=others[-1].address + (1 << 40))
        route = await side.plane.connect(
            peer.address, msgspec.structs.replace(peer.layout, buffers=(first, *others[:-1], lie))
        )
        write = route.write(pages(0, 2), pages(0, 2))
        assert await end_of(write, 10) is WriteOutcome.UNPROVEN
        assert "not in memory that" in write.error and not write.landed_bytes
        good = await side.plane.connect(peer.address, peer.layout)
        assert await end_of(good.write(pages(0), pages(0))) is WriteOutcome.LANDED


async def test_what_the_engine_says_of_a_failure_is_told(side: Side, peer: Peer) -> None:
    address = decode_description(peer.address.locator)
    memory = stub_mori.MemoryDesc.unpack(address.memory[0])
    lie = msgspec.structs.replace(memory, size=memory.size + (1 << 40))
    locator = pack_locator(msgspec.msgpack.encode(Description(address.engine, (lie.pack(),))))
    buffers = tuple(
        msgspec.structs.replace(b, address=b.address + (1 << 39)) for b in peer.layout.buffers
    )
    route = await side.plane.connect(
        msgspec.structs.replace(peer.address, locator=locator),
        msgspec.structs.replace(peer.layout, buffers=buffers),
    )
    write = route.write(pages(0), pages(0))
    assert await end_of(write, 10) is WriteOutcome.UNPROVEN
    assert "ended with status 13: [Errno 14] Bad address" in write.error
    route.close()
    # A peer that was broken is met anew.
    good = await side.plane.connect(peer.address, peer.layout)
    assert await end_of(good.write(pages(0), pages(0))) is WriteOutcome.LANDED


async def test_other_words_under_the_name_of_a_peer_are_refused_while_it_is_connected(
    side: Side, peer: Peer
) -> None:
    route = await side.plane.connect(peer.address, peer.layout)
    found = decode_description(peer.address.locator)
    other = pack_locator(msgspec.msgpack.encode(Description(found.engine, found.memory * 2)))
    with pytest.raises(TransferError, match="its description differs"):
        await side.plane.connect(msgspec.structs.replace(peer.address, locator=other), peer.layout)
    again = await side.plane.connect(peer.address, peer.layout)
    route.close()
    (known,) = plane_of(side)._peers.values()
    assert known.routes == 1, "the other route goes on"
    first = min(memory.data for memory in known.memory)
    for address in (first - 8, first + (1 << 40)):
        with pytest.raises(LayoutError, match=f"8 bytes at {address:#x} are not in memory that"):
            known.prepare(BlockList([side.pool.layout.buffers[0].address], [address], [8]))
    again.close()
    assert not plane_of(side)._peers


async def test_a_plane_exports_one_pool(side: Side) -> None:
    with pytest.raises(LayoutError, match="a plane exports one pool"):
        side.plane.export(side.pool.layout)


@pytest.mark.parametrize(("set_before", "chosen"), [(None, "mlx5_1"), ("mlx5_7", "mlx5_7")])
async def test_mori_reads_the_device_while_its_backend_is_made(
    monkeypatch: pytest.MonkeyPatch, set_before: str | None, chosen: str
) -> None:
    monkeypatch.delenv("MORI_RDMA_DEVICES", raising=False)
    if set_before is not None:
        monkeypatch.setenv("MORI_RDMA_DEVICES", set_before)
    seen: list[str | None] = []
    create = stub_mori.IOEngine.create_backend

    def noted(*given: Any) -> None:
        seen.append(os.environ.get("MORI_RDMA_DEVICES"))
        create(*given)

    monkeypatch.setattr(stub_mori.IOEngine, "create_backend", noted)
    await MoriPlane(device="mlx5_1", library=stub_mori).close()
    assert (seen, os.environ.get("MORI_RDMA_DEVICES")) == ([chosen], set_before)


async def test_memory_that_no_session_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub_mori.IOEngine, "create_session", lambda *_: None)
    async with sides() as side, spawned(PLANE) as peer:
        with pytest.raises(TransferError, match="no backend of the engine can reach that memory"):
            await side.plane.connect(peer.address, peer.layout)
        assert not plane_of(side)._peers


# Deeper than it can be skipped.
NESTED = pack_locator(b"\x93\xc4\x01x\x91\xc4\x01y" + b"\x91" * 60_000 + b"\x01")


@pytest.mark.parametrize("locator", ["", "host:1", "a b", "0" * 40, "~" * 4096, "c-qU$", NESTED])
async def test_what_is_no_description_is_refused(side: Side, locator: str) -> None:
    with pytest.raises(TransferError, match="no description of a mori engine"):
        await side.plane.connect(
            msgspec.structs.replace(side.address, locator=locator), side.layout
        )


async def test_a_description_of_another_process_or_of_others_memory_is_refused(
    side: Side, peer: Peer
) -> None:
    with pytest.raises(TransferError, match="is not one of process"):
        await side.plane.connect(
            msgspec.structs.replace(peer.address, process=side.address.process), peer.layout
        )
    theirs, ours = (decode_description(address.locator) for address in (peer.address, side.address))
    mixed = pack_locator(msgspec.msgpack.encode(Description(theirs.engine, ours.memory)))
    with pytest.raises(TransferError, match="describes memory of another engine"):
        await side.plane.connect(msgspec.structs.replace(peer.address, locator=mixed), peer.layout)
    junk = pack_locator(msgspec.msgpack.encode(Description(b"\xc1", (b"\xc1",))))
    with pytest.raises(TransferError, match="no description of a mori engine"):
        await side.plane.connect(msgspec.structs.replace(peer.address, locator=junk), peer.layout)


async def test_a_pool_in_too_many_pieces_is_refused() -> None:
    plane = MoriPlane(library=stub_mori)
    streams: list[tuple[str, str, tuple[int, ...]]] = [
        (f"{i}", "uint8", (1,)) for i in range(MAX_REGIONS + 1)
    ]
    layout = build_layout(streams, page_size=1, num_pages=4, order="layer_first")
    apart = tuple(
        msgspec.structs.replace(b, address=(i + 1) << 20) for i, b in enumerate(layout.buffers)
    )
    with pytest.raises(LayoutError, match=f"{MAX_REGIONS + 1} pieces, the limit is {MAX_REGIONS}"):
        plane.export(msgspec.structs.replace(layout, buffers=apart))
    await plane.close()


async def test_memory_is_given_back_where_no_pool_was_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane = MoriPlane(library=stub_mori)
    monkeypatch.setattr(locators, "MAX_LOCATOR", 1)
    layout = build_layout([("k", "uint8", (1,))], page_size=1, num_pages=4)
    with pytest.raises(LayoutError, match="characters to describe, the limit is 1"):
        plane.export(layout)
    for _ in range(2):
        await plane.close()
        assert not plane._engine._memory
