"""The router's view of its workers: which are up, and which are best for a request."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvflow.http.errors import Failure
from kvflow.protocols.errors import Code, KvflowError
from kvflow.router.cache_view import NO_PROMPTS, CacheView, Prompts
from kvflow.router.identity import Identify, Identity, NotServingError, Traits
from kvflow.router.policies import Policy

_log = logging.getLogger("kvflow.router")
ROLES = ("prefill", "decode")
_OTHER = {"prefill": "decode", "decode": "prefill"}
CHECK_TIMEOUT_S = 3.0
# A worker that is down is checked often, because requests may be waiting for it.
DOWN_CHECK_S = 0.25
LEAST_CHECK_S = 0.05  # shortest time between two checks of one worker, even on request
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0
_NOT_CHECKED = "not checked yet"
_NUMBERS = re.compile(r"[0-9]+")


_turns = itertools.count(1)


class NoWorkerError(KvflowError):
    """No worker of a role gets requests now. A retry may find one."""

    code = Code.CAPACITY

    def __init__(self, role: str, troubles: dict[Worker, str]) -> None:
        """`troubles` says of each worker of the role why it gets no requests."""
        first = next((f": {worker.url}: {why}" for worker, why in troubles.items()), "")
        super().__init__(f"no {role} worker is up ({len(troubles)} known){first}")


def unreachable(error: aiohttp.ClientConnectorError) -> str:
    return f"cannot be reached ({error.os_error.strerror or error.os_error})"


class Worker:
    """One prefill or decode behind the router.

    A worker whose connection is lost is in backoff for a while, even if its /health is fine. Other
    workers are preferred meanwhile. Each further loss in a row makes the backoff longer. The
    backoff ends early when a request succeeds, or when another process answers at the same address.
    """

    def __init__(self, role: str, url: str, *, follows: bool = False) -> None:
        """`follows` is True for a worker that may come back in the other role.

        Otherwise the worker must report `role` as its role, or as the role that it was started with
        (it may have switched since).
        """
        self.id = str(uuid.uuid4())
        self.role = role
        self.url = url.rstrip("/")
        self.up = False
        self.leaving = False  # it gets no new requests, and is forgotten when idle
        self.unavailable_reason = _NOT_CHECKED
        self.running = 0
        self.served = 0
        self.turn = 0  # number of its latest request; all workers share one numbering
        self.cache = CacheView(self.url)
        self.prefix_hits = 0
        self.local_prompts = 0  # requests that it was sent alone, without a prefill
        self.computing = 0  # tokens of their prompts that it has still to compute
        self.bootstrap_port: int | None = None
        self.learned: object = None  # what the engine has learned since the worker came up
        self.identity: Identity | None = None  # result of the last successful check
        self.model = ""
        self.fingerprint = ""
        self.incarnation = ""
        self._on_idle: Callable[[], None] = lambda: None
        self._declared = None if follows else role
        self.check_due = asyncio.Event()
        self._losses = 0  # losses in a row
        self._backoff_until_s = 0.0

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def reason(self) -> str:
        """The reason why the worker cannot get requests, or "" if it can."""
        return self.unavailable_reason or ("it leaves this router" if self.leaving else "")

    @property
    def usable(self) -> bool:
        """True while the worker gets requests, provided that a worker of the other role fits it."""
        return self.up and not self.leaving

    @property
    def computes_prompts(self) -> bool:
        """True if the worker is a decode that computes prompts without a prefill."""
        return self.identity is not None and self.identity.computes_prompts

    @property
    def traits(self) -> Traits:
        return Traits() if self.identity is None else self.identity.traits

    def fits(self, other: Worker) -> bool:
        """Return True if these two workers can serve a request together."""
        return not self.traits.conflict_with(other.traits)

    def mark_down(self, reason: str) -> None:
        """Take the worker out of service until the next successful check."""
        # A reason that differs only in its numbers is not logged again at every check.
        if self.up or _NUMBERS.sub("", reason) != _NUMBERS.sub("", self.unavailable_reason):
            _log.warning("%s %s is down: %s", self.role, self.url, reason)
        self.up, self.unavailable_reason = False, reason
        self.learned = None

    def mark_lost(self, reason: str, now: float) -> None:
        """Record that a connection to the worker failed or was lost.

        The worker is down until a check succeeds, and may still be in backoff after that.
        """
        self._backoff_until_s = now + min(FIRST_BACKOFF_S * 2**self._losses, LONGEST_BACKOFF_S)
        # The bound keeps `2**self._losses` small for a worker that is lost for days.
        self._losses = min(self._losses + 1, 16)
        # If the worker is already down, keep the reason, which says more than a failed request.
        if self.up:
            self.mark_down(reason)
        self.check_due.set()

    def mark_served(self) -> None:
        """End the backoff after a first token, or an answer that shows no fault of the worker."""
        self._losses, self._backoff_until_s = 0, 0.0

    def mark_up(self, identity: Identity) -> None:
        """Put the worker into service after a check, or mark it down if its role is wrong."""
        if identity.role not in ROLES or self._declared not in (
            None,
            identity.role,
            identity.started_as,
        ):
            wanted = self._declared or "prefill or decode"
            self.mark_down(
                f"it is not a {wanted} worker: its disaggregation_mode is {identity.role!r}"
            )
            return
        if identity.role != self.role:
            _log.info("%s is a %s worker now", self.url, identity.role)
            self.role = identity.role
            self.cache.forget()
        self.identity = identity
        self.bootstrap_port, self.model = identity.bootstrap_port, identity.model
        self.fingerprint = identity.fingerprint
        # A new process has its own cache, and the losses of its predecessor do not count.
        if identity.incarnation != self.incarnation:
            self.mark_served()
            self.cache.begin_anew()
        self.cache.prefixes.resize(identity.cache_tokens)
        self.cache.follow(identity.events)
        if not self.up or identity.incarnation != self.incarnation:
            _log.info("%s %s is up", self.role, self.url)
        self.incarnation = identity.incarnation
        self.up, self.unavailable_reason = True, ""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count one more request at the worker until the `with` statement ends."""
        self.running += 1
        self.served += 1
        self.turn = next(_turns)
        try:
            yield
        finally:
            self.running -= 1
            if self.leaving and not self.running:
                self._on_idle()

    def sent(self, prompts: Prompts) -> AbstractContextManager[None]:
        """Record a request with these prompts. Leave the `with` block when it is answered."""
        self.prefix_hits += self.cache.matched(prompts) > 0
        return self.cache.expecting(prompts)

    def leave(self, on_idle: Callable[[], None]) -> None:
        """Take no more requests. `on_idle` is called when the last one is answered."""
        self.leaving, self._on_idle = True, on_idle
        if not self.running:
            on_idle()

    def in_backoff(self, now: float) -> bool:
        return now < self._backoff_until_s

    def summary(self, trouble: str) -> dict[str, Any]:
        """Return the worker's entry in /server_info. `trouble` is why it gets no requests."""
        state = {
            "up": self.up,
            "leaving": self.leaving,
            "running": self.running,
            "trouble": trouble,
        }
        return {"url": self.url, "role": self.role, **state}


