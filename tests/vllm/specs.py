"""Prints, in vLLM's environment and as JSON, why the connector does not move a kind of KV cache."""

from __future__ import annotations

import json
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as vllm

from kvflow.connectors.vllm.memory import check_groups
from kvflow.protocols.errors import MisuseError

SIZES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.float32,
}
SPECS: dict[str, Any] = {
    "full": vllm.FullAttentionSpec(**SIZES),
    "full, with a window": vllm.FullAttentionSpec(**SIZES, sliding_window=128),
    "MLA": vllm.MLAAttentionSpec(**SIZES),
    "not causal": vllm.FullAttentionSpec(**SIZES, non_causal=True),
    "a window": vllm.SlidingWindowSpec(**SIZES, sliding_window=128),
    "chunks": vllm.ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=128),
    "a window over answers": vllm.RSWASpec(**SIZES, rswa_window=128),
    "sinks": vllm.SinkFullAttentionSpec(**SIZES, sink_len=4),
    "hidden states": vllm.HiddenStateCacheSpec(**SIZES),
    "MLA of a later version": vllm.MLAAttentionSpec(**SIZES, model_version="deepseek_v4"),
    "MLA with states of several tokens": vllm.MLAAttentionSpec(**SIZES, tokens_per_state=4),
}


def refusal(spec: Any) -> str | None:
    group = vllm.KVCacheGroupSpec(["layer"], spec)
    try:
        check_groups(vllm.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group]))
    except MisuseError as error:
        return str(error)
    return None


def of_several(*specs: Any) -> Any:
    layers = {f"layer.{number}": spec for number, spec in enumerate(specs)}
    return vllm.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)


if __name__ == "__main__":
    found = {name: refusal(spec) for name, spec in SPECS.items()}
    found["several layers"] = refusal(of_several(SPECS["full"], SPECS["full"]))
    found["several layers, one with sinks"] = refusal(of_several(SPECS["full"], SPECS["sinks"]))
    print(json.dumps(found))
