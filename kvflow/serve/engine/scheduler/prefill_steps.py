"""The steps of prefill: computing chunks of prompts in the model thread, and sending pages after
each step.

This module makes no scheduling decisions. The engine chooses the prompts of a step. If this rank
follows the first one, the first rank's engine chooses them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial

import torch

from kvflow.aio import Threads
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.node.handoff import HandOff
from kvflow.node.packed_array import PackedArray
from kvflow.protocols.cache.choices import PrefetchPolicy
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import PageIndices
from kvflow.serve.cache.prefix import Prefix, PrefixCache
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.sequence import Sequence, in_one_list
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.model.thread import ModelThread
from kvflow.serve.engine.scheduler.adjustments import Adjustments, adjustments_of
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut, finish
from kvflow.serve.engine.scheduler.prefetch import bring
from kvflow.serve.engine.scheduler.prefill_states import PromptStates, StepCopies
from kvflow.serve.engine.scheduler.rooms import PrefillRoomPort
from kvflow.serve.engine.scheduler.sampling import Choice, Draw, choose
from kvflow.serve.engine.scheduler.scoring import PromptScorer
from kvflow.telemetry.spans import MARKS, Marks


def most_cached(prompt_length: int, params: SamplingParams, fewest_tokens: int = 1) -> int:
    """Return how many tokens of a prompt the cache may supply at most.

    The model must compute tokens whose logits are wanted, and at least the last `fewest_tokens`.
    """
    start, most = params.prompt_logprobs_from, prompt_length - fewest_tokens
    return most if start is None else min(start, most)


@dataclass(slots=True, eq=False, repr=False)
class PrefillRequest:
    """One prompt in the engine.

    `first` resolves to the first token once this rank knows it, or to None if the room ends first.
    `ticket` is the request's number in a group; `namespace` holds its cached prefixes.
    `fewest_tokens` is the smallest number of tokens that the model computes at once.
    """

    sequence: Sequence
    room: PrefillRoomPort
    params: SamplingParams
    adjustments: InitVar[Adjustments | None]
    _: KW_ONLY
    ticket: int = 0
    namespace: Namespace = ANY
    fewest_tokens: int = 1
    sent_pages: int = 0  # includes the pages that decode already has
    # The number of tokens that every rank has cached, once the ranks agree on it.
    agreed: int | None = None
    # True while the request has places, but no step may name it until the ranks agree.
    is_asking: bool = False
    # The locked cached pages with which the request begins; None while none are locked.
    prefix: Prefix | None = None
    # Slots of the state store that the request owns, by the number of tokens that a state covers.
    states: dict[int, int] = field(default_factory=dict)
    cached_tokens: int = 0  # tokens of the prompt that the cache had
    queued_at_s: float = field(default_factory=time.perf_counter)
    marks: Marks | None = field(default_factory=MARKS.get)
    draw: Draw = field(init=False)
    first: asyncio.Future[TokenOut | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    scorer: PromptScorer | None = field(init=False)
    hidden_states: PackedArray | None = field(init=False)  # at the last token of the prompt
    has_begun: bool = field(init=False)  # True once a step names the request
    choice: Choice | None = field(init=False)  # set at the prompt's end, if this rank chooses
    # The first token from another rank, if it arrives before the group starts the request.
    early_token: TokenOut | None = field(init=False)

    def __post_init__(self, adjustments: Adjustments | None) -> None:
        params, sequence = self.params, self.sequence
        self.draw = Draw(params, params.seed_or_random(), sequence.prompt_length, adjustments)
        self._begin()

    def _begin(self) -> None:
        params, start = self.params, self.params.prompt_logprobs_from
        if start is None:
            self.scorer = None
        else:
            self.scorer = PromptScorer(
                self.sequence, start, params.logprobs or 0, params.logprob_token_ids
            )
        self.hidden_states = self.choice = self.early_token = None
        self.has_begun = False

    @property
    def most_cached(self) -> int:
        most = most_cached(self.sequence.prompt_length, self.params, self.fewest_tokens)
        return most if self.agreed is None else min(most, self.agreed)

    def start_again(self) -> tuple[PageIndices, PageIndices]:
        """Forget what was computed, and return the places to free. `draw` stays the same."""
        self._begin()
        return self.sequence.start_again()


class PrefillSteps:
    """Runs prefill steps over one model's pool, and sends the computed pages.

    `samples` is True at the rank that has the logits and chooses the first tokens. Any other rank
    sends its pages without a handoff.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: PagedPool,
        pages: PageAllocator,
        executor: Threads,
        *,
        samples: bool = True,
        cache: PrefixCache | None = None,
    ) -> None:
        """`cache` is the prefix cache of this pool. It must keep states if the pool has rows.
        Prompts begin with their cached pages.

        Raises: LayoutError if the pool does not fit the model, MisuseError if the cache does not.
        """
        if cache is not None and (
            model.whole_prompts or (cache.states is None and pool.layout.num_rows)
        ):
            if model.whole_prompts:
                what = "computes every prompt as a whole"
            else:
                what = "needs a cache with states"
            raise MisuseError(f"prefixes of {model.name} cannot be cached so: the model {what}")
        self.runner = model.runner(pool)
        self.layout, self.places, self.pages = pool.layout, pool.places_over(pages), pages
        self.rows = pool.rows if pool.layout.num_rows else None
        self.samples, self.cache = samples, cache
        self._eos_ids, self._chunk, self._grammars = model.eos_ids, model.chunk, model.grammars
        self._states: PromptStates | None = None
        if cache is not None and cache.states is not None:
            self._states = PromptStates(
                cache, cache.states, model.fewest_tokens, self.runner.device
            )
        self._thread = ModelThread(executor, self.places, pool.layout, self.runner.device)

    def adjustments_of(self, params: SamplingParams, sequence: Sequence) -> Adjustments | None:
        """Return what changes the logits of a request, if this rank chooses its first token.

        Raises: MisuseError if the request has a grammar that cannot be compiled.
        """
        if not self.samples:
            return None
        return adjustments_of(params, sequence, self._eos_ids, self._grammars)

    async def compiled(self, params: SamplingParams, sequence: Sequence) -> Adjustments | None:
        """Return `adjustments_of`, once a thread has compiled the request's grammar.

        Raises: as `adjustments_of`.
        """
        await self._grammars.compile(params.grammar)
        return self.adjustments_of(params, sequence)

    def short_of(self, request: PrefillRequest) -> tuple[int, int]:
        """Count the pages and rows that a whole prompt still lacks; negative if more are free.

        Cached pages of the prompt and pages that the cache can evict do not count as lacking. If
        the request holds no pages yet, this also locks its cached pages.
        """
        s = request.sequence
        if self.cache is not None and request.prefix is None and not s.page_count:
            request.prefix = self._match(self.cache, request)
        wanted = s.pages_missing(s.prompt_length) - (
            0 if request.prefix is None else request.prefix.pages.size
        )
        free = self.pages.reclaim(wanted)
        missing = wanted - free if free >= wanted else max(1, wanted - self.pages.available_pages)
        return missing, 0 if self.rows is None else 1 - self.rows.free_pages

    def take_places(self, request: PrefillRequest) -> None:
        """Take all places that a prompt needs besides its cached pages. Enough must be free."""
        s = request.sequence
        if request.prefix is not None:
            s.begin_with(request.prefix.pages)
            request.cached_tokens = s.computed
        needed = s.pages_missing(s.prompt_length)
        counts = (needed,) if self.rows is None else (needed, 1)
        s.add(self.layout.split(self.places.take_room(counts, s.owner)))

    def count(self, request: PrefillRequest) -> None:
        """Count a prompt that begins, and its cached tokens, in the cache's statistics."""
        if self.cache is not None and request.prefix is not None:
            self.cache.count(request.sequence.prompt_length, request.prefix)

    def find(self, request: PrefillRequest, most_tokens: int) -> None:
        """Lock the cached pages of the first `most_tokens` tokens, for a request without places."""
        request.agreed = most_tokens
        if self.cache is not None:
            request.prefix = self._match(self.cache, request)

    def lacks(self, request: PrefillRequest) -> bool:
        """Return True if some cached pages of the prompt are on the host only."""
        s, cache = request.sequence, self.cache
        return cache is not None and cache.lacks(
            s.tokens[: s.prompt_length], request.most_cached, request.namespace
        )

    async def load(self, request: PrefillRequest, policy: PrefetchPolicy) -> None:
        """Load cached pages from the host, and lock the prefix. The request must have no places."""
        assert self.cache is not None
        s = request.sequence
        prefix = await bring(
            self.cache,
            policy,
            s.tokens[: s.prompt_length],
            request.most_cached,
            request.namespace,
            from_storage=False,
        )
        self.forget_prefix(request)
        request.prefix = prefix

    def agree(self, request: PrefillRequest, tokens: int) -> None:
        """Shorten the locked prefix to `tokens` tokens, which every rank has cached.

        The request must have no places.
        """
        request.agreed = tokens
        longer = request.prefix
        if self.cache is not None and longer is not None and longer.tokens > tokens:
            # Lock the shorter prefix first, so that none of its pages is evicted in between.
            request.prefix = self._match(self.cache, request)
            longer.release()

    def _match(self, cache: PrefixCache, request: PrefillRequest) -> Prefix:
        s = request.sequence
        return cache.match(s.tokens[: s.prompt_length], request.most_cached, request.namespace)

    def give_back(self, request: PrefillRequest) -> None:
        """Free the places of a request. Places in use become free when their use ends (I13)."""
        self._give_back(request, *request.sequence.places)

    def keep(self, request: PrefillRequest) -> None:
        """Hand over the full pages of a request to the cache, after its room succeeded."""
        s, prefix = request.sequence, request.prefix
        if self.cache is not None and prefix is not None and s.page_count:
            tokens = s.tokens[: s.prompt_length]
            s.shared = self.cache.keep(tokens, s.pages, s.owner, prefix, request.params.priority)
            if self._states is not None:
                self._states.keep(request)

    def forget_prefix(self, request: PrefillRequest) -> None:
        """Unlock the cached pages of a waiting request, so that they can be evicted. Idempotent."""
        if request.prefix is not None:
            request.prefix.release()
            request.prefix = None

    def _give_back(self, request: PrefillRequest, pages: PageIndices, rows: PageIndices) -> None:
        self.places.give_back(in_one_list(self.layout, pages, rows), request.sequence.owner)
        if self._states is not None:
            self._states.give_back(request)
        self.forget_prefix(request)

    def start_again(self, request: PrefillRequest) -> None:
        """Free the places of a request, and forget what was computed. No step may include it."""
        self._give_back(request, *request.start_again())

    def chunk(self, request: PrefillRequest, most: int) -> int:
        if self._states is not None and request.prefix is not None:
            return self._states.chunk(request, most, self._chunk)
        return self._chunk(request.sequence.prompt_length - request.sequence.computed, most)

    async def run(self, rows: list[Row], requests: list[PrefillRequest]) -> None:
        """Compute `rows`, one for each of `requests`.

        If this rank chooses first tokens, requests whose prompt is complete have their `choice`
        afterwards.

        Raises: what the model raises.
        """
        sequences = [r.sequence for r in rows]
        if self._states is None:
            choices = await self._thread.run(sequences, partial(self._step, rows, requests))
        else:
            with self._states.step(rows, requests) as copies:
                choices = await self._thread.run(
                    sequences, partial(self._step_with, copies, rows, requests)
                )
        for row, request in zip(rows, requests, strict=True):
            request.sequence.computed += row.new
            request.choice = choices.get(id(request))

    def _step_with(
        self, copies: StepCopies, rows: list[Row], requests: list[PrefillRequest]
    ) -> dict[int, Choice]:
        copies.before()
        choices = self._step(rows, requests)
        copies.after()
        return choices

    def _step(self, rows: list[Row], requests: list[PrefillRequest]) -> dict[int, Choice]:
        """Run one step in the model thread; returns the choices by id of the request."""
        hidden: torch.Tensor | None = None
        if any(request.params.hidden_states for request in requests) and self.samples:
            logits, hidden = self.runner.forward_with_hidden(rows)
        else:
            logits = self.runner.forward(rows)
        if not self.samples:
            return {}
        last: list[PrefillRequest] = []
        ends: list[int] = []
        for row, request, end in zip(
            rows, requests, itertools.accumulate(row.logits for row in rows), strict=True
        ):
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
        return dict(
            zip(map(id, last), choose(logits, [request.draw for request in last]), strict=True)
        )

    def send(self, request: PrefillRequest) -> None:
        """Send the full pages of a request that have not been sent yet.

        After the prompt's last chunk, send the remaining pages and the row, with the handoff if
        this rank chose the first token.

        Raises: the room's error.
        """
        s, choice = request.sequence, request.choice
        complete = s.computed == s.prompt_length
        ready = s.page_count if complete else s.computed // s.page_size
        start, request.sent_pages = min(request.sent_pages, ready), max(request.sent_pages, ready)
        pages = s.pages[start:ready].copy()
        if not complete:
            if pages.size:
                request.room.send(pages)
            return
        places = in_one_list(self.layout, pages, s.rows)
        request.room.send(
            places, last=True, handoff=b"" if choice is None else self._handoff(request, choice)
        )

    def _handoff(self, request: PrefillRequest, choice: Choice) -> bytes:
        handoff = HandOff(
            first_token=choice.token_id,
            logprob=choice.logprob,
            top_logprobs=choice.top_logprobs,
            asked_logprobs=choice.asked_logprobs,
            prompt_tokens=request.sequence.prompt_length,
            cached_tokens=request.cached_tokens,
            prompt_logprobs=request.scorer.scores if request.scorer else None,
            hidden_states=request.hidden_states,
            sampling=request.params.first_token_digest(),
        )
        return handoff.encode()

    def token_out(self, request: PrefillRequest, choice: Choice) -> TokenOut:
        params = request.params
        reason, matched = finish(choice.token_id, 1, params.max_new_tokens, params, self._eos_ids)
        asked, hidden = choice.asked_logprobs, request.hidden_states
        return TokenOut(*choice[:3], reason, matched, asked, None, hidden, request.cached_tokens)
