"""Thousands of times out and back again, with aborts and cancellations at random moments."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvflow.memory.pool import PagedPool
from kvflow.memory.residency import Resident
from kvflow.memory.snapshot import SnapshotStore
from kvflow.protocols.errors import HostMemoryError
from kvflow.protocols.machines.residency import ResidencyPhase as P
from kvflow.protocols.pages.layout import Places
from tests.memory.kinds import KINDS, give_back, layout_of, names_of, space_of, take
from tests.soak import sized

PAGES, ROWS, REQUESTS, MOST_PAGES = 12, 4, 3, 3
CYCLES = sized(3_000, 10_000)
FLAT_BYTES = 420 * CYCLES  # a row, leaked in each cycle, would be 576 in each
ALL_KINDS = sorted(KINDS)


class Soak:
    def __init__(self, kind: str, random: np.random.Generator) -> None:
        self.kind, self._random = kind, random
        layout = layout_of(kind, 4, PAGES, ROWS, "page_first")
        self.pool = PagedPool.allocate(layout, shared=False)
        # one of the largest requests and a bit: it is full now and then
        limit_bytes = layout.room_bytes(
            tuple(2 if space.in_rows else MOST_PAGES + 1 for space in layout.spaces)
        )
        rows = 2 if layout.num_rows else None
        self.store = SnapshotStore(self.pool, limit_bytes, num_rows=rows)
        self._numbers = itertools.count()
        self.requests = [self._begin() for _ in range(REQUESTS)]
        self.bytes_of = {request.owner: self.write(request.places) for request in self.requests}
        self.resumes = self.aborts = self.cancels = self.full = 0

    def _begin(self) -> Resident:
        owner = ("sequence", next(self._numbers))
        places = take(self.pool, int(self._random.integers(1, MOST_PAGES + 1)), 1, owner)
        return Resident(owner, places, allocators=self.pool.allocators, store=self.store)

    def write(self, places: Places) -> list[NDArray[np.uint8]]:
        for name in names_of(self.kind):
            array, at = self.pool.array(name), self._at(name, places)
            bits = self._random.integers(0, 256, array[at].nbytes, dtype=np.uint8)
            array[at] = bits.view(array.dtype).reshape(array[at].shape)
        return self.read(places)

    def read(self, places: Places) -> list[NDArray[np.uint8]]:
        names = names_of(self.kind)
        return [
            np.frombuffer(self.pool.array(name)[self._at(name, places)].tobytes(), np.uint8)
            for name in names
        ]

    def _at(self, name: str, places: Places) -> Any:
        return places[space_of(self.kind, name)]

    def foreign(self) -> None:
        taken = tuple(a.take(a.free_pages, "foreign") for a in self.pool.allocators)
        self.write(taken)
        give_back(self.pool, taken, "foreign")

    def check(self) -> None:
        for request in self.requests:
            if request.phase is P.RESIDENT:
                found = self.read(request.places)
                assert all(map(np.array_equal, found, self.bytes_of[request.owner])), request
        away = [request.sizes for request in self.requests if request.phase is P.AWAY]
        layout = self.pool.layout
        assert self.store.used_bytes == sum(map(layout.room_bytes, away))

    def replace(self, request: Resident) -> None:
        assert request.phase is P.ENDED
        self.requests.remove(request)
        del self.bytes_of[request.owner]
        fresh = self._begin()
        self.requests.append(fresh)
        self.bytes_of[fresh.owner] = self.write(fresh.places)

    async def come_back(self, request: Resident) -> None:
        while request.phase is P.AWAY:
            self.foreign()
            assert await request.resume()
            self.resumes += 1

    async def out_and_in(self, request: Resident) -> None:
        await request.retract()
        await self.come_back(request)

    async def all_at_once(self, _: Resident) -> None:
        """Host memory may be too small for all: who finds no room stays where it was."""
        ended = await asyncio.gather(*(r.retract() for r in self.requests), return_exceptions=True)
        assert all(error is None or isinstance(error, HostMemoryError) for error in ended)
        self.full += sum(error is not None for error in ended)
        self.check()
        for request in self.requests:
            await self.come_back(request)

    async def cancelled_twice(self, request: Resident) -> None:
        await self._cut(request.retract(), lambda task: task.cancel())
        if request.phase is P.RESIDENT:
            return
        await self._cut(request.resume(), lambda task: task.cancel())
        await self.come_back(request)

    async def aborted(self, request: Resident) -> None:
        await self._cut(request.retract(), lambda _: request.close())
        if request.phase is not P.ENDED:
            self.foreign()
            await self._cut(request.resume(), lambda _: request.close())
        request.close()
        self.replace(request)
        self.aborts += 1

    async def _cut(
        self, moving: Coroutine[Any, Any, Any], cut: Callable[[asyncio.Task[Any]], object]
    ) -> None:
        task = asyncio.ensure_future(moving)
        for _ in range(int(self._random.integers(1, 5))):  # it has begun
            await asyncio.sleep(0)
        if not task.done():
            cut(task)
            self.cancels += 1
        with suppress(asyncio.CancelledError):
            await task

    async def close(self) -> None:
        for request in self.requests:
            request.close()
        assert self.pool.places.at_rest()
        assert self.store.used_bytes == self.store.count == 0
        await self.store.close()
        self.pool.close()


async def soak(
    kind: str, cycles: int, seed: int, each: Callable[[int], None] = lambda _: None
) -> Soak:
    random = np.random.default_rng(seed)
    run = Soak(kind, random)
    acts = [*[run.out_and_in] * 12, *[run.all_at_once] * 2, *[run.cancelled_twice] * 2, run.aborted]
    while run.resumes < cycles:
        act = acts[int(random.integers(len(acts)))]
        await act(run.requests[int(random.integers(len(run.requests)))])
        run.check()
        each(run.resumes)
    await run.close()
    return run


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_every_kind_comes_back_as_it_was(kind: str, request: pytest.FixtureRequest) -> None:
    await soak(kind, 200, request.config.option.seed)


@pytest.mark.slow
async def test_thousands_of_cycles_leave_memory_as_it_was(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    resident: list[int] = []

    def measure(resumes: int) -> None:
        if resumes // (CYCLES // 10) > len(resident):
            resident.append(
                int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            )

    run = await soak("hybrid", CYCLES, request.config.option.seed, measure)
    with capsys.disabled():
        counts = (
            f"{run.resumes} resumes, {run.aborts} aborts, {run.cancels} copies cut short, "
            f"{run.full} refused"
        )
        print(f"\n{counts}; RSS in MiB: {', '.join(f'{size / 2**20:.1f}' for size in resident)}")
    assert min(run.aborts, run.cancels, run.full) > 100
    assert len(resident) == 10
    assert resident[-1] - resident[1] < FLAT_BYTES
