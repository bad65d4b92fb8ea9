"""The node of one rank of a SGLang server, over the KV cache of that rank."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

import uvloop
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel, get_serving
from sglang.srt.utils.network import get_local_ip_auto

from kvflow.connectors.sglang.counterpart import SIZES, resolver
from kvflow.connectors.sglang.memory import device_of, model_fingerprint, pool_of
from kvflow.connectors.sglang.queues import MODEL
from kvflow.connectors.sglang.settings import Settings, variable
from kvflow.connectors.staging import ALWAYS, is_staged, make_staging
from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.memory.staging import Staging, prefill_bytes
from kvflow.node.threads.decode import DecodeThread
from kvflow.node.threads.prefill import PrefillThread
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.kinds import SLOT
from kvflow.protocols.pages.layout import resized
from kvflow.transports.control.curve import read_key
from kvflow.transports.control.registry import RegistryClient
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.data.select import open_plane

log = logging.getLogger("sglang.kvflow")
_WILDCARDS = ("", "0.0.0.0", "::")


class Place(NamedTuple):
    """The position of this process: `rank` of the `ranks` that share the attention heads, and
    `stage` of the `stages` that share the layers.
    """

    rank: int
    ranks: int
    stage: int = 0
    stages: int = 1

    @property
    def number(self) -> int:
        """The number of this process among the `total` ranks of the server. The stages of one rank
        stand together.
        """
        return self.rank * self.stages + self.stage

    @property
    def total(self) -> int:
        return self.ranks * self.stages

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.stages - 1


def place_of(args: Any, server_args: Any, *, is_prefill: bool) -> Place:
    """Return the place of this process. Raises: MisuseError for a server that is not supported."""
    parallel = get_parallel()
    refused = {
        "--pp-size above 1 at decode": parallel.pp_size > 1 and not is_prefill,
        "data parallelism (--dp-size above 1)": parallel.dp_size > 1 or parallel.attn_dp_size > 1,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "--enable-kv-cache-sharding": bool(parallel.enable_kv_cache_sharding),
        "--enable-hisparse": bool(getattr(server_args, "enable_hisparse", False)),
        "SGLANG_RUST_SERVER": bool(envs.SGLANG_RUST_SERVER.get()),
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0, with which SGLang reuses pages that "
        "are being written": not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get(),
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": bool(envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get()),
    }
    if found := [name for name, is_used in refused.items() if is_used]:
        raise MisuseError(
            f"kvflow's backend does not support {'; '.join(found)}: start without it, or with "
            "another --disaggregation-transfer-backend"
        )
    return Place(parallel.attn_tp_rank, parallel.attn_tp_size, args.pp_rank, parallel.pp_size)


def pool_for(
    args: Any, server_args: Any, settings: Settings, place: Place, *, is_mla: bool
) -> PagedPool:
    """Return the pool over the KV cache that `args` describe. Raises: MisuseError, LayoutError."""
    return pool_of(
        args,
        rank=place.rank,
        ranks=place.ranks,
        fingerprint=settings.fingerprint or model_fingerprint(server_args.model_path),
        device=device_of(get_device().device, args.gpu_id),
        segment=_segment(args, settings),
        is_mla=is_mla,
        stages=place.stages,
        window=MODEL.window_tokens,
        kv_heads=MODEL.kv_heads,
    )


def is_by_head(pool: PagedPool) -> bool:
    """Return True if the layout of the pool has a place for the bytes of each head."""
    return pool.layout.components[0].unit == SLOT


def rank_for_decode(place: Place, decode_ranks: int, pool: PagedPool) -> tuple[int, int]:
    """Return the number of a prefill's rank among those that together serve one rank of a decode
    with `decode_ranks` ranks, and how many these are. 0 means as many ranks as here.

    Raises: MisuseError for a number by which the ranks, or the heads, cannot be divided.
    """
    together, rest = divmod(place.ranks, decode_ranks or place.ranks)
    if rest or together < 1:
        raise MisuseError(
            f"{variable('decode_tp_size')} {decode_ranks}: not a divisor of --tp-size {place.ranks}"
        )
    if together > 1 and not is_by_head(pool):
        raise MisuseError(
            f"{variable('decode_tp_size')} {decode_ranks} with --tp-size {place.ranks}: {SIZES}"
        )
    return place.number % (together * place.stages), together * place.stages


def staging_for(
    pool: PagedPool, settings: Settings, place: Place, *, is_prefill: bool
) -> Staging | None:
    """Allocate the staging of the node over `pool`, or return None if it needs none. This blocks.

    Raises: LayoutError; MisuseError naming the variable.
    """
    if not is_prefill and place.ranks > 1 and is_staged(pool, settings.staging):
        _check_ranks_need_not_wait(pool, settings, place)
    return make_staging(
        pool,
        settings.staging,
        settings.staging_bytes,
        prefill_bytes(pool.layout) if is_prefill else 0,
        setting=variable("staging_bytes"),
        log=log,
    )


def _check_ranks_need_not_wait(pool: PagedPool, settings: Settings, place: Place) -> None:
    # Prefill computes a prompt once every rank has lent for it. Where requests wait for staging,
    # the ranks may lend to different ones, and then wait for each other.
    least = resized(pool.layout, pool.layout.counts).size_bytes
    if 0 < settings.staging_bytes < least:
        raise MisuseError(
            f"{variable('staging_bytes')} {settings.staging_bytes} at a decode with --tp-size "
            f"{place.ranks}: its ranks could wait for each other's staging; use 0, or at least "
            f"{least}, as much as the KV cache of a rank"
        )


def prefill_node(
    pool: PagedPool,
    staging: Staging | None,
    args: Any,
    settings: Settings,
    place: Place,
    model: str,
) -> PrefillThread:
    host = _host(settings)
    plane = open_plane(
        settings.transfer_backend,
        None,
        settings.rate_limit_bytes_per_s,
        host,
        _device(args, settings),
    )
    bind = partial(
        bind_router, key=read_key(settings.control_key_file), decodes=settings.max_decodes
    )
    rank, count = rank_for_decode(place, settings.decode_tp_size, pool)
    named: dict[str, Any] = {"model": model, "rank": rank, "world_size": count}
    return PrefillThread(pool, plane, bind=bind, **named, **_options(settings, staging, host))


def decode_node(
    pool: PagedPool, staging: Staging | None, args: Any, settings: Settings, place: Place
) -> DecodeThread:
    """Raises: MisuseError for the local data plane, if SGLang's pool is not in a segment and has no
    staging.
    """
    host, reached = _host(settings), pool if staging is None else staging.host
    if settings.transfer_backend == "local" and reached.segment is None:
        raise MisuseError(
            "KVFLOW_SGLANG_TRANSFER_BACKEND local: SGLang has allocated this kind of KV cache in "
            "private memory, so no prefill can write into it; use mooncake or nixl, or set "
            "KVFLOW_SGLANG_STAGING to always"
        )
    keeps_prefixes = getattr(get_disagg(), "disaggregation_decode_enable_radix_cache", False)
    if keeps_prefixes and any(space.window for space in pool.layout.spaces):
        log.warning(
            "--disaggregation-decode-enable-radix-cache: with a sliding window, SGLang 0.5.23 "
            "wrongly answers some prompts that begin as a cached one does, with its own backend too"
        )
    device = _device(args, settings)
    plane = open_plane(settings.transfer_backend, reached.segment, None, host, device)
    connect = partial(connect_dealer, key=read_key(settings.control_key_file))
    resolve = resolver(RegistryClient().resolve, place.rank, place.ranks)
    options = _options(settings, staging, host)
    return DecodeThread(pool, plane, resolve=resolve, connect=connect, **options)


def _options(settings: Settings, staging: Staging | None, host: str) -> dict[str, Any]:
    return {
        "loop_factory": uvloop.new_event_loop,
        "host": host,
        "timing": settings.timing,
        "bounds": settings.bounds,
        "verify_transfers": settings.verify_transfers,
        "staging": staging,
    }


def _host(settings: Settings) -> str:
    served = str(get_serving().host or "")
    if settings.host or served not in _WILDCARDS:
        return settings.host or served
    return str(get_local_ip_auto())


def _device(args: Any, settings: Settings) -> str:
    if settings.ib_device or settings.transfer_backend != "mooncake":
        return settings.ib_device
    return str(args.ib_device or "")


def _segment(args: Any, settings: Settings) -> SharedSegment | None:
    # Of a pool that is staged, peers write into the staging only.
    if settings.transfer_backend != "local" or settings.staging == ALWAYS:
        return None
    # SGLang has loaded torch by now; this module must not load it for the other planes.
    from kvflow.connectors.sglang.shared_pools import segment_with

    return segment_with(args.kv_data_ptrs[0])
