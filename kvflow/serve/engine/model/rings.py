"""Rings: rows of the pool in which layers with a sliding window keep the K and V of the window
only.

A ring has one slot for each token of the window. The token at position p goes into slot p % window,
and replaces the token that just left the window. States that an earlier request left in the row are
never read. A failed chunk cannot be computed again on the same row, since some layers may already
have overwritten states that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvflow.serve.engine.model.batch import Batch, Span, divided
from kvflow.serve.engine.model.device import Place
from kvflow.serve.engine.model.probe import Layers

GatherToKeep = Callable[[Hashable, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""Gathers like `Rings.read`, but into kept memory. Returns None if no more memory may be kept."""


class RingLayers:
    """The rings that the layers of a model attend to."""

    def __init__(self, layers: Layers) -> None:
        self._windows = {i: layer.ring for i, layer in enumerate(layers) if layer}
        self._rings = frozenset(self._windows.values()) - {0}

    def window_of(self, layer: int, window: int) -> int:
        """Return the number of slots in a layer's ring; 0 if the layer's keys are in pages.

        A layer that keeps no K and V attends to those of another layer with the same `window`.
        """
        if not self._rings:
            return 0
        found = self._windows.get(layer)
        return (window if window in self._rings else 0) if found is None else found


class RingBatch(Batch):
    """A batch whose keys are in the order of their slots in the rings.

    A row whose ring is not full is padded on the right, and each step fills one more slot.
    """

    def __init__(
        self, q0: int, ends: list[int], k0: int, window: int, width: int, place: Place
    ) -> None:
        """`ends`, in ascending order, has the number of tokens per row, including the new one."""
        lengths = [min(end, window) for end in ends]
        super().__init__(q0, lengths, k0, width - lengths[-1], place=place)
        self._ends, self._window = ends, window

    def later(self, steps: int) -> RingBatch:
        ends = [end + steps for end in self._ends]
        return RingBatch(self.q0, ends, self.k0, self._window, self.width, self._place)

    def positions(self) -> NDArray[np.int64]:
        """Return the slot of every key, [rows, width]. Padding repeats the row's first slot."""
        columns = np.arange(self.width)
        return np.where(columns < np.array(self.lengths)[:, None], columns, 0)

    def mask(self, last: int, dtype: torch.dtype) -> torch.Tensor | None:
        # `last` is always `keys`, because a ring holds no tokens outside the window.
        if self.keys == self.lengths[0]:
            return None
        if dtype not in self._masks:
            padding = self._place(np.arange(self.keys) >= np.array(self.lengths)[:, None])
            mask = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
            self._masks[dtype] = mask.masked_fill_(padding, float("-inf"))
        return self._masks[dtype][:, None, None]


