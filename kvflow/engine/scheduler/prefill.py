"""The prefill engine: chunks of several prompts per step; full pages leave while the next chunk is computed."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from concurrent.futures import Executor
from functools import partial

from kvflow.engine.model.load import LoadedModel
from kvflow.engine.model.sequence import Prompt, Sequence
from kvflow.engine.model.step import Row
from kvflow.engine.model.thread import ModelThread
from kvflow.engine.scheduler.budget import LOOK_AGAIN_S
from kvflow.engine.scheduler.handoff import HandOff
from kvflow.engine.scheduler.limits import EngineLimits
from kvflow.engine.scheduler.loop import EngineLoop
from kvflow.engine.scheduler.params import EngineLoad, SamplingParams, TokenOut, finish
from kvflow.engine.scheduler.rooms import PrefillSession
from kvflow.engine.scheduler.sampling import Choice, Draw, choose
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import Cause, Code, KvflowError, room_error
from kvflow.protocols.pages.layout import PageIndices


class _Job:
    """One prompt under way. `first` resolves to its first token when the last chunk is on its way."""

    __slots__ = ("draw", "first", "params", "sent_pages", "sequence", "session")

    def __init__(self, sequence: Sequence, session: PrefillSession, params: SamplingParams, sent_pages: int) -> None:
        self.sequence, self.session, self.params, self.sent_pages = sequence, session, params, sent_pages
        self.draw = Draw(params, params.seed_or_random(), sequence.prompt_length)
        self.first: asyncio.Future[TokenOut | None] = asyncio.get_running_loop().create_future()


class PrefillEngine(EngineLoop):
    """Prompts in order of arrival, `chunk_tokens` of each at most per step, `max_batch_tokens` in all (and
    `max_batch_rooms`, where the composition of a batch must be known: bf16 logits depend on it)."""

    def __init__(
        self, model: LoadedModel, pool: PagedPool, pages: PageAllocator, executor: Executor, *,
        chunk_tokens: int = 512, max_batch_tokens: int = 512, max_batch_rooms: int | None = None,
    ) -> None:  # fmt: skip
        """Raises: LayoutError when the pool is not this model's."""
        super().__init__("prefill")
        self._runner = model.runner(pool)
        self._model, self._pages, self._page_size = model, pages, pool.layout.page_size
        self.limits = EngineLimits(model.context_length, model.vocab_size, self._page_size, pages.capacity)
        self._thread = ModelThread(executor, pages)
        self._chunk_tokens, self._max_tokens = max(1, chunk_tokens), max(1, max_batch_tokens)
        self._max_rooms = max_batch_rooms or 1 << 30
        self._waiting: deque[_Job] = deque()  # for pages
        self._jobs: dict[int, _Job] = {}  # in order of arrival
        self._numbers = itertools.count()

    def _fail_all(self, cause: Cause) -> None:
        for job in [*self._waiting, *self._jobs.values()]:
            self._fail(job, room_error(cause))

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._jobs), len(self._waiting))

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raises: MisuseError, CapacityError; what `prefill` would refuse."""
        self.limits.check_prompt(prompt)

    async def prefill(
        self, session: PrefillSession, prompt: Prompt, params: SamplingParams, *, into: PageIndices | None = None
    ) -> TokenOut:
        """Compute `prompt`, send its pages, sample and hand over the first token; returns it when all has landed.

        `into`: pages of the caller's to compute in; without it the engine takes its own, and gives them back. Whatever
        goes wrong, cancellation included, closes the session with its cause.
        Raises: MisuseError, CapacityError, the room's error.
        """
        job: _Job | None = None
        owner = ("prefill", next(self._numbers))
        try:
            self._refuse_when_closing()
            self.limits.check_prompt(prompt)
            prefix = await session.matched()
            self._refuse_when_closing()
            sequence = Sequence(owner, prompt, 0, self._page_size)
            job = _Job(sequence, session, params, prefix // self._page_size)
            self._enqueue(job, into)
            session.on_end(lambda: self._room_ended(job))
            first = await job.first
            await session.done()
            if first is None:
                raise room_error(Cause(Code.CLIENT_GONE, "the room ended"))
            return first
        except KvflowError as error:
            session.close(error.cause())
            raise
        except asyncio.CancelledError:
            session.close(Cause(Code.CLIENT_GONE, "the request was cancelled"))
            raise
        finally:
            if job is not None:
                self._drop(job, owned=into is None)
            session.close()

    def _enqueue(self, job: _Job, into: PageIndices | None) -> None:
        if into is None:
            self._waiting.append(job)
        else:
            job.sequence.add_pages(into)
            self._jobs[id(job)] = job
        self._wake.set()

    def _room_ended(self, job: _Job) -> None:
        """Nothing more of it is computed; `done` says what happened."""
        self._jobs.pop(id(job), None)
        if not job.first.done():
            job.first.set_result(None)

    def _fail(self, job: _Job, error: KvflowError) -> None:
        self._jobs.pop(id(job), None)
        if not job.first.done():
            job.first.set_exception(error)

    def _drop(self, job: _Job, *, owned: bool) -> None:
        """Forget the job; pages that a step or a write still uses become free when that has ended."""
        self._jobs.pop(id(job), None)
        if job in self._waiting:
            self._waiting.remove(job)
        if owned:
            self._pages.give_back(job.sequence.pages, job.sequence.owner)
        self._wake.set()

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            self._take_pages()
            rows, jobs = self._pick()
            if not rows:
                await self._sleep()
                continue
            try:
                choices = await self._thread.run([r.sequence for r in rows], partial(self._step, rows, jobs))
            # The loop serves everybody: one failed step ends the requests in it, is counted, and no more.
            except Exception as error:  # noqa: BLE001
                cause = self._failed("prefill step", error)
                for job in jobs:
                    self._fail(job, room_error(cause))
                continue
            for row, job in zip(rows, jobs, strict=True):
                if id(job) in self._jobs:
                    self._advance(job, row, choices.get(id(job)))

    async def _sleep(self) -> None:
        """Until something happens; rooms free pages silently, so a request that waits for some looks again."""
        if not self._waiting:
            await self._wake.wait()
            return
        waiting = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait([waiting], timeout=LOOK_AGAIN_S)
        finally:
            waiting.cancel()

    def _take_pages(self) -> None:
        """First come first served: a prompt gets all of its pages, or waits."""
        while self._waiting:
            job = self._waiting[0]
            if job.first.done():
                self._waiting.popleft()
                continue
            missing = job.sequence.pages_missing(job.sequence.prompt_length)
            if missing > self._pages.free_pages:
                return
            self._waiting.popleft()
            job.sequence.add_pages(self._pages.take(missing, job.sequence.owner))
            self._jobs[id(job)] = job

    def _pick(self) -> tuple[list[Row], list[_Job]]:
        """One step: a chunk of each of the oldest prompts, as many as the budgets allow."""
        left = self._max_tokens
        rows: list[Row] = []
        jobs: list[_Job] = []
        for job in self._jobs.values():
            s = job.sequence
            remaining = s.prompt_length - s.computed
            if not remaining:
                continue  # computed, and on its way
            if not left or len(rows) == self._max_rooms:
                break
            count = min(self._chunk_tokens, remaining, left)
            rows.append(Row(s, count, count == remaining))
            jobs.append(job)
            left -= count
        return rows, jobs

    def _step(self, rows: list[Row], jobs: list[_Job]) -> dict[int, Choice]:
        """In the model thread: the first token of every job whose prompt this step completes, by job."""
        logits = self._runner.forward(rows)
        last = [job for row, job in zip(rows, jobs, strict=True) if row.wants_logits]
        return dict(zip(map(id, last), choose(logits, [job.draw for job in last]), strict=True)) if last else {}

    def _advance(self, job: _Job, row: Row, choice: Choice | None) -> None:
        """After a step: send what is complete, with the first token when that is all."""
        s = job.sequence
        s.computed += row.new
        ready = s.page_count if choice else s.computed // self._page_size
        start, job.sent_pages = min(job.sent_pages, ready), max(job.sent_pages, ready)
        pages = s.pages[start:ready].copy()
        try:
            if choice is None:
                if pages.size:
                    job.session.send(pages)
                return
            handoff = HandOff(
                first_token=choice.token_id,
                logprob=choice.logprob,
                top_logprobs=choice.top_logprobs,
                prompt_tokens=s.prompt_length,
            )
            job.session.send(pages, last=True, handoff=handoff.encode())
        except KvflowError as error:
            self._fail(job, error)
            return
        # A broken room must not take the others with it.
        except Exception as error:  # noqa: BLE001
            self._fail(job, room_error(self._failed("sending pages", error)))
            return
        reason, matched = finish(choice.token_id, 1, job.params.max_new_tokens, job.params, self._model.eos_ids)
        if not job.first.done():
            job.first.set_result(TokenOut(choice.token_id, choice.logprob, choice.top_logprobs, reason, matched))
