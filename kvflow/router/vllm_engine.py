"""The engine for vLLM servers (`vllm serve` with a KV connector).

It follows the contract of vLLM's own proxies (checked with 0.32.0), and runs the legs in one of two
orders:

- Sequential works with every connector that keeps to that contract. Prefill gets the request for
  one token and answers with `kv_transfer_params`. Decode gets the client's request with these
  parameters.
- Together is for kvflow's own connector. Both workers get the request at once, with the same room,
  and pages travel while prefill computes. Decode needs the address of prefill, which the router
  learns from prefill's answer to a sequential request. The first request to a prefill is therefore
  sequential, and so is the next one after a failure.

If one transfer cannot serve a request, decode computes the prompt itself. `_alone` has the reasons.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, Metric

from kvflow.http.bodies import decoded
from kvflow.http.errors import Failure, RequestError
from kvflow.http.families import labelled
from kvflow.http.paths import COUNT_PATH, MESSAGES_PATH, RESPONSES_PATH
from kvflow.protocols.errors import Code
from kvflow.router.engines import Forwarded
from kvflow.router.identity import Identity, NotServingError, ask
from kvflow.router.kvflow_engine import ROOM_HEADER
from kvflow.router.legs import Leg, PairFailedError, with_fields
from kvflow.router.pairs import Pair, sequential, together
from kvflow.router.prefixes import BYTES_PER_TOKEN, MAX_BYTES
from kvflow.router.prompts import PromptFields
from kvflow.router.workers import Worker
from kvflow.telemetry.requests import name_rooms

_log = logging.getLogger("kvflow.router")
LegOrder = Literal["sequential", "together"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The largest integer that stays exact when a proxy reads the JSON number as a double.
MAX_ROOM = (1 << 53) - 1
_NOT_VLLM = (
    "it is not a vLLM server; a router in front of kvflow's own workers is started without "
    "--engine vllm"
)
# The fields that make a request on each route one for one token, which ends at once.
_ONE_TOKEN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"stream_options": None, "max_tokens": 1, "min_tokens": 0},
    CHAT: {
        "stream_options": None,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 0,
    },
    MESSAGES_PATH: {"max_tokens": 1},
    # Prefill must not store its answer of one token as a response.
    RESPONSES_PATH: {"max_output_tokens": 1, "store": False},
}
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmEngine:
    """Implements `engines.Engine`."""

    completion_paths = (CHAT, COMPLETIONS, MESSAGES_PATH, RESPONSES_PATH)
    decode_routes = (
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", COUNT_PATH),
    )
    has_operations = False
    # vLLM answers with one of these when a transfer failed or took too long.
    retried_statuses = frozenset({500, 502, 503, 504})
    keepalive_s = 4.0  # vLLM closes idle connections after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)

    def __init__(self, legs: LegOrder = "sequential") -> None:
        self._together = legs == "together"
        self._decoded_alone: Counter[str] = Counter()
        self._without_params: set[str] = set()  # URLs of prefills already warned about

    async def identify(
        self, session: aiohttp.ClientSession, url: str, role: str | None, known: Identity | None
    ) -> Identity:
        """Return `known`, or else the identity that a server reports now.

        An identity changes only with a restart. A restart takes vLLM seconds, during which checks
        of /health fail, so `known` is None after it.
        """
        if role is None:
            text = "give prefill or decode: a vLLM server does not say which of them it is"
            raise RequestError(f"worker_type: {text}", param="worker_type")
        if known is not None:
            return known
        version = await ask(session, url, "/version", {404: _NOT_VLLM})
        if not isinstance(version, dict) or not isinstance(version.get("version"), str):
            raise NotServingError(f"/version names no version: {_NOT_VLLM}")
        refused = {401: "its API key is not the router's --api-key"}
        model = _first_model(await ask(session, url, "/v1/models", refused))
        _log.info("%s is vLLM %s with model %r", url, version["version"][:40], model)
        return Identity(
            role=role,
            started_as=None,
            incarnation="",
            model=model,
            fingerprint=model,
            bootstrap_port=None,
            # vLLM caches prefixes by default, and does not report the size of its cache.
            cache_tokens=MAX_BYTES // BYTES_PER_TOKEN,
            events=None,  # vLLM's events name blocks by its own hashes
            computes_prompts=role == "decode",
        )

    def read(self, path: str, body: bytes) -> VllmCompletion:
        return VllmCompletion(self, path, decoded(body, _Fields))

    def families(self) -> Iterator[Metric]:
        text = (
            "Requests whose prompt decode has computed by itself, by the reason; no_params: "
            "prefill gave none."
        )
        alone = CounterMetricFamily("kvflow_router_decoded_alone", text, labels=["reason"])
        yield labelled(alone, self._decoded_alone)

    def address_of(self, prefill: Worker) -> _Address | None:
        """Return the address at which decode finds this prefill, or None for sequential legs."""
        learned = prefill.learned
        if self._together and isinstance(learned, _Learned) and not learned.varies:
            return learned.address
        return None

    def note_alone(self, reason: str) -> None:
        self._decoded_alone[reason] += 1

    def note_answer(self, prefill: Worker, params: msgspec.Raw | None) -> None:
        """Learn from a prefill's answer to a sequential request."""
        if params is not None:
            if not isinstance(prefill.learned, _Learned):
                prefill.learned = _Learned()
            prefill.learned.note(_Address.read(params))
            return
        self.note_alone("no_params")
        if prefill.url not in self._without_params:
            self._without_params.add(prefill.url)
            _log.warning(
                "prefill %s has answered without kv_transfer_params, so decode computes that "
                "prompt again: either it is too short for its connector, or there is no "
                "--kv-transfer-config",
                prefill.url,
            )


