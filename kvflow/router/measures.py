"""The Prometheus families of a router, about its requests and its workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvflow.http.errors import Failure, bounded_code
from kvflow.http.families import REQUEST_SECONDS, histograms, labelled
from kvflow.router.workers import Worker
from kvflow.telemetry.histogram import Histogram

_WORKER_LABELS = ("role", "worker")


class RouterMeasures:
    """Counters and metric families of one router."""

    def __init__(self) -> None:
        self._first_token_seconds = Histogram(REQUEST_SECONDS)
        self._errors: Counter[str] = Counter()

    def first_token(self, arrived_at_s: float) -> None:
        """Record the time to a stream's first token.

        `arrived_at_s` is when the request arrived, by `time.perf_counter`.
        """
        self._first_token_seconds.observe(time.perf_counter() - arrived_at_s)

    def failed(self, failure: Failure) -> None:
        """Count a request that ended in an error after all tries."""
        self._errors[bounded_code(failure.code)] += 1

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
        yield labelled(errors, self._errors)
        yield GaugeMetricFamily(
            "kvflow_router_running_requests", "Requests being served.", value=running
        )
        waits = "Requests that wait for a worker to come back, or for their next try."
        yield GaugeMetricFamily("kvflow_router_waiting_requests", waits, value=waiting)
        up = GaugeMetricFamily(
            "kvflow_router_worker_up", "1 for a worker that gets requests.", labels=_WORKER_LABELS
        )
        load = GaugeMetricFamily(
            "kvflow_router_worker_requests", "Requests at a worker now.", labels=_WORKER_LABELS
        )
        served = CounterMetricFamily(
            "kvflow_router_worker_tries",
            "Requests sent to a worker, further tries included.",
            labels=_WORKER_LABELS,
        )
        hits = CounterMetricFamily(
            "kvflow_router_worker_prefix_hits",
            "Of those, requests whose prompt begins with what the worker has in its cache, as far "
            "as is known.",
            labels=_WORKER_LABELS,
        )
        followed = GaugeMetricFamily(
            "kvflow_router_worker_events_followed",
            "1 for a worker whose cache is known by the events that it publishes.",
            labels=_WORKER_LABELS,
        )
        blocks = GaugeMetricFamily(
            "kvflow_router_worker_cached_blocks",
            "Blocks in its cache, by its events.",
            labels=_WORKER_LABELS,
        )
        gaps = CounterMetricFamily(
            "kvflow_router_worker_event_gaps",
            "Times that events were missed and asked for again.",
            labels=_WORKER_LABELS,
        )
        for worker in workers:
            values = (worker.role, worker.url)
            up.add_metric(values, float(worker.up))
            load.add_metric(values, worker.running)
            served.add_metric(values, worker.served)
            hits.add_metric(values, worker.prefix_hits)
            # Only workers that publish cache events appear in these families. A 0 for the others
            # would read as an empty cache.
            if (feed := worker.cache.feed) is not None:
                followed.add_metric(values, float(feed.live))
                blocks.add_metric(values, len(feed.blocks))
                gaps.add_metric(values, feed.gaps)
        yield from (up, load, served, hits, followed, blocks, gaps)
