"""The metric names that SGLang's dashboards read, with the labels and buckets they have there (SGLang 0.5).

Where a measure exists under a name of kvflow's own, see there for what it means. `cache_hit_rate` is the share of all
prompt tokens since the start; SGLang's is that of its last batch. `num_used_tokens` leaves out cached pages that no
request reads, as there. `num_retracted_reqs` are retracted now; SGLang's were in its last log interval. `mamba_usage`
is of state rows, which not every model has. Milliseconds, MB and GB are SGLang's units: the latter two are 2**20 and
2**30 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvflow.engine.scheduler.params import EngineRetractions
from kvflow.server.http.completion_service import Report
from kvflow.server.http.families import histograms
from kvflow.server.http.measures import CompletionMeasures
from kvflow.telemetry.histogram import QUEUE_SECONDS, Histogram

_SCHEDULER_LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
_LABELS = ("model_name", "engine_type")
_MS, _MB, _GB = 1e-3, 1 << 20, 1 << 30
_STEP_MS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_LATENCY_MS = (*_STEP_MS, 5000)
_SPEED_GB_S = (0.1, 0.5, 1, 5, 10, 25, 50, 100, 200, 400)
_SIZE_MB = (1, 5, 10, 50, 100, 500, 1000, 5000, 10000)
_FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_REQUEST_S = (*_FIRST_TOKEN_S, 600, 1200, 1800, 2400)
_INTER_TOKEN_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8),
    *(1, 2, 4, 6, 8),
)
_FIRST_LENGTH = 100
_BEFORE = ("bootstrapping", "expected", "announced", "bootstrapped")  # states of rooms that no page has moved in
_NONE = Histogram(())


def sglang_families(
    report: Report, completions: CompletionMeasures, role: str, model: str, now: float
) -> Iterator[Metric]:
    """`now` is by `time.perf_counter`."""
    yield from _scheduler(report, completions, role, model, now)
    yield from _transfers(report, role, (model, role, "0", "0", "0"))
    yield from _requests(completions, (model, role))


def _scheduler(report: Report, completions: CompletionMeasures, role: str, model: str, now: float) -> Iterator[Metric]:
    values = (model, role, "0", "0", "0")
    early = sum(count for state, count in report.rooms_by_state.items() if state in _BEFORE)
    late = sum(report.rooms_by_state.values()) - early
    cache = report.cache
    free = report.pages_free + (cache.evictable_pages if cache else 0)
    used = (report.pages_total - free) * report.pool.page_size
    most = report.pages_total * report.pool.page_size
    retraction = report.retraction or EngineRetractions()
    gauges = {
        "num_running_reqs": report.running,
        "num_queue_reqs": report.waiting,
        "gen_throughput": completions.throughput.per_second(now),
        "cache_hit_rate": cache.hit_tokens / cache.asked_tokens if cache and cache.asked_tokens else 0.0,
        "num_used_tokens": used,
        "token_usage": used / most if most else 0.0,
        "max_total_num_tokens": most,
        "num_prefill_bootstrap_queue_reqs": early if role == "prefill" else 0,
        "num_prefill_inflight_queue_reqs": late if role == "prefill" else 0,
        "num_decode_prealloc_queue_reqs": early if role == "decode" else 0,
        "num_decode_transfer_queue_reqs": late if role == "decode" else 0,
        "num_retracted_reqs": retraction.retracted_now,
        "new_token_ratio": retraction.new_token_ratio,
    }
    if report.rows_total:
        gauges["mamba_usage"] = 1 - report.rows_free / report.rows_total
    for name, value in gauges.items():
        family = GaugeMetricFamily(f"sglang:{name}", "As in SGLang.", labels=_SCHEDULER_LABELS)
        family.add_metric(values, value)
        yield family
    for where in ("bootstrap", "transfer"):
        failed = sum(count for (phase, _), count in report.rooms_failed.items() if phase == where)
        counter = CounterMetricFamily(
            f"sglang:num_{where}_failed_reqs", "See kvflow_rooms_failed.", labels=_SCHEDULER_LABELS
        )
        counter.add_metric(values, failed)
        yield counter
    counter = CounterMetricFamily("sglang:num_retracted_requests", "See kvflow_retracts.", labels=_SCHEDULER_LABELS)
    counter.add_metric(values, retraction.retracts)
    yield counter
    queue = {values: report.queue_seconds or Histogram(QUEUE_SECONDS)}
    yield histograms(
        "sglang:queue_time_seconds", "See kvflow_queue_seconds.", queue, _SCHEDULER_LABELS, bounds=QUEUE_SECONDS
    )


def _transfers(report: Report, role: str, values: tuple[str, ...]) -> Iterator[Metric]:
    """As in SGLang the sender measures a transfer: decode has the names, and no samples. A prefill waits for pages to
    compute in, decode for pages to offer."""
    measures = report.transfers
    if measures is None:
        return
    sent = role == "prefill"
    alloc = report.queue_seconds if sent and report.queue_seconds is not None else measures.allocation_seconds
    for name, histogram, unit, bounds, filled in (
        ("latency_ms", measures.transfer_seconds, _MS, _LATENCY_MS, sent),
        ("speed_gb_s", measures.transfer_bytes_per_second, _GB, _SPEED_GB_S, sent),
        ("total_mb", measures.transfer_bytes, _MB, _SIZE_MB, sent),
        ("bootstrap_ms", measures.bootstrap_seconds, _MS, _STEP_MS, True),
        ("alloc_ms", alloc, _MS, _STEP_MS, True),
    ):
        shown = histogram if filled else Histogram(histogram.bounds)
        text = "See kvflow_transfer_* and kvflow_*_seconds."
        yield histograms(
            f"sglang:kv_transfer_{name}", text, {values: shown}, _SCHEDULER_LABELS, bounds=bounds, unit=unit
        )


def _requests(found: CompletionMeasures, values: tuple[str, ...]) -> Iterator[Metric]:
    streamed = (*_LABELS, "is_streaming")
    by_stream = {stream: (*values, "true" if stream else "false") for stream in (False, True)}
    lengths = [bound for bound in found.prompt_tokens.bounds if bound >= _FIRST_LENGTH]
    for name, latency, seconds in (
        ("time_to_first_token", found.first_token_seconds, _FIRST_TOKEN_S),
        ("e2e_request_latency", found.request_seconds, _REQUEST_S),
    ):
        named = {by_stream[stream]: histogram for stream, histogram in latency.items()}
        yield histograms(f"sglang:{name}_seconds", "As in SGLang.", named, streamed, bounds=seconds)
    for name, histogram, bounds in (
        ("inter_token_latency_seconds", found.inter_token_seconds, _INTER_TOKEN_S),
        ("prompt_tokens_histogram", found.prompt_tokens, lengths),
        ("generation_tokens_histogram", found.generated_tokens, lengths),
    ):
        yield histograms(f"sglang:{name}", "As in SGLang.", {values: histogram}, _LABELS, bounds=bounds)
    for name, counts in (
        ("prompt_tokens", found.prompt_tokens_total),
        ("generation_tokens", found.tokens_sent),
        ("num_requests", {stream: found.outcomes["finished", stream] for stream in (False, True)}),
    ):
        counter = CounterMetricFamily(f"sglang:{name}", "As in SGLang.", labels=streamed)
        for stream, labels in by_stream.items():
            counter.add_metric(labels, counts[stream])
        yield counter
    aborted = CounterMetricFamily("sglang:num_aborted_requests", "As in SGLang.", labels=_LABELS)
    aborted.add_metric(values, sum(found.outcomes["aborted", stream] for stream in (False, True)))
    yield aborted
