"""Conversion of a request body into generation requests, one for each prompt and choice.

Each request has its own room, and was checked against the limits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvflow.aio import in_thread, in_turns
from kvflow.http.bodies import MAX_COMPLETIONS
from kvflow.http.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from kvflow.http.prompt_fields import PromptIds, namespace_of
from kvflow.protocols.arguments import CheckedPrompt, check_prompt
from kvflow.protocols.cache.hashes import Namespace
from kvflow.protocols.errors import CapacityError, MisuseError
from kvflow.protocols.wire.messages import MAX_RANKS
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import MAX_LOGIT_BIAS, BadWords, LogitBias, SamplingParams
from kvflow.serve.http.completion_service import GenerationRequest
from kvflow.serve.http.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerateSampling,
    HiddenStates,
    Rendezvous,
    Rooms,
    stops_of,
)
from kvflow.serve.http.structured import grammar_of
from kvflow.transports.control.registry import registry_address

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_COMPLETION_TOKENS = 16
MAX_ID_DIGITS = 10
MAX_SALT = 512  # characters
MAX_ANSWER_ID = 512  # characters; every event of a stream repeats the id
# Largest packed size of the prompts' log-probabilities in one body. Their JSON is five times
# as large.
MAX_SCORES_BYTES = 1 << 24
# Prompts of at least this length are hashed in a thread. Others take less than 100 us.
LONG_PROMPT = 1 << 15  # tokens
T = TypeVar("T")
# Fields that a model's generation_config.json may set, each with the value that has no effect.
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_NO_SAMPLING = GenerateSampling()
_NOT_ASKED: HiddenStates = False
_DP_RANKS = ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank")
# Stands for an invalid group. No group has this number, so the refusal goes to all groups.
_NO_DP_RANK = -1
_ROOM_MASK = (1 << 63) - 1
# Distance between rooms derived from one id: 2**64 over the golden ratio, to avoid collisions.
_ROOM_STEP = 0x9E3779B97F4A7C15


class RequestLimits(msgspec.Struct, frozen=True):
    """Limits and defaults of this role for requests."""

    engine: EngineLimits
    # True at decode, whose pool keeps prompt and completion. Prefill's keeps only the prompt.
    generates: bool
    bootstrap_port: int  # for a body that gives a prefill's host without a port
    sampling_defaults: Mapping[str, float]  # for fields that an OpenAI body omits
    low_priority_first: bool = False

    def tokens_left(self, prompt: PromptIds) -> int:
        """Return how many new tokens fit after `prompt`, but at least 1."""
        return max(1, min(self.engine.context_length, self.engine.pool_tokens) - len(prompt))

    def priority(self, given: int | None) -> int:
        """Convert a body's priority to the engine's, in which larger numbers start first."""
        # Like `-n`, `~n` reverses the order. It also fits into 64 bits for the smallest `n`.
        return ~(given or 0) if self.low_priority_first else given or 0

    def check(self, body: Rendezvous, prompt: PromptIds, params: SamplingParams) -> None:
        """Check a request against the limits. Raises: RequestError (400)."""
        # An error from the engine means 503, but a request that can never fit must not be retried.
        with _refused(_prompt_field(body)):
            self.engine.check_prompt(prompt)
        with _refused(None):
            self.engine.check_sampling(prompt, params)
        with _refused(_limit_field(body)):
            self.engine.check_new_tokens(prompt, params, generates=self.generates)


@contextlib.contextmanager
def _refused(param: str | None) -> Iterator[None]:
    """Convert the engine's refusals within the block to a RequestError about the field `param`."""
    try:
        yield
    except CapacityError as error:
        raise RequestError(str(error), param=param, reason=CONTEXT_LENGTH_EXCEEDED) from None
    except MisuseError as error:
        raise RequestError(str(error), param=param) from None


def _prompt_field(body: Rendezvous) -> str:
    if isinstance(body, GenerateRequest):
        return "text" if body.input_ids is None else "input_ids"
    return "messages" if isinstance(body, ChatRequest) else "prompt"


