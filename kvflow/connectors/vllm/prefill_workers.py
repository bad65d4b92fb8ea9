"""Prefill's sides in a worker that serves several workers of decode, as one side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from kvflow.connectors.vllm.messages import StepMeta
from kvflow.connectors.vllm.prefill_worker import PrefillWorker
from kvflow.protocols.ports import UnprovenLoan


class PrefillWorkers:
    """One or more sides over the same blocks. vLLM keeps a request's blocks until all have sent
    them.
    """

    def __init__(self, sides: Sequence[PrefillWorker]) -> None:
        self.sides = tuple(sides)
        self._done: Counter[str] = Counter()  # for ended requests, the sides that have sent them

    @property
    def is_busy(self) -> bool:
        return any(side.is_busy for side in self.sides)

    @property
    def on_host(self) -> bool:
        return self.sides[0].thread.pool.on_host

    def start(self) -> None:
        for side in self.sides:
            side.start()

    def begin(self, meta: StepMeta) -> None:
        for side in self.sides:
            side.begin(meta)

    def preempt(self, meta: StepMeta) -> None:
        for side in self.sides:
            side.preempt(meta)

    def computed(self, meta: StepMeta) -> None:
        for side in self.sides:
            side.computed(meta)

    def finished(self, meta: StepMeta) -> set[str]:
        """Return the ended requests whose blocks vLLM may use again."""
        for side in self.sides:
            self._done.update(side.finished(meta))
        found = {name for name, count in self._done.items() if count == len(self.sides)}
        for name in found:
            del self._done[name]
        return found

    def close(self) -> Sequence[UnprovenLoan]:
        """Close every side, even if one raises an error. Returns the loans without proof."""
        unproven: list[UnprovenLoan] = []

        def close(side: PrefillWorker) -> None:
            unproven.extend(side.close())

        with ExitStack() as closing:
            for side in self.sides:
                closing.callback(close, side)
        return unproven
