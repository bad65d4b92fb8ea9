"""Interface between the HTTP layer and a running prefill or decode: tokens, refusals, reports."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec

from kvflow.http.prompt_fields import PromptIds
from kvflow.node.report import NodeReport
from kvflow.protocols.arguments import CheckedPrompt
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.errors import Cause
from kvflow.serve.cache.prefix import CacheStats
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import (
    EngineLocalPrompts,
    EngineOptimism,
    EngineRetractions,
    SamplingParams,
    TokenOut,
)
from kvflow.telemetry.histogram import Histogram


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the served model for clients and routers."""

    path: str
    name: str
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    dtype: str = ""
    context_length: int
    vocab_size: int
    sampling_defaults: dict[str, float] = {}  # for fields that an OpenAI body omits


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to generate: the room for its KV, its prompt and its sampling parameters.

    `room` is None if decode computes the prompt itself: then no prefill has a part in the request.
    """

    room: int | None
    prefill: str  # "host:port" of prefill's bootstrap registry; a prefill ignores it
    # The group of prefill's ranks that serves the room. None means group `room % dp_size`.
    prefill_dp_rank: int | None = None
    prompt: PromptIds
    params: SamplingParams
    namespace: Namespace = ANY  # the part of the prefix cache that the prompt uses
    # Digests of a long prompt (see `generation_requests.with_digests`).
    checked: CheckedPrompt | None = None


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """Live figures of one of several ranks, from its last status. Valid only while it is `up`."""

    rank: int
    up: bool
    pid: int = 0
    pages_free: int = 0
    pages_total: int = 0
    pages_at_rest: bool = False
    pinned_pages: int = 0
    rooms: dict[str, int] = {}  # open rooms, by state
    requests: int = 0  # requests that the rank computes or will compute
    tickets: int = 0  # requests of the group that have not ended at this rank
    bytes_moved: int = 0
    internal_errors: dict[str, int] = {}
    messages_dropped: int = 0
    cache: CacheStats | None = None


class Report(NodeReport, frozen=True, kw_only=True):
    """Live figures for /server_info and /metrics. Making one every second is cheap."""

    queue_seconds: Histogram | None = None  # the engine's own object, which it continues to fill
    running: int = 0
    waiting: int = 0
    optimism: EngineOptimism | None = None  # prefill only
    cache: CacheStats | None = None  # None if prefixes are not cached
    kv_events: dict[str, Any] | None = None  # addresses and counters of the event publisher
    retraction: EngineRetractions | None = None  # decode only
    decode_steps: int | None = None  # decode only
    local_prompts: EngineLocalPrompts | None = None  # decode only
    pp_size: int = 1
    tp_size: int = 1
    ranks: tuple[RankReport, ...] = ()  # empty for a worker with one rank


class CompletionService(Protocol):
    """One running prefill or decode."""

    @property
    def role(self) -> str: ...

    @property
    def card(self) -> ModelCard: ...

    @property
    def unavailable_reason(self) -> str:
        """Reason why no request can be served now. Empty while requests can be served."""

    @property
    def limits(self) -> EngineLimits:
        """Limits of a single request that has the whole pool to itself."""

    def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenOut, None]:
        """Yield the tokens of `request`, and abort the room when the iterator is closed.

        A prefill yields only the first token, once the prompt's KV lands at decode. A decode
        yields all tokens. Raises: KvflowError.
        """

    def refuse(self, room: int, prefill: str, cause: Cause, dp_rank: int | None = None) -> None:
        """End a room whose request never reached `tokens`, and send the cause to the other leg.

        `prefill` is the address of the prefill's registry, empty if unknown. `dp_rank` is the
        prefill's group. A prefill ignores both. Never raises.
        """

    def abort(self, request: GenerationRequest) -> None:
        """Announce that the caller is about to close the iterator of `request`.

        If the other leg would take that for a failure, it receives `Code.ABORTED` instead.
        """

    def end_requests(self) -> None:
        """Accept no more requests, and end the open ones with `Code.SHUTDOWN` on both legs."""

    def report(self) -> Report: ...

    def rooms(self, most_ended: int = ...) -> Sequence[dict[str, Any]]:
        """Return one entry for each open room, and for at most so many that have ended."""

    def story(self, room: int) -> dict[str, Any] | None:
        """Return the events of a room with their times, or None for an unknown room."""

    def peers(self) -> Sequence[dict[str, Any]]:
        """Return one entry for each node of the other role that this one knows."""

    def declare_dead(self, incarnation: int, why: str) -> None:
        """Record that a peer no longer writes (see `Node.declare_dead`). Raises: MisuseError."""

    async def flush_cache(self) -> None:
        """Drop every cached prefix. A request that reads a prefix keeps its pages until it ends."""
