"""The parameters of a request to an engine, and the tokens that the engine returns.

This module does not import torch.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
from collections.abc import Iterable
from typing import Literal, Self

import msgspec

from kvflow.node.packed_array import PackedArray
from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.grammars import Grammar
from kvflow.serve.engine.scheduler.stops import StopStrings

FinishReason = Literal["stop", "length"]

MAX_TOP_LOGPROBS = 128
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORD_TOKENS = 8192  # in all bad words together
MAX_BIAS = 100
MAX_PRIORITY = (1 << 63) - 1  # SGLang's range
# Dividing by a lower temperature may overflow, and the most likely token wins anyway.
GREEDY_BELOW = 1e-6

_RANGES = {
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


class LogitBias(tuple[tuple[int, float], ...]):
    """Pairs of a token id and the value to add to its logit, checked.

    `extent` holds the lowest and the highest token id.
    """

    extent: tuple[int, int]

    def __new__(cls, entries: Iterable[tuple[int, float]] = ()) -> Self:
        if isinstance(entries, cls):
            return entries
        made = super().__new__(cls, entries)
        if len(made) > MAX_LOGIT_BIAS:
            raise MisuseError(f"logit_bias: {len(made)} entries, limit {MAX_LOGIT_BIAS}")
        for token_id, bias in made:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise MisuseError(
                    f"logit_bias: {bias} for token {token_id} is outside -{MAX_BIAS}..{MAX_BIAS}"
                )
        made.extent = _extent([token_id for token_id, _ in made])
        return made


class BadWords(tuple[tuple[int, ...], ...]):
    """Token sequences that must never be generated in full, checked.

    `extent` holds the lowest and the highest token id.
    """

    extent: tuple[int, int]

    def __new__(cls, words: Iterable[tuple[int, ...]] = ()) -> Self:
        if isinstance(words, cls):
            return words
        made = super().__new__(cls, words)
        if () in made:
            raise MisuseError("bad_words: a word of no tokens cannot be banned; leave it out")
        if (total := sum(map(len, made))) > MAX_BAD_WORD_TOKENS:
            raise MisuseError(f"bad_words: {total} tokens in all, limit {MAX_BAD_WORD_TOKENS}")
        made.extent = _extent(list(itertools.chain(*made)))
        return made


def _extent(ids: list[int]) -> tuple[int, int]:
    return min(ids, default=0), max(ids, default=0)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that decide how tokens are chosen.

    `temperature` 0 is greedy; `top_k` 0 or -1 is off; `logprobs` is the number of top logprobs (0:
    only that of the chosen token, None: no logprobs). The detokenizer, not the engine, applies
    `stop`, `include_stop` (keep the stop string in the text) and `skip_special_tokens`.

    `frequency_penalty` and `presence_penalty` are OpenAI's: they are subtracted from logits, and
    count generated tokens only. `repetition_penalty` is transformers': a factor that also applies
    to tokens of the prompt. `min_p` is a share of the most likely token's probability. `logit_bias`
    adds values to the logits of token ids, and `bad_words` are token sequences that are never
    completed. No token ends the request before `min_new_tokens` tokens are generated.
    Log-probabilities are those of the model, unaffected by these parameters.

    `logprob_token_ids` are tokens whose log-probabilities are returned at every position, in
    addition to that of the chosen token. `prompt_logprobs_from` asks for the log-probabilities of
    the prompt's tokens after this position. Prefill chooses one token for every prompt; if
    `max_new_tokens` is 0, the caller drops that token.

    `grammar` restricts the answer to texts that the grammar matches. It has precedence over
    parameters that ban tokens, and ends the answer where nothing more can follow.

    `hidden_states` asks for the last hidden state from which each token was chosen.

    `priority` decides which requests wait, not which tokens are chosen. The waiting request with
    the largest priority starts first, and the running request with the smallest is retracted first.
    Among waiting requests of equal priority, the order of arrival decides.

    Raises: MisuseError, which names the field, the value and the limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs_from: int | None = None
    min_new_tokens: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    hidden_states: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise MisuseError(f"temperature {self.temperature} is not a finite number >= 0")
        if not 0 < self.top_p <= 1:
            raise MisuseError(f"top_p {self.top_p} is outside (0, 1]")
        if self.top_k < -1:
            raise MisuseError(f"top_k {self.top_k} is below -1")
        if self.max_new_tokens < 0:
            raise MisuseError(f"max_new_tokens {self.max_new_tokens} is below 0")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise MisuseError(f"logprobs {self.logprobs} is outside 0..{MAX_TOP_LOGPROBS}")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise MisuseError(
                f"stop_token_ids: {len(self.stop_token_ids)} entries, limit {MAX_STOP_IDS}"
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            limit = f"0..{self.max_new_tokens} (max_new_tokens)"
            raise MisuseError(
                f"min_new_tokens (min_tokens) {self.min_new_tokens} is outside {limit}"
            )
        for name, (least, most) in _RANGES.items():
            # The comparison is false for NaN too.
            if not least <= (value := getattr(self, name)) <= most:
                raise MisuseError(f"{name} {value} is outside {least:g}..{most:g}")
        if len(self.logprob_token_ids) > MAX_TOP_LOGPROBS:
            raise MisuseError(
                f"token_ids_logprob: {len(self.logprob_token_ids)} ids, limit {MAX_TOP_LOGPROBS}"
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise MisuseError("token_ids_logprob needs logprobs (return_logprob)")
        if not -MAX_PRIORITY - 1 <= self.priority <= MAX_PRIORITY:
            raise MisuseError(
                f"priority {self.priority} is outside {-MAX_PRIORITY - 1}..{MAX_PRIORITY}"
            )
        if self.grammar is not None and self.ignore_eos:
            raise MisuseError(
                "ignore_eos: an answer that matches a grammar ends with it; leave one of them out"
            )
        # These types check their values once, however many requests of one body share them.
        msgspec.structs.force_setattr(self, "stop", StopStrings(self.stop))
        msgspec.structs.force_setattr(self, "logit_bias", LogitBias(self.logit_bias))
        msgspec.structs.force_setattr(self, "bad_words", BadWords(self.bad_words))

    @property
    def adjusts(self) -> bool:
        """True if anything changes the model's choice of a token, besides sampling."""
        return self.changes_logits or self.grammar is not None

    @property
    def changes_logits(self) -> bool:
        return bool(
            self.min_new_tokens
            or self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.bad_words
        )

    def ending_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def first_token_digest(self) -> bytes:
        """Return a digest of all parameters that affect the first token.

        Two requests for the same prompt may share a first token if their digests are equal.
        Parameters that affect only later tokens are left out. So are those that decide where the
        answer ends, unless `min_new_tokens` bans the ending tokens. Entries in another order, or 1
        in place of 1.0, do not change the digest, since a proxy may rewrite the body that it sends
        to prefill and to decode.
        """
        return self._digest(spares_ending=self.min_new_tokens > 0)

    def may_take_first_token(self, digest: bytes) -> bool:
        """Return True if a first token chosen under `digest` may be this request's first token.

        `digest` is a `first_token_digest`. Proxies ask prefill for exactly one token (`min_tokens`
        1), whatever the client asked for. A token chosen that way does not end the answer, and
        could have been drawn for this request too.
        """
        if digest == self.first_token_digest():
            return True
        return not self.min_new_tokens and digest == self._digest(spares_ending=True)

    def _digest(self, *, spares_ending: bool) -> bytes:
        floats = map(float, (self.temperature, self.top_p, self.min_p))
        drawn = None if self.greedy else (*floats, max(self.top_k, 0), self.seed)
        spared = (self.ignore_eos, sorted(set(self.stop_token_ids))) if spares_ending else None
        biases = sorted((token_id, float(bias)) for token_id, bias in self.logit_bias)
        decides: tuple[object, ...] = (
            drawn,
            spared,
            float(self.repetition_penalty),
            biases,
            sorted(set(self.bad_words)),
        )
        # Workers of earlier versions have digests of five values.
        if self.grammar is not None:
            decides = *decides, self.grammar
        return hashlib.blake2b(msgspec.msgpack.encode(decides), digest_size=8).digest()

    def seed_or_random(self) -> int:
        return secrets.randbits(63) if self.seed is None else self.seed


