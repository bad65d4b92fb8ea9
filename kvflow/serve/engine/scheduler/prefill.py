"""The prefill engine: each step computes chunks of several prompts, and their full pages are sent
while the next step runs.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections import deque

import numpy as np

from kvflow.aio import Threads
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.page_waiter import PageWaiter
from kvflow.memory.pool import PagedPool
from kvflow.protocols.cache.choices import PrefetchPolicy
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.errors import Cause, Code, KvflowError, LostError, room_error
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.sequence import Prompt, Sequence
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler import scoring
from kvflow.serve.engine.scheduler.beginnings import Beginnings
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.lockstep import Lockstep
from kvflow.serve.engine.scheduler.loop import EngineLoop
from kvflow.serve.engine.scheduler.optimistic import OptimisticStarts, urgency
from kvflow.serve.engine.scheduler.params import (
    EngineLoad,
    EngineOptimism,
    SamplingParams,
    TokenOut,
)
from kvflow.serve.engine.scheduler.prefetch import fetch_beside
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest, PrefillSteps
from kvflow.serve.engine.scheduler.rooms import PrefillRoomPort
from kvflow.serve.engine.scheduler.turn import Turn


class PrefillEngine(EngineLoop):
    """Computes prompts in order of priority, and in order of arrival among equals.

    A step takes at most `chunk_tokens` tokens of each prompt and `max_batch_tokens` in all, or more
    for prompts that cannot be divided (see `LoadedModel.chunk`). It takes prompts of at most
    `max_batch_rooms` rooms; this limit is for tests, because bfloat16 logits depend on the
    composition of the batch.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: PagedPool,
        pages: PageAllocator,
        executor: Threads,
        *,
        chunk_tokens: int = 512,
        max_batch_tokens: int = 512,
        max_batch_rooms: int | None = None,
        optimistic_tries: int = 0,
        lockstep: Lockstep | None = None,
        samples: bool = True,
        cache: PrefixCache | None = None,
        prefetch: PrefetchPolicy = "timeout",
    ) -> None:
        """`optimistic_tries` is how often a prompt may begin before its room is matched; see the
        module `optimistic`. `lockstep` is given if this engine is the first of several ranks.
        `samples` is True if this rank chooses the first tokens. `cache` is the prefix cache of this
        pool; see `PrefillSteps`. `prefetch` decides how long a prompt waits for the pages that it
        loads.

        Raises: LayoutError if the pool does not fit the model, MisuseError if the cache does not.
        """
        super().__init__("prefill")
        self.steps = PrefillSteps(model, pool, pages, executor, samples=samples, cache=cache)
        self._model, self._page_size, self._lockstep = model, pool.layout.page_size, lockstep
        self._beginnings = Beginnings(self.steps, lockstep, self._begins)
        self.limits = EngineLimits(
            model.context_length,
            model.vocab_size,
            self._page_size,
            pages.capacity,
            model.hidden_size,
            whole_prompts=model.whole_prompts,
        )
        self._chunk_tokens, self._max_tokens = max(1, chunk_tokens), max(1, max_batch_tokens)
        self._max_rooms = max_batch_rooms or 1 << 30
        # Ids of requests that wait for decode's half of their room.
        self._unmatched: set[int] = set()
        # Unmatched requests hold no places unless they begin early.
        self._early: OptimisticStarts[PrefillRequest] = OptimisticStarts(optimistic_tries)
        self._waiting: deque[PrefillRequest] = deque()
        self._running: dict[int, PrefillRequest] = {}  # by id, in the order of placement
        # Requests, by id, that have places from the engine. `drop` or a preemption removes them.
        self._placed: dict[int, PrefillRequest] = {}
        self._numbers = itertools.count()
        self._prefetch: PrefetchPolicy = prefetch
        self._turn = Turn(self.steps, prefetch, self._wake.set)
        self._returned = PageWaiter(self._wake.set, pages, self.steps.rows)

    async def close(self) -> None:
        """End every request, and wait for the running step and copies, even if cancelled."""
        try:
            await super().close()
        finally:
            self._returned.close()
            await self._turn.close()

    def _fail_all(self, cause: Cause) -> None:
        for request in [*self._waiting, *self._running.values()]:
            self._fail(request, room_error(cause))

    def load(self) -> EngineLoad:
        return self._early.load(len(self._running), len(self._unmatched), len(self._waiting))

    @property
    def cache(self) -> PrefixCache | None:
        return self.steps.cache

    @property
    def optimism(self) -> EngineOptimism:
        return self._early.counts

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Check a prompt against the model and pool. Raises: MisuseError, CapacityError."""
        self.limits.check_prompt(prompt)
        self.limits.check_sampling(prompt, params)

    async def prefill(
        self,
        room: PrefillRoomPort,
        prompt: Prompt,
        params: SamplingParams,
        *,
        into: PageIndices | None = None,
        namespace: Namespace = ANY,
    ) -> TokenOut:
        """Compute `prompt`, send its pages and row, and hand over the first token.

        Returns that token once everything landed. `into` are places of the caller in which to
        compute: pages, and a row if the pool has rows. Without `into`, the engine takes places,
        begins with the prompt's cached pages, and in the end frees the places or hands them over to
        the cache, under `namespace`. An error or a cancellation closes the room with its cause.

        Raises: MisuseError, CapacityError, the room's error.
        """
        request: PrefillRequest | None = None
        try:
            self._refuse_when_closing()
            self.check(prompt, params)
            await self._model.grammars.compile(params.grammar)
            request = self._new_request(room, prompt, params, namespace=namespace)
            if into is None:
                self.may_begin(request)
            self.matched(request, await self._match(request, into), into)
            first = await request.first
            await room.done()
            self.steps.keep(request)
            if first is None:
                raise room_error(
                    Cause(Code.CLIENT_GONE, "the room ended before its first token was computed")
                )
            return first
        except KvflowError as error:
            room.close(error.cause())
            raise
        except asyncio.CancelledError:
            room.close(Cause(Code.CLIENT_GONE, "the request was cancelled"))
            raise
        finally:
            if request is not None:
                self.drop(request)
            room.close()

    async def _match(self, request: PrefillRequest, into: PageIndices | None) -> int:
        cache, s, matched = self.cache, request.sequence, request.room.matched()
        if cache is None or not cache.has_host or into is not None:
            return await matched
        wanted = s.tokens[: s.prompt_length], request.most_cached, request.namespace
        return await fetch_beside(matched, cache, self._prefetch, *wanted)

    def expect(
        self,
        room: PrefillRoomPort,
        prompt: Prompt,
        params: SamplingParams,
        ticket: int,
        namespace: Namespace = ANY,
    ) -> PrefillRequest:
        """Add a checked `prompt`, to be computed on all ranks after `matched` or `may_begin`.

        The request stays until `drop`. Its `first` reports a failure, and the first token if this
        rank chooses it.

        Raises: AbortedError if the engine is closing.
        """
        self._refuse_when_closing()
        return self._new_request(room, prompt, params, ticket=ticket, namespace=namespace)

    def may_begin(self, request: PrefillRequest) -> None:
        """Let a request begin before its room is matched. Has no effect after the match."""
        if id(request) in self._unmatched:
            self._early.add(request)
            self._wake.set()

    def matched(
        self, request: PrefillRequest, prefix: int, into: PageIndices | None = None
    ) -> None:
        """Record that decode's half of the room arrived.

        Decode already has `prefix` tokens of the prompt. `into` has the same meaning as in
        `prefill`.

        Raises: AbortedError if the engine is closing.
        """
        self._unmatched.discard(id(request))
        self._refuse_when_closing()
        layout = self.steps.layout
        request.sent_pages = layout.first_page(request.sequence.prompt_length, prefix)
        self._enqueue(request, into)

    def has_places(self, request: PrefillRequest) -> bool:
        """Return True if the request has places, so that a step may have named it."""
        return id(request) in self._placed

    def agreed(self, request: PrefillRequest, tokens: int) -> None:
        """Record the answer to `Lockstep.find`. The request begins after `tokens` cached tokens."""
        self._beginnings.agreed(request, tokens)
        # If the request now lacks places, the loop must notice when these become free.
        self._wake.set()

    def flush(self) -> None:
        """Forget all cached pages, on every rank."""
        if self.cache is not None:
            self.cache.flush()
            self._beginnings.flushed(self._placed.values())
            # As in `agreed`.
            self._wake.set()

    def _begins(self, request: PrefillRequest) -> None:
        if (
            request.cached_tokens
            and id(request) in self._running
            and not self._early.holds(request)
        ):
            self._send(request)
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def _new_request(
        self,
        room: PrefillRoomPort,
        prompt: Prompt,
        params: SamplingParams,
        *,
        ticket: int = 0,
        namespace: Namespace = ANY,
    ) -> PrefillRequest:
        sequence = Sequence(("prefill", next(self._numbers)), prompt, 0, self._page_size)
        request = PrefillRequest(
            sequence,
            room,
            params,
            self.steps.adjustments_of(params, sequence),
            ticket=ticket,
            namespace=namespace,
            fewest_tokens=self._model.fewest_tokens,
        )
        self._unmatched.add(id(request))
        return request

    def _enqueue(self, request: PrefillRequest, into: PageIndices | None) -> None:
        if into is not None:
            request.sequence.add(self.steps.layout.split(into))
            self._running[id(request)] = request
        elif self._early.matched(request):
            self.queue_seconds.observe(0.0)
            if not request.is_asking:
                self._send(request)
        else:
            request.queued_at_s = time.perf_counter()
            self._waiting.insert(
                bisect.bisect_right(self._waiting, urgency(request), key=urgency), request
            )
        self._wake.set()
        request.room.on_end(lambda: self._room_ended(request))

    def _room_ended(self, request: PrefillRequest) -> None:
        """Stop computing a request whose room ended; the room's `done` raises the reason."""
        self._running.pop(id(request), None)
        if not request.first.done():
            request.first.set_result(None)

    def _fail(self, request: PrefillRequest, error: KvflowError) -> None:
        self._running.pop(id(request), None)
        if self._early.holds(request):
            self._early.forget(request)
            # The request's task waits for the match. Closing the room ends that wait with `error`.
            request.room.close(error.cause())
        elif not request.first.done():
            request.first.set_exception(error)

    def drop(self, request: PrefillRequest) -> None:
        """Forget the request. Places in use become free when their use ends (I13). Idempotent."""
        self._unmatched.discard(id(request))
        self._running.pop(id(request), None)
        self._early.forget(request)
        if request in self._waiting:
            self._waiting.remove(request)
        self._beginnings.forget(request)
        if self._placed.pop(id(request), None) is not None:
            self.steps.give_back(request)
        else:
            self._turn.over(request)
        self._wake.set()

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            self._returned.look()
            rows: list[Row] = []
            requests: list[PrefillRequest] = []
            if self._is_ready:
                self._take_places()
                rows, requests = self._pick()
            if not rows:
                self.steps.runner.rest()
                await self._sleep()
                continue
            if self._lockstep is not None:
                self._lockstep.announce(rows, requests)
            began_s = time.perf_counter()
            try:
                await self.steps.run(rows, requests)
            # The loop serves all requests, so a failed step ends only the requests in it.
            except Exception as error:  # noqa: BLE001
                self._step_failed(requests, error)
                continue
            if self._lockstep is not None:
                self._lockstep.stepped()
            _mark(requests, began_s)
            for request in requests:
                if id(request) in self._running and not self._early.holds(request):
                    self._send(request)

    def _step_failed(self, requests: list[PrefillRequest], error: Exception) -> None:
        lockstep = self._lockstep
        # The generation already ended, and its requests with it, for a known cause.
        if lockstep is not None and not lockstep.ready:
            if not isinstance(error, LostError):
                self._failed("prefill step", error)
            lockstep.stepped(failed=True)
            return
        cause = self._failed("prefill step", error)
        if lockstep is not None:
            lockstep.break_off(cause)
            lockstep.stepped(failed=True)
        for request in requests:
            self._fail(request, room_error(cause))

    async def _sleep(self) -> None:
        if self._waiting or self._beginnings.are_short or self._early.first is not None:
            self._returned.wait()
        await self._wake.wait()

    def _take_places(self) -> None:
        """Give waiting requests all of their pages and a row at once, in order."""
        self._beginnings.take_missing()
        while self._waiting and self._is_ready:
            request = self._waiting[0]
            if request.first.done():
                self._waiting.popleft()
                continue
            if not self._place(request):
                return
            self._waiting.popleft()
            self.queue_seconds.observe(time.perf_counter() - request.queued_at_s)
            if request.marks is not None:
                request.marks.queued(request.queued_at_s)
            self._beginnings.placed(request)
        while self._is_ready and (early := self._early.first) is not None and self._place(early):
            self._early.began(early)
            self._beginnings.placed(early)

    def _place(self, request: PrefillRequest) -> bool:
        """Give the first request of a queue its places; return False if it has to wait.

        A request with both halves of its room may take the places of requests that began early.
        """
        if not self._turn.comes(request):
            return False
        short = self._short_of(request)
        if max(short) > 0:
            losers = []
            if request is not self._early.first:
                losers = self._early.give_way(*short, self._read_of_the_cache(request))
            self._preempt(losers)
            if not losers or max(self._short_of(request)) > 0:
                self._turn.over(request)
                return False
        if not self._turn.begins(request):
            return False
        self.steps.take_places(request)
        self._turn.taken(request)
        self._running[id(request)] = self._placed[id(request)] = request
        return True

    def _read_of_the_cache(self, request: PrefillRequest) -> PageIndices:
        """Return the cached pages that stay in use even if every early request gives way.

        They are the pages that `request` reads, and those read by placed requests with both halves
        of their rooms.
        """
        if request.prefix is None:
            return NO_PLACES
        matched = [r.sequence for r in self._placed.values() if not self._early.holds(r)]
        return np.concatenate([request.prefix.pages, *(s.pages[: s.shared] for s in matched)])

    def _preempt(self, requests: list[PrefillRequest]) -> None:
        for request in requests:
            del self._running[id(request)], self._placed[id(request)]
            self._beginnings.forget(request)
            self.steps.start_again(request)
            if self._lockstep is not None:
                self._lockstep.preempt(request)

    @property
    def _is_ready(self) -> bool:
        return self._lockstep is None or self._lockstep.ready

    def _short_of(self, request: PrefillRequest) -> tuple[int, int, int]:
        """Count the places that a request's whole prompt lacks; negative if more are free.

        Returns the pages missing at this rank, the rows missing at the rank that lacks the most,
        and the pages missing at the rank with the smallest pool if nothing were cached there. The
        other ranks may hold the places of a request until `drop`, so requests whose rooms ended
        count too.
        """
        missing, missing_rows = self.steps.short_of(request)
        if self._lockstep is None:
            return missing, missing_rows, 0
        pages, rows = self._lockstep.most_places
        taken = sum(placed.sequence.prompt_pages for placed in self._placed.values())
        if self.steps.rows is not None:
            missing_rows = max(missing_rows, 1 + len(self._placed) - rows)
        return missing, missing_rows, request.sequence.prompt_pages + taken - pages

    def _pick(self) -> tuple[list[Row], list[PrefillRequest]]:
        left, to_score = self._max_tokens, scoring.TOKENS_PER_STEP
        rows: list[Row] = []
        requests: list[PrefillRequest] = []
        # Early requests come last, because their work may be lost. The sort is stable.
        order = sorted(self._running.values(), key=lambda r: (self._early.holds(r), urgency(r)))
        for request in order:
            s = request.sequence
            remaining = s.prompt_length - s.computed
            if not remaining or request.is_asking:
                # The whole prompt is computed, or the other ranks have not answered yet.
                continue
            if not left or len(rows) == self._max_rooms:
                break
            if request.scorer is not None and not to_score:
                continue
            most = min(self._chunk_tokens, left if request.scorer is None else min(left, to_score))
            count = self.steps.chunk(request, most)
            if count > left and rows:
                break
            logits = int(count == remaining)
            if request.scorer is not None:
                logits = request.scorer.logits_wanted(count)
                to_score -= min(to_score, count)
            rows.append(Row(s, count, logits))
            requests.append(request)
            request.has_begun = True
            left -= min(left, count)
        return rows, requests

    def _send(self, request: PrefillRequest) -> None:
        steps, choice = self.steps, request.choice
        try:
            steps.send(request)
        except KvflowError as error:
            self._fail(request, error)
            return
        # An error in one room must not end the others.
        except Exception as error:  # noqa: BLE001
            self._fail(request, room_error(self._failed("sending pages", error)))
            return
        if choice is not None and not request.first.done():
            request.first.set_result(steps.token_out(request, choice))


def _mark(requests: list[PrefillRequest], began_s: float) -> None:
    """Record a step that ends now for those of its requests that are traced."""
    ended_s = time.perf_counter()
    for request in requests:
        if request.marks is not None:
            request.marks.stepped(began_s, ended_s)
