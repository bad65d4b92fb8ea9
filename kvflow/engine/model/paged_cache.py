"""The cache that a model writes its keys and values to: pages, behind transformers' own cache interface."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from kvflow.engine.model.probe import LayerStreams
from kvflow.engine.model.step import Step
from kvflow.memory.pool import PagedPool


class PagedLayer(CacheLayerMixin):
    """One layer's K and V, as views [pages, page size, heads, dim] of the pool. Nothing else writes K and V."""

    is_sliding = False

    def __init__(self, cache: PagedCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._k, self._v = cache, keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool has been allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states [batch, heads, tokens, dim] in place; return all that the step's rows may attend to."""
        step = self._cache.step
        return _exchange(step, self._k, key_states), _exchange(step, self._v, value_states)

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


def _exchange(step: Step, pages: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, dim = new.shape
    flat = new.transpose(1, 2).reshape(batch * tokens, heads, dim)
    pages.index_put_((step.write_pages, step.write_slots), flat)
    if step.read_pages is None:
        return new
    found = pages.index_select(0, step.read_pages).view(-1, heads, dim)
    if step.pick is not None:
        found = found.index_select(0, step.pick)
    elif step.keys:
        found = found[: step.keys]
    return found.view(step.batch, -1, heads, dim).transpose(1, 2)
