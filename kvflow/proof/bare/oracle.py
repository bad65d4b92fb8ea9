"""Record of what really happened to pages, bytes and messages (I1-I3, I6, I8, I9, I12), and of what
users were told about it (I4).

The record is made at the data planes, the pages and the wire. The endpoints' own books are never
consulted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvflow.proof.bare.clock import Clock
from kvflow.proof.bare.holds import Leg, Room, Who, Write, key_of
from kvflow.proof.bare.job import handoff_of
from kvflow.proof.bare.pages import Pages
from kvflow.proof.sim.both_sides import Promise, Record, Side
from kvflow.proof.sim.outcome import Violation
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.codec import parse_at_decode
from kvflow.protocols.wire.messages import AbortAck, ChunkDone, Goodbye

DEADLINE_SLACK_S = 0.1
_GIVEN = (Code.CLIENT_GONE, Code.CAPACITY, Code.ENGINE_ERROR)


class BrokenError(AssertionError):
    """An invariant does not hold; the run ends here."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.text)
        self.violation = violation


class Halves:
    """Observer of what both halves of rooms do; see `halves`."""

    def opened_at_decode(self, room: Room) -> None: ...

    def refused_at_decode(self, room: int, cause: Cause) -> None: ...

    def refused_at_prefill(self, source: int, room: int, cause: Cause) -> None: ...

    def opened_at_prefill(self, node: Who, leg: Leg) -> None: ...

    def failed(self, node: Who, record: Record, cause: Cause | None) -> None: ...

    def has_left(self, source: Side, control: str, linked: Iterable[Side]) -> None: ...


