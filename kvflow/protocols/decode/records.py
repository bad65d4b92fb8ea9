"""The record of one open room at decode, and its chunks that wait for a checksum."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machinery import Story
from kvflow.protocols.machines.decode_room import DecodePhase, DecodeRoomState, opened
from kvflow.protocols.machines.ledger import Lease
from kvflow.protocols.pages.fine import FinePages
from kvflow.protocols.pages.spaces import Counts, Span, counts_fit, counts_sum, spans_at
from kvflow.protocols.ports import RoomEnding
from kvflow.protocols.wire.messages import ChunkDone, GrantId, RoomId


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """The length and digest of the prompt, which both halves of a room must agree on, and the
    length of the prefix that decode already has.
    """

    tokens: int
    digest: bytes  # see `arguments.prompt_digest`
    prefix_tokens: int = 0  # a whole number of pages, or the whole prompt


class ChunkCheck:
    """A chunk that prefill reported as landed, but that decode must still verify or copy."""

    __slots__ = ("compares", "error", "fits", "found", "message", "rank")

    def __init__(self, rank: int, message: ChunkDone, compares: bool, fits: bool) -> None:
        """A chunk that does not fit in its room ends the room, and has nothing to verify."""
        self.rank, self.message, self.compares, self.fits = rank, message, compares, fits
        self.found: bytes | None = None if fits else b""
        self.error = ""  # the reason why `found` is empty

    def difference(self) -> Cause | None:
        """Return why the chunk does not count as landed, or None if it does.

        A chunk that does not fit has nothing to verify, and its room's machine ends the room. A
        chunk without pages counts as landed. With verification, both checksums must agree. Without
        it, any non-empty `found` suffices.
        """
        if not (self.fits and any(self.message.pages)):
            return None
        sent, found = self.message.checksum, self.found
        where = f"chunk {self.message.seq} of rank {self.rank}"
        if not self.compares:
            text = f"{where}: the pages could not be brought to where they are used"
            return None if found else Cause(Code.ENGINE_ERROR, f"{text}: {self.error}")
        if not sent:
            return Cause(
                Code.TRANSFER_ERROR,
                f"{where}: prefill sends no checksum, and this decode verifies transfers",
            )
        if not found:
            why = f": {self.error}" if self.error else ""
            return Cause(
                Code.ENGINE_ERROR,
                f"{where}: the checksum of the landed pages could not be computed{why}",
            )
        if found != sent:
            return Cause(
                Code.TRANSFER_ERROR,
                f"{where}: checksum {sent.hex()} at prefill, {found.hex()} at decode",
            )
        return None


@dataclass(slots=True, eq=False, repr=False)
class DecodeRoomRecord:
    """Everything the endpoint knows about one open room (I5). Callers may read it."""

    lease: Lease[PrefillPeer]
    peers: tuple[PrefillPeer, ...]
    prompt: Prompt
    counts: Counts  # places of each space of our pool to fill
    deadline_at_s: float
    opened_at_s: float
    # Decode asks prefill again after this long without progress. The interval grows while the room
    # makes no progress.
    resync_after_s: float
    room: RoomId = field(init=False)
    grant: GrantId = field(init=False)
    state: DecodeRoomState = field(init=False)
    # For each rank, the number of the first chunk that decode has not received yet. In contrast,
    # `state.next_seq` excludes chunks that still wait for a checksum.
    next_seq: list[int] = field(init=False)
    progress_at_s: float = field(init=False)
    packed_pages: bytes = b""
    linked: bool = False  # True once `Linked` was issued
    lent: bool = False  # True once the shell lent the room's pages
    fine: FinePages | None = None  # the fine pages of our places, if prefill's have another size
    begun: int = 0  # one bit per rank that has a place for the whole prompt
    ready_at_s: float | None = None
    moving_at_s: float | None = None
    handoff: bytes = b""
    checks: list[ChunkCheck] = field(default_factory=list)
    story: Story = field(default_factory=Story)

    def __post_init__(self) -> None:
        self.room, self.grant = self.lease.room, self.lease.grant
        self.state = opened(self.counts, len(self.peers))
        self.next_seq = [0] * len(self.peers)
        self.progress_at_s = self.opened_at_s

    def shorten(self, prefix_tokens: int, counts: Counts) -> None:
        # The machine's state includes the number of places, so the machine starts again.
        self.prompt = msgspec.structs.replace(self.prompt, prefix_tokens=prefix_tokens)
        self.counts, self.state = counts, opened(counts, len(self.peers))

    def divide(self, fine: FinePages) -> None:
        """Count chunks in fine pages. Call this before anything is lent."""
        self.fine, self.state = fine, opened(fine.counts, len(self.peers))

    @property
    def num_pages(self) -> int:
        """Places of all spaces to fill."""
        return sum(self.counts)

    @property
    def phase(self) -> DecodePhase:
        return self.state.phase

    @property
    def first_cause(self) -> Cause:
        """The first cause that ended the room. An open room and one that succeeded have none."""
        assert self.state.cause is not None
        return self.state.cause

    @property
    def receiving(self) -> bool:
        """True while chunks may still land."""
        return self.state.phase in (DecodePhase.WAITING_FOR_INPUT, DecodePhase.TRANSFERRING)

    @property
    def ending(self) -> RoomEnding:
        """The summary of a room that just ended, for the observer."""
        return RoomEnding(
            phase=self.state.phase,
            cause=self.state.cause,
            counts=self.counts,
            offers_pages=True,
            opened_at_s=self.opened_at_s,
            ready_at_s=self.ready_at_s,
            moving_at_s=self.moving_at_s,
        )

    def spans_of(self, rank: int, counts: Counts) -> tuple[Span, ...] | None:
        """Return where the next chunk of `rank`, with `counts` places, lies in the room's list, or
        in that of its fine pages. Returns None if it does not fit there, or follows one that does
        not.
        """
        done, whole = self.state.filled[rank], self.state.pages
        for check in self.checks:
            if check.rank == rank:
                if not check.fits:
                    return None
                done = counts_sum(done, check.message.pages)
        if len(counts) != len(done) or not counts_fit(counts_sum(done, counts), whole):
            return None
        return tuple(spans_at(whole, done, counts))
