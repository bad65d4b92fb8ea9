"""Metrics with the names, labels and buckets that dashboards of SGLang 0.5 read.

Ranks other than the first have only the figures that they send to it: those of their pools, rooms
and caches. HiCache's durations and bandwidths are not measured.

A help text such as "See kvflow_retracts." names kvflow's own metric for the same measure.
`cache_hit_rate` is the cached share of all prompt tokens since the start. SGLang's is the share in
its last batch. `num_used_tokens` excludes cached pages that no request reads, as in SGLang.
`num_retracted_reqs` counts the requests that are retracted now. SGLang's counts those in its last
log interval. `mamba_usage` is about state rows, which not every model has. A MB is 2**20 bytes, and
a GB is 2**30 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvflow.http.families import histograms
from kvflow.serve.cache.prefix import CacheStats
from kvflow.serve.engine.scheduler.params import EngineRetractions
from kvflow.serve.http.completion_service import Report
from kvflow.serve.http.measures import INTER_TOKEN_SECONDS, TOKEN_COUNTS, CompletionMeasures
from kvflow.telemetry.histogram import QUEUE_SECONDS, Histogram

_SCHEDULER_LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
_CACHE_LABELS = ("cache_type", "tp_rank", "pp_rank")
_STORAGE_LABELS = ("storage_backend", "tp_rank", "dp_rank", "pp_rank", "pp_size")
_CACHE_TYPE = "PrefixCache"  # SGLang reports the name of its cache class
_LABELS = ("model_name", "engine_type")
_MS, _MB, _GB = 1e-3, 1 << 20, 1 << 30
_STEP_MS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_LATENCY_MS = (*_STEP_MS, 5000)
_SPEED_GB_S = (0.1, 0.5, 1, 5, 10, 25, 50, 100, 200, 400)
_SIZE_MB = (1, 5, 10, 50, 100, 500, 1000, 5000, 10000)
_FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_REQUEST_S = (*_FIRST_TOKEN_S, 600, 1200, 1800, 2400)
_FIRST_INTER_TOKEN_S = 0.002
_FIRST_LENGTH = 100
# Room states before the first page moves.
_BEFORE = ("bootstrapping", "expected", "announced", "bootstrapped")
_NONE = Histogram(())


def sglang_families(
    report: Report, completions: CompletionMeasures, role: str, model: str, now: float
) -> Iterator[Metric]:
    """Yield all metrics under SGLang's names. `now` is a reading of `time.perf_counter`."""
    yield from _scheduler(report, completions, role, model, now)
    yield from _transfers(report, role, (model, role, "0", "0", "0"))
    yield from _requests(completions, (model, role))


class _Rank(NamedTuple):
    tp_rank: str
    pp_rank: str
    pages_free: int
    pages_total: int
    # Number of rooms by state. None for a rank that has no rooms of its own.
    rooms: Mapping[str, int] | None
    cache: CacheStats | None


def _ranks(report: Report, role: str) -> list[_Rank]:
    """Return the figures of the ranks that are up. The report itself has those of the first."""
    found = [
        _Rank("0", "0", report.pages_free, report.pages_total, report.rooms_by_state, report.cache)
    ]
    for rank in report.ranks:
        if rank.rank and rank.up:
            stage, shard = divmod(rank.rank, report.tp_size)
            # The other shards of a decode have no rooms. They work on those of the first one.
            rooms = rank.rooms if role == "prefill" else None
            found.append(
                _Rank(str(shard), str(stage), rank.pages_free, rank.pages_total, rooms, rank.cache)
            )
    return found


def _gauges_of(rank: _Rank, role: str, page_size: int) -> dict[str, float]:
    cache = rank.cache
    # Cached pages that can be evicted do not count as used, as in SGLang.
    free = rank.pages_free + (cache.evictable_pages if cache else 0)
    used, most = (rank.pages_total - free) * page_size, rank.pages_total * page_size
    gauges: dict[str, float] = {
        "cache_hit_rate": cache.hit_tokens / cache.asked_tokens
        if cache and cache.asked_tokens
        else 0.0,
        "num_used_tokens": used,
        "token_usage": used / most if most else 0.0,
        "max_total_num_tokens": most,
    }
    if rank.rooms is not None:
        early = sum(count for state, count in rank.rooms.items() if state in _BEFORE)
        late = sum(rank.rooms.values()) - early
        gauges |= {
            "num_prefill_bootstrap_queue_reqs": early if role == "prefill" else 0,
            "num_prefill_inflight_queue_reqs": late if role == "prefill" else 0,
            "num_decode_prealloc_queue_reqs": early if role == "decode" else 0,
            "num_decode_transfer_queue_reqs": late if role == "decode" else 0,
        }
    if cache is not None and cache.host_limit_pages:
        gauges["hicache_host_used_tokens"] = cache.host_pages * page_size
        gauges["hicache_host_total_tokens"] = cache.host_limit_pages * page_size
    return gauges


