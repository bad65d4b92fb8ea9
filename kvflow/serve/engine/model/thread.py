"""Running steps in the model thread, and waiting for the end of each, even after an error or a
cancellation (I11, I12, I13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvflow.aio import Threads, run_to_end
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PageStore
from kvflow.serve.engine.model import sequence

# The simulator of whole nodes imports this module, and must run without torch.
if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class ModelThread:
    """Runs the steps of one engine in the model thread.

    The pages and rows of a running step are held, so those of an aborted request become free only
    when the step ends. A step ends when the thread returns, the device finishes all work that the
    step queued, and no other process reads or writes for it any more.
    """

    def __init__(
        self,
        executor: Threads,
        places: PageStore,
        layout: PoolLayout,
        device: torch.device | None = None,
        wait_for_others: Callable[[], None] | None = None,
    ) -> None:
        """`device` is None if a step leaves no work behind when the thread returns.

        `wait_for_others` blocks until each of the other processes that run these steps finishes
        them, or exits.
        """
        self._executor, self._places, self._layout, self._device = executor, places, layout, device
        self._wait_for_others = wait_for_others

    async def run(self, sequences: Sequence[sequence.Sequence], work: Callable[[], T]) -> T:
        """Run `work` in the model thread, and wait for its end even if this coroutine is cancelled.

        Raises: any error from `work` or from the device.
        """
        pages = np.concatenate([s.pages for s in sequences])
        rows = np.concatenate([s.rows for s in sequences])
        held = sequence.in_one_list(self._layout, pages, rows)
        self._places.hold(held)
        try:
            return await run_to_end(self._executor.start(lambda _: self._whole(work)).ended)
        finally:
            self._places.unhold(held)

    def _whole(self, work: Callable[[], T]) -> T:
        try:
            return work()
        # Wait after a failed step too, because it may already have queued some of its writes.
        finally:
            if self._device is not None:
                # Imported here, because the module must load without torch.
                from kvflow.serve.engine.model.device import wait_for

                wait_for(self._device)
            if self._wait_for_others is not None:
                self._wait_for_others()
