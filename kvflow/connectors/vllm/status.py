"""The HTTP server of a worker. It serves the registry, the worker's health and kvflow's metrics."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial
from http import HTTPStatus

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvflow.http.families import FamiliesOf
from kvflow.http.node_families import node_families
from kvflow.node import DecodeNode, PrefillNode
from kvflow.node.report import NodeReport, node_report
from kvflow.node.threads.decode import DecodeThread
from kvflow.node.threads.loop import LoopThread
from kvflow.node.threads.prefill import PrefillThread
from kvflow.protocols.errors import LostError, WireError
from kvflow.transports.control.rank_server import Answer, Document, json_answer, serve_ranks
from kvflow.transports.control.registry import RankTable, RegistryClient

Thread = PrefillThread | DecodeThread
_AGAIN_S = 0.5
log = logging.getLogger("vllm.kvflow")


class StatusServer:
    """The status server of one worker.

    It runs on a separate loop, so that it can report a node whose loop is stuck. GET /ranks lists
    the ranks of a prefill. GET /health answers 503 while the worker cannot serve. GET /metrics has
    the worker's metrics. If the worker has both roles, these are prefill's, and /metrics/decode has
    decode's. Proxies for vLLM's MooncakeConnector read the id of a prefill's engine at /query.
    """

    def __init__(
        self,
        prefill: PrefillThread | None,
        decode: DecodeThread | None,
        *,
        engine: str,
        dp_rank: int = 0,
    ) -> None:
        self._threads: list[Thread] = [thread for thread in (prefill, decode) if thread is not None]
        self._table = RankTable()
        if prefill is not None:
            self._table.put(prefill.info)
        self._documents: dict[str, Document] = {
            "/health": self._health,
            "/query": lambda: json_answer({str(dp_rank): {"engine_id": engine}}),
        }
        for thread in self._threads:
            scrape = partial(_scraped, thread)
            self._documents[f"/metrics/{thread.role}"] = scrape
            self._documents.setdefault("/metrics", scrape)
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: LoopThread | None = None

    def start(self, host: str, port: int, api_key: str = "") -> int:
        """Bind the port, serve, and return the port. Raises: MisuseError if it cannot be bound."""
        serving = serve_ranks(self._table, host, port, api_key, documents=self._documents)
        loop = LoopThread("kvflow-status")
        try:
            found = loop.call(lambda: self._stack.enter_async_context(serving))
        except BaseException:
            loop.stop()
            raise
        self._loop = loop
        return found

    def join(self, leader: str, api_key: str) -> None:
        """Register this rank at the registry of rank 0, "host:port". Retry until that succeeds."""
        assert self._loop is not None
        (info,) = self._table.all()

        async def register() -> None:
            client = RegistryClient(api_key)
            while True:
                try:
                    return await client.register(leader, info)
                except (LostError, WireError) as error:
                    log.info(
                        "rank %d waits for the registry of rank 0 at %s: %s",
                        info.rank,
                        leader,
                        error,
                    )
                    await asyncio.sleep(_AGAIN_S)

        self._loop.post(
            lambda: self._tasks.append(asyncio.get_running_loop().create_task(register()))
        )

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call(self._close)
            self._loop.stop()
            self._loop = None

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def _health(self) -> Answer:
        why = ""
        found: dict[str, int] = {}
        for thread in self._threads:
            reason, report = _state(thread)
            why = why or reason
            if thread.role == "decode":
                found |= {
                    "quarantined_blocks": report.quarantine_pages,
                    "overdue_blocks": report.quarantine_overdue_pages,
                    "limit": report.quarantine_limit_pages,
                }
            else:
                found |= {"pinned_blocks": report.pinned_pages}
        status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
        return json_answer({"status": why or "ok", **found}, status)


def _scraped(thread: Thread) -> Answer:
    registry = CollectorRegistry()
    report = _state(thread)[1]
    registry.register(FamiliesOf(lambda: node_families(report)))
    return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry)


def _state(thread: Thread) -> tuple[str, NodeReport]:
    """Return the reason why the worker cannot serve (empty if it can), and its report.

    Pages of the first space count as free if no transfer uses them. Only vLLM knows which of them
    hold its own data.
    """
    total = thread.pool.layout.num_pages
    busy = thread.pages.busy(np.arange(total, dtype=np.int32)).size

    def of(node: PrefillNode | DecodeNode) -> tuple[str, NodeReport]:
        report = node_report(
            node,
            pages_free=total - busy,
            pages_by_kind={"transfer": busy},
            at_rest=thread.pages.at_rest(),
        )
        return node.unavailable_reason, report

    return thread.ask(of)
