"""Which of vLLM's KV-cache groups kvflow moves, and as which spaces."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvflow.connectors.vllm.groups import Group, Groups
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import Space

_MOVED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)


def read_groups(config: KVCacheConfig, vllm_config: Any) -> Groups:
    """Return the groups of vLLM's cache.

    Raises: MisuseError naming the kind of a group whose blocks kvflow does not move.
    """
    found = [
        _group(number, group, config.num_blocks, vllm_config)
        for number, group in enumerate(config.kv_cache_groups)
    ]
    paged = [group for group in found if group.space.page_size]
    if not paged:
        raise MisuseError(
            "the model keeps states and no KV cache of attention, and kvflow's connector moves "
            "states only beside such a cache"
        )
    first = next((group for group in paged if not group.space.window), paged[0])
    return Groups([first, *(group for group in found if group is not first)])


def _group(number: int, given: Any, num_blocks: int, vllm_config: Any) -> Group:
    spec = _spec_of(given.kv_cache_spec)
    size, window, most, kind = int(spec.block_size), 0, 0, "full attention"
    state_tokens = 0
    if isinstance(spec, SlidingWindowSpec):
        # Decode computes the last token. It reads the tokens before it, one fewer than the window.
        window, kind = spec.sliding_window - 1, f"window of {spec.sliding_window}"
        most = spec.max_admission_blocks_per_request(
            vllm_config.max_in_flight_tokens, vllm_config.model_config.max_model_len
        )
    elif isinstance(spec, MambaSpec):
        most = -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
        size, state_tokens, kind = 0, size, "state"
    space = Space(f"group {number}, {kind}", num_blocks, size, window)
    return Group(number, tuple(given.layer_names), space, most, state_tokens)


def _spec_of(spec: Any) -> Any:
    """Return the spec of a group's layers. Raises: MisuseError if kvflow does not move their
    blocks.
    """
    inner = (
        list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )
    for each in inner:
        # Subclasses do not qualify: they keep further data, or free blocks in another way.
        if type(each) not in _MOVED:
            raise MisuseError(
                "kvflow's connector moves the KV cache of full attention, of sliding windows and "
                f"of states, and this model has a {type(each).__name__}"
            )
        _check_spec(each)
    return inner[0]


def _check_spec(spec: Any) -> None:
    if getattr(spec, "non_causal", False):
        raise MisuseError(
            "kvflow's connector moves what causal attention keeps, and this model's is not causal"
        )
    if isinstance(spec, MLAAttentionSpec) and (
        spec.model_version is not None or spec.tokens_per_state != 1
    ):
        raise MisuseError(
            "kvflow's connector moves one state for each token, and this model's cache is of "
            f"the version {spec.model_version!r} with {spec.tokens_per_state} tokens for each"
        )
    if isinstance(spec, SlidingWindowSpec) and spec.sliding_window < 2:
        raise MisuseError(
            f"kvflow's connector moves sliding windows of 2 tokens and more, and this model has "
            f"one of {spec.sliding_window}"
        )
    if isinstance(spec, MambaSpec):
        _check_states(spec)


def _check_states(spec: Any) -> None:
    if spec.num_speculative_blocks:
        raise MisuseError(
            "kvflow's connector does not move the states of a model that decodes speculatively"
        )
