"""The cache that a model writes its keys and values to: pages, behind transformers' own cache interface."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from kvflow.engine.model.probe import LayerStreams
from kvflow.engine.model.step import Step
from kvflow.memory.pool import PagedPool


class PagedStream:
    """K or V of one layer: a view [pages, page size, heads, dim] of the pool. Nothing else writes it."""

    def __init__(self, pages: torch.Tensor) -> None:
        count, page_size, heads, dim = pages.shape
        row = heads * dim
        step = math.gcd(pages.stride(0), row)
        # The same memory as overlapping rows of one slot each, `step` elements apart: gathering rows of a contiguous
        # dimension costs a third of gathering pages that lie apart.
        self._pages = pages
        self._page_rows, self._slot_rows = pages.stride(0) // step, row // step
        starts = (count - 1) * self._page_rows + (page_size - 1) * self._slot_rows + 1
        self._rows = pages.as_strided((starts, row), (step, 1))

    def exchange(self, step: Step, new: torch.Tensor) -> torch.Tensor:
        """Write the new states [batch, heads, tokens, dim]; returns [batch, heads, keys, dim]: all that the step's rows
        attend to."""
        batch, heads, tokens, dim = new.shape
        flat = new.transpose(1, 2).reshape(batch * tokens, heads, dim)
        self._pages.index_put_((step.write_pages, step.write_slots), flat)
        if (kept := step.kept(self, new)) is not None:
            return kept
        rows = step.gather(self._page_rows, self._slot_rows)
        if rows is None:
            return new
        states = self._rows.index_select(0, rows).view(step.batch, -1, heads, dim).transpose(1, 2)
        step.keep(self, states)
        return states


class PagedLayer(CacheLayerMixin):
    """One layer's K and V."""

    is_sliding = False

    def __init__(self, cache: PagedCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._k, self._v = cache, PagedStream(keys), PagedStream(values)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool has been allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states [batch, heads, tokens, dim] in place; return all that the step's rows may attend to."""
        step = self._cache.step
        return self._k.exchange(step, key_states), self._v.exchange(step, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.step.past + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.step.past

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """`step` has the page and slot of every token; the runner sets it before each forward."""

    step: Step

    def __init__(self, layers: tuple[LayerStreams | None, ...], pool: PagedPool) -> None:
        paged: list[Any] = [
            DummyLayer() if s is None else PagedLayer(self, pool.tensor(s.key_name), pool.tensor(s.value_name))
            for s in layers
        ]
        super().__init__(layers=paged)
