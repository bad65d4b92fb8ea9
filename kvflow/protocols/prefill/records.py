"""The record of one open room at prefill: its halves, its chunks, and the messages sent for it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machinery import Story
from kvflow.protocols.machines.prefill_room import TERMINAL, PrefillPhase, PrefillRoomState
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import RoomEnding, WriteOutcome
from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.wire.messages import GrantId, Message, RoomId

NO_PAGES: PageIndices = np.empty(0, np.int32)


class Chunk:
    """One chunk handed to the data plane. `outcome` is None while its write runs."""

    __slots__ = (
        "checksum",
        "error",
        "handoff",
        "last",
        "num_pages",
        "outcome",
        "seq",
        "source_pages",
        "write",
    )

    def __init__(
        self, write: int, seq: int, source_pages: PageIndices, last: bool, handoff: bytes
    ) -> None:
        self.write, self.seq, self.source_pages, self.last, self.handoff = (
            write,
            seq,
            source_pages,
            last,
            handoff,
        )
        self.num_pages = len(source_pages)
        self.outcome: WriteOutcome | None = None
        self.checksum, self.error = b"", ""

    @property
    def failure(self) -> Cause:
        """The cause with which this chunk ends its room: its write is unproven, or the data plane
        cancelled it.
        """
        default = "the data plane cannot say what landed"
        if self.outcome is WriteOutcome.CANCELLED:
            default = "the data plane stopped the write"
        return Cause(Code.TRANSFER_ERROR, self.error or default)

    def __str__(self) -> str:
        outcome = "under way" if self.outcome is None else self.outcome.value
        return f"chunk {self.seq}, {self.num_pages} pages: {outcome}"


class PrefillRoomRecord:
    """Everything the endpoint knows about one open room (I5).

    Callers may read it, and may keep it after the room ended.
    """

    __slots__ = (
        *(
            "begun",
            "bootstrap",
            "cancelled_at_s",
            "chunks",
            "deadline_at_s",
            "grant",
            "opened_at_s",
            "own_deadline_at_s",
            "peer",
            "placed",
        ),
        *(
            "moving_at_s",
            "prefix_tokens",
            "prompt",
            "ready_at_s",
            "report",
            "room",
            "sent",
            "serial",
            "state",
            "story",
            "target_pages",
        ),
    )

    def __init__(
        self, serial: int, room: RoomId, phase: PrefillPhase, rendezvous_s: float, now: float
    ) -> None:
        self.serial = serial  # unique, unlike a room id, which may be used again
        self.room = room
        self.state = PrefillRoomState(phase)
        self.opened_at_s = now
        self.deadline_at_s = now + rendezvous_s  # deadline for the arrival of the other half
        self.ready_at_s: float | None = None
        self.moving_at_s: float | None = None
        self.cancelled_at_s = 0.0  # when the writes of a draining room were cancelled
        self.own_deadline_at_s = float("inf")  # the engine's deadline for the whole room
        self.prompt: tuple[int, bytes] | None = None  # token count and digest of the engine's half
        self.bootstrap: tuple[int, bytes] | None = None  # token count and digest of decode's half
        self.begun = False  # the engine has a place for the whole prompt
        self.peer: DecodePeer | None = None
        self.grant = GrantId(0)
        self.prefix_tokens = 0
        self.target_pages = NO_PAGES
        self.placed = 0
        # This is a list although chunks leave at the front, because there are few and a deque is
        # slow to create.
        self.chunks: list[Chunk] = []
        self.report: Chunk | None = None  # the chunk whose end is being reported
        self.sent: list[Message] = []  # repeated when decode asks
        self.story = Story()

    @property
    def phase(self) -> PrefillPhase:
        return self.state.phase

    @property
    def first_cause(self) -> Cause:
        """The first cause that ended the room. An open room and one that succeeded have none."""
        assert self.state.cause is not None
        return self.state.cause

    @property
    def due_at_s(self) -> float:
        """The time at which the room ends unless it moves on.

        While the other half is unknown, that is its rendezvous deadline at the latest. After it
        arrives or is announced, only the engine's own deadline counts.
        """
        if self.state.phase in (PrefillPhase.EXPECTED, PrefillPhase.BOOTSTRAPPED):
            return min(self.deadline_at_s, self.own_deadline_at_s)
        return self.own_deadline_at_s

    @property
    def ended(self) -> bool:
        """True once no more chunks may be queued; writes may still be draining."""
        return self.state.phase is PrefillPhase.DRAINING or self.state.phase in TERMINAL

    @property
    def ending(self) -> RoomEnding:
        """The summary of a room that just ended, for the observer."""
        return RoomEnding(
            phase=self.state.phase,
            cause=self.state.cause,
            num_pages=len(self.target_pages),
            offers_pages=False,
            opened_at_s=self.opened_at_s,
            ready_at_s=self.ready_at_s,
            moving_at_s=self.moving_at_s,
        )

    @property
    def half(self) -> bool:
        """True while only one half of the room arrived."""
        return self.prompt is None or self.bootstrap is None


def pinned_pages(
    writes: Iterable[tuple[PrefillRoomRecord, Chunk]],
    peer: DecodePeer | None = None,
    until_s: float = float("inf"),
) -> int:
    """Count our pages that writes of ended rooms still read, for one decode or for all.

    Only rooms whose writes were cancelled by `until_s` count.
    """
    return sum(
        chunk.num_pages
        for record, chunk in writes
        if record.ended and record.cancelled_at_s <= until_s and peer in (None, record.peer)
    )