class Oracle:
    """Judge of one run. Raises BrokenError at the first violation."""

    def __init__(self, clock: Clock, trace: Callable[[str], None] | None) -> None:
        self.clock, self.halves = clock, Halves()
        self.endings: Counter[str] = Counter()
        self.rooms: dict[Promise, Room] = {}
        self.writes: dict[Promise, list[Write]] = {}
        self.acked: set[Promise] = set()
        # Grants that a goodbye names as unproven, by source and target.
        self.goodbyes: dict[tuple[int, int], frozenset[int]] = {}
        self.left: set[tuple[int, int]] = set()  # pairs whose goodbye was acknowledged
        self.stopped: set[int] = set()  # rooms with a write that did not land
        self.damaged = False  # True after bytes were damaged on purpose
        self.over_at_s: dict[Record, float] = {}
        self._bound: dict[Promise, PrefillRoomRecord] = {}
        self._begun: set[PrefillRoomRecord] = set()
        self._causes: dict[int, set[Cause]] = {}  # given to each room by the world
        self._deadlines: dict[int, float] = {}  # earliest of a room's halves
        self._prompts: dict[int, set[tuple[int, bytes]]] = {}
        self._trace = trace

    def broken(self, invariant: str, text: str) -> None:
        """Record a violation. Raises: BrokenError."""
        if self._trace is not None:
            self._trace(f"VIOLATION of {invariant}: {text}")
        raise BrokenError(Violation(invariant, text, self.clock.now))

    # --- what the world does to a room

    def issue(self, room: int, cause: Cause) -> Cause:
        self._causes.setdefault(room, set()).add(cause)
        return cause

    def deadline(self, room: int, at_s: float) -> None:
        self._deadlines[room] = min(at_s, self._deadlines.get(room, at_s))

    # --- writes

    def write_began(self, write: Write) -> None:
        key, writers = write.key, write.home.writers
        if key in self.acked or key[:2] in self.goodbyes:
            self.broken("I6", f"{key} is closed, and a write begins")
        earlier = self.writes.setdefault(key, [])
        # The bytes of an earlier write may still arrive, so its targets stay taken.
        for other in earlier:
            if not set(write.targets).isdisjoint(other.targets):
                self.broken("I3", f"{key}: {write.targets} are written again under the same grant")
        earlier.append(write)
        for page in write.targets:
            writers[page] += 1

    # --- messages

    def said(self, node: Who, frame: bytes) -> None:
        """Verify a message that a prefill sends about its rooms."""
        message = parse_at_decode(frame)
        kind = type(message)
        # Every frame must carry the incarnation of its sender.
        if message.source != node.incarnation:
            self.broken(
                "I6", f"{node.name} ({node.incarnation:x}) speaks for {message.source:x}: {message}"
            )
        if kind is ChunkDone:
            key = message.source, message.target, message.grant  # type: ignore[union-attr]
            assert isinstance(message, ChunkDone)
            writes = [
                write for write in self.writes.get(key, ()) if write.outcome is WriteOutcome.LANDED
            ]
            # Writes are in the order of their chunks, and every one up to this chunk must have
            # landed.
            numbered = self.writes.get(key, [])[: message.seq + (message.pages > 0)]
            if any(write.outcome is not WriteOutcome.LANDED for write in numbered) or len(
                writes
            ) < len(numbered):
                self.broken("I3", f"{key}: chunk {message.seq} is said to have landed, and has not")
            if message.pages and (
                len(numbered) != message.seq + 1 or len(numbered[-1].sources) != message.pages
            ):
                self.broken("I3", f"{key}: chunk {message.seq} has no {message.pages} pages")
        elif kind is AbortAck:
            assert isinstance(message, AbortAck)
            self._acknowledged((message.source, message.target, message.grant), message.drained)
        elif kind is Goodbye:
            assert isinstance(message, Goodbye)
            self._goodbye(message)

    def _goodbye(self, message: Goodbye) -> None:
        pair, unproven = (message.source, message.target), frozenset(message.unproven)
        self.goodbyes[pair] = unproven
        for key, writes in self.writes.items():
            if key[:2] != pair or key[2] in unproven:
                continue
            if any(write.outcome is None for write in writes):
                self.broken("I12", f"{key}: goodbye is said while a write of it runs")
            if any(write.outcome is WriteOutcome.UNPROVEN for write in writes):
                self.broken("I2", f"{key}: goodbye is said, and a write of it may still land")

    def parted(self, node: Who, decodes: Iterable[int]) -> None:
        """Record that these decodes acknowledged the node's goodbye, or sent their own."""
        self.left.update((node.incarnation, decode) for decode in decodes)

    def settled(self, key: Promise) -> bool:
        """Return True if the goodbye of its source ended this loan."""
        return key[:2] in self.left and key[2] not in self.goodbyes.get(key[:2], (key[2],))

    def _acknowledged(self, key: Promise, drained: bool) -> None:
        self.acked.add(key)
        for write in self.writes.get(key, ()):
            if write.outcome is None:
                self.broken("I12", f"{key}: acknowledged while a write of it runs")
            elif drained and write.outcome is WriteOutcome.UNPROVEN:
                self.broken("I2", f"{key}: said to be drained, and a write of it may still land")

    def lent(self, home: Pages, grant: int, pages: bytes) -> None:
        """Verify that decode owns the pages that it offers."""
        owners = home.owners
        for page in memoryview(pages).cast("i"):
            if owners[page] != grant:
                self.broken("I6", f"grant {grant} lends page {page} of {owners[page]}")

    # --- decode's rooms

    def opened_at_decode(self, room: Room) -> None:
        for key in room.keys:
            if key in self.rooms:
                self.broken("I6", f"{key} is opened again")
            self.rooms[key] = room
        prompt = room.record.prompt
        self._prompts.setdefault(room.record.room, set()).add((prompt.tokens, prompt.digest))
        self.halves.opened_at_decode(room)

    def told_begun(self, room: Room) -> None:
        """Verify a notice to decode's user that prefill has a place for the whole prompt."""
        if room.told or room.begun:
            when = "after its end" if room.told else "twice"
            self.broken("I4", f"room {room.record.room} is told {when} that prefill has begun")
        if not self.has_begun(room):
            self.broken(
                "I4", f"room {room.record.room} is said to have begun, and not every rank has"
            )
        room.begun = True

    def has_begun(self, room: Room) -> bool:
        """Return True if every rank has a place for the room, and knows of this decode."""
        return all(self._bound.get(key) in self._begun for key in room.keys)

    def told_at_decode(self, room: Room, cause: Cause | None) -> None:
        self._told(room, room.record, room.node, cause, room.record.deadline_at_s)
        self._count("decode", cause)

    def ended_at_decode(self, room: Room) -> None:
        record = room.record
        if not room.told or room.over:
            self.broken(
                "I4",
                f"room {record.room} ends at decode {'twice' if room.over else 'and none is told'}",
            )
        if record.state.cause != room.cause and room.cause is not None:
            self.broken(
                "I4", f"room {record.room} at decode: first {room.cause}, then {record.state.cause}"
            )

    def landed(self, room: Room, handoff: bytes) -> None:
        """Verify a room that landed at decode: every page from every rank, the right bytes and
        hand-over.
        """
        record, pages = room.record, room.pages
        digest, cells = record.prompt.digest, room.home.cells
        # A room lacks the pages that decode had already, which are the first of the prompt.
        first = room.job.num_places - len(pages)
        for key, peer in zip(room.keys, record.peers, strict=True):
            landed = [
                page for write in self.writes.get(key, ()) for page in write.targets[: write.next]
            ]
            rank = peer.info.rank
            if len(landed) < len(pages) and not set(pages) <= set(landed):
                self.broken(
                    "I8",
                    f"room {record.room} succeeds, rank {rank} has written pages {landed} of "
                    f"{pages}",
                )
            for index, page in enumerate(pages, first):
                if cells[page].get(rank) != (digest, index):
                    self.broken(
                        "I8", f"room {record.room} succeeds, page {page} has somebody else's bytes"
                    )
        if handoff != handoff_of(digest):
            self.broken("I9", f"room {record.room} got another room's hand-over")

    # --- prefill's rooms

    def opened_at_prefill(self, node: Who, leg: Leg) -> None:
        self._prompts.setdefault(leg.record.room, set()).add((leg.job.tokens, leg.job.digest))
        self.halves.opened_at_prefill(node, leg)

    def begun_at_prefill(self, record: PrefillRoomRecord) -> None:
        """Record that the engine has a place for the whole prompt."""
        self._begun.add(record)

    def bound(self, node: Who, record: PrefillRoomRecord) -> Promise:
        """Record that decode's half arrived at prefill or was announced there, and return its
        promise.
        """
        key = key_of(node, record)
        if key in self._bound or key in self.acked:
            self.broken("I6", f"{key} opens room {record.room} at prefill, and was closed before")
        self._bound[key] = record
        return key

    def matched(self, node: Who, leg: Leg) -> None:
        record = leg.record
        room = self.rooms[key_of(node, record)]
        if leg.matched or leg.told:
            self.broken(
                "I4", f"room {record.room} is matched {'after its end' if leg.told else 'twice'}"
            )
        if room.job.digest != leg.job.digest:
            self.broken("I8", f"room {record.room} is matched, and its halves mean other prompts")

    def told_at_prefill(self, node: Who, leg: Leg, cause: Cause | None) -> None:
        """Verify the ending that the engine learns: a success needs every page of the room
        landed.
        """
        record = leg.record
        self._told(leg, record, node, cause, record.own_deadline_at_s)
        self._count("prefill", cause)
        if cause is None:
            writes = self.writes.get(key_of(node, record), ())
            there = sum(
                len(write.sources) for write in writes if write.outcome is WriteOutcome.LANDED
            )
            if there != len(record.target_pages) or any(
                write.outcome is not WriteOutcome.LANDED for write in writes
            ):
                self.broken(
                    "I3", f"room {record.room} succeeds at prefill over a write that has not landed"
                )

    def released(
        self, node: Who, record: PrefillRoomRecord, leg: Leg | None, running: Iterable[Write]
    ) -> None:
        """Verify a room that ended at prefill. `leg` is None if the engine's half never arrived."""
        if leg is None:
            # Without a leg there is no user, so `_told` never recorded this end.
            self.over_at_s[record] = self.clock.now
            self.halves.failed(node, record, record.state.cause)
            return
        if not leg.told:
            self.broken("I4", f"room {record.room} ended at prefill, its engine was not told")
        if leg.cause is not None and record.state.cause != leg.cause:
            self.broken(
                "I4", f"room {record.room} at prefill: first {leg.cause}, then {record.state.cause}"
            )
        if any(write.leg is leg for write in running):
            self.broken("I12", f"room {record.room} is released while a write of it runs")

    # --- what users are told

    def _count(self, role: str, cause: Cause | None) -> None:
        self.endings[f"{role} success" if cause is None else f"{role} {cause.code}"] += 1

    def _told(
        self, user: Room | Leg, record: Record, node: Who, cause: Cause | None, deadline_at_s: float
    ) -> None:
        now, room = self.clock.now, record.room
        if user.told:
            self.broken("I4", f"{node.name}: the user of room {room} is told two endings")
        user.told, user.cause = True, cause
        self.over_at_s[record] = now
        if now > deadline_at_s + DEADLINE_SLACK_S and node.troubled_at_s < deadline_at_s:
            self.broken("I4", f"{node.name}: room {room} was to end at {deadline_at_s:.3f} s")
        if cause is not None:
            self._check_cause(node, room, cause)
            self.halves.failed(node, record, cause)

    def _check_cause(self, node: Who, room: int, cause: Cause) -> None:
        """Verify that the cause which a user receives is true."""
        code, right = cause.code, True
        # A cause of the world names its room, so that a mix-up of two rooms shows.
        if "#" in cause.text:
            right = cause.text.rpartition("#")[2] == str(room) and cause in self._causes.get(
                room, ()
            )
        elif code is Code.DEADLINE:
            right = self.clock.now >= self._deadlines.get(room, float("inf"))
        elif code is Code.PROMPT_MISMATCH:
            right = len(self._prompts[room]) > 1
        elif code is Code.TRANSFER_ERROR:
            right = room in self.stopped or self.damaged
        elif code is Code.PROTOCOL_ERROR:
            right = False  # every node here keeps to the protocol
        if not right:
            self.broken("I4", f"{node.name}: the user of room {room} is told {cause}")
