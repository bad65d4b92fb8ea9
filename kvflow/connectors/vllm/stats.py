"""The workers' transfers in vLLM's logs and its /metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvflow.connectors.vllm.transfers import LISTS, WAYS, no_transfers

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class KvflowStats(KVConnectorStats):  # type: ignore[misc]
    """Transfers since the last report, in the form that `transfers.Transfers.take` returns."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or no_transfers()

    def reset(self) -> None:
        self.data = no_transfers()

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in LISTS:
            self.data[name] += other.data[name]
        for code, count in other.data["failed"].items():
            self.data["failed"][code] = self.data["failed"].get(code, 0) + count
        # The number of blocks in quarantine is a gauge: the latest value replaces the earlier one.
        self.data["quarantine"].update(other.data["quarantine"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values for vLLM's periodic log line."""
        shown: dict[str, int | float] = {}
        for way in WAYS:
            seconds, size = self.data[f"{way}_seconds"], self.data[f"{way}_bytes"]
            if seconds:
                shown[f"prompts {way}"] = len(seconds)
                shown[f"MB {way}"] = round(sum(size) / 1e6, 3)
                shown[f"mean ms until {way}"] = round(1e3 * sum(seconds) / len(seconds), 3)
        for code, count in sorted(self.data["failed"].items()):
            shown[f"failed: {code}"] = count
        if self.data["quarantine"]:
            shown["blocks that wait for proof"] = sum(self.data["quarantine"].values())
        return shown


class KvflowPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Exports the transfers at vLLM's /metrics, as `vllm:kvflow_*`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._seconds, self._bytes = {}, {}
        for way in WAYS:
            until = f"Time from the opening of a prompt's room until all of it was {way}."
            seconds = self._histogram_cls(
                name=f"vllm:kvflow_{way}_seconds",
                documentation=until,
                buckets=_SECONDS,
                labelnames=labelnames,
            )
            size = self._counter_cls(
                name=f"vllm:kvflow_{way}_bytes",
                documentation=f"KV cache {way}.",
                labelnames=labelnames,
            )
            self._seconds[way] = create_metric_per_engine(seconds, self.per_engine_labelvalues)
            self._bytes[way] = create_metric_per_engine(size, self.per_engine_labelvalues)
        self._failed_family = self._counter_cls(
            name="vllm:kvflow_failed_prompts",
            documentation="Prompts whose blocks were not moved, by why.",
            labelnames=[*labelnames, "code"],
        )
        self._quarantine_family = self._gauge_cls(
            name="vllm:kvflow_quarantined_blocks",
            documentation=(
                "Blocks out of use until it is proven that nothing writes into them, by worker."
            ),
            labelnames=[*labelnames, "worker"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for way in WAYS:
            for seconds in transfer_stats_data[f"{way}_seconds"]:
                self._seconds[way][engine_idx].observe(seconds)
            self._bytes[way][engine_idx].inc(sum(transfer_stats_data[f"{way}_bytes"]))
        labels = self.per_engine_labelvalues[engine_idx]
        for code, count in transfer_stats_data["failed"].items():
            self._failed_family.labels(*labels, code).inc(count)
        for worker, blocks in transfer_stats_data["quarantine"].items():
            self._quarantine_family.labels(*labels, worker).set(blocks)
