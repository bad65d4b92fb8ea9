"""Pages of a step in the model thread stay held until it has ended (I13)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvflow.engine.model.sequence import Sequence
from kvflow.engine.model.thread import ModelThread
from kvflow.memory.allocator import PageAllocator


async def test_pages_of_a_step_are_free_when_it_has_ended() -> None:
    pages = PageAllocator(8)
    sequence = Sequence("mine", [1, 2, 3], 0, 2)
    sequence.add_pages(pages.take(2, "mine"))
    gate = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        step = asyncio.ensure_future(ModelThread(executor, pages).run([sequence], lambda: gate.wait(10)))
        await asyncio.sleep(0)
        pages.give_back(sequence.pages, "mine")
        assert pages.free_pages == 6 and pages.returning_pages == 2
        gate.set()
        assert await step
        assert pages.at_rest()


async def test_an_error_of_the_step_is_raised_and_nothing_stays_held() -> None:
    pages = PageAllocator(2)
    sequence = Sequence("mine", [1], 0, 1)
    sequence.add_pages(pages.take(1, "mine"))

    def fail() -> None:
        raise ValueError("step")

    with ThreadPoolExecutor(1) as executor, pytest.raises(ValueError, match="step"):
        await ModelThread(executor, pages).run([sequence], fail)
    assert pages.held_pages == 0
