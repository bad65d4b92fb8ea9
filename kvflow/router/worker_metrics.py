"""GET /engine_metrics, as in sglang_router: the metrics of all workers in one exposition."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvflow.http.families import FamiliesOf
from kvflow.http.metrics import TEXT_FORMAT
from kvflow.router.identity import read_at_most
from kvflow.router.measures import RouterMeasures
from kvflow.router.workers import Workers

PATH = "/engine_metrics"
# Prometheus gives up a scrape after 10 s by default, so one silent worker must cost less.
SCRAPE_TIMEOUT_S = 3.0
# Anybody may call this route, and merging takes some 40 ms of CPU time for each worker.
FRESH_S = 1.0
MAX_EXPOSITION_BYTES = 8 << 20


class Exposition(NamedTuple):
    """The outcome of one scrape. `text` is None if the worker is left out."""

    role: str
    url: str
    text: str | None


class WorkerMetrics:
    """Scrapes all workers at once, at most once in `FRESH_S`.

    Callers that come during a scrape, or within `FRESH_S` after it, share its result.
    """

    def __init__(
        self, workers: Workers, session: aiohttp.ClientSession, measures: RouterMeasures
    ) -> None:
        self._workers, self._session, self._measures = workers, session, measures
        self._scraping: asyncio.Task[bytes] | None = None
        self._last, self._fresh_until_s = b"", 0.0

    async def response(self) -> web.Response:
        """Return the metrics of all workers, in Prometheus text format 0.0.4."""
        body = self._last
        if asyncio.get_running_loop().time() >= self._fresh_until_s:
            if self._scraping is None:
                self._scraping = asyncio.create_task(self._scrape())
                self._scraping.add_done_callback(self._scraped)
            body = await asyncio.shield(self._scraping)
        return web.Response(body=body, headers=TEXT_FORMAT)

    async def close(self) -> None:
        if self._scraping is not None:
            self._scraping.cancel()
            await asyncio.gather(self._scraping, return_exceptions=True)

    def _scraped(self, task: asyncio.Task[bytes]) -> None:
        self._scraping = None
        if not task.cancelled():
            # Retrieving the exception keeps asyncio from logging it if all callers have left.
            task.exception()

    async def _scrape(self) -> bytes:
        asked = [self._ask(worker.role, worker.url) for worker in self._workers.all]
        # Parsing takes milliseconds for each worker, in which the loop must relay streams.
        body, malformed = await asyncio.to_thread(merged, await asyncio.gather(*asked))
        for one in malformed:
            self._measures.scrape_failed(one.role, "malformed")
        self._last = body
        self._fresh_until_s = asyncio.get_running_loop().time() + FRESH_S
        return body

    async def _ask(self, role: str, url: str) -> Exposition:
        try:
            async with (
                asyncio.timeout(SCRAPE_TIMEOUT_S),
                self._session.get(f"{url}/metrics", allow_redirects=False) as answer,
            ):
                if answer.status != 200:
                    return self._failed(role, url, "status")
                raw = await read_at_most(answer, MAX_EXPOSITION_BYTES)
                if raw is None:
                    return self._failed(role, url, "malformed")
                return Exposition(role, url, raw.decode())
        except TimeoutError:
            return self._failed(role, url, "timeout")
        except UnicodeDecodeError:
            return self._failed(role, url, "malformed")
        except (aiohttp.ClientError, OSError):
            return self._failed(role, url, "unreachable")

    def _failed(self, role: str, url: str, reason: str) -> Exposition:
        self._measures.scrape_failed(role, reason)
        return Exposition(role, url, None)


def scraped_family() -> GaugeMetricFamily:
    """Return the family by which an exposition names the workers in it, without samples."""
    text = "1 for a worker whose metrics are in this exposition, 0 for one that is left out."
    return GaugeMetricFamily("kvflow_router_worker_scraped", text, labels=("role", "worker"))


def merged(found: Iterable[Exposition]) -> tuple[bytes, list[Exposition]]:
    """Return one exposition with the samples of all workers, and those that cannot be parsed.

    Every sample gets the labels `role` and `worker`. A label of that name that a worker already has
    becomes `exported_role` or `exported_worker`, as in Prometheus.
    """
    families: dict[str, Metric] = {}
    malformed: list[Exposition] = []
    scraped = scraped_family()
    for one in found:
        parsed: list[Metric] | None = None
        if one.text is not None:
            try:
                parsed = list(text_string_to_metric_families(one.text))
            # The parser indexes into lines, and does not promise which error a bad line raises.
            except (ValueError, IndexError, KeyError, TypeError):
                malformed.append(one)
        scraped.add_metric((one.role, one.url), float(parsed is not None))
        for metric in parsed or ():
            _add(families, metric, one)

    def collect() -> Iterator[Metric]:
        yield scraped
        yield from families.values()

    registry = CollectorRegistry()
    registry.register(FamiliesOf(collect))
    return generate_latest(registry), malformed


def _add(families: dict[str, Metric], metric: Metric, one: Exposition) -> None:
    # The parser cuts `_total` off the name of a counter, and a gauge may have the rest as its name.
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    family = families.get(name)
    if family is None:
        family = families[name] = Metric(metric.name, metric.documentation, metric.type)
    elif family.type != metric.type:
        # A name can have one type only. Workers of two versions may differ in it.
        family.type = "unknown"
    family.documentation = family.documentation or metric.documentation
    family.samples += (_labelled(sample, one) for sample in metric.samples)


def _labelled(sample: Sample, one: Exposition) -> Sample:
    labels = {
        f"exported_{name}" if name in ("role", "worker") else name: value
        for name, value in sample.labels.items()
    }
    return sample._replace(labels=labels | {"role": one.role, "worker": one.url})
