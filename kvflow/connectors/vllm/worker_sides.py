"""The sides of one worker process over one pool: prefill, decode, or both."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvflow.connectors.staging import close_staging, make_staging
from kvflow.connectors.vllm.decode_worker import DecodeWorker
from kvflow.connectors.vllm.groups import Groups
from kvflow.connectors.vllm.memory import (
    Caches,
    Share,
    caches_of,
    model_fingerprint,
    pool_over,
    staging_bytes,
)
from kvflow.connectors.vllm.messages import StepMeta, StepNews
from kvflow.connectors.vllm.prefill_worker import PrefillWorker
from kvflow.connectors.vllm.prefill_workers import PrefillWorkers
from kvflow.connectors.vllm.self_test import check_moves
from kvflow.connectors.vllm.settings import FIELD, Settings
from kvflow.connectors.vllm.status import StatusServer
from kvflow.connectors.vllm.transfers import Transfers
from kvflow.connectors.vllm.widths import Heads, Place, Served, served_by
from kvflow.memory.external import ExternalPages
from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.memory.staging import Staging, prefill_bytes
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

    def __init__(self, vllm_config: Any, place: Place) -> None:
        """Use `start` instead."""
        engine = vllm_config.parallel_config.data_parallel_index
        self._transfers, self._wake = Transfers(f"{engine}.{place.rank}"), threading.Event()
        self._prefill: PrefillWorkers | None = None
        self._decode: DecodeWorker | None = None
        self._statuses: list[StatusServer] = []
        self._stagings: list[Staging] = []

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
        config, place = vllm_config.kv_transfer_config, _place()
        caches = caches_of(kv_caches, groups, num_blocks)
        make_pool = partial(_pool, vllm_config, settings, place, caches, groups, segment)
        served = served_by(place, settings.decode_workers if config.is_kv_producer else None)
        pools = [make_pool(served, number) for number in range(served.serves)]
        # A pool with some of the heads does not move whole blocks.
        tested = pools[0] if len(pools) == 1 else make_pool(Served(place.ranks, place.rank), 0)
        for space, tensors in enumerate(caches):
            check_moves(tensors, tested, num_blocks, space)
        sides = cls(vllm_config, place)
        try:
            if config.is_kv_producer:
                sides._start_prefill(pools, settings, _names(vllm_config.model_config, served))
            if config.is_kv_consumer:
                tokens = vllm_config.model_config.max_model_len
                sides._start_decode(pools[0], settings, place, tokens)
            try:
                sides._serve(vllm_config, settings, place, served, bootstrap_port)
            except MisuseError as error:
                name = "bootstrap_port" if config.is_kv_producer else "status_port"
                where = f"kv_connector_extra_config: {name} of worker {place.rank}"
                raise MisuseError(f"{where}: {error}") from None
        except BaseException:
            sides.close()
            raise
        for pool in pools:
            log.info("kvflow: %r, over %s, %s", pool, settings.transfer_backend, config.kv_role)
        return sides

    def _start_prefill(
        self, pools: Sequence[PagedPool], settings: Settings, names: Mapping[str, Any]
    ) -> None:
        staged = [self._staging(pool, settings, prefill_bytes(pool.layout)) for pool in pools]
        sides = [
            PrefillWorker(
                _prefill_thread(pool, settings, {**_options(settings, pool, staging), **names}),
                self._transfers,
                self._wake.set,
                source_deadline_s=settings.source_deadline_s,
            )
            for pool, staging in zip(pools, staged, strict=True)
        ]
        self._prefill = PrefillWorkers(sides)
        self._prefill.start()

    def _start_decode(
        self, pool: PagedPool, settings: Settings, place: Place, max_tokens: int
    ) -> None:
        staging = self._staging(pool, settings, staging_bytes(pool.layout, max_tokens))
        # Both roles of one worker share a count of the uses of its blocks.
        pages = None if self._prefill is None else self._prefill.sides[0].thread.pages
        self._decode = DecodeWorker(
            _decode_thread(pool, settings, _options(settings, pool, staging, pages)),
            self._transfers,
            self._wake.set,
            rank=place.rank,
            load_deadline_s=settings.load_deadline_s,
        )
        self._decode.start()

    def _staging(self, pool: PagedPool, settings: Settings, default_bytes: int) -> Staging | None:
        found = make_staging(
            pool,
            settings.staging,
            settings.staging_bytes,
            default_bytes,
            setting=f"{FIELD}: staging_bytes",
            log=log,
        )
        if found is not None:
            self._stagings.append(found)
        return found

    def _serve(
        self, vllm_config: Any, settings: Settings, place: Place, served: Served, port: int
    ) -> None:
        """Start the status servers: one for each node of prefill, or one for decode's. `port` is
        prefill's registry port of worker 0. Raises: MisuseError if a port cannot be bound.
        """
        nodes = [None] if self._prefill is None else [side.thread for side in self._prefill.sides]
        for number, node in enumerate(nodes):
            status = StatusServer(
                node,
                None if self._decode is None or number else self._decode.thread,
                engine=vllm_config.kv_transfer_config.engine_id,
                dp_rank=vllm_config.parallel_config.data_parallel_index,
            )
            self._statuses.append(status)
            own = settings.status_port and settings.status_port + place.rank
            if node is not None:
                own = port + served.port_offset(number)
            if own:
                status.start(settings.host, own, settings.api_key)
                if not served.is_leader:
                    leader = registry_address(settings.host, port + served.first)
                    status.join(leader, settings.api_key)

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
        if not self._prefill.on_host:
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
        """Close everything, even if a part raises an error. Idempotent."""
        with ExitStack() as closing:
            # It closes the parts in reverse order.
            closing.callback(self._close_nodes)
            for status in self._statuses:
                closing.callback(status.close)

    def _close_nodes(self) -> None:
        sides = [side for side in (self._decode, self._prefill) if side is not None]
        unproven = len(sides)

        def close(side: DecodeWorker | PrefillWorkers) -> None:
            nonlocal unproven
            if not side.close():
                unproven -= 1

        with ExitStack() as closing:
            closing.callback(lambda: self._close_stagings(is_proven=not unproven))
            for side in sides:
                closing.callback(close, side)

    def _close_stagings(self, *, is_proven: bool) -> None:
        while self._stagings:
            close_staging(self._stagings.pop(), is_proven=is_proven)


def _names(model_config: Any, served: Served) -> dict[str, Any]:
    names = model_config.served_model_name
    model = names[0] if isinstance(names, list) else names or model_config.model
    named: dict[str, Any] = {"model": str(model)}
    if served.size > 1:
        named |= {"rank": served.rank, "world_size": served.size}
    return named


def _place() -> Place:
    tensor, pipeline = get_tp_group(), get_pp_group()
    return Place(
        tensor.rank_in_group, tensor.world_size, pipeline.rank_in_group, pipeline.world_size
    )


def _pool(
    vllm_config: Any,
    settings: Settings,
    place: Place,
    caches: Sequence[Caches],
    groups: Groups,
    segment: SharedSegment | None,
    served: Served,
    number: int,
) -> PagedPool:
    """Return the pool for worker `number` of those of decode that this worker serves."""
    cache = vllm_config.cache_config
    device = next(iter(caches[0].values())).device.type
    return pool_over(
        caches,
        groups,
        layout=f"{device} {cache.get_resolved_kv_cache_layout().name}",
        share=_share(vllm_config.model_config, place, served, number),
        fingerprint=settings.fingerprint
        or model_fingerprint(vllm_config.model_config, cache.cache_dtype),
        segment=segment,
    )


def _share(model_config: Any, place: Place, served: Served, number: int) -> Share | None:
    is_alike = served.workers == place.ranks
    if is_alike and place.ranks == 1:
        return None
    total = 0 if model_config.use_mla else model_config.get_total_num_kv_heads()
    held = Heads(total, place.shard, place.shards)
    return Share(
        held,
        held.divided(served.serves, number),
        served.size // place.stages or 1,
        f"worker {place.rank} of {place.ranks}" if is_alike else "",
    )


def _options(
    settings: Settings,
    pool: PagedPool,
    staging: Staging | None,
    pages: ExternalPages | None = None,
) -> dict[str, Any]:
    return {
        "pages": pages or ExternalPages(pool.layout.num_places),
        "host": settings.host,
        "timing": settings.timing,
        "bounds": settings.bounds,
        "verify_transfers": settings.verify_transfers,
        "staging": staging,
    }


def _prefill_thread(pool: PagedPool, settings: Settings, options: dict[str, Any]) -> PrefillThread:
    rate, device = settings.rate_limit_bytes_per_s, settings.ib_device
    plane = open_plane(settings.transfer_backend, None, rate, settings.host, device)
    key = read_key(settings.control_key_file)
    bind = partial(bind_router, key=key, decodes=settings.max_decodes)
    return PrefillThread(pool, plane, bind=bind, **options)


def _decode_thread(pool: PagedPool, settings: Settings, options: dict[str, Any]) -> DecodeThread:
    staging: Staging | None = options["staging"]
    segment = (pool if staging is None else staging.host).segment
    plane = open_plane(settings.transfer_backend, segment, None, settings.host, settings.ib_device)
    connect = partial(connect_dealer, key=read_key(settings.control_key_file))
    return DecodeThread(
        pool, plane, resolve=RegistryClient(settings.api_key).resolve, connect=connect, **options
    )
