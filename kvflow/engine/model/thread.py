"""Running work in the one model thread, and waiting for its end in every case (I11, I12, I13)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np

from kvflow.aio import run_to_end
from kvflow.engine.model import sequence
from kvflow.protocols.ports import PageStore

T = TypeVar("T")


class ModelThread:
    """The steps of one engine. The pages of a running step are held: aborted ones become free when it has ended."""

    def __init__(self, executor: Executor, pages: PageStore) -> None:
        self._executor, self._pages = executor, pages

    async def run(self, sequences: Sequence[sequence.Sequence], work: Callable[[], T]) -> T:
        """Run `work` in the thread, to its end even if this coroutine is cancelled. Raises: what `work` raises."""
        held = np.concatenate([s.pages for s in sequences])
        self._pages.hold(held)
        try:
            return await run_to_end(asyncio.get_running_loop().run_in_executor(self._executor, work))
        finally:
            self._pages.unhold(held)
