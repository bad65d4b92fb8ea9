"""A shipped DecodeEndpoint as a hashable value, and the events that it can receive.

The endpoint makes every decision. The value adds the state around it: the results that its users
received, and the pages that are free.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from kvflow.proof.walk.world import (
    LATER,
    LIVES,
    SUM,
    ViolationError,
    Word,
    World,
    life_of,
    word_of,
)
from kvflow.protocols import commands as c
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.records import Prompt
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.machinery import Timer
from kvflow.protocols.machines import ownership
from kvflow.protocols.machines.decode_room import TERMINAL
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.machines.loan import LoanPhase
from kvflow.protocols.machines.ownership import Ownership, PageCommand, PageKind, PagePhase, Source
from kvflow.protocols.ports import UnprovenLoan
from kvflow.protocols.wire.codec import parse_at_prefill
from kvflow.protocols.wire.messages import GrantId

EARLIER_DECODE = 66  # incarnation of an earlier decode over the same pool
EARLIER = (-1, 1)
"""Entry in `Decode.watched` for the writer of the earlier decode's loans: rank 0's first life."""


class Owner(IntEnum):
    """The owner of a set of pages, as the walk's store knows it."""

    STORE = 0  # the store, or the caller if the pages are its own
    ROOM = 1
    USER = 2
    WITHHELD = 3  # in the store's quarantine


class Grant(NamedTuple):
    """One grant as its user, its shell and the store know it."""

    pages: Ownership = Ownership()
    target: tuple[Owner, ...] = (Owner.STORE,)  # owner of the pages in each space
    staging: Owner = Owner.STORE
    threads: int = 0  # number of threads that checksum or copy some of its pages
    told: bool = False  # True once its user has the result
    ended: bool = False
    linked: bool = False  # True while its user has to take pages
    differs: bool = False  # True after a chunk's checksum was wrong or missing

    @property
    def home(self) -> int:
        """A bit for each space in which the pages lent to ranks are free or the user's. A write
        must not reach these.
        """
        if self.pages.staging is not None:
            return (self.staging is Owner.STORE) * ((1 << len(self.target)) - 1)
        landed = self.pages.target is PagePhase.LANDED
        return sum(
            1 << space
            for space, owner in enumerate(self.target)
            if landed or owner in (Owner.STORE, Owner.USER)
        )

    @property
    def kept_for_nothing(self) -> bool:
        """True if the room still holds pages that its user has not received."""
        landed = self.pages.target is PagePhase.LANDED
        return self.staging is Owner.ROOM or (Owner.ROOM in self.target and not landed)

    def fed(self, kind: PageKind, source: Source | None = None) -> Grant:
        """Return the grant after its pages receive one event.

        Raises: ViolationError if a resulting command moves pages that the room does not own, or
        returns pages that a thread uses.
        """
        pages, commands = ownership.step(self.pages, kind, source)
        after = self._replace(pages=pages)
        if kind is PageKind.TAKE:
            after = after._put(source is Source.STAGING, Owner.ROOM)
        for of, command in commands:
            of_staging = of is Source.STAGING
            owners = (after.staging,) if of_staging else after.target
            if any(owner is not Owner.ROOM for owner in owners):
                raise ViolationError("I1: pages are given back that are not the room's")
            if command is PageCommand.GIVE_TO_KEEPER:
                after = after._put(of_staging, Owner.USER)
            elif command is PageCommand.RETURN:
                if after.threads:
                    raise ViolationError("I13: pages are given back while a thread uses them")
                phase = pages.staging if of_staging else pages.target
                withheld = phase is PagePhase.WITHHELD
                after = after._put(of_staging, Owner.WITHHELD if withheld else Owner.STORE)
        return after

    def _put(self, of_staging: bool, owner: Owner) -> Grant:
        if of_staging:
            return self._replace(staging=owner)
        return self._replace(target=(owner,) * len(self.target))


