"""SGLang's KV cache as a kvflow pool. Only this module knows how `KVArgs` describes it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvflow.connectors.sglang.version import SUPPORTED
from kvflow.memory.device import HOST
from kvflow.memory.pool import PagedPool
from kvflow.memory.raw import Region, SpaceRegions, pool_at
from kvflow.memory.shared import SharedSegment
from kvflow.model_files import config_digest, folder_of, weights_digest
from kvflow.protocols.errors import KvflowError, LayoutError, MisuseError
from kvflow.protocols.pages.components import ALL, Part
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, PoolLayout

log = logging.getLogger("sglang.kvflow")

_PAGES, _WINDOW, _ROWS = "pages", "window", "rows"
# How many places a request has of each kind of state: a page for every page of its KV cache, for
# the pages of the sliding window, or one row.
_STATES = {"swa": _WINDOW, "dsa": _PAGES, "mamba": _ROWS, "request_row": _ROWS}


def pool_of(
    args: Any,
    *,
    rank: int,
    ranks: int,
    fingerprint: str,
    device: str,
    segment: SharedSegment | None,
    is_mla: bool,
    stages: int = 1,
    window: int = 0,
    kv_heads: int = 0,
) -> PagedPool:
    """Return a pool over the buffers in `args`, SGLang's `KVArgs`.

    The first space has the pages of the KV cache: page p of every buffer holds the same tokens.
    Each of `args.state_types` is a further space. `rank` of `ranks` is the part of the heads that
    this process has. Buffers are named by layer, so that a decode with all layers takes them from
    the `stages` of a prefill. `window` is the length of the model's sliding window in tokens.
    `kv_heads` is the number of heads of K and V at all ranks together, if the bytes of a page lie
    by token and then by head, and 0 otherwise.

    Raises: MisuseError for a kind of state that is not supported; LayoutError for buffers that are
    not a pool.
    """
    if getattr(args, "mla_compression_ratios", None) is not None:
        raise MisuseError("kvflow's backend does not move a KV cache that is compressed by layer")
    label = f"SGLang {SUPPORTED} {args.kv_cache_dtype_str} {args.kv_layout or 'nhd'}"
    # Of other bytes, only the rank with the same number on the other side has the same.
    of_rank = f"{label}, rank {rank} of {ranks}" if ranks > 1 else label
    spaces = _state_spaces(args, of_rank, stages, window)
    if are_by_head(args, ranks, kv_heads, is_mla=is_mla):
        held = kv_heads // ranks
        part = Part(start=held * rank, whole=kv_heads) if ranks > 1 else ALL
        regions = [
            each._replace(slot_shape=(held, each.page_bytes // (args.page_size * held)), part=part)
            for each in _regions(args, label, is_mla=is_mla)
        ]
    else:
        regions = _regions(args, of_rank, is_mla=is_mla)
    for kind, space in spaces.items():
        if segment is not None and not all(
            segment.address <= region.address < segment.address + segment.size_bytes
            for region in space.regions
        ):
            raise MisuseError(
                f"KVFLOW_SGLANG_TRANSFER_BACKEND local: SGLang keeps the model's state of the kind "
                f"{kind} outside the shared segment; use mooncake or nixl"
            )
    return pool_at(
        regions,
        args.page_size,
        spaces=spaces,
        fingerprint=fingerprint,
        segment=segment,
        device=device,
    )


def are_by_head(args: Any, ranks: int, kv_heads: int, *, is_mla: bool) -> bool:
    """Return True if the pages in `args` can be divided by head among other numbers of ranks than
    here. See `pool_of`.
    """
    drafts = getattr(args, "num_draft_entries", 0)
    if is_mla or not kv_heads or kv_heads % ranks or args.kv_layout or args.state_types or drafts:
        return False
    entries = args.page_size * (kv_heads // ranks)
    return not any(item_bytes % entries for item_bytes in args.kv_item_lens)


def places_of(
    layout: PoolLayout, pages: Any, state_indices: Sequence[Any] | None = None
) -> PageIndices:
    """Return a request's places in one list: `pages` of the KV cache, and what SGLang gives for
    each kind of state, in the order of the spaces. SGLang gives no state before the last chunk.
    """
    found = [np.asarray(pages, dtype=np.int32)]
    if len(layout.spaces) == 1:
        return found[0]
    given = [None] * (len(layout.spaces) - 1) if state_indices is None else list(state_indices)
    for indices in given:
        own = NO_PLACES if indices is None else np.asarray(indices, dtype=np.int32).ravel()
        found.append(own)
    return layout.numbered(found)


def _state_spaces(args: Any, label: str, stages: int, window: int) -> dict[str, SpaceRegions]:
    """Return the space of each kind of state. Raises: MisuseError."""
    kinds = [str(getattr(kind, "value", kind)) for kind in args.state_types]
    if unknown := [kind for kind in kinds if kind not in _STATES]:
        raise MisuseError(
            f"the model keeps state of the kind {', '.join(unknown)} besides its KV cache, which "
            f"kvflow's backend does not move (it moves {', '.join(_STATES)}): use another "
            "--disaggregation-transfer-backend for this model"
        )
    if len(set(kinds)) < len(kinds):
        raise MisuseError(f"two states of one kind among {', '.join(kinds)}")
    if kinds and stages > 1:
        raise MisuseError(
            f"--pp-size above 1 with state of the kinds {', '.join(kinds)}: SGLang does not say to "
            "which layers it belongs"
        )
    found: dict[str, SpaceRegions] = {}
    for number, kind in enumerate(kinds):
        if (in_window := _STATES[kind] is _WINDOW) and window < 1:
            raise MisuseError(f"state of the kind {kind}, and SGLang names no sliding window")
        sizes = zip(
            args.state_data_ptrs[number],
            args.state_data_lens[number],
            args.state_item_lens[number],
            strict=True,
        )
        regions = [Region(f"{kind}{n}", *size, label) for n, size in enumerate(sizes)]
        slots = 0 if _STATES[kind] is _ROWS else args.page_size
        found[kind] = SpaceRegions(regions, slots, window if in_window else 0)
    return found


def _regions(args: Any, label: str, *, is_mla: bool) -> list[Region]:
    sizes = zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True)
    found = [
        Region(name, address, size_bytes, item_bytes, label)
        for name, (address, size_bytes, item_bytes) in zip(
            _names(args, is_mla=is_mla), sizes, strict=True
        )
    ]
    if not found:
        raise LayoutError("SGLang's KV cache has no buffers")
    return found


def _names(args: Any, *, is_mla: bool) -> list[str]:
    """Return a name for each buffer, by layer of the whole model.

    The latents of MLA are one list. Other caches list K of all layers, and then V. The buffers of a
    draft model follow. Raises: LayoutError for a list that is neither.
    """
    drafts = int(getattr(args, "num_draft_entries", 0) or 0)
    count = len(args.kv_data_ptrs) - drafts
    if not is_mla and count % 2:
        raise LayoutError(f"SGLang's KV cache has {count} buffers, and K and V need an even number")
    # Only a prefill has stages.
    first = int(getattr(args, "prefill_start_layer", 0) or 0)
    kinds = ["kv"] if is_mla else ["k", "v"]
    layers = range(first, first + count // len(kinds))
    return [f"{kind}{layer}" for kind in kinds for layer in layers] + [
        f"draft{number}" for number in range(drafts)
    ]


def device_of(name: str, gpu_id: int) -> str:
    """Return kvflow's name for the device of SGLang's KV cache.

    Raises: MisuseError for a device other than "cpu" and "cuda".
    """
    if name == "cpu":
        return HOST
    if name == "cuda":
        return f"cuda:{gpu_id}"
    raise MisuseError(f"kvflow's backend is for SGLang on cpu and cuda, not on {name}")


def model_fingerprint(model_path: str) -> str:
    """Return a text that identifies the model in a folder by its configuration and its weights."""
    try:
        weights = weights_digest(model_path)
        config = config_digest(json.loads((folder_of(model_path) / "config.json").read_bytes()))
    except (KvflowError, ImportError, OSError, ValueError) as error:
        log.warning(
            "two models of one shape cannot be told apart here (set KVFLOW_SGLANG_FINGERPRINT): %s",
            error,
        )
        return "unread"
    return f"config {config} weights {weights}"