class Workers:
    """All workers. Each is checked every `poll_s` seconds, and more often while it is down."""

    def __init__(
        self,
        prefill: Iterable[str],
        decode: Iterable[str],
        session: aiohttp.ClientSession,
        poll_s: float,
        policy: Policy,
        identify: Identify,
    ) -> None:
        self.all = [
            *(Worker("prefill", url) for url in prefill),
            *(Worker("decode", url) for url in decode),
        ]
        self._session = session
        self._poll_s, self._policy, self._identify = poll_s, policy, identify
        self._watches: dict[Worker, asyncio.Task[None]] = {}
        # Set, and replaced by a new event, when a worker becomes usable or changes role or traits.
        self.came_up = asyncio.Event()

    async def start(self) -> None:
        """Check all workers once, and start the regular checks."""
        found = dict(zip(self.all, await asyncio.gather(*map(self._found, self.all)), strict=True))
        model = _model_of_most(found)
        # Workers with `model` are taken first, because they decide which model the router serves.
        for worker, identity in found.items():
            if isinstance(identity, Identity) and identity.fingerprint == model:
                self._take(worker, identity)
        for worker, identity in found.items():
            if not worker.usable:
                self._take(worker, identity)
            self._watch_on(worker)

    async def close(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await asyncio.gather(*(worker.cache.close() for worker in self.all))

    async def add(self, worker: Worker) -> None:
        """Add a worker and check it once. Further checks follow in the background."""
        self.all.append(worker)
        self._watch_on(worker)
        await self._check(worker)

    def leave(self, worker: Worker) -> None:
        """Send the worker no more requests, and forget it once the last one ends. Idempotent."""
        if not worker.leaving:
            _log.info("%s %s leaves, with %d requests", worker.role, worker.url, worker.running)
            worker.leave(functools.partial(self._forget, worker))

    def stay(self, worker: Worker) -> None:
        """Let a leaving worker stay, and send it requests again. Idempotent."""
        worker.leaving = False
        worker.check_due.set()
        self._tell_waiting()

    def _forget(self, worker: Worker) -> None:
        self._watches.pop(worker).cancel()
        worker.cache.follow(None)
        self.all.remove(worker)
        _log.info("%s %s has left", worker.role, worker.url)

    def of(self, role: str) -> list[Worker]:
        return [worker for worker in self.all if worker.role == role]

    def ranked(
        self, role: str, failed: Mapping[Worker, int], prompts: Prompts = NO_PROMPTS
    ) -> list[Worker]:
        """Return the workers for the next try of a request, the best first.

        Workers that have failed this request least often come first. Among equals, those not in
        backoff come first, and then the policy decides.

        Raises: NoWorkerError.
        """
        choices = self._paired(role)
        if not choices:
            troubles = self.troubles().items()
            raise NoWorkerError(role, {one: why for one, why in troubles if one.role == role})
        now = asyncio.get_running_loop().time()
        trouble = {worker: (failed.get(worker, 0), worker.in_backoff(now)) for worker in choices}
        fit = min(trouble.values())
        # An idle worker that failed must not make all others look overloaded.
        least = min(worker.running for worker in choices if trouble[worker] == fit)
        return sorted(choices, key=lambda w: (*trouble[w], *self._policy.order(w, least, prompts)))

    def complete(self) -> bool:
        """Return True if there are a prefill and a decode that can serve requests together."""
        return all(self._usable(role) and self._paired(role) for role in ROLES)

    def troubles(self) -> dict[Worker, str]:
        """Return the reason why each worker gets no requests, or "" for a worker that gets them."""
        others = {role: self._traits(_OTHER[role]) for role in ROLES}
        return {worker: _trouble(worker, others[worker.role]) for worker in self.all}

    def trouble(self, worker: Worker) -> str:
        """Return the reason why one worker gets no requests, or "" if it gets them."""
        return _trouble(worker, self._traits(_OTHER[worker.role]))

    def _usable(self, role: str) -> list[Worker]:
        return [worker for worker in self.of(role) if worker.usable]

    def _traits(self, role: str) -> set[Traits]:
        return {worker.traits for worker in self._usable(role)}

    def _paired(self, role: str) -> list[Worker]:
        """Return a role's usable workers that fit a usable worker of the other role.

        Returns all of them if the other role has no usable worker.
        """
        others = self._traits(_OTHER[role])
        alike = {
            one
            for one in self._traits(role)
            if not others or not all(map(one.conflict_with, others))
        }
        return [worker for worker in self._usable(role) if worker.traits in alike]

    @property
    def model(self) -> str:
        """The name of the model that decodes serve, or "" while none is known."""
        return next((worker.model for worker in self.of("decode") if worker.model), "")

    @property
    def max_model_len(self) -> int | None:
        """The tokens of prompt and completion that every pair can serve; None if no worker says."""
        serving = (worker.identity for role in ROLES for worker in self._paired(role))
        said = (one.max_model_len for one in serving if one is not None)
        return min((most for most in said if most is not None), default=None)

    def cache_prompts(self) -> bool:
        """Return True if at least one worker has a prefix cache."""
        return any(worker.cache.caches for worker in self.all)

    def block_sizes(self) -> set[int]:
        """Return the block sizes of the workers whose cache events are followed."""
        return {size for worker in self.all if (size := worker.cache.block_size) is not None}

    def _watch_on(self, worker: Worker) -> None:
        self._watches[worker] = asyncio.create_task(self._watch(worker))

    async def _watch(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(LEAST_CHECK_S)
            wait_s = self._poll_s if worker.up else min(self._poll_s, DOWN_CHECK_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await worker.check_due.wait()
            worker.check_due.clear()
            await self._check(worker)

    async def _check(self, worker: Worker) -> None:
        found = await self._found(worker)
        # Taking a worker that left during the check would start a feed that never ends.
        if worker in self._watches:
            self._take(worker, found)

    async def _found(self, worker: Worker) -> Identity | str:
        """Return a worker's current identity, or the reason why it cannot serve."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await self._ask(worker)
        except TimeoutError:
            return f"/health took more than {CHECK_TIMEOUT_S:g} s"
        except aiohttp.ClientConnectorError as error:
            return unreachable(error)
        except (NotServingError, aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            return str(error) or type(error).__name__
        except Exception as error:  # noqa: BLE001
            # The watch must survive any error, or the worker would never be checked again.
            _log.exception("asking %s failed", worker.url)
            return f"asking it failed: {type(error).__name__}: {error}"

    async def _ask(self, worker: Worker) -> Identity | str:
        async with self._session.get(f"{worker.url}/health") as health:
            if health.status != 200:
                reason = Failure.read(health.status, await health.read()).message
                return f"/health answered {health.status}: {reason}"
        known = worker.identity if worker.up else None
        return await self._identify(self._session, worker.url, worker.role, known)

    def _take(self, worker: Worker, found: Identity | str) -> None:
        before = (worker.usable, worker.role, worker.traits)
        if isinstance(found, str):
            worker.mark_down(found)
        elif other := self._other_model(worker, found):
            worker.mark_down(other)
        else:
            worker.mark_up(found)
        if worker.usable and before != (True, worker.role, worker.traits):
            if trouble := self.trouble(worker):
                _log.warning("%s %s gets no requests: %s", worker.role, worker.url, trouble)
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        came_up, self.came_up = self.came_up, asyncio.Event()
        came_up.set()

    def _other_model(self, worker: Worker, identity: Identity) -> str:
        """Return how a worker's model conflicts with those of other workers, or "" if it does not.

        It conflicts if it has changed while others still serve the worker's previous model. It also
        conflicts if a prefill and a decode of this router serve another model, and no pair serves
        this one. Either model could then answer a request.
        """
        before, now = worker.fingerprint, identity.fingerprint
        others = [one for one in self.all if one is not worker and one.usable and one.fingerprint]
        if before and before != now and any(one.fingerprint == before for one in others):
            return f"it has another model now: fingerprint {now!r} instead of {before!r}"
        prefills, decodes = (
            {one.fingerprint: one for one in others if one.role == role} for role in ROLES
        )
        served = {
            fingerprint: one for fingerprint, one in decodes.items() if fingerprint in prefills
        }
        if not now or not served or now in served:
            return ""
        fingerprint, one = next(iter(served.items()))
        return (
            f"it serves {identity.model!r} ({now}), and other workers here {one.model!r} "
            f"({fingerprint})"
        )


def _trouble(worker: Worker, others: Collection[Traits]) -> str:
    """Return why a worker gets no requests, or "" if it gets them.

    `others` are the traits of all usable workers of the other role.
    """
    conflicts = [worker.traits.conflict_with(traits) for traits in others]
    if worker.reason or not conflicts or not all(conflicts):
        return worker.reason
    return f"no {_OTHER[worker.role]} here fits it: it has {conflicts[0]}"


def _model_of_most(found: Mapping[Worker, Identity | str]) -> str:
    """Return the fingerprint of the model that the router serves at the start.

    A model that workers of both roles serve is preferred, and then one that most workers serve.
    """
    roles: dict[str, list[str]] = {}
    for worker, identity in found.items():
        if isinstance(identity, Identity) and identity.fingerprint:
            roles.setdefault(identity.fingerprint, []).append(identity.role or worker.role)
    return max(roles, key=lambda model: (len(set(roles[model])), len(roles[model])), default="")