class Rings:
    """The part of a step that concerns rings of one size.

    `write_rows` and `write_slots`, int64 [tokens], are the row and the slot of every new token to
    write. `written` holds the indices of these tokens among the new ones, and is None if all are
    written. `new_at` holds the indices of the new tokens among the keys. `spans` or `batches`
    divide the keys as in `Step`.
    """

    write_rows: torch.Tensor
    write_slots: torch.Tensor
    new_at: torch.Tensor
    written: torch.Tensor | None = None

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.batches: list[RingBatch] = []
        self._gathers: dict[tuple[int, int], torch.Tensor] = {}

    def gather(self, ring_rows: int, slot_rows: int) -> torch.Tensor | None:
        """Return the indices of the rows to gather, like `Step.gather`.

        Rings are `ring_rows` rows apart, and slots `slot_rows` rows.

        The states gathered for a new token are meaningless: the token's own states replace them.
        """
        raise NotImplementedError

    def kept(self, stream: Hashable) -> torch.Tensor | None:
        """Return the states that an earlier step gathered, [keys, heads * dim], or None.

        The states of this step are not yet among them.
        """
        return None

    def read(self, stream: Hashable, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Gather `rows` of the stream's `slots` [any, heads * dim].

        A subclass may keep these states, so that `kept` returns them in the next step.
        """
        return slots.index_select(0, rows)


class ChunkRings(Rings):
    """Rings in a step with prompt chunks.

    Each row's earlier keys are read before its new tokens overwrite them. If a row has more new
    tokens than slots, only its last tokens are written.
    """

    def __init__(
        self, window: int, rows: list[int], starts: list[int], ends: list[int], place: Place
    ) -> None:
        """`rows` are rows of the pool; the new tokens of each are at `starts`..`ends` - 1."""
        super().__init__()
        self._place = place
        self._read: tuple[NDArray[Any], NDArray[Any]] | None = None
        reads = starts
        writes = [max(start, end - window) for start, end in zip(starts, ends, strict=True)]
        # If every row begins with this step, there are no earlier states to read.
        if any(starts):
            reads = [max(0, start + 1 - window) for start in starts]
            self._read = (
                np.repeat(np.array(rows), np.subtract(ends, reads)),
                _ranges(reads, ends) % window,
            )
        self.write_rows = place(np.repeat(np.array(rows), np.subtract(ends, writes)))
        self.write_slots = place(_ranges(writes, ends) % window)
        written, new_at, q0, k0 = [], [], 0, 0
        for start, read, write, end in zip(starts, reads, writes, ends, strict=True):
            q1, k1 = q0 + end - start, k0 + end - read
            self.spans.append(Span(q0, q1, k0, k1))
            new_at.append(np.arange(k1 + start - end, k1))
            written.append(np.arange(q1 + write - end, q1))
            q0, k0 = q1, k1
        self.new_at = place(np.concatenate(new_at))
        if writes != starts:
            self.written = place(np.concatenate(written))

    def gather(self, ring_rows: int, slot_rows: int) -> torch.Tensor | None:
        if self._read is None:
            return None
        found = self._gathers.get((ring_rows, slot_rows))
        if found is None:
            rows, slots = self._read
            found = self._gathers[ring_rows, slot_rows] = self._place(
                rows * ring_rows + slots * slot_rows
            )
        return found


class DecodeRings(Rings):
    """Rings in `ahead.DecodeSteps`.

    The first step gathers a copy of the rings, slot by slot. Each step writes its new tokens to
    both the rings and the copy.
    """

    def __init__(
        self,
        window: int,
        rows: list[int],
        ends: list[int],
        steps: int,
        gather_to_keep: GatherToKeep,
        place: Place,
    ) -> None:
        """`ends` are the numbers of tokens in the first of `steps` steps; see `RingBatch`."""
        super().__init__()
        self._rows, self._place = np.array(rows), place
        self._steps, self._gather_to_keep = steps, gather_to_keep
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._plan: list[RingBatch] = []
        for first, end in divided([min(end, window) for end in ends]):
            k0 = self._plan[-1].k1 if self._plan else 0
            width = min(ends[end - 1] + steps - 1, window)
            self._plan.append(RingBatch(first, ends[first:end], k0, window, width, place))
        self._filling = ends[0] < window
        slots = (np.arange(-1, steps - 1)[:, None] + np.array(ends)) % window
        self._new_at = place(
            np.concatenate([b.k0 + np.arange(b.rows) * b.width for b in self._plan]) + slots
        )
        self._slots, self.write_rows = place(slots), place(self._rows)
        self.show(0)

    def show(self, at: int) -> None:
        self.batches = [batch.later(at) for batch in self._plan]
        self.write_slots, self.new_at = self._slots[at], self._new_at[at]
        if self._filling:
            # In each step, rings that are not full have one more slot to gather.
            self._gathers.clear()

    def gather(self, ring_rows: int, slot_rows: int) -> torch.Tensor | None:
        found = self._gathers.get((ring_rows, slot_rows))
        if found is None:
            starts = self._rows * ring_rows
            places = [starts[b.q0 : b.q1, None] + b.positions() * slot_rows for b in self.batches]
            found = self._place(np.concatenate([p.reshape(-1) for p in places]))
            self._gathers[ring_rows, slot_rows] = found
        return found

    def kept(self, stream: Hashable) -> torch.Tensor | None:
        return self._kept.get(stream)

    def read(self, stream: Hashable, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found = self._gather_to_keep(stream, slots, rows)
        if found is None:
            return super().read(stream, slots, rows)
        if self._steps > 1:
            self._kept[stream] = found
        return found


def _ranges(starts: list[int], ends: list[int]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
