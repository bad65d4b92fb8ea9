"""Prints, in vLLM's environment and as JSON, why the connector does not move a kind of KV cache."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as vllm

from kvflow.connectors.vllm.read_groups import read_groups
from kvflow.protocols.errors import MisuseError

SIZES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.float32,
}
STATES: dict[str, Any] = {
    "block_size": 16,
    "shapes": ((4, 8), (2, 16)),
    "dtypes": (torch.float32, torch.float32),
}
SPECS: dict[str, Any] = {
    "full": vllm.FullAttentionSpec(**SIZES),
    "full, with a window": vllm.FullAttentionSpec(**SIZES, sliding_window=128),
    "MLA": vllm.MLAAttentionSpec(**SIZES),
    "not causal": vllm.FullAttentionSpec(**SIZES, non_causal=True),
    "a window": vllm.SlidingWindowSpec(**SIZES, sliding_window=128),
    "a window of one token": vllm.SlidingWindowSpec(**SIZES, sliding_window=1),
    "states": vllm.MambaSpec(**STATES),
    "states of drafts": vllm.MambaSpec(**STATES, num_speculative_blocks=2),
    "chunks": vllm.ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=128),
    "a window over answers": vllm.RSWASpec(**SIZES, rswa_window=128),
    "sinks": vllm.SinkFullAttentionSpec(**SIZES, sink_len=4),
    "hidden states": vllm.HiddenStateCacheSpec(**SIZES),
    "MLA of a later version": vllm.MLAAttentionSpec(**SIZES, model_version="deepseek_v4"),
    "MLA with states of several tokens": vllm.MLAAttentionSpec(**SIZES, tokens_per_state=4),
}


CONFIG = SimpleNamespace(
    max_in_flight_tokens=256,
    model_config=SimpleNamespace(max_model_len=1024),
    cache_config=SimpleNamespace(mamba_cache_mode="none"),
)


def refusal(*specs: Any) -> str | None:
    groups = [vllm.KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)]
    config = vllm.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    try:
        read_groups(config, CONFIG)
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
    found["full and a window"] = refusal(SPECS["full"], SPECS["a window"])
    found["states and full"] = refusal(SPECS["states"], SPECS["full"])
    found["full and chunks"] = refusal(SPECS["full"], SPECS["chunks"])
    print(json.dumps(found))