def _caches(ranks: Iterable[_Rank], page_size: int, pp_size: int) -> Iterator[Metric]:
    tiers = {
        name: CounterMetricFamily(f"sglang:{name}", f"See kvflow_cache_{pages}.", labels=labels)
        for name, pages, labels in (
            ("evicted_tokens", "evicted_pages", _CACHE_LABELS),
            ("load_back_tokens", "loaded_pages", _CACHE_LABELS),
            ("prefetched_tokens", "fetched_pages", _STORAGE_LABELS),
            ("backuped_tokens", "stored_pages", _STORAGE_LABELS),
        )
    }
    for rank in ranks:
        if (cache := rank.cache) is None:
            continue
        of_cache = (_CACHE_TYPE, rank.tp_rank, rank.pp_rank)
        tiers["evicted_tokens"].add_metric(of_cache, cache.evicted_pages * page_size)
        if cache.host_limit_pages:
            tiers["load_back_tokens"].add_metric(of_cache, cache.loaded_pages * page_size)
        if cache.storage is not None:
            of_storage = (cache.storage.name, rank.tp_rank, "0", rank.pp_rank, str(pp_size))
            tiers["prefetched_tokens"].add_metric(of_storage, cache.fetched_pages * page_size)
            tiers["backuped_tokens"].add_metric(of_storage, cache.stored_pages * page_size)
    yield from (family for family in tiers.values() if family.samples)


def _scheduler(
    report: Report, completions: CompletionMeasures, role: str, model: str, now: float
) -> Iterator[Metric]:
    values = (model, role, "0", "0", "0")
    retraction = report.retraction or EngineRetractions()
    gauges: dict[str, dict[tuple[str, ...], float]] = {
        name: {values: value}
        for name, value in (
            ("num_running_reqs", report.running),
            ("num_queue_reqs", report.waiting),
            ("gen_throughput", completions.throughput.per_second(now)),
            ("num_retracted_reqs", retraction.retracted_now),
            ("new_token_ratio", retraction.new_token_ratio),
        )
    }
    if report.rows_total:
        gauges["mamba_usage"] = {values: 1 - report.rows_free / report.rows_total}
    ranks = _ranks(report, role)
    for rank in ranks:
        of_rank = (model, role, rank.tp_rank, rank.pp_rank, "0")
        for name, value in _gauges_of(rank, role, report.pool.page_size).items():
            gauges.setdefault(name, {})[of_rank] = value
    for name, samples in gauges.items():
        family = GaugeMetricFamily(f"sglang:{name}", "As in SGLang.", labels=_SCHEDULER_LABELS)
        for labels, value in samples.items():
            family.add_metric(labels, value)
        yield family
    yield from _caches(ranks, report.pool.page_size, report.pp_size)
    for where in ("bootstrap", "transfer"):
        failed = sum(count for (phase, _), count in report.rooms_failed.items() if phase == where)
        counter = CounterMetricFamily(
            f"sglang:num_{where}_failed_reqs", "See kvflow_rooms_failed.", labels=_SCHEDULER_LABELS
        )
        counter.add_metric(values, failed)
        yield counter
    counter = CounterMetricFamily(
        "sglang:num_retracted_requests", "See kvflow_retracts.", labels=_SCHEDULER_LABELS
    )
    counter.add_metric(values, retraction.retracts)
    yield counter
    queue = {values: report.queue_seconds or Histogram(QUEUE_SECONDS)}
    yield histograms(
        "sglang:queue_time_seconds",
        "See kvflow_queue_seconds.",
        queue,
        _SCHEDULER_LABELS,
        bounds=QUEUE_SECONDS,
    )


def _transfers(report: Report, role: str, values: tuple[str, ...]) -> Iterator[Metric]:
    """Yield histograms of transfers. As in SGLang, three of the five are empty for a decode."""
    measures = report.transfers
    if measures is None:
        return
    sent = role == "prefill"
    # A prefill waits for the pages in which it computes, and a decode for the pages that it lends.
    if sent and report.queue_seconds is not None:
        alloc = report.queue_seconds
    else:
        alloc = measures.allocation_seconds
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
            f"sglang:kv_transfer_{name}",
            text,
            {values: shown},
            _SCHEDULER_LABELS,
            bounds=bounds,
            unit=unit,
        )


def _requests(found: CompletionMeasures, values: tuple[str, ...]) -> Iterator[Metric]:
    streamed = (*_LABELS, "is_streaming")
    by_stream = {stream: (*values, "true" if stream else "false") for stream in (False, True)}
    lengths = [bound for bound in TOKEN_COUNTS if bound >= _FIRST_LENGTH]
    pauses = [bound for bound in INTER_TOKEN_SECONDS if bound >= _FIRST_INTER_TOKEN_S]
    for name, latency, seconds in (
        ("time_to_first_token", found.first_token_seconds, _FIRST_TOKEN_S),
        ("e2e_request_latency", found.request_seconds, _REQUEST_S),
    ):
        named = {by_stream[stream]: histogram for stream, histogram in latency.items()}
        yield histograms(f"sglang:{name}_seconds", "As in SGLang.", named, streamed, bounds=seconds)
    for name, histogram, bounds in (
        ("inter_token_latency_seconds", found.inter_token_seconds, pauses),
        ("prompt_tokens_histogram", found.prompt_tokens, lengths),
        ("generation_tokens_histogram", found.generated_tokens, lengths),
    ):
        yield histograms(
            f"sglang:{name}", "As in SGLang.", {values: histogram}, _LABELS, bounds=bounds
        )
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