def _limit_field(body: Rendezvous) -> str:
    if isinstance(body, GenerateRequest):
        return "sampling_params.max_new_tokens"
    return "max_completion_tokens" if getattr(body, "max_completion_tokens", None) else "max_tokens"


def choices_of_generate(body: GenerateRequest, prompts: int) -> int:
    """Return the number of completions for each prompt. Raises: RequestError."""
    given = {
        _of_prompt("sampling_params", body.sampling_params, i, prompts, _NO_SAMPLING).n
        for i in range(prompts)
    }
    if len(given) > 1:
        raise RequestError("sampling_params: n differs between the prompts; send them one by one")
    return (given.pop() if given else None) or 1


async def params_of_generate(
    body: GenerateRequest, prompts: list[PromptIds], limits: RequestLimits
) -> list[SamplingParams]:
    # One `sampling_params` object may be for hundreds of prompts. It is converted only once.
    made: dict[int, dict[str, Any]] = {}
    return [
        _params_of_prompt(body, i, prompts, limits, made)
        async for i in in_turns(range(len(prompts)))
    ]


def _params_of_prompt(
    body: GenerateRequest,
    index: int,
    prompts: list[PromptIds],
    limits: RequestLimits,
    made: dict[int, dict[str, Any]],
) -> SamplingParams:
    count, prompt = len(prompts), prompts[index]
    sampling = _of_prompt("sampling_params", body.sampling_params, index, count, _NO_SAMPLING)
    scored = _of_prompt("return_logprob", body.return_logprob, index, count, False)
    top = _of_prompt("top_logprobs_num", body.top_logprobs_num, index, count, 0)
    seed = sampling.sampling_seed if sampling.sampling_seed is not None else sampling.seed
    logprobs = top if scored else None
    if (fields := made.get(id(sampling))) is None:
        fields = {
            **_sampling_fields(sampling, seed, {}),
            "min_new_tokens": sampling.min_new_tokens or 0,
            "grammar": grammar_of(sampling, "sampling_params."),
        }
        made[id(sampling)] = fields
    most = sampling.max_new_tokens
    if most is None:
        most = min(DEFAULT_MAX_NEW_TOKENS, limits.tokens_left(prompt))
    start = _of_prompt("logprob_start_len", body.logprob_start_len, index, count, -1)
    # -1 is SGLang's default, and asks for no log-probabilities of the prompt.
    scored_from = start if scored and start != -1 else None
    return SamplingParams(
        **fields,
        max_new_tokens=most,
        hidden_states=_wants_hidden(body, index, count),
        priority=limits.priority(body.priority),
        logprobs=logprobs,
        prompt_logprobs_from=scored_from,
        logprob_token_ids=_asked_ids(body.token_ids_logprob, index, count) if scored else (),
    )


def _wants_hidden(body: GenerateRequest, index: int, prompts: int) -> bool:
    """Return True if the body asks for the last token's hidden states.

    Raises: RequestError if it asks for the states of all tokens, which a handoff cannot hold.
    """
    given = _of_prompt(
        "return_hidden_states", body.return_hidden_states, index, prompts, _NOT_ASKED
    )
    if given is True:
        text = (
            'return_hidden_states: true asks for those of every token; send "last" for those of '
            "the last one"
        )
        raise RequestError(text, param="return_hidden_states")
    return given == "last"


def _asked_ids(given: list[Any] | None, index: int, prompts: int) -> tuple[int, ...]:
    if not given or all(isinstance(one, int) for one in given):
        return tuple(given or ())
    if not all(isinstance(one, list) for one in given):
        text = "token_ids_logprob must be one list of token ids, or a list of such lists"
        raise RequestError(text, param="token_ids_logprob")
    return tuple(_of_prompt("token_ids_logprob", given, index, prompts, []))


