"""Decode steps in the model thread, several for one call of it, and their tokens on their way
within milliseconds.

A call costs some 150 us of waiting for the event loop.
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

# Steps that are shorter share a delivery: each wakes the event loop, which then takes the
# interpreter from the model.
DELIVER_EVERY_S = 0.01


RECOMPUTED_PER_STEP = 512  # tokens of retracted requests: the others of a batch wait for them


class DecodeRequest:
    """One sequence of the batch; `tokens` carries its tokens, or the error that ended it, to its
    reader.

    What prefill has handed over is its own as long as it lives (I9): there is no slot that a later
    one could fill. What it holds of the pool, or of host memory, is its `resident`.
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
        """`prefix`: the pages that it begins with, and does not own; it keeps them while it is
        away.
        """
        self.number, self.sequence, self.params, self.limit, self.admission = (
            number,
            sequence,
            params,
            limit,
            admission,
        )
        self.resident, self.handoff, self.prefix = resident, handoff, prefix
        self.adjustments = adjustments
        self.seed = params.seed_or_random()
        # Of its reader: log lines of its moves name its request.
        self.context = contextvars.copy_context()
        self.move: asyncio.Task[None] | None = None  # while it is retracted
        self.protected_until = 0
        self.delivered = 0  # tokens of steps
        # Tokens whose state is in its pages, also while a step runs.
        self.settled = sequence.computed
        self.tokens: asyncio.Queue[TokenOut | KvflowError] = asyncio.Queue()

    @property
    def generated(self) -> int:
        return self.sequence.length - self.sequence.prompt_length

    @property
    def tokens_left(self) -> int:
        """How many it may still generate."""
        return self.limit - self.generated

    @property
    def protected(self) -> bool:
        """It has come back, and has not generated a page of tokens since."""
        return self.generated < self.protected_until

    def pages_missing(self, steps: int) -> int:
        """How many more pages its next `steps` tokens need."""
        s = self.sequence
        return s.pages_missing(s.length - 1 + min(steps, self.tokens_left))

    def came_back(self, sequence: Sequence, adjustments: Adjustments | None) -> None:
        """The same tokens, at other places of the pool."""
        self.sequence, self.adjustments = sequence, adjustments
        self.settled = sequence.computed
        self.protected_until = self.generated + sequence.page_size

    def stepped(self) -> None:
        """A token of it was delivered: the state of all before it is there."""
        self.delivered += 1
        self.settled = self.sequence.prompt_length + self.delivered

    def recomputed_row(
        self, most: int, chunk: Callable[[int, int], int], *, one_by_one: bool
    ) -> Row:
        """Tokens whose state it computes once more, at most `most` where the model lets them be
        divided so; with them its next token, if they are the last."""
        s = self.sequence
        left = s.length - s.computed
        if one_by_one:  # the generated ones in steps of one token, as they were computed before
            left = max(1, s.prompt_length - s.computed)
        new = chunk(left, most)
        return Row(s, new, int(s.computed + new == s.length))

    def token_out(self, choice: Choice, eos_ids: frozenset[int]) -> TokenOut:
        """The token that was appended last, as its reader gets it."""
        reason, matched = finish(choice.token_id, self.generated, self.limit, self.params, eos_ids)
        return TokenOut(*choice[:3], reason, matched, choice.asked_logprobs)


Tokens = list[tuple[DecodeRequest, TokenOut]]
"""What one step has generated."""


class Burst:
    """Steps over one batch, whose sequences have the pages for all of them: nothing is taken or
    given back meanwhile.

    The model thread changes the sequences while it runs; the event loop leaves them alone, but for
    their pages. `goes_on` is asked before every step but the first: what is asked, and
    `is_running`, must be safe in a thread.
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
        """`one_by_one`: generated tokens that are computed again are so in steps of one token, for
        models whose state would be another one. `chunk`: how a prompt is divided that is computed
        again, see `LoadedModel.chunk`.

        `deliver` is called on the event loop with the tokens of one or more steps, in order: at
        once with a request's last one, else within `DELIVER_EVERY_S` and a step."""
        self._runner, self._eos_ids, self._one_by_one, self._chunk = (
            runner,
            eos_ids,
            one_by_one,
            chunk,
        )
        self._deliver, self._is_running, self._goes_on = deliver, is_running, goes_on

    def run(
        self, batch: list[DecodeRequest], most_steps: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        """In the model thread: at most `most_steps`, up to the first one in which a request ends:
        others may wait for its pages, which are held until the burst has ended."""
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
        """What a step computes, and the requests that get a token of it, in that order."""
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
