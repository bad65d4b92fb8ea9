"""Engines without an event loop. Each drives its node through the shipped thread front, and polls
the front for events.

The front posts calls to the node's loop, where they run a moment later. The engines verify what the
front promises: the events of a room come in order, exactly one states how the room ended, and pages
become idle only when no reader or writer can reach them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from kvflow.aio import in_thread, run_to_end
from kvflow.handlers.shell import Answer
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.node.threads.decode import DecodeThread
from kvflow.node.threads.prefill import PrefillThread
from kvflow.node.threads.rooms import DecodeThreadRoom, PrefillThreadRoom, RoomEvent
from kvflow.proof.sim.content import content
from kvflow.proof.sim.engine import Job
from kvflow.proof.sim.engine_pages import EnginePages
from kvflow.proof.sim.loop import Process
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.pages import Books, Borrower, WatchedExternalPages
from kvflow.proof.sim.swap import swapped
from kvflow.proof.sim.times import HEAR_S, LOOK_FOR_PAGES_S, POLL_S
from kvflow.proof.sim.virtual_thread import LockStep, VirtualLoopThread
from kvflow.protocols.arguments import NO_PAGES, pages_wanted, prompt_digest
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import DataPlane
from kvflow.protocols.wire.messages import GrantId
from kvflow.protocols.wire.ranks import DpRankError

F = TypeVar("F", DecodeThread, PrefillThread)
N = TypeVar("N", DecodeNode, PrefillNode)
R = TypeVar("R", DecodeThreadRoom, PrefillThreadRoom)
# Share of rooms that are opened by a separate thread, which may be preempted during the call.
BLOCKS_IN = 0.3


class _Request(Generic[R]):
    """One request. `handle` is None until its room is open."""

    def __init__(self, job: Job, oracle: Oracle) -> None:
        self.job, self.owner = job, Borrower(job.room)
        self.handle: R | None = None
        self.by_event = bool(oracle.loop.rng.getrandbits(1))
        """True if its pages return at its last event. False if they return once they are idle."""
        self.pages: PageIndices = NO_PAGES
        self.kinds: list[str] = []  # kinds of its events so far
        self.over = False  # True once the request no longer needs its pages
        self.closed: Cause | None = None  # cause of a close before the room was open
        self.matched: Answer[None] = Answer()
        self.ended: Answer[bytes] = Answer()

    def __repr__(self) -> str:
        return f"request(room {self.job.room}, {self.handle!r})"


class ThreadEngine(Generic[F, N, R]):
    make_front: Callable[..., F]
    # Events that may precede the ending of a room, in order.
    before_the_end: Sequence[str]
    success: str

    def __init__(
        self,
        name: str,
        process: Process,
        pool: PagedPool,
        plane: DataPlane,
        books: Books,
        oracle: Oracle,
        fails: Callable[[], bool],
        **options: Any,
    ) -> None:
        self._name, self._process, self._books, self._oracle = name, process, books, oracle
        self._layout = pool.layout
        self._store = WatchedExternalPages(books)
        self._allocator = EnginePages(books, self._store, fails)
        self._requests: dict[_Request[R], None] = {}
        self._polling: asyncio.Task[None] | None = None
        self._steps: list[LockStep[Any]] = []
        self.handled = 0
        self._front: F = self.make_front(
            pool, plane, pages=self._store, make_thread=self._thread, **options
        )
        self._process.run(self._front.start)
        self.node: N = self._front.ask(lambda node: node)  # type: ignore[assignment]

    def _thread(self, name: str, _: object) -> VirtualLoopThread:
        return VirtualLoopThread(name, self._process, self._oracle.loop)

    # --- requests

    async def _opened(self, request: _Request[R], open_room: Callable[[], R]) -> None:
        """Open a request's room, even if the caller is cancelled meanwhile. Raises: KvflowError."""

        def opened() -> None:
            self._requests[request] = None
            try:
                request.handle = open_room()
            except BaseException:
                del self._requests[request]
                raise
            if request.closed is not None:
                self._close_room(request, request.closed)

        self.handled += 1
        request.job.close = lambda cause: self._close_room(request, cause)
        if self._polling is None:
            self._polling = asyncio.ensure_future(self._poll_on())
            self._polling.add_done_callback(self._polled)
        if self._oracle.loop.rng.random() < BLOCKS_IN:
            step = LockStep(self._oracle.loop, self._process, opened)
            self._steps.append(step)
            await run_to_end(step.answer)
        else:
            opened()

    def _over(self, request: _Request[R]) -> None:
        request.over = True
        if request.handle is None:
            self._give_back(request)
        else:
            self._look()

    def _give_back(self, request: _Request[R]) -> None:
        self._allocator.free(request.pages)
        request.pages = NO_PAGES

    def _close_room(self, request: _Request[R], cause: Cause) -> None:
        if request.handle is None:
            request.closed = cause
            return
        request.handle.close(cause)
        if not request.ended.given:
            self._oracle.loop.later(HEAR_S, self._check_ended, request, self._oracle.loop.time())

    # --- events

    async def _poll_on(self) -> None:
        loop = self._oracle.loop
        while self._requests:
            waits = any(not request.ended.given or not request.over for request in self._requests)
            await asyncio.sleep(loop.rng.uniform(*(POLL_S if waits else LOOK_FOR_PAGES_S)))
            self._look()
        self._polling = None

    def _polled(self, polling: asyncio.Task[None]) -> None:
        if not polling.cancelled() and (error := polling.exception()) is not None:
            self._broken("I7", f"polling its events has failed: {error!r}")

    def _look(self) -> None:
        events: list[RoomEvent[Any]] = self._front.poll()
        for event in events:
            self._hear(event)
        for request in list(self._requests):
            if request.over and request.pages.size and self._is_idle(request):
                self._give_back(request)
            if request.over and not request.pages.size and "released" in request.kinds:
                del self._requests[request]

    def _is_idle(self, request: _Request[R]) -> bool:
        if request.by_event:
            return "released" in request.kinds
        return self._front.wait_released(request.pages, timeout_s=0.0)

    def _hear(self, event: RoomEvent[R]) -> None:
        # An event may come before the request has its handle, so find the request by the context.
        request: _Request[R] = event.room.context
        if request not in self._requests:
            return self._broken("I4", f"{event.kind} of {request!r}, which is over")
        kinds, kind = request.kinds, event.kind
        kinds.append(kind)
        self._oracle.trace(lambda: f"{self._name}: room {event.room.room}: {kind}")
        ends = [one for one in kinds if one in (self.success, "failed")]
        before = kinds[: len(kinds) - len(ends) - (kind == "released")]
        in_order = [one for one in self.before_the_end if one in before] == before
        if len(ends) > 1 or kinds.count("released") > 1 or not in_order:
            return self._broken("I4", f"the events of {request!r} are {kinds}")
        if kind == "matched":
            request.matched.give(None)
        elif kind == "released":
            if not ends:
                self._broken("I4", f"{request!r} is released, and nobody was told how it ended")
            if request.owner.grant is not None and self._store.busy(request.pages).size:
                self._broken("I2", f"{request!r} is released, and its pages are busy")
        elif ends:
            self._end(request, event)
        return None

    def _end(self, request: _Request[R], event: RoomEvent[R]) -> None:
        request.matched.give(None, event.error)
        request.ended.give(event.handoff, event.error)
        if request.job.topples is not None:
            request.job.topples()

    # --- the end

    async def close(self) -> None:
        """Close the node from a separate thread, and verify that its requests end."""
        closing = LockStep(self._oracle.loop, self._process, self._front.close)
        self._steps.append(closing)
        unproven = await closing.answer
        for step in self._steps:
            await asyncio.wait([step.answer])
        self._look()
        lost: dict[int, set[int]] = {}  # pages by room number, which several rooms may share
        for loan in unproven:
            if self._store.busy(loan.pages).size < loan.pages.size:
                text = f"pages of room {loan.room}, which is in doubt, are idle"
                self._broken("I2", f"the thread is closed, and {text}")
            lost.setdefault(loan.room, set()).update(loan.pages.tolist())
        for request in self._requests:
            if not request.ended.given:
                text = f"the thread is closed, and the client of {request!r} was not told"
                self._broken("I4", text)
            pages = request.pages.tolist()
            if request.job.room in lost and lost[request.job.room].issuperset(pages):
                continue
            if "released" not in request.kinds:
                text = f"the thread is closed, {request!r} is neither released nor without proof"
                self._broken("I5", text)
            if self._store.busy(request.pages).size:
                text = f"the thread is closed, {request!r} is over, and its pages are busy"
                self._broken("I5", text)

    def part(self) -> None:
        """End the engine with its process. Pages on loan lose their owner once they are idle."""
        self._look()
        for request in self._requests:
            if self._store.busy(request.pages).size:
                request.owner.engine_gone = True
            else:
                self._give_back(request)
        if self._polling is not None:
            self._polling.cancel()

    def abandon(self) -> None:
        for step in self._steps:
            step.abandon()

    # --- checks

    def left(self, in_doubt: set[GrantId]) -> list[str]:
        """Return a line for each thing not at rest. Requests with grants `in_doubt` may remain."""
        found = [
            f"{self._name}: {request!r} has had {request.kinds}"
            for request in self._requests
            if request.owner.grant not in in_doubt
        ]
        if (out := self._books.out) != (busy := self._store.busy_pages):
            found.append(f"{self._name}: {busy} places are busy, and {out} are not free")
        if self._front._thread is not None and self._front._thread.errors:
            found.append(f"{self._name}: {self._front._thread.errors} posted calls failed")
        return found

    def _check_ended(self, request: _Request[R], since_s: float) -> None:
        seen = self._oracle.by_process[self._process]
        if seen.up and seen.troubled_at_s < since_s and not request.ended.given:
            text = f"{request!r} was closed {HEAR_S:g} s ago, and its client was not told"
            self._broken("I4", text)

    def _broken(self, invariant: str, text: str) -> None:
        self._oracle.broken(invariant, f"{self._name}: {text}")


