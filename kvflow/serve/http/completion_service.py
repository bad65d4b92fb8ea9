"""What the HTTP layer needs from a prefill or a decode: tokens for a request, refusals and a
report.

`launch/roles.py` makes the real ones.
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
    sampling_defaults: dict[str, float] = {}  # of the OpenAI routes, where a body does not say


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to generate: the room its KV moves through, its prompt, its sampling."""

    room: int
    prefill: str  # "host:port" of the bootstrap registry; a prefill ignores it
    # The group of its ranks that serves the room; `room % dp_size` where None.
    prefill_dp_rank: int | None = None
    prompt: PromptIds
    params: SamplingParams
    namespace: Namespace = ANY  # of the prefix cache
    checked: CheckedPrompt | None = None  # of a long prompt, see `generation_requests.with_digests`


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """The live part of one rank of a worker over several; what another one has last told, if it is
    `up`.
    """

    rank: int
    up: bool
    pid: int = 0
    pages_free: int = 0
    pages_total: int = 0
    pages_at_rest: bool = False
    pinned_pages: int = 0
    rooms: dict[str, int] = {}  # open ones, by state
    requests: int = 0  # whose pages it computes, or will
    tickets: int = 0  # requests of the group of which something is left there
    bytes_moved: int = 0
    internal_errors: dict[str, int] = {}
    messages_dropped: int = 0
    cache: CacheStats | None = None


class Report(NodeReport, frozen=True, kw_only=True):
    """The live part of /server_info and the source of every gauge; cheap enough to be taken every
    second.
    """

    queue_seconds: Histogram | None = None  # it goes on being filled
    running: int = 0
    waiting: int = 0
    optimism: EngineOptimism | None = None  # of a prefill
    cache: CacheStats | None = None  # of prefixes, where they are cached
    # Where events of that cache are published, and how many.
    kv_events: dict[str, Any] | None = None
    retraction: EngineRetractions | None = None  # of a decode, as is what follows
    decode_steps: int | None = None
    pp_size: int = 1
    tp_size: int = 1
    ranks: tuple[RankReport, ...] = ()  # of a worker over several


class CompletionService(Protocol):
    """One running prefill or decode."""

    @property
    def role(self) -> str: ...

    @property
    def card(self) -> ModelCard: ...

    @property
    def unavailable_reason(self) -> str:
        """Why no request can be served now; empty while requests can be served."""

    @property
    def limits(self) -> EngineLimits:
        """What one request may ask for when it has the pool to itself."""

    def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenOut, None]:
        """The tokens of `request`: prefill yields the first one once its KV has landed at decode,
        decode yields all.

        Closing the iterator aborts the room. Raises: KvflowError.
        """

    def refuse(self, room: int, prefill: str, cause: Cause, dp_rank: int | None = None) -> None:
        """End a room whose request never reached `tokens`, so that the other leg gets the cause.

        `prefill` is where its registry is, empty when unknown, `dp_rank` the group there; prefill
        itself does not look at them. Never raises."""

    def abort(self, request: GenerationRequest) -> None:
        """The tokens of `request` are about to be closed: where that would look like a failure to
        the other leg, it gets `Code.ABORTED`."""

    def end_requests(self) -> None:
        """Accept none from here on, and end every one that runs or waits with `Code.SHUTDOWN`, at
        both legs.
        """

    def report(self) -> Report: ...

    def rooms(self) -> Sequence[dict[str, Any]]:
        """Open and recently ended rooms, one entry each."""

    def story(self, room: int) -> dict[str, Any] | None:
        """What happened in a room: events with times, bytes landed of bytes to move; None for an
        unknown room.
        """

    def peers(self) -> Sequence[dict[str, Any]]:
        """The nodes of the other role that this one knows, one entry each."""

    def declare_dead(self, incarnation: int, why: str) -> None:
        """Record an operator's assurance that a prefill writes no more (see `Node.declare_dead`).

        Raises: MisuseError.
        """

    async def flush_cache(self) -> None:
        """Forget every cached prefix; requests that read one keep it until they end."""
