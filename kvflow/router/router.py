"""The router role: it chooses a prefill and a decode for each request, and relays decode's answer.

A request that failed before its client got a token is tried on another pair, if that may help
(`legs.py` has the conditions). A worker that stops or dies therefore loses only requests that it
had begun to answer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client.core import Metric
from yarl import URL

from kvflow.http.access import REQUEST_ID_HEADER
from kvflow.http.authorization import NO_KEYS, Keys, bearer
from kvflow.http.draining import Drainable
from kvflow.http.errors import Failure, failure_of
from kvflow.http.large_bodies import take_apart
from kvflow.http.metrics import HttpMetrics
from kvflow.http.model_length import MAX_MODEL_LEN_HEADER
from kvflow.protocols.errors import Code, KvflowError, RefusedError
from kvflow.router.answer import ClientAnswer
from kvflow.router.cache_view import NO_PROMPTS, Prompts
from kvflow.router.engines import Completion, Engine, Forwarded
from kvflow.router.kvflow_engine import KvflowEngine
from kvflow.router.legs import LegFailedError, PairFailedError, copied
from kvflow.router.local import LocalPrefill
from kvflow.router.measures import RouterMeasures
from kvflow.router.membership import Membership
from kvflow.router.overview.document import RouterView
from kvflow.router.overview.gathering import INTERVAL_S, Overview
from kvflow.router.pairs import Pair
from kvflow.router.policies import Policy
from kvflow.router.prompts import PromptFields
from kvflow.router.tokens import Encoder, block_hashes
from kvflow.router.tries import Tries, fitting
from kvflow.router.worker_metrics import WorkerMetrics
from kvflow.router.workers import ROLES, NoWorkerError, Worker, Workers
from kvflow.telemetry.requests import CURRENT

_log = logging.getLogger("kvflow.router")
CONNECT_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 5.0  # limit for a request that `ask` or `forward` sends
_JSON = {"Content-Type": "application/json"}
_NO_HEADERS: Mapping[str, str] = {}
_FORWARDED = ("Authorization", "x-api-key", "traceparent", "tracestate")
_ENDED = Failure(
    503, "shutdown", "this router is shutting down, and the request did not finish in time"
)


class Router(Drainable):
    """A router in front of the workers at these URLs. `close` closes every connection to them.

    `keys` are the keys of the workers and of the router. A request whose client has
    received no token yet is tried on one pair after another. It waits at most `retry_timeout_s` in
    all, for a worker to come back or for its next try, and at most `max_waiting` requests wait at a
    time. `encoder` is the model's tokenizer. Without it, the router compares only prompts of token
    ids with the cache events of workers. `engine` is the kind of worker, kvflow's own by default. A
    request goes to decode alone if decode then has at most `local_prefill_tokens` tokens of prompts
    to compute (`local.py`). `tls` verifies workers at https:// URLs; without it, the system's
    certificates do.
    """

    def __init__(
        self,
        prefill: Iterable[str],
        decode: Iterable[str],
        *,
        keys: Keys = NO_KEYS,
        request_timeout_s: float = 600.0,
        retry_timeout_s: float = 10.0,
        max_waiting: int = 1024,
        poll_s: float = 1.0,
        policy: Policy = Policy(),  # noqa: B008 # it is frozen
        encoder: Encoder | None = None,
        engine: Engine | None = None,
        local_prefill_tokens: int = 0,
        overview_interval_s: float = INTERVAL_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__()
        self.engine: Engine = engine or KvflowEngine()
        self.keys = keys
        headers = bearer(keys.api)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=self.engine.keepalive_s,
            ssl=True if tls is None else tls,
        )
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=connector, read_bufsize=1 << 18
        )
        self._timeout_s = request_timeout_s
        self._retry_s = retry_timeout_s
        self._max_waiting = max_waiting
        self._timeouts: set[asyncio.Timeout] = set()
        self._ending = False
        self.waiting = 0
        self.workers = Workers(prefill, decode, self._session, poll_s, policy, self.engine.identify)
        self._reads_prompts, self._encoder = policy.reads_prompts, encoder
        self._local = LocalPrefill(local_prefill_tokens)
        self.membership = Membership(self.workers, self._session, self.engine.identify)
        self.measures = RouterMeasures()
        self.worker_metrics = WorkerMetrics(self.workers, self._session, self.measures)
        self.metrics = HttpMetrics(self._families)
        self.overview = Overview(
            self.workers,
            self._session,
            keys,
            self._view,
            asks=self.engine.has_operations,
            interval_s=overview_interval_s,
        )

    def _families(self, _: Counter[str]) -> Iterator[Metric]:
        yield from self.measures.families(self.workers.all, self.running, self.waiting)
        yield from self.engine.families()

    def _view(self) -> RouterView:
        return RouterView(
            model=self.workers.model,
            draining=self.draining,
            running=self.running,
            waiting=self.waiting,
            trouble="" if self.workers.complete() else "no pair of workers can serve a request",
            errors=dict(self.measures.errors),
        )

    async def start(self) -> None:
        await self.workers.start()

    async def close(self) -> None:
        await self.overview.close()
        await self.workers.close()
        await self.worker_metrics.close()
        await self._session.close()

    def end_requests(self) -> None:
        self._ending = True
        for timeout in self._timeouts:
            timeout.reschedule(asyncio.get_running_loop().time())

    async def serve(self, http: web.Request) -> web.StreamResponse:
        """Serve one request: try one pair of workers after another until one answers."""
        try:
            self.refuse_when_draining()
            raw = await http.read()
            rest, long_values = await take_apart(raw)
            completion = self.engine.read(http.path, rest)
            reads = bool(self._local.most_tokens) or (
                self._reads_prompts and self.workers.cache_prompts()
            )
            # Restoring the long values takes time, and only the comparison with caches needs it.
            body = long_values.put_back(completion.fields) if reads else None
        except KvflowError as error:
            self.metrics.refused(error.code)
            raise
        answer = ClientAnswer(http, self.measures)
        with self.count_running():
            try:
                async with self._in_time():
                    prompts = NO_PROMPTS if body is None else await self._prompts(body)
                    request = Forwarded(
                        self._session, http.path, raw, _forwarded_headers(http) | _JSON
                    )
                    return await self._on_some_pair(request, answer, completion, prompts)
            except PairFailedError as error:
                return await answer.fail(error.failure, error.answer)
            except (TimeoutError, NoWorkerError) as error:
                return await answer.fail(_ENDED if self._ending else failure_of(error))

    @asynccontextmanager
    async def _in_time(self) -> AsyncGenerator[None, None]:
        """End the block with TimeoutError after `request_timeout_s`, or at `end_requests`."""
        async with asyncio.timeout(self._timeout_s) as timeout:
            self._timeouts.add(timeout)
            try:
                yield
            finally:
                self._timeouts.discard(timeout)

    async def _on_some_pair(
        self, request: Forwarded, answer: ClientAnswer, completion: Completion, prompts: Prompts
    ) -> web.StreamResponse:
        """Serve the request on the first pair that can. Raises: PairFailedError, NoWorkerError."""
        loop = asyncio.get_running_loop()
        tries = Tries(self._retry_s, self.engine.retried_statuses)
        while True:
            prefill, decode = await self._next_workers(tries, completion, prompts)
            alone = None
            if not tries.needs_pair:
                alone = self._local.begin(completion, decode, prompts, tries.missing)
            try:
                with ExitStack() as stack:
                    if alone is not None:
                        stack.enter_context(alone)
                        answer.on_first_token = alone.computed
                    elif prefill is not None:
                        stack.enter_context(prefill.sent(prompts))
                        answer.on_first_token = _nothing
                    stack.enter_context(decode.sent(prompts))
                    partner = prefill if alone is None else None
                    async with completion.open_pair(request, partner, decode) as pair:
                        done = await _relayed(pair, answer)
            except PairFailedError as error:
                self._note(error, tries, prefill if alone is None else None, decode)
            else:
                for worker in pair.asked:
                    if worker is decode and answer.cut_off is not None:
                        worker.mark_lost(answer.cut_off.why, loop.time())
                    else:
                        worker.mark_served()
                return done

    def _note(
        self, error: PairFailedError, tries: Tries, prefill: Worker | None, decode: Worker
    ) -> None:
        """Record that this pair, or decode alone, failed a request.

        Raises: `error`, if no other try is allowed.
        """
        if isinstance(error, LegFailedError):
            error.worker.mark_lost(error.why, asyncio.get_running_loop().time())
        elif error.passes or error.failure.status == 500:
            # The error does not show which worker is at fault, so both are checked.
            for worker in (prefill, decode):
                if worker is not None:
                    worker.check_due.set()
        if prefill is None:
            tries.note_alone(error)
        else:
            tries.note(error, prefill, decode)
        self.metrics.retried(error.failure.code)
        _log.info(
            "not served by %s and %s, trying again: %s",
            "no prefill" if prefill is None else prefill.url,
            decode.url,
            error.failure.summary,
        )

    async def _prompts(self, body: PromptFields) -> Prompts:
        return Prompts(
            await body.chains(), await block_hashes(body, self.workers.block_sizes(), self._encoder)
        )

    async def _next_workers(
        self, tries: Tries, completion: Completion, prompts: Prompts
    ) -> tuple[Worker | None, Worker]:
        """Return the pair for the next try, or a decode that can serve the request alone.

        Waits first if no worker of a role gets requests, or if `tries` has no untried pair.

        Raises: PairFailedError or NoWorkerError if no further try is allowed.
        """
        may_begin = False
        while True:
            try:
                prefills, decodes = (
                    self.workers.ranked(role, tries.failed, prompts) for role in ROLES
                )
            except NoWorkerError as error:
                if (decode := self._alone(tries, completion, prompts)) is not None:
                    return None, decode
                came_up = await self._pause(self.workers.came_up.wait, tries)
                if not came_up:
                    raise tries.error or error from None
                continue
            if (pair := tries.untried(prefills, decodes)) is not None:
                return pair
            if may_begin:
                # `next` finds a pair: each worker that `ranked` returns fits one of the other role.
                return next(fitting(prefills, decodes))
            assert tries.error is not None
            may_begin = await self._pause(functools.partial(asyncio.sleep, tries.pause_s()), tries)
            if not may_begin:
                raise tries.error

    def _alone(self, tries: Tries, completion: Completion, prompts: Prompts) -> Worker | None:
        """Return a decode that can serve the request while no prefill gets requests."""
        if tries.needs_pair:
            return None
        try:
            decodes = self.workers.ranked("decode", tries.failed, prompts)
        except NoWorkerError:
            return None
        for one in decodes:
            if self._local.begin(completion, one, prompts, tries.missing) is not None:
                return one
        return None

    async def _pause(self, wait: Callable[[], Awaitable[object]], tries: Tries) -> bool:
        """Wait before another try. Return False if time is up or too many requests wait."""
        if self.waiting >= self._max_waiting:
            return False
        began_s = asyncio.get_running_loop().time()
        self.waiting += 1
        try:
            async with asyncio.timeout(tries.left_s):
                await wait()
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1
            tries.left_s -= asyncio.get_running_loop().time() - began_s
        return True

    async def ask(
        self,
        worker: Worker,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> Any:
        """Return a worker's JSON answer, or None if none arrives or the status is not 200.

        Raises: RefusedError if the worker has other keys than this router.
        """
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        try:
            async with self._session.request(
                method, f"{worker.url}{path}", data=body, headers=headers, timeout=timeout
            ) as answer:
                raw = await answer.read()
                if answer.status in (401, 403):
                    reason = Failure.read(answer.status, raw).message
                    raise RefusedError(
                        f"{worker.role} {worker.url} has other keys than this router: {reason}"
                    )
                return msgspec.json.decode(raw) if answer.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError):
            return None

    async def ask_as_operator(
        self, worker: Worker, path: str, method: str = "GET", body: bytes | None = None
    ) -> Any:
        """Call `ask` with the operator's key, for a route that only operators may use."""
        return await self.ask(worker, path, method, body, bearer(self.keys.of_operator))

    async def forward(self, worker: Worker, http: web.Request) -> web.Response:
        """Return a worker's answer to this request, whatever its status, or a 502 if none comes."""
        url = f"{worker.url}{http.rel_url.raw_path_qs}"
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        headers, raw = _forwarded_headers(http), await http.read()
        # vLLM refuses a body of any other type.
        if raw:
            headers |= _JSON
        if (most := self.workers.max_model_len) is not None:
            headers[MAX_MODEL_LEN_HEADER] = str(most)
        try:
            async with self._session.request(
                http.method,
                # `encoded` keeps yarl from decoding and quoting the client's path again.
                URL(url, encoded=True),
                data=raw,
                headers=headers,
                timeout=timeout,
            ) as answer:
                return copied(answer, await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError):
            return Failure(
                502, str(Code.PEER_LOST), f"the {worker.role} worker did not answer"
            ).response(http.path)


def _nothing() -> None:
    """Do nothing: a pair's first token releases nothing."""


async def _relayed(pair: Pair, answer: ClientAnswer) -> web.StreamResponse:
    found = await pair.answer()
    if not isinstance(found, web.Response):
        return await answer.relay(pair, found)
    found.headers.update(pair.headers)
    return found


def _forwarded_headers(http: web.Request) -> dict[str, str]:
    headers = {name: http.headers[name] for name in _FORWARDED if name in http.headers}
    return headers | {REQUEST_ID_HEADER: CURRENT.get().request_id}