class DecodeThreadEngine(ThreadEngine[DecodeThread, DecodeNode, DecodeThreadRoom]):
    """Engine at decode. It lends its own pages, and holds them for a while after they land."""

    make_front = DecodeThread
    before_the_end, success = ("begun", "opened"), "landed"

    async def play(self, job: Job) -> None:
        if job.refused:
            return self._refuse(job, job.cause(Code.CAPACITY, "decode will not have it"))
        request: _Request[DecodeThreadRoom] = _Request(job, self._oracle)
        try:
            await self._begin(request)
            if job.offers_after_s is not None:
                await asyncio.sleep(job.offers_after_s)
                self._offer(request)
            handoff = await request.ended.get()
            self._check_content(request)
            if handoff != job.handoff:
                self._broken("I9", f"room {job.room} got another room's handoff")
            await asyncio.sleep(job.kept_s)
            self._check_content(request)
            job.succeeded = True
        # The other leg may wait at any group of the prefill, so notify all groups of the refusal.
        except DpRankError as error:
            self._refuse(job, error.cause())
            raise
        except BaseException:
            self._close_room(request, job.cause(Code.CLIENT_GONE, "it ends"))
            raise
        finally:
            self._over(request)
        return None

    def _refuse(self, job: Job, cause: Cause) -> None:
        named = job.named()
        self._front.refuse(job.room, prefill=named.prefill, cause=cause, dp_rank=named.dp_rank)

    async def _begin(self, request: _Request[DecodeThreadRoom]) -> None:
        job = request.job
        named = job.named()
        of_room: dict[str, Any] = {
            "prefill": named.prefill,
            "prompt": job.prompt,
            "deadline_s": job.deadline_s,
            "dp_rank": named.dp_rank,
            "context": request,
        }
        if job.offers_after_s is not None:
            return await self._opened(request, lambda: self._front.announce(job.room, **of_room))
        try:
            wanted = pages_wanted(self._layout, len(job.prompt), 0)
            pages = self._allocator.take(wanted, request.owner)
        except KvflowError as error:
            self._refuse(job, error.cause())
            raise
        request.pages = pages
        of_room["pages"] = pages
        return await self._opened(request, lambda: self._front.open(job.room, **of_room))

    def _offer(self, request: _Request[DecodeThreadRoom]) -> None:
        assert request.handle is not None
        try:
            request.pages = self._allocator.take(request.handle.counts, request.owner)
            request.handle.offer(request.pages)
        except KvflowError as error:
            self._close_room(request, error.cause())

    def _check_content(self, request: _Request[DecodeThreadRoom]) -> None:
        digest, books = prompt_digest(request.job.prompt), self._books
        for index, place in enumerate(request.pages.tolist()):
            if books.bytes.read(place) != content(digest, index, books.bytes.size(place)):
                text = f"{books.name(place)} has other bytes than its own"
                self._broken("I14", f"{request!r} has landed, and {text}")


