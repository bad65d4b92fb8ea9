"""The decode engine, which batches sequences whose pages have landed: one token each per step."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial

import msgspec
import numpy as np

from kvflow.aio import Threads
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.page_waiter import PageWaiter
from kvflow.memory.pool import PagedPool
from kvflow.memory.residency import Resident
from kvflow.memory.snapshot import SnapshotStore
from kvflow.node.handoff import HandOff
from kvflow.protocols.cache.choices import PrefetchPolicy
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.errors import Cause, Code, KvflowError, room_error
from kvflow.protocols.machines.residency import ResidencyPhase
from kvflow.serve.cache.prefix import Prefix, PrefixCache
from kvflow.serve.engine.model.ahead import MOST_STEPS
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.sequence import Prompt, Sequence
from kvflow.serve.engine.model.thread import ModelThread
from kvflow.serve.engine.scheduler.adjustments import adjustments_of
from kvflow.serve.engine.scheduler.budget import Admission, NewTokenRatio, PageBudget
from kvflow.serve.engine.scheduler.burst import Burst, DecodeRequest, Tokens
from kvflow.serve.engine.scheduler.growth import Growth
from kvflow.serve.engine.scheduler.handoff import check_handoff
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.local_prompts import LocalPrompts
from kvflow.serve.engine.scheduler.loop import EngineLoop
from kvflow.serve.engine.scheduler.params import (
    EngineLoad,
    EngineRetractions,
    SamplingParams,
    TokenOut,
)
from kvflow.serve.engine.scheduler.prefetch import begin_fetch, bring, stopped
from kvflow.serve.engine.scheduler.retraction import Retractions
from kvflow.serve.engine.scheduler.rooms import DecodeRoomPort
from kvflow.serve.engine.scheduler.sampling import Choice
from kvflow.telemetry.spans import MARKS

READERS_PER_TURN = 16  # readers that receive tokens in one turn of the loop


class DecodeEngine(EngineLoop):
    """Decodes all running requests together, at most `max_batch` per step.

    Requests above this limit, and requests whose pages cannot be promised yet, wait in order of
    priority and arrival.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: PagedPool,
        pages: PageAllocator,
        executor: Threads,
        *,
        max_batch: int = 256,
        new_token_ratio: float = 1.0,
        snapshots: SnapshotStore | None = None,
        recompute: bool = True,
        cache: PrefixCache | None = None,
        prefetch: PrefetchPolicy = "timeout",
        local_prefill_chunk: int = 0,
    ) -> None:
        """`new_token_ratio` is the share of a request's new tokens for which it is promised pages.
        Below 1.0, the engine retracts requests when the pool runs short: it copies their state to
        host memory (`snapshots`). If that is full or absent, it computes the state again later, or
        ends the request with an error if `recompute` is False.

        `cache`, the prefix cache of this pool, keeps the pages that requests computed, unless they
        end with an error. `prefetch` decides how long a prompt waits for pages that it loads.
        `local_prefill_chunk` is the number of prompt tokens that a step computes at most for
        `compute`, while other requests decode; with 0, `compute` refuses every prompt.

        Raises: LayoutError if the pool does not fit the model.
        """
        super().__init__("decode")
        self._runner = model.runner(pool)
        self._model, self._pages, self._page_size = model, pages, pool.layout.page_size
        self._layout = pool.layout
        self._ratio = NewTokenRatio(new_token_ratio)
        self._allocators = (pages, *pool.allocators[1:])
        self._budget = PageBudget(
            pages,
            max_batch,
            rows=pool.rows if pool.layout.num_rows else None,
            ratio=self._ratio,
            page_size=self._page_size,
            # The lambda defers the look-up until `_retractions`, which needs the budget, exists.
            release_cached=lambda: self._retractions.release_cached(),  # noqa: PLW0108
            on_spare=self._spare_grew,
        )
        self.limits = self._limits_of(model)
        self._thread = self._thread_of(model, pool, executor)
        self._max_batch = max_batch
        self._running: dict[int, DecodeRequest] = {}  # by number, in the order in which they joined
        self._numbers = itertools.count()
        self._outgoing: dict[DecodeRequest, list[TokenOut | KvflowError]] = {}
        self._paused = False
        self.local = LocalPrompts(model, pool, pages, local_prefill_chunk)
        self._burst = self._burst_of(model)
        self._snapshots, self.cache = snapshots, cache
        self._prefetch: PrefetchPolicy = prefetch
        self._retractions = self._retractions_of(model, recompute)
        self._retract_all = False
        self._growth = Growth(self._budget, pages, self._fail)
        self._returned = PageWaiter(self._wake.set, pages)
        self.steps = 0

    def _limits_of(self, model: LoadedModel) -> EngineLimits:
        return EngineLimits(
            model.context_length,
            model.vocab_size,
            self._page_size,
            self._budget.capacity,
            model.hidden_size,
            whole_prompts=model.whole_prompts,
        )

    def _thread_of(self, model: LoadedModel, pool: PagedPool, executor: Threads) -> ModelThread:
        return ModelThread(
            executor,
            pool.places_over(self._pages),
            pool.layout,
            self._runner.device,
            model.neighbours.wait_for_followers,
        )

    def _retractions_of(self, model: LoadedModel, recompute: bool) -> Retractions:
        return Retractions(
            self._budget,
            self._ratio,
            self._snapshots,
            recompute=recompute,
            back=self._join,
            failed=self._fail,
            moved=self._wake.set,
        )

    def _burst_of(self, model: LoadedModel) -> Burst:
        return Burst(
            self._runner,
            model.eos_ids,
            deliver=self._deliver,
            is_running=self._is_running,
            goes_on=self._goes_on,
            one_by_one=model.has_states,
            chunk=model.chunk,
            local=self.local,
        )

    async def close(self) -> None:
        """End every request, and wait for the running step and copies, even if cancelled."""
        try:
            await super().close()
        finally:
            self._returned.close()
            await self._retractions.close()

    def _fail_all(self, cause: Cause) -> None:
        self._budget.close(room_error(cause))
        for request in [*self._running.values(), *self._retractions.away]:
            self._fail(request, room_error(cause))

    def pause(self) -> None:
        """Start no step until `resume`, so that requests gather for one batch."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake.set()

    def retract_all(self) -> None:
        """Retract all running requests before the next step; they return in turn."""
        self._retract_all = True
        self._wake.set()

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._running), self._budget.waiting)

    @property
    def retraction(self) -> EngineRetractions:
        return self._retractions.report()

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Check a request against the model and pool. Raises: MisuseError, CapacityError."""
        self.limits.check_prompt(prompt)
        self.limits.check_sampling(prompt, params)
        self.limits.check_total(len(prompt) + self.limits.new_tokens(prompt, params))

    async def admit(
        self, prompt: Prompt, params: SamplingParams, namespace: Namespace = ANY
    ) -> Admission:
        """Wait for a promise of pages: for the prompt, and for new tokens by the new-token ratio.

        The caller opens the room afterwards, and releases the admission or passes it to `generate`.
        With the policy best_effort, the cache meanwhile fetches the prompt's pages from storage to
        the host.

        Raises: MisuseError, CapacityError (see `PageBudget.admit`).
        """
        self._refuse_when_closing()
        self.check(prompt, params)
        started = time.perf_counter()
        total = self.limits.worst_pages(prompt, self.limits.new_tokens(prompt, params))
        base = self.limits.worst_pages(prompt, 1)
        fetching = begin_fetch(self.cache, self._prefetch, np.asarray(prompt), namespace)
        admission: Admission | None = None
        try:
            admission = await self._budget.admit(total, base=base, priority=params.priority)
            self.queue_seconds.observe(time.perf_counter() - started)
            if (marks := MARKS.get()) is not None:
                marks.queued(started)
            await stopped(fetching)
        except BaseException:
            if fetching is not None:
                fetching.cancel()
            if admission is not None:
                admission.release()
            raise
        return admission

    async def cached(
        self,
        prompt: Prompt,
        namespace: Namespace = ANY,
        admission: Admission | None = None,
        most_tokens: int | None = None,
    ) -> Prefix | None:
        """Return the cached prefix of a prompt, locked, or None without a cache.

        It has at most `most_tokens` tokens.

        The caller releases the prefix, or passes it to `generate`. Prefill need not send its pages,
        and `admission` no longer promises them. Pages that only the host or only storage has are
        first loaded into pages promised to `admission`, for as long as the policy allows.
        """
        cache, tokens = self.cache, np.asarray(prompt)
        if cache is None:
            return None
        if admission is None or not cache.has_host:
            prefix = cache.match(tokens, most_tokens, namespace)
        else:
            prefix = await bring(
                cache,
                self._prefetch,
                tokens,
                most_tokens,
                namespace,
                most_pages=admission.opening,
                taking=admission.has,
                from_storage=self._prefetch != "best_effort",
                locked=lambda prefix: admission.cover(int(prefix.pages.size)),
            )
        cache.count(len(prompt), prefix)
        if admission is not None:
            admission.cover(int(prefix.pages.size))
        return prefix

    async def generate(
        self,
        room: DecodeRoomPort,
        prompt: Prompt,
        params: SamplingParams,
        admission: Admission | None = None,
        prefix: Prefix | None = None,
    ) -> AsyncGenerator[TokenOut, None]:
        """Yield tokens as they are generated; prefill chose the first one.

        Takes ownership of the room, the admission and the prefix. The room does not include the
        pages of the prefix. Closing the generator, or cancelling its reader, aborts the room or
        ends the sequence. Pages that a step uses become free when the step ends. Without an
        admission, the pages for new tokens are requested after the prompt lands.

        Raises: MisuseError, CapacityError, the room's error.
        """
        request: DecodeRequest | None = None
        number = next(self._numbers)
        cause: Cause | None = Cause(Code.CLIENT_GONE, "the reader of the tokens has stopped")
        try:
            self._refuse_when_closing()
            self.check(prompt, params)
            if admission is not None:
                if prefix is not None:
                    admission.cover(int(prefix.pages.size))
                admission.took(self._layout.counted(room.pages)[0])
            await self._model.grammars.compile(params.grammar)
            handoff = HandOff.decode(await room.landed())
            limit = self.limits.new_tokens(prompt, params)
            if admission is None:
                admission = await self._admit_landed(room, prompt, limit, prefix, params.priority)
            # Other grammars may have taken its place meanwhile.
            await self._model.grammars.compile(params.grammar)
            self._refuse_when_closing()
            request = self._take_over(
                number, room, prompt, params, limit, admission, prefix, handoff
            )
            out = self._first(request)
            yield out
            while out.finish_reason is None:
                out = await request.next_token()
                yield out
            cause = None
        except KvflowError as error:
            cause = error.cause()
            raise
        except (GeneratorExit, asyncio.CancelledError):
            # The client left, or stopped at a stop string. Computed pages are correct: keep them.
            if request is not None:
                self._keep(request)
            raise
        finally:
            if request is not None:
                self._retire(request)
            elif prefix is not None:
                prefix.release()
            room.close(cause)
            if admission is not None:
                admission.release()

    async def compute(
        self, prompt: Prompt, params: SamplingParams, namespace: Namespace = ANY
    ) -> AsyncGenerator[TokenOut, None]:
        """Yield the tokens of a prompt that this engine computes, without a prefill or a room.

        The prompt waits for pages like those of `generate`. Its chunks then run beside the steps
        of other requests. Closing the generator, or cancelling its reader, ends the sequence.

        Raises: RefusedError if a pair has to serve the request, MisuseError, CapacityError.
        """
        self.local.check(params)
        await self._model.grammars.compile(params.grammar)
        number, request, prefix = next(self._numbers), None, None
        admission = await self.admit(prompt, params, namespace)
        try:
            most = self.local.most_cached(prompt)
            prefix = await self.cached(prompt, namespace, admission, most)
            # As in `generate`.
            await self._model.grammars.compile(params.grammar)
            self._refuse_when_closing()
            request = self._begin(number, prompt, params, admission, prefix)
            cached = request.sequence.computed
            out = msgspec.structs.replace(await request.next_token(), cached_tokens=cached)
            yield out
            while out.finish_reason is None:
                out = await request.next_token()
                yield out
        except (GeneratorExit, asyncio.CancelledError):
            if request is not None:
                self._keep(request)
            raise
        finally:
            if request is not None:
                self._retire(request)
            elif prefix is not None:
                prefix.release()
            admission.release()

    def _begin(
        self,
        number: int,
        prompt: Prompt,
        params: SamplingParams,
        admission: Admission,
        prefix: Prefix | None,
    ) -> DecodeRequest:
        """Take the places of a prompt that is computed here, and let it join the batch."""
        owner, limit = ("sequence", number), self.limits.new_tokens(prompt, params)
        sequence = Sequence(owner, prompt, limit, self._page_size)
        adjustments = adjustments_of(params, sequence, self._model.eos_ids, self._model.grammars)
        places = self.local.take(sequence, prefix)
        admission.took(int(places[0].size))
        resident = Resident(owner, places, allocators=self._allocators, store=self._snapshots)
        request = DecodeRequest(
            number, sequence, resident, params, limit, admission, adjustments, None, prefix
        )
        self._join(request)
        return request

    async def _admit_landed(
        self, room: DecodeRoomPort, prompt: Prompt, limit: int, prefix: Prefix | None, priority: int
    ) -> Admission:
        total = self.limits.worst_pages(prompt, limit) - (
            0 if prefix is None else prefix.pages.size
        )
        taken = self._layout.counted(room.pages)[0]
        return await self._budget.admit(total, taken, base=0, priority=priority)

    def _take_over(
        self,
        number: int,
        room: DecodeRoomPort,
        prompt: Prompt,
        params: SamplingParams,
        limit: int,
        admission: Admission,
        prefix: Prefix | None,
        handoff: HandOff,
    ) -> DecodeRequest:
        owner = ("sequence", number)
        sequence = Sequence(owner, prompt, limit, self._page_size)
        # This may raise, so it comes before the sequence owns places.
        adjustments = adjustments_of(params, sequence, self._model.eos_ids, self._model.grammars)
        places = self._layout.split(room.keep(owner))
        resident = Resident(owner, places, allocators=self._allocators, store=self._snapshots)
        if prefix is not None:
            sequence.begin_with(prefix.pages)
        sequence.add(places)
        sequence.computed = sequence.prompt_length
        return DecodeRequest(
            number, sequence, resident, params, limit, admission, adjustments, handoff, prefix
        )

    def _first(self, request: DecodeRequest) -> TokenOut:
        """Return the first token. The request joins the batch, unless this token ends it."""
        handoff = request.handoff
        assert handoff is not None
        check_handoff(
            handoff, request.sequence.prompt_length, request.params, self._model.vocab_size
        )
        request.sequence.append(handoff.first_token)
        choice = Choice(
            handoff.first_token, handoff.logprob, handoff.top_logprobs, handoff.asked_logprobs
        )
        out = request.token_out(choice, self._model.eos_ids)
        if request.params.prompt_logprobs_from is not None:
            out = msgspec.structs.replace(out, prompt_logprobs=handoff.prompt_logprobs)
        if request.params.hidden_states:
            out = msgspec.structs.replace(out, hidden_states=handoff.hidden_states)
        if handoff.cached_tokens:
            out = msgspec.structs.replace(out, cached_tokens=handoff.cached_tokens)
        if out.finish_reason is None:
            self._join(request)
        else:
            self._keep(request)
            self._let_go(request)
        return out

    def _join(self, request: DecodeRequest) -> None:
        self._running[request.number] = request
        self._wake.set()

    def _retire(self, request: DecodeRequest) -> None:
        """Free the pages and the row of a request, or its host memory. Idempotent.

        Memory that a step or a copy still uses becomes free when that ends (I13).
        """
        self._running.pop(request.number, None)
        if request.resident.phase is ResidencyPhase.ENDED:
            return
        request.resident.close()
        if request.prefix is not None:
            request.prefix.release()
        if request.move is not None:
            request.move.cancel()
        # When the running burst ends, the loop grants these pages to waiting requests.
        self._wake.set()

    def _keep(self, request: DecodeRequest) -> None:
        """Hand over to the cache the full pages of a request that ended without an error.

        A step that still runs writes only to later pages.

        A model with states may compute other values for a generated token than prefill would
        (nemotron_h does). For such a model, the cache keeps only pages of the prompt.
        """
        prefix, s, resident = request.prefix, request.sequence, request.resident
        if self.cache is None or prefix is None or resident.phase is not ResidencyPhase.RESIDENT:
            return
        end = s.prompt_length if self._model.has_states else request.settled
        kept = self.cache.keep(s.tokens[:end], s.pages, s.owner, prefix, request.params.priority)
        resident.hand_over(kept - s.shared)

    def _let_go(self, request: DecodeRequest) -> None:
        """Free everything that an ended request holds, even if its reader is slow. Idempotent."""
        self._retire(request)
        request.admission.release()

    def _fail(self, request: DecodeRequest, error: KvflowError) -> None:
        self._let_go(request)
        if (tokens := self._outgoing.get(request)) is not None:
            # The reader first receives the tokens that were generated before the error.
            tokens.append(error)
        else:
            request.tokens.put_nowait(error)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closing:
            self._wake.clear()
            self._returned.look()
            # The last burst or a copy may have held pages that are free now.
            self._budget.grant()
            batch, most_steps = self._next_batch()
            if not batch:
                self._runner.rest()
                await self._sleep()
                continue
            try:
                await self._thread.run(
                    [r.sequence for r in batch], partial(self._burst.run, batch, most_steps, loop)
                )
            # The loop serves all requests, so a failed step ends only the requests in it.
            except Exception as error:  # noqa: BLE001
                cause = self._failed("decode step", error)
                for request in filter(self._is_running, batch):
                    self._fail(request, room_error(cause))

    def _next_batch(self) -> tuple[list[DecodeRequest], int]:
        """Return the requests of the next steps, and how many steps they have pages for."""
        if self._paused:
            return [], 0
        if self._retract_all:
            self._retract_all = False
            self._leave(list(self._running.values()))
        if not self._running:
            self._ratio.rest()
        candidates = list(self._running.values())[: self._max_batch]
        batch, most_steps = self._growth.grow(candidates, MOST_STEPS)
        leaving = 0 if self.cache is None else self.cache.leaving_pages
        if self._growth.short and not leaving:
            victims = self._retractions.victims(self._running.values(), self._growth.short)
            self._leave(victims)
            batch = list(filter(self._is_running, batch)) if victims else batch
        # Admitted requests that do not run yet will free pages when they end or are retracted.
        on_the_way = self._budget.admitted > len(self._running)
        may_come = bool(batch or self._retractions.coming_pages or leaving or on_the_way)
        if self._growth.short and not may_come and self._retractions.release_cached():
            return self._next_batch()
        self._growth.fail_stuck(may_come=may_come)
        return batch, most_steps

    def _leave(self, victims: list[DecodeRequest]) -> None:
        for victim in victims:
            del self._running[victim.number]
            self._retractions.retract(victim)

    async def _sleep(self) -> None:
        if self._growth.short:
            self._returned.wait()
        # After this time, the loop ends requests for which no pages have become free.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._growth.stuck_in_s):
                await self._wake.wait()

    def _spare_grew(self) -> None:
        # A wake-up ends the running burst, so it happens only if a request is short of pages.
        if self._growth.short:
            self._wake.set()

    def _is_running(self, request: DecodeRequest) -> bool:
        return request.number in self._running

    def _goes_on(self) -> bool:
        """Return True until the loop is woken, paused or closed. The model thread calls this."""
        return not (self._wake.is_set() or self._paused or self._closing)

    def _deliver(self, steps: list[Tokens]) -> None:
        self.steps += len(steps)
        self._ratio.stepped(len(steps))
        idle = not self._outgoing
        for request, out in itertools.chain.from_iterable(steps):
            if not self._is_running(request):
                continue
            if isinstance(out, KvflowError):
                self._fail(request, out)
                continue
            request.stepped()
            if out.finish_reason is not None:
                self._keep(request)
                self._let_go(request)
            self._outgoing.setdefault(request, []).append(out)
        if idle:
            self._hand_out()

    def _hand_out(self) -> None:
        """Pass tokens to a few readers per turn: serving all at once would block the loop (I11)."""
        for request in list(itertools.islice(self._outgoing, READERS_PER_TURN)):
            for out in self._outgoing.pop(request):
                request.tokens.put_nowait(out)
        if self._outgoing:
            asyncio.get_running_loop().call_soon(self._hand_out)
