"""Probing a model for the state that it caches, by a forward over two tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.kinds import DTYPE_BYTES, ROW, StateKind
from kvflow.serve.engine.model.parallel.stage import is_stage

_TOKENS = 2
# Suffix of the names of streams in rings. It is the name of a setting, so that an error about
# different streams shows which setting differs between the peers.
RINGS = "sliding_window_rows"
# Tensors of transformers' cache layers that are constants, not state of a request.
_CONSTANTS = frozenset({"_sliding_window_tensor"})


class LayerStreams(NamedTuple):
    """The state that one layer keeps in the pool.

    For each token, this is K, V and the key of the sparse-attention indexer. For each request, it
    is the conv and recurrent states, by transformers' index (None: an unused index).

    `window` is the number of tokens that the layer attends to, 0 for all. A layer with a window may
    keep its K and V once per request instead, in a `ring` (see `with_rings`).
    """

    keys: StateKind | None = None
    values: StateKind | None = None
    indexer: StateKind | None = None
    conv: tuple[StateKind | None, ...] = ()
    recurrent: tuple[StateKind | None, ...] = ()
    window: int = 0

    @property
    def kinds(self) -> list[StateKind]:
        return [kind for kind in (self.keys, self.values, *self.beside) if kind is not None]

    @property
    def beside(self) -> list[StateKind]:
        """All streams but K and V."""
        return [kind for kind in (self.indexer, *self.conv, *self.recurrent) if kind is not None]

    @property
    def has_states(self) -> bool:
        """True if the layer keeps conv or recurrent states, which depend on a prompt's chunks."""
        return any(kind.unit == ROW for kind in self.beside)

    @property
    def ring(self) -> int:
        """The number of slots in the ring that holds K and V, 0 if they are in pages."""
        return self.window if self.keys is not None and self.keys.unit == ROW else 0


Layers = tuple[LayerStreams | None, ...]
"""The streams of each layer; None for a layer without state (shared K and V, or no attention)."""


def kinds_of(layers: Layers) -> list[StateKind]:
    return [kind for layer in layers if layer for kind in layer.kinds]


def have_rows(layers: Layers) -> bool:
    return any(kind.unit == ROW for kind in kinds_of(layers))


def with_rings(layers: Layers) -> Layers:
    """Return `layers`, but with K and V in a ring for every layer that has a window."""
    return tuple(_in_ring(layer) if layer and layer.window else layer for layer in layers)


def _in_ring(layer: LayerStreams) -> LayerStreams:
    def ring(kind: StateKind | None) -> StateKind | None:
        if kind is None:
            return None
        return kind._replace(
            name=f"{kind.name}.{RINGS}", shape=(layer.window, *kind.shape), unit=ROW, axis=1
        )

    return layer._replace(keys=ring(layer.keys), values=ring(layer.values))


def refuse_by_config(config: Any, name: str) -> None:
    """Refuse unsupported models before any weight is read. Raises: MisuseError."""
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(name, config, "it is an encoder-decoder model")


def cache_argument(model: Any) -> str | None:
    """Return the name of the argument through which `forward` takes the cache, or None."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in parameters), None)


def probe(model: Any, name: str) -> Layers:
    """Run the model over two tokens, and return the state that every layer keeps.

    Raises: MisuseError for a model whose forward takes no cache or writes nothing to it, or whose
    cache has state of an unknown name or shape.
    """
    config, argument = model.config, cache_argument(model)
    if argument is None:
        raise _unsupported(
            name, config, "its forward takes neither past_key_values nor cache_params"
        )
    cache = DynamicCache(config=config.get_text_config())
    ids = torch.arange(1, _TOKENS + 1, device=model.device)[None]
    with torch.inference_mode():
        model(input_ids=ids, use_cache=True, **{argument: cache})
    layers = tuple(_read_layer(layer, i, name, config) for i, layer in enumerate(cache.layers))
    if not any(layers):
        what = "the layers of this stage" if is_stage(model) else "it"
        raise _unsupported(name, config, f"{what} wrote nothing to its cache")
    return layers


def _read_layer(layer: Any, index: int, name: str, config: Any) -> LayerStreams | None:
    found = dict(tensors_of(vars(layer)))
    known: set[str] = set()

    def kind(path: str, label: str, *, row: bool = False) -> StateKind | None:
        """Return the stream of the layer's tensor at `path`.

        The tensor is [1, heads, tokens, dim] or [1, tokens, dim]; a state (`row`) may have any
        shape that begins with 1.
        """
        tensor = found.get(path)
        if tensor is None:
            return None
        known.add(path)
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        fits = len(shape) > 1 and (row or (len(shape) in (3, 4) and shape[-2] == _TOKENS))
        if shape[:1] != (1,) or not fits or dtype not in DTYPE_BYTES:
            what = "for one request" if row else f"for {_TOKENS} tokens"
            raise _unsupported(
                name, config, f"layer {index} keeps {path} {list(shape)} of {dtype} {what}"
            )
        if row:
            return StateKind(f"layer{index}.{label}", dtype, shape[1:], ROW)
        return StateKind(f"layer{index}.{label}", dtype, (*shape[1:-2], shape[-1]))

    states = range(getattr(layer, "number_of_states", 0))
    streams = LayerStreams(
        keys=kind("keys", "k"),
        values=kind("values", "v"),
        indexer=kind("indexer_keys", "index_k"),
        conv=tuple(kind(f"conv_states[{i}]", f"conv{i}", row=True) for i in states),
        recurrent=tuple(kind(f"recurrent_states[{i}]", f"recurrent{i}", row=True) for i in states),
        window=int(getattr(layer, "sliding_window", 0) or 0),
    )
    if unknown := sorted(found.keys() - known - _CONSTANTS):
        raise _unsupported(
            name,
            config,
            f"layer {index} keeps {unknown[0]}, which is not known as state of a request",
        )
    return streams if streams.kinds else None


def tensors_of(attributes: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in an object's attributes with its path, such as "conv_states[0]"."""
    for path, value in attributes.items():
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, (dict, list, tuple)):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            yield from tensors_of({f"{path}[{key}]": item for key, item in inner})


def _unsupported(name: str, config: Any, why: str) -> MisuseError:
    return MisuseError(
        f"model {name!r} ({getattr(config, 'model_type', '?')}) is not supported: {why}"
    )
