"""The division of a step's packed axes into spans, or into batches of decoding rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvflow.serve.engine.model.device import Place

# Rows of very different lengths go into separate batches, each of which is one attention call.
# Padding may add this share to a batch's keys, plus `_CALL_KEYS` keys, because one more call costs
# about as much as attention over that many keys.
_PADDED_SHARE, _CALL_KEYS = 0.25, 512
# Masks are made with this many extra columns, so that the following steps can reuse them.
_MORE_COLUMNS = 8


class Span(NamedTuple):
    """One sequence of a packed step: queries q0..q1 and keys k0..k1 of the packed axes."""

    q0: int
    q1: int
    k0: int
    k1: int


class Batch:
    """Rows of one query each, whose keys are padded on the left to a common number, `keys`.

    The batch takes queries q0..q1 and keys k0..k1 of the packed axes. Each row has space for
    `width` keys, of which the first `keys` are in use.
    """

    def __init__(
        self,
        q0: int,
        lengths: list[int],
        k0: int,
        more: int = 0,
        masks: dict[torch.dtype, torch.Tensor] | None = None,
        place: Place = torch.from_numpy,
    ) -> None:
        """`lengths` are the numbers of keys in each row, in ascending order.

        There is space for `more` keys after those of the longest row. Successive steps over the
        same rows share `masks`, since the padding does not change.
        """
        self.q0, self.rows, self.k0 = q0, len(lengths), k0
        self.q1 = q0 + self.rows
        self.keys, self.lengths = lengths[-1], lengths
        self.width = self.keys + more
        self.k1 = k0 + self.rows * self.width
        self._masks = {} if masks is None else masks
        self._place = place

    def later(self, steps: int) -> Batch:
        """Return this batch as it will be after `steps` steps, each of which adds a key per row."""
        lengths = [length + steps for length in self.lengths]
        return Batch(self.q0, lengths, self.k0, self.width - lengths[-1], self._masks, self._place)

    def positions(self) -> NDArray[np.int64]:
        """Return the position of every key in its sequence, [rows, width].

        Padding repeats the row's own first position, so no other sequence is read.
        """
        found: NDArray[np.int64] = np.maximum(np.arange(self.width) - self._padding(), 0)
        return found

    def region(self, states: torch.Tensor) -> torch.Tensor:
        """Return this batch's keys [heads, rows, width, dim] in `states` [heads, keys, dim]."""
        own = states.narrow(1, self.k0, self.k1 - self.k0)
        return own.view(own.shape[0], self.rows, self.width, own.shape[2])

    def mask(self, last: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a mask [rows, 1, 1, last] to add to the scores of each row's last `last` keys.

        Returns None if none of these keys is padding.
        """
        if last <= self.lengths[0]:
            return None
        if dtype not in self._masks or self._masks[dtype].shape[1] < self.keys:
            columns = np.arange(self.keys + _MORE_COLUMNS)
            padding = self._place(columns < self._padding())
            mask = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
            self._masks[dtype] = mask.masked_fill_(padding, float("-inf"))
        return self._masks[dtype][:, None, None, self.keys - last : self.keys]

    def _padding(self) -> NDArray[np.int64]:
        return np.array([self.keys - length for length in self.lengths])[:, None]


def divided(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Divide rows with ascending `lengths` into batches; yield each batch as a range (first, end).

    A range grows until padding its rows to the longest one would cost more than another call.
    """
    first = used = 0
    for i, length in enumerate(lengths):
        padded = (i + 1 - first) * length
        if padded - used - length > _PADDED_SHARE * used + _CALL_KEYS:
            yield first, i
            first, used = i, 0
        used += length
    yield first, len(lengths)
