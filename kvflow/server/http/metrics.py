"""Prometheus metrics: kvflow's own names with base units, and on request the names that SGLang dashboards read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvflow.server.http.completion_service import Report
from kvflow.server.http.errors import Failure

F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of one process. Gauges are read from the role's report at each scrape."""

    def __init__(
        self, report: Callable[[], Report] | None = None, *, role: str = "router", sglang: bool = False
    ) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("kvflow_requests", "Requests answered.", ("route", "status"), registry=self.registry)
        self._seconds = Histogram(
            "kvflow_request_seconds",
            "Time from request to end of answer.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first = Histogram(
            "kvflow_time_to_first_token_seconds",
            "Time from request to first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._tokens = Counter("kvflow_generated_tokens", "Tokens sent to clients.", registry=self.registry)
        self._broken = Counter(
            "kvflow_streams_failed", "Streams that ended in an error event.", ("code",), registry=self.registry
        )
        self._gone = Counter(
            "kvflow_clients_gone", "Clients that disconnected before their answer.", registry=self.registry
        )
        self._retried = Counter(
            "kvflow_retries",
            "Requests tried once more, on another pair of workers, by why.",
            ("code",),
            registry=self.registry,
        )
        if report is not None:
            self.registry.register(_ReportCollector(report, role, sglang))

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def generated(self, tokens: int) -> None:
        self._tokens.inc(tokens)

    def stream_failed(self, failure: Failure) -> None:
        self._broken.labels(failure.code).inc()

    def retried(self, code: str) -> None:
        self._retried.labels(code).inc()

    def client_gone(self) -> None:
        self._gone.inc()

    def response(self) -> web.Response:
        """The exposition, text format 0.0.4."""
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=generate_latest(self.registry), headers=headers)


class _ReportCollector(Collector):
    def __init__(self, report: Callable[[], Report], role: str, sglang: bool) -> None:
        self._report = report
        self._role = role
        self._sglang = sglang

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        yield from _own(report)
        if self._sglang:
            yield from _familiar(report, self._role)


def _own(report: Report) -> Iterator[Metric]:
    pages = GaugeMetricFamily("kvflow_pages", "Pages of the KV pool by owner.", labels=["owner"])
    yield _labelled(pages, {"free": report.pages_free, **report.pages_by_kind})
    yield GaugeMetricFamily("kvflow_pool_pages", "Pages of the KV pool.", value=report.pages_total)
    yield GaugeMetricFamily(
        "kvflow_pool_bytes", "Bytes of the KV pool.", value=report.pages_total * report.pool.page_bytes
    )
    yield GaugeMetricFamily(
        "kvflow_quarantine_pages",
        "Pages in quarantine: lent, and no proof yet that their writer has ended.",
        value=report.quarantine_pages,
    )
    limit = "Pages in quarantine above which new requests are refused."
    yield GaugeMetricFamily("kvflow_quarantine_limit_pages", limit, value=report.quarantine_limit_pages)
    peers = GaugeMetricFamily("kvflow_peers", "Nodes of the other role by phase.", labels=["phase"])
    yield _labelled(peers, report.peers_by_phase)
    declared = "Prefills that an operator has declared dead."
    yield CounterMetricFamily("kvflow_peers_declared_dead", declared, value=report.peers_declared_dead)
    yield _labelled(GaugeMetricFamily("kvflow_rooms", "Open rooms by state.", labels=["state"]), report.rooms_by_state)
    ended = CounterMetricFamily("kvflow_rooms_ended", "Rooms that have ended, by how.", labels=["ending"])
    yield _labelled(ended, report.rooms_ended)
    yield CounterMetricFamily("kvflow_transfer_bytes", "KV bytes that have landed.", value=report.bytes_moved)
    differ = "Chunks whose checksum after landing differs from the one sent."
    yield CounterMetricFamily("kvflow_chunks_mismatched", differ, value=report.chunks_mismatched)
    dropped = CounterMetricFamily("kvflow_messages_dropped", "Control messages that changed nothing.", labels=["why"])
    yield _labelled(dropped, report.messages_dropped)
    errors = CounterMetricFamily(
        "kvflow_internal_errors", "Internal errors that the process survived.", labels=["where"]
    )
    yield _labelled(errors, report.internal_errors)
    yield GaugeMetricFamily("kvflow_running_requests", "Requests in the engine's batch.", value=report.running)
    yield GaugeMetricFamily("kvflow_waiting_requests", "Requests waiting for the engine.", value=report.waiting)


def _labelled(family: F, counts: Mapping[str, int]) -> F:
    """`family` with one sample per label."""
    for label, count in counts.items():
        family.add_metric([label], count)
    return family


_QUEUES = {
    "prefill": {"num_prefill_bootstrap_queue_reqs": "bootstrapping", "num_prefill_inflight_queue_reqs": "transferring"},
    "decode": {"num_decode_prealloc_queue_reqs": "bootstrapping", "num_decode_transfer_queue_reqs": "transferring"},
}
_BEFORE = ("bootstrapping", "expected", "announced", "bootstrapped")
_NEVER_MET = (":rendezvous", ":refused")  # how rooms end before their pages are offered


def _familiar(report: Report, role: str) -> Iterator[Metric]:
    for name, queue in _QUEUES.get(role, {}).items():
        early = queue == "bootstrapping"
        count = sum(n for state, n in report.rooms_by_state.items() if (state in _BEFORE) == early)
        yield GaugeMetricFamily(f"sglang:{name}", "See kvflow_rooms.", value=count)
    failed = {"bootstrap": 0, "transfer": 0}
    for ending, count in report.rooms_ended.items():
        if not ending.startswith("success"):
            failed["bootstrap" if ending.endswith(_NEVER_MET) else "transfer"] += count
    for stage, count in failed.items():
        yield CounterMetricFamily(f"sglang:num_{stage}_failed_reqs", "See kvflow_rooms_ended.", value=count)
    yield GaugeMetricFamily("sglang:kv_transfer_total_mb", "See kvflow_transfer_bytes.", value=report.bytes_moved / 1e6)
