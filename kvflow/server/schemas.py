"""The request bodies we accept: /generate, chat completions, completions; and what they ask of the engine.

Routers and clients send many more fields with default values; those are ignored. Fields that would change the output
and that we do not support are refused when they are set to something that matters: ignoring them would be a lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvflow.server.failures import RequestError

Temperature = Annotated[float, Meta(ge=0, le=100)]
Share = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 31)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Choices = Annotated[int, Meta(ge=1, le=128)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Room = int  # a u64, which is wider than the limits msgspec can state; checked in orders.py
BootstrapPort = Annotated[int, Meta(ge=1, le=65535)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's stream_options."""

    include_usage: bool = False


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """What a router adds so that both legs meet; arrays when the body asks for several completions."""

    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: BootstrapPort | list[BootstrapPort | None] | None = None
    bootstrap_room: Room | list[Room] | None = None


class GenerateSampling(msgspec.Struct, frozen=True, kw_only=True):
    """sampling_params of /generate."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    max_new_tokens: Tokens | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    sampling_seed: Seed | None = None
    seed: Seed | None = None
    n: Choices | None = None


class GenerateRequest(Rendezvous, frozen=True, kw_only=True):
    """POST /generate."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: GenerateSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: TopLogprobs | None = None
    rid: str | list[str] | None = None


class _OpenAIRequest(Rendezvous, frozen=True, kw_only=True):
    model: str | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    max_tokens: Tokens | None = None
    n: Choices | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(_OpenAIRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions. Messages go to the model's chat template as they are."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class CompletionRequest(_OpenAIRequest, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None


T = TypeVar("T", bound=Rendezvous)


def _absent(value: Any) -> bool:
    return not value


_UNSUPPORTED: dict[str, Any] = {
    "tools": _absent,
    "functions": _absent,
    "logit_bias": _absent,
    "regex": _absent,
    "json_schema": _absent,
    "ebnf": _absent,
    "structural_tag": _absent,
    "suffix": _absent,
    "lora_path": _absent,
    "image_data": _absent,
    "input_embeds": _absent,
    "stop_regex": _absent,
    "min_tokens": _absent,
    "min_new_tokens": _absent,
    "min_p": _absent,
    "frequency_penalty": _absent,
    "presence_penalty": _absent,
    "repetition_penalty": lambda value: value is None or value == 1,
    "response_format": lambda value: not value or (isinstance(value, dict) and value.get("type") == "text"),
    "best_of": lambda value: value in (None, 1),
}


def _refuse_unsupported(document: Mapping[str, Any], where: str) -> None:
    for name in _UNSUPPORTED.keys() & document.keys():
        if not _UNSUPPORTED[name](document[name]):
            raise RequestError(f"{where}{name} is not supported by this server")


def json_object(raw: bytes) -> dict[str, Any]:
    """The body of any request. Raises: RequestError (400)."""
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error}") from None
    if not isinstance(document, dict):
        raise RequestError(f"the body must be a JSON object, got {type(document).__name__}")
    return document


def parse(raw: bytes, kind: type[T]) -> T:
    """The body as `kind`.

    Raises: RequestError (400) naming the field.
    """
    document = json_object(raw)
    try:
        request = msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise RequestError(str(error).replace("`$.", "`")) from None
    _refuse_unsupported(document, "")
    nested = document.get("sampling_params")
    if isinstance(nested, dict):
        _refuse_unsupported(nested, "sampling_params.")
    return request


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple; empty ones, which some clients send for "none", are left out."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return tuple(s for s in stops if s)
