"""Decode steps planned ahead: while every row decodes one token, the inputs of each step are a
slice of a plan.

Making a step from scratch takes 100 us for one row and 300 us for 16, while the model's kernels
wait. The steps of a plan also share gathered states, because gathering the pages of 16 rows takes
longer than attention over them.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from numpy.typing import NDArray

from kvflow.serve.engine.model.batch import Batch
from kvflow.serve.engine.model.device import Place
from kvflow.serve.engine.model.rings import DecodeRings, Rings
from kvflow.serve.engine.model.step import Row, Step

# Limit on the steps in one plan, and in one call of the model thread.
MOST_STEPS = 8
# Limit on the kept memory of all streams. A stream for which no memory is left is gathered into
# new memory in every step.
_MOST_KEPT_BYTES = 64 << 20


class KeptMemory:
    """Memory for gathered states, reused from plan to plan to avoid page faults."""

    def __init__(self) -> None:
        self._streams: dict[Hashable, torch.Tensor] = {}
        self._used_bytes: dict[Hashable, int] = {}

    def of(self, stream: Hashable, count: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return uninitialized memory [count] in the dtype of `like`.

        Returns None if the memory of all streams together would exceed the limit.
        """
        self._used_bytes[stream] = count * like.element_size()
        if sum(self._used_bytes.values()) > _MOST_KEPT_BYTES:
            del self._used_bytes[stream]
            self._streams.pop(stream, None)
            return None
        found = self._streams.get(stream)
        # A quarter more is allocated, since sequences grow from plan to plan.
        if found is None or found.numel() < count:
            found = self._streams[stream] = like.new_empty(count + count // 4)
        return found[:count]


class DecodeSteps(Step):
    """A packed step of decoding rows. It can `advance` to the later steps of a plan.

    A plan has `MOST_STEPS` steps of the same rows, or fewer if a row's pages fill up earlier.
    The first step gathers the states into memory with space for the keys of all planned steps. Each
    step adds its new states to that memory as well as to the pages, so that later steps read no
    pages. Streams without such memory (see `KeptMemory`) are gathered in every step.
    """

    def __init__(
        self,
        rows: list[Row],
        page_size: int,
        place: Place = torch.from_numpy,
        memory: KeptMemory | None = None,
    ) -> None:
        """`memory` may come from earlier steps, which must have ended."""
        super().__init__(rows, page_size, place)
        self._sequences = [r.sequence for r in rows]
        self._logits = [r.logits for r in rows]
        self._first = [s.computed for s in self._sequences]
        self._at = 0
        self._steps = min(
            MOST_STEPS, *(s.page_count * page_size - s.computed for s in self._ordered)
        )
        positions = np.arange(self._steps)[:, None] + np.array([s.computed for s in self._ordered])
        columns = np.broadcast_to(np.arange(len(rows)), positions.shape)
        writes = self._places(columns.reshape(-1), positions.reshape(-1))
        self._positions = place(positions)
        self._writes = [place(found.reshape(positions.shape)) for found in writes]
        self._plan = self._batches(self._steps - 1)
        self._read = self._all_places()
        self._kept: dict[Hashable, _Kept] = {}
        self._planned: list[DecodeRings] = []
        self._memory = memory or KeptMemory()
        self._show()

    def advance(self, rows: list[Row]) -> bool:
        """Advance to the next step, or return False if the plan is used up or has other rows."""
        at = self._at + 1
        if at >= self._steps or len(rows) != len(self._sequences):
            return False
        for row, sequence, first, logits in zip(
            rows, self._sequences, self._first, self._logits, strict=True
        ):
            if (
                row.sequence is not sequence
                or row.new != 1
                or row.logits != logits
                or sequence.computed != first + at
            ):
                return False
        self._at = at
        self.ids = self._place(np.array([s.tokens[s.computed] for s in self._ordered]))
        self._show()
        return True

    def kept(self, stream: Hashable, new: torch.Tensor) -> torch.Tensor | None:
        found = self._kept.get(stream)
        if found is None:
            return None
        new = new[0]
        for batch, region in zip(self.batches, found.regions, strict=True):
            region.select(2, batch.keys - 1).copy_(new.narrow(1, batch.q0, batch.rows))
        return found.states

    def read(
        self, stream: Hashable, slots: torch.Tensor, rows: torch.Tensor, heads: int
    ) -> torch.Tensor:
        found = self._gather_to_keep(stream, slots, rows)
        if found is None:
            return super().read(stream, slots, rows, heads)
        states = self._states(found, heads)
        if self._steps > 1:
            self._kept[stream] = _Kept(states, self.batches)
        return states

    def _gather_to_keep(
        self, stream: Hashable, slots: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor | None:
        memory = self._memory.of(stream, rows.numel() * slots.shape[1], slots)
        if memory is None:
            return None
        return torch.index_select(slots, 0, rows, out=memory.view(rows.numel(), -1))

    def _make_rings(self, window: int, rows: list[int]) -> Rings:
        found = DecodeRings(
            window, rows, self._ends, self._steps, self._gather_to_keep, self._place
        )
        found.show(self._at)
        self._planned.append(found)
        return found

    def _all_places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = [batch.positions() for batch in self._plan]
        rows = [np.repeat(np.arange(b.q0, b.q1), b.width) for b in self._plan]
        return self._places(
            np.concatenate(rows), np.concatenate([p.reshape(-1) for p in positions])
        )

    def _show(self) -> None:
        at = self._at
        self.positions, self.past = self._positions[at], max(self._first) + at
        self.write_pages, self.write_slots = (writes[at] for writes in self._writes)
        self.batches = [batch.later(at) for batch in self._plan]
        for rings in self._planned:
            rings.show(at)


class _Kept:
    """The gathered `states` of one stream, [1, heads, keys, dim].

    `regions` has one view of this memory for each batch, [heads, rows, width, dim].
    """

    __slots__ = ("regions", "states")

    def __init__(self, states: torch.Tensor, batches: list[Batch]) -> None:
        self.states = states
        self.regions = [batch.region(states[0]) for batch in batches]
