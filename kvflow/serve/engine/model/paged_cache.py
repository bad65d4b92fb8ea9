"""A model's cache: transformers' cache interface over the pages and rows of a pool.

Each layer writes its K, V and indexer keys to pages, or its K and V to rings, and gathers them from
there. Models change the states of conv and recurrent layers in place, each in a different way. So
these states are copied out of their rows before a forward, and copied back after it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionLayer

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.kinds import StateKind
from kvflow.serve.engine.model.probe import Layers, LayerStreams
from kvflow.serve.engine.model.step import Step, current


def memory_of(kind: StateKind, pool: PagedPool) -> torch.Tensor:
    """Return a view of one stream, or of the part and replica of it that `kind` selects."""
    return pool.tensor(kind.name, start=int(kind.start), replica=int(kind.replica))


class PagedStream:
    """K, V or indexer keys of one layer: a view [pages, page size, heads, dim] of the pool."""

    def __init__(self, pages: torch.Tensor) -> None:
        count, page_size, heads, dim = pages.shape
        row = heads * dim
        step = math.gcd(pages.stride(0), row)
        # `_rows` views the same memory as overlapping rows of one slot each, `step` elements apart.
        # Gathering such rows takes a third of the time that gathering from a strided view takes.
        self._pages = pages
        self._page_rows, self._slot_rows = pages.stride(0) // step, row // step
        starts = (count - 1) * self._page_rows + (page_size - 1) * self._slot_rows + 1
        self._rows = pages.as_strided((starts, row), (step, 1))

    def exchange(self, step: Step, new: torch.Tensor) -> torch.Tensor:
        """Write the new states [batch, heads, tokens, dim]; return all that the rows attend to."""
        batch, heads, tokens, dim = new.shape
        flat = new.transpose(1, 2).reshape(batch * tokens, heads, dim)
        self._pages.index_put_((step.write_pages, step.write_slots), flat)
        if (kept := step.kept(self, new)) is not None:
            return kept
        rows = step.gather(self._page_rows, self._slot_rows)
        if rows is None:
            return new
        return step.read(self, self._rows, rows, heads)


class RingStream(PagedStream):
    """K or V of one layer with a sliding window, [rows, window, heads, dim]; a row is a ring."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__(rows)
        self._window = rows.shape[1]

    def exchange(self, step: Step, new: torch.Tensor) -> torch.Tensor:
        _, heads, tokens, dim = new.shape
        rings = step.rings(self._window)
        flat = new.transpose(1, 2).reshape(tokens, heads * dim)
        # Read the earlier states first, because the new tokens overwrite some of them.
        states = rings.kept(self)
        if states is None and (rows := rings.gather(self._page_rows, self._slot_rows)) is not None:
            states = rings.read(self, self._rows, rows)
        written = flat if rings.written is None else flat.index_select(0, rings.written)
        self._pages.index_put_((rings.write_rows, rings.write_slots), written.view(-1, heads, dim))
        if states is None:
            return new
        states.index_copy_(0, rings.new_at, flat)
        return states.view(1, -1, heads, dim).transpose(1, 2)


