"""Running work in the one model thread, and waiting for its end in every case (I11, I12, I13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvflow.aio import Threads, run_to_end
from kvflow.protocols.pages.layout import Places, PoolLayout
from kvflow.protocols.ports import PageStore
from kvflow.serve.engine.model import sequence

# The simulator of whole nodes runs steps, and has to do so without torch.
if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class ModelThread:
    """The steps of one engine, in the model thread.

    Pages and rows of a running step are held: those of an aborted request become free when the step
    ends.

    A step ends when the thread returns, its device ran all that the step queued there, and no other
    process reads or writes for it.
    """

    def __init__(
        self,
        executor: Threads,
        places: PageStore,
        layout: PoolLayout,
        device: torch.device | None = None,
        wait_for_others: Callable[[], None] | None = None,
    ) -> None:
        """`device`: None where no part of a step runs on after the thread returns.

        `wait_for_others` blocks until the other processes that take part in steps over these pages
        end these steps, or end themselves.
        """
        self._executor, self._places, self._layout, self._device = executor, places, layout, device
        self._wait_for_others = wait_for_others

    async def run(self, sequences: Sequence[sequence.Sequence], work: Callable[[], T]) -> T:
        """Run `work` in the thread, to its end even if this coroutine is cancelled.

        Raises: what `work` raises.
        """
        pages = np.concatenate([s.pages for s in sequences])
        rows = np.concatenate([s.rows for s in sequences])
        held = self._layout.numbered(Places(pages, rows))
        self._places.hold(held)
        try:
            return await run_to_end(self._executor.start(lambda _: self._whole(work)).ended)
        finally:
            self._places.unhold(held)

    def _whole(self, work: Callable[[], T]) -> T:
        try:
            return work()
        # A step that fails half-way has already queued some of its writes, so the wait is for every
        # step.
        finally:
            if self._device is not None:
                # Imported here, because the module must load without torch.
                from kvflow.serve.engine.model.device import wait_for

                wait_for(self._device)
            if self._wait_for_others is not None:
                self._wait_for_others()
