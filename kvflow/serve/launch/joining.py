"""A worker's membership in routers: it joins when it serves, and leaves before it drains."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple

import aiohttp
import msgspec

from kvflow.http.authorization import bearer
from kvflow.http.errors import Failure
from kvflow.http.paths import WORKERS_PATH

# The join is repeated, because a restarted router has forgotten the workers that joined it.
JOIN_EVERY_S = 2.0
TIMEOUT_S = 5.0  # for a join, in which the router also checks the worker
LEAVE_TIMEOUT_S = 2.0
_log = logging.getLogger("kvflow.serve")


class WorkerIdentity(NamedTuple):
    """The identity with which a worker joins. The router asks the worker to confirm it."""

    role: str
    incarnation: str
    bootstrap_port: int | None


class _RouterLink:
    """The membership of the worker at `url` in one router."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        router: str,
        url: str,
        identity: Callable[[], WorkerIdentity],
    ) -> None:
        self._session = session
        self._router = router.rstrip("/")
        self._url = url
        self._identity = identity
        self._worker_id = ""
        self._joined: WorkerIdentity | None = None  # identity of the last successful join
        self._last_problem = ""

    async def keep_joined(self, leaving: asyncio.Event) -> None:
        """Join, and repeat the join until `leaving` is set. Then leave.

        A join under way is completed first, because the router may already have accepted it.
        """
        while not leaving.is_set():
            await self._join()
            with suppress(TimeoutError):
                async with asyncio.timeout(JOIN_EVERY_S):
                    await leaving.wait()
        await self._leave()

    async def _join(self) -> None:
        who = self._identity()
        # sglang_router keeps the role of the first join, so a worker with a new role leaves first.
        if self._joined is not None and who.role != self._joined.role:
            await self._leave()
        body: dict[str, Any] = {
            "url": self._url,
            "worker_type": who.role,
            "incarnation": who.incarnation,
        }
        if who.bootstrap_port is not None:
            body["bootstrap_port"] = who.bootstrap_port
        problem, answer = await self._call("POST", WORKERS_PATH, TIMEOUT_S, body)
        if not problem:
            self._worker_id = str(answer.get("worker_id", ""))
            if self._joined != who:
                _log.info("joined the router %s as %s", self._router, who.role)
            self._joined = who
        elif problem != self._last_problem:
            _log.warning("cannot join the router %s, trying on: %s", self._router, problem)
        self._last_problem = problem

    async def _leave(self) -> None:
        if self._joined is None:
            return
        # The worker leaves with the identity with which it joined. It may have another one by now.
        who, self._joined = self._joined, None
        path = f"{WORKERS_PATH}/{self._worker_id}?incarnation={who.incarnation}"
        problem, _ = await self._call("DELETE", path, LEAVE_TIMEOUT_S)
        if problem:
            _log.warning("cannot leave the router %s: %s", self._router, problem)

    async def _call(
        self, method: str, path: str, timeout_s: float, body: Any = None
    ) -> tuple[str, dict[str, Any]]:
        """Return the problem, or "" if there is none, and the answer."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, f"{self._router}{path}", json=body, timeout=timeout
            ) as answer:
                raw = await answer.read()
                if answer.status >= 300:
                    return f"{answer.status}: {Failure.read(answer.status, raw).message}", {}
                return "", msgspec.json.decode(raw, type=dict[str, Any])
        except TimeoutError:
            return f"no answer within {timeout_s:g} s", {}
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            return str(error) or type(error).__name__, {}


@asynccontextmanager
async def member_of(
    routers: Sequence[str],
    url: str,
    identity: Callable[[], WorkerIdentity],
    key: str,
    tls: ssl.SSLContext | None = None,
) -> AsyncGenerator[None, None]:
    """Keep the worker at `url` a member of the routers. `key` is the operator's key for them."""
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(ssl=True if tls is None else tls)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(headers=bearer(key), connector=connector)
        )
        links = [_RouterLink(session, router, url, identity) for router in routers]
        leaving = asyncio.Event()
        memberships = [asyncio.create_task(link.keep_joined(leaving)) for link in links]
        try:
            yield
        finally:
            leaving.set()
            await asyncio.gather(*memberships)
