"""SGLang's KV cache as a kvflow pool. Only this module knows how `KVArgs` describes it."""

from __future__ import annotations

import json
import logging
from typing import Any

from kvflow.connectors.sglang.version import SUPPORTED
from kvflow.memory.device import HOST
from kvflow.memory.pool import PagedPool
from kvflow.memory.raw import Region, pool_at
from kvflow.memory.shared import SharedSegment
from kvflow.model_files import config_digest, folder_of, weights_digest
from kvflow.protocols.errors import KvflowError, LayoutError, MisuseError

log = logging.getLogger("sglang.kvflow")


def pool_of(
    args: Any,
    *,
    rank: int,
    ranks: int,
    fingerprint: str,
    device: str,
    segment: SharedSegment | None,
    is_mla: bool,
) -> PagedPool:
    """Return a pool over the buffers in `args`, SGLang's `KVArgs`.

    Page p of every buffer holds the same tokens, so one list of pages names what a request has.
    `rank` of `ranks` is the part of the heads that this process has. Buffers are named by layer, so
    that a decode with all layers takes them from the stages of a prefill. Raises: MisuseError for a
    cache that needs more than one list of pages; LayoutError for buffers that are not a pool.
    """
    if args.state_types:
        kinds = ", ".join(str(getattr(kind, "value", kind)) for kind in args.state_types)
        raise MisuseError(
            f"the model keeps state of the kinds {kinds} besides its KV cache, and kvflow's "
            "backend moves the pages of one KV cache: use another "
            "--disaggregation-transfer-backend for this model"
        )
    if getattr(args, "mla_compression_ratios", None) is not None:
        raise MisuseError("kvflow's backend does not move a KV cache that is compressed by layer")
    return pool_at(
        _regions(args, rank, ranks, is_mla=is_mla),
        args.page_size,
        fingerprint=fingerprint,
        segment=segment,
        device=device,
    )


def _regions(args: Any, rank: int, ranks: int, *, is_mla: bool) -> list[Region]:
    # Only the rank with the same number on the other side has the same heads.
    part = f", rank {rank} of {ranks}" if ranks > 1 else ""
    label = f"SGLang {SUPPORTED} {args.kv_cache_dtype_str} {args.kv_layout or 'nhd'}{part}"
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
