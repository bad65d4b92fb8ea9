"""vLLM's KV cache as a kvflow pool, one page per block. Only vLLM knows a block's inner layout."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from kvflow.connectors.vllm.groups import Group, Groups
from kvflow.connectors.vllm.version import release
from kvflow.connectors.vllm.widths import Heads
from kvflow.memory.copies import host_layout, least_bytes
from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.memory.streams import SpaceStreams
from kvflow.model_files import config_digest, weights_digest
from kvflow.protocols.errors import KvflowError, MisuseError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.pages.spaces import counts_fit

log = logging.getLogger("vllm.kvflow")


@contextmanager
def shared_allocation(found: list[SharedSegment]) -> Generator[None]:
    """Place the KV cache that vLLM allocates in host memory inside the `with` statement in a shared
    segment.

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
        # Transfers to a cache on a device pass through a staging, which is a segment of its own.
        on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        is_cache = func is torch.zeros and kwargs.get("dtype") is torch.int8
        if not (is_cache and on_host) or self._found:
            return func(*args, **kwargs)
        (size,) = args
        self._found.append(SharedSegment.create(size))
        return torch.frombuffer(self._found[0].memory, dtype=torch.int8, count=size)


class Share(NamedTuple):
    """Which part of a model's cache a pool has, where the layers are divided among several workers.

    `held` are the heads in this worker, and `heads` those of them in the pool. `together` shards of
    a prefill serve one worker of decode. `worker` names the worker, "worker 1 of 2", if only the
    one with the same name has the same part; it is "" if the two sides have other numbers of
    workers.
    """

    held: Heads
    heads: Heads
    together: int
    worker: str


Caches = Mapping[str, torch.Tensor]
"""The tensors of one group by name, each [blocks, *shape]."""


def caches_of(
    kv_caches: Mapping[str, Any], groups: Groups, num_blocks: int
) -> list[dict[str, torch.Tensor]]:
    """Return vLLM's tensors for each group, in the order of the spaces.

    `kv_caches` has a tensor for each layer, or a list of tensors for a layer that keeps states. A
    tensor may have several entries for a block of the group, one after the other; they become one.

    Raises: MisuseError for a layer that vLLM has not named.
    """
    found: list[dict[str, torch.Tensor]] = []
    for group in groups.groups:
        tensors: dict[str, torch.Tensor] = {}
        for layer in group.layers:
            if layer not in kv_caches:
                raise MisuseError(f"vLLM gives no KV cache for layer {layer}")
            given = kv_caches[layer]
            if isinstance(given, torch.Tensor):
                tensors[layer] = _by_block(given, num_blocks)
            else:
                named = {
                    f"{layer}.{n}": _by_block(each, num_blocks) for n, each in enumerate(given)
                }
                tensors |= named
        found.append(tensors)
    return found


def staging_bytes(layout: PoolLayout, tokens: int) -> int:
    """Return the default bytes of staging at a decode with a pool of this layout.

    The groups share their memory, so these are the bytes that one group can fill. If the staging
    of that size would not hold a prompt of `tokens` tokens in the part of each group, it is doubled
    until it does.
    """
    filled = (count * size for count, size in zip(layout.counts, layout.place_bytes, strict=True))
    found, wanted = max(least_bytes(layout), *filled), layout.wanted(tokens)
    while found < layout.room_bytes(layout.counts):
        if counts_fit(wanted, host_layout(layout, found).counts):
            break
        found *= 2
    return found


def _by_block(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    entries, rest = divmod(cache.shape[0], num_blocks)
    # The self-test names a cache that has no whole number of entries for a block.
    return cache if entries < 2 or rest else cache.unflatten(0, (num_blocks, entries))


def pool_over(
    caches: Sequence[Caches],
    groups: Groups,
    *,
    layout: str,
    fingerprint: str,
    segment: SharedSegment | None,
    share: Share | None = None,
) -> PagedPool:
    """Return a pool over `caches`, which has the tensors of each group (see `caches_of`). Those of
    attention are [blocks, heads, slots, width].

    The dimensions may be in any order in memory, but each block is contiguous. The spaces share
    their memory: vLLM gives a block to one group at a time. `layout` is a text with all other
    properties that must be equal on both sides. Without `share`, this worker has the whole cache.

    Raises: LayoutError; MisuseError for a cache of which kvflow does not know the parts.
    """
    streams: list[dict[str, torch.Tensor]] = []
    parts: dict[str, dict[str, int]] = {}
    formats: dict[str, str] = {}
    for group, tensors in zip(groups.groups, caches, strict=True):
        streams.append({})
        for name, cache in _distinct(tensors).items():
            # Dimensions in their order in memory, outermost first.
            order = sorted(range(1, cache.dim()), key=cache.stride, reverse=True)
            stream, formats[name] = cache.permute(0, *order), f"vLLM {release()} {layout}"
            if share is not None:
                if _has_heads(cache, group, share.held):
                    axis = order.index(1)
                    stream = _narrowed(stream, axis, share)
                    parts[name] = share.heads.part(axis, share.together)
                elif share.worker:
                    formats[name] += f", {share.worker}"
                else:
                    raise MisuseError(
                        f"decode_workers: kvflow does not know how {name} of "
                        f"{group.space.name!r} is divided among workers: run as many at decode"
                    )
            streams[-1][name] = stream
    first, *more = (
        SpaceStreams({}, space.page_size, own, space.window)
        if space.page_size
        else SpaceStreams(own, 0)
        for space, own in zip((group.space for group in groups.groups), streams, strict=True)
    )
    return PagedPool.wrap(
        {},
        first.page_size,
        per_page=first.per_page,
        window=first.window,
        spaces=dict(zip((group.space.name for group in groups.groups[1:]), more, strict=True)),
        formats=formats,
        fingerprint=fingerprint,
        segment=segment,
        parts=parts,
    )


def _has_heads(cache: torch.Tensor, group: Group, held: Heads) -> bool:
    """Return True if the parts of this cache are known: it has heads, or is MLA's."""
    is_paged = bool(group.space.page_size)
    return is_paged and (not held.total or (cache.dim() == 4 and cache.shape[1] == held.held))


def _narrowed(stream: torch.Tensor, axis: int, share: Share) -> torch.Tensor:
    """Return the heads that are in the pool. Raises: MisuseError if a block's are not together."""
    if share.heads.held == share.held.held:
        return stream
    if axis:
        raise MisuseError(
            "decode_workers above --tensor-parallel-size: set VLLM_KV_CACHE_LAYOUT=HND on both "
            "sides, so that the heads of a block lie one after the other"
        )
    return stream.narrow(1, share.heads.start - share.held.start, share.heads.held)


def _distinct(tensors: Caches) -> dict[str, torch.Tensor]:
    """Return one of the tensors at each address. Layers that share a cache have the same bytes,
    which are moved once.
    """
    found: dict[int, str] = {}
    for name, cache in tensors.items():
        found.setdefault(cache.data_ptr(), name)
    return {name: tensors[name] for name in found.values()}


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
