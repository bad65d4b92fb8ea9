"""The sides of one worker process over one pool: prefill, decode, or both."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvflow.connectors.vllm.decode_worker import DecodeWorker
from kvflow.connectors.vllm.groups import Groups
from kvflow.connectors.vllm.memory import (
    Caches,
    Heads,
    caches_of,
    model_fingerprint,
    pool_over,
)
from kvflow.connectors.vllm.messages import StepMeta, StepNews
from kvflow.connectors.vllm.prefill_worker import PrefillWorker
from kvflow.connectors.vllm.self_test import check_moves
from kvflow.connectors.vllm.settings import Settings
from kvflow.connectors.vllm.status import StatusServer
from kvflow.connectors.vllm.transfers import Transfers
from kvflow.memory.external import ExternalPages
from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.node.threads.decode import DecodeThread
from kvflow.node.threads.prefill import PrefillThread
from kvflow.protocols.errors import MisuseError
from kvflow.transports.control.curve import read_key
from kvflow.transports.control.registry import RegistryClient, registry_address
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.data.select import open_plane

log = logging.getLogger("vllm.kvflow")


class WorkerSides:
    """The sides of one worker. Only vLLM's thread calls the methods."""

    def __init__(
        self,
        prefill: PrefillWorker | None,
        decode: DecodeWorker | None,
        status: StatusServer,
        transfers: Transfers,
        wake: threading.Event,
    ) -> None:
        self._prefill, self._decode, self._status = prefill, decode, status
        self._transfers, self._wake = transfers, wake

    @classmethod
    def start(
        cls,
        vllm_config: Any,
        settings: Settings,
        kv_caches: Mapping[str, Any],
        groups: Groups,
        *,
        num_blocks: int,
        bootstrap_port: int,
        segment: SharedSegment | None,
    ) -> Self:
        """Make the pool over vLLM's cache, and start the worker's sides and its status server.

        `bootstrap_port` is the registry port of this engine's rank 0. Raises: KvflowError.
        """
        config, place = vllm_config.kv_transfer_config, _place(vllm_config, settings)
        caches = caches_of(kv_caches, groups, num_blocks)
        pool = _pool(vllm_config, settings, place, caches, groups, segment)
        for space, tensors in enumerate(caches):
            check_moves(tensors, pool, num_blocks, space)
        wake = threading.Event()
        engine = vllm_config.parallel_config.data_parallel_index
        transfers = Transfers(f"{engine}.{place.rank}")
        options = _options(settings, ExternalPages(pool.layout.num_places))
        prefill = decode = None
        if config.is_kv_producer:
            named = options | _names(vllm_config.model_config, place)
            prefill = PrefillWorker(
                _prefill_thread(pool, settings, named),
                transfers,
                wake.set,
                source_deadline_s=settings.source_deadline_s,
            )
            prefill.start()
        if config.is_kv_consumer:
            decode = DecodeWorker(
                _decode_thread(pool, settings, segment, options),
                transfers,
                wake.set,
                rank=place.rank,
                load_deadline_s=settings.load_deadline_s,
            )
            decode.start()
        status = StatusServer(
            None if prefill is None else prefill.thread,
            None if decode is None else decode.thread,
            engine=config.engine_id,
            dp_rank=engine,
        )
        sides = cls(prefill, decode, status, transfers, wake)
        name = "status_port" if prefill is None else "bootstrap_port"
        try:
            if port := settings.status_port if prefill is None else bootstrap_port:
                status.start(settings.host, port + place.rank, settings.api_key)
                if place.rank and place.is_joined:
                    status.join(registry_address(settings.host, port), settings.api_key)
        except MisuseError as error:
            sides.close()
            where = f"kv_connector_extra_config: {name} of worker {place.rank}"
            raise MisuseError(f"{where}: {error}") from None
        log.info("kvflow: %r, over %s, %s", pool, settings.transfer_backend, config.kv_role)
        return sides

    def begin(self, meta: StepMeta) -> None:
        self._wake.clear()
        if self._prefill is not None:
            self._prefill.begin(meta)
        if self._decode is not None:
            self._decode.begin(meta)

    def preempt(self, meta: StepMeta) -> None:
        if self._prefill is not None:
            self._prefill.preempt(meta)

    def computed(self, meta: StepMeta) -> None:
        if self._prefill is None or not meta.computed:
            return
        # The device may still be writing the step's blocks, and a data plane does not wait for it.
        if not self._prefill.thread.pool.on_host:
            torch.accelerator.synchronize()
        self._prefill.computed(meta)

    def finished(self, meta: StepMeta, wait_s: float) -> tuple[set[str], set[str], set[str]]:
        """Return three sets of request ids: sent, received, and failed to load.

        Failed requests are also in the second set. While a transfer runs, and `meta` opens or
        offers nothing, the call first waits up to `wait_s` for news.
        """
        if wait_s and self._is_busy and not (meta.sources or meta.targets or meta.offers):
            self._wake.wait(wait_s)
        sent = set() if self._prefill is None else self._prefill.finished(meta)
        received, failed = (set(), set()) if self._decode is None else self._decode.finished()
        return sent, received, failed

    @property
    def _is_busy(self) -> bool:
        return any(side is not None and side.is_busy for side in (self._prefill, self._decode))

    def take_news(self) -> StepNews | None:
        return None if self._decode is None else self._decode.take_news()

    def take_stats(self) -> dict[str, Any] | None:
        if self._decode is not None:
            self._transfers.quarantine(self._decode.quarantined_blocks)
        return self._transfers.take()

    def close(self) -> None:
        self._status.close()
        for side in (self._prefill, self._decode):
            if side is not None:
                side.close()


