"""Writes that pass through staging, however they end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvflow.memory import staging as memory_staging
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging
from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import WriteOutcome
from kvflow.transports.data import staged
from kvflow.transports.data.fake import FakeNetwork, FakePlane
from kvflow.transports.data.local import LocalPlane, LocalRoute
from kvflow.transports.data.mori import MoriPlane
from kvflow.transports.data.staged import StagedPlane, StagedRoute
from tests.memory.gate import CopyGate
from tests.ranks.shards import PAGE_SIZE, heads, shard_of
from tests.transports import stub_mori
from tests.transports.peer_process import end_of

PAGES = 64


class Sides:
    """Page p of the source is full of p + 1, and a slice has two pages."""

    def __init__(self, pages: int = 6) -> None:
        layout = build_layout([("k", "uint8", (256,))], page_size=4, num_pages=PAGES)
        self.page_bytes = layout.page_bytes
        self.source, self.target = (
            PagedPool.allocate(layout, shared=False),
            PagedPool.allocate(layout),
        )
        self.source.array("k")[:] = np.arange(1, PAGES + 1, dtype=np.uint8)[:, None, None]
        self.staging = Staging(self.source, pages * layout.page_bytes)
        self.plane = StagedPlane(LocalPlane(self.staging.host.segment), self.staging)
        self.receiver = LocalPlane(self.target.segment)
        self.exported = self.receiver.export(self.target.layout)
        self.plane.export(self.source.layout)

    async def connect(self) -> StagedRoute:
        return await self.plane.connect(*self.exported)

    def landed(self, pages: Any) -> bool:
        return bool((self.target.array("k")[pages] == self.source.array("k")[pages]).all())

    async def close(self) -> None:
        await self.plane.close()
        await self.receiver.close()
        assert self.staging.host.pages.at_rest()
        self.staging.close()
        for pool in (self.source, self.target):
            pool.close()


def numbers(*indices: int) -> Any:
    return np.array(indices or range(PAGES), dtype=np.int32)


@pytest.fixture
async def sides(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sides]:
    monkeypatch.setattr(staged, "SLICE_BYTES", 2 << 10)
    monkeypatch.setattr(staged, "_ROUTES", 1)
    made = Sides()
    yield made
    await made.close()


async def test_many_writes_share_little_staging(sides: Sides) -> None:
    route = await sides.connect()
    assert route.places[0].size == 6 and route.slice_counts == (2,)
    writes = [
        route.write(numbers(*range(n, PAGES, 8)), numbers(*range(n, PAGES, 8))) for n in range(8)
    ]
    assert {await end_of(write) for write in writes} == {WriteOutcome.LANDED}
    assert sides.landed(numbers()) and sorted(route.places[0]) == list(range(6))


@pytest.mark.parametrize(("staging_pages", "slice_bytes"), [(6, 2 << 10), (PAGES, 1 << 10)])
async def test_a_route_takes_three_slices_and_leaves_the_rest_to_others(
    staging_pages: int, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "SLICE_BYTES", slice_bytes)
    sides = Sides(staging_pages)
    routes = [await sides.connect() for _ in range(2)]
    for route in routes:
        assert route.slice_counts == (1,) and route.places[0].size == 3
        route.close()
    assert isinstance(sides.plane.inner, LocalPlane) and not sides.plane.inner._routes
    assert sides.staging.host.pages.at_rest()
    await sides.close()


class Part:
    def __init__(self, page_bytes: int) -> None:
        self.source_pages = self.target_pages = numbers(0, 1)
        self.total_bytes, self.cancelled = 2 * page_bytes, False


async def test_a_turn_says_what_was_submitted_and_whether_anything_has_changed(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was submitted counts against the rate; -1 lets the plane's thread wait for longer."""
    gate, route = CopyGate(monkeypatch), await sides.connect()
    moves = [-1, 0, 100, 0]

    class Scripted:
        pause_s, landed_bytes, error = 0.001, 0, ""
        outcome: WriteOutcome | None = None

        def advance(self, max_bytes: int, cancelled: bool) -> int:
            moved = moves.pop(0)
            if not moves:
                self.landed_bytes, self.outcome = 2 * sides.page_bytes, WriteOutcome.LANDED
            return moved

    monkeypatch.setattr(route.inner, "begin", lambda write: Scripted())
    write = Part(sides.page_bytes)
    job = route.begin(write)
    assert job.advance(1000, False) == 0, "a copy was begun"
    await gate.reached()
    assert job.advance(1000, False) == -1, "it goes on"
    gate.go.set()
    [part] = job._slices
    assert await asyncio.wrap_future(part.copied)
    assert [job.advance(1000, False) for _ in range(4)] == [-1, 0, 100, 0]
    assert job.outcome is WriteOutcome.LANDED and job.landed_bytes == 2 * sides.page_bytes
    for cancelled in (False, True):
        write.cancelled = cancelled
        assert part.cancelled is cancelled, "the inner plane looks at it between two blocks"

    def fail(write: Any) -> None:
        raise ValueError("no plan")

    monkeypatch.setattr(route.inner, "begin", fail)
    job = route.begin(Part(sides.page_bytes))
    assert job.advance(1000, False) == 0
    [part] = job._slices
    assert await asyncio.wrap_future(part.copied)
    assert job.advance(1000, False) == 0, "it has ended, and nothing was submitted"
    assert job.outcome is WriteOutcome.UNPROVEN


