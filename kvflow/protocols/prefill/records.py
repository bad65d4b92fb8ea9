"""One room at prefill: its two halves, the chunks under way, and what decode was sent about it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.prefill_room import TERMINAL, PrefillPhase, PrefillRoomState
from kvflow.protocols.machines.story import Story
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
        """Why its room fails, where nobody had asked for the write to end without landing."""
        default = "the data plane cannot say what landed"
        if self.outcome is WriteOutcome.CANCELLED:
            default = "the data plane stopped the write"
        return Cause(Code.TRANSFER_ERROR, self.error or default)

    def __str__(self) -> str:
        outcome = "under way" if self.outcome is None else self.outcome.value
        return f"chunk {self.seq}, {self.num_pages} pages: {outcome}"


class PrefillRoomRecord:
    """Everything the endpoint knows about one open room (I5).

    Its users may read it, and keep it after its end.
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
        self.serial = serial  # room ids may be used again, serials are not
        self.room = room
        self.state = PrefillRoomState(phase)
        self.opened_at_s = now
        self.deadline_at_s = now + rendezvous_s  # for the other half; then the engine's own
        self.ready_at_s: float | None = None
        self.moving_at_s: float | None = None
        self.cancelled_at_s = 0.0  # when its writes were; of a room that drains
        self.own_deadline_at_s = float("inf")
        self.prompt: tuple[int, bytes] | None = None  # token count and digest: the engine's half
        self.bootstrap: tuple[int, bytes] | None = None  # and decode's
        self.begun = False  # the engine has a place for the whole prompt
        self.peer: DecodePeer | None = None
        self.grant = GrantId(0)
        self.prefix_tokens = 0
        self.target_pages = NO_PAGES
        self.placed = 0
        self.chunks: list[Chunk] = []  # few, and a deque is slow to make
        self.report: Chunk | None = None  # the one whose end is being told
        self.sent: list[Message] = []  # what ends the room is sent again when decode asks
        self.story = Story()

    @property
    def phase(self) -> PrefillPhase:
        return self.state.phase

    @property
    def first_cause(self) -> Cause:
        """Why it ended; of a room that has, and not in success."""
        assert self.state.cause is not None
        return self.state.cause

    @property
    def due_at_s(self) -> float:
        """Half a room waits for its other half; one whose partner has announced itself, or is here,
        for its own deadline."""
        if self.state.phase in (PrefillPhase.EXPECTED, PrefillPhase.BOOTSTRAPPED):
            return min(self.deadline_at_s, self.own_deadline_at_s)
        return self.own_deadline_at_s

    @property
    def ended(self) -> bool:
        """Nothing more may be sent; writes may still be draining."""
        return self.state.phase is PrefillPhase.DRAINING or self.state.phase in TERMINAL

    @property
    def ending(self) -> RoomEnding:
        """Of a room that has just ended."""
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
        """Only one side of it is here."""
        return self.prompt is None or self.bootstrap is None


def pinned_pages(
    writes: Iterable[tuple[PrefillRoomRecord, Chunk]],
    peer: DecodePeer | None = None,
    until_s: float = float("inf"),
) -> int:
    """Count our pages that writes of rooms which ended by `until_s` still read, of one decode or of
    all.
    """
    return sum(
        chunk.num_pages
        for record, chunk in writes
        if record.ended and record.cancelled_at_s <= until_s and peer in (None, record.peer)
    )
