"""The decode engine: continuous batching of sequences whose pages have landed, one token each per step."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from functools import partial

import msgspec

from kvflow.engine.model.load import LoadedModel
from kvflow.engine.model.sequence import Prompt, Sequence
from kvflow.engine.model.step import Row
from kvflow.engine.model.thread import ModelThread
from kvflow.engine.scheduler.adjustments import Adjustments, adjustments_of
from kvflow.engine.scheduler.budget import Admission, PageBudget
from kvflow.engine.scheduler.handoff import HandOff
from kvflow.engine.scheduler.limits import EngineLimits
from kvflow.engine.scheduler.loop import EngineLoop
from kvflow.engine.scheduler.params import EngineLoad, SamplingParams, TokenOut, finish
from kvflow.engine.scheduler.prompt_logprobs import PromptLogprobs
from kvflow.engine.scheduler.rooms import DecodeRoomPort
from kvflow.engine.scheduler.sampling import Choice, Draw, choose
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import Cause, Code, KvflowError, WireError, room_error


class _DecodeRequest:
    """One sequence of the batch; `tokens` carries its tokens, or the error that ended it, to its reader."""

    __slots__ = ("adjustments", "admission", "limit", "number", "params", "retired", "seed", "sequence", "tokens")

    def __init__(
        self, number: int, sequence: Sequence, params: SamplingParams, limit: int, admission: Admission,
        adjustments: Adjustments | None,
    ) -> None:  # fmt: skip
        self.number, self.sequence, self.params, self.limit, self.admission = number, sequence, params, limit, admission
        self.adjustments = adjustments
        self.seed = params.seed_or_random()
        self.retired = False  # its pages have been given back
        self.tokens: asyncio.Queue[TokenOut | KvflowError] = asyncio.Queue()


class DecodeEngine(EngineLoop):
    """Steps over all running requests, at most `max_batch`: the others wait, first come first served, as does one whose
    worst case of pages cannot be promised."""

    def __init__(
        self, model: LoadedModel, pool: PagedPool, pages: PageAllocator, executor: Executor, *, max_batch: int = 256
    ) -> None:
        """Raises: LayoutError when the pool is not this model's."""
        super().__init__("decode")
        self._runner = model.runner(pool)
        self._model, self._pages, self._page_size = model, pages, pool.layout.page_size
        self._budget = PageBudget(pages, max_batch)
        self.limits = EngineLimits(model.context_length, model.vocab_size, self._page_size, self._budget.capacity)
        self._thread = ModelThread(executor, pages)
        self._max_batch = max_batch
        self._running: dict[int, _DecodeRequest] = {}  # by number: in order of arrival
        self._numbers = itertools.count()
        self._paused = False
        self.steps = 0

    def _fail_all(self, cause: Cause) -> None:
        self._budget.close(room_error(cause))
        for request in list(self._running.values()):
            self._fail(request, room_error(cause))

    def pause(self) -> None:
        """Start no step until `resume`. Requests collect meanwhile, so the composition of a batch is known."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake.set()

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._running), self._budget.waiting)

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raises: MisuseError, CapacityError for a request that `admit` and `generate` would refuse."""
        self.limits.check_prompt(prompt)
        self.limits.check_sampling(prompt, params)
        self._budget.check(self.limits.worst_pages(prompt, self.limits.new_tokens(prompt, params)))

    async def admit(self, prompt: Prompt, params: SamplingParams) -> Admission:
        """Wait until the pages of the request's worst case can be promised; open its room after that.

        The caller releases the admission, or passes it to `generate`.
        Raises: MisuseError, CapacityError for a request that can never run.
        """
        self._refuse_when_closing()
        self.check(prompt, params)
        return await self._budget.admit(self.limits.worst_pages(prompt, self.limits.new_tokens(prompt, params)))

    async def generate(
        self, room: DecodeRoomPort, prompt: Prompt, params: SamplingParams, admission: Admission | None = None
    ) -> AsyncGenerator[TokenOut, None]:
        """Tokens as they come, the first one from prefill. Takes ownership of the room and the admission.

        Closing the generator, or cancelling its reader, aborts the room or ends the sequence; pages that a step uses
        become free when it has ended. Without an admission, the pages to grow are requested after landing.
        Raises: MisuseError, CapacityError, the room's error.
        """
        request: _DecodeRequest | None = None
        number = next(self._numbers)
        cause: Cause | None = Cause(Code.CLIENT_GONE, "the reader of the tokens has stopped")
        try:
            self._refuse_when_closing()
            self.check(prompt, params)
            if admission is not None:
                admission.took(len(room.pages))
            handoff = HandOff.decode(await room.landed())
            limit = self.limits.new_tokens(prompt, params)
            if admission is None:
                total = self.limits.worst_pages(prompt, limit)
                admission = await self._budget.admit(total, len(room.pages))
            self._refuse_when_closing()
            request = self._take_over(number, room, prompt, params, limit, admission)
            out = self._first(request, handoff)
            yield out
            while out.finish_reason is None:
                token = await request.tokens.get()
                if isinstance(token, KvflowError):
                    raise token
                out = token
                yield out
            cause = None
        except KvflowError as error:
            cause = error.cause()
            raise
        finally:
            if request is not None:
                self._retire(request)
            room.close(cause)
            if admission is not None:
                admission.release()

    def _take_over(
        self, number: int, room: DecodeRoomPort, prompt: Prompt, params: SamplingParams, limit: int,
        admission: Admission,
    ) -> _DecodeRequest:  # fmt: skip
        """Make the landed pages a sequence of this engine."""
        owner = ("sequence", number)
        sequence = Sequence(owner, prompt, limit, self._page_size)
        sequence.add_pages(room.keep(owner))
        sequence.computed = sequence.prompt_length
        adjustments = adjustments_of(params, sequence, self._model.eos_ids)
        return _DecodeRequest(number, sequence, params, limit, admission, adjustments)

    def _first(self, request: _DecodeRequest, handoff: HandOff) -> TokenOut:
        """Prefill's token; unless it is the last one, the sequence joins the batch. Raises: WireError."""
        s = request.sequence
        if handoff.prompt_tokens != s.prompt_length:
            text = f"the hand-over is for a prompt of {handoff.prompt_tokens} tokens, not {s.prompt_length}"
            raise WireError(text)
        if not 0 <= handoff.first_token < self._model.vocab_size:
            text = f"the hand-over's first token {handoff.first_token} is outside 0..{self._model.vocab_size - 1}"
            raise WireError(text)
        s.append(handoff.first_token)
        out = self._token_out(request, Choice(handoff.first_token, handoff.logprob, handoff.top_logprobs))
        if (start := request.params.prompt_logprobs_from) is not None:
            out = msgspec.structs.replace(out, prompt_logprobs=self._scores(request, start, handoff))
        if out.finish_reason is None:
            self._running[request.number] = request
            self._wake.set()
        return out

    def _scores(self, request: _DecodeRequest, start: int, handoff: HandOff) -> PromptLogprobs:
        """Raises: WireError unless prefill sent the log-probabilities that the request asks for."""
        if (scores := handoff.prompt_logprobs) is None:
            raise WireError("the hand-over has no logprobs of the prompt; prefill may be of another version")
        top = min(request.params.logprobs or 0, self._model.vocab_size)
        scores.check(start, request.sequence.prompt_length - 1 - start, top, self._model.vocab_size)
        return scores

    def _token_out(self, request: _DecodeRequest, choice: Choice) -> TokenOut:
        generated = request.sequence.length - request.sequence.prompt_length
        reason, matched = finish(choice.token_id, generated, request.limit, request.params, self._model.eos_ids)
        return TokenOut(choice.token_id, choice.logprob, choice.top_logprobs, reason, matched)

    def _retire(self, request: _DecodeRequest) -> None:
        """Give the pages back; those that a step still uses become free when it has ended (I13). Idempotent."""
        self._running.pop(request.number, None)
        s = request.sequence
        if not request.retired:  # not marked in the sequence, which a running step still reads
            request.retired = True
            self._pages.give_back(s.pages, s.owner)

    def _fail(self, request: _DecodeRequest, error: KvflowError) -> None:
        self._running.pop(request.number, None)
        request.tokens.put_nowait(error)

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            batch = [] if self._paused else self._grown(list(self._running.values())[: self._max_batch])
            if not batch:
                await self._wake.wait()
                continue
            rows = [Row(r.sequence, 1) for r in batch]
            draws = [Draw(r.params, r.seed, r.sequence.length, r.adjustments) for r in batch]
            try:
                choices = await self._thread.run([r.sequence for r in batch], partial(self._step, rows, draws))
            # The loop serves all requests: a failed step ends those in it, and is counted.
            except Exception as error:  # noqa: BLE001
                cause = self._failed("decode step", error)
                for request in batch:
                    self._fail(request, room_error(cause))
                continue
            self.steps += 1
            for request, choice in zip(batch, choices, strict=True):
                if request.number in self._running:
                    self._advance(request, choice)

    def _grown(self, batch: list[_DecodeRequest]) -> list[_DecodeRequest]:
        """Give each request a page for its next token where it needs one; the promise makes sure that there is one."""
        ready: list[_DecodeRequest] = []
        for request in batch:
            s = request.sequence
            try:
                if missing := s.pages_missing(s.computed + 1):
                    s.add_pages(self._pages.take(missing, s.owner))
                    request.admission.took(missing)
                ready.append(request)
            except KvflowError as error:
                self._fail(request, error)
        return ready

    def _step(self, rows: list[Row], draws: list[Draw]) -> list[Choice]:
        """In the model thread."""
        return choose(self._runner.forward(rows), draws)

    def _advance(self, request: _DecodeRequest, choice: Choice) -> None:
        s = request.sequence
        s.computed += 1
        s.append(choice.token_id)
        out = self._token_out(request, choice)
        if out.finish_reason is not None:  # free the pages now: the reader may be slow
            self._retire(request)
            request.admission.release()
        request.tokens.put_nowait(out)
