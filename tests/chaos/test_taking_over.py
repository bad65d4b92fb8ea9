"""A prefill frozen in mid-write, the decode node closed, a new one over its pool, and the prefill
thawed.
"""

from __future__ import annotations

import signal

import numpy as np
import pytest

from kvflow.memory.external import ExternalPages
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire.ranks import rank_from_json
from kvflow.testing.pair import fill
from kvflow.testing.pair import until as here
from kvflow.transports.data.local import LocalPlane
from tests.chaos.pair import NUM_PAGES, begin, station, until
from tests.chaos.station import DIM, HEADS, LAYERS, PAGE_SIZE, TIMING

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

RATE = 4_000_000
PAGES = 64  # 2 MiB: half a second
MINE = 0xAA


@pytest.mark.parametrize("own", [True, False], ids=["the pool's store", "another store"])
async def test_the_thawed_writer_finds_its_pages_kept(own: bool) -> None:
    streams = [(f"layer.{i}.{kv}", "bfloat16", (HEADS, DIM)) for i in range(LAYERS) for kv in "kv"]
    layout = build_layout(streams, page_size=PAGE_SIZE, num_pages=NUM_PAGES, order="page_first")
    pool = PagedPool.allocate(layout)
    async with station("prefill", "local", [], rate_bytes_per_s=RATE) as prefill:
        ranks = [rank_from_json(rank) for rank in prefill.ranks]
        first = DecodeNode(pool, LocalPlane(pool.segment), timing=TIMING)
        async with first:
            room = await first.room(1, ranks, np.arange(PAGES * PAGE_SIZE))
            await begin(1, PAGES, prefill)

            async def begun() -> bool:
                return bool(pool.pages_bytes(room.pages).any(axis=1).mean() > 0.2)

            await until(begun)
            await prefill.freeze()
            assert pool.pages_bytes(room.pages).any(axis=1).mean() < 0.9
        (loan,) = await first.close()
        assert list(loan.pages) == list(room.pages)
        pages = None if own else ExternalPages(NUM_PAGES)
        async with DecodeNode(pool, LocalPlane(pool.segment), timing=TIMING, pages=pages) as heir:
            assert heir.quarantined_pages == PAGES
            if pages is None:
                mine = heir.pages.take(heir.pages.free_pages, "the next user")
            else:
                mine = np.setdiff1d(
                    np.arange(NUM_PAGES, dtype=np.int32), pages.busy(range(NUM_PAGES))
                )
            assert len(mine) == NUM_PAGES - PAGES
            fill(pool, mine, MINE)
            prefill.signal(signal.SIGCONT)

            async def write_ended() -> bool:
                left = await prefill.ask("left")
                return not left["rooms"] and not left["away"]

            await until(write_ended)
            assert (pool.pages_bytes(mine) == MINE).all()
            assert heir.quarantined_pages == PAGES, "it lives: nothing is proven"
            prefill.signal(signal.SIGKILL)
            await here(lambda: not heir.quarantined_pages)
            if pages is None:
                heir.pages.give_back(mine, "the next user")
            assert pool.pages.at_rest() and (pages is None or pages.at_rest())
        assert not pool.unproven
    pool.close()
