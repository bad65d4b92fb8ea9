"""Prometheus metrics of one HTTP server."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from kvflow.http.errors import Failure, bounded_code
from kvflow.http.families import FamiliesOf, labelled

TEXT_FORMAT = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class HttpMetrics:
    """Metrics of requests and responses, and further families that the server provides."""

    def __init__(
        self, families: Callable[[Tally[str]], Iterable[Metric]] = lambda refusals: ()
    ) -> None:
        """`families` yields the server's families at each scrape, and may add to the refusals."""
        self._families = families
        self.registry = CollectorRegistry()
        # Requests that ended before they had a room, by the code of their error.
        self._refusals: Tally[str] = Tally()
        self._requests = Counter(
            "kvflow_requests", "Requests answered.", ("route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "kvflow_request_seconds",
            "Time from request to end of answer.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._broken = Counter(
            "kvflow_streams_failed",
            "Streams that ended in an error event.",
            ("code",),
            registry=self.registry,
        )
        self._gone = Counter(
            "kvflow_clients_gone",
            "Clients that disconnected before their answer.",
            registry=self.registry,
        )
        self._retried = Counter(
            "kvflow_retries",
            "Requests tried once more, on another pair of workers, by why.",
            ("code",),
            registry=self.registry,
        )
        self.registry.register(FamiliesOf(self._collect))

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def refused(self, code: str) -> None:
        """Count a request that ended before it had a room."""
        self._refusals[code] += 1

    def stream_failed(self, failure: Failure) -> None:
        self._broken.labels(failure.code).inc()

    def retried(self, code: str) -> None:
        self._retried.labels(bounded_code(code)).inc()

    def client_gone(self) -> None:
        self._gone.inc()

    def response(self) -> web.Response:
        """Return all metrics in Prometheus text format 0.0.4."""
        return web.Response(body=generate_latest(self.registry), headers=TEXT_FORMAT)

    def _collect(self) -> Iterator[Metric]:
        # `families` adds to a copy. Otherwise each scrape would count the same refusals again.
        refusals = Tally(self._refusals)
        yield from self._families(refusals)
        refused = "Requests that ended before they had a room, by the code of their error."
        yield labelled(
            CounterMetricFamily("kvflow_requests_refused", refused, labels=["reason"]), refusals
        )
