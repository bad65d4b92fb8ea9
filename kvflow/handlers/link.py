"""Decode's end of the link to one prefill rank: register, heartbeat, notice silence and death, hear of proof."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING

from kvflow.protocols.codec import encode
from kvflow.protocols.errors import Cause, LostError, RefusedError, TransferError
from kvflow.protocols.loans import LoanKind
from kvflow.protocols.messages import (
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
from kvflow.protocols.ports import ControlSocket, Endpoint
from kvflow.protocols.ranks import RankInfo

if TYPE_CHECKING:
    from kvflow.handlers.decode import DecodeHandlers


class LinkPhase(Enum):
    REGISTERING = "registering"
    UP = "up"
    SILENT = "silent"  # nothing heard for too long; it may come back as the same incarnation
    GONE = "gone"  # refused, replaced by another incarnation, or dead: never used again


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
        self._reader = asyncio.create_task(home.serve_link(self, socket), name=f"kvflow-link-{info.control}")
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
        if self.phase is LinkPhase.REGISTERING:
            if now - self._opened_at_s > timing.register_s:
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
        self._home.source_lost(self, Cause(error.code, str(error)))

    def await_fence(self) -> None:
        """One watch per link, from its first day: a writer's death ends rooms at once and proves loans ended."""
        if self._fence is None and self.writer is not None:
            self._fence = asyncio.create_task(self._watch(self.writer), name=f"kvflow-fence-{self.control}")

    async def close(self) -> None:
        """Stop the tasks and close the socket; cancelled tasks are awaited."""
        self.phase = LinkPhase.GONE
        if not self.ready.done():
            self.ready.set_exception(LostError("this node is closing"))
            self.ready.exception()
        tasks = [t for t in (self._reader, self._fence) if t is not None and t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    def _register(self) -> None:
        self._said_at_s = self._home.now()
        home = self._home
        self.send(Register(self.source, home.incarnation, WIRE_VERSION, home.layout, home.endpoint))

    async def _watch(self, writer: Endpoint) -> None:
        try:
            await self._home.plane.fence(writer)
        except TransferError:
            return  # this writer's end can never be proven from here: silence ends rooms, loans stay in quarantine
        self.lose(LinkPhase.GONE, LostError(f"prefill at {self.control} died"))
        self._home.ledger.feed_link(self, LoanKind.FENCED)