class PagedLayer(CacheLayerMixin):
    """One layer's K and V, and the keys of its sparse-attention indexer if it has one."""

    is_sliding = False

    def __init__(self, cache: PagedCache, streams: LayerStreams, pool: PagedPool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert streams.keys is not None and streams.values is not None
        self._cache = cache
        stream = RingStream if streams.ring else PagedStream
        self._k = stream(memory_of(streams.keys, pool))
        self._v = stream(memory_of(streams.values, pool))
        # Indexer keys have no heads, so they get an axis of one head.
        self._index_k = (
            PagedStream(memory_of(streams.indexer, pool).unsqueeze(2)) if streams.indexer else None
        )
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is allocated already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if current.recorder is not None:
            both: tuple[torch.Tensor, torch.Tensor]
            both = current.recorder.exchange(self._exchange, key_states, value_states)
            return both
        return self._exchange(key_states, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the new indexer keys [batch, tokens, dim]; return all that rows may attend to."""
        new = indexer_key_states.unsqueeze(1)
        if current.recorder is not None:
            keys: torch.Tensor = current.recorder.exchange(self._exchange_indexer, new)
            return keys.squeeze(1)
        return self._exchange_indexer(new).squeeze(1)

    def _exchange(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = self._cache.step
        return self._k.exchange(step, keys), self._v.exchange(step, values)

    def _exchange_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        assert self._index_k is not None
        return self._index_k.exchange(self._cache.step, keys)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.step.past + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.step.past

    def get_max_length(self) -> int:
        return -1


class StateLayer(LinearAttentionLayer):
    """transformers' layer of conv and recurrent states, which `StateRows` fills."""

    def __init__(self, streams: LayerStreams) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=len(streams.conv))
        for i, kind in enumerate(streams.conv):
            self.is_conv_states_initialized[i] = kind is not None
            self.conv_kernel_size[i] = int(kind.shape[-1]) if kind is not None else None
        for i, kind in enumerate(streams.recurrent):
            self.is_recurrent_states_initialized[i] = kind is not None


# The bases declare `lazy_initialization` differently, but it is never called.
class PagedStateLayer(PagedLayer, StateLayer):  # type: ignore[misc]
    """A layer that has both attention and conv or recurrent states."""

    def __init__(self, cache: PagedCache, streams: LayerStreams, pool: PagedPool) -> None:
        PagedLayer.__init__(self, cache, streams, pool)
        StateLayer.__init__(self, streams)


class StateRows:
    """Copies every layer's states from rows of the pool into the layers of a forward, and back."""

    def __init__(self, pool: PagedPool) -> None:
        self._pool = pool
        self.layers: list[StateLayer] = []
        self._parts: list[tuple[dict[int, torch.Tensor | None], int, torch.Tensor]] = []

    def add(self, layer: StateLayer, streams: LayerStreams) -> None:
        self.layers.append(layer)
        for states, kinds in (
            (layer.conv_states, streams.conv),
            (layer.recurrent_states, streams.recurrent),
        ):
            self._parts.extend(
                (states, i, memory_of(k, self._pool)) for i, k in enumerate(kinds) if k is not None
            )

    def gather(self, rows: torch.Tensor, *, new: bool) -> None:
        """Copy states from `rows`, int64 [batch], into the layers; with `new`, set them to zero."""
        for layer in self.layers:
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, not new)
        for states, i, pool in self._parts:
            states[i] = (
                pool.new_zeros(len(rows), *pool.shape[1:]) if new else pool.index_select(0, rows)
            )

    def scatter(self, rows: torch.Tensor) -> None:
        for states, i, pool in self._parts:
            found = states[i]
            assert found is not None
            pool.index_copy_(0, rows, found)
            # The layers keep no state after the forward.
            states[i] = None


class PagedCache(Cache):
    """The cache that a model's forward receives; the runner sets `step` before each forward."""

    step: Step

    def __init__(self, layers: Layers, pool: PagedPool) -> None:
        self.states = StateRows(pool)
        super().__init__(layers=[self._layer(streams, pool) for streams in layers])

    # These methods answer for the whole model: a stage may ask about a layer of another stage.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.step.past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.step.past + query_length, 0

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        if layer_idx is None and not self.states.layers:
            return self.step.past > 0
        return bool(super().has_previous_state(layer_idx, state_idx))

    def _layer(self, streams: LayerStreams | None, pool: PagedPool) -> Any:
        if streams is None:
            return DummyLayer()
        if not streams.has_states:
            return PagedLayer(self, streams, pool)
        layer = (
            StateLayer(streams) if streams.keys is None else PagedStateLayer(self, streams, pool)
        )
        self.states.add(layer, streams)
        return layer
