"""Pages and rows of a step in the model thread stay held until it has ended (I13)."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvflow.aio import Threads
from kvflow.memory.pool import PagedPool
from kvflow.protocols.arguments import pages_wanted
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.engine.model.sequence import Sequence, in_one_list
from kvflow.serve.engine.model.thread import ModelThread

KINDS = [StateKind("k", "uint8", (1,)), StateKind("state", "float32", (4,), ROW)]


@pytest.mark.parametrize("rows", [0, 2])
async def test_pages_and_row_of_a_step_are_free_when_it_has_ended(rows: int) -> None:
    layout = build_layout(KINDS if rows else KINDS[:1], page_size=2, num_pages=8, num_rows=rows)
    pool = PagedPool.allocate(layout, shared=False)
    sequence = Sequence("mine", [1, 2, 3], 0, 2)
    sequence.add(layout.split(pool.places.take_room(pages_wanted(layout, 3, 0), "mine")))
    gate = threading.Event()
    with Threads("model") as executor:
        step = asyncio.ensure_future(
            ModelThread(executor, pool.places, layout).run([sequence], lambda: gate.wait(10))
        )
        await asyncio.sleep(0)
        pool.places.give_back(in_one_list(layout, *sequence.places), "mine")
        assert pool.pages.free_pages == 6 and pool.pages.returning_pages == 2
        assert not rows or (pool.rows.free_pages == 1 and pool.rows.returning_pages == 1)
        gate.set()
        assert await step
        assert pool.places.at_rest()
