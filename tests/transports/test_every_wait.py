"""Every wait of a plane's close and connect is cancelled, and nothing is copied later (I12)."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import Route, Write, WriteOutcome
from kvflow.testing.cancellation import Steps
from kvflow.transports.data.local import LocalPlane, _Copier
from kvflow.transports.data.route import BlockList
from kvflow.transports.data.write_thread import ThreadWrite
from tests.transports.peer_process import local_planes, until

HOW = ["once", "late", "twice", "throughout"]
LAYOUT = build_layout([("0.k", "uint8", (1 << 14,))], page_size=4, num_pages=64)  # 64 KiB a page
PAGES = np.arange(64, dtype=np.int32)
RATE_BYTES_PER_S = 8e6  # half a second for all of it


@asynccontextmanager
async def planes() -> AsyncIterator[tuple[LocalPlane, LocalPlane, PagedPool]]:
    async with local_planes(LAYOUT, RATE_BYTES_PER_S) as (source, target, ours, theirs):
        ours.tensor("0.k").fill_(7)
        yield source, target, theirs


def plan(first: int, how: str) -> range:
    return range(first, first + {"once": 1, "late": 1, "twice": 2, "throughout": 6}[how])


def after_s(how: str) -> float:
    return 0.003 if how == "late" else 0.0


@pytest.mark.parametrize("how", HOW)
async def test_every_wait_of_close(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copying, copy = threading.Event(), _Copier.copy

    def slowly(copier: _Copier, blocks: BlockList, write: ThreadWrite) -> int:
        copying.set()
        time.sleep(0.02)
        return copy(copier, blocks, write)

    monkeypatch.setattr(_Copier, "copy", slowly)
    for first in itertools.count():
        async with planes() as (source, target, pool):
            route: Route = await source.connect(*target.export(pool.layout))
            writes: list[Write] = [route.write(PAGES, PAGES) for _ in range(3)]
            copying.clear()
            await until(copying.is_set)
            steps = Steps(source.close(), *plan(first, how), after_s=after_s(how))
            await asyncio.gather(steps.task(), return_exceptions=True)
            assert {write.done.result() for write in writes} == {WriteOutcome.CANCELLED}
            assert not any(thread.name == "kvflow-local" for thread in threading.enumerate())
            pool.tensor("0.k").fill_(1)
        if steps.waits <= first:
            break
    print(f"closing a plane, {how}: {first} waits")
    assert first


@pytest.mark.parametrize("how", HOW)
async def test_every_wait_of_connect(how: str) -> None:
    for first in itertools.count():
        async with planes() as (source, target, pool):
            steps = Steps(
                source.connect(*target.export(pool.layout)), *plan(first, how), after_s=after_s(how)
            )
            (found,) = await asyncio.gather(steps.task(), return_exceptions=True)
            assert isinstance(found, asyncio.CancelledError) == (not source._routes)
        if steps.waits <= first:
            break
    print(f"connecting a plane, {how}: {first} waits")
    assert first
