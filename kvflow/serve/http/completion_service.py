"""The interface between the HTTP layer and a prefill or decode: tokens, refusals and a report.

`engine_services` and `group_service` implement it, and `launch/roles.py` makes the objects.
"""

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
    EngineOptimism,
    EngineRetractions,
    SamplingParams,
    TokenOut,
)
from kvflow.telemetry.histogram import Histogram


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, as clients and routers see it."""

    path: str
    name: str
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    dtype: str = ""
    context_length: int
    vocab_size: int
    sampling_defaults: dict[str, float] = {}  # of the OpenAI routes, for fields that a body omits


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to generate: the room of its KV, its prompt and its sampling."""

    room: int
    prefill: str  # "host:port" of the bootstrap registry; a prefill ignores it
    # The group of prefill's ranks that serves the room; `room % dp_size` if None.
    prefill_dp_rank: int | None = None
    prompt: PromptIds
    params: SamplingParams
    namespace: Namespace = ANY  # of the prefix cache
    checked: CheckedPrompt | None = None  # of a long prompt, see `generation_requests.with_digests`


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """Live figures of one rank of a worker over several ranks: the last status that it sent, if
    it is `up`.
    """

    rank: int
    up: bool
    pid: int = 0
    pages_free: int = 0
    pages_total: int = 0
    pages_at_rest: bool = False
    pinned_pages: int = 0
    rooms: dict[str, int] = {}  # open ones, by state
    requests: int = 0  # the rank computes their pages, or will
    tickets: int = 0  # requests of the group that did not end at the rank yet
    bytes_moved: int = 0
    internal_errors: dict[str, int] = {}
    messages_dropped: int = 0
    cache: CacheStats | None = None


class Report(NodeReport, frozen=True, kw_only=True):
    """Live figures for /server_info and every gauge; cheap enough to make every second."""

    queue_seconds: Histogram | None = None  # shared with the engine, which still fills it
    running: int = 0
    waiting: int = 0
    optimism: EngineOptimism | None = None  # prefill only
    cache: CacheStats | None = None  # if prefixes are cached
    # Addresses and counters of the publisher of cache events.
    kv_events: dict[str, Any] | None = None
    retraction: EngineRetractions | None = None  # decode only
    decode_steps: int | None = None  # decode only
    pp_size: int = 1
    tp_size: int = 1
    ranks: tuple[RankReport, ...] = ()  # empty for a worker of one rank


class CompletionService(Protocol):
    """One running prefill or decode."""

    @property
    def role(self) -> str: ...

    @property
    def card(self) -> ModelCard: ...

    @property
    def unavailable_reason(self) -> str:
        """The reason why no request can be served now; empty while requests can be served."""

    @property
    def limits(self) -> EngineLimits:
        """Limits of a single request that has the whole pool."""

    def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenOut, None]:
        """Yield the tokens of `request`: prefill the first one, once its KV landed at decode;
        decode all.

        Closing the iterator aborts the room. Raises: KvflowError.
        """

    def refuse(self, room: int, prefill: str, cause: Cause, dp_rank: int | None = None) -> None:
        """End a room whose request never reached `tokens`, so that the other leg gets the cause.

        `prefill` is the address of its registry, empty when unknown, and `dp_rank` the group there;
        a prefill ignores both. Never raises."""

    def abort(self, request: GenerationRequest) -> None:
        """Announce that the caller is about to close the tokens of `request`.

        Where that would look like a failure to the other leg, it gets `Code.ABORTED` instead."""

    def end_requests(self) -> None:
        """Accept no more requests, and end all that run or wait with `Code.SHUTDOWN`, at both
        legs.
        """

    def report(self) -> Report: ...

    def rooms(self) -> Sequence[dict[str, Any]]:
        """Return open and recently ended rooms, one entry each."""

    def story(self, room: int) -> dict[str, Any] | None:
        """Return the events of a room with their times, and the bytes landed of those to move;
        None for an unknown room.
        """

    def peers(self) -> Sequence[dict[str, Any]]:
        """Return the nodes of the other role that this one knows, one entry each."""

    def declare_dead(self, incarnation: int, why: str) -> None:
        """Record an operator's assurance that a prefill writes no more (see `Node.declare_dead`).

        Raises: MisuseError.
        """

    async def flush_cache(self) -> None:
        """Drop every cached prefix; requests that read one keep it until they end."""
