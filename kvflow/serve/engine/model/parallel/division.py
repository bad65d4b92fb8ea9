"""Finding the part of each stream that a shard keeps: a forward before the layers are divided is
compared with a forward afterwards.

The number of shards alone does not determine which K/V heads a shard has. Some plans divide
attention, others leave it whole on every shard, and latents and states are whole on all shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.components import Part
from kvflow.protocols.pages.kinds import StateKind
from kvflow.serve.engine.model.parallel.part import ModelPart
from kvflow.serve.engine.model.parallel.stage import stock_cache
from kvflow.serve.engine.model.probe import Layers, cache_argument, tensors_of

_TOKENS = 5
# Allowed relative errors. A wrong head or a wrong sum causes an error of about 1.4.
_ALLOWED = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.3}


class Observed(NamedTuple):
    """A forward's logits, and the tensors that each layer kept, [1, heads or channels, ...]."""

    logits: torch.Tensor
    kept: list[dict[str, torch.Tensor]]


@torch.inference_mode()
def observe(model: Any) -> Observed:
    """Run a forward over a few tokens with transformers' own cache, and return what it computed."""
    cache = stock_cache(model)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.tensor(
        [[(i * i * 7 + 3) % min(vocabulary, 997) for i in range(_TOKENS)]], device=model.device
    )
    more: dict[str, Any] = {"use_cache": True, cache_argument(model) or "": cache}
    if "position_ids" in inspect.signature(model.forward).parameters:
        more["position_ids"] = torch.arange(_TOKENS, device=model.device)[None]
    logits = model(input_ids=ids, **more).logits
    return Observed(logits, [dict(tensors_of(vars(layer))) for layer in cache.layers])


def annotated(
    layers: Layers, before: Observed, after: Observed, part: ModelPart, name: str
) -> Layers:
    """Return the streams of this shard, given those of the whole model (`layers`).

    The returned streams have the shard's shapes, and state which part of the whole they are.
    `before` and `after` are the results of the whole model and of the divided model.

    Raises: MisuseError if the logits or states of the divided model differ from those of the whole.
    """
    allowed = _ALLOWED.get(str(before.logits.dtype).removeprefix("torch."), 0.3)
    if not (error := _distance(after.logits, before.logits)) <= allowed:
        raise MisuseError(
            f"model {name!r} cannot be divided among {part.shards} shards: their logits differ "
            f"from those of the whole (relative error {error:.2g}, allowed {allowed:g})"
        )
    found: list[Any] = []
    for i, layer in enumerate(layers):
        if layer is None:
            found.append(None)
            continue

        def one(kind: StateKind | None, path: str, i: int = i) -> StateKind | None:
            if kind is None:
                return None
            whole, mine = before.kept[i][path], after.kept[i][path]
            split = split_of(whole.shape[1], mine.shape[1], part)
            if split is None or not _is_part(whole, mine, split, allowed):
                raise MisuseError(
                    f"model {name!r} cannot be divided among {part.shards} shards: {kind.name} is "
                    f"{list(whole.shape)} of the whole, and {list(mine.shape)} of shard "
                    f"{part.shard}, which is no part of it"
                )
            return _with(kind, mine.shape[1], split)

        found.append(
            layer._replace(
                keys=one(layer.keys, "keys"),
                values=one(layer.values, "values"),
                indexer=one(layer.indexer, "indexer_keys"),
                conv=tuple(one(kind, f"conv_states[{n}]") for n, kind in enumerate(layer.conv)),
                recurrent=tuple(
                    one(kind, f"recurrent_states[{n}]") for n, kind in enumerate(layer.recurrent)
                ),
            )
        )
    return tuple(found)


def split_of(whole: int, mine: int, part: ModelPart) -> Part | None:
    """Return which `mine` of `whole` entries this shard has, or None if the division is uneven."""
    if mine == whole:
        return Part(replica=part.shard, replicas=part.shards)
    if not mine or whole % mine or part.shards % (whole // mine):
        return None
    copies = part.shards // (whole // mine)
    return Part(part.shard // copies * mine, whole, part.shard % copies, copies)


def of_every_shard(streams: Sequence[StateKind], shards: int) -> list[StateKind]:
    """Return the streams of all shards, shard by shard, given the `streams` of any one of them."""
    return [_at(kind, shard, shards) for shard in range(shards) for kind in streams]


def _at(kind: StateKind, shard: int, shards: int) -> StateKind:
    entries = int(kind.shape[int(kind.axis)])
    split = split_of(int(kind.whole) or entries, entries, ModelPart(shard=shard, shards=shards))
    assert split is not None
    return kind._replace(start=split.start, replica=split.replica)


def _is_part(whole: torch.Tensor, mine: torch.Tensor, split: Part, allowed: float) -> bool:
    wanted = whole[:, split.start : split.start + mine.shape[1]]
    return wanted.shape == mine.shape and _distance(mine, wanted) <= allowed


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-6))


def _with(kind: StateKind, entries: int, split: Part) -> StateKind:
    shape = tuple(kind.shape)
    if split.whole:
        shape = (entries, *shape[1:])
    return kind._replace(shape=shape, **split._asdict())
