"""The fake plane follows its script, and copies real bytes."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.layout import PageIndices, build_layout
from kvflow.protocols.ports import PlaneAddress, WriteOutcome
from kvflow.transports.data.fake import FakeNetwork, FakePlane, FakeRoute, Fault
from tests.transports.peer_process import end_of, pages

PAGE_BYTES = 64


class PlanePair:
    def __init__(self) -> None:
        self.network = FakeNetwork()
        layout = build_layout(
            [("k", "uint8", (8,)), ("v", "uint8", (8,))], page_size=4, num_pages=8
        )
        self.source, self.target = (PagedPool.allocate(layout, shared=False) for _ in range(2))
        self.source.tensor("k")[:] = 1
        self.source.tensor("v")[:] = 1
        self.prefill, self.decode = FakePlane(self.network), FakePlane(self.network)
        self.prefill_end, _ = self.prefill.export(self.source.layout)
        self.decode_end, self.theirs = self.decode.export(self.target.layout)

    async def route(self) -> FakeRoute:
        return await self.prefill.connect(self.decode_end, self.theirs)

    def arrived(self) -> int:
        return int(np.count_nonzero(self.target.pages_bytes(np.arange(8, dtype=np.int32))))


@pytest.fixture
async def pair() -> PlanePair:
    return PlanePair()


FOUR: tuple[PageIndices, PageIndices] = (pages(0, 1, 2, 3), pages(7, 1, 4, 2))


async def test_without_a_script_everything_lands(pair: PlanePair) -> None:
    route = await pair.route()
    write = route.write(*FOUR)
    assert write.landed_bytes == 0 and not write.done.done()  # never within the call itself
    assert await end_of(write) is WriteOutcome.LANDED
    assert write.landed_bytes == write.total_bytes == pair.arrived() == 4 * PAGE_BYTES
    assert pair.prefill.writes == [] and pair.prefill.started == [write]


async def test_held_writes_move_page_by_page(pair: PlanePair) -> None:
    pair.prefill.hold()
    route = await pair.route()
    write, later = route.write(*FOUR), route.write(pages(5), pages(5))
    await asyncio.sleep(0)
    assert pair.arrived() == 0
    assert pair.prefill.step(3) == 3 * PAGE_BYTES == write.landed_bytes == pair.arrived()
    write.cancel()
    write.cancel()
    assert write.done.result() is WriteOutcome.CANCELLED and pair.arrived() == 3 * PAGE_BYTES
    pair.prefill.release()
    assert later.done.result() is WriteOutcome.LANDED and pair.arrived() == 4 * PAGE_BYTES
    later.cancel()
    assert not later.cancelled, "it has landed"
    assert pair.prefill.step() == 0


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.LATE])
async def test_errors_prove_nothing_and_late_ones_land_later(pair: PlanePair, fault: Fault) -> None:
    pair.prefill.script(fault)
    write = (await pair.route()).write(*FOUR)
    assert await end_of(write) is WriteOutcome.UNPROVEN and fault.value in write.error
    assert write.landed_bytes == pair.arrived() == 2 * PAGE_BYTES
    pair.source.tensor("k")[:] = 2  # whatever the source holds by then
    assert pair.prefill.land_late() == (2 * PAGE_BYTES if fault is Fault.LATE else 0)
    values = pair.target.pages_bytes(pages(4, 2))
    assert bool((values == 2).any()) == (fault is Fault.LATE)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(Fault.ERROR, WriteOutcome.CANCELLED), (Fault.LATE, WriteOutcome.UNPROVEN)],
)
async def test_one_page_meets_a_fault_too(
    pair: PlanePair, fault: Fault, outcome: WriteOutcome
) -> None:
    pair.prefill.script(fault)
    write = (await pair.route()).write(pages(1), pages(1))
    assert await end_of(write) is outcome and pair.arrived() == 0
    assert write.error, "an error all the same"


async def test_a_stuck_write_ends_only_when_released(pair: PlanePair) -> None:
    pair.prefill.script(Fault.STUCK)
    route = await pair.route()
    stuck, other = route.write(*FOUR), route.write(pages(5), pages(5))
    assert await end_of(other) is WriteOutcome.LANDED  # it holds up nobody else
    stuck.cancel()
    await asyncio.sleep(0)
    assert not stuck.done.done()
    pair.prefill.release()
    assert stuck.done.result() is WriteOutcome.CANCELLED


class Draining(FakePlane):
    drains_at_once = False


async def test_a_cancelled_write_of_a_plane_that_drains_ends_at_its_next_turn(
    pair: PlanePair,
) -> None:
    plane = Draining(pair.network)
    plane.export(pair.source.layout)
    plane.hold()
    write = (await plane.connect(pair.decode_end, pair.theirs)).write(*FOUR)
    assert plane.step() == PAGE_BYTES
    write.cancel()
    assert write.cancelled and not write.done.done()
    assert plane.step() == 0 and write.done.result() is WriteOutcome.CANCELLED
    assert pair.arrived() == PAGE_BYTES


async def test_a_fence_resolves_with_death_and_nothing_lands_after_it(pair: PlanePair) -> None:
    pair.prefill.script(Fault.LATE)
    route = await pair.route()
    await end_of(route.write(*FOUR))
    fence = asyncio.ensure_future(pair.decode.fence(pair.prefill_end))
    await asyncio.sleep(0)
    assert not fence.done()
    pair.prefill.die()
    await asyncio.wait_for(fence, 20)
    landed = pair.arrived()
    assert pair.prefill.land_late() == 0 and pair.arrived() == landed
    with pytest.raises(TransferError):
        route.write(*FOUR)


async def test_closing_ends_what_is_under_way(pair: PlanePair) -> None:
    pair.prefill.hold()
    pair.prefill.script(Fault.STUCK)
    route = await pair.route()
    stuck, waiting = route.write(*FOUR), route.write(*FOUR)
    await pair.prefill.close()
    assert stuck.done.result() is WriteOutcome.UNPROVEN
    assert waiting.done.result() is WriteOutcome.CANCELLED
    with pytest.raises(TransferError):
        await pair.decode.connect(pair.prefill_end, pair.source.layout)


async def test_wrong_use_is_refused(pair: PlanePair) -> None:
    nowhere = PlaneAddress("fake", "fake-99", pair.decode_end.process)
    with pytest.raises(TransferError):
        await pair.decode.fence(nowhere)
    with pytest.raises(LayoutError):
        pair.decode.export(msgspec.structs.replace(pair.target.layout, buffers=()))
    with pytest.raises(LayoutError, match="export"):
        await FakePlane(pair.network).connect(pair.decode_end, pair.theirs)