def _of_prompt(name: str, value: T | list[T] | None, index: int, prompts: int, unset: T) -> T:
    """Return the value for one prompt: an entry of a list, or the one value for all prompts."""
    if isinstance(value, list):
        if len(value) != prompts:
            raise RequestError(
                f"{name}: {len(value)} entries for {prompts} prompts; give one for each", param=name
            )
        return value[index]
    return unset if value is None else value


def params_of_chat(
    body: ChatRequest, prompt: PromptIds, bad_words: BadWords, limits: RequestLimits
) -> SamplingParams:
    """Return the sampling parameters. Without a limit, the answer may fill the context."""
    most = body.max_completion_tokens or body.max_tokens or limits.tokens_left(prompt)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    fields = _openai_fields(body, bad_words, limits)
    return SamplingParams(**fields, max_new_tokens=most, logprobs=logprobs)


def params_of_completion(
    body: CompletionRequest, prompts: list[PromptIds], bad_words: BadWords, limits: RequestLimits
) -> list[SamplingParams]:
    fields = _openai_fields(body, bad_words, limits)
    fields["logprobs"] = body.logprobs
    fields["prompt_logprobs_from"] = 0 if body.echo and body.logprobs is not None else None
    if body.max_tokens is not None:
        return [SamplingParams(**fields, max_new_tokens=body.max_tokens)] * len(prompts)
    most = (min(DEFAULT_COMPLETION_TOKENS, limits.tokens_left(prompt)) for prompt in prompts)
    return [SamplingParams(**fields, max_new_tokens=tokens) for tokens in most]


def _openai_fields(
    body: ChatRequest | CompletionRequest, bad_words: BadWords, limits: RequestLimits
) -> dict[str, Any]:
    fields = _sampling_fields(body, body.seed, limits.sampling_defaults)
    priority = limits.priority(body.priority)
    return {
        **fields,
        "min_new_tokens": body.min_tokens or 0,
        "bad_words": bad_words,
        "priority": priority,
        "grammar": grammar_of(body),
    }


def _sampling_fields(
    source: Any, seed: int | None, defaults: Mapping[str, float]
) -> dict[str, Any]:
    given = {name: getattr(source, name) for name in _NEUTRAL}
    return {
        **_NEUTRAL,
        **defaults,
        **{name: value for name, value in given.items() if value is not None},
        "seed": seed,
        "stop": stops_of(source.stop),
        "stop_token_ids": tuple(source.stop_token_ids or ()),
        "include_stop": bool(
            source.no_stop_trim or getattr(source, "include_stop_str_in_output", None)
        ),
        "skip_special_tokens": source.skip_special_tokens is not False,
        "ignore_eos": bool(source.ignore_eos),
        "frequency_penalty": source.frequency_penalty or 0.0,
        "presence_penalty": source.presence_penalty or 0.0,
        "logit_bias": _biases(source.logit_bias or {}),
    }


def _biases(given: dict[str, float]) -> LogitBias:
    # One entry beyond the limit is enough for `LogitBias` to refuse a huge object.
    for key in itertools.islice(given, MAX_LOGIT_BIAS + 1):
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise RequestError(
                f"logit_bias: key {key[:40]!r} is not a token id", param="logit_bias"
            )
    return LogitBias(
        (int(key), value) for key, value in itertools.islice(given.items(), MAX_LOGIT_BIAS + 1)
    )


def check_count(prompts: int, choices: int) -> None:
    """Check the number of completions of one body. Raises: RequestError."""
    if not 1 <= prompts * choices <= MAX_COMPLETIONS:
        text = (
            f"the body asks for {prompts * choices} completions (prompts times n), limit "
            f"1..{MAX_COMPLETIONS}"
        )
        raise RequestError(text)


