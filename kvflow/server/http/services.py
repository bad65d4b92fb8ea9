"""The real services: an engine and a node behind the `Service` the HTTP layer asks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvflow.engine.scheduler.limits import Limits
from kvflow.engine.scheduler.params import TokenOut
from kvflow.handlers.decode_room import DecodeSession
from kvflow.handlers.prefill_room import PrefillSession
from kvflow.memory.allocator import PageAllocator
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import Cause, Code, QuarantineError, room_error
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.server.http.errors import RequestError
from kvflow.server.http.service import ModelCard, Order, Report

if TYPE_CHECKING:  # the engines import torch
    from kvflow.engine.scheduler.budget import Admission
    from kvflow.engine.scheduler.decode import DecodeEngine
    from kvflow.engine.scheduler.prefill import PrefillEngine

REMEMBERED_ROOMS = 256
ADMISSION_S = 20.0  # less than prefill's half room waits for us: the true reason is told first
_KIND_WORDS = {"grant": "room", "quarantined": "quarantine"}
N = TypeVar("N", PrefillNode, DecodeNode)
E = TypeVar("E", bound="PrefillEngine | DecodeEngine")


class Recent:
    """The latest rooms, for stories; bounded, and nothing else reads it."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, PrefillSession | DecodeSession] = OrderedDict()

    def add(self, session: PrefillSession | DecodeSession) -> None:
        self._sessions[session.room] = session
        self._sessions.move_to_end(session.room)
        if len(self._sessions) > REMEMBERED_ROOMS:
            self._sessions.popitem(last=False)

    def lines(self) -> list[dict[str, Any]]:
        return [_line(session) for session in reversed(self._sessions.values())]

    def story(self, room: int) -> dict[str, Any] | None:
        session = self._sessions.get(room)
        if session is None:
            return None
        events = [
            {
                "at_s": round(line.at_s - session.opened_at_s, 6),
                "what": line.what,
                "phase": line.phase.lower(),
                "text": line.text,
            }
            for line in session.story()
        ]
        return {**_line(session), "events": events}


def _line(session: PrefillSession | DecodeSession) -> dict[str, Any]:
    cause = session.state.cause
    line = {
        "room": session.room,
        "phase": session.state.phase.name.lower(),
        "ended": session.ended,
        "cause": None if cause is None else str(cause),
    }
    if isinstance(session, PrefillSession):
        line.update(bytes_landed=session.bytes_landed, bytes_total=session.bytes_total)
    return line


def pages_by_kind(pages: PageAllocator) -> dict[str, int]:
    """Pages that are not free, by what owns them."""
    kinds: dict[str, int] = {}
    for owner, count in pages.owned().items():
        word = owner[0] if isinstance(owner, tuple) else type(owner).__name__.lower()
        word = _KIND_WORDS.get(str(word), str(word))
        kinds[word] = kinds.get(word, 0) + count
    return kinds


class _EngineService(Generic[N, E]):
    """What both roles answer alike, of one node and one engine."""

    def __init__(self, card: ModelCard, node: N, engine: E, timeout_s: float) -> None:
        self.card = card
        self._node: N = node
        self._engine: E = engine
        self._timeout_s = timeout_s
        self._recent = Recent()

    @property
    def role(self) -> str:
        return self._node.role

    @property
    def trouble(self) -> str:
        return self._node.trouble if self._engine.healthy else "the engine has stopped"

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    def report(self) -> Report:
        node, load = self._node, self._engine.load()
        return Report(
            incarnation=node.incarnation,
            control_endpoint=node.control,
            data_plane=node.plane.name,
            pool=node.shape,
            pages_free=node.pages.free_pages,
            pages_total=node.pages.num_pages,
            pages_by_kind=pages_by_kind(node.pages),
            pages_home=node.pages.at_rest(),
            quarantine_pages=node.quarantined_pages,
            quarantine_limit_pages=node.quarantine_limit,
            peers_by_phase=node.peers_by_phase(),
            peers_declared_dead=node.counts.declared_dead,
            rooms_by_state=node.rooms_by_phase(),
            rooms_ended=dict(node.counts.endings),
            bytes_moved=node.counts.bytes_moved,
            chunks_mismatched=node.counts.mismatched,
            messages_dropped=node.counts.dropped,
            internal_errors={"handler": node.counts.handler_errors, "step": self._engine.failed_steps},
            running=load.running,
            waiting=load.waiting,
        )

    def rooms(self) -> Sequence[dict[str, Any]]:
        return self._recent.lines()

    def story(self, room: int) -> dict[str, Any] | None:
        return self._recent.story(room)

    def peers(self) -> Sequence[dict[str, Any]]:
        return self._node.peers()

    def declare_dead(self, incarnation: int, why: str) -> None:
        raise RequestError(f"{self.role} lends no pages: declare a prefill dead at the decodes it served")

    async def flush_cache(self) -> None:
        return None


class PrefillService(_EngineService[PrefillNode, "PrefillEngine"]):
    """Prefill: an order is one prompt computed, moved to decode, and its first token."""

    @property
    def rank(self) -> RankInfo:
        """What the registry is told."""
        return self._node.info

    async def tokens(self, order: Order) -> AsyncGenerator[TokenOut, None]:
        session = self._node.room(order.room, order.prompt, deadline_s=self._timeout_s)
        self._recent.add(session)
        first = await self._engine.prefill(session, order.prompt, order.params)
        if first.finish_reason is None:
            first = TokenOut(first.token_id, first.logprob, first.top_logprobs, "length")
        yield first

    def refuse(self, room: int, cause: Cause) -> None:
        self._node.refuse(room, cause)


class DecodeService(_EngineService[DecodeNode, "DecodeEngine"]):
    """Decode: an order is pages lent to prefill, and every token once they have landed."""

    @property
    def trouble(self) -> str:
        return super().trouble or self._quarantine

    @property
    def _quarantine(self) -> str:
        """Why no room can be opened now, if it is because too many pages wait for proof."""
        try:
            self._node.handlers.ledger.check_quarantine()
        except QuarantineError as error:
            return str(error)
        return ""

    def declare_dead(self, incarnation: int, why: str) -> None:
        self._node.declare_dead(incarnation, why)

    async def tokens(self, order: Order) -> AsyncGenerator[TokenOut, None]:
        if not order.prefill:
            raise RequestError("bootstrap_host is missing: decode must know where its prefill is")
        # While quarantine is full nobody waits for pages: `room` refuses, and tells prefill why.
        admission = None if self._quarantine else await self._admitted(order)
        try:
            session = await self._node.room(order.room, order.prefill, order.prompt, deadline_s=self._timeout_s)
        except BaseException:
            if admission is not None:
                admission.release()
            raise
        self._recent.add(session)
        tokens = self._engine.generate(session, order.prompt, order.params, admission)
        try:
            async for token in tokens:
                yield token
        finally:
            await tokens.aclose()

    async def _admitted(self, order: Order) -> Admission:
        try:
            async with asyncio.timeout(ADMISSION_S):
                return await self._engine.admit(order.prompt, order.params)
        except TimeoutError:
            text = f"decode had no pages for this request within {ADMISSION_S:g} s"
            raise room_error(Cause(Code.CAPACITY, text)) from None

    def refuse(self, room: int, cause: Cause) -> None:
        """Nothing was lent for this room, and the router drops prefill's leg when ours fails."""
