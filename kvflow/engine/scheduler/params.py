"""What a request asks of the engine, and what it gets back, token by token. Does not import torch."""

from __future__ import annotations

import math
import secrets
from typing import Literal

import msgspec

from kvflow.protocols.errors import MisuseError

FinishReason = Literal["stop", "length"]

MAX_TOP_LOGPROBS = 128
MAX_STOPS = 64
GREEDY_BELOW = 1e-6  # dividing by less overflows a float; the most likely token is chosen anyway


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens.

    `temperature` 0 is greedy; `top_k` 0 or -1 is off; `logprobs` is the number of top logprobs (0: only that of the
    chosen token, None: none). `stop` strings are applied by the detokenizer, not by the engine.
    Raises: MisuseError naming the field, the value and the limit.
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
            raise MisuseError(f"temperature {self.temperature} is not a finite number >= 0")
        if not 0 < self.top_p <= 1:
            raise MisuseError(f"top_p {self.top_p} is outside (0, 1]")
        if self.top_k < -1:
            raise MisuseError(f"top_k {self.top_k} is below -1")
        if self.max_new_tokens < 1:
            raise MisuseError(f"max_new_tokens {self.max_new_tokens} is below 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise MisuseError(f"logprobs {self.logprobs} is outside 0..{MAX_TOP_LOGPROBS}")
        for name, entries in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if len(entries) > MAX_STOPS:
                raise MisuseError(f"{name}: {len(entries)} entries, limit {MAX_STOPS}")
        if "" in self.stop:
            raise MisuseError("stop: an empty string ends every completion at once; leave it out")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def seed_or_random(self) -> int:
        """The given seed, or a random one."""
        return secrets.randbits(63) if self.seed is None else self.seed


class TokenOut(msgspec.Struct, frozen=True):
    """One generated token; the last one has a `finish_reason`, and in `matched_stop` the token id that ended it."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None


class EngineLoad(msgspec.Struct, frozen=True):
    """The load of an engine: requests in the batch, requests waiting for pages."""

    running: int
    waiting: int


def finish(
    token_id: int, generated: int, limit: int, params: SamplingParams, eos_ids: frozenset[int]
) -> tuple[FinishReason | None, int | None]:
    """Whether `token_id`, the `generated`-th new token of at most `limit`, ends the request, and which id ends it."""
    if token_id in params.stop_token_ids or (token_id in eos_ids and not params.ignore_eos):
        return "stop", token_id
    return ("length", None) if generated >= limit else (None, None)
