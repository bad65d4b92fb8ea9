"""The inputs of one model step: slots to write, slots to gather, and the keys of each row."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvflow.serve.engine.model.batch import Batch, Span, divided
from kvflow.serve.engine.model.device import Place
from kvflow.serve.engine.model.rings import ChunkRings, RingLayers, Rings
from kvflow.serve.engine.model.sequence import Sequence


class Row(NamedTuple):
    """The next `new` tokens of one sequence, starting at position `computed`.

    The step returns logits for the last `logits` of them.
    """

    sequence: Sequence
    new: int
    logits: int = 1

    @property
    def end(self) -> int:
        return self.sequence.computed + self.new


class Step:
    """The inputs of one forward over some rows.

    `write_pages` and `write_slots`, int64 [tokens], are the page and the slot of every new token.
    The step may sort its rows: `order` lists the given rows in sorted order, and `last` has the
    index of each given row's last query. `logits_to_keep` is transformers' argument: the queries
    whose logits are wanted, in the order of the given rows, or 0 if these are all queries in order.

    A packed step has `spans`, or `batches` if every row decodes one token (`ahead.DecodeSteps`). A
    padded step has `batch` rows, with `past` positions before the new tokens.
    """

    def __init__(self, rows: list[Row], page_size: int, place: Place = torch.from_numpy) -> None:
        """`place` moves every input to the model's device."""
        self._page_size, self._place = page_size, place
        starts, logits = [r.sequence.computed for r in rows], [int(r.logits) for r in rows]
        self.decodes = 0 not in starts and all(r.new == 1 for r in rows)
        self.order = order = list(range(len(rows)))
        # Sort the rows by length, so that batches of neighbouring rows need little padding.
        if self.decodes and len(rows) > 1:
            order.sort(key=starts.__getitem__)
            rows, starts = [rows[i] for i in order], [starts[i] for i in order]
        self._counts = [r.new for r in rows]
        self._ends = [r.end for r in rows]
        self._query_ends = list(itertools.accumulate(self._counts))
        self.last = [0] * len(rows)
        for i, end in zip(order, self._query_ends, strict=True):
            self.last[i] = end - 1
        kept = [
            i
            for last, n in zip(self.last, logits, strict=True)
            for i in range(last + 1 - n, last + 1)
        ]
        everything = kept == list(range(self._query_ends[-1]))
        self.logits_to_keep: torch.Tensor | int = (
            0 if everything else place(np.array(kept, dtype=np.int64))
        )
        self.ids = place(
            np.concatenate(
                [r.sequence.tokens[s : r.end] for s, r in zip(starts, rows, strict=True)]
            )
        )
        self._ordered, self._starts = [r.sequence for r in rows], starts
        self._pages = [s.pages for s in self._ordered]
        positions = np.concatenate(
            [np.arange(s, e) for s, e in zip(starts, self._ends, strict=True)]
        )
        self.positions = place(positions)
        pages, slots = self._places(np.repeat(np.arange(len(rows)), self._counts), positions)
        self.write_pages, self.write_slots = place(pages), place(slots)
        self.batch, self.past = 1, max(starts)
        self.spans: list[Span] = []
        self.batches: list[Batch] = []
        self._read: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._gathers: dict[tuple[int, int], torch.Tensor] = {}
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}
        self._rings: dict[int, Rings] = {}

    def pack(self) -> None:
        """Make the step one packed row, divided into `spans` of one sequence each."""
        lengths = self._counts
        if self.past:
            lengths = self._ends
            positions = np.concatenate([np.arange(end) for end in lengths])
            self._read = self._places(np.repeat(np.arange(len(lengths)), lengths), positions)
        key_ends = itertools.accumulate(lengths)
        for new, q1, length, k1 in zip(
            self._counts, self._query_ends, lengths, key_ends, strict=True
        ):
            self.spans.append(Span(q1 - new, q1, k1 - length, k1))

    def pad(self, new: int) -> torch.Tensor | None:
        """Make the step a left-padded batch of rows with `new` tokens each.

        Returns the attention mask [batch, keys], or None if no row is padded.
        """
        self.batch, keys = len(self._ends), max(self._ends)
        rows = Batch(0, self._ends, 0)
        if self.past:
            columns = np.repeat(np.arange(self.batch), keys)
            self._read = self._places(columns, rows.positions().reshape(-1))
        self.past = keys - new
        if min(self._ends) == keys:
            return None
        return self._place(
            (np.arange(keys) >= keys - np.array(self._ends)[:, None]).astype(np.int64)
        )

    def gather(self, page_rows: int, slot_rows: int) -> torch.Tensor | None:
        """Return the indices of the rows to gather, int64 [keys], or None if there are no earlier
        states.

        Pages are `page_rows` rows apart, and slots `slot_rows` rows.
        """
        if self._read is None:
            return None
        found = self._gathers.get((page_rows, slot_rows))
        if found is None:
            pages, slots = self._read
            found = self._gathers[page_rows, slot_rows] = self._place(
                pages * page_rows + slots * slot_rows
            )
        return found

    def kept(self, stream: Hashable, new: torch.Tensor) -> torch.Tensor | None:
        """Return the states of `stream`, [1, heads, keys, dim], if an earlier step gathered them.

        They include the `new` states of this step, [1, heads, tokens, dim]. Returns None if the
        states must be gathered.
        """
        return None

    def read(
        self, stream: Hashable, slots: torch.Tensor, rows: torch.Tensor, heads: int
    ) -> torch.Tensor:
        """Gather `rows` of the stream's `slots` [any, heads * dim] into states [batch, heads, keys,
        dim].

        A subclass may keep these states, so that `kept` returns them in the next step.
        """
        return self._states(slots.index_select(0, rows), heads)

    def rings(self, window: int) -> Rings:
        """Return the part of this step that concerns rings of `window` slots."""
        found = self._rings.get(window)
        if found is None:
            found = self._rings[window] = self._make_rings(
                window, [int(s.rows[0]) for s in self._ordered]
            )
        return found

    def mask(self, queries: int, keys: int, window: int) -> torch.Tensor:
        """Return a boolean mask [queries, keys], which is True where a query attends to a key.

        The queries are the last positions. Each attends to itself and to earlier positions,
        `window` in all (0: no limit).
        """
        found = self._masks.get((queries, keys, window))
        if found is None:
            device = self.positions.device
            q = torch.arange(keys - queries, keys, device=device)[:, None]
            k = torch.arange(keys, device=device)[None, :]
            found = k <= q
            if window:
                found &= k > q - window
            self._masks[queries, keys, window] = found
        return found

    def _states(self, read: torch.Tensor, heads: int) -> torch.Tensor:
        return read.view(self.batch, -1, heads, read.shape[1] // heads).transpose(1, 2)

    def _make_rings(self, window: int, rows: list[int]) -> Rings:
        return ChunkRings(window, rows, self._starts, self._ends, self._place)

    def _places(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the page and the slot of each position; `rows` gives the row of each position."""
        pages = self._pages[0]
        inside = positions // self._page_size
        slots = positions - inside * self._page_size
        if len(self._pages) > 1:
            pages = np.concatenate(self._pages)
            inside += np.cumsum([0, *(p.size for p in self._pages[:-1])])[rows]
        return pages.astype(np.int64).take(inside), slots

    def _batches(self, more: int) -> list[Batch]:
        """Divide the rows, sorted by length, into batches with space for `more` keys per row."""
        found: list[Batch] = []
        for first, end in divided(self._ends):
            k0 = found[-1].k1 if found else 0
            found.append(Batch(first, self._ends[first:end], k0, more, place=self._place))
        return found


class CallRecorder(Protocol):
    """Records the calls of a step (see `recorded.py`)."""

    def attend(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...

    def exchange(self, function: Callable[..., Any], *args: torch.Tensor) -> Any: ...


class _Current(threading.local):
    """The step that this thread runs, the layers of its model that use rings, and what records the
    step's calls.

    These are thread-local because transformers has no way to pass them to an attention function.
    """

    step: Step | None = None
    rings = RingLayers(())
    recorder: CallRecorder | None = None


current = _Current()
