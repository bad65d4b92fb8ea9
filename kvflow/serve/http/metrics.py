"""Prometheus metrics of a role, under kvflow's names and optionally under SGLang's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvflow.http.families import Figure, each, histograms
from kvflow.http.metrics import HttpMetrics
from kvflow.http.node_families import node_families
from kvflow.serve.cache.prefix import CacheStats
from kvflow.serve.http.completion_service import Report
from kvflow.serve.http.measures import CompletionMeasures
from kvflow.serve.http.sglang_metrics import sglang_families

_OPTIMISM: tuple[Figure, ...] = (
    ("starts", "Prompts begun before decode had lent its pages, each time."),
    ("hits", "Of them, those that had kept their pages until decode lent its own."),
    (
        "lost",
        "Of them, those whose pages were taken for a prompt whose decode had lent its own.",
    ),
)
_EARLY: Figure = (
    "requests",
    "Requests whose prompt has pages, and whose decode has lent none yet.",
    "holding_now",
)
_RETRACTED: tuple[Figure, ...] = (
    (
        "retracts",
        "Running requests that gave their pages up, each time, because the pool ran short.",
    ),
    ("resumes", "Retracted requests that run again, with their state from host memory."),
    ("recomputes", "Retracted requests that run again, with their state computed once more."),
)
_RETRACTION: tuple[Figure, ...] = (
    (
        "retracted_requests",
        "Requests that are retracted now, and wait for pages.",
        "retracted_now",
    ),
    (
        "host_memory_bytes",
        "Host memory that holds the state of retracted requests.",
        "host_bytes_used",
    ),
    (
        "host_memory_limit_bytes",
        "Host memory that may hold it (--host-memory-bytes).",
        "host_bytes_limit",
    ),
    ("new_token_ratio", "Share of its new tokens for which a request is promised pages."),
)
_LOCAL: tuple[Figure, ...] = (
    ("local_prompts", "Prompts that decode began to compute itself, without a pair.", "prompts"),
    ("local_prompt_tokens", "Prompt tokens that decode computed itself.", "tokens"),
)
_CACHED: tuple[Figure, ...] = (
    ("pages", "Pages of the pool that hold cached prefixes."),
    ("evictable_pages", "Of them, those that no request reads."),
    ("host_pages", "Pages of host memory that hold cached prefixes."),
    ("host_limit_pages", "Pages of host memory for them (--cache-host-bytes)."),
    ("states", "Copies of states at ends of cached pages."),
    ("limit_states", "Room for such copies (--cache-state-bytes)."),
)
_CACHE: tuple[Figure, ...] = (
    ("asked_tokens", "Prompt tokens that were looked up in the prefix cache."),
    ("hit_tokens", "Of them, those that were found."),
    ("evicted_pages", "Cached pages that gave way to requests."),
    ("evicted_states", "Copies of states that gave way to others."),
    ("saved_pages", "Cached pages that were copied to host memory."),
    ("loaded_pages", "Pages that were copied back from host memory."),
    ("stored_pages", "Cached pages that were put into storage."),
    ("fetched_pages", "Pages that were read from storage."),
    ("unsaved_pages", "Cached pages that were not copied to host memory: no room."),
    ("unstored_pages", "Cached pages that were not stored: too many waited."),
    ("lost_pages", "Pages that storage had lost, and those behind them."),
    ("failed_copies", "Copies between tiers that failed or were stopped."),
)
_STORES: tuple[Figure, ...] = (
    ("readable", "1 while storage (--l3) is read; 0 while it is left alone."),
    ("writable", "1 while storage is written to; 0 while it is left alone."),
)
_STORAGE: tuple[Figure, ...] = (
    ("errors", "Calls in which storage had an error."),
    ("stalls", "Calls to storage that were given up, as they did not end."),
    ("trips", "How often storage was left alone from then on."),
    ("damaged_pages", "Pages that were not as they were stored.", "damaged"),
)


class RoleMetrics(HttpMetrics):
    """Metrics of a prefill or a decode, generated from a new report at each scrape."""

    def __init__(
        self,
        report: Callable[[], Report] | None = None,
        *,
        role: str = "",
        model: str = "",
        sglang: bool = False,
    ) -> None:
        """Export the figures of `report` for `role`. With `sglang`, add SGLang's metrics."""
        super().__init__(self._of_role)
        self.completions = CompletionMeasures()
        self._report, self._role, self._model, self._sglang = report, role, model, sglang

    def reports(self, role: str, report: Callable[[], Report]) -> None:
        self._role, self._report = role, report

    def _of_role(self, refusals: Counter[str]) -> Iterator[Metric]:
        # The metrics exist before the role starts. `reports` sets `_report` later.
        if self._report is None:
            return
        report = self._report()
        refusals.update(report.requests_refused)
        yield from node_families(report)
        if report.optimism is not None:
            yield from each(CounterMetricFamily, "kvflow_optimistic_", report.optimism, *_OPTIMISM)
            yield from each(GaugeMetricFamily, "kvflow_optimistic_", report.optimism, _EARLY)
        if report.retraction is not None:
            yield from each(CounterMetricFamily, "kvflow_", report.retraction, *_RETRACTED)
            yield from each(GaugeMetricFamily, "kvflow_", report.retraction, *_RETRACTION)
        if report.local_prompts is not None:
            yield from each(CounterMetricFamily, "kvflow_", report.local_prompts, *_LOCAL)
        if report.cache is not None:
            yield from _cache(report.cache)
        if report.ranks:
            yield from _ranks(report)
        yield from _completions(self.completions, report)
        if self._sglang:
            now = time.perf_counter()
            yield from sglang_families(report, self.completions, self._role, self._model, now)


