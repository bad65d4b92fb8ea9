"""What a request asks of the engine, and what it gets back, token by token. No torch in here."""

from __future__ import annotations

import math
import secrets
from typing import Literal

import msgspec

from kvflow.protocols.errors import MisuseError

FinishReason = Literal["stop", "length"]

MAX_TOP_LOGPROBS = 128
MAX_STOPS = 64
GREEDY_BELOW = 1e-6  # dividing by less leaves the range of a float; the answer is the most likely token anyway


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0 or -1 is off; `logprobs` is the number of top
    logprobs (0: only the chosen token's own, None: none at all). `stop` strings are the text layer's business.

    Raises: MisuseError naming the field, when a value makes no sense.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise MisuseError(f"temperature {self.temperature} is not a number >= 0")
        if not 0 < self.top_p <= 1:
            raise MisuseError(f"top_p {self.top_p} is outside (0, 1]")
        if self.top_k < -1:
            raise MisuseError(f"top_k {self.top_k} is below -1")
        if self.max_new_tokens < 1:
            raise MisuseError(f"max_new_tokens {self.max_new_tokens} is below 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise MisuseError(f"logprobs {self.logprobs} is outside 0..{MAX_TOP_LOGPROBS}")
        if len(self.stop) > MAX_STOPS or len(self.stop_token_ids) > MAX_STOPS:
            raise MisuseError(f"stop: more than {MAX_STOPS} entries")
        if "" in self.stop:
            raise MisuseError("stop: an empty string would stop everything")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def seed_or_random(self) -> int:
        """The seed of this request; a fresh one where none was given."""
        return secrets.randbits(63) if self.seed is None else self.seed


class TokenOut(msgspec.Struct, frozen=True):
    """One generated token; a request's last has a `finish_reason`. `matched_stop` is the id that stopped it."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None


class EngineLoad(msgspec.Struct, frozen=True):
    """How busy an engine is: requests in the batch, requests waiting for pages or a turn."""

    running: int
    waiting: int


def finish(
    token_id: int, generated: int, limit: int, params: SamplingParams, eos_ids: frozenset[int]
) -> tuple[FinishReason | None, int | None]:
    """Whether `token_id`, the `generated`-th new token of at most `limit`, ends the request, and which id did."""
    if token_id in params.stop_token_ids or (token_id in eos_ids and not params.ignore_eos):
        return "stop", token_id
    return ("length", None) if generated >= limit else (None, None)