class Rank(NamedTuple):
    """Decode's end of the link to one rank, computed from the endpoint."""

    dialled: int  # the life to which the connection is open, or 0
    # For the first and the second life: True if decode still sends messages to it.
    beats: tuple[bool, bool]
    up: int  # the life whose link is up, or 0
    owes: int  # 0: no loans; 1: only loans in doubt; 2: others too
    settled: GrantId


class Decode(NamedTuple):
    """The state of decode in the walk."""

    endpoint: int  # number on the shelf, or -1 if the process is dead
    grants: tuple[Grant, ...] = ()
    opened: int = 0  # number of rooms that were opened or refused
    watched: frozenset[tuple[int, int]] = frozenset()  # (rank, life) pairs whose death is awaited
    declared: frozenset[tuple[int, int]] = frozenset()
    left: bool = False
    closed: bool = False
    earlier: bool = False  # True while an earlier decode's loans are open
    # The walk reads these fields without restoring the endpoint.
    ranks: tuple[Rank, ...] = ()
    rooms: int = 0
    busy: bool = False

    @property
    def alive(self) -> bool:
        return self.endpoint >= 0


DEAD = Decode(-1)


class DecodeSide:
    """A decode while it handles one event."""

    def __init__(self, value: Decode, world: World, endpoint: DecodeEndpoint | None = None) -> None:
        self.value, self.world = value, world
        self.endpoint: DecodeEndpoint = endpoint or world.decodes.take(value.endpoint)
        self.core = self.endpoint.core
        self.grants = list(value.grants)
        self.watched = set(value.watched)
        self.dialled = [rank.dialled for rank in value.ranks] or [0] * world.bounds.ranks
        self.words: list[list[Word]] = [[] for _ in range(world.bounds.ranks)]
        self.succeeded = 0

    # --- what happens

    def run(self, do: Callable[[DecodeSide], None]) -> Decode:
        """Return the state after `do` and the commands that it causes. Raises: AssertionError."""
        causes = {grant: record.state.cause for grant, record in self.endpoint.rooms.items()}
        known = dict(self.endpoint.rooms)
        do(self)
        while True:
            if not self.world.bounds.step_by_step:
                while self.core.work_left:
                    self.endpoint.tick(0.0)
            if not (found := self.endpoint.commands()):
                break
            for command in found:
                if (run := _RUN.get(type(command))) is not None:
                    run(self, command)
        if self.value.closed:
            for number, held in enumerate(self.grants, 1):
                if held.pages.claimed:
                    self.feed(number, PageKind.ABANDON)
        for grant, record in known.items():
            if causes[grant] is not None and record.state.cause != causes[grant]:
                raise ViolationError("I4: decode's room forgot its first cause")
        return self._seen()

    def put(self, **changes: Any) -> None:
        self.value = self.value._replace(**changes)

    def grant(self, grant: int, **changes: Any) -> None:
        self.grants[grant - 1] = self.grants[grant - 1]._replace(**changes)

    def _seen(self) -> Decode:
        core = self.core
        if any(record.phase in TERMINAL for record in core.rooms.values()):
            raise ViolationError("I5: a room that has ended is in a table")
        self._check_ledger()
        owed = set(core.rooms).union(*core.ledger._by_source.values())
        for number, grant in enumerate(self.grants, 1):
            if grant.kept_for_nothing and not grant.threads and number not in owed:
                raise ViolationError("I1: neither a room nor a loan needs the pages that are kept")
        ranks = []
        for rank in range(self.world.bounds.ranks):
            peers = {
                life_of(p.key.incarnation): p for p in self.endpoint.peers if p.info.rank == rank
            }
            loans = [
                lease.loans[peer]
                for peer in peers.values()
                for grant in core.ledger.grants_of(peer)
                if (lease := core.ledger.find(peer, grant)) is not None
            ]
            doubtful = all(phase is LoanPhase.DOUBTFUL for phase in loans)
            phases = {life: peer.phase for life, peer in peers.items()}
            first, second = (phases.get(n, LinkPhase.GONE) is not LinkPhase.GONE for n in (1, 2))
            up = max((life for life in phases if phases[life] is LinkPhase.UP), default=0)
            settled = core.ledger.settled_below(peers[up]) if up else GrantId(0)
            owes = (1 if doubtful else 2) if loans else 0
            ranks.append(Rank(self.dialled[rank], (first, second), up, owes, settled))
        return self.value._replace(
            endpoint=self.world.decodes.put(self.endpoint),
            grants=tuple(self.grants),
            watched=frozenset(self.watched),
            ranks=tuple(ranks),
            rooms=len(core.rooms),
            busy=core.work_left,
            earlier=bool(core.earlier.writers),
        )

    def _check_ledger(self) -> None:
        """Verify that every lease, and the ledger, counts the places of all spaces."""
        ledger, quarantined = self.core.ledger, [0] * self.world.spaces
        leases = {
            id(lease): lease for loans in ledger._by_source.values() for lease in loans.values()
        }
        for lease in leases.values():
            if lease.counts not in ((), self.world.counts):
                raise ViolationError(f"I2: a lease of {self.world.counts} counts {lease.counts}")
            if lease.cause is not None:
                for space, count in enumerate(lease.counts):
                    quarantined[space] += count
        if ledger.quarantined != tuple(quarantined):
            text = f"{ledger.quarantined} places in quarantine are counted, of {quarantined}"
            raise ViolationError(f"I2: {text}")

    def due(self, timer: Timer) -> None:
        self.core.deadlines.set(timer, 0.0)
        self.endpoint.tick(0.0)

    def open_room(self, lives: tuple[int, ...]) -> None:
        """Open the next room. `lives` are the lives of the ranks, as listed in the registry."""
        world, bounds = self.world, self.world.bounds
        infos = [world.info(rank, life) for rank, life in enumerate(lives)]
        room = bounds.rooms[self.value.opened]
        self.put(opened=self.value.opened + 1)
        staging = PagePhase.NONE if bounds.staged else None
        fresh = Grant(Ownership(staging=staging), self._all(Owner.STORE))
        if bounds.own_pages:
            fresh = fresh.fed(PageKind.TAKE, Source.OWN)
        try:
            prompt = Prompt(world.tokens, world.digest, world.prefix_tokens)
            grant = self.endpoint.open_room(room, infos, prompt, now=0.0, announce=bounds.announce)
        except KvflowError:
            grant = GrantId(0)
            if fresh.fed(PageKind.FREE).kept_for_nothing:
                raise ViolationError("I1: a refused room keeps its pages") from None
        if grant and self.value.left:
            raise ViolationError("I4: decode is shutting down, and opens a room")
        # A refused room may use up a grant too. That grant is over, and lent no pages.
        while len(self.grants) < self.core.next_grant - 1:
            self.grants.append(fresh if len(self.grants) == grant - 1 else self._over())

    def refuse_room(self, lives: tuple[int, ...]) -> None:
        infos = [self.world.info(rank, life) for rank, life in enumerate(lives)]
        room = self.world.bounds.rooms[self.value.opened]
        self.put(opened=self.value.opened + 1)
        try:
            self.endpoint.refuse_room(room, infos, LATER, 0.0)
        except KvflowError:
            return
        finally:
            while len(self.grants) < self.core.next_grant - 1:
                self.grants.append(self._over())

    def _over(self) -> Grant:
        """Return a grant that a refused room used up."""
        freed = Ownership(PagePhase.FREED)
        return Grant(freed, self._all(Owner.STORE), told=True, ended=True)

    def _all(self, owner: Owner) -> tuple[Owner, ...]:
        return (owner,) * self.world.spaces

    def lend(self, grant: int) -> None:
        self.grant(grant, linked=False)
        pages, bounds = self.world.places_of(grant), self.world.bounds
        if bounds.staged:
            self.feed(grant, PageKind.TAKE, Source.STAGING)
        if not bounds.own_pages:
            self.feed(grant, PageKind.TAKE, Source.STORE)
        if self.endpoint.lend(GrantId(grant), pages, 0.0):
            self.feed(grant, PageKind.LEND)

    def feed(self, grant: int, kind: PageKind, source: Source | None = None) -> None:
        self.grants[grant - 1] = self.grants[grant - 1].fed(kind, source)

    def close_room(self, grant: int) -> None:
        self.endpoint.close_room(GrantId(grant), LATER, 0.0)

    def has_no_pages(self, grant: int) -> None:
        self.grant(grant, linked=False)
        self.endpoint.close_room(GrantId(grant), Cause(Code.CAPACITY, "full"), 0.0)

    def summed(
        self, grant: int, rank: int, seq: int, checksum: bytes, lingers: bool = False
    ) -> None:
        """Report the result of a thread, which still runs if it `lingers`."""
        if not lingers:
            self.thread_ends(grant)
        if checksum != SUM:
            self.grant(grant, differs=True)
        self.endpoint.chunk_summed(GrantId(grant), rank, seq, checksum, 0.0)

    def thread_ends(self, grant: int) -> None:
        self.grant(grant, threads=self.grants[grant - 1].threads - 1)
        self.feed(grant, PageKind.IDLE)

    def writer_died(self, rank: int, life: int) -> None:
        self.watched.discard((rank, life))
        info = self.world.info(rank, life)
        self.endpoint.writer_died(c.PeerKey(LIVES[rank][life - 1], info.control), 0.0)

    def inherit(self) -> None:
        """Take over a loan that an earlier decode made to the first life of rank 0."""
        # Its pages are recorded as the first grant, so that the check of I2 covers them.
        quarantined = Ownership(PagePhase.QUARANTINED)
        self.grants.append(Grant(quarantined, self._all(Owner.ROOM), told=True, ended=True))
        loan = UnprovenLoan(
            writer=self.world.address,
            incarnation=LIVES[0][0],
            control=self.world.info(0, 1).control,
            rank=0,
            room=1,
            lease=(EARLIER_DECODE, 1),
            pages=self.world.places_of(1),
        )
        assert list(self.endpoint.earlier.inherit([loan])) == [len(self.grants)]

    def earlier_writer_died(self) -> None:
        self.watched.discard(EARLIER)
        self.endpoint.earlier.writer_died(1)

    def declare_dead(self, rank: int, life: int) -> None:
        try:
            self.endpoint.declare_dead(LIVES[rank][life - 1], "an operator's word", 0.0)
        except KvflowError:
            return
        self.put(declared=self.value.declared | {(rank, life)})

    def leave(self) -> None:
        self.put(left=True)
        self.endpoint.leave(0.0)

    def part(self) -> None:
        self.endpoint.part(0.0)

    def close(self) -> None:
        self.put(closed=True)
        self.endpoint.close(0.0)

    def hear(self, rank: int, word: Word) -> None:
        if life := self.dialled[rank]:
            key = c.PeerKey(LIVES[rank][life - 1], self.world.info(rank, life).control)
            before = self._up()
            self.endpoint.receive(key, self.world.frame(word, rank), 0.0)
            # Both lives of a rank have one address, so a link may receive the other life's message.
            if any(life_of(up.incarnation) != life_of(word.source) for up in self._up() - before):
                raise ViolationError("I6: the answer of another life brings a link up")

    def _up(self) -> set[c.PeerKey]:
        links = self.core.links.peers.items()
        return {key for key, peer in links if peer.phase is LinkPhase.UP}

    # --- what it asks its shell to do

    def _send(self, command: c.SendToPrefill) -> None:
        self.words[_place(command.peer)[0]].append(word_of(parse_at_prefill(command.frame)))

    def _dial(self, command: c.Dial) -> None:
        rank, life = _place(command.peer)
        self.dialled[rank] = life

    def _hang_up(self, command: c.HangUp) -> None:
        rank, life = _place(command.peer)
        if self.dialled[rank] == life:
            self.dialled[rank] = 0

    def _watch(self, command: c.WatchWriter) -> None:
        self.watched.add(_place(command.peer))

    def _stop_watch(self, command: c.StopWatch) -> None:
        self.watched.discard(_place(command.peer))

    def _watch_earlier(self, command: c.WatchEarlierWriter) -> None:
        self.watched.add(EARLIER)

    def _stop_earlier(self, command: c.StopEarlierWatch) -> None:
        self.watched.discard(EARLIER)

    def _linked(self, command: c.Linked) -> None:
        self.grant(command.grant, linked=True)

    def _tell(self, grant: int) -> None:
        if self.grants[grant - 1].told:
            raise ViolationError("I4: decode's user is told two endings")
        self.grant(grant, told=True)

    def _landed(self, command: c.RoomLanded) -> None:
        self._tell(command.grant)
        if self.grants[command.grant - 1].differs:
            raise ViolationError("I8: success though a checksum differs")
        self.feed(command.grant, PageKind.LAND)
        self.succeeded = command.grant

    def _failed(self, command: c.RoomFailed) -> None:
        self._tell(command.grant)
        if command.cause.code is Code.PROTOCOL_ERROR:
            raise ViolationError(f"I8: chunks do not add up: {command.cause.text}")
        self.grant(command.grant, differs=False)

    def _ended(self, command: c.RoomEnded) -> None:
        known = self.grants[command.grant - 1]
        if known.ended or not known.told:
            how = "twice" if known.ended else "and its user is not told"
            raise ViolationError(f"I4: decode's room ends {how}")
        self.grant(command.grant, ended=True)

    def _verify(self, command: c.VerifyChunk) -> None:
        verified = sum(1 << n for first, end in command.spans for n in range(first, end))
        if verified != self.world.chunk_bits[command.seq]:
            raise ViolationError(f"I8: other places are verified than those of chunk {command.seq}")
        self.grant(command.grant, threads=self.grants[command.grant - 1].threads + 1)
        self.feed(command.grant, PageKind.USE)

    def _quarantine(self, command: c.QuarantinePages) -> None:
        self.feed(command.grant, PageKind.QUARANTINE)

    def _free(self, command: c.FreePages) -> None:
        known = self.grants[command.grant - 1]
        pages = known.pages
        if (pages.target if pages.staging is None else pages.staging) in _BACK:
            raise ViolationError("I1: pages are given back that are not lent")
        # A closed node left its pages in the pool's quarantine, so the proof frees them there.
        if Owner.WITHHELD in known.target:
            self.grant(command.grant, target=self._all(Owner.STORE))
        elif known.staging is Owner.WITHHELD:
            self.grant(command.grant, staging=Owner.STORE)
        else:
            self.feed(command.grant, PageKind.FREE)


_BACK = (PagePhase.LANDED, PagePhase.KEPT, PagePhase.FREED)


def _place(key: c.PeerKey) -> tuple[int, int]:
    return key.incarnation % 100 - 1, life_of(key.incarnation)


_RUN: dict[type, Callable[[DecodeSide, Any], None]] = {
    c.SendToPrefill: DecodeSide._send,
    c.Dial: DecodeSide._dial,
    c.HangUp: DecodeSide._hang_up,
    c.WatchWriter: DecodeSide._watch,
    c.StopWatch: DecodeSide._stop_watch,
    c.WatchEarlierWriter: DecodeSide._watch_earlier,
    c.StopEarlierWatch: DecodeSide._stop_earlier,
    c.Linked: DecodeSide._linked,
    c.RoomLanded: DecodeSide._landed,
    c.RoomFailed: DecodeSide._failed,
    c.RoomEnded: DecodeSide._ended,
    c.VerifyChunk: DecodeSide._verify,
    c.QuarantinePages: DecodeSide._quarantine,
    c.FreePages: DecodeSide._free,
}
