"""From a request body to orders: prompts times choices, each with its room, checked against model and pool."""

from __future__ import annotations

from typing import Any

import msgspec

from kvflow.engine.scheduler.limits import Limits
from kvflow.engine.scheduler.params import SamplingParams
from kvflow.protocols.errors import MisuseError
from kvflow.server.http.errors import RequestError
from kvflow.server.http.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerateSampling,
    Rendezvous,
    stops_of,
)
from kvflow.server.http.service import Order

MAX_COMPLETIONS = 256
DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_COMPLETION_TOKENS = 16
_ROOM_MASK = (1 << 63) - 1
_ROOM_STEP = 0x9E3779B97F4A7C15  # golden-ratio step: rooms derived from one number do not meet those of another


class Menu(msgspec.Struct, frozen=True):
    """What can be ordered from this role."""

    limits: Limits
    generates: bool  # decode keeps prompt and completion in its pool, prefill only the prompt
    bootstrap_port: int

    def room_left(self, prompt: list[int]) -> int:
        """New tokens that fit behind a prompt; what is asked for by default stays below it."""
        return max(1, min(self.limits.context_length, self.limits.pool_tokens) - len(prompt))

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raises: RequestError: what never fits is the client's to mend, whatever the engine calls it."""
        try:
            self.limits.check_prompt(prompt)
            self.limits.check_new_tokens(prompt, params, generates=self.generates)
        except MisuseError as error:
            raise RequestError(str(error)) from None


def params_of_generate(request: GenerateRequest, prompt: list[int], menu: Menu) -> SamplingParams:
    """The sampling of a /generate body."""
    sampling = request.sampling_params or GenerateSampling()
    seed = sampling.sampling_seed if sampling.sampling_seed is not None else sampling.seed
    logprobs = (request.top_logprobs_num or 0) if request.return_logprob else None
    fields = _sampling_fields(sampling, seed)
    most = sampling.max_new_tokens or min(DEFAULT_MAX_NEW_TOKENS, menu.room_left(prompt))
    return SamplingParams(**fields, max_new_tokens=most, logprobs=logprobs)


def params_of_chat(request: ChatRequest, prompt: list[int], menu: Menu) -> SamplingParams:
    """The sampling of a chat body; without a limit the answer may fill the context."""
    most = request.max_completion_tokens or request.max_tokens or menu.room_left(prompt)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(**_sampling_fields(request, request.seed), max_new_tokens=most, logprobs=logprobs)


def params_of_completion(request: CompletionRequest, prompt: list[int], menu: Menu) -> SamplingParams:
    """The sampling of a completions body."""
    if request.echo and request.logprobs is not None:
        raise RequestError("echo together with logprobs is not supported")
    most = request.max_tokens or min(DEFAULT_COMPLETION_TOKENS, menu.room_left(prompt))
    return SamplingParams(**_sampling_fields(request, request.seed), max_new_tokens=most, logprobs=request.logprobs)


def _sampling_fields(source: Any, seed: int | None) -> dict[str, Any]:
    return {
        "temperature": 1.0 if source.temperature is None else source.temperature,
        "top_p": 1.0 if source.top_p is None else source.top_p,
        "top_k": -1 if source.top_k is None else source.top_k,
        "seed": seed,
        "stop": stops_of(source.stop),
        "stop_token_ids": tuple(source.stop_token_ids or ()),
        "ignore_eos": bool(source.ignore_eos),
    }


def orders(
    request: Rendezvous, prompts: list[list[int]], params: list[SamplingParams], choices: int, menu: Menu
) -> list[Order]:
    """One order per prompt and choice, prompt by prompt.

    Raises: RequestError naming what does not fit.
    """
    total = len(prompts) * choices
    if not 1 <= total <= MAX_COMPLETIONS:
        raise RequestError(f"the request asks for {total} completions, limit 1..{MAX_COMPLETIONS}")
    for prompt, sampling in zip(prompts, params, strict=True):
        menu.check(prompt, sampling)
    made: list[Order] = []
    for i in range(total):
        prompt, sampling = prompts[i // choices], params[i // choices]
        choice = i % choices
        if choice and sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + choice)
        room, prefill = _meeting(request, i, total, menu.bootstrap_port)
        made.append(Order(room=room, prefill=prefill, prompt=prompt, params=sampling))
    if len({order.room for order in made}) != total:
        raise RequestError("bootstrap_room: one room is named twice")
    return made


def rooms_of(request: Rendezvous) -> list[int]:
    """Every room a body names, for refusals before there are orders."""
    named = request.bootstrap_room
    rooms = named if isinstance(named, list) else [] if named is None else [named]
    return [room for room in rooms if 0 <= room < 1 << 64]


def _meeting(request: Rendezvous, index: int, total: int, default_port: int) -> tuple[int, str]:
    room = _pick("bootstrap_room", request.bootstrap_room, index, total)
    host = _pick("bootstrap_host", request.bootstrap_host, index, total)
    port = _pick("bootstrap_port", request.bootstrap_port, index, total)
    if room is None:
        raise RequestError("bootstrap_room is missing: this server is one half of a pair, send requests to the router")
    if not 0 <= room < 1 << 64:
        raise RequestError(f"bootstrap_room: {room} is no unsigned 64-bit number")
    if total > 1 and not isinstance(request.bootstrap_room, list):
        room = (room + index * _ROOM_STEP) & _ROOM_MASK if index else room
    if host is not None and (not host or any(c in host for c in "/@?# ")):
        raise RequestError(f"bootstrap_host: {host[:80]!r} is no host name")
    return room, f"{host}:{port or default_port}" if host else ""


def _pick(name: str, value: Any, index: int, total: int) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) != total:
        raise RequestError(f"{name}: {len(value)} entries for {total} completions")
    return value[index]


def prompt_ids(value: list[Any]) -> list[list[int]]:
    """`[1, 2]` or `[[1, 2], [3]]` as a list of prompts. Raises: RequestError for a mixture."""
    if all(isinstance(item, int) for item in value):
        return [value]
    if all(isinstance(item, list) for item in value):
        return value
    raise RequestError("token ids must be one list of numbers, or a list of such lists")
