"""The record of one open room at prefill: its halves, its chunks, and the messages sent for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvflow.protocols.commands import StartWrite
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machinery import Story
from kvflow.protocols.machines.prefill_room import TERMINAL, PrefillPhase, PrefillRoomState
from kvflow.protocols.pages.fine import FinePages
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, PoolLayout
from kvflow.protocols.pages.spaces import Counts, counts_less, counts_sum, spans_at, taken
from kvflow.protocols.ports import RoomEnding, WriteOutcome
from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.wire.messages import GrantId, Incarnation, Message, RoomId

NO_GRANT = GrantId(0)


@dataclass(slots=True, eq=False, repr=False)
class Chunk:
    """One chunk handed to the data plane. `outcome` is None while its write runs."""

    write: int
    seq: int
    source_pages: PageIndices
    counts: Counts  # places of each space
    last: bool
    handoff: bytes
    # Fine pages of each space, if decode's pages have another size; otherwise empty.
    fine: Counts = ()
    outcome: WriteOutcome | None = None
    checksum: bytes = b""
    error: str = ""

    @property
    def num_pages(self) -> int:
        return len(self.source_pages)

    @property
    def failure(self) -> Cause:
        """The cause with which this chunk ends its room if its write is unproven or cancelled."""
        default = "the data plane cannot say what landed"
        if self.outcome is WriteOutcome.CANCELLED:
            default = "the data plane stopped the write"
        return Cause(Code.TRANSFER_ERROR, self.error or default)

    def __str__(self) -> str:
        outcome = "under way" if self.outcome is None else self.outcome.value
        return f"chunk {self.seq}, {self.num_pages} pages: {outcome}"


@dataclass(slots=True, eq=False, repr=False)
class PrefillRoomRecord:
    """Everything the endpoint knows about one open room (I5). Callers may read it."""

    serial: int  # unique, unlike a room id, which may be used again
    room: RoomId
    state: PrefillRoomState
    opened_at_s: float
    deadline_at_s: float  # deadline for the arrival of the other half
    own_deadline_at_s: float = float("inf")  # the engine's deadline for the whole room
    ready_at_s: float | None = None
    moving_at_s: float | None = None
    cancelled_at_s: float = 0.0  # set when the writes of a draining room are cancelled
    prompt: tuple[int, bytes] | None = None  # token count and digest of the engine's half
    bootstrap: tuple[int, bytes] | None = None  # token count and digest of decode's half
    begun: bool = False  # the engine has a place for the whole prompt
    peer: DecodePeer | None = None
    grant: GrantId = NO_GRANT
    prefix_tokens: int = 0
    # The places of decode's pool or, if its pages have another size, their fine pages.
    target_pages: PageIndices = field(default_factory=lambda: NO_PLACES)
    wanted: Counts = ()  # places of our pool, by space, that fill what decode offers
    placed: Counts = ()  # those that chunks have so far
    fine: FinePages | None = None  # the fine pages of our places, if decode's have another size
    # This is a list although chunks leave at the front, because there are few and a deque is slow
    # to create.
    chunks: list[Chunk] = field(default_factory=list)
    report: Chunk | None = None  # the chunk whose end is being reported
    sent: list[Message] = field(default_factory=list)  # messages to repeat when decode asks
    story: Story = field(default_factory=Story)

    @property
    def phase(self) -> PrefillPhase:
        return self.state.phase

    @property
    def first_cause(self) -> Cause:
        """The first cause that ended the room. Only a room that ended without success has one."""
        assert self.state.cause is not None
        return self.state.cause

    @property
    def due_at_s(self) -> float:
        """The time at which a timer ends the room if it is still in this phase. After the other
        half arrives or is announced, only the engine's own deadline counts.
        """
        if self.state.phase in (PrefillPhase.EXPECTED, PrefillPhase.BOOTSTRAPPED):
            return min(self.deadline_at_s, self.own_deadline_at_s)
        return self.own_deadline_at_s

    @property
    def ended(self) -> bool:
        """True once the room ends. Its writes may still be draining."""
        return self.state.phase is PrefillPhase.DRAINING or self.state.phase in TERMINAL

    @property
    def ending(self) -> RoomEnding:
        """The summary of a room that just ended, for the observer."""
        return RoomEnding(
            phase=self.state.phase,
            cause=self.state.cause,
            counts=self.wanted,
            offers_pages=False,
            opened_at_s=self.opened_at_s,
            ready_at_s=self.ready_at_s,
            moving_at_s=self.moving_at_s,
        )

    @property
    def half(self) -> bool:
        """True while only one half of the room has arrived."""
        return self.prompt is None or self.bootstrap is None


def fine_write(layout: PoolLayout, record: PrefillRoomRecord, target: Incarnation) -> StartWrite:
    """Return the write of a room's newest chunk onto pages of another size. `layout` is that of our
    pool. A chunk may fill a part of a target page, and later chunks fill the rest.
    """
    chunk, fine = record.chunks[-1], record.fine
    assert fine is not None
    done = fine.done_after(record.placed)
    sources = fine.of(layout, chunk.source_pages, record.placed)
    record.placed = counts_sum(record.placed, chunk.counts)
    chunk.fine = counts_less(fine.done_after(record.placed), done)
    targets = taken(record.target_pages, spans_at(fine.counts, done, chunk.fine))
    where = (sources, targets, fine.page_sizes, chunk.source_pages)
    return StartWrite(chunk.write, record.serial, target, *where)


def pinned_places(
    writes: Iterable[tuple[PrefillRoomRecord, Chunk]],
    spaces: int,
    peer: DecodePeer | None = None,
    until_s: float = float("inf"),
) -> Counts:
    """Count the places of each space of our pool that writes for ended rooms still read.

    A write counts only if it was cancelled at `until_s` or earlier, and goes to `peer` if that is
    given.
    """
    found: Counts = (0,) * spaces
    for record, chunk in writes:
        if record.ended and record.cancelled_at_s <= until_s and peer in (None, record.peer):
            found = counts_sum(found, chunk.counts)
    return found