def _cache(found: CacheStats) -> Iterator[Metric]:
    yield from each(GaugeMetricFamily, "kvflow_cache_", found, *_CACHED)
    yield from each(CounterMetricFamily, "kvflow_cache_", found, *_CACHE)
    if found.storage is not None:
        yield from each(GaugeMetricFamily, "kvflow_cache_storage_", found.storage, *_STORES)
        yield from each(CounterMetricFamily, "kvflow_cache_storage_", found.storage, *_STORAGE)


# (field of `RankReport`, metric name, help text)
_RANK_GAUGES = (
    ("pages_free", "pages_free", "Free pages of a rank's KV pool."),
    ("pages_total", "pool_pages", "Pages of a rank's KV pool."),
    (
        "pinned_pages",
        "pinned_pages",
        "Pages of a rank that writes of rooms that have ended still read.",
    ),
    ("requests", "requests", "Requests that a rank computes, or will."),
    ("tickets", "tickets", "Requests of the group of which something is left at a rank."),
)
# (metric type, field of `CacheStats` and metric name, help text)
_RANK_CACHE = (
    (GaugeMetricFamily, "pages", "Pages of a rank's pool that hold cached prefixes."),
    (GaugeMetricFamily, "host_pages", "Pages of a rank's host memory that hold cached prefixes."),
    (
        CounterMetricFamily,
        "hit_tokens",
        "Prompt tokens that all ranks had cached when a rank began.",
    ),
    (CounterMetricFamily, "evicted_pages", "Cached pages of a rank that gave way to requests."),
    (
        CounterMetricFamily,
        "failed_copies",
        "Copies between a rank's tiers that failed or were stopped.",
    ),
)


def _ranks(report: Report) -> Iterator[Metric]:
    """Yield the metrics of every rank, labelled with its number."""
    up = GaugeMetricFamily(
        "kvflow_rank_up", "Whether a rank of the group is there.", labels=["rank"]
    )
    rooms = GaugeMetricFamily(
        "kvflow_rank_rooms", "Open rooms of a rank by state.", labels=["rank", "state"]
    )
    errors = CounterMetricFamily(
        "kvflow_rank_internal_errors",
        "Internal errors that a rank survived.",
        labels=["rank", "where"],
    )
    gauges = {
        field: GaugeMetricFamily(f"kvflow_rank_{name}", text, labels=["rank"])
        for field, name, text in _RANK_GAUGES
    }
    moved = CounterMetricFamily(
        "kvflow_rank_transfer_bytes", "KV bytes of a rank that have landed.", labels=["rank"]
    )
    cache = {
        field: family(f"kvflow_rank_cache_{field}", text, labels=["rank"])
        for family, field, text in _RANK_CACHE
    }
    for rank in report.ranks:
        number = [str(rank.rank)]
        up.add_metric(number, rank.up)
        # A rank that is down has no figures, and zeros would look like an empty pool.
        if not rank.up:
            continue
        for field, family in gauges.items():
            family.add_metric(number, getattr(rank, field))
        for state, count in rank.rooms.items():
            rooms.add_metric([*number, state], count)
        for where, count in rank.internal_errors.items():
            errors.add_metric([*number, where], count)
        moved.add_metric(number, rank.bytes_moved)
        if rank.cache is not None:
            for field, cached in cache.items():
                cached.add_metric(number, getattr(rank.cache, field))
    yield from (up, rooms, errors, *gauges.values(), moved, *cache.values())


def _completions(found: CompletionMeasures, report: Report) -> Iterator[Metric]:
    yield from each(
        GaugeMetricFamily,
        "kvflow_",
        report,
        ("running_requests", "Requests in the engine's batch.", "running"),
        ("waiting_requests", "Requests waiting for the engine.", "waiting"),
    )
    if report.queue_seconds is not None:
        yield histograms(
            "kvflow_queue_seconds",
            "Wait for a place in the batch and for pages.",
            {(): report.queue_seconds},
        )
    if report.decode_steps is not None:
        steps = "Decode steps; tokens/s divided by steps/s is the average batch."
        yield CounterMetricFamily("kvflow_decode_steps", steps, value=report.decode_steps)
    outcomes = CounterMetricFamily(
        "kvflow_completions", "Completions that ended.", labels=["outcome", "stream"]
    )
    for (outcome, stream), count in found.outcomes.items():
        outcomes.add_metric([outcome, _flag(stream)], count)
    yield outcomes
    yield CounterMetricFamily(
        "kvflow_generated_tokens", "Tokens sent to clients.", value=found.tokens_sent.total()
    )
    for name, text, latency in (
        (
            "time_to_first_token_seconds",
            "Time from request to first token.",
            found.first_token_seconds,
        ),
        ("completion_seconds", "Time from request to last token.", found.request_seconds),
    ):
        named = {(_flag(stream),): histogram for stream, histogram in latency.items()}
        yield histograms(f"kvflow_{name}", text, named, ["stream"])
    for name, text, histogram in (
        (
            "inter_token_seconds",
            "Time between two tokens of a completion.",
            found.inter_token_seconds,
        ),
        ("completion_prompt_tokens", "Prompt length of finished completions.", found.prompt_tokens),
        ("completion_generated_tokens", "Tokens of finished completions.", found.generated_tokens),
    ):
        yield histograms(f"kvflow_{name}", text, {(): histogram})


def _flag(value: bool) -> str:
    return "true" if value else "false"
