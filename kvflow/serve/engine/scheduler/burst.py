"""Bursts of decode steps: each call of the model thread runs several steps, whose tokens are
delivered within milliseconds.

Each call waits some 150 us for the event loop, so running several steps per call saves time.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from kvflow.memory.residency import Resident
from kvflow.node.handoff import HandOff
from kvflow.node.packed_array import PackedArray
from kvflow.protocols.errors import Cause, Code, KvflowError, room_error
from kvflow.serve.cache.prefix import Prefix
from kvflow.serve.engine.model.runner import Runner
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler.adjustments import Adjustments
from kvflow.serve.engine.scheduler.budget import Admission
from kvflow.serve.engine.scheduler.local_prompts import LocalPrompts
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut, finish
from kvflow.serve.engine.scheduler.sampling import Choice, Draw, allowed_ahead, choose

# Steps that end within this time share a delivery, because each delivery takes the interpreter lock
# from the model thread.
DELIVER_EVERY_S = 0.01


# A step recomputes at most about this many tokens, because the rest of the batch waits.
RECOMPUTED_PER_STEP = 512


@dataclass(slots=True, eq=False, repr=False)
class DecodeRequest:
    """One request of a decode engine.

    `tokens` carries its tokens, or the error that ended it, to its reader. The request keeps
    prefill's handoff (I9), because a later handoff could overwrite a shared slot. It is None if
    decode computes the prompt itself.
    `resident` owns its places in the pool, or its host memory. `prefix` holds the cached pages with
    which it begins. They belong to the cache, and remain locked while the request is retracted,
    unless `Retractions` unlocks them.
    """

    number: int
    sequence: Sequence
    resident: Resident
    params: SamplingParams
    limit: int
    admission: Admission
    adjustments: Adjustments | None
    handoff: HandOff | None
    prefix: Prefix | None = None
    seed: int = field(init=False)
    # Moves run in the reader's context, so that their log lines name the request.
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    move: asyncio.Task[None] | None = None  # runs while the request is retracted
    protected_until: int = 0
    delivered: int = 0  # tokens that steps here generated and that were delivered so far
    # The number of tokens whose state is certain to be in the pages, even while a step runs.
    settled: int = field(init=False)
    tokens: asyncio.Queue[TokenOut | KvflowError] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.seed = self.params.seed_or_random()
        self.settled = self.sequence.computed

    @property
    def generated(self) -> int:
        return self.sequence.length - self.sequence.prompt_length

    @property
    def tokens_left(self) -> int:
        return self.limit - self.generated

    @property
    def computes_prompt(self) -> bool:
        """True while decode computes the prompt and has not chosen the first token."""
        return self.handoff is None and not self.generated

    @property
    def grammar_error(self) -> KvflowError | None:
        """The error that ends the request, once its grammar cannot go on."""
        if self.adjustments is None or not (text := self.adjustments.error):
            return None
        # Some grammars can be compiled, and match nothing beyond some token.
        return room_error(
            Cause(Code.BAD_REQUEST, f"the grammar of the answer cannot go on: {text}")
        )

    @property
    def protected(self) -> bool:
        """True after the request returns from a retraction, until it generates a page of tokens."""
        return self.generated < self.protected_until

    def pages_missing(self, steps: int) -> int:
        s = self.sequence
        return s.pages_missing(s.length - 1 + min(steps, self.tokens_left))

    def came_back(self, sequence: Sequence) -> None:
        """Continue after a retraction, with the same tokens at other places in the pool."""
        self.sequence = sequence
        if self.adjustments is not None:
            self.adjustments = self.adjustments.over(sequence)
        self.settled = sequence.computed
        self.protected_until = self.generated + sequence.page_size

    def stepped(self) -> None:
        """Record the delivery of a token. The states of all tokens before it are in the pages."""
        self.delivered += 1
        # Prefill chose the first token, unless decode computed the prompt.
        before = self.delivered if self.handoff is not None else self.delivered - 1
        self.settled = self.sequence.prompt_length + before

    def recomputed_row(
        self, most: int, chunk: Callable[[int, int], int], *, one_by_one: bool
    ) -> Row:
        """Return a row of tokens whose state is computed again after a retraction, or of a prompt
        that decode computes itself.

        The row has about `most` tokens; `chunk` decides how many. If it includes the last token,
        the step also generates the next one.
        """
        s = self.sequence
        left = s.length - s.computed
        # Generated tokens are computed one per step, as they were the first time.
        if one_by_one:
            left = max(1, s.prompt_length - s.computed)
        new = chunk(left, most)
        return Row(s, new, int(s.computed + new == s.length))

    async def next_token(self) -> TokenOut:
        """Return the next token for the reader. Raises: the error that ended the request."""
        token = await self.tokens.get()
        if isinstance(token, KvflowError):
            raise token
        return token

    def token_out(self, choice: Choice, eos_ids: frozenset[int]) -> TokenOut:
        reason, matched = finish(choice.token_id, self.generated, self.limit, self.params, eos_ids)
        return TokenOut(*choice[:3], reason, matched, choice.asked_logprobs)


Tokens = list[tuple[DecodeRequest, TokenOut | KvflowError]]
"""The tokens that one step generated, each with its request, or the error that ends it there."""


class Burst:
    """Runs several steps over one batch, whose sequences already have pages for all of these steps.

    No page of the batch is taken or freed during a burst, and only the model thread changes its
    sequences. `goes_on` is called before every step but the first. The model thread calls `goes_on`
    and `is_running`, so both must be thread-safe.
    """

    def __init__(
        self,
        runner: Runner,
        eos_ids: frozenset[int],
        *,
        deliver: Callable[[list[Tokens]], None],
        is_running: Callable[[DecodeRequest], bool],
        goes_on: Callable[[], bool],
        one_by_one: bool = False,
        chunk: Callable[[int, int], int] = min,
        local: LocalPrompts | None = None,
    ) -> None:
        """With `one_by_one`, a recomputation takes one step for each generated token, because the
        states of some models would otherwise differ. `chunk` divides prompts that are computed
        again; see `LoadedModel.chunk`. `local` says how many tokens of new prompts a step computes.

        `deliver` is called on the event loop with the tokens of one or more steps, in order. A
        request's last token is delivered at once, and so is the first one that is chosen here.
        Other tokens are delivered within `DELIVER_EVERY_S` plus one step.
        """
        self._runner = runner
        self._eos_ids = eos_ids
        self._one_by_one = one_by_one
        self._chunk = chunk
        self._local = local
        self._deliver, self._is_running, self._goes_on = deliver, is_running, goes_on

    def run(
        self, batch: list[DecodeRequest], most_steps: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Run at most `most_steps` steps, and none after a step in which a request ends.

        The model thread calls this. The pages of the ended request are held until the burst ends,
        and other requests may wait for them.
        """
        held: list[Tokens] = []
        delivered_at_s = time.monotonic()
        try:
            for step in range(most_steps):
                if step:
                    if not self._goes_on():
                        return
                    batch = [request for request in batch if self._is_running(request)]
                if not batch:
                    return
                tokens = self._step(batch)
                held.append(tokens)
                if any(map(_is_last, tokens)):
                    return
                now = time.monotonic()
                if now - delivered_at_s >= DELIVER_EVERY_S or _has_first_token(tokens):
                    loop.call_soon_threadsafe(self._deliver, held)
                    held, delivered_at_s = [], now
        finally:
            if held:
                loop.call_soon_threadsafe(self._deliver, held)

    def _step(self, batch: list[DecodeRequest]) -> Tokens:
        rows, chosen = self._rows(batch)
        draws = [Draw(r.params, r.seed, r.sequence.length, r.adjustments) for r in chosen]
        ahead = allowed_ahead(draws)
        hidden: torch.Tensor | None = None
        if any(r.params.hidden_states for r in batch):
            logits, hidden = self._runner.forward_with_hidden(rows)
        else:
            logits = self._runner.forward(rows)
        for row in rows:
            row.sequence.computed += row.new
        tokens: Tokens = []
        for i, (request, choice) in enumerate(
            zip(chosen, choose(logits, draws, ahead) if draws else (), strict=True)
        ):
            request.sequence.append(choice.token_id)
            if (error := request.grammar_error) is not None:
                tokens.append((request, error))
                continue
            out = request.token_out(choice, self._eos_ids)
            if hidden is not None and request.params.hidden_states:
                out = msgspec.structs.replace(out, hidden_states=PackedArray.of(hidden[i : i + 1]))
            tokens.append((request, out))
        return tokens

    def _rows(self, batch: list[DecodeRequest]) -> tuple[list[Row], list[DecodeRequest]]:
        again, anew = RECOMPUTED_PER_STEP, self._most_of_prompts(batch)
        rows: list[Row] = []
        chosen: list[DecodeRequest] = []
        for request in batch:
            s = request.sequence
            if request.computes_prompt:
                if not anew:
                    continue
                row = request.recomputed_row(anew, self._chunk, one_by_one=self._one_by_one)
                anew -= min(anew, row.new)
                self._count(row)
            elif s.length - s.computed == 1:
                row = Row(s, 1)
            elif again:
                row = request.recomputed_row(again, self._chunk, one_by_one=self._one_by_one)
                again -= min(again, row.new)
            else:
                continue
            rows.append(row)
            if row.logits:
                chosen.append(request)
        return rows, chosen

    def _most_of_prompts(self, batch: list[DecodeRequest]) -> int:
        """Return how many tokens of prompts this step computes at most."""
        if self._local is None:
            return 0
        # Without others to wait for it, a step may be as long as a recomputation.
        others = any(not request.computes_prompt for request in batch)
        return self._local.chunk if others else max(self._local.chunk, RECOMPUTED_PER_STEP)

    def _count(self, row: Row) -> None:
        if self._local is not None:
            self._local.tokens += row.new


def _is_last(token: tuple[DecodeRequest, TokenOut | KvflowError]) -> bool:
    out = token[1]
    return isinstance(out, KvflowError) or out.finish_reason is not None


def _has_first_token(tokens: Tokens) -> bool:
    return any(request.handoff is None and request.generated == 1 for request, _ in tokens)
