"""Decode steps in the model thread, several for one call of it, and their tokens on their way within milliseconds.

A call costs some 150 us of waiting for the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvflow.engine.model.runner import Runner
from kvflow.engine.model.sequence import Sequence
from kvflow.engine.model.step import Row
from kvflow.engine.scheduler.adjustments import Adjustments
from kvflow.engine.scheduler.budget import Admission
from kvflow.engine.scheduler.params import SamplingParams, TokenOut, finish
from kvflow.engine.scheduler.sampling import Choice, Draw, choose
from kvflow.protocols.errors import KvflowError

# Steps that are shorter share a delivery: each wakes the event loop, which then takes the interpreter from the model.
DELIVER_EVERY_S = 0.01


class DecodeRequest:
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

    @property
    def tokens_left(self) -> int:
        """How many it may still generate."""
        return self.limit - self.sequence.length + self.sequence.prompt_length

    def token_out(self, choice: Choice, eos_ids: frozenset[int]) -> TokenOut:
        """The token that was appended last, as its reader gets it."""
        generated = self.sequence.length - self.sequence.prompt_length
        reason, matched = finish(choice.token_id, generated, self.limit, self.params, eos_ids)
        return TokenOut(*choice[:3], reason, matched, choice.asked_logprobs)


Tokens = list[tuple[DecodeRequest, TokenOut]]
"""What one step has generated."""


class Burst:
    """Steps over one batch, whose sequences have the pages for all of them: nothing is taken or given back meanwhile.

    The model thread changes the sequences while it runs; the event loop leaves them alone, but for their pages.
    `goes_on` is asked before every step but the first: what is asked, and `is_running`, must be safe in a thread.
    """

    def __init__(
        self, runner: Runner, eos_ids: frozenset[int], *, deliver: Callable[[list[Tokens]], None],
        is_running: Callable[[DecodeRequest], bool], goes_on: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`deliver` is called on the event loop with the tokens of one or more steps, in order: at once with a
        request's last one, else within `DELIVER_EVERY_S` and a step."""
        self._runner, self._eos_ids = runner, eos_ids
        self._deliver, self._is_running, self._goes_on = deliver, is_running, goes_on

    def run(self, batch: list[DecodeRequest], most_steps: int, loop: asyncio.AbstractEventLoop) -> None:
        """In the model thread: at most `most_steps`, each without the requests that have ended."""
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
                batch = [request for request, out in tokens if out.finish_reason is None]
                now = time.monotonic()
                if len(batch) < len(tokens) or now - delivered_at_s >= DELIVER_EVERY_S:
                    loop.call_soon_threadsafe(self._deliver, held)
                    held, delivered_at_s = [], now
        finally:
            if held:
                loop.call_soon_threadsafe(self._deliver, held)

    def _step(self, batch: list[DecodeRequest]) -> Tokens:
        logits = self._runner.forward([Row(r.sequence, 1) for r in batch])
        draws = [Draw(r.params, r.seed, r.sequence.length, r.adjustments) for r in batch]
        tokens: Tokens = []
        for request, choice in zip(batch, choose(logits, draws), strict=True):
            request.sequence.computed += 1
            request.sequence.append(choice.token_id)
            tokens.append((request, request.token_out(choice, self._eos_ids)))
        return tokens
