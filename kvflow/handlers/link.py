"""Decode's end of the link to one prefill rank: register, heartbeat, notice silence and death, hear of proof."""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvflow.handlers.tasks import fenced, spawn
from kvflow.protocols.errors import Cause, LostError, RefusedError
from kvflow.protocols.machines.loan import LoanKind
from kvflow.protocols.ports import ControlSocket, Endpoint
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import (
    MAX_BELIEFS,
    WIRE_VERSION,
    Abort,
    Belief,
    Heartbeat,
    Message,
    Register,
    Registered,
    Resync,
)
from kvflow.protocols.wire.ranks import RankInfo

if TYPE_CHECKING:
    from kvflow.handlers.decode import DecodeHandlers


log = logging.getLogger(__name__)


class LinkPhase(Enum):
    REGISTERING = "registering"
    UP = "up"
    SILENT = "silent"  # nothing heard for too long; it may come back as the same incarnation
    GONE = "gone"  # refused, replaced by another incarnation, dead or declared dead: never used again


class Link:
    """One DEALER to one incarnation of one prefill rank."""

    def __init__(self, home: DecodeHandlers, info: RankInfo, socket: ControlSocket) -> None:
        self._home, self._info, self._socket = home, info, socket
        self.phase = LinkPhase.REGISTERING
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.writer: Endpoint | None = None
        self._heard_at_s = self._said_at_s = home.now()
        self._opened_at_s = self._heard_at_s
        self._fence: asyncio.Task[None] | None = None
        self._reader = self._read()
        self._register()

    @property
    def source(self) -> int:
        return self._info.incarnation

    @property
    def rank(self) -> int:
        return self._info.rank

    @property
    def control(self) -> str:
        return self._info.control

    def send(self, message: Message) -> None:
        if not self._socket.send(encode(message)):
            self._home.counts.undelivered += 1

    def send_abort(self, room: int, grant: int, cause: Cause) -> None:
        self.send(Abort(room, grant, self.source, self._home.incarnation, cause))

    @property
    def usable(self) -> bool:
        """May become, or is, a link rooms can be opened on."""
        return self.phase in (LinkPhase.REGISTERING, LinkPhase.UP)

    def heard(self) -> None:
        self._heard_at_s = self._home.now()
        if self.phase is LinkPhase.SILENT:
            self.phase = LinkPhase.UP
            self._home.ledger.feed_link(self, LoanKind.SOURCE_BACK)

    def forgive(self, late_s: float) -> None:
        """Our own loop stood still for so long: nobody is silent because of it."""
        self._heard_at_s += late_s

    def on_registered(self, message: Registered) -> None:
        """Accepted, refused, or answered by somebody else than the one we know."""
        if message.source != self.source:
            text = f"prefill at {self.control} restarted: another incarnation answers"
            self.lose(LinkPhase.GONE, LostError(text))
        elif message.refusal:
            self.lose(LinkPhase.GONE, RefusedError(f"prefill at {self.control} refused: {message.refusal}"))
        elif self.phase is LinkPhase.REGISTERING:
            self.writer = message.endpoint
            self.phase = LinkPhase.UP
            if not self.ready.done():
                self.ready.set_result(None)
            self.await_fence()

    def sweep(self, now: float) -> None:
        """Time passed: repeat what was not answered, notice silence, ask about rooms that stand still."""
        timing = self._home.timing
        trouble = self._socket.trouble  # asked in every phase: what it has to tell must not pile up
        if self.phase is LinkPhase.REGISTERING:
            if trouble:
                text = f"prefill at {self.control} does not let this decode in: {trouble}"
                self.lose(LinkPhase.GONE, RefusedError(text))
            elif now - max(self._heard_at_s, self._opened_at_s) > timing.register_s:
                self.lose(
                    LinkPhase.GONE, LostError(f"prefill at {self.control} did not answer for {timing.register_s:g} s")
                )
            elif now - self._said_at_s >= timing.repeat_after_s:
                self._register()
            return
        if self.phase is LinkPhase.UP and now - self._heard_at_s > timing.lost_after_s:
            self.lose(
                LinkPhase.SILENT, LostError(f"prefill at {self.control} was silent for {timing.lost_after_s:g} s")
            )
        if self.phase is LinkPhase.SILENT and now - max(self._heard_at_s, self._opened_at_s) > timing.lost_after_s:
            self._redial(now)
        if self.phase is not LinkPhase.GONE and now - self._said_at_s >= timing.heartbeat_s:
            self._said_at_s = now
            self.send(Heartbeat(self.source, self._home.incarnation, self._home.settled_below()))

    def ask_again(self, rooms: list[Belief]) -> None:
        for start in range(0, len(rooms), MAX_BELIEFS):
            self.send(Resync(self.source, self._home.incarnation, tuple(rooms[start : start + MAX_BELIEFS])))

    def lose(self, phase: LinkPhase, error: RefusedError | LostError) -> None:
        """End every room of this link; its loans wait for proof."""
        self.phase = phase
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()
        if phase is LinkPhase.GONE:  # else its socket would go on fighting with the next link's for our name
            self._home.finish(_hang_up(self._reader, self._socket))
        self._home.source_lost(self, Cause(error.code, str(error)))

    def declare_dead(self, why: str) -> None:
        """End its rooms and loans on an operator's word."""
        self.lose(LinkPhase.GONE, LostError(f"prefill at {self.control} was declared dead: {why}"))
        loans, pages = self._home.ledger.owed_by(self)
        log.warning(
            "prefill %016x at %s is declared dead (%s): %d loans end without proof, %d pages leave quarantine",
            self.source, self.control, why, loans, pages,
        )  # fmt: skip
        self._home.ledger.feed_link(self, LoanKind.FENCED)

    def line(self) -> dict[str, Any]:
        """The link as operators see it."""
        loans, quarantined = self._home.ledger.owed_by(self)
        return {
            "incarnation": f"{self.source:016x}",
            "control": self.control,
            "rank": self.rank,
            "phase": self.phase.value,
            "heard_ago_s": round(self._home.now() - self._heard_at_s, 3),
            "loans": loans,
            "quarantine_pages": quarantined,
        }

    def await_fence(self) -> None:
        """One watch per link, from its first day: a writer's death ends rooms at once and proves loans ended."""
        if self._fence is None and self.writer is not None:
            self._fence = spawn(self._watch(self.writer), f"kvflow-fence-{self.control}", self._home.counts)

    async def close(self) -> None:
        """Stop the tasks and close the socket; cancelled tasks are awaited."""
        self.phase = LinkPhase.GONE
        if not self.ready.done():
            self.ready.set_exception(LostError("this node is closing"))
            self.ready.exception()
        if self._fence is not None and self._fence is not asyncio.current_task():
            self._fence.cancel()
            await asyncio.gather(self._fence, return_exceptions=True)
        await _hang_up(self._reader, self._socket)

    def _redial(self, now: float) -> None:
        """Another connection: the old one may stand and yet lead nowhere, when somebody took our name at prefill."""
        self._opened_at_s = now
        self._home.finish(_hang_up(self._reader, self._socket))
        self._socket = self._home.dial(self._info)
        self._reader = self._read()

    def _read(self) -> asyncio.Task[None]:
        return spawn(self._home.serve_link(self, self._socket), f"kvflow-link-{self.control}", self._home.counts)

    def _register(self) -> None:
        self._said_at_s = self._home.now()
        home = self._home
        who = (self.source, home.incarnation, WIRE_VERSION)
        self.send(Register(*who, home.layout, home.endpoint, home.settled_below()))

    async def _watch(self, writer: Endpoint) -> None:
        home = self._home
        if not await fenced(home.plane, writer, home.timing, home.counts):
            return  # this writer's end can never be proven from here: silence ends rooms, loans stay in quarantine
        self.lose(LinkPhase.GONE, LostError(f"prefill at {self.control} died"))
        self._home.ledger.feed_link(self, LoanKind.FENCED)


async def _hang_up(reader: asyncio.Task[None], socket: ControlSocket) -> None:
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    socket.close()