class PrefillThreadEngine(ThreadEngine[PrefillThread, PrefillNode, PrefillThreadRoom]):
    """Engine at prefill. It computes chunks into its own pages, and sends them."""

    make_front = PrefillThread
    before_the_end, success = ("matched",), "done"

    async def play(self, job: Job) -> None:
        if job.refused:
            cause = job.cause(Code.CAPACITY, "the engine will not have it")
            return self._front.refuse(job.room, cause)
        request: _Request[PrefillThreadRoom] = _Request(job, self._oracle)
        try:
            await self._begin(request)
            await request.matched.get()
            await self._compute(request)
            await request.ended.get()
            job.succeeded = True
        except KvflowError as error:
            self._close_room(request, error.cause())
            raise
        except BaseException:
            self._close_room(request, job.cause(Code.CLIENT_GONE, "it ends"))
            raise
        finally:
            self._over(request)
        return None

    async def _begin(self, request: _Request[PrefillThreadRoom]) -> None:
        job = request.job

        def open_room() -> PrefillThreadRoom:
            return self._front.open(
                job.room, prompt=job.prompt, deadline_s=job.deadline_s, context=request
            )

        await self._opened(request, open_room)
        # The report that prefill begins is optional, so only half of the requests make it.
        if request.handle is not None and self._oracle.loop.rng.getrandbits(1):
            request.handle.begin()
        wanted = self._layout.wanted(len(job.prompt))
        request.pages = self._allocator.take(wanted, request.owner)

    async def _compute(self, request: _Request[PrefillThreadRoom]) -> None:
        job, handle = request.job, request.handle
        assert handle is not None
        chunks = job.placed_chunks(self._layout)
        for number, which in enumerate(chunks):
            if number == job.fails_at:
                cause = job.cause(Code.ENGINE_ERROR, "the engine broke down")
                return self._close_room(request, cause)
            last, chunk = number == len(chunks) - 1, request.pages[which]
            await in_thread(job.model_step(self.node, chunk, which))
            handle.send(chunk, last=last, handoff=job.handoff if last else b"")
        return None


def loans_observed(oracle: Oracle) -> AbstractContextManager[None]:
    """Record the grant under which each decode lends the pages of an engine's request."""
    lend = DecodeEndpoint.lend

    def lent(self: DecodeEndpoint, grant: GrantId, pages: PageIndices, now: float) -> bool:
        room = self.rooms[grant].room
        owners = oracle.by_incarnation[self.core.identity.incarnation].lent.owners
        for place in pages.tolist():
            owner = owners[place]
            if isinstance(owner, Borrower) and owner.room == room and owner.grant is None:
                owner.grant = grant
        return lend(self, grant, pages, now)

    return swapped(DecodeEndpoint, "lend", lent)
