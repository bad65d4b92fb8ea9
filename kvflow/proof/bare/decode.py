"""One decode: a shipped `DecodeEndpoint`, its pages, its connections and the rooms of its users."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from kvflow.proof.bare.holds import Room
from kvflow.proof.bare.job import DecodeJob
from kvflow.proof.bare.node import CLOSE_LOOK_S, Node, Scene, address_of
from kvflow.proof.bare.pages import DecodePages
from kvflow.proof.bare.turns import Turns
from kvflow.proof.bare.wire import Burst, parsed
from kvflow.proof.rules.transfers import Arrival
from kvflow.proof.sim.times import THREAD_S
from kvflow.protocols import commands as c
from kvflow.protocols.commands import PeerKey
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeIdentity
from kvflow.protocols.decode.records import Prompt
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.machines.ownership import SETTLED, PageCommand, PageKind, Source, step
from kvflow.protocols.ports import LeaseId, UnprovenLoan
from kvflow.protocols.wire.messages import Incarnation
from kvflow.telemetry.counters import Counts


class Decode(Node):
    """One life of a decode: its shipped endpoint, and a handler for each of its commands."""

    endpoint: DecodeEndpoint

    def __init__(self, world: Scene, number: int, incarnation: Incarnation) -> None:
        name = f"decode {number}"
        layout, page_sizes = world.variety.decode_layout, world.variety.page_sizes
        identity = DecodeIdentity(incarnation, layout, address_of(incarnation))
        self.endpoint = DecodeEndpoint(
            identity,
            observer=Counts(),
            timing=world.timing,
            bounds=world.bounds,
            verify=world.variety.verify,
        )
        super().__init__(world, name, number, self.endpoint)
        self.pages = DecodePages(name, world.rules, layout, page_sizes)
        # Rooms by grant. A room is removed once it ends and no longer claims pages.
        self.rooms: dict[int, Room] = {}
        self.watches: set[PeerKey | int] = set()
        self.turns: Turns[Room] = Turns()
        # Unproven loans, for the next decode over this pool. None until this decode leaves.
        self.left_behind: list[UnprovenLoan] | None = None
        # Loans of earlier decodes over this pool, by the grant that this endpoint gave them.
        self.inherited: dict[int, list[UnprovenLoan]] = {}

    def inherit(self, earlier: Decode) -> None:
        """Take over the pool of a decode that left.

        Pages without an unproven loan become free, even if users kept them: those users are gone.
        """
        assert earlier.left_behind is not None
        self.pages = earlier.pages
        by_lease: dict[LeaseId, list[UnprovenLoan]] = {}
        for loan in earlier.left_behind:
            by_lease.setdefault(loan.lease, []).append(loan)
        granted = self.endpoint.earlier.inherit(earlier.left_behind)
        self.inherited = {grant: by_lease[lease] for grant, lease in granted.items()}
        self.pages.inherit(set(granted.values()))
        loans = f"{len(earlier.left_behind)} loans without proof"
        self.say(f"has the pool of {earlier.incarnation:x}, with {loans}")
        self.run()

    def inherited_loans(self) -> list[UnprovenLoan]:
        find = self.endpoint.earlier.find
        every = [loan for loans in self.inherited.values() for loan in loans]
        return [loan for loan in every if find(loan.incarnation, loan.writer)]

    # --- requests

    def begin(self, job: DecodeJob) -> None:
        now, endpoint, ranks = self.clock.now, self.endpoint, self.world.ranks(job.group)
        try:
            if job.refused:
                cause = job.cause(Code.CAPACITY, "decode will not have it")
                return endpoint.refuse_room(job.room, ranks, cause, now)
            deadline_at_s = float("inf") if job.deadline_s is None else now + job.deadline_s
            grant = endpoint.open_room(
                job.room,
                ranks,
                Prompt(job.tokens, job.digest, job.prefix_tokens),
                now=now,
                deadline_at_s=deadline_at_s,
                announce=job.announces or job.waits or job.offers_after_s is not None,
            )
        except KvflowError as error:
            self.say(f"room {job.room}: {error}")
            return None
        else:
            job.at = room = self.rooms[grant] = Room(self, self.pages, endpoint.rooms[grant], job)
            if job.offers_after_s is not None:
                self.clock.later(job.offers_after_s, self, self._has_pages, room)
        finally:
            self.run()

    def end(self, job: DecodeJob, how: str) -> None:
        if job.at is not None and not job.at.told:
            self.close_room(job.at, job.cause(Code.CLIENT_GONE, how))
            self.run()

    def close_room(self, room: Room, cause: Cause) -> None:
        self.say(f"room {room.record.room}: {cause}")
        self.endpoint.close_room(room.record.grant, cause, self.clock.now)

    def _has_pages(self, room: Room) -> None:
        self.take_turn(room)
        self.run()

    def take_turn(self, room: Room) -> None:
        """Stop holding the room back, and offer its pages if every rank is linked."""
        offers, room.held_back = room.held_back and room.linked, False
        if offers:
            self._offer(room)

    def give_up_waiting(self) -> None:
        """Offer pages for rooms that prefill has not begun, since it may never begin them."""
        for room in list(self.rooms.values()):
            if not room.told and not self.rules.rooms.has_begun(self.incarnation, room.record):
                self._has_pages(room)

    def _offer(self, room: Room) -> None:
        grant = room.record.grant
        fails = self.world.faults.of_take()
        pages = None if fails else self.pages.take(room.record.counts, room.lease)
        if pages is None:
            return self.close_room(room, room.job.cause(Code.CAPACITY, "no pages at decode"))
        room.pages = pages
        self._feed(room, PageKind.TAKE, Source.STORE)
        if self.endpoint.lend(grant, np.array(pages, np.int32), self.clock.now):
            self._feed(room, PageKind.LEND)
        return None

    def _feed(self, room: Room, kind: PageKind, source: Source | None = None) -> None:
        room.owned, commands = step(room.owned, kind, source)
        for _, command in commands:
            if command is PageCommand.RETURN:
                self.pages.give_back(room.pages, room.lease)
            elif command is PageCommand.GIVE_TO_KEEPER:
                user = self.pages.keep(room.pages, room.lease)
                self.clock.later(room.job.kept_s, self, self.pages.give_back, room.pages, user)

    # --- links

    def read(self, burst: Burst) -> None:
        """Handle a burst link by link, because a shell has one socket for each link."""
        by_link: dict[PeerKey, Burst] = {}
        for received in burst:
            by_link.setdefault(received[0], []).append(received)
        for frames in by_link.values():
            for key, frame, spoilt in frames:
                self.malformed += spoilt
                self.endpoint.receive(key, frame, self.clock.now)
            self.run()

    def known_dead(self, watched: PeerKey | int) -> None:
        """Handle proof of a death. `watched` is a link, or the number of an earlier writer."""
        if watched in self.watches:
            self.watches.discard(watched)
            if isinstance(watched, int):
                self.say(f"the fence proves the death of earlier writer {watched}")
                self.endpoint.earlier.writer_died(watched)
            else:
                self.say(f"the fence proves the death of {watched.control}")
                self.endpoint.writer_died(watched, self.clock.now)
            self.run()

    def _locked_out(self, key: PeerKey) -> None:
        self.endpoint.locked_out(key, "on purpose", self.clock.now)
        self.run()

    def declare_dead(self, incarnation: int) -> None:
        endpoint = self.endpoint
        # An operator can name only processes that this decode knows.
        if endpoint.earlier.of(incarnation) or any(
            peer.key.incarnation == incarnation for peer in endpoint.peers
        ):
            self.say(f"an operator declares {incarnation:x} dead")
            endpoint.declare_dead(Incarnation(incarnation), "it was seen to die", self.clock.now)
            self.run()

    # --- the end

    def look_again(self, until_s: float) -> None:
        core = self.endpoint.core
        if self.clock.now < until_s and (self.endpoint.rooms or len(core.ledger)):
            return self.wait(CLOSE_LOOK_S, self.look_again, until_s)
        return self.part()

    def has_parted(self) -> None:
        self.endpoint.close(self.clock.now)
        self.run()
        if self.endpoint.rooms or self.world.wire.dialled_by(self):
            self.rules.broken("I5", f"{self.name} is closed, and has rooms or connections")
        self.left_behind = self._without_proof()
        return self.world.kill(self, "has left")

    def _without_proof(self) -> list[UnprovenLoan]:
        """Return the unproven loans. Their leases keep the pages."""
        found = self.inherited_loans()
        for room in self.rooms.values():
            self.pages.check(room.pages, room.lease, "left behind")
            found += [
                UnprovenLoan(
                    writer=peer.address,
                    incarnation=peer.key.incarnation,
                    control=peer.key.control,
                    rank=peer.info.rank,
                    room=room.record.room,
                    lease=room.lease,
                    pages=np.array(room.pages, np.int32),
                )
                for peer in room.record.lease.loans
            ]
        return found

    def died(self) -> None:
        self.pages.lost = self.left_behind is None

    # --- commands

    def _send(self, command: c.SendToPrefill) -> None:
        key = command.peer
        self.rules.transfers.sent(self, parsed(command.frame, to_prefill=True), self.pages)
        if key in self.world.wire.lines.get((key.control, self.incarnation), ()):
            self.world.wire.carry(self, key.control, self, command.frame)

    def _dial(self, command: c.Dial) -> None:
        self.world.wire.dial(command.peer, self)
        if self.world.locks_out():
            self.world.wire.disturbed(command.peer.control, self)
            self.wait(THREAD_S, self._locked_out, command.peer)

    def _hang_up(self, command: c.HangUp) -> None:
        self.world.wire.hang_up(command.peer, self)

    def _watch(self, command: c.WatchWriter) -> None:
        self.watches.add(command.peer)
        self.world.watch(self, command.address, command.peer)

    def _stop_watch(self, command: c.StopWatch) -> None:
        self.watches.discard(command.peer)

    def _watch_earlier(self, command: c.WatchEarlierWriter) -> None:
        self.watches.add(command.writer)
        self.world.watch(self, command.address, command.writer)

    def _stop_earlier(self, command: c.StopEarlierWatch) -> None:
        self.watches.discard(command.writer)

    def _linked(self, command: c.Linked) -> None:
        room = self.rooms[command.grant]
        room.linked = True
        if not room.held_back:
            self._offer(room)

    def _begun(self, command: c.RoomBegun) -> None:
        room = self.rooms[command.grant]
        self.say(f"prefill has begun room {room.record.room}")
        self.rules.rooms.told_begun(self.incarnation, room.record)
        if room.held_back and room.job.waits:
            self.turns.ask(room, self.take_turn)

    def _verify(self, command: c.VerifyChunk) -> None:
        room = self.rooms[command.grant]
        self._feed(room, PageKind.USE)
        self.wait(THREAD_S, self._summed, room, command)

    def _summed(self, room: Room, command: c.VerifyChunk) -> None:
        """Report a chunk's checksum, or an empty one if the room ended or the computation fails."""
        checksum = b""
        if not room.told and not self.world.fails_sum():
            cells, pages = self.pages.cells, room.pages
            if command.fine is not None:
                places = np.array(room.pages, np.int32)
                pages = command.fine.of(self.pages.layout, places).tolist()
            checksum = checksum_of(
                [
                    cells[page].get(command.rank)
                    for first, end in command.spans
                    for page in pages[first:end]
                ]
            )
        self._feed(room, PageKind.IDLE)
        where = command.grant, command.rank, command.seq
        self.endpoint.chunk_summed(*where, checksum, self.clock.now)
        self.run()

    def _stop_verifying(self, command: c.StopVerifying) -> None:
        """Do nothing: `_summed` computes no checksum for a room that ended."""

    def _landed(self, command: c.RoomLanded) -> None:
        room = self.rooms[command.grant]
        self.say(f"room {room.record.room} has landed")
        self._tell(room, None)
        job, digest, pages = room.job, room.job.digest, room.pages
        # A room has no places for the first pages of the prompt if decode had them already.
        needed = room.home.needed(pages, job.tokens, job.prefix_tokens)
        ranks, cells = [peer.info.rank for peer in room.record.peers], room.home.cells

        def is_right(index: int, rank: int) -> bool:
            return all(
                cells[part].get(ranks[rank]) == (digest, token) for part, token in needed[index]
            )

        number, handoff = room.record.room, command.handoff
        parts = [part for place in needed for part, _ in place]
        arrival = Arrival(number, room.keys, room.home, pages, is_right, digest, handoff, parts)
        self.rules.transfers.landed(arrival)
        self.turns.end(room)
        # A landed room passes its pages to its user, so no FreePages follows.
        self._feed(room, PageKind.LAND)
        self._feed(room, PageKind.KEEP)
        room.job.succeeded = True

    def _failed(self, command: c.RoomFailed) -> None:
        room = self.rooms[command.grant]
        self.say(f"room {room.record.room} fails: {command.cause}")
        self._tell(room, command.cause)
        self.turns.end(room)

    def _tell(self, room: Room, cause: Cause | None) -> None:
        self.rules.rooms.told_at_decode(self.incarnation, room.record, cause)
        room.told = True

    def _ended(self, command: c.RoomEnded) -> None:
        room = self.rooms[command.grant]
        if room.over:
            self.rules.broken("I4", f"room {room.record.room} ends at decode twice")
        in_table = command.grant in self.endpoint.rooms
        self.rules.rooms.ended_at_decode(room.record, in_table=in_table)
        room.over = True
        self._forget(room)

    def _quarantine(self, command: c.QuarantinePages) -> None:
        self.say(f"pages of grant {command.grant} are in quarantine")
        self._feed(self.rooms[command.grant], PageKind.QUARANTINE)

    def _free(self, command: c.FreePages) -> None:
        if (loans := self.inherited.pop(command.grant, None)) is not None:
            self.say(f"pages of an earlier decode, grant {command.grant} here, are free")
            return self.pages.give_back(loans[0].pages.tolist(), loans[0].lease)
        room = self.rooms.get(command.grant)
        if room is None or room.owned.target in SETTLED:
            text = f"{self.name}: pages of grant {command.grant} are given back twice"
            return self.rules.broken("I1", text)
        self._feed(room, PageKind.FREE)
        return self._forget(room)

    def _forget(self, room: Room) -> None:
        if room.over and not room.owned.claimed:
            del self.rooms[room.record.grant]

    RUN: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        c.SendToPrefill: _send,
        c.Dial: _dial,
        c.HangUp: _hang_up,
        c.WatchWriter: _watch,
        c.StopWatch: _stop_watch,
        c.WatchEarlierWriter: _watch_earlier,
        c.StopEarlierWatch: _stop_earlier,
        c.Linked: _linked,
        c.RoomBegun: _begun,
        c.VerifyChunk: _verify,
        c.StopVerifying: _stop_verifying,
        c.RoomLanded: _landed,
        c.RoomFailed: _failed,
        c.RoomEnded: _ended,
        c.QuarantinePages: _quarantine,
        c.FreePages: _free,
    }


def checksum_of(contents: list[object]) -> bytes:
    return zlib.crc32(repr(contents).encode()).to_bytes(4, "big")
