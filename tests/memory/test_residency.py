"""A request's state leaves the pool and comes back, or ends, at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress

import numpy as np
import pytest
from numpy.typing import NDArray

from kvflow.memory.copies import HostCopier
from kvflow.memory.pool import PagedPool
from kvflow.memory.residency import Resident
from kvflow.memory.snapshot import Snapshot, SnapshotStore
from kvflow.protocols.errors import CapacityError, HostMemoryError, MisuseError
from kvflow.protocols.machines.residency import ResidencyPhase as P
from kvflow.protocols.pages.layout import Places
from tests.memory.gate import CopyGate
from tests.memory.kinds import layout_of, overwrite, take

KIND = "hybrid"
OWNER = ("sequence", 1)


class World:
    """A pool of 6 pages and 2 rows, bounded host memory, and one request of 3 pages and a row."""

    def __init__(self, host_pages: int = 8) -> None:
        layout = layout_of(KIND, 4, 6, 2, "page_first")
        self.pool = PagedPool.allocate(layout, shared=False)
        limit = host_pages * layout.page_bytes + 2 * layout.row_bytes
        self.store = SnapshotStore(self.pool, limit, num_rows=2, slice_bytes=layout.page_bytes)
        places = take(self.pool, 3, 1, OWNER)
        overwrite(self.pool, 7)
        self.request = Resident(OWNER, places, allocators=self.pool.allocators, store=self.store)

    def state(self) -> list[NDArray[np.uint8]]:
        return [self.pool.places_bytes(i, own) for i, own in enumerate(self.request.places)]

    def foreign(self) -> None:
        assert self.device_home
        overwrite(self.pool, 99)

    @property
    def device_home(self) -> bool:
        return self.pool.places.at_rest()


@pytest.fixture
async def w() -> AsyncIterator[World]:
    async with world() as made:
        yield made


@asynccontextmanager
async def world(host_pages: int = 8) -> AsyncIterator[World]:
    made = World(host_pages)
    try:
        yield made
        made.request.close()
        assert made.device_home
        assert (made.store.used_bytes, made.store.count) == (0, 0)
    finally:
        await made.store.close()
        made.pool.close()


def same(one: list[NDArray[np.uint8]], other: list[NDArray[np.uint8]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


async def test_out_and_in_again_twice(w: World) -> None:
    before = w.state()
    for _ in range(2):
        await w.request.retract()
        assert (w.request.phase, w.device_home, w.store.count) == (P.AWAY, True, 1)
        assert w.request.copied
        w.foreign()
        assert await w.request.resume()
        assert (w.request.phase, w.store.count) == (P.RESIDENT, 0)
        assert same(before, w.state())
        w.request.add(w.pool.pages.take(1, OWNER))
        before = w.state()


async def test_dropped_state_is_not_brought_back(w: World) -> None:
    w.request.drop()
    assert (w.request.phase, w.device_home, w.store.used_bytes) == (P.AWAY, True, 0)
    assert not w.request.copied
    assert not await w.request.resume()
    assert [own.size for own in w.request.places] == [3, 1]


async def test_only_what_is_away_is_computed_again(w: World) -> None:
    with pytest.raises(MisuseError, match="is not away"):
        w.request.needs(2)
    await w.request.retract()
    w.request.needs(2)
    assert (w.store.used_bytes, w.request.sizes) == (0, (2, 1))
    assert not await w.request.resume()
    assert w.request.places[0].size == 2


async def test_host_memory_is_full() -> None:
    async with world(host_pages=2) as w:
        before = w.state()
        with pytest.raises(HostMemoryError, match="needs 3 pages of host memory, and 2 are free"):
            await w.request.retract()
        assert w.request.phase is P.RESIDENT
        assert same(before, w.state())


@pytest.mark.parametrize("lacking", ["pages", "rows"])
async def test_no_room_to_come_back(w: World, lacking: str) -> None:
    before = w.state()
    await w.request.retract()
    allocator = getattr(w.pool, lacking)
    taken = allocator.take(allocator.free_pages, "another")
    with pytest.raises(CapacityError):
        await w.request.resume()
    assert (w.request.phase, w.store.count) == (P.AWAY, 1)
    allocator.give_back(taken, "another")
    await w.request.resume()
    assert same(before, w.state())


@pytest.mark.parametrize("returning", [False, True], ids=["leaving", "returning"])
@pytest.mark.parametrize("how", ["close", "cancel", "cancel twice", "fail", "close after cancel"])
async def test_a_copy_that_does_not_end_well(
    w: World, monkeypatch: pytest.MonkeyPatch, returning: bool, how: str
) -> None:
    before = w.state()
    if returning:
        await w.request.retract()
        w.foreign()
    gate = CopyGate(monkeypatch)
    copying = asyncio.ensure_future(w.request.resume() if returning else w.request.retract())
    await gate.reached()
    assert w.request.phase.name == ("RETURNING" if returning else "LEAVING")
    if how == "close":
        w.request.close()
    elif how == "fail":
        monkeypatch.setattr(HostCopier, "copy", staticmethod(broken))
    else:
        copying.cancel()
        await asyncio.sleep(0)
    if how == "cancel twice":
        copying.cancel()
    if how == "close after cancel":
        w.request.close()
    await asyncio.sleep(0)
    assert w.pool.pages.free_pages == 3, "a copy still uses them (I2)"
    gate.go.set()
    with suppress(OSError, asyncio.CancelledError):
        await copying
    phase: P = w.request.phase
    if how.startswith("close"):
        assert phase is P.ENDED
        assert w.device_home and w.store.used_bytes == 0
        return
    assert phase is (P.AWAY if returning else P.RESIDENT)
    assert w.device_home == returning
    monkeypatch.undo()
    if returning:
        await w.request.resume()
    assert same(before, w.state()), "what was not copied is still there"


def broken(_: object) -> None:
    raise OSError("the copy failed")


@pytest.mark.parametrize("phase", ["resident", "away", "dropped"])
async def test_closed_while_nothing_is_copied(w: World, phase: str) -> None:
    if phase == "away":
        await w.request.retract()
    elif phase == "dropped":
        w.request.drop()
    for _ in range(2):
        w.request.close()
        assert w.request.phase is P.ENDED
        assert w.device_home and w.store.used_bytes == 0


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_ended_in_the_turn_in_which_the_copy_is_ready(
    w: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The snapshot is made, and nobody but the request knows of it: its host memory is freed."""
    take = w.store.take

    async def ready(places: Places) -> Snapshot:
        snapshot = await take(places)
        if how == "cancel":
            leaving.cancel()
        else:  # runs before what waits for this coroutine
            asyncio.get_running_loop().call_soon(w.request.close)
        return snapshot

    monkeypatch.setattr(w.store, "take", ready)
    leaving = asyncio.ensure_future(w.request.retract())
    with pytest.raises(asyncio.CancelledError) if how == "cancel" else nullcontext():
        await leaving
    assert w.request.phase is (P.RESIDENT if how == "cancel" else P.ENDED)
    assert w.device_home is (how == "close")
    assert (w.store.used_bytes, w.store.count) == (0, 0)


