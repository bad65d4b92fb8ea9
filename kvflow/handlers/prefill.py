"""What prefill does about messages: rooms by id, targets by decode incarnation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from kvflow.handlers.prefill_room import PrefillSession
from kvflow.handlers.sweep import keep_sweeping
from kvflow.handlers.target import Target
from kvflow.handlers.tasks import fenced, spawn
from kvflow.protocols.errors import (
    CapacityError,
    Cause,
    Code,
    KvflowError,
    LayoutError,
    MisuseError,
    WireError,
    room_error,
)
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.prefill_room import PrefillEvent, PrefillKind, PrefillPhase
from kvflow.protocols.machines.rendezvous import EndedHalves, Half
from kvflow.protocols.pages.layout import PageIndices, PoolLayout, differences, unpack_pages
from kvflow.protocols.ports import Checksums, ControlSocket, DataPlane, Endpoint, PageStore
from kvflow.protocols.wire.codec import decode_to_prefill, encode, routing_id
from kvflow.protocols.wire.messages import (
    MAX_TEXT,
    WIRE_VERSION,
    Abort,
    AbortAck,
    Belief,
    Bootstrap,
    Heartbeat,
    Register,
    Registered,
    Resync,
    RoomFailed,
    ToPrefill,
)
from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)


class PrefillHandlers:
    """The rooms and targets of one prefill incarnation. Lives on the event loop."""

    def __init__(
        self,
        *,
        incarnation: int,
        rank: int,
        pages: PageStore,
        plane: DataPlane,
        layout: PoolLayout,
        endpoint: Endpoint,
        socket: ControlSocket,
        now: Callable[[], float],
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        """With `checksums` every chunk tells decode the checksum of its source pages."""
        self.incarnation, self.rank, self.pages, self.plane = incarnation, rank, pages, plane
        self.checksums = checksums
        self.layout, self.endpoint, self.socket, self.now = layout, endpoint, socket, now
        self.page_bytes = layout.page_bytes
        self.timing, self.bounds = timing or Timing(), bounds or Bounds()
        self.counts = Counts()
        self.rooms: dict[int, PrefillSession] = {}
        self.targets: dict[int, Target] = {}
        self.ended_halves = EndedHalves(self.bounds.ended_halves)
        self._leaving: Cause | None = None  # no new room: one that came now would have to be waited for
        self._room_ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._serve(), "kvflow-prefill-serve")
        self._spawn(self._sweep(), "kvflow-prefill-sweep")

    @property
    def trouble(self) -> str:
        """Why this prefill cannot move pages now; empty when all is well. Having much to do is no trouble."""
        stalled_s = self.plane.stalled_s
        if stalled_s <= self.timing.lost_after_s:
            return ""
        how = "has died" if stalled_s == float("inf") else f"has not moved for {stalled_s:.0f} s"
        return f"the worker of the {self.plane.name} data plane {how}"

    # --- rooms

    def open_room(self, room: int, prompt_tokens: int, digest: bytes, deadline_s: float | None) -> PrefillSession:
        """The engine's half of a room. Raises: MisuseError when the id is in use, AbortedError while shutting down."""
        if self._leaving is not None:
            raise room_error(self._leaving)
        session = self.rooms.get(room)
        if session is not None and session.prompt is not None:
            raise MisuseError(f"room {room} is in use")
        if session is None:
            session = self._new_room(room, PrefillPhase.EXPECTED)
        session.prompt = (prompt_tokens, digest)
        if deadline_s is not None:
            session.own_deadline_at_s = self.now() + deadline_s
            session.deadline_at_s = min(session.deadline_at_s, session.own_deadline_at_s)
        if session.bootstrap is not None:
            session.meet()
        elif cause := self.ended_halves.take(room, Half.ENGINE):
            session.feed(PrefillEvent(PrefillKind.ENDED_LOCALLY, cause=cause))
        return session

    def refuse_room(self, room: int, cause: Cause) -> None:
        """The engine's half of a room will never come: decode's is told why, now or when it comes."""
        half = self.rooms.get(room)
        if half is None:
            self.ended_halves.never_comes(room, Half.ENGINE, cause, self.now() + self.timing.rendezvous_s)
        elif half.prompt is None:
            half.close(cause)

    def forget(self, session: PrefillSession) -> None:
        """The room has ended: out of the tables it is in, its last words kept for whoever missed them."""
        del self.rooms[session.room]
        cause = session.state.cause
        if session.target is not None:
            session.target.close_grant(session.grant, tuple(session.said))
        if cause is not None and (session.prompt is None or session.target is None):
            half = Half.DECODE if session.prompt is None else Half.ENGINE
            self.ended_halves.remember(session.room, half, cause, self.now() + self.timing.rendezvous_s)
        self.counts.ended(session.state.phase.name, cause)
        self._room_ended.set()

    def leave(self) -> None:
        """No new room from here on, and every room is ended; `drain` waits for its writes."""
        if self._leaving is None:
            self._leaving = Cause(Code.SHUTDOWN, "prefill is shutting down")
            for session in list(self.rooms.values()):
                session.close(self._leaving)

    async def drain(self, patience_s: float) -> None:
        """Wait until the writes of every room have ended, or patience has."""
        self.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._no_rooms(lambda _: True)

    async def close(self) -> None:
        """Stop the tasks; the data plane must be closed, so that no write runs. The socket stays the caller's."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for target in self.targets.values():
            if target.route is not None:
                target.route.close()
        self.targets.clear()

    async def _no_rooms(self, chosen: Callable[[PrefillSession], bool]) -> None:
        while any(chosen(session) for session in self.rooms.values()):
            self._room_ended.clear()
            await self._room_ended.wait()

    def _new_room(self, room: int, phase: PrefillPhase) -> PrefillSession:
        session = PrefillSession(self, room, phase)
        self.rooms[room] = session
        self.counts.rooms_opened += 1
        return session

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = spawn(work, name, self.counts)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- messages

    async def _serve(self) -> None:
        """Consume messages until cancelled; bad bytes are counted and dropped, the loop goes on (I7)."""
        while True:
            for peer, frame in await self.socket.receive():
                try:
                    message = decode_to_prefill(frame)
                except WireError:
                    self.counts.malformed += 1
                    continue
                if peer != routing_id(message.target):
                    self.counts.foreign += 1
                    continue
                try:
                    await self._handle(message)
                except Exception:
                    self.counts.handler_errors += 1
                    log.exception("%s failed", type(message).__name__)

    async def _handle(self, message: ToPrefill) -> None:
        if message.source != self.incarnation:
            self.counts.stale += 1
            self._answer(message, "another incarnation serves here now")
        elif type(message) is Register:
            await self.on_register(message)
        elif (target := self.targets.get(message.target)) is None or target.route is None:
            self.counts.stale += 1
        else:
            target.heard_at_s, target.silent = self.now(), False
            await _HANDLERS[type(message)](self, target, message)

    def _answer(self, message: ToPrefill, refusal: str) -> None:
        who = (self.incarnation, message.target, WIRE_VERSION, self.rank)
        registered = Registered(*who, refusal[:MAX_TEXT], self.endpoint, message.source)
        self.socket.send(encode(registered), routing_id(message.target))

    async def on_register(self, message: Register) -> None:
        """A decode says who it is; the way into its pool is opened in the background."""
        if message.wire_version != WIRE_VERSION:
            return self._answer(message, f"wire version {message.wire_version}, this prefill speaks {WIRE_VERSION}")
        if self.trouble:
            return self._answer(message, self.trouble)
        target = self.targets.get(message.target)
        if target is None:
            if len(self.targets) >= self.bounds.targets and not self._drop_silent_target():
                return self._answer(message, f"{self.bounds.targets} decodes are registered already")
            target = self.targets[message.target] = Target(self, message)
            self._spawn(self._open_target(target, message), f"kvflow-target-{message.target:x}")
        elif target.route is not None:
            target.heard_at_s, target.silent = self.now(), False
            self._answer(message, "")
        else:  # it is being opened, and that can take a while
            target.send(Heartbeat(self.incarnation, target.incarnation))
        return None

    def _drop_silent_target(self) -> bool:
        """Make room by forgetting a decode that has gone silent and has nothing left to hear (its death may never be
        observed when it is on another host). False when there is none."""
        for incarnation, target in self.targets.items():
            if target.silent and target.route is not None and not target.grants and target.all_drained:
                del self.targets[incarnation]
                target.route.close()
                if target.watch is not None:
                    target.watch.cancel()
                return True
        return False

    async def _open_target(self, target: Target, message: Register) -> None:
        """Check the pools against each other, open the route, then have the process watched. Of a decode that is
        refused nothing is kept: strangers may come with a new name each time."""
        refusal = ""
        try:
            if message.endpoint.backend != self.plane.name:
                planes = f"prefill {self.plane.name}, decode {message.endpoint.backend}"
                raise MisuseError(f"data planes differ: {planes}")
            message.layout.check()
            if found := differences(self.layout, message.layout):
                raise LayoutError("; ".join(found))
            target.route = await self.plane.connect(message.endpoint, message.layout)
        except KvflowError as error:
            refusal = str(error) or type(error).__name__
        except Exception as error:  # the decode must hear something
            self.counts.handler_errors += 1
            log.exception("cannot open the way to decode %x", target.incarnation)
            refusal = f"internal error: {type(error).__name__}"
        if refusal:
            del self.targets[target.incarnation]
        else:
            target.watch = self._spawn(self._watch(target, message.endpoint), f"kvflow-watch-{target.incarnation:x}")
        self._answer(message, refusal)

    async def _watch(self, target: Target, endpoint: Endpoint) -> None:
        """End a target whose process has died."""
        if not await fenced(self.plane, endpoint, self.timing, self.counts):
            return  # its death cannot be observed from here: silence ends its rooms
        self._lose(target, f"decode {target.incarnation:x} died")
        await self._no_rooms(lambda session: session.target is target)  # a route is closed when nothing flies on it
        if self.targets.get(target.incarnation) is target and target.route is not None:
            del self.targets[target.incarnation]
            target.route.close()

    async def on_bootstrap(self, target: Target, message: Bootstrap) -> None:
        """Decode's half of a room. A repeated one changes nothing; one that cannot be served is refused at once."""
        if message.grant in target.grants:
            return
        if message.grant in target.closed:
            return target.say_again(target.closed[message.grant], 0)
        if self._leaving is not None:
            return self._refuse(target, message, self._leaving)
        try:
            pages = self._check_bootstrap(target, message)
        except KvflowError as error:
            return self._refuse(target, message, error.cause())
        session = self.rooms.get(message.room)
        if session is not None and session.bootstrap is not None:
            in_use = Cause(Code.ROOM_IN_USE, f"room {message.room} has a decode already")
            return self._refuse(target, message, in_use)
        if session is None and (cause := self.ended_halves.take(message.room, Half.DECODE)):
            return self._refuse(target, message, cause)
        if session is None and len(self.rooms) >= self.bounds.rooms:
            full = CapacityError("rooms at prefill", len(self.rooms) + 1, self.bounds.rooms)
            return self._refuse(target, message, full.cause())
        if session is None:
            session = self._new_room(message.room, PrefillPhase.BOOTSTRAPPED)
        session.bind(target, message, pages)
        target.grants[message.grant] = session
        if session.prompt is not None:
            session.meet()
        return None

    def _check_bootstrap(self, target: Target, message: Bootstrap) -> PageIndices:
        """The pages it lends. Raises: KvflowError."""
        if message.grant < target.low_water:
            error = MisuseError(f"grant {message.grant} is below {target.low_water}: it has ended")
            error.code = Code.STALE_GRANT
            raise error
        pages = unpack_pages(message.pages, target.num_pages)
        wanted = self.layout.pages_for(message.prompt_tokens) - message.prefix_tokens // self.layout.page_size
        if len(pages) != wanted or wanted < 1:
            raise MisuseError(f"{len(pages)} pages lent, {message.prompt_tokens} tokens need {wanted}")
        return pages

    def _refuse(self, target: Target, message: Bootstrap, cause: Cause) -> None:
        who = (message.room, message.grant, self.incarnation, target.incarnation, self.rank)
        said = (RoomFailed(*who, cause), AbortAck(*who, target.drained(message.grant)))
        target.close_grant(message.grant, said)
        for word in said:
            target.send(word)

    async def on_abort(self, target: Target, message: Abort) -> None:
        """Stop writing for this grant. Answered when nothing of it runs; at once when nothing ever did."""
        session = target.grants.get(message.grant)
        if session is not None:
            session.feed(PrefillEvent(PrefillKind.ABORT_RECEIVED, cause=message.cause))
            return
        if message.grant not in target.closed and message.grant >= target.low_water:
            self._end_other_half(message)
            target.close_grant(message.grant, ())
        who = (message.room, message.grant, self.incarnation, target.incarnation, self.rank)
        target.send(AbortAck(*who, target.drained(message.grant)))

    def _end_other_half(self, message: Abort) -> None:
        """Decode could not even offer pages, or its offer was lost: the engine's half is told, now or when it comes."""
        half = self.rooms.get(message.room)
        if half is None:
            until = self.now() + self.timing.rendezvous_s
            self.ended_halves.never_comes(message.room, Half.DECODE, message.cause, until)
        elif half.bootstrap is None:
            half.feed(PrefillEvent(PrefillKind.ENDED_LOCALLY, cause=message.cause))
            self.ended_halves.take(message.room, Half.DECODE)  # decode knows

    async def on_resync(self, target: Target, message: Resync) -> None:
        """Say again what decode has missed, and name the grants this incarnation has never heard of."""
        unknown: list[Belief] = []
        for belief in {belief.grant: belief for belief in message.rooms}.values():  # each is answered once
            session = target.grants.get(belief.grant)
            if session is not None:
                target.say_again(session.said, belief.next_seq)
            elif belief.grant in target.closed:
                target.say_again(target.closed[belief.grant], belief.next_seq)
            else:
                unknown.append(belief)
        if unknown:
            target.send(Resync(self.incarnation, target.incarnation, tuple(unknown)))

    async def on_heartbeat(self, target: Target, message: Heartbeat) -> None:
        target.settle(message.settled_below)
        if not self.trouble:  # else decode shall take us for silent: its rooms end, their loans do not
            target.send(Heartbeat(self.incarnation, target.incarnation))

    def _lose(self, target: Target, text: str) -> None:
        target.silent = True
        for session in list(target.grants.values()):
            if session.grant in target.grants:  # not ended by what a user does when another room ends
                session.feed(PrefillEvent(PrefillKind.TARGET_LOST, cause=Cause(Code.PEER_LOST, text)))

    # --- time

    async def _sweep(self) -> None:
        await keep_sweeping(self.timing, self.counts, lambda: self._sweep_once(self.now()), self._forgive)

    def _forgive(self, late_s: float) -> None:
        for target in self.targets.values():
            target.heard_at_s += late_s

    def _sweep_once(self, now: float) -> None:
        for session in list(self.rooms.values()):
            if now >= session.deadline_at_s and not session.ended:
                half = session.prompt is None or session.bootstrap is None
                code = Code.RENDEZVOUS if half and now < session.own_deadline_at_s else Code.DEADLINE
                text = f"room {session.room}: nothing more came for {now - session.opened_at_s:.1f} s"
                session.close(Cause(code, text))
        for target in self.targets.values():
            if not target.silent and now - target.heard_at_s > self.timing.lost_after_s:
                self._lose(target, f"decode {target.incarnation:x} was silent for {self.timing.lost_after_s:g} s")
        self.ended_halves.expire(now)


_HANDLERS: dict[type, Callable[[PrefillHandlers, Target, Any], Awaitable[None]]] = {
    Bootstrap: PrefillHandlers.on_bootstrap,
    Abort: PrefillHandlers.on_abort,
    Resync: PrefillHandlers.on_resync,
    Heartbeat: PrefillHandlers.on_heartbeat,
}
