"""The halves of one worker process over one pool: prefill's, decode's, or both."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvflow.connectors.vllm.decode_worker import DecodeWorker
from kvflow.connectors.vllm.memory import model_fingerprint, pool_over
from kvflow.connectors.vllm.messages import StepMeta, StepNews
from kvflow.connectors.vllm.prefill_worker import PrefillWorker
from kvflow.connectors.vllm.settings import Settings
from kvflow.connectors.vllm.transfers import Transfers
from kvflow.memory.external import ExternalPages
from kvflow.memory.shared import SharedSegment
from kvflow.threads.decode import DecodeThread
from kvflow.threads.prefill import PrefillThread
from kvflow.transports.control.curve import read_key
from kvflow.transports.control.registry import RegistryClient
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.data.select import open_plane

log = logging.getLogger("vllm.kvflow")


class Workers:
    """What one worker has. Every method is called by vLLM's own thread."""

    def __init__(
        self, prefill: PrefillWorker | None, decode: DecodeWorker | None, stats: Transfers, wake: threading.Event
    ) -> None:
        self._prefill, self._decode, self._stats, self._wake = prefill, decode, stats, wake

    @classmethod
    def start(
        cls,
        vllm_config: Any,
        settings: Settings,
        caches: Mapping[str, torch.Tensor],
        *,
        block_size: int,
        bootstrap_port: int,
        segment: SharedSegment | None,
    ) -> Self:
        """`bootstrap_port`: of rank 0 of this engine. Raises: KvflowError."""
        config, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
        tensor, pipeline = get_tp_group(), get_pp_group()
        rank = pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group
        ranks = tensor.world_size * pipeline.world_size
        place = f"{next(iter(caches.values())).device.type} {cache.get_resolved_kv_cache_layout()}"
        pool = pool_over(
            caches,
            block_size,
            tag=f"{place} rank {rank} of {ranks}",
            fingerprint=settings.fingerprint or model_fingerprint(vllm_config.model_config, cache.cache_dtype),
            segment=segment,
        )
        pages, wake = ExternalPages(pool.layout.num_pages), threading.Event()
        stats = Transfers(pool.layout.page_bytes, f"{vllm_config.parallel_config.data_parallel_index}.{rank}")
        options: dict[str, Any] = {
            "pages": pages,
            "host": settings.host,
            "timing": settings.timing,
            "bounds": settings.bounds,
            "verify_transfers": settings.verify_transfers,
        }
        key = read_key(settings.control_key_file)
        prefill = decode = None
        if config.is_kv_producer:
            plane = open_plane(
                settings.transfer_backend, None, settings.rate_limit_bytes_per_s, settings.host, settings.ib_device
            )
            source = PrefillThread(
                pool,
                plane,
                registry_port=bootstrap_port + rank,
                api_key=settings.api_key,
                model=_model_name(vllm_config.model_config),
                bind=partial(bind_router, key=key),
                **options,
            )
            prefill = PrefillWorker(source, stats, wake.set, source_deadline_s=settings.source_deadline_s)
            prefill.start()
        if config.is_kv_consumer:
            plane = open_plane(settings.transfer_backend, segment, None, settings.host, settings.ib_device)
            target = DecodeThread(
                pool,
                plane,
                resolve=RegistryClient(settings.api_key).resolve,
                connect=partial(connect_dealer, key=key),
                **options,
            )
            decode = DecodeWorker(target, stats, wake.set, rank=rank, load_deadline_s=settings.load_deadline_s)
            decode.start()
        log.info("kvflow: %r, over %s, %s", pool, settings.transfer_backend, config.kv_role)
        return cls(prefill, decode, stats, wake)

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
        if self._prefill is not None:
            self._prefill.computed(meta)

    def finished(self, meta: StepMeta, wait_s: float) -> tuple[set[str], set[str], set[str]]:
        """Ids of requests that are sent, received, and of those received whose blocks never came. Waits up to `wait_s`
        for something to tell, where anything is under way."""
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
            self._stats.quarantine(self._decode.quarantined_blocks)
        return self._stats.take()

    def close(self) -> None:
        for side in (self._prefill, self._decode):
            if side is not None:
                side.close()


def _model_name(model_config: Any) -> str:
    served = model_config.served_model_name
    return str(served[0] if isinstance(served, list) else served or model_config.model)