async def test_a_slice_is_copied_while_another_travels(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    travelling, go_on, copied = threading.Event(), threading.Event(), threading.Event()
    begin, copy_out, count = LocalRoute.begin, Staging.copy_out, [0]

    def slowly(route: LocalRoute, write: Any) -> Any:
        travelling.set()
        assert go_on.wait(20)
        return begin(route, write)

    def counted(*given: Any) -> bool:
        count[0] += 1
        if count[0] == 2:
            assert travelling.wait(20)
        found = copy_out(*given)
        if count[0] == 2:
            copied.set()
        return found

    monkeypatch.setattr(LocalRoute, "begin", slowly)
    monkeypatch.setattr(Staging, "copy_out", counted)
    write = (await sides.connect()).write(numbers(), numbers())
    assert await asyncio.to_thread(copied.wait, 20)
    assert not go_on.is_set() and write.landed_bytes == 0
    go_on.set()
    assert await end_of(write) is WriteOutcome.LANDED


async def test_a_write_that_is_cancelled_in_mid_copy_ends_when_the_copy_has(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, route = CopyGate(monkeypatch), await sides.connect()
    write = route.write(numbers(), numbers())
    await gate.reached()
    write.cancel()
    with pytest.raises(TimeoutError):  # the copy still reads the pages of the write
        await end_of(write, 0.1)
    gate.go.set()
    assert await end_of(write) is WriteOutcome.CANCELLED
    assert gate.begun == 1 and write.landed_bytes == 0 and not write.error
    assert route.places[0].size == 6 and not sides.target.array("k").any()


async def test_a_copy_that_fails_ends_its_write_drained_and_no_other(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, route = CopyGate(monkeypatch, fails_at=5), await sides.connect()
    gate.go.set()
    write = route.write(numbers(), numbers())
    assert await end_of(write) is WriteOutcome.CANCELLED
    assert write.error == "a copy from the pool failed: the device is lost"
    assert write.landed_bytes == 8 * sides.page_bytes and sides.landed(numbers(*range(8)))
    assert route.places[0].size == 6
    again = route.write(numbers(9, 8), numbers(9, 8))
    assert await end_of(again) is WriteOutcome.LANDED and sides.landed(numbers(8, 9))


@pytest.mark.parametrize("raises", [False, True])
async def test_what_is_in_doubt_on_the_inner_plane_is_in_doubt(
    sides: Sides, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = LocalRoute.begin, [0]

    class Doubtful:
        pause_s, landed_bytes = 0.0, 0
        error, outcome = "a block ended with status -1", WriteOutcome.UNPROVEN

        def advance(self, max_bytes: int, cancelled: bool) -> int:
            return max_bytes

    def second(route: LocalRoute, write: Any) -> Any:
        begun[0] += 1
        if begun[0] == 2 and raises:
            raise ValueError("no plan")
        return Doubtful() if begun[0] == 2 else begin(route, write)

    monkeypatch.setattr(LocalRoute, "begin", second)
    route = await sides.connect()
    write = route.write(numbers(), numbers())
    assert await end_of(write) is WriteOutcome.UNPROVEN
    assert write.error == ("ValueError: no plan" if raises else "a block ended with status -1")
    assert write.landed_bytes == 2 * sides.page_bytes
    assert begun[0] == 2
    assert route.places[0].size == 6
    assert route.thread.surprises == int(raises)


async def test_a_peer_that_takes_nothing_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staged, "_ROUTES", 2)
    sides = Sides(pages=12)
    stuck, free = await sides.connect(), await sides.connect()

    class Never:
        pause_s, landed_bytes, error = 0.001, 0, ""
        outcome: WriteOutcome | None = None

        def advance(self, max_bytes: int, cancelled: bool) -> int:
            self.outcome = WriteOutcome.CANCELLED if cancelled else None
            return -1

    monkeypatch.setattr(stuck.inner, "begin", lambda write: Never())
    waiting = [stuck.write(numbers(), numbers()) for _ in range(4)]
    write = free.write(numbers(), numbers())
    assert await end_of(write) is WriteOutcome.LANDED
    with pytest.raises(TransferError, match=r"no staging is left .*2 have some\): a larger"):
        await sides.connect()
    free.close()
    (await sides.connect()).close()
    for other in waiting:
        other.cancel()
    assert {await other.done for other in waiting} == {WriteOutcome.CANCELLED}
    await sides.close()


async def test_closing_waits_for_the_copies(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, route = CopyGate(monkeypatch), await sides.connect()
    write = route.write(numbers(), numbers())
    await gate.reached()
    closing = asyncio.ensure_future(sides.plane.close())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(closing), 0.1)
    gate.go.set()
    await asyncio.wait_for(closing, 20)
    assert write.done.result() is WriteOutcome.CANCELLED
    with pytest.raises(TransferError, match="closed"):
        route.write(numbers(0), numbers(0))


async def test_a_write_is_refused_as_by_the_pool_itself(sides: Sides) -> None:
    route = await sides.connect()
    with pytest.raises(LayoutError, match=r"outside 0\.\.63"):
        route.write(numbers(PAGES), numbers(0))
    with pytest.raises(LayoutError, match="lists differ"):
        route.write(numbers(1, 2), numbers(0))


async def test_a_plane_of_another_making_is_refused(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = FakeNetwork()
    plane, peer = StagedPlane(FakePlane(network), sides.staging), FakePlane(network)
    plane.export(sides.source.layout)
    routes: list[Any] = []
    connect = FakePlane.connect

    async def connected(*given: Any) -> Any:
        routes.append(await connect(*given))
        return routes[-1]

    monkeypatch.setattr(FakePlane, "connect", connected)
    with pytest.raises(LayoutError, match="plane 'fake' cannot write from staging"):
        await plane.connect(*peer.export(sides.target.layout))
    assert [route.closed for route in routes] == [True], "nobody else knows of it"
    await plane.close()


async def test_large_slices_are_cut_where_a_cancel_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_staging, "SLICE_BYTES", 512)
    sides = Sides()
    asked = itertools.count()
    assert (
        sides.staging.copy_out(numbers(0, 1, 2), numbers(3, 4, 5), lambda: next(asked) == 3)
        is False
    )
    staged_bytes = sides.staging.host.pages_bytes(numbers(3, 4, 5)).reshape(-1)
    assert np.count_nonzero(staged_bytes) == 3 * 512
    await sides.close()


async def test_slices_that_are_gathered_are_warned_of_by_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine's plane, by itself, would: it sees staging and target, whose blocks are tiny."""
    kinds = [
        [kind for shard in range(shards) for kind in shard_of(heads(2, 8), shard, shards)]
        for shards in (1, 2)
    ]
    source, target = (
        PagedPool.allocate(build_layout(each, page_size=PAGE_SIZE, num_pages=4)) for each in kinds
    )
    staging = Staging(source, 4 * source.layout.page_bytes)
    plane = StagedPlane(MoriPlane(library=stub_mori), staging)
    peer = MoriPlane(library=stub_mori)
    plane.export(source.layout)
    with caplog.at_level(logging.INFO):
        await plane.connect(*peer.export(target.layout))
    assert "are written over mori in blocks of" in caplog.text
    assert "are slow" not in caplog.text
    for each in (plane, peer):
        await each.close()
    staging.close()
    for pool in (source, target):
        pool.close()