def generation_requests(
    body: Rendezvous,
    prompts: list[PromptIds],
    params: list[SamplingParams],
    choices: int,
    limits: RequestLimits,
) -> list[GenerationRequest]:
    """Return one request per choice, ordered by prompt. Raises: RequestError."""
    check_count(len(prompts), choices)
    total = len(prompts) * choices
    _check_answer_ids(body, total)
    _check_dp_ranks(body, is_decode=limits.generates)
    is_local = _is_local(body, is_decode=limits.generates)
    for prompt, sampling in zip(prompts, params, strict=True):
        limits.check(body, prompt, sampling)
    _check_scores(body, prompts, params, choices, limits)
    made: list[GenerationRequest] = []
    rooms: set[int] = set()
    for i in range(total):
        prompt, sampling = prompts[i // choices], params[i // choices]
        choice = i % choices
        # With equal seeds, all choices would have the same text.
        if choice and sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + choice)
        room: int | None = None
        prefill = ""
        if not is_local:
            room, prefill = _rendezvous(body, i, total, limits.bootstrap_port)
            if room in rooms:
                text = f"bootstrap_room: {room} is given twice"
                raise RequestError(f"{text}; every completion needs a room of its own")
            rooms.add(room)
        request = GenerationRequest(
            room=room,
            prefill=prefill,
            prefill_dp_rank=body.disagg_prefill_dp_rank,
            prompt=prompt,
            params=sampling,
            namespace=_namespace(body, i // choices, len(prompts)),
        )
        made.append(request)
    return made


def _is_local(body: Rendezvous, *, is_decode: bool) -> bool:
    """Return True if decode computes the prompts of this body itself.

    Raises: RequestError if a prefill gets such a body, or if it also names a room.
    """
    given = body.compute_prompt
    if given is None or given is False:
        return False
    name = "compute_prompt"
    if given is not True:
        raise RequestError(f"{name}: {str(given)[:40]!r} is not true or false", param=name)
    if not is_decode:
        raise RequestError(
            f"{name}: decode alone computes a prompt without a room; this is a prefill", param=name
        )
    if body.bootstrap_room is not None:
        text = "no room carries a prompt that decode computes itself; leave bootstrap_room out"
        raise RequestError(f"{name}: {text}", param=name)
    return True


def _namespace(body: Rendezvous, index: int, prompts: int) -> Namespace:
    parts = []
    for name in ("cache_salt", "extra_key"):
        part = _of_prompt(name, getattr(body, name), index, prompts, "")
        if len(part) > MAX_SALT:
            raise RequestError(f"{name}: {len(part)} characters, limit {MAX_SALT}", param=name)
        # `namespace_of` joins the two parts with a NUL.
        if "\0" in part:
            raise RequestError(f"{name}: it has a NUL character", param=name)
        parts.append(part)
    return namespace_of(*parts)


def _check_scores(
    body: Rendezvous,
    prompts: list[PromptIds],
    params: list[SamplingParams],
    choices: int,
    limits: RequestLimits,
) -> None:
    # They count once per choice, because the handoff and answer of each choice contain them.
    scores = (
        limits.engine.scores_bytes(len(prompt), one)
        for prompt, one in zip(prompts, params, strict=True)
    )
    if (size := choices * sum(scores)) > MAX_SCORES_BYTES:
        name = "top_logprobs_num" if isinstance(body, GenerateRequest) else "logprobs"
        text = (
            f"{name}: logprobs of the prompts of {len(prompts) * choices} completions are {size} "
            "bytes, limit"
        )
        raise RequestError(
            f"{text} {MAX_SCORES_BYTES}; ask for fewer at each token, or for fewer completions",
            param=name,
        )


def _check_dp_ranks(body: Rendezvous, *, is_decode: bool) -> None:
    # A kvflow worker is always group 0. Decode learns how many groups another engine has only from
    # that engine's registry, so this checks only against `MAX_RANKS`.
    role = "decode" if is_decode else "prefill"
    for name in _DP_RANKS:
        if (given := getattr(body, name)) is None:
            continue
        of_another = is_decode and name == "disagg_prefill_dp_rank"
        most = MAX_RANKS - 1 if of_another else 0
        # `isinstance` would also accept True, which JSON can contain.
        if type(given) is not int or not 0 <= given <= most:
            text = f"{name}: {str(given)[:40]!r} is not an integer in 0..{most}"
            raise RequestError(
                text if of_another else f"{text}: this {role} is DP rank 0 of 1", param=name
            )


def _check_answer_ids(body: Rendezvous, total: int) -> None:
    for name in ("rid", "request_id"):
        given = getattr(body, name, None)
        for one in given[:total] if isinstance(given, list) else [given]:
            if one is not None and len(one) > MAX_ANSWER_ID:
                raise RequestError(
                    f"{name}: {len(one)} characters, limit {MAX_ANSWER_ID}", param=name
                )


async def with_digests(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    """Add digests to requests with long prompts. Each prompt is hashed once, in a thread."""
    checked: dict[int, CheckedPrompt] = {}
    for request in requests:
        if len(request.prompt) >= LONG_PROMPT and id(request.prompt) not in checked:
            checked[id(request.prompt)] = await in_thread(
                functools.partial(check_prompt, request.prompt)
            )
    if not checked:
        return requests
    return [
        msgspec.structs.replace(request, checked=checked.get(id(request.prompt)))
        for request in requests
    ]


def rooms_of(body: Rooms, default_port: int) -> list[tuple[int, str, int | None]]:
    """Return every valid room id in a body, with its registry and the group there.

    The registry is "host:port" of the prefill's bootstrap registry, or empty. A refused body may
    have no generation requests yet, so this reads only its rooms.
    """
    group = body.disagg_prefill_dp_rank
    if group is not None and type(group) is not int:
        group = _NO_DP_RANK
    named = body.bootstrap_room
    total = len(named) if isinstance(named, list) else 0 if named is None else 1
    # No leg accepts more than `MAX_COMPLETIONS` rooms, so no leg waits for any of these.
    if total > MAX_COMPLETIONS:
        return []
    found = []
    for index in range(total):
        with contextlib.suppress(RequestError):
            found.append((*_rendezvous(body, index, total, default_port), group))
    return found


def _rendezvous(body: Rooms, index: int, total: int, default_port: int) -> tuple[int, str]:
    """Return the room of one completion, and "host:port" of its registry, or ""."""
    room = _entry("bootstrap_room", body.bootstrap_room, index, total)
    host = _entry("bootstrap_host", body.bootstrap_host, index, total)
    port = _entry("bootstrap_port", body.bootstrap_port, index, total)
    if room is None:
        raise RequestError(
            "bootstrap_room is missing: this server is one half of a pair, send requests to the "
            "router"
        )
    if not 0 <= room < 1 << 64:
        raise RequestError(f"bootstrap_room: {room} is not an unsigned 64-bit integer")
    # If the router gave only one room, both legs derive those of the other completions from it.
    if total > 1 and not isinstance(body.bootstrap_room, list):
        room = (room + index * _ROOM_STEP) & _ROOM_MASK if index else room
    if host is None:
        return room, ""
    try:
        return room, registry_address(host, port or default_port)
    except MisuseError as error:
        raise RequestError(f"bootstrap_host: {error}") from None


def _entry(name: str, value: Any, index: int, total: int) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) != total:
        raise RequestError(
            f"{name}: {len(value)} entries for {total} completions; give one for each"
        )
    return value[index]


def prompt_ids(value: Any, most: int = MAX_COMPLETIONS) -> tuple[list[PromptIds], bool]:
    """Return the prompts in `[1, 2]` or `[[1, 2], [3]]`, and True for a list of lists.

    Raises: RequestError if `value` mixes the two, or has more than `most` lists.
    """
    if isinstance(value, list) and len(value) > most and not isinstance(value[0], int):
        raise RequestError(f"{len(value)} lists of token ids are given, limit {most}")
    if isinstance(value, np.ndarray) or all(isinstance(item, int) for item in value):
        return [np.asarray(value, dtype=np.uint32)], False
    if all(isinstance(item, list | np.ndarray) for item in value):
        return [np.asarray(item, dtype=np.uint32) for item in value], True
    raise RequestError("token ids must be one list of integers, or a list of such lists")
