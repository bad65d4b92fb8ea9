"""`KvflowConnector` implements vLLM's interface, and forwards each call to the side and role that
handle it.

vLLM makes one instance in the scheduler's process and one in each worker's process. The instances
communicate through vLLM only: a `StepMeta` goes to the workers with every step, and a `StepNews`
comes back with the step's output.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvflow.connectors.staging import AUTO
from kvflow.connectors.vllm.decode_scheduler import DecodeScheduler
from kvflow.connectors.vllm.memory import shared_allocation
from kvflow.connectors.vllm.messages import StepMeta, StepNews
from kvflow.connectors.vllm.params import FromPrefill, ToDecode, prefill_answer, read_params
from kvflow.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvflow.connectors.vllm.read_groups import read_groups
from kvflow.connectors.vllm.settings import Settings, check_engine
from kvflow.connectors.vllm.stats import KvflowPromMetrics, KvflowStats
from kvflow.connectors.vllm.widths import Place, served_by
from kvflow.connectors.vllm.worker_sides import WorkerSides
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import MisuseError

log = logging.getLogger("vllm.kvflow")
KVConnectorMetadata.register(StepMeta)
KVConnectorWorkerMetadata.register(StepNews)
# The longest wait for news in a step that runs no model. Without it, vLLM would run such steps
# without a pause.
_IDLE_WAIT_S = 0.005


class KvflowConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector for prefill, decode, or both, depending on vLLM's `kv_role`."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the settings, and make the scheduler side in the scheduler's process.

        The worker side starts when vLLM registers the KV cache.

        Raises: MisuseError for invalid settings, for a vLLM that cannot continue from a cached
        prefix, and for a KV cache that kvflow does not move.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config)
        self._groups = read_groups(kv_cache_config, vllm_config)
        self._num_blocks = kv_cache_config.num_blocks
        parallel = vllm_config.parallel_config
        self._ranks: int = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._decode_workers = self._ranks
        self._prefill: PrefillScheduler | None = None
        self._decode: DecodeScheduler | None = None
        self._worker: WorkerSides | None = None
        self._segments: list[SharedSegment] = []
        config = self._kv_transfer_config
        if config.is_kv_producer:
            place = Place(
                shards=parallel.tensor_parallel_size, stages=parallel.pipeline_parallel_size
            )
            self._decode_workers = served_by(place, self._settings.decode_workers).workers
            if config.is_kv_consumer and self._decode_workers != self._ranks:
                raise MisuseError(
                    f"kv_connector_extra_config: decode_workers {self._decode_workers}: an engine "
                    f"with both roles has {self._ranks} in each"
                )
        if role is KVConnectorRole.SCHEDULER:
            self._make_schedulers(parallel)

    def _make_schedulers(self, parallel: Any) -> None:
        if self._kv_transfer_config.is_kv_producer:
            answer = prefill_answer(
                self._settings.host,
                self._bootstrap_port,
                engine=self._kv_transfer_config.engine_id,
                workers=self._decode_workers,
                tensor_parallel=parallel.tensor_parallel_size,
            )
            self._prefill = PrefillScheduler(self._groups, answer)
        if self._kv_transfer_config.is_kv_consumer:
            self._decode = DecodeScheduler(
                self._groups,
                self._ranks,
                recompute_below=self._settings.recompute_below_tokens,
            )

    @property
    def _bootstrap_port(self) -> int:
        return self._settings.port_of_engine(
            self._vllm_config.parallel_config.data_parallel_index,
            max(self._ranks, self._decode_workers),
        )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False: in sleep mode, vLLM takes the memory away that a transfer may still use.

        vLLM asks from 0.33 on. In 0.32, `check_engine` refuses the mode.
        """
        return False

    # --- in the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._groups.null_block = kv_cache_manager.block_pool.null_block.block_id
        if self._prefill is not None:
            self._prefill.block_ids_of = kv_cache_manager.get_block_ids
            # vLLM keeps one block as a placeholder and never hands it out.
            self._prefill.num_blocks = kv_cache_manager.block_pool.num_gpu_blocks - 1
        if self._decode is not None:
            self._decode.block_pool = kv_cache_manager.block_pool

    def on_new_request(self, request: Any) -> None:
        try:
            asked = read_params(request.kv_transfer_params)
        # The API server has already refused this request, unless plugins are off there.
        except MisuseError as error:
            # vLLM also passes on requests that it refused. It marks them and never serves them.
            if not request.abort_immediately:
                log.error("request %s is served without a transfer: %s", request.request_id, error)
            return
        if isinstance(asked, ToDecode) and self._prefill is not None:
            self._prefill.new_request(request, asked)
        elif isinstance(asked, FromPrefill) and self._decode is not None:
            self._decode.new_request(request, asked)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # None makes vLLM ask again in its next step; the request then waits without blocks.
        if self._prefill is not None and not self._prefill.may_begin(request):
            return None, False
        count = (
            0 if self._decode is None else self._decode.tokens_to_load(request, num_computed_tokens)
        )
        return count, bool(count)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        # vLLM must not clear the blocks of any group while prefill writes into them.
        return tuple(range(len(self._groups.groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._prefill is not None:
            self._prefill.allocated(request)
        if self._decode is not None:
            self._decode.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        meta = StepMeta(idle=not scheduler_output.total_num_scheduled_tokens)
        if self._prefill is not None:
            self._prefill.build_meta(meta, scheduler_output)
        if self._decode is not None:
            self._decode.build_meta(meta)
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        if self._prefill is not None:
            self._prefill.sent(connector_output.finished_sending or set())
        if self._decode is not None:
            news = connector_output.kv_connector_worker_meta or StepNews()
            self._decode.update(news, connector_output.finished_recving or set())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._decode is not None:
            self._decode.finished(request)
        return (
            (False, None) if self._prefill is None else self._prefill.finished(request, block_ids)
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """Return True while blocks wait for proof, so that vLLM runs the step that brings it."""
        return self._decode is not None and self._decode.quarantined_blocks > 0

    # --- in a worker

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        is_target = self._kv_transfer_config.is_kv_consumer
        # Over the "local" plane, prefill's process writes straight into decode's cache, unless that
        # is staged.
        is_local = self._settings.transfer_backend == "local"
        if is_local and is_target and self._settings.staging == AUTO:
            return shared_allocation(self._segments)
        return None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker = WorkerSides.start(
            self._vllm_config,
            self._settings,
            kv_caches,
            self._groups,
            num_blocks=self._num_blocks,
            bootstrap_port=self._bootstrap_port,
            segment=self._segments[0] if self._segments else None,
        )

    def handle_preemptions(self, kv_connector_metadata: StepMeta) -> None:
        if self._worker is not None:
            self._worker.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: StepMeta) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.computed(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        meta = self._get_connector_metadata()
        sent, received, failed = self._worker.finished(meta, _IDLE_WAIT_S if meta.idle else 0.0)
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> StepNews | None:
        return None if self._worker is None else self._worker.take_news()

    def get_kv_connector_stats(self) -> KvflowStats | None:
        data = None if self._worker is None else self._worker.take_stats()
        return None if data is None else KvflowStats(data)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    # --- metrics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvflowStats:
        return KvflowStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvflowPromMetrics:
        return KvflowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