async def test_misuse_is_refused(w: World) -> None:
    with pytest.raises(MisuseError, match="is not away"):
        await w.request.resume()
    await w.request.retract()
    for misuse in (
        w.request.drop,
        lambda: w.request.places,
        lambda: w.request.add(np.zeros(1, dtype=np.int32)),
    ):
        with pytest.raises(MisuseError, match="is not resident"):
            misuse()
    with pytest.raises(MisuseError, match="is not resident"):
        await w.request.retract()
    bare = Resident(
        "bare",
        take(w.pool, 1, 1, "bare"),
        allocators=w.pool.allocators,
    )
    with pytest.raises(MisuseError, match="no host memory"):
        await bare.retract()
    bare.close()


async def test_pages_that_were_handed_over_are_no_longer_its_own(w: World) -> None:
    first, later = w.request.places[0][:2], w.request.places[0][2:]
    w.pool.pages.move(first, OWNER, "cache")
    w.request.hand_over(2)
    assert w.request.places[0].tolist() == later.tolist() and w.request.sizes == (1, 1)
    await w.request.retract()
    with pytest.raises(MisuseError, match="is not resident"):
        w.request.hand_over(1)
    assert w.pool.pages.owned() == {"cache": 2}
    await w.request.resume()
    w.pool.pages.give_back(first, "cache")
