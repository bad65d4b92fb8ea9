"""Tiny local writes, which are copied on the event loop."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import PageIndices, build_layout
from kvflow.protocols.ports import WriteOutcome
from kvflow.transports.data.local import LocalPlane, LocalRoute
from kvflow.transports.data.route import FEW_BLOCKS
from kvflow.transports.data.write_thread import AT_ONCE_BYTES
from tests.transports.peer_process import end_of, local_planes, pages, until

KIB = 1 << 10
PAGES = 1024


class PlanePair:
    """Two pools, of random bytes and of zeros, and a route from the first into the second."""

    def __init__(self, source: PagedPool, target: PagedPool, plane: LocalPlane) -> None:
        self.source, self.target, self.plane = source, target, plane
        self.route: LocalRoute

    def same(self, at: PageIndices, there: PageIndices) -> bool:
        return bool((self.source.pages_bytes(at) == self.target.pages_bytes(there)).all())

    @property
    def landed_pages(self) -> int:
        everything = np.arange(PAGES, dtype=np.int32)
        return int(self.target.pages_bytes(everything).reshape(PAGES, -1).any(axis=1).sum())


@asynccontextmanager
async def pair(
    page_kib: int, *, streams: int = 1, order: str = "page_first", rate: float | None = None
) -> AsyncIterator[PlanePair]:
    each = [(f"{i}", "uint8", (page_kib * KIB // 16 // streams,)) for i in range(streams)]
    layout = build_layout(
        each,
        page_size=16,
        num_pages=PAGES,
        order=order,  # type: ignore[arg-type]
    )
    async with local_planes(layout, rate) as (plane, receiver, source, target):
        for b in source.layout.buffers:
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * b.size_bytes).from_address(b.address))
            memory[:] = np.random.default_rng(b.size_bytes).integers(
                1, 256, b.size_bytes, dtype=np.uint8
            )
        opened = PlanePair(source, target, plane)
        opened.route = await plane.connect(*receiver.export(target.layout))
        yield opened


@pytest.mark.parametrize(
    ("streams", "order", "at_once_pages"),
    [
        (1, "page_first", 16),
        (1, "layer_first", 16),
        (4, "layer_first", 16),
        (16, "layer_first", FEW_BLOCKS // 16),
    ],
)
async def test_up_to_64_kib_in_few_blocks_has_landed_when_write_returns(
    streams: int, order: str, at_once_pages: int
) -> None:
    assert AT_ONCE_BYTES == 64 * KIB
    rng = np.random.default_rng(1)
    async with pair(4, streams=streams, order=order) as p:
        for count in (1, 2, at_once_pages, at_once_pages + 1):
            at, there = (rng.permutation(PAGES)[:count].astype(np.int32) for _ in range(2))
            before = p.landed_pages
            write = p.route.write(at, there)
            at_once = count <= at_once_pages
            assert write.done.done() is at_once and (p.same(at, there) or not at_once)
            assert await end_of(write) is write.done.result() is WriteOutcome.LANDED
            assert p.same(at, there)
            assert write.landed_bytes == write.total_bytes == count * 4 * KIB and not write.error
            write.cancel()  # too late, and harmless
            assert before < p.landed_pages <= before + count and p.plane.stalled_s == 0
            await asyncio.sleep(0)  # the turn ends


async def test_nothing_overtakes_what_was_written_before() -> None:
    async with pair(4, rate=4e6) as p:
        everything = np.arange(PAGES, dtype=np.int32)
        large = p.route.write(everything, everything)
        await until(lambda: large.landed_bytes > 0)
        tiny = p.route.write(pages(PAGES - 1), pages(PAGES - 1))
        assert not tiny.done.done() and p.plane.stalled_s < 20
        large.cancel()
        assert await end_of(large) is WriteOutcome.CANCELLED
        assert await end_of(tiny) is WriteOutcome.LANDED
        assert p.same(pages(PAGES - 1), pages(PAGES - 1))


@pytest.mark.parametrize(
    ("page_kib", "streams", "order", "in_one_turn"),
    [
        (64, 1, "page_first", 4),
        (16, 1, "page_first", 16),
        (1, 1, "page_first", 64),
        (4, 16, "layer_first", 4),
    ],
)
async def test_one_turn_of_the_loop_copies_a_bounded_amount(
    page_kib: int, streams: int, order: str, in_one_turn: int
) -> None:
    async with pair(page_kib, streams=streams, order=order) as p:
        writes = [p.route.write(pages(i), pages(i)) for i in range(in_one_turn + 10)]
        assert [write.done.done() for write in writes] == [True] * in_one_turn + [False] * 10
        assert {await end_of(write) for write in writes} == {WriteOutcome.LANDED}
        assert p.landed_pages == len(writes)
        assert p.route.write(pages(0), pages(1)).done.done()


async def test_the_rate_limit_holds_for_tiny_writes_too() -> None:
    rate, clock = 1e6, asyncio.get_running_loop().time
    async with pair(4, rate=rate) as p:
        began, writes = clock(), []
        while clock() < began + 0.1:
            writes.append(p.route.write(pages(0), pages(0)))
            assert (
                sum(write.landed_bytes for write in writes)
                <= rate * (clock() - began) + rate * 0.005 + 4 * KIB
            )
            await end_of(writes[-1])
        assert any(write.done.done() for write in writes[1:])
        # More than one slice of that rate.
        assert not p.route.write(pages(*range(16)), pages(*range(16))).done.done()
