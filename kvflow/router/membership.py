"""Workers that join and leave a running router, through routes that sglang_router has too.

    POST   /workers {"url": ..., "worker_type": "prefill" | "decode"}
                           join; answers 202 and the worker's id, even if it joined before
    GET    /workers        list all workers
    GET    /workers/{id}   describe one worker
    DELETE /workers/{id}   leave; answers 202. The worker gets no more requests, and is forgotten
                           once its running requests are answered

There are two differences from sglang_router. Before this router answers a join, it asks the worker
for its identity, and `worker_type` may be left out. A worker that joins on its own initiative
(`--join`) names its incarnation and repeats the request, so that a restarted router learns of it
too. An operator's DELETE overrules these repetitions until the worker has another incarnation, or
until an operator sends a POST for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvflow.http.errors import ConflictError, OverloadError, RequestError
from kvflow.http.paths import WORKERS_PATH
from kvflow.protocols.errors import LostError
from kvflow.router.identity import Identify, Identity
from kvflow.router.workers import CHECK_TIMEOUT_S, ROLES, Worker, Workers

MAX_WORKERS = 1024
MAX_URL_CHARACTERS = 2048


class JoinRequest(msgspec.Struct, frozen=True):
    """The body of POST /workers.

    Further fields that sglang_router's clients may send are ignored: kvflow asks the worker for its
    bootstrap port and its model, and all workers share one API key.
    """

    url: str
    worker_type: str | None = None
    incarnation: str | None = None  # incarnation of a worker that joins by --join


class Membership:
    """The operations by which workers join and leave a router."""

    def __init__(
        self, workers: Workers, session: aiohttp.ClientSession, identify: Identify
    ) -> None:
        self._workers, self._session, self._identify = workers, session, identify
        # Incarnations that left, by URL, the oldest removal first.
        self._removed: OrderedDict[str, str] = OrderedDict()
        # Joins run one at a time, so that two requests cannot add the same URL twice.
        self._one_at_a_time = asyncio.Lock()

    async def join(self, request: JoinRequest) -> Worker:
        """Add the worker at this URL and check it once, or return the known worker at this URL.

        Raises: RequestError (400), ConflictError (409: another role, another model, or an operator
        removed it), LostError (502: it does not answer), OverloadError.
        """
        url = _checked_url(request.url)
        if request.worker_type not in (None, *ROLES):
            text = f"{request.worker_type[:40]!r} is not prefill or decode"
            raise RequestError(f"worker_type: {text}", param="worker_type")
        # Only an operator's POST, which has no incarnation, may undo an operator's DELETE.
        if request.incarnation is None:
            self._removed.pop(url, None)
        elif self._removed.get(url) == request.incarnation:
            raise ConflictError(
                f"{url} was told to leave; POST {WORKERS_PATH} without an incarnation lets it "
                "join again"
            )
        async with self._one_at_a_time:
            known = next((worker for worker in self._workers.all if worker.url == url), None)
            if known is None:
                return await self._join_anew(url, request.worker_type)
            return self._join_again(known, request)

    def leave(self, worker: Worker, incarnation: str | None = None) -> None:
        """Send this worker no more requests. Idempotent.

        A worker that leaves on its own initiative gives its `incarnation`. A later process at the
        same URL has another one, and may join.
        """
        self._removed[worker.url] = (incarnation or worker.incarnation)[:MAX_URL_CHARACTERS]
        self._removed.move_to_end(worker.url)
        # The number of remembered removals is bounded, because URLs come from clients.
        if len(self._removed) > MAX_WORKERS:
            self._removed.popitem(last=False)
        self._workers.leave(worker)

    def find(self, worker_id: str) -> Worker | None:
        return next((worker for worker in self._workers.all if worker.id == worker_id), None)

    def _join_again(self, worker: Worker, request: JoinRequest) -> Worker:
        if worker.usable and request.worker_type not in (None, worker.role):
            raise ConflictError(
                f"{worker.url} is here as a {worker.role} worker, not as {request.worker_type}"
            )
        if worker.leaving:
            self._workers.stay(worker)
        # Another process answers at this URL now. A check finds its identity at once.
        elif request.incarnation not in (None, worker.incarnation):
            worker.check_due.set()
        return worker

    async def _join_anew(self, url: str, role: str | None) -> Worker:
        if len(self._workers.all) >= MAX_WORKERS:
            raise OverloadError("workers of this router", len(self._workers.all) + 1, MAX_WORKERS)
        identity = await self._identity(url, role)
        if identity.role not in ROLES:
            raise ConflictError(
                f"{url} is not a worker of a pair: its disaggregation_mode is {identity.role!r}"
            )
        if role not in (None, identity.role):
            raise ConflictError(f"{url} is a {identity.role} worker, not a {role} worker")
        others = {
            one.fingerprint: one for one in self._workers.all if one.usable and one.fingerprint
        }
        if others and identity.fingerprint and identity.fingerprint not in others:
            fingerprint, other = next(iter(others.items()))
            text = (
                f"it serves {identity.model!r} ({identity.fingerprint}), {other.url} "
                f"{other.model!r} ({fingerprint})"
            )
            raise ConflictError(f"{url} has another model than the workers here: {text}")
        worker = Worker(identity.role, url, follows=True)
        await self._workers.add(worker)
        return worker

    async def _identity(self, url: str, role: str | None) -> Identity:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await self._identify(self._session, url, role, None)
        except TimeoutError:
            raise LostError(
                f"{url}: it has not said what it is within {CHECK_TIMEOUT_S:g} s"
            ) from None
        except (LostError, aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise LostError(f"{url}: {str(error) or type(error).__name__}") from None


def _checked_url(given: str) -> str:
    """Return the URL of a worker without a trailing slash. Raises: RequestError."""
    url = given.rstrip("/")
    try:
        parts = urlsplit(url)
        whole = bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment)
    # The port is not a number, or the brackets do not match.
    except ValueError:
        whole = False
    if not (whole and url.startswith(("http://", "https://")) and len(url) <= MAX_URL_CHARACTERS):
        raise RequestError(
            f"url: {given[:200]!r} is not the http:// or https:// URL of a worker", param="url"
        )
    return url


def described(worker: Worker, trouble: str) -> dict[str, Any]:
    """Return a worker's entry for GET /workers: sglang_router's keys first, then kvflow's own."""
    return {
        "id": worker.id,
        "url": worker.url,
        "model_id": worker.model or "unknown",
        "worker_type": worker.role,
        "is_healthy": worker.up,
        "load": worker.running,
        "connection_mode": "HTTP",
        "bootstrap_port": worker.bootstrap_port,
        "leaving": worker.leaving,
        "incarnation": worker.incarnation,
        "reason": trouble,
    }
