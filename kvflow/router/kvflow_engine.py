"""The engine for kvflow's own workers: both legs get the same body and the same rooms, at once."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from prometheus_client.core import Metric

from kvflow.http.bodies import MAX_COMPLETIONS, decoded, whole_number
from kvflow.http.draining import ROLE_HEADER
from kvflow.http.errors import RequestError
from kvflow.http.paths import COUNT_PATH, MESSAGES_PATH, RESPONSES_PATH, TOKENIZE_PATHS
from kvflow.router.engines import Forwarded
from kvflow.router.feed import source_of
from kvflow.router.identity import Identity, ask
from kvflow.router.legs import Leg, with_fields
from kvflow.router.pairs import Pair, sequential, together
from kvflow.router.prompts import PromptFields
from kvflow.router.workers import Worker
from kvflow.telemetry.requests import name_rooms
from kvflow.transports.control.curve import ControlKey

ROOM_HEADER = "X-Kvflow-Room"
_NOT_KVFLOW = (
    "it is not a worker of kvflow; a router in front of vLLM servers is started with --engine vllm"
)
# The fields of a request whose prompts decode computes. They override those that a client gives.
_ALONE = {
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "compute_prompt": True,
}
_OF_A_MODEL = ("/v1/models", "/v1/models/{model:.+}", "/model_info", "/get_model_info")
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
# The fields with several prompts, and the routes with `n`. A worker ignores these fields elsewhere,
# so a room for each would have no completion.
_PROMPTS = {GENERATE: ("text", "input_ids"), COMPLETIONS: ("prompt",)}
_WITH_N = (COMPLETIONS, CHAT)


class KvflowEngine:
    """Implements `engines.Engine`."""

    completion_paths = (GENERATE, CHAT, COMPLETIONS, MESSAGES_PATH, RESPONSES_PATH)
    decode_routes = (
        *(("GET", path) for path in _OF_A_MODEL),
        *(("POST", path) for path in (*TOKENIZE_PATHS, COUNT_PATH)),
    )
    has_operations = True
    retried_statuses = frozenset({502, 503})
    keepalive_s = 15.0

    def __init__(self, events_key: ControlKey | None = None) -> None:
        self._events_key = events_key

    async def identify(
        self, session: aiohttp.ClientSession, url: str, role: str | None, known: Identity | None
    ) -> Identity:
        return read_identity(
            await ask(session, url, "/server_info", {404: _NOT_KVFLOW}), url, self._events_key
        )

    def read(self, path: str, body: bytes) -> KvflowCompletion:
        fields = decoded(body, _GenerateFields if path == GENERATE else _Fields)
        return KvflowCompletion(path, fields)

    def families(self) -> Iterator[Metric]:
        yield from ()


class KvflowCompletion:
    """Implements `engines.Completion`."""

    def __init__(self, path: str, fields: _Fields) -> None:
        self.fields = fields
        self._prompts, self._choices = _counts(path, fields)

    def local_tokens(self, missing: int) -> int | None:
        fields = self.fields
        # Decode alone returns no logprobs of prompts.
        if fields.echo or fields.logprob_start_len not in (None, -1):
            return None
        # Each choice of a prompt is computed by itself.
        return missing * self._choices

    def open_pair(
        self, request: Forwarded, prefill: Worker | None, decode: Worker
    ) -> AbstractAsyncContextManager[Pair]:
        if prefill is not None:
            return self._open_together(request, prefill, decode)
        name_rooms(())
        leg = _leg(request, decode, with_fields(request.raw, _ALONE))
        return sequential(None, decode, lambda _: leg)

    @asynccontextmanager
    async def _open_together(
        self, request: Forwarded, prefill: Worker, decode: Worker
    ) -> AsyncGenerator[Pair, None]:
        rooms = [secrets.randbits(63) for _ in range(self._prompts * self._choices)]
        name_rooms(rooms)
        more = {} if self.fields.compute_prompt is None else {"compute_prompt": None}
        body = with_fields(request.raw, bootstrap_fields(prefill, rooms) | more)
        legs = _leg(request, prefill, body), _leg(request, decode, body)
        async with together(*legs, {ROOM_HEADER: ",".join(map(str, rooms))}) as pair:
            yield pair


def _leg(request: Forwarded, worker: Worker, body: bytes) -> Leg:
    headers = {**request.headers, ROLE_HEADER: worker.role}
    return Leg(request.session, worker, request.path, body, headers)


class _Sampling(msgspec.Struct):
    n: Any = None


class _Fields(PromptFields):
    """The fields of a body that determine its prompts, the number of completions, and whether
    decode can serve it alone.
    """

    n: Any = None
    echo: Any = None
    logprob_start_len: Any = None
    compute_prompt: Any = None


class _GenerateFields(_Fields):
    """The same of /generate. Other routes ignore `sampling_params`."""

    sampling_params: _Sampling | list[_Sampling] | None = None


def _counts(path: str, fields: _Fields) -> tuple[int, int]:
    """Return the number of prompts in a body, and of choices for each: every choice needs a room.

    Raises: RequestError (400).
    """
    prompts = 1
    for name in _PROMPTS.get(path, ()):
        value = getattr(fields, name)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            prompts = len(value)
    name, choices = _choices(path, fields)
    if (
        not isinstance(choices, int)
        or isinstance(choices, bool)
        or not 1 <= prompts * choices <= MAX_COMPLETIONS
    ):
        raise RequestError(
            f"{name}: {str(choices)[:40]} times {prompts} prompts is outside "
            f"1..{MAX_COMPLETIONS} completions",
            param=name,
        )
    return prompts, choices


def _choices(path: str, fields: _Fields) -> tuple[str, Any]:
    """Return the name and the value of the field that has the number of choices for a prompt."""
    if isinstance(fields, _GenerateFields):
        sampling = fields.sampling_params
        if isinstance(sampling, list):
            sampling = sampling[0] if sampling else None
        return "sampling_params.n", (sampling.n if sampling else None) or 1
    return "n", fields.n or 1 if path in _WITH_N else 1


def bootstrap_fields(prefill: Worker, rooms: list[int]) -> dict[str, Any]:
    """Return the fields by which both legs meet, at most `MAX_ADDED_BYTES` of JSON."""
    room = rooms[0] if len(rooms) == 1 else rooms
    return {
        "bootstrap_host": prefill.host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": room,
    }


def read_identity(info: Any, url: str = "", events_key: ControlKey | None = None) -> Identity:
    """Return the identity of the worker at `url`, whose /server_info answered `info`."""
    found = info if isinstance(info, dict) else {}
    # Any program may answer at this URL, and wrong types must not reach the choice of workers.
    return Identity(
        role=found.get("disaggregation_mode"),
        started_as=found.get("started_as"),
        incarnation=str(found.get("incarnation", "")),
        model=str(found.get("served_model_name") or found.get("model_path") or ""),
        fingerprint=str(found.get("fingerprint") or ""),
        bootstrap_port=whole_number(found.get("disaggregation_bootstrap_port")),
        cache_tokens=_cache_tokens(found),
        events=source_of(url, found.get("kv_events"), found.get("page_size"), events_key),
        wire_version=whole_number(found.get("wire_version")),
        data_plane=str(found.get("data_plane") or ""),
        computes_prompts=_computes_prompts(found),
        max_model_len=whole_number(found.get("max_model_len")),
    )


def _computes_prompts(info: dict[str, Any]) -> bool:
    local = info.get("local_prompts")
    return isinstance(local, dict) and bool(whole_number(local.get("chunk")))


def _cache_tokens(info: dict[str, Any]) -> int:
    """Return how many tokens the pool and the host memory behind it can cache."""
    pages, cache, size = info.get("pages"), info.get("prefix_cache"), info.get("page_size")
    if not isinstance(pages, dict) or not isinstance(cache, dict):
        return 0
    found = pages.get("total"), cache.get("host_limit_pages", 0), size
    count, behind, tokens = map(whole_number, found)
    if count is None or behind is None or tokens is None:
        return 0
    return max(0, (count + behind) * tokens)