class TokenOut(msgspec.Struct, frozen=True):
    """One generated token.

    The last token of a request has a `finish_reason`. If a stop token ended the request,
    `matched_stop` is its id.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    asked_logprobs: tuple[tuple[int, float], ...] = ()  # for `logprob_token_ids`
    # The prompt's log-probabilities: decode returns them with the first token if asked to.
    prompt_logprobs: PromptLogprobs | None = None
    # The hidden state [1, hidden] from which the token was chosen, if the request asks for it.
    hidden_states: PackedArray | None = None
    # Only set on the first token: the number of prompt tokens that prefill had cached.
    cached_tokens: int = 0


class EngineLoad(msgspec.Struct, frozen=True):
    """The load of an engine.

    `running` counts the requests in the batch. `waiting` counts those that wait for a place in it,
    for pages, or for the other half of their room.
    """

    running: int
    waiting: int


class EngineOptimism(msgspec.Struct, frozen=True, kw_only=True):
    """Counters for prompts that a prefill began before decode's half of their room arrived."""

    starts: int = 0  # early starts; a prompt that starts early twice counts twice
    hits: int = 0  # starts that still had their places when decode's half arrived
    lost: int = 0  # starts whose places went to a request with both halves
    holding_now: int = 0  # prompts that hold places now, without decode's half


class EngineRetractions(msgspec.Struct, frozen=True, kw_only=True):
    """Counters for requests that a decode retracted, and for their return."""

    retracts: int = 0  # retractions: pages given back before the request ended
    resumes: int = 0  # retracted requests that run again, with their state from host memory
    recomputes: int = 0  # retracted requests that run again, with their state computed again
    retracted_now: int = 0  # requests that wait to return
    host_bytes_used: int = 0  # host memory that holds the state of retracted requests
    host_bytes_limit: int = 0
    # The share of an admitted request's new tokens for which it is promised pages.
    new_token_ratio: float = 1.0


class EngineLocalPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Counters for prompts that a decode computes itself."""

    chunk: int = 0  # prompt tokens that one step computes at most beside others; 0: none at all
    prompts: int = 0  # prompts that it began to compute
    tokens: int = 0  # tokens of prompts that it computed, without cached ones


def finish(
    token_id: int, generated: int, limit: int, params: SamplingParams, eos_ids: frozenset[int]
) -> tuple[FinishReason | None, int | None]:
    """Return the reason why `token_id` ends the request, and the id again if it is a stop token.

    Both are None if the request continues. `token_id` is the `generated`-th new token of at most
    `limit`.
    """
    if token_id in params.stop_token_ids or (token_id in eos_ids and not params.ignore_eos):
        return "stop", token_id
    return ("length", None) if generated >= limit else (None, None)
