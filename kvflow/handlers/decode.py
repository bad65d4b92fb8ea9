"""What decode does about messages: rooms by grant, links by prefill incarnation, one ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from kvflow.handlers.decode_room import DecodeSession
from kvflow.handlers.link import Link
from kvflow.handlers.sweep import keep_sweeping
from kvflow.handlers.tasks import spawn
from kvflow.protocols.errors import Cause, Code, KvflowError, LostError, MisuseError, WireError, room_error
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.decode_room import DecodeEvent, DecodeKind, DecodePhase
from kvflow.protocols.machines.ledger import Grant, Ledger
from kvflow.protocols.machines.loan import LoanKey, LoanKind
from kvflow.protocols.pages.layout import PoolLayout, pack_pages
from kvflow.protocols.ports import Checksums, ControlSocket, DataPlane, Endpoint, PageStore
from kvflow.protocols.wire.codec import decode_to_decode
from kvflow.protocols.wire.messages import (
    AbortAck,
    Belief,
    Bootstrap,
    ChunkDone,
    Heartbeat,
    Registered,
    Resync,
    RoomFailed,
)
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)

Connect = Callable[[str, int], ControlSocket]  # (control endpoint, our incarnation) -> DEALER


class DecodeHandlers:
    """The rooms, links and loans of one decode incarnation. Lives on the event loop."""

    def __init__(
        self,
        *,
        incarnation: int,
        pages: PageStore,
        plane: DataPlane,
        layout: PoolLayout,
        endpoint: Endpoint,
        connect: Connect,
        now: Callable[[], float],
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        """With `checksums` every chunk is summed where it landed, and must agree with what prefill sent."""
        self.incarnation, self.pages, self.plane, self.checksums = incarnation, pages, plane, checksums
        self.layout, self.endpoint = layout, endpoint  # of our pool, as peers must use them
        self.now, self.timing = now, timing or Timing()
        self.counts = Counts()
        share = (bounds or Bounds()).quarantine_share
        self.ledger = Ledger(pages, now, int(share * layout.num_pages))
        self.rooms: dict[int, DecodeSession] = {}
        self.links: dict[int, Link] = {}
        self._declared_dead: set[int] = set()
        self._connect = connect
        self._next_grant = 1
        self._closing: set[asyncio.Task[None]] = set()
        self._patient_until_s = 0.0
        self._leaving: Cause | None = None  # no new room: nobody would repeat what it says
        self._sweeper = spawn(self._sweep(), "kvflow-decode-sweep", self.counts)

    # --- rooms

    async def link_all(self, ranks: Sequence[RankInfo]) -> list[Link]:
        """A registered link to every rank, opened where there is none.

        Raises: RefusedError (the pools do not fit: says what differs), LostError, AbortedError while shutting down.
        """
        if self._leaving is not None:
            raise room_error(self._leaving)
        if not ranks:
            raise LostError("no rank of that prefill is known")
        if len({info.incarnation for info in ranks}) < len(ranks):
            raise MisuseError(f"two ranks of {ranks[0].control} have one incarnation")
        links = []
        for info in ranks:
            if info.incarnation in self._declared_dead:
                raise LostError(f"prefill {info.incarnation:016x} at {info.control} was declared dead")
            link = self.links.get(info.incarnation)
            if link is None:
                link = Link(self, info, self.dial(info))
                self.links[info.incarnation] = link
            links.append(link)
        for link in links:
            await asyncio.shield(link.ready)
        for link in links:  # the first may be lost by the time the last is ready
            if not link.usable:
                raise LostError(f"prefill at {link.control} is {link.phase.value}")
        return links

    def open_room(
        self, room: int, links: Sequence[Link], prompt_tokens: int, digest: bytes, deadline_s: float | None
    ) -> DecodeSession:
        """Take pages and offer them to every rank; synchronous, so there is no half-open room to clean up.

        Raises: CapacityError (no pages, or too many in quarantine); the prefill legs are told at once. LostError when a
        link was lost since `link_all`, AbortedError while shutting down.
        """
        if self._leaving is not None:
            raise room_error(self._leaving)
        if lost := [link.control for link in links if not link.usable]:
            raise LostError(f"prefill at {lost[0]} was just lost")
        number, self._next_grant = self._next_grant, self._next_grant + 1
        owner = ("grant", number)
        try:
            self.ledger.check_quarantine()
            pages = self.pages.take(self.layout.pages_for(prompt_tokens), owner)
        except KvflowError as error:
            self._refuse(Grant(number, room, self.pages.take(0, owner), owner), links, error.cause())
            raise
        deadline = float("inf") if deadline_s is None else self.now() + deadline_s
        grant = Grant(number, room, pages, owner)
        session = DecodeSession(self, links, grant, prompt_tokens, digest, deadline)
        self.rooms[number] = session
        self.counts.rooms_opened += 1
        session.feed(DecodeEvent(DecodeKind.REGISTERED))
        return session

    def _refuse(self, grant: Grant, links: Sequence[Link], cause: Cause) -> None:
        """A loan of no pages: its Abort is repeated until every rank has heard it."""
        for link in links:
            self.ledger.lend(grant, link)
        self.ledger.recall(grant, cause)
        self.ledger.room_ended(grant)

    def lend(self, session: DecodeSession) -> None:
        """Put the room's pages on loan to every rank, and say so."""
        for link in session.links:
            self.ledger.lend(session.grant, link)
        for link in session.links:
            self._send_bootstrap(session, link)

    def forget(self, session: DecodeSession, cause: Cause | None) -> None:
        """The room has ended: out of the one table it is in."""
        del self.rooms[session.grant.number]
        self.counts.ended(session.state.phase.name, cause)
        if cause is None:
            self.counts.bytes_moved += len(session.pages) * self.layout.page_bytes

    def source_lost(self, link: Link, cause: Cause) -> None:
        for session in [s for s in self.rooms.values() if link in s.links]:
            if not session.ended:  # by what a user does when another room ends
                session.feed(DecodeEvent(DecodeKind.SOURCE_LOST, cause=cause))
        self.ledger.feed_link(link, LoanKind.SOURCE_LOST)

    def declare_dead(self, incarnation: int, why: str) -> None:
        """An operator's word that a prefill writes no more: the only end of a loan without proof.

        If it is wrong, what that process still writes lands in pages that belong to others by then. The incarnation is
        never linked again. Raises: MisuseError when it is not known here.
        """
        link = self.links.get(incarnation)
        if link is None:
            raise MisuseError(f"no prefill {incarnation:016x} is linked here")
        self.counts.declared_dead += 1
        self._declared_dead.add(incarnation)
        link.declare_dead(why)

    def settled_below(self) -> int:
        """Every grant below this has ended here, room and loans."""
        return self.ledger.lowest_open_grant(min(self.rooms, default=self._next_grant))

    def leave(self) -> None:
        """No new room from here on, and every room is aborted; `close` waits for what follows."""
        if self._leaving is None:
            self._leaving = Cause(Code.SHUTDOWN, "decode is shutting down")
            self._patient_until_s = self.now() + self.timing.lost_after_s
            for session in list(self.rooms.values()):
                session.close(self._leaving)

    async def close(self) -> None:
        """Wait for the loans a living prefill can still prove, close the links. Call `leave` first."""
        while self._proof_may_come():  # noqa: ASYNC110
            await asyncio.sleep(self.timing.sweep_s)
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, *self._closing, return_exceptions=True)
        for link in list(self.links.values()):
            # Rooms that still wait for proof end here; their loans do not.
            self.source_lost(link, self._leaving or Cause(Code.SHUTDOWN))
            await link.close()
        self.links.clear()

    def _proof_may_come(self) -> bool:
        living = any(link.usable for link in self.links.values())
        return living and len(self.ledger) > 0 and self.now() < self._patient_until_s

    # --- messages

    async def serve_link(self, link: Link, socket: ControlSocket) -> None:
        """Consume one link's messages until cancelled; bad bytes are counted and dropped, the loop goes on (I7)."""
        while True:
            for _, frame in await socket.receive():
                try:
                    message = decode_to_decode(frame)
                except WireError:
                    self.counts.malformed += 1
                    continue
                if message.target != self.incarnation:
                    self.counts.foreign += 1
                    continue
                try:
                    await _HANDLERS[type(message)](self, link, message)
                except Exception:
                    self.counts.handler_errors += 1
                    log.exception("%s failed", type(message).__name__)

    async def on_registered(self, link: Link, message: Registered) -> None:
        """The answer to what was asked of another life of that address is for that life's link."""
        asked = self.links.get(message.asked or link.source)
        if asked is not None and asked.control == link.control:
            asked.on_registered(message)
        else:
            self.counts.stale += 1

    async def on_heartbeat(self, link: Link, message: Heartbeat) -> None:
        if message.source != link.source:
            self.counts.foreign += 1
            return
        link.heard()

    async def on_chunk_done(self, link: Link, message: ChunkDone) -> None:
        session = self._room_of(link, message)
        if session is None:
            return
        link.heard()
        rank = session.links.index(link)
        if message.seq != session.next_seq(rank) or session.in_doubt(rank):
            self.counts.stale += 1  # repeated, or one before it is missing (resync brings that); or a contradiction
            return
        session.chunk_done(rank, message)

    async def on_room_failed(self, link: Link, message: RoomFailed) -> None:
        if session := self._room_of(link, message):
            link.heard()
            session.feed(DecodeEvent(DecodeKind.ROOM_FAILED, cause=message.cause))

    async def on_abort_ack(self, link: Link, message: AbortAck) -> None:
        if message.source != link.source:
            self.counts.foreign += 1
            return
        link.heard()
        kind = LoanKind.DRAINED if message.drained else LoanKind.UNPROVEN
        if not self.ledger.feed(LoanKey(link.source, link.rank, message.grant), kind):
            self.counts.stale += 1

    async def on_resync(self, link: Link, message: Resync) -> None:
        """Grants prefill knows nothing of: their Bootstrap was lost, or they were closed too long ago."""
        if message.source != link.source:
            self.counts.foreign += 1
            return
        link.heard()
        for belief in {belief.grant: belief for belief in message.rooms}.values():  # each is answered once
            session = self.rooms.get(belief.grant)
            if session is None or link not in session.links or session.state.phase is DecodePhase.DRAINING:
                continue
            if belief.next_seq:  # it had written for that grant when we asked, and has forgotten it since
                session.close(Cause(Code.STALE_GRANT, f"room {session.room}: prefill remembers nothing of it"))
            elif session.next_seq(session.links.index(link)) == 0:  # other ranks may be further
                self._send_bootstrap(session, link)

    def _room_of(self, link: Link, message: ChunkDone | RoomFailed) -> DecodeSession | None:
        session = self.rooms.get(message.grant)
        if (
            session is None
            or session.room != message.room
            or message.source != link.source
            or link not in session.links
        ):
            self.counts.stale += 1
            return None
        return session

    def _send_bootstrap(self, session: DecodeSession, link: Link) -> None:
        packed = pack_pages(session.pages)
        link.send(
            Bootstrap(
                session.room,
                session.grant.number,
                link.source,
                self.incarnation,
                packed,
                session.prompt_tokens,
                session.digest,
            )
        )

    # --- time

    async def _sweep(self) -> None:
        await keep_sweeping(self.timing, self.counts, lambda: self._sweep_once(self.now()), self._forgive)

    def _forgive(self, late_s: float) -> None:
        for link in self.links.values():
            link.forgive(late_s)

    def _sweep_once(self, now: float) -> None:
        stale: dict[Link, list[Belief]] = {}
        for session in list(self.rooms.values()):
            if session.state.phase is DecodePhase.DRAINING:
                continue  # its loans are recalled and asked for by the ledger
            if now >= session.deadline_at_s:
                text = f"room {session.room}: deadline of {session.deadline_at_s - session.opened_at_s:g} s has passed"
                session.close(Cause(Code.DEADLINE, text))
            elif now - session.progress_at_s >= self.timing.repeat_after_s:
                session.progress_at_s = now
                for i, link in enumerate(session.links):
                    stale.setdefault(link, []).append(Belief(session.room, session.grant.number, session.next_seq(i)))
        for link in list(self.links.values()):
            link.sweep(now)
            if link in stale and link.usable:
                link.ask_again(stale[link])
            if not link.usable and not self.ledger.owes(link) and not any(link in s.links for s in self.rooms.values()):
                self._drop(link)
        self.ledger.repeat(now - self.timing.repeat_after_s)

    def _drop(self, link: Link) -> None:
        """A link that cannot be used and owes nothing: the next room opens a new one."""
        if self.links.get(link.source) is link:
            del self.links[link.source]
        self.finish(link.close())

    def dial(self, info: RankInfo) -> ControlSocket:
        return self._connect(info.control, self.incarnation)

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the rest of something that is over; `close` waits for it."""
        task = spawn(work, "kvflow-decode-finish", self.counts)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


_HANDLERS: dict[type, Callable[[DecodeHandlers, Link, Any], Awaitable[None]]] = {
    Registered: DecodeHandlers.on_registered,
    ChunkDone: DecodeHandlers.on_chunk_done,
    RoomFailed: DecodeHandlers.on_room_failed,
    AbortAck: DecodeHandlers.on_abort_ack,
    Resync: DecodeHandlers.on_resync,
    Heartbeat: DecodeHandlers.on_heartbeat,
}