class VllmCompletion:
    """Implements `engines.Completion`."""

    def __init__(self, engine: VllmEngine, path: str, fields: _Fields) -> None:
        if isinstance(fields.vllm_xargs, dict) and "kv_transfer_params" in fields.vllm_xargs:
            # vLLM treats this entry like the field of that name, and crashes if it is a string.
            raise RequestError(
                "vllm_xargs: kv_transfer_params is not for clients", param="vllm_xargs"
            )
        if path == RESPONSES_PATH:
            _check_nothing_is_stored(fields)
        self.fields = fields
        self._engine = engine
        self._alone = _alone(path, fields)

    def local_tokens(self, missing: int) -> int | None:
        return None if self._alone else missing

    def open_pair(
        self, request: Forwarded, prefill: Worker | None, decode: Worker
    ) -> AbstractAsyncContextManager[Pair]:
        if prefill is None or self._alone:
            self._engine.note_alone(self._alone or "local_prefill")
            return sequential(None, decode, lambda _: _decode_leg(request, decode, None))
        if (address := self._engine.address_of(prefill)) is not None:
            return _open_together(request, prefill, decode, address)
        leg = _prefill_leg(request, prefill, _REMOTE_DECODE)

        def ask_decode(answer: web.Response) -> Leg:
            params = _params_in(answer, prefill)
            self._engine.note_answer(prefill, params)
            return _decode_leg(request, decode, params)

        return sequential(leg, decode, ask_decode)


@asynccontextmanager
async def _open_together(
    request: Forwarded, prefill: Worker, decode: Worker, address: _Address
) -> AsyncGenerator[Pair, None]:
    room = secrets.randbelow(MAX_ROOM) + 1
    name_rooms([room])
    ours = {"do_remote_decode": True, "do_remote_prefill": False, "kvflow_room": room}
    legs = _prefill_leg(request, prefill, ours), _decode_leg(request, decode, address.params(room))
    try:
        async with together(*legs, {ROOM_HEADER: str(room)}) as pair:
            yield pair
    except PairFailedError as error:
        if error.failure.status >= 500:
            if isinstance(prefill.learned, _Learned):
                # The prefill may have another address now, so the next try is sequential.
                prefill.learned.address = None
            # The address may have been the cause, so the same pair may serve the next try.
            error.passes = True
        raise


def _prefill_leg(request: Forwarded, worker: Worker, params: dict[str, Any]) -> Leg:
    """Return prefill's leg: the client's request, limited to one token of output."""
    fields = {"stream": False, **_ONE_TOKEN[request.path], "kv_transfer_params": params}
    body = with_fields(request.raw, fields)
    return Leg(request.session, worker, request.path, body, request.headers)


