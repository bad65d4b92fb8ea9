"""Decode's shell: reads messages from its sockets, feeds the endpoint, and runs its commands."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from kvflow.handlers.connections import Connect, Connections
from kvflow.handlers.earlier import EarlierShell, check_unseen, log_declared
from kvflow.handlers.room_log import about, follow
from kvflow.handlers.room_log import log as room_log
from kvflow.handlers.rooms import DecodeRoom, RoomStores
from kvflow.handlers.shell import Shell
from kvflow.handlers.verify import Begin, ChunkVerifier, chunk_places, summed_at_once
from kvflow.protocols import commands as c
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.records import Prompt
from kvflow.protocols.errors import (
    CapacityError,
    Cause,
    Code,
    KvflowError,
    MisuseError,
    room_error,
)
from kvflow.protocols.machines.ownership import PageKind
from kvflow.protocols.pages import spaces
from kvflow.protocols.pages.spaces import counts_fit, counts_less
from kvflow.protocols.ports import (
    Arrivals,
    Checksums,
    DataPlane,
    PageStore,
    Quarantine,
    UnprovenLoan,
)
from kvflow.protocols.waiting import Waiting
from kvflow.protocols.wire.messages import GrantId, Incarnation
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)
# At most this many waiting rooms receive pages in one turn of the event loop.
LEND_WORK = 32


class DecodeShell(Shell):
    """The asyncio side of one decode endpoint."""

    def __init__(
        self,
        endpoint: DecodeEndpoint,
        *,
        pages: PageStore,
        plane: DataPlane,
        connect: Connect,
        counts: Counts,
        now: Callable[[], float],
        stores: Sequence[tuple[Quarantine, PageStore]],
        checksums: Checksums | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        """With `arrivals`, prefill writes into staging pages, and no peer can reach `pages`.

        `stores` pairs `pages` with its pool's quarantine. With staging, a second pair has the
        staging store and the quarantine of its pool.
        """
        super().__init__(endpoint, endpoint.core.timing, counts, now)
        self.endpoint, self.plane = endpoint, plane
        self.checksums, self.arrivals = checksums, arrivals
        # The store of the pages that peers write into.
        self.lent = pages if arrivals is None else arrivals.lent
        self._lent_quarantine = stores[-1][0]
        self.stores = RoomStores(
            pages,
            endpoint.core.identity.layout if arrivals is None else arrivals.layout,
            stores[0][0],
            None if arrivals is None else arrivals.lent,
            self.failed,
        )
        self.waiting: Waiting[GrantId] = Waiting()
        self._lends_later = False
        # The last value of `staging_can_come_back` that `run` saw.
        self._could_come_back: spaces.Counts = ()
        # Rooms for which `resolve` still runs, each with its task.
        self.opening: dict[DecodeRoom, asyncio.Task[None]] = {}
        # Open rooms, and ended rooms whose pages are not yet free.
        self.rooms: dict[GrantId, DecodeRoom] = {}
        self._verifiers: dict[GrantId, ChunkVerifier] = {}
        self.connections = Connections(self, endpoint, plane, connect)
        self.runners = {
            c.SendToPrefill: self._send,
            c.Dial: self.connections.dial,
            c.HangUp: self.connections.hang_up,
            c.WatchWriter: self.connections.watch_writer,
            c.StopWatch: self.connections.stop_watch,
            c.Linked: self._linked,
            c.VerifyChunk: self._verify,
            c.StopVerifying: self._stop_verifying,
            c.RoomBegun: self._begun,
            c.RoomLanded: self._landed,
            c.RoomFailed: self._failed,
            c.RoomEnded: self._ended_room,
            c.QuarantinePages: self._quarantine,
            c.FreePages: self._free,
        }
        self.earlier = EarlierShell(self, endpoint.earlier, plane, stores)

    # --- rooms

    def open(
        self,
        room: DecodeRoom,
        ranks: Sequence[RankInfo],
        prompt: Prompt,
        deadline_at_s: float,
        *,
        announce: bool = False,
    ) -> None:
        """Open a room at `ranks`. A refusal ends the room, and is raised only if it is a
        MisuseError other than CapacityError.
        """
        endpoint, now = self.endpoint, self.now()
        try:
            room.grant = endpoint.open_room(
                room.room, ranks, prompt, now=now, deadline_at_s=deadline_at_s, announce=announce
            )
        except KvflowError as error:
            self._refused(room, error)
            if isinstance(error, MisuseError) and not isinstance(error, CapacityError):
                raise
        else:
            room.record = endpoint.rooms[room.grant]
            room.holding.opened(room.grant)
            if room_log.isEnabledFor(logging.DEBUG):
                follow(room)
            self.rooms[room.grant] = room
        self.run()

    def resolve_and_open(
        self,
        room: DecodeRoom,
        resolve: Callable[[], Awaitable[Sequence[RankInfo]]],
        prompt: Prompt,
        deadline_at_s: float,
    ) -> None:
        """Open a room at the ranks that `resolve` returns. Any error ends the room."""
        work = self._resolve_and_open(room, resolve, prompt, deadline_at_s)
        ended = functools.partial(self._opening_ended, room)
        self.opening[room] = self.spawn(
            work, f"kvflow-room-{room.room}", of_caller=True, ended=ended
        )

    async def _resolve_and_open(
        self,
        room: DecodeRoom,
        resolve: Callable[[], Awaitable[Sequence[RankInfo]]],
        prompt: Prompt,
        deadline_at_s: float,
    ) -> None:
        left_s = deadline_at_s - self.now()
        patience = asyncio.timeout(None if left_s == float("inf") else left_s)
        try:
            async with patience:
                ranks = await resolve()
        except TimeoutError:
            if not patience.expired():
                raise
            text = (
                f"room {room.room}: its deadline passed while the ranks of its prefill were asked "
                "for"
            )
            raise room_error(Cause(Code.DEADLINE, text)) from None
        # If the room was closed while `resolve` ran, prefill must still receive the cause.
        if room.refused is not None:
            self.refuse(room.room, ranks, room.refused)
        else:
            self.open(room, ranks, prompt, deadline_at_s, announce=True)

    def _opening_ended(self, room: DecodeRoom, error: BaseException | None) -> None:
        """Refuse the room if `_resolve_and_open` ended without opening it."""
        self.opening.pop(room, None)
        if room.record is None and room.refused is None:
            error = error or RuntimeError("it ended without a word")
            self._refused(
                room,
                self.explained(error, f"room {room.room}: asking for the ranks of its prefill"),
            )

    def _refused(self, room: DecodeRoom, error: KvflowError) -> None:
        """End a room that never reached the endpoint. Such a room lent no pages."""
        if room.refused is None:
            room.refused = error.cause()
            self.counts.room_refused(room.refused)
            room_log.debug("refused, %s", room.refused, extra=about(room))
        self._fail(room, error)
        room.holding.feed(PageKind.FREE)
        if room.callbacks:
            self.call_back_later(room.callbacks)

    def _fail(self, room: DecodeRoom, error: KvflowError | Cause) -> None:
        if room.held_back:
            room.when_begun.give(None, error)
        room.when_opened.give(None, error)
        room.when_landed.give(None, error)

    def refuse(self, room: int, ranks: Sequence[RankInfo], cause: Cause) -> None:
        """Notify prefill ranks that decode refuses a room. Errors other than MisuseError are
        only logged.
        """
        try:
            self.endpoint.refuse_room(room, ranks, cause, self.now())
        except MisuseError:
            raise
        except KvflowError as error:
            log.info("cannot tell prefill that room %d is refused: %s", room, error)
        self.run()

    def close_room(self, room: DecodeRoom, cause: Cause) -> None:
        if room.holding.over:
            return
        if room.record is not None:
            self.endpoint.close_room(room.grant, cause, self.now())
        elif room.refused is None:
            self._refused(room, room_error(cause))
        self.run()

    def run(self, then: Callable[[], object] | None = None) -> None:
        super().run(then)
        if not self.waiting or self._running:
            return
        # A new quarantine may block the oldest room. The pages saved for it then go to others.
        if (can_come_back := self.staging_can_come_back) != self._could_come_back:
            self._could_come_back = can_come_back
            self.lend_returned()

    # --- links

    def declare_dead(self, incarnation: int, why: str) -> None:
        """Declare a prefill dead. See `DecodeEndpoint.declare_dead`.

        Raises: the errors of that method, and MisuseError if the process runs on this host.
        """
        for peer in self.endpoint.peers:
            if peer.key.incarnation == incarnation and peer.address is not None:
                check_unseen(self.plane, incarnation, peer.address)
        self.earlier.check_unseen(incarnation)
        log_declared(
            incarnation, why, self.endpoint.declare_dead(Incarnation(incarnation), why, self.now())
        )
        self.run()

    def tick(self, now: float) -> None:
        self.connections.poll(now)
        super().tick(now)

    # --- shutdown

    def leave(self) -> None:
        """Refuse new rooms, and abort every open one. `close` waits for the proofs."""
        self.leaving = True
        self.endpoint.leave(self.now())
        for room, task in list(self.opening.items()):
            task.cancel()
            if room.refused is None:
                self._refused(room, room_error(Cause(Code.SHUTDOWN, "decode is shutting down")))
        self.run()

    async def close(self) -> list[UnprovenLoan]:
        """Wait for prefill ranks to prove the end of their loans, send Goodbye, and hang up.

        Call `leave` first. The wait for proofs takes at most `lost_after_s`. Returns the loans
        without proof. Their pages must not be used until the writers of these loans are known to
        have ended.
        """
        core = self.endpoint.core
        await self.wait_while(
            lambda: core.proof_may_come or bool(core.tasks), self.timing.lost_after_s
        )
        self.endpoint.part(self.now())
        self.run()
        await self.wait_while(
            lambda: self.endpoint.parting(self.now()), 2 * self.timing.heartbeat_s
        )
        self.endpoint.close(self.now())
        self.run()
        await self.stop()
        self.earlier.leave()
        left = [loan for room in self.rooms.values() for loan in self._unproven(room)]
        # The stores must withhold these pages before the rooms return them.
        self._lent_quarantine.add(left, self.lent)
        for room in self.rooms.values():
            self.guard(
                functools.partial(room.holding.feed, PageKind.ABANDON), f"letting go of {room!r}"
            )
        self.rooms.clear()
        self.waiting.clear()
        return left

    def _unproven(self, room: DecodeRoom) -> Iterator[UnprovenLoan]:
        assert room.record is not None
        lender = self.endpoint.core.identity.incarnation
        for peer in room.record.lease.loans:
            yield UnprovenLoan(
                writer=peer.address,
                incarnation=peer.key.incarnation,
                control=peer.key.control,
                rank=peer.info.rank,
                room=room.room,
                lease=(lender, room.grant),
                pages=room.holding.lent,
            )

    # --- commands

    def _send(self, command: c.SendToPrefill) -> None:
        link = self.connections.open.get(command.peer)
        if link is None or not link.socket.send(command.frame, at_once=command.at_once):
            # A lost frame is not an error: decode sends `Resync` for a room without progress.
            self.counts.undelivered += 1

    def _linked(self, command: c.Linked) -> None:
        room = self.rooms[command.grant]
        if not room.held_back:
            self._lend(room)

    def offer(self, room: DecodeRoom) -> None:
        """Lend the room's pages. If a rank is not registered yet, `_linked` lends them later."""
        if room.record is not None and room.record.linked:
            self._lend(room)
            self.run()

    def _lend(self, room: DecodeRoom) -> None:
        """Lend the room's pages, or queue the room if too few staging pages are free."""
        record, holding = room.record, room.holding
        if record is None or room.ended or record.lent:
            return
        try:
            if room.prefix_tokens is not None:
                room.counts = self.endpoint.shorten(room.grant, room.prefix_tokens)
            wanted = record.counts
            if self.arrivals is not None and not self._stage(room, wanted):
                return
            holding.take(wanted)
            if self.endpoint.lend(room.grant, holding.lent, self.now()):
                holding.feed(PageKind.LEND)
        except BaseException as problem:  # noqa: BLE001 - `explained` raises what must pass
            error = self.explained(problem, f"room {room.room}: taking its pages")
            self._fail(room, error)
            self.endpoint.close_room(room.grant, error.cause(), self.now())
        else:
            room.when_opened.give(None)

    def _stage(self, room: DecodeRoom, wanted: spaces.Counts) -> bool:
        """Take staging pages for the room. Returns False if the room must wait for them.

        Raises: CapacityError if the room needs more pages than the whole staging pool has.
        """
        layout = self.endpoint.core.identity.layout
        if not counts_fit(wanted, layout.counts):
            space, count = next(
                (space, count)
                for space, count in zip(layout.spaces, wanted, strict=True)
                if count > space.count
            )
            what = f"tokens of room {room.room} in staging, in whole pages (a larger one has more)"
            never = CapacityError(what, count * space.page_size, space.count * space.page_size)
            # The prompt will never fit, so the client must not retry.
            never.code = Code.BAD_REQUEST
            raise never
        if self.waiting:
            self.waiting.add(room.grant, wanted, self.now())
            if self._next_waiting() != room.grant:
                return False
        try:
            room.holding.take_staging(wanted)
        except CapacityError:
            self.waiting.add(room.grant, wanted, self.now())
            return False
        self.waiting.discard(room.grant)
        return True

    @property
    def staging_can_come_back(self) -> spaces.Counts:
        """Staging places of each space that are outside quarantine."""
        core = self.endpoint.core
        kept = counts_less(core.ledger.quarantined, self.earlier.beside)
        return counts_less(core.identity.layout.counts, kept)

    def _next_waiting(self) -> GrantId | None:
        return self.waiting.next(self.lent.free, self.staging_can_come_back, self.now())

    def _lend_waiting(self) -> None:
        """Lend to at most `LEND_WORK` waiting rooms, and to the others in the next turn."""
        for _ in range(LEND_WORK):
            if not self.waiting or (grant := self._next_waiting()) is None:
                break
            self._lend(self.rooms[grant])
            # A store may refuse although enough of its places are free. The room then waits until
            # some are returned.
            if grant in self.waiting:
                break
        else:
            if not self._lends_later:
                self._lends_later = True
                self._loop.call_soon(self._lend_later, context=self._context)
        self.run()

    def _lend_later(self) -> None:
        self._lends_later = False
        self.lend_returned()

    def lend_returned(self) -> None:
        """Lend staging pages to waiting rooms. The node also calls this when another node that
        shares the staging pool returns pages.
        """
        if self.waiting and not self.stopped:
            self.guard(self._lend_waiting, "lending pages of staging")

    def _verify(self, command: c.VerifyChunk) -> None:
        if self.arrivals is None and (checksum := self._sum_at_once(command)):
            # The commands that follow from this run in the same turn.
            self.endpoint.chunk_summed(
                command.grant, command.rank, command.seq, checksum, self.now()
            )
            return
        if (verifier := self._verifiers.get(command.grant)) is None:
            begin = _check(self.checksums, self.arrivals)
            holding = self.rooms[command.grant].holding
            lent = self.endpoint.core.identity.layout
            verifier = ChunkVerifier(holding, lent, begin, self._lend_waiting)
            self._verifiers[command.grant] = verifier
        ended = functools.partial(self._summed, command)
        verifier.begin(command.spans, command.served, command.fine, ended)

    def _sum_at_once(self, command: c.VerifyChunk) -> bytes:
        """Return the checksum of a small chunk. Its pages need no hold, because they cannot be
        freed before this returns.
        """
        assert self.checksums is not None
        holding, fine = self.rooms[command.grant].holding, command.fine
        pages = chunk_places(holding.layout, holding.pages, command.spans, fine)
        of = (command.served,) if fine is None else (command.served, fine.page_sizes)
        return summed_at_once(self.checksums, pages, *of)

    def _summed(self, command: c.VerifyChunk, checksum: bytes, error: str) -> None:
        self.endpoint.chunk_summed(
            command.grant, command.rank, command.seq, checksum, self.now(), error=error
        )
        self.run()

    def _stop_verifying(self, command: c.StopVerifying) -> None:
        if (verifier := self._verifiers.get(command.grant)) is not None:
            verifier.cancel()

    def _begun(self, command: c.RoomBegun) -> None:
        self.rooms[command.grant].when_begun.give(True)

    def _landed(self, command: c.RoomLanded) -> None:
        room = self.rooms[command.grant]
        room.holding.feed(PageKind.LAND)
        room.when_landed.give(command.handoff)

    def _failed(self, command: c.RoomFailed) -> None:
        self._fail(self.rooms[command.grant], command.cause)

    def _ended_room(self, command: c.RoomEnded) -> None:
        room = self.rooms[command.grant]
        self._verifiers.pop(command.grant, None)
        if self.arrivals is not None:
            # The room may have held a place in the queue, or returned staging pages.
            self.waiting.discard(room.grant)
            self._lend_waiting()
        room.holding.over = True
        if not room.holding.state.claimed:
            del self.rooms[room.grant]
        if room.callbacks:
            self.call_back_later(room.callbacks)

    def _quarantine(self, command: c.QuarantinePages) -> None:
        self.rooms[command.grant].holding.feed(PageKind.QUARANTINE)

    def _free(self, command: c.FreePages) -> None:
        room = self.rooms.get(command.grant)
        if room is None:
            self.earlier.free(command)
        else:
            room.holding.feed(PageKind.FREE)
            # If the room is not over yet, `RoomEnded` follows, and drops it.
            if room.holding.over:
                del self.rooms[command.grant]
        if self.waiting:
            self._lend_waiting()


def _check(checksums: Checksums | None, arrivals: Arrivals | None) -> Begin:
    """Return the function that starts work on a landed chunk: a copy from staging pages or, without
    staging, a checksum.
    """
    if arrivals is not None:
        return arrivals.begin
    assert checksums is not None
    return lambda lent, *chunk: checksums.begin(*chunk)
