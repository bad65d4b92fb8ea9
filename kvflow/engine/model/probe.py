"""What a model caches, found by a forward over two tokens with transformers' own cache."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin

from kvflow.protocols.errors import MisuseError

Stream = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape per token slot: what `protocols.pages.layout.build_layout` takes."""

_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2", "recurrent"}
_COMPRESSED = {"indexed_attention", "heavily_compressed_attention", "compressed_sparse_attention"}


class LayerStreams(NamedTuple):
    """One layer's K and V in the pool. `window` is the number of tokens that the layer attends to, 0 for all."""

    key_name: str
    value_name: str
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    dtype: str
    window: int

    @property
    def streams(self) -> list[Stream]:
        return [(self.key_name, self.dtype, self.key_shape), (self.value_name, self.dtype, self.value_shape)]


def refuse_by_config(config: Any, name: str) -> None:
    """Refuse unsupported models by their configuration, before any weight is read. Raises: MisuseError."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "layers_block_type", None) or ())
    if kinds & _RECURRENT:
        raise _unsupported(name, config, "it keeps recurrent state, which is not paged KV")
    if kinds & _COMPRESSED or getattr(text, "index_topk", None):
        raise _unsupported(name, config, "its sparse-attention indexer is not supported")
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(name, config, "it is an encoder-decoder model")


def probe(model: Any, name: str) -> tuple[LayerStreams | None, ...]:
    """K and V of every layer; None for layers without K and V of their own (shared ones, or no attention).

    Raises: MisuseError for models with state other than paged KV.
    """
    config = model.config
    if getattr(model, "_is_stateful", False) or "past_key_values" not in inspect.signature(model.forward).parameters:
        raise _unsupported(name, config, "it keeps recurrent state, which is not paged KV")
    cache = DynamicCache(config=config.get_text_config())
    ids = torch.tensor([[1, 2]], dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    layers = tuple(_read_layer(layer, i, name, config) for i, layer in enumerate(cache.layers))
    if not any(layers):
        raise _unsupported(name, config, "it wrote nothing to its KV cache")
    return layers


def _read_layer(layer: Any, index: int, name: str, config: Any) -> LayerStreams | None:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        raise _unsupported(name, config, f"layer {index} keeps recurrent state, which is not paged KV")
    if getattr(layer, "indexer_keys", None) is not None:
        raise _unsupported(name, config, f"layer {index} has a sparse-attention indexer, which is not supported")
    keys, values = layer.keys, layer.values
    if isinstance(layer, DummyLayer) or keys is None:
        return None
    if keys.dim() != 4 or keys.shape[2] != 2 or values.shape[2] != 2 or keys.dtype != values.dtype:
        shapes = f"K {tuple(keys.shape)} {keys.dtype} and V {tuple(values.shape)} {values.dtype}"
        raise _unsupported(name, config, f"layer {index} caches {shapes} for two tokens, not [1, heads, 2, dim]")
    return LayerStreams(
        f"layer{index}.k",
        f"layer{index}.v",
        (keys.shape[1], keys.shape[3]),
        (values.shape[1], values.shape[3]),
        str(keys.dtype).removeprefix("torch."),
        int(getattr(layer, "sliding_window", 0) or 0),
    )


def _unsupported(name: str, config: Any, why: str) -> MisuseError:
    return MisuseError(f"model {name!r} ({getattr(config, 'model_type', '?')}) is not supported: {why}")