def _decode_leg(
    request: Forwarded, worker: Worker, params: msgspec.Raw | dict[str, Any] | None
) -> Leg:
    """Return decode's leg: the client's request with its `kv_transfer_params` replaced.

    Otherwise a client could choose the server from which decode reads.
    """
    body = with_fields(request.raw, {"kv_transfer_params": params})
    return Leg(request.session, worker, request.path, body, request.headers)


class _Fields(PromptFields):
    """The fields that decide whether one transfer can serve a request."""

    n: Any = None
    echo: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None
    background: Any = None
    previous_response_id: Any = None


def _check_nothing_is_stored(fields: _Fields) -> None:
    """Raise RequestError (400) if a body of /v1/responses needs a response that vLLM stores."""
    for name in ("background", "previous_response_id"):
        if getattr(fields, name):
            # The prefill lacks that response, and the router does not know which decode has it.
            text = f"{name}: this router finds no stored responses; send all items as input"
            raise RequestError(text, param=name)


def _alone(path: str, fields: _Fields) -> str:
    """Return why decode has to compute the prompt itself, or "" if prefill can."""
    if path == RESPONSES_PATH:
        tools = fields.tools if isinstance(fields.tools, list) else []
        # vLLM calls these tools itself, and each result begins another prompt with the same params.
        ours = any(isinstance(tool, dict) and tool.get("type") != "function" for tool in tools)
        return "server_tools" if ours else ""
    if path == MESSAGES_PATH:
        return ""
    prompts = fields.prompt
    if isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int):
        # vLLM answers with the params of the first prompt only.
        return "completions"
    if fields.n not in (None, 1):
        # Each choice would read the pages, but prefill frees the pages after the first read.
        return "completions"
    if fields.prompt_logprobs is not None or fields.echo:
        # These options need the logits of every position, so vLLM loads no pages.
        return "prompt_logprobs"
    if fields.prompt_embeds is not None:
        return "prompt_embeds"
    if fields.use_beam_search:
        # vLLM does not pass `kv_transfer_params` on to a beam search.
        return "beam_search"
    if fields.truncate_prompt_tokens == -1:
        # The truncated length follows from max_tokens, which differs between the two legs.
        return "truncation"
    return ""


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def _params_in(answer: web.Response, prefill: Worker) -> msgspec.Raw | None:
    """Return the raw `kv_transfer_params` in a prefill's answer, or None if it has none."""
    body = answer.body if isinstance(answer.body, bytes) else b""
    try:
        params = msgspec.json.decode(body, type=_PrefillAnswer).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = f"prefill {prefill.url}: its answer is not that of a vLLM server"
        raise PairFailedError(Failure(502, str(Code.PROTOCOL_ERROR), text)) from None
    return None if bytes(params) == b"null" else params


class _Address(msgspec.Struct, frozen=True):
    """The address at which decodes find a prefill with kvflow's connector.

    Its fields are those in prefill's answers that are the same for every request. Other fields
    differ: the room, and the length of the cached prompt, which vLLM adds.
    """

    remote_host: str
    remote_port: int
    kvflow_decode_workers: int = 1

    @classmethod
    def read(cls, params: msgspec.Raw) -> _Address | None:
        """Return the address in `params`, or None for the params of another connector."""
        try:
            msgspec.json.decode(params, type=_Room)
            return msgspec.json.decode(params, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def params(self, room: int) -> dict[str, Any]:
        """Return the `kv_transfer_params` of decode's leg."""
        fields = msgspec.structs.asdict(self)
        return {"do_remote_prefill": True, "do_remote_decode": False, "kvflow_room": room, **fields}


class _Room(msgspec.Struct):
    kvflow_room: int


class _Learned:
    """The address of a prefill, learned from its answers since it came up."""

    def __init__(self) -> None:
        self.address: _Address | None = None  # None before the first answer and after a failure
        # True once two answers name different addresses, so several engines share the URL.
        self.varies = False
        self._last: _Address | None = None

    def note(self, address: _Address | None) -> None:
        self.address = address
        self.varies |= self._last is not None and self._last != address
        self._last = address


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _first_model(models: Any) -> str:
    try:
        return msgspec.convert(models, _Models).data[0].id
    except (msgspec.ValidationError, IndexError):
        raise NotServingError(f"/v1/models names no model: {_NOT_VLLM}") from None
