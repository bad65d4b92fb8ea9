"""The request bodies of /generate, chat completions, completions, /tokenize and /detokenize.

Routers and clients send many more fields, most of them with default values. `fields.py` lists those
that are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvflow.http.bodies import MAX_COMPLETIONS, decoded, read_json
from kvflow.http.errors import RequestError
from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.scheduler.stops import StopStrings
from kvflow.serve.http.fields import BODIES, refused_in
from kvflow.serve.http.structured import (
    AllowedTexts,
    Json,
    ResponseFormat,
    StructuredOutputs,
)

Temperature = Annotated[float, Meta(ge=0, le=100)]
Share = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 31)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
# With 0 new tokens, a request only asks for log-probabilities of the prompt, or for an echo.
TokensOrNone = Annotated[int, Meta(ge=0, le=1 << 24)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Choices = Annotated[int, Meta(ge=1, le=128)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
# `generation_requests` checks this unsigned 64-bit number, which msgspec cannot express.
Room = int
HiddenStates = bool | Literal["last"]
BootstrapPort = Annotated[int, Meta(ge=1, le=65535)]
Signed64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """The `stream_options` object of OpenAI."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """A body whose fields are in the table of `fields.py`."""

    letter: ClassVar[str] = ""  # the body's key in `fields.BODIES`


class Rooms(Body, frozen=True, kw_only=True):
    """The fields by which both legs find the same room.

    For several completions, the first three may be lists with one entry per completion. A refused
    body is decoded as this type, to notify the other leg. So a wrong type in any other field must
    not matter here.
    """

    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: BootstrapPort | list[BootstrapPort | None] | None = None
    bootstrap_room: Room | list[Room] | None = None
    # `generation_requests` checks these. With stricter types, decoding a wrong value would fail,
    # and the room could not be refused.
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None
    disagg_prefill_dp_rank: Any = None
    # True if decode computes the prompts itself. The body then names no rooms.
    compute_prompt: Any = None


class Rendezvous(Rooms, frozen=True, kw_only=True):
    """The fields that all completion bodies have."""

    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None


class GenerateSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The `sampling_params` object of /generate."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    max_new_tokens: TokensOrNone | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    sampling_seed: Signed64 | None = None
    seed: Signed64 | None = None
    n: Choices | None = None
    min_new_tokens: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: str | Json | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class GenerateRequest(Rendezvous, frozen=True, kw_only=True):
    """The body of POST /generate."""

    letter: ClassVar[str] = "g"

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: GenerateSampling | list[GenerateSampling] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    logprob_start_len: int | list[int] | None = None
    token_ids_logprob: list[TokenId | list[TokenId]] | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    return_hidden_states: HiddenStates | list[HiddenStates] | None = None
    priority: Signed64 | None = None


class _OpenAIRequest(Rendezvous, frozen=True, kw_only=True):
    model: str | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    max_tokens: Tokens | None = None
    n: Choices | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    seed: Signed64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | list[str] | None = None
    request_id: str | None = None
    priority: Signed64 | None = None
    min_tokens: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: AllowedTexts | None = None
    guided_grammar: str | None = None
    json_schema: str | Json | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class ChatRequest(_OpenAIRequest, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions. The chat template gets its messages unchanged."""

    letter: ClassVar[str] = "c"

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None


class CompletionRequest(_OpenAIRequest, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    letter: ClassVar[str] = "t"

    prompt: str | list[TokenId | str | list[TokenId]]
    max_tokens: TokensOrNone | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """The body of POST /tokenize."""

    letter: ClassVar[str] = "k"

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    letter: ClassVar[str] = "d"

    model: str | None = None
    tokens: list[TokenId | list[TokenId]]
    skip_special_tokens: bool | None = None


# Fields that have an object as value, and the key of that object in `BODIES`.
_NESTED = {"sampling_params": "s", "stream_options": "o"}

T = TypeVar("T", bound=Body)


_NOT_SET = msgspec.Raw(b"null")
_REFUSED = {body: refused_in(body) for body in BODIES}
# Structs with only the refused fields, undecoded, so that the second pass over a body is cheap.
_GIVEN = {
    body: msgspec.defstruct(
        "_GivenFields",
        [(name, msgspec.Raw, _NOT_SET) for name in dict.fromkeys((*fields, *_NESTED))],
    )
    for body, fields in _REFUSED.items()
}
_MAX_DEFAULT_BYTES = 64  # bytes of JSON; a longer value cannot mean "not set"


def _refuse_unsupported(raw: bytes, body: str, where: str = "") -> None:
    """Raise a RequestError if a field is not supported.

    `raw` is a JSON object, and `body` is the key of its kind in `fields.BODIES`. `where` is the
    prefix of its field names in errors. It is empty for a whole body.
    """
    given_fields = msgspec.structs.asdict(read_json(raw, _GIVEN[body]))
    for name, field in _REFUSED[body].items():
        given = bytes(given_fields[name])
        if len(given) > _MAX_DEFAULT_BYTES or not field.changes_nothing(read_json(given, Any)):
            raise RequestError(
                f"{where}{name} is not supported by this server; leave it out", param=where + name
            )
    for name, inner in _NESTED.items():
        nested = bytes(given_fields[name]).strip()
        if not where and nested.startswith(b"{"):
            _refuse_unsupported(nested, inner, f"{name}.")
        elif not where and nested.startswith(b"["):
            several = read_json(nested, list[msgspec.Raw])
            if len(several) > MAX_COMPLETIONS:
                text = (
                    f"{name}: {len(several)} entries, one for each prompt; limit {MAX_COMPLETIONS}"
                )
                raise RequestError(text, param=name)
            for i, one in enumerate(several):
                _refuse_unsupported(bytes(one), inner, f"{name}[{i}].")


def parse(raw: bytes, kind: type[T]) -> T:
    """Decode a body as `kind`. Raises: RequestError (400) that names the field."""
    request = decoded(raw, kind)
    _refuse_unsupported(raw, kind.letter)
    return request


def stops_of(stop: str | list[str] | None) -> StopStrings:
    """Return the stop strings without empty ones, which mean "none". Raises: RequestError."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    try:
        return StopStrings(s for s in stops if s)
    except MisuseError as error:
        raise RequestError(str(error), param="stop") from None
