"""Rules for writes and for messages about them (I2, I3, I6 to I9, I12).

The driver's data planes and wire report the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvflow.proof.rules.judge import Judge, Promise, Side
from kvflow.proof.rules.places import Home
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.messages import AbortAck, Bootstrap, ChunkDone, Goodbye, Message


def handoff_of(digest: bytes) -> bytes:
    return b"handoff " + digest[:8]


class Write:
    """A data plane's write of `sources` to `targets`. The first `next` pages have landed. If the
    pages of the two pools differ in size, both lists name parts of places: see `Home.place_of`.
    """

    __slots__ = ("home", "key", "next", "origin", "outcome", "record", "sources", "targets")

    def __init__(
        self,
        record: PrefillRoomRecord,
        key: Promise,
        sources: list[int],
        origin: Home,
        home: Home,
        targets: list[int],
    ) -> None:
        """Record a write of `sources`, places of the pool `origin`, to `targets` of `home`."""
        self.record, self.key, self.sources, self.origin = record, key, sources, origin
        self.home, self.targets = home, targets
        self.next = 0
        self.outcome: WriteOutcome | None = None


class Arrival(NamedTuple):
    """A room that landed at decode, as its user finds it."""

    room: int
    keys: Sequence[Promise]  # promise for each rank, in the order of ranks
    home: Home
    places: Sequence[int]  # places that decode lent
    # is_right(index, rank): True if page `index` of the room holds the bytes of that rank.
    is_right: Callable[[int, int], bool]
    digest: bytes
    handoff: bytes
    parts: Sequence[int] | None = None  # parts of `places` to be written, if they are divided


class Transfers:
    """Record of what happened to pages and messages, as data planes and the wire saw it."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.broken = judge, judge.broken
        self.writes: dict[Promise, list[Write]] = {}
        self.acked: set[Promise] = set()
        # Grants that a goodbye names as unproven, by source and target.
        self.goodbyes: dict[tuple[int, int], frozenset[int]] = {}
        self.left: set[tuple[int, int]] = set()  # (source, target) pairs that parted
        self.frozen: set[Write] = set()  # writes that never end although their process lives

    def running(self, key: Promise) -> bool:
        return any(write.outcome is None for write in self.writes.get(key, ()))

    # --- writes

    def write_began(self, write: Write) -> None:
        """Record a write. Its grant must be open, and its target pages unwritten (I3, I6). Each
        place must go to one of the same space (I8).
        """
        key = write.key
        if key in self.acked or key[:2] in self.goodbyes:
            self.broken("I6", f"{key} is closed, and a write begins")
        earlier = self.writes.setdefault(key, [])
        # The bytes of an earlier write may still arrive, so its targets stay taken.
        for other in earlier:
            if not set(write.targets).isdisjoint(other.targets):
                self.broken("I3", f"{key}: {write.targets} are written again under the same grant")
        earlier.append(write)
        origin, home = write.origin, write.home
        for part in write.sources:
            origin.readers[origin.place_of[part]] += 1
        for part in write.targets:
            home.writers[home.place_of[part]] += 1
        if len(home.layout.spaces) == 1:
            return
        for ours, theirs in zip(write.sources, write.targets, strict=True):
            source, target = origin.place_of[ours], home.place_of[theirs]
            if origin.spaces[source] != home.spaces[target]:
                text = f"{key}: {origin.name(source)} is written to {home.name(target)}"
                self.broken("I8", f"{text}, which is in another space")

    def page_landed(self, write: Write) -> int:
        """Record the landing of a write's next page, verify its loan (I2), and return its place."""
        home, (_, target, grant) = write.home, write.key
        place = home.place_of[write.targets[write.next]]
        write.next += 1
        home.writers[place] -= 1
        if not home.lost and not home.is_lent(place, target, grant):
            text = f"{write.key}: a byte lands on {home.name(place)}"
            self.broken("I2", f"{text}, which belongs to {home.owners[place]!r}")
        self.judge.trace(lambda: f"{home.name(place)} of grant {grant} lands")
        return place

    def write_ended(self, write: Write, outcome: WriteOutcome) -> None:
        write.outcome = outcome
        landed = f"{write.next} pages landed"
        self.judge.trace(lambda: f"write of grant {write.key[2]} ends: {outcome.value}, {landed}")
        for part in write.sources:
            write.origin.readers[write.origin.place_of[part]] -= 1
        if outcome is not WriteOutcome.UNPROVEN:
            self.out_of_reach(write)

    def out_of_reach(self, write: Write) -> None:
        """Record that no more of this write can land."""
        for part in write.targets[write.next :]:
            write.home.writers[write.home.place_of[part]] -= 1
        del write.targets[write.next :]

    def died(self, source: int) -> None:
        self.frozen = {write for write in self.frozen if write.key[0] != source}
        for key, writes in self.writes.items():
            if key[0] == source:
                for write in writes:
                    self.out_of_reach(write)

    def route_closed(self, source: Side, target: int) -> None:
        for key, writes in self.writes.items():
            if key[:2] == (source.incarnation, target) and any(w.outcome is None for w in writes):
                self.broken("I2", f"{source.name}: a route is closed while a write runs on it")

    # --- messages

    def sent(self, sender: Side, message: Message | None, lent: Home | None) -> None:
        """Verify a message against what its sender did.

        `lent` records the pool whose pages the sender lends. It is None if the sender is a prefill.
        """
        if message is None:
            return self.broken("I7", f"{sender.name} says what is no message")
        kind, mine = type(message), message.source if lent is None else message.target
        if mine != sender.incarnation:
            text = f"{sender.name} ({sender.incarnation:x}) speaks for {mine:x}: {message}"
            self.broken("I6", text)
        if kind is ChunkDone:
            self._chunk_said(message)  # type: ignore[arg-type]
        elif kind is AbortAck:
            self._ack_said(message)  # type: ignore[arg-type]
        elif kind is Goodbye and lent is None:
            self._goodbye_said(message)  # type: ignore[arg-type]
        elif kind is Bootstrap and lent is not None:
            self._pages_offered(message, lent)  # type: ignore[arg-type]
        return None

    def _chunk_said(self, message: ChunkDone) -> None:
        key = message.source, message.target, message.grant
        writes = self.writes.get(key, [])[: message.seq + 1]
        # The last chunk is empty if decode already has the rest. A plane need not write that chunk.
        begun = message.seq + any(message.pages)
        if len(writes) < begun or any(write.outcome is not WriteOutcome.LANDED for write in writes):
            self.broken("I3", f"{key}: chunk {message.seq} is said to have landed, and has not")
        elif any(message.pages):
            origin = writes[-1].origin
            written = origin.counted([origin.place_of[part] for part in writes[-1].sources])
            if written != message.pages:
                text = f"{key}: chunk {message.seq} has {written} places by space"
                self.broken("I3", f"{text}, and {message.pages} are said to have landed")

    def _ack_said(self, message: AbortAck) -> None:
        key = message.source, message.target, message.grant
        self.acked.add(key)
        for write in self.writes.get(key, ()):
            if write.outcome is None:
                self.broken("I12", f"{key}: acknowledged while a write of it runs")
            elif message.drained and write.outcome is WriteOutcome.UNPROVEN:
                self.broken("I2", f"{key}: said to be drained, and a write of it may still land")

    def _goodbye_said(self, message: Goodbye) -> None:
        pair, unproven = (message.source, message.target), frozenset(message.unproven)
        self.goodbyes[pair] = unproven
        for key, writes in self.writes.items():
            if key[:2] != pair or key[2] in unproven:
                continue
            if any(write.outcome is None for write in writes):
                self.broken("I12", f"{key}: goodbye is said while a write of it runs")
            if any(write.outcome is WriteOutcome.UNPROVEN for write in writes):
                self.broken("I2", f"{key}: goodbye is said, and a write of it may still land")

    def _pages_offered(self, message: Bootstrap, lent: Home) -> None:
        for place in memoryview(message.pages).cast("i"):
            if not lent.is_lent(place, message.target, message.grant):
                owner = lent.owners[place]
                self.broken("I6", f"grant {message.grant} lends {lent.name(place)} of {owner!r}")

    def parted(self, source: int, decodes: Iterable[int]) -> None:
        self.left.update((source, decode) for decode in decodes)

    def settled(self, key: Promise) -> bool:
        """Return True if the source's goodbye ended the loan with this key."""
        return key[:2] in self.left and key[2] not in self.goodbyes.get(key[:2], (key[2],))

    # --- bytes

    def landed(self, arrival: Arrival) -> None:
        """Verify that a room which landed has all its bytes and its handoff (I2, I8, I9)."""
        room, home = arrival.room, arrival.home
        parts = arrival.places if arrival.parts is None else arrival.parts
        for rank, key in enumerate(arrival.keys):
            writes = self.writes.get(key, ())
            there = {page for write in writes for page in write.targets[: write.next]}
            if missing := [part for part in parts if part not in there]:
                text = f"room {room} succeeds, rank {rank} has not written pages {missing}"
                self.broken("I8", text)
            for index, place in enumerate(arrival.places):
                if not arrival.is_right(index, rank):
                    text = f"room {room} succeeds, {home.name(place)} has somebody else's bytes"
                    self.broken("I8", text)
        for place in arrival.places:
            if home.writers[place]:
                text = f"room {room} succeeds while a write may still reach {home.name(place)}"
                self.broken("I2", text)
        if arrival.handoff != handoff_of(arrival.digest):
            self.broken("I9", f"room {room} got another room's handoff")
