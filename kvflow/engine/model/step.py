"""One model step for the cache and the attention function: slots to write, pages to gather, keys that a row sees."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import torch

from kvflow.engine.model.sequence import Sequence


class Row(NamedTuple):
    """`new` tokens of one sequence, from its `computed` on; `wants_logits` asks for the logits of the last of them."""

    sequence: Sequence
    new: int
    wants_logits: bool = True

    @property
    def end(self) -> int:
        return self.sequence.computed + self.new


class Span(NamedTuple):
    """One sequence of a packed step: its queries and its keys, as ranges of the packed axes."""

    q0: int
    q1: int
    k0: int
    k1: int


class Step:
    """`write_*` int64 [tokens]; `read_pages` int64 [pages] in row order, None when no row has a past.

    Packed steps have `spans`. Padded ones have `batch` rows, `past` tokens before the new ones, and `pick`: which
    gathered slots make up the [batch, past + new] keys (None: the first ones, in order).
    """

    def __init__(self, rows: list[Row], page_size: int) -> None:
        starts = [r.sequence.computed for r in rows]
        positions = np.concatenate([np.arange(s, s + r.new) for s, r in zip(starts, rows, strict=True)])
        tokens = [r.sequence.tokens[s : r.end] for s, r in zip(starts, rows, strict=True)]
        self.ids = torch.from_numpy(np.concatenate(tokens))
        self.positions = torch.from_numpy(positions)
        pages = [r.sequence.pages[: -(-r.end // page_size)] for r in rows]
        inside = positions // page_size
        first = np.cumsum([0] + [p.size for p in pages[:-1]])
        all_pages = np.concatenate(pages).astype(np.int64)
        counts = [r.new for r in rows]
        self.write_pages = torch.from_numpy(all_pages[inside + np.repeat(first, counts)])
        self.write_slots = torch.from_numpy(positions - inside * page_size)
        has_past = any(starts)
        self.read_pages = torch.from_numpy(all_pages) if has_past else None
        self.batch, self.past, self.keys = 1, max(starts), 0
        self.pick: torch.Tensor | None = None
        ends = np.cumsum(counts).tolist()
        key_starts = (first * page_size).tolist() if has_past else [0, *ends[:-1]]
        self.spans = [
            Span(q1 - r.new, q1, k0, k0 + (r.end if has_past else r.new))
            for r, q1, k0 in zip(rows, ends, key_starts, strict=True)
        ]
        self.masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def pad(self, new: int) -> torch.Tensor | None:
        """Turn a step whose rows have `new` tokens each into a left-padded batch.

        Padding repeats the row's own first key, so no other sequence is read. Returns the attention mask [batch, keys],
        None when nothing is padded.
        """
        self.batch = len(self.spans)
        lengths = np.array([s.k1 - s.k0 for s in self.spans])
        self.keys = int(lengths.max())
        self.past = self.keys - new
        if self.batch == 1:
            return None
        starts = np.array([s.k0 for s in self.spans])
        slots = np.arange(self.keys)[None, :] - (self.keys - lengths)[:, None]
        self.pick = torch.from_numpy((starts[:, None] + np.maximum(slots, 0)).reshape(-1))
        return torch.from_numpy((slots >= 0).astype(np.int64)) if int(lengths.min()) < self.keys else None

    def mask(self, queries: int, keys: int, window: int) -> torch.Tensor:
        """Boolean [queries, keys]: each of the last `queries` positions sees itself and earlier ones, `window` in all
        (0: no limit)."""
        found = self.masks.get((queries, keys, window))
        if found is None:
            q = torch.arange(keys - queries, keys)[:, None]
            k = torch.arange(keys)[None, :]
            found = k <= q
            if window:
                found &= k > q - window
            self.masks[queries, keys, window] = found
        return found


class _Current(threading.local):
    """The step that this thread runs: transformers has no way to pass it to an attention function."""

    step: Step | None = None


current = _Current()