def _names(model_config: Any, place: _Place) -> dict[str, Any]:
    served = model_config.served_model_name
    model = served[0] if isinstance(served, list) else served or model_config.model
    named: dict[str, Any] = {"model": str(model)}
    if place.is_joined:
        named |= {"rank": place.rank, "world_size": place.ranks}
    return named


class _Place(NamedTuple):
    """The position of this worker in its engine: number `rank` of `ranks`.

    `is_joined` is True at a prefill that has several workers if each of its decodes has only one.
    That worker then holds the parts of all of prefill's workers.
    """

    rank: int
    ranks: int
    is_joined: bool


def _place(vllm_config: Any, settings: Settings) -> _Place:
    tensor, pipeline = get_tp_group(), get_pp_group()
    rank = pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group
    ranks = tensor.world_size * pipeline.world_size
    is_producer = vllm_config.kv_transfer_config.is_kv_producer
    return _Place(rank, ranks, is_producer and settings.decode_workers == 1 and ranks > 1)


def _pool(
    vllm_config: Any,
    settings: Settings,
    place: _Place,
    caches: Sequence[Caches],
    groups: Groups,
    segment: SharedSegment | None,
) -> PagedPool:
    cache = vllm_config.cache_config
    layout = (
        f"{next(iter(caches[0].values())).device.type} {cache.get_resolved_kv_cache_layout().name}"
    )
    # Only the worker with the same number on the other side has the same part.
    if place.ranks > 1 and not place.is_joined:
        layout += f", worker {place.rank} of {place.ranks}"
    return pool_over(
        caches,
        groups,
        layout=layout,
        heads=_heads(vllm_config.model_config) if place.is_joined else None,
        fingerprint=settings.fingerprint
        or model_fingerprint(vllm_config.model_config, cache.cache_dtype),
        segment=segment,
    )


def _heads(model_config: Any) -> Heads:
    total = 0 if model_config.use_mla else model_config.get_total_num_kv_heads()
    return Heads(total, get_tp_group().rank_in_group, get_tp_group().world_size)


def _options(settings: Settings, pages: ExternalPages) -> dict[str, Any]:
    return {
        "pages": pages,
        "host": settings.host,
        "timing": settings.timing,
        "bounds": settings.bounds,
        "verify_transfers": settings.verify_transfers,
    }


def _prefill_thread(pool: PagedPool, settings: Settings, options: dict[str, Any]) -> PrefillThread:
    rate, device = settings.rate_limit_bytes_per_s, settings.ib_device
    plane = open_plane(settings.transfer_backend, None, rate, settings.host, device)
    return PrefillThread(
        pool, plane, bind=partial(bind_router, key=read_key(settings.control_key_file)), **options
    )


def _decode_thread(
    pool: PagedPool, settings: Settings, segment: SharedSegment | None, options: dict[str, Any]
) -> DecodeThread:
    plane = open_plane(settings.transfer_backend, segment, None, settings.host, settings.ib_device)
    connect = partial(connect_dealer, key=read_key(settings.control_key_file))
    return DecodeThread(
        pool, plane, resolve=RegistryClient(settings.api_key).resolve, connect=connect, **options
    )
