"""vLLM's KV cache as a kvflow pool, one page per block. Only vLLM knows a block's inner layout."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from kvflow.connectors.vllm.version import SUPPORTED
from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.model_files import config_digest, weights_digest
from kvflow.protocols.errors import KvflowError, MisuseError

log = logging.getLogger("vllm.kvflow")


def check_groups(config: KVCacheConfig) -> int:
    """Return the number of tokens in a block.

    Raises: MisuseError unless the cache has one group of layers, with full causal attention and one
    state per token.
    """
    groups = config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise MisuseError(
            f"the KV cache has {len(groups)} groups ({kinds}), and kvflow's connector moves one: "
            "where they are layers with a sliding window beside others, "
            "--disable-hybrid-kv-cache-manager makes them one"
        )
    spec = groups[0].kv_cache_spec
    inner = (
        list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )
    for each in inner:
        # Subclasses do not qualify: they keep further data, or free blocks while decoding.
        if type(each) not in (FullAttentionSpec, MLAAttentionSpec):
            raise MisuseError(
                "kvflow's connector moves the KV cache of full attention, and this model's is a "
                f"{type(each).__name__}"
            )
        if each.non_causal:
            raise MisuseError(
                "kvflow's connector moves what causal attention keeps, and this model's is not "
                "causal"
            )
        if isinstance(each, MLAAttentionSpec) and (
            each.model_version is not None or each.tokens_per_state != 1
        ):
            raise MisuseError(
                "kvflow's connector moves one state for each token, and this model's cache is of "
                f"the version {each.model_version!r} with {each.tokens_per_state} tokens for each"
            )
    return int(spec.block_size)


@contextmanager
def shared_allocation(found: list[SharedSegment]) -> Generator[None]:
    """Place the KV cache that vLLM allocates inside the `with` statement in a shared segment.

    Prefills on this machine can then write into it. The segment is appended to `found`.
    """
    with _InSegment(found):
        yield


class _InSegment(TorchFunctionMode):
    """A mode in which the KV cache is allocated in a shared segment.

    vLLM allocates it as one `torch.zeros` of bytes (v1/worker/utils.py, allocate_kv_cache).
    """

    def __init__(self, found: list[SharedSegment]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.get("dtype") is not torch.int8 or self._found:
            return func(*args, **kwargs)
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise MisuseError(
                "transfer_backend local: the KV cache is not in host memory, the only kind it "
                "copies"
            )
        (size,) = args
        self._found.append(SharedSegment.create(size))
        return torch.frombuffer(self._found[0].memory, dtype=torch.int8, count=size)


class Heads(NamedTuple):
    """The K/V heads of a model whose layers are split over `shards` workers, as seen by worker
    `shard`.

    `total` is the number of heads; it is 0 for MLA, whose cache is not split by heads. If there are
    fewer heads than shards, or none, several shards hold the same part.
    """

    total: int
    shard: int
    shards: int

    def part(self, heads: int, axis: int) -> dict[str, int]:
        """Return our part of a layer's cache, `heads` heads along `axis`, as fields of `Part`."""
        if not self.total:
            return {"replica": self.shard, "replicas": self.shards}
        copies = max(1, heads * self.shards // self.total)
        start, copy = divmod(self.shard, copies)
        return {
            "start": start * heads,
            "whole": self.total,
            "replica": copy,
            "replicas": copies,
            "axis": axis,
        }


def pool_over(
    caches: Mapping[str, torch.Tensor],
    block_size: int,
    *,
    layout: str,
    fingerprint: str,
    segment: SharedSegment | None,
    heads: Heads | None = None,
) -> PagedPool:
    """Return a pool over `caches`: vLLM's layers by name, each [blocks, heads, slots, width].

    The dimensions may be in any order in memory, but each block is contiguous. `layout` is a text
    with all other properties that must be equal on both sides. `heads` is given if one decode
    worker holds the parts of all of prefill's workers. Otherwise each worker has one counterpart.

    Raises: LayoutError.
    """
    # Layers that share a cache have the same bytes, which are moved once.
    distinct: dict[int, str] = {}
    for name, cache in caches.items():
        distinct.setdefault(cache.data_ptr(), name)
    streams, parts = {}, {}
    for name in distinct.values():
        cache = caches[name]
        # Dimensions in their order in memory, outermost first.
        order = sorted(range(1, cache.dim()), key=cache.stride, reverse=True)
        streams[name] = cache.permute(0, *order)
        if heads is not None:
            parts[name] = heads.part(cache.shape[1], order.index(1))
    return PagedPool.wrap(
        {},
        block_size,
        per_page=streams,
        formats=dict.fromkeys(streams, f"vLLM {SUPPORTED} {layout}"),
        fingerprint=fingerprint,
        segment=segment,
        parts=parts,
    )


def model_fingerprint(model_config: Any, cache_dtype: str) -> str:
    """Return a text that identifies a model by architecture, types, configuration and weights."""
    name = model_config.model
    config = model_config.hf_config.to_dict()
    what = (config.get("architectures") or ["?"])[0]
    try:
        weights = weights_digest(name)
    except (KvflowError, OSError, ValueError) as error:
        log.warning(
            "two models of one configuration cannot be told apart here (set fingerprint): %s", error
        )
        weights = "unread"
    return (
        f"{what[:80]} {model_config.dtype} cache {cache_dtype} config {config_digest(config)} "
        f"weights {weights}"
    )
