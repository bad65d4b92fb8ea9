"""Tensor parallelism: transformers' plan for a model decides how weights in memory are divided.

`from_pretrained` with a `DistributedConfig` would divide the weights while it loads them, but needs
`accelerate`. This module uses private names of transformers, so the results of a shard are compared
with those of the undivided layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.parallel.part import ModelPart
from kvflow.serve.engine.model.parallel.shards import ShardGroup

_SPLIT = "colwise"
_FUSED = ("qkv_proj", "query_key_value")


class _Interface(NamedTuple):
    config: Any  # DistributedConfig
    apply: Any  # apply_tensor_parallelism


def check_plan(config: Any, part: ModelPart, name: str, device: torch.device) -> None:
    """Check, before weights are read, that the model can be divided among shards.

    Raises: MisuseError if transformers has no plan for the model, or if `device` is not the CPU.
    """
    if part.shards == 1:
        return
    if device.type != "cpu":
        raise MisuseError(
            f"{part.shards} shards on {device}: shards run on the CPU only, over gloo"
        )
    _interface(name)
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise MisuseError(
            f"model {name!r} ({config.model_type}) cannot be divided among {part.shards} shards: "
            "transformers has no tensor-parallel plan for it"
        )


def _interface(name: str) -> _Interface:
    try:
        from transformers import PreTrainedModel
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        if not hasattr(PreTrainedModel, "_resolve_parallel_plans"):
            raise ImportError("_resolve_parallel_plans")
    except ImportError as error:
        raise MisuseError(
            f"model {name!r} cannot be divided among shards with transformers "
            f"{transformers.__version__}, which lacks {error}: it works with 5.23"
        ) from None
    return _Interface(DistributedConfig, apply_tensor_parallelism)


def divide(model: Any, group: ShardGroup, name: str) -> None:
    """Reduce every divided weight to this shard's part. Raises: MisuseError if heads do not fit."""
    interface, shards = _interface(name), group.part.shards
    plan = dict(model._resolve_parallel_plans(interface.config(tp_size=shards))[0])
    check_heads(model, plan, shards, name)
    _repeat_heads(model, plan, shards)
    model._tp_size = shards
    interface.apply(model, group.mesh, without_tied(model, plan))


def check_heads(model: Any, plan: dict[str, str], shards: int, name: str) -> None:
    """Check that each shard gets whole heads. Raises: MisuseError."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    fused = any(key.rpartition(".")[2] in _FUSED and style == _SPLIT for key, style in plan.items())
    split = _split_attention(model, plan)
    if isinstance(heads, int) and heads % shards and (fused or split):
        raise MisuseError(
            f"model {name!r} has {heads} attention heads: {shards} shards cannot have as many each"
        )
    for module in split:
        kv_heads = _kv_heads(module)
        if kv_heads % shards and shards % kv_heads:
            raise MisuseError(
                f"model {name!r} has {kv_heads} K/V heads: {shards} shards cannot have as many "
                "each, nor can as many shards have each head"
            )


def without_tied(model: Any, plan: dict[str, str]) -> dict[str, str]:
    """Return the plan without modules whose weights are tied to others. Such modules stay whole."""
    known = {name for name, _ in model.named_parameters()} | {
        name for name, _ in model.named_modules()
    }
    tied = {key for key in plan if key not in known}
    owners = {key.rpartition(".")[0] for key in tied}
    return {key: style for key, style in plan.items() if key not in tied | owners}


def _split_attention(model: Any, plan: dict[str, str]) -> list[Any]:
    found = [
        name.rpartition(".")[0]
        for name, style in plan.items()
        if name.endswith(".k_proj") and style == _SPLIT
    ]
    return [module for module in map(model.get_submodule, found) if hasattr(module, "head_dim")]


def _kv_heads(module: Any) -> int:
    return int(module.k_proj.out_features) // int(module.head_dim)


def _repeat_heads(model: Any, plan: dict[str, str], shards: int) -> None:
    """Repeat the K/V heads if there are fewer than shards, so that each shard gets a whole one.

    This is exact, because attention heads that shared a K/V head only form smaller groups.
    """
    for module in _split_attention(model, plan):
        heads, dim = _kv_heads(module), int(module.head_dim)
        if not heads % shards:
            continue
        times = shards // heads
        for projection in (module.k_proj, module.v_proj):
            for name, weight in list(projection.named_parameters(recurse=False)):
                repeated = (
                    weight.detach()
                    .unflatten(0, (heads, dim))
                    .repeat_interleave(times, 0)
                    .flatten(0, 1)
                )
                setattr(projection, name, nn.Parameter(repeated, requires_grad=False))
            projection.out_features *= times
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups //= times
        if hasattr(module, "num_key_value_heads"):
            module.num_key_value_heads *= times
