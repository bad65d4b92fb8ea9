"""The Prometheus families of a router, about its requests and its workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvflow.http.errors import Failure, bounded_code
from kvflow.http.families import REQUEST_SECONDS, F, histograms, labelled
from kvflow.router.workers import Worker
from kvflow.telemetry.histogram import Histogram


class RouterMeasures:
    """Counters and metric families of one router."""

    def __init__(self) -> None:
        self._first_token_seconds = Histogram(REQUEST_SECONDS)
        self.errors: Counter[str] = Counter()
        self._scrape_failures: Counter[tuple[str, str]] = Counter()

    def first_token(self, arrived_at_s: float) -> None:
        """Record the time from `arrived_at_s` (`time.perf_counter`) to a stream's first token."""
        self._first_token_seconds.observe(time.perf_counter() - arrived_at_s)

    def failed(self, failure: Failure) -> None:
        """Count a request that ended in an error after all tries."""
        self.errors[bounded_code(failure.code)] += 1

    def scrape_failed(self, role: str, reason: str) -> None:
        """Count a worker that was left out of /engine_metrics."""
        self._scrape_failures[role, reason] += 1

    def families(self, workers: Iterable[Worker], running: int, waiting: int) -> Iterator[Metric]:
        yield histograms(
            "kvflow_router_time_to_first_token_seconds",
            "Of streams: time from request to first token, further tries included.",
            {(): self._first_token_seconds},
        )
        errors = CounterMetricFamily(
            "kvflow_router_errors",
            "Requests that ended in an error after all tries, by its code.",
            labels=["code"],
        )
        yield labelled(errors, self.errors)
        failures = CounterMetricFamily(
            "kvflow_router_worker_scrape_failures",
            "Workers that were left out of /engine_metrics, each time, by why.",
            labels=("role", "reason"),
        )
        for labels, count in self._scrape_failures.items():
            failures.add_metric(labels, count)
        yield failures
        yield GaugeMetricFamily(
            "kvflow_router_running_requests", "Requests being served.", value=running
        )
        waits = "Requests that wait for a worker to come back, or for their next try."
        yield GaugeMetricFamily("kvflow_router_waiting_requests", waits, value=waiting)
        up = _of_workers(GaugeMetricFamily, "up", "1 for a worker that gets requests.")
        load = _of_workers(GaugeMetricFamily, "requests", "Requests at a worker now.")
        text = "Requests sent to a worker, further tries included."
        served = _of_workers(CounterMetricFamily, "tries", text)
        text = (
            "Of those, requests whose prompt begins with what the worker has in its cache, as far "
            "as is known."
        )
        hits = _of_workers(CounterMetricFamily, "prefix_hits", text)
        text = "Of the tries, requests that decode got alone, to compute their prompts itself."
        local = _of_workers(CounterMetricFamily, "local_prompts", text)
        text = "Prompt tokens that decode has still to compute itself, by the router's estimate."
        computing = _of_workers(GaugeMetricFamily, "computing_tokens", text)
        text = "1 for a worker whose cache is known by the events that it publishes."
        followed = _of_workers(GaugeMetricFamily, "events_followed", text)
        text = "Blocks in its cache, by its events."
        blocks = _of_workers(GaugeMetricFamily, "cached_blocks", text)
        text = "Times that events were missed and asked for again."
        gaps = _of_workers(CounterMetricFamily, "event_gaps", text)
        for worker in workers:
            values = (worker.role, worker.url)
            up.add_metric(values, float(worker.up))
            load.add_metric(values, worker.running)
            served.add_metric(values, worker.served)
            hits.add_metric(values, worker.prefix_hits)
            if worker.role == "decode":
                local.add_metric(values, worker.local_prompts)
                computing.add_metric(values, worker.computing)
            # For a worker that publishes no events, a 0 would read as an empty cache.
            if (feed := worker.cache.feed) is not None:
                followed.add_metric(values, float(feed.live))
                blocks.add_metric(values, len(feed.blocks))
                gaps.add_metric(values, feed.gaps)
        yield from (up, load, served, hits, local, computing, followed, blocks, gaps)


def _of_workers(kind: type[F], name: str, text: str) -> F:
    return kind(f"kvflow_router_worker_{name}", text, labels=("role", "worker"))
