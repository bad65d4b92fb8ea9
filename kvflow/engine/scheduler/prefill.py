"""The prefill engine: chunks of several prompts per step; full pages are sent while the next chunk is computed."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections import deque
from concurrent.futures import Executor
from functools import partial

import torch

from kvflow.engine.model.load import LoadedModel
from kvflow.engine.model.sequence import Prompt, Sequence
from kvflow.engine.model.step import Row
from kvflow.engine.model.thread import ModelThread
from kvflow.engine.scheduler import scoring
from kvflow.engine.scheduler.adjustments import adjustments_of
from kvflow.engine.scheduler.budget import RECHECK_S
from kvflow.engine.scheduler.handoff import HandOff
from kvflow.engine.scheduler.limits import EngineLimits
from kvflow.engine.scheduler.loop import EngineLoop
from kvflow.engine.scheduler.optimistic import OptimisticStarts, urgency
from kvflow.engine.scheduler.packed_array import PackedArray
from kvflow.engine.scheduler.params import EngineLoad, EngineOptimism, SamplingParams, TokenOut, finish
from kvflow.engine.scheduler.rooms import PrefillRoomPort
from kvflow.engine.scheduler.sampling import Choice, Draw, choose
from kvflow.engine.scheduler.scoring import PromptScorer
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import Cause, Code, KvflowError, room_error
from kvflow.protocols.pages.layout import PageIndices, Places


class _PrefillRequest:
    """One prompt. `first` resolves to its first token once the last chunk is queued, to None when its room ends."""

    __slots__ = (
        *("choice", "draw", "first", "hidden_states", "params", "queued_at_s", "room", "scorer", "sent_pages"),
        "sequence",
    )

    def __init__(
        self, sequence: Sequence, room: PrefillRoomPort, params: SamplingParams, eos_ids: frozenset[int]
    ) -> None:
        self.sequence, self.room, self.params = sequence, room, params
        self.sent_pages = 0  # with those that decode has already
        self.queued_at_s = time.perf_counter()
        adjustments = adjustments_of(params, sequence, eos_ids)
        self.draw = Draw(params, params.seed_or_random(), sequence.prompt_length, adjustments)
        self.first: asyncio.Future[TokenOut | None] = asyncio.get_running_loop().create_future()
        self._begin()

    def _begin(self) -> None:
        params, start = self.params, self.params.prompt_logprobs_from
        self.scorer = (
            None
            if start is None
            else PromptScorer(self.sequence, start, params.logprobs or 0, params.logprob_token_ids)
        )
        self.hidden_states: PackedArray | None = None  # at the last token of the prompt
        self.choice: Choice | None = None  # once the prompt is computed

    def start_again(self) -> Places:
        """Forget what was computed; returns its places. The same first token will be drawn."""
        self._begin()
        return self.sequence.start_again()


class PrefillEngine(EngineLoop):
    """Steps over prompts in order of priority, and of arrival among equals.

    A step takes at most `chunk_tokens` of each prompt, `max_batch_tokens` in all (more for prompts that cannot be
    divided, see `LoadedModel.chunk`), and prompts of at most `max_batch_rooms` rooms (for tests: bfloat16 logits depend
    on the composition of the batch).
    """

    def __init__(
        self, model: LoadedModel, pool: PagedPool, pages: PageAllocator, executor: Executor, *,
        chunk_tokens: int = 512, max_batch_tokens: int = 512, max_batch_rooms: int | None = None,
        optimistic_tries: int = 0,
    ) -> None:  # fmt: skip
        """`optimistic_tries`: how often a prompt may begin before its room is matched, see `optimistic`.

        Raises: LayoutError when the pool is not this model's."""
        super().__init__("prefill")
        self._runner = model.runner(pool)
        self._model, self._pages, self._page_size = model, pages, pool.layout.page_size
        self._layout, self._places = pool.layout, pool.places_over(pages)
        self._rows = pool.rows if pool.layout.num_rows else None
        self.limits = EngineLimits(
            model.context_length, model.vocab_size, self._page_size, pages.capacity, model.hidden_size,
            whole_prompts=model.whole_prompts,
        )  # fmt: skip
        self._thread = ModelThread(executor, self._places, pool.layout, self._runner.device)
        self._chunk_tokens, self._max_tokens = max(1, chunk_tokens), max(1, max_batch_tokens)
        self._max_rooms = max_batch_rooms or 1 << 30
        self._unmatched = 0  # requests that wait for decode's half of their room
        self._early: OptimisticStarts[_PrefillRequest] = OptimisticStarts(optimistic_tries)  # the others hold nothing
        self._waiting: deque[_PrefillRequest] = deque()  # for pages
        self._running: dict[int, _PrefillRequest] = {}  # in order of arrival
        self._numbers = itertools.count()

    def _fail_all(self, cause: Cause) -> None:
        for request in [*self._waiting, *self._running.values()]:
            self._fail(request, room_error(cause))

    def load(self) -> EngineLoad:
        return self._early.load(len(self._running), self._unmatched, len(self._waiting))

    @property
    def optimism(self) -> EngineOptimism:
        return self._early.counts

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raises: MisuseError, CapacityError for a prompt that `prefill` would refuse."""
        self.limits.check_prompt(prompt)
        self.limits.check_sampling(prompt, params)

    async def prefill(
        self, room: PrefillRoomPort, prompt: Prompt, params: SamplingParams, *, into: PageIndices | None = None
    ) -> TokenOut:
        """Compute `prompt`, send its pages and row, hand the first token over; returns that token when all have landed.

        `into`: places of the caller (pages, and a row as a room has one) to compute in; without it the engine takes its
        own, and gives them back.
        Any error, and a cancellation, closes the room with its cause.
        Raises: MisuseError, CapacityError, the room's error.
        """
        request: _PrefillRequest | None = None
        owner = ("prefill", next(self._numbers))
        try:
            self._refuse_when_closing()
            self.check(prompt, params)
            sequence = Sequence(owner, prompt, 0, self._page_size)
            request = _PrefillRequest(sequence, room, params, self._model.eos_ids)
            if into is None:
                self._early.add(request)
                self._wake.set()
            self._unmatched += 1
            try:
                request.sent_pages = await room.matched() // self._page_size
            finally:
                self._unmatched -= 1
            self._refuse_when_closing()
            self._enqueue(request, into)
            room.on_end(lambda: self._room_ended(request))
            first = await request.first
            await room.done()
            if first is None:
                raise room_error(Cause(Code.CLIENT_GONE, "the room ended before its first token was computed"))
            return first
        except KvflowError as error:
            room.close(error.cause())
            raise
        except asyncio.CancelledError:
            room.close(Cause(Code.CLIENT_GONE, "the request was cancelled"))
            raise
        finally:
            if request is not None:
                self._drop(request, owned=into is None)
            room.close()

    def _enqueue(self, request: _PrefillRequest, into: PageIndices | None) -> None:
        """Its room is matched."""
        if into is not None:
            request.sequence.add(self._layout.split(into))
            self._running[id(request)] = request
        elif self._early.matched(request):
            self.queue_seconds.observe(0.0)
            self._send(request)
        else:
            request.queued_at_s = time.perf_counter()
            self._waiting.insert(bisect.bisect_right(self._waiting, urgency(request), key=urgency), request)
        self._wake.set()

    def _room_ended(self, request: _PrefillRequest) -> None:
        """Compute nothing more for it; the room's `done` raises the reason."""
        self._running.pop(id(request), None)
        if not request.first.done():
            request.first.set_result(None)

    def _fail(self, request: _PrefillRequest, error: KvflowError) -> None:
        self._running.pop(id(request), None)
        if self._early.holds(request):
            self._early.forget(request)
            request.room.close(error.cause())  # it waits for its match, which then raises this
        elif not request.first.done():
            request.first.set_exception(error)

    def _drop(self, request: _PrefillRequest, *, owned: bool) -> None:
        """Forget the request; places that a step or a write still uses become free when it has ended (I13)."""
        self._running.pop(id(request), None)
        self._early.forget(request)
        if request in self._waiting:
            self._waiting.remove(request)
        if owned:
            self._places.give_back(self._layout.numbered(request.sequence.places), request.sequence.owner)
        self._wake.set()

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            self._take_places()
            rows, requests = self._pick()
            if not rows:
                self._runner.rest()
                await self._sleep()
                continue
            try:
                choices = await self._thread.run([r.sequence for r in rows], partial(self._step, rows, requests))
            # The loop serves all requests: a failed step ends those in it, and is counted.
            except Exception as error:  # noqa: BLE001
                cause = self._failed("prefill step", error)
                for request in requests:
                    self._fail(request, room_error(cause))
                continue
            for row, request in zip(rows, requests, strict=True):
                if id(request) in self._running:
                    self._advance(request, row, choices.get(id(request)))

    async def _sleep(self) -> None:
        """Wait for a wake-up; rooms free pages without one, so with requests that wait for pages, poll."""
        if not self._waiting and self._early.first is None:
            await self._wake.wait()
            return
        wake = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait([wake], timeout=RECHECK_S)
        finally:
            wake.cancel()

    def _take_places(self) -> None:
        """In order of priority and arrival: a prompt gets all of its pages, and a row, at once, or waits."""
        while self._waiting:
            request = self._waiting[0]
            if request.first.done():
                self._waiting.popleft()
                continue
            if not self._place(request):
                return
            self._waiting.popleft()
            self.queue_seconds.observe(time.perf_counter() - request.queued_at_s)
        while (early := self._early.first) is not None and self._place(early):
            self._early.began(early)

    def _place(self, request: _PrefillRequest) -> bool:
        """Give a request its places, those of early ones too where it has both halves of its room."""
        s = request.sequence
        needed, rows = s.pages_missing(s.prompt_length), int(self._rows is not None)
        missing = needed - self._pages.free_pages
        missing_rows = rows - self._rows.free_pages if self._rows is not None else 0
        if missing > 0 or missing_rows > 0:
            if request is self._early.first:
                return False
            losers = self._early.give_way(missing, missing_rows)
            for loser in losers:
                del self._running[id(loser)]
                self._places.give_back(self._layout.numbered(loser.start_again()), loser.sequence.owner)
            if not losers:
                return False
        s.add(self._layout.split(self._places.take_room(needed + rows, s.owner)))
        self._running[id(request)] = request
        return True

    def _pick(self) -> tuple[list[Row], list[_PrefillRequest]]:
        """The rows of one step: a chunk of each of the first prompts in order, within the limits of a step."""
        left, to_score = self._max_tokens, scoring.TOKENS_PER_STEP
        rows: list[Row] = []
        requests: list[_PrefillRequest] = []
        order = sorted(self._running.values(), key=lambda r: (self._early.holds(r), urgency(r)))  # stable
        for request in order:
            s = request.sequence
            remaining = s.prompt_length - s.computed
            if not remaining:
                continue  # computed; its last chunk has been queued
            if not left or len(rows) == self._max_rooms:
                break
            if request.scorer is not None and not to_score:
                continue
            most = min(self._chunk_tokens, left if request.scorer is None else min(left, to_score))
            count = self._model.chunk(remaining, most)
            if count > left and rows:
                break
            logits = int(count == remaining)
            if request.scorer is not None:
                logits = request.scorer.logits_wanted(count)
                to_score -= min(to_score, count)
            rows.append(Row(s, count, logits))
            requests.append(request)
            left -= min(left, count)
        return rows, requests

    def _step(self, rows: list[Row], requests: list[_PrefillRequest]) -> dict[int, Choice]:
        """In the model thread: the first token of every request whose prompt this step completes, by request."""
        hidden: torch.Tensor | None = None
        if any(request.params.hidden_states for request in requests):
            logits, hidden = self._runner.forward_with_hidden(rows)
        else:
            logits = self._runner.forward(rows)
        last: list[_PrefillRequest] = []
        ends: list[int] = []
        for row, request, end in zip(rows, requests, itertools.accumulate(row.logits for row in rows), strict=True):
            if request.scorer is not None and row.logits:
                request.scorer.add(logits[end - row.logits : end], row.end)
            if row.end == row.sequence.prompt_length:
                last.append(request)
                ends.append(end - 1)
                if hidden is not None and request.params.hidden_states:
                    request.hidden_states = PackedArray.of(hidden[end - 1 : end])
        if not last:
            return {}
        if len(last) < len(logits):
            logits = logits[ends]
        return dict(zip(map(id, last), choose(logits, [request.draw for request in last]), strict=True))

    def _advance(self, request: _PrefillRequest, row: Row, choice: Choice | None) -> None:
        """After a step."""
        request.sequence.computed += row.new
        request.choice = choice
        if not self._early.holds(request):
            self._send(request)

    def _send(self, request: _PrefillRequest) -> None:
        """Send the complete pages that have not been sent; after the last chunk the remaining ones and the row, with
        the first token."""
        s, choice = request.sequence, request.choice
        ready = s.page_count if choice else s.computed // self._page_size
        start, request.sent_pages = min(request.sent_pages, ready), max(request.sent_pages, ready)
        pages = s.pages[start:ready].copy()
        try:
            if choice is None:
                if pages.size:
                    request.room.send(pages)
                return
            handoff = HandOff(
                first_token=choice.token_id,
                logprob=choice.logprob,
                top_logprobs=choice.top_logprobs,
                asked_logprobs=choice.asked_logprobs,
                prompt_tokens=s.prompt_length,
                prompt_logprobs=request.scorer.scores if request.scorer else None,
                hidden_states=request.hidden_states,
            )
            places = self._layout.numbered(Places(pages, s.rows))
            request.room.send(places, last=True, handoff=handoff.encode())
        except KvflowError as error:
            self._fail(request, error)
            return
        # An error of one room must not end the others.
        except Exception as error:  # noqa: BLE001
            self._fail(request, room_error(self._failed("sending pages", error)))
            return
        reason, matched = finish(choice.token_id, 1, request.params.max_new_tokens, request.params, self._model.eos_ids)
        if not request.first.done():
            asked = (choice.asked_logprobs, None, request.hidden_states)
            request.first.set_result(TokenOut(*choice[:3], reason, matched, *asked))
