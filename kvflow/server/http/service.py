"""What the HTTP layer needs from a role: tokens for an order, refusals, and a report. roles.py makes the real ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec

from kvflow.engine.scheduler.limits import Limits
from kvflow.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.protocols.errors import Cause
from kvflow.protocols.wire.ranks import PoolShape


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, as clients and routers ask for it."""

    path: str
    name: str
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    dtype: str = ""
    context_length: int
    vocab_size: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to make: where its KV meets, what it starts from, how to sample."""

    room: int
    prefill: str  # "host:port" of the bootstrap registry; prefill itself does not look at it
    prompt: list[int]
    params: SamplingParams


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The live part of /server_info and the source of every gauge; cheap enough to ask for each second."""

    incarnation: int
    control_endpoint: str
    data_plane: str
    pool: PoolShape
    pages_free: int
    pages_total: int
    pages_by_kind: dict[str, int] = {}
    pages_home: bool
    quarantine_pages: int = 0
    quarantine_limit_pages: int = 0  # more than these, and no new request is taken
    peers_by_phase: dict[str, int] = {}
    peers_declared_dead: int = 0
    rooms_by_state: dict[str, int] = {}
    rooms_ended: dict[str, int] = {}
    bytes_moved: int = 0
    chunks_mismatched: int = 0
    messages_dropped: dict[str, int] = {}
    internal_errors: dict[str, int] = {}
    running: int = 0
    waiting: int = 0


class Service(Protocol):
    """One prefill or decode, running."""

    @property
    def role(self) -> str: ...

    @property
    def card(self) -> ModelCard: ...

    @property
    def trouble(self) -> str:
        """Why no request can be served here; empty when all is well."""

    @property
    def limits(self) -> Limits:
        """What one request may ask for when it has the pool for itself."""

    def tokens(self, order: Order) -> AsyncGenerator[TokenOut, None]:
        """The order's tokens: prefill yields the first one when its KV has landed at decode, decode yields all of them.

        Closing the iterator aborts the room. Raises: KvflowError.
        """

    def refuse(self, room: int, cause: Cause) -> None:
        """End a room whose request never reached `tokens`, so that the other leg learns why. Never raises."""

    def report(self) -> Report: ...

    def rooms(self) -> Sequence[dict[str, Any]]:
        """Open and recently ended rooms, a line each."""

    def story(self, room: int) -> dict[str, Any] | None:
        """What happened in a room: events with times, bytes landed of bytes to move; None when it is unknown."""

    def peers(self) -> Sequence[dict[str, Any]]:
        """The nodes of the other role this one knows, a line each."""

    def declare_dead(self, incarnation: int, why: str) -> None:
        """An operator's word that a prefill writes no more (see `DecodeNode.declare_dead`). Raises: MisuseError."""

    async def flush_cache(self) -> None:
        """Forget cached prefixes; there are none yet."""
