"""Decode steps in the model thread: several for each call of it, with their tokens delivered within
milliseconds.

A call costs some 150 us of waiting for the event loop, hence several steps per call.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable

import msgspec
import torch

from kvflow.memory.residency import Resident
from kvflow.node.handoff import HandOff
from kvflow.node.packed_array import PackedArray
from kvflow.protocols.errors import KvflowError
from kvflow.serve.cache.prefix import Prefix
from kvflow.serve.engine.model.runner import Runner
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler.adjustments import Adjustments
from kvflow.serve.engine.scheduler.budget import Admission
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut, finish
from kvflow.serve.engine.scheduler.sampling import Choice, Draw, choose

# Steps that are shorter share a delivery, since each delivery wakes the event loop, which then
# takes the interpreter from the model.
DELIVER_EVERY_S = 0.01


# Tokens of retracted requests in one step: the others of the batch wait for them.
RECOMPUTED_PER_STEP = 512


class DecodeRequest:
    """One request of the batch.

    `tokens` carries its tokens, or the error that ended it, to its reader. It keeps prefill's
    hand-over as long as it lives (I9): there is no slot that a later hand-over could fill. Its
    places in the pool, or its host memory, belong to `resident`.
    """

    __slots__ = (
        "adjustments",
        "admission",
        "context",
        "delivered",
        "handoff",
        "limit",
        "move",
        "number",
        "params",
        "prefix",
        "protected_until",
        "resident",
        "seed",
        "sequence",
        "settled",
        "tokens",
    )

    def __init__(
        self,
        number: int,
        sequence: Sequence,
        resident: Resident,
        params: SamplingParams,
        limit: int,
        admission: Admission,
        adjustments: Adjustments | None,
        handoff: HandOff,
        prefix: Prefix | None = None,
    ) -> None:
        """`prefix`: the cached pages that it begins with and does not own; it keeps them while it
        is retracted.
        """
        self.number = number
        self.sequence = sequence
        self.params = params
        self.limit = limit
        self.admission = admission
        self.resident, self.handoff, self.prefix = resident, handoff, prefix
        self.adjustments = adjustments
        self.seed = params.seed_or_random()
        # Its moves run in the reader's context, so that their log lines name the request.
        self.context = contextvars.copy_context()
        self.move: asyncio.Task[None] | None = None  # while it is retracted
        self.protected_until = 0
        self.delivered = 0  # tokens that steps generated
        # Tokens whose state is in its pages for certain, also while a step runs.
        self.settled = sequence.computed
        self.tokens: asyncio.Queue[TokenOut | KvflowError] = asyncio.Queue()

    @property
    def generated(self) -> int:
        return self.sequence.length - self.sequence.prompt_length

    @property
    def tokens_left(self) -> int:
        """The number of tokens that it may still generate."""
        return self.limit - self.generated

    @property
    def protected(self) -> bool:
        """True after its return, until it generates a page of tokens."""
        return self.generated < self.protected_until

    def pages_missing(self, steps: int) -> int:
        """Return how many more pages its next `steps` tokens need."""
        s = self.sequence
        return s.pages_missing(s.length - 1 + min(steps, self.tokens_left))

    def came_back(self, sequence: Sequence, adjustments: Adjustments | None) -> None:
        """Continue with the same tokens at other places of the pool."""
        self.sequence, self.adjustments = sequence, adjustments
        self.settled = sequence.computed
        self.protected_until = self.generated + sequence.page_size

    def stepped(self) -> None:
        """Record that a token was delivered: the state of all tokens before it is in the pages."""
        self.delivered += 1
        self.settled = self.sequence.prompt_length + self.delivered

    def recomputed_row(
        self, most: int, chunk: Callable[[int, int], int], *, one_by_one: bool
    ) -> Row:
        """Return a row of tokens whose state is computed once more.

        It has at most `most` tokens where the model lets them be divided so, and yields the next
        token if they are the last.
        """
        s = self.sequence
        left = s.length - s.computed
        # Generated tokens are computed in steps of one, as they were the first time.
        if one_by_one:
            left = max(1, s.prompt_length - s.computed)
        new = chunk(left, most)
        return Row(s, new, int(s.computed + new == s.length))

    def token_out(self, choice: Choice, eos_ids: frozenset[int]) -> TokenOut:
        """Return the token that was appended last, as its reader receives it."""
        reason, matched = finish(choice.token_id, self.generated, self.limit, self.params, eos_ids)
        return TokenOut(*choice[:3], reason, matched, choice.asked_logprobs)


Tokens = list[tuple[DecodeRequest, TokenOut]]
"""The tokens that one step generated, by request."""


class Burst:
    """Steps over one batch, whose sequences have the pages for all of them.

    No page is taken or given back meanwhile. The model thread changes the sequences while it runs;
    the event loop leaves them alone, except for their pages. `goes_on` is called before every step
    but the first; `goes_on` and `is_running` must be safe to call from a thread.
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
    ) -> None:
        """`one_by_one`: generated tokens are computed again in steps of one token, for models whose
        state would otherwise differ. `chunk`: how a prompt that is computed again is divided, see
        `LoadedModel.chunk`.

        `deliver` is called on the event loop with the tokens of one or more steps, in order: at
        once with a request's last one, otherwise within `DELIVER_EVERY_S` and a step.
        """
        self._runner = runner
        self._eos_ids = eos_ids
        self._one_by_one = one_by_one
        self._chunk = chunk
        self._deliver, self._is_running, self._goes_on = deliver, is_running, goes_on

    def run(
        self, batch: list[DecodeRequest], most_steps: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Run at most `most_steps` in the model thread, up to the first one in which a request
        ends.

        Others may wait for the pages of that request, which are held until the burst ends.
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
                if any(out.finish_reason is not None for _, out in tokens):
                    return
                now = time.monotonic()
                if now - delivered_at_s >= DELIVER_EVERY_S:
                    loop.call_soon_threadsafe(self._deliver, held)
                    held, delivered_at_s = [], now
        finally:
            if held:
                loop.call_soon_threadsafe(self._deliver, held)

    def _step(self, batch: list[DecodeRequest]) -> Tokens:
        rows, chosen = self._rows(batch)
        hidden: torch.Tensor | None = None
        if any(r.params.hidden_states for r in batch):
            logits, hidden = self._runner.forward_with_hidden(rows)
        else:
            logits = self._runner.forward(rows)
        draws = [Draw(r.params, r.seed, r.sequence.length, r.adjustments) for r in chosen]
        for row in rows:
            row.sequence.computed += row.new
        tokens: Tokens = []
        for i, (request, choice) in enumerate(
            zip(chosen, choose(logits, draws) if draws else (), strict=True)
        ):
            request.sequence.append(choice.token_id)
            out = request.token_out(choice, self._eos_ids)
            if hidden is not None and request.params.hidden_states:
                out = msgspec.structs.replace(out, hidden_states=PackedArray.of(hidden[i : i + 1]))
            tokens.append((request, out))
        return tokens

    def _rows(self, batch: list[DecodeRequest]) -> tuple[list[Row], list[DecodeRequest]]:
        """Return the rows of a step, and the requests that receive a token of it, in that order."""
        left = RECOMPUTED_PER_STEP
        rows: list[Row] = []
        chosen: list[DecodeRequest] = []
        for request in batch:
            s = request.sequence
            if s.length - s.computed == 1:
                row = Row(s, 1)
            elif left:
                row = request.recomputed_row(left, self._chunk, one_by_one=self._one_by_one)
                left -= min(left, row.new)
            else:
                continue
            rows.append(row)
            if row.logits:
                chosen.append(request)
        return rows, chosen
