"""One open room at decode: what is known about it, and the chunks whose checksums are being
computed.
"""

from __future__ import annotations

import msgspec

from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.decode_room import DecodePhase, opened
from kvflow.protocols.machines.ledger import Lease
from kvflow.protocols.machines.story import Story
from kvflow.protocols.ports import RoomEnding
from kvflow.protocols.wire.messages import Bootstrap, ChunkDone, Incarnation


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """What both legs must agree on, and how much of it decode has already."""

    tokens: int
    digest: bytes  # see `wire.codec.prompt_digest`
    prefix_tokens: int = 0  # a whole number of pages, or the whole prompt


class ChunkCheck:
    """A chunk that prefill says has landed, until its checksum is known; chunks land in the order
    they came in.
    """

    __slots__ = ("compares", "error", "found", "message", "rank")

    def __init__(self, rank: int, message: ChunkDone, compares: bool) -> None:
        self.rank, self.message, self.compares = rank, message, compares
        self.found: bytes | None = None
        self.error = ""  # why it is empty

    def difference(self) -> Cause | None:
        """Why the chunk has not landed; None when both checksums agree (where none is compared,
        when there is an answer at all), or when it has no pages."""
        if not self.message.pages:
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


class DecodeRoomRecord:
    """Everything the endpoint knows about one open room (I5).

    Its users may read it, and keep it after its end.
    """

    __slots__ = (
        *(
            "begun",
            "checks",
            "deadline_at_s",
            "grant",
            "handoff",
            "lease",
            "lent",
            "linked",
            "num_pages",
            "opened_at_s",
        ),
        *(
            "moving_at_s",
            "packed_pages",
            "peers",
            "progress_at_s",
            "ready_at_s",
            "prompt",
            "resync_after_s",
            "room",
            "state",
            "story",
        ),
    )

    def __init__(
        self,
        lease: Lease[PrefillPeer],
        peers: tuple[PrefillPeer, ...],
        prompt: Prompt,
        num_pages: int,
        deadline_at_s: float,
        now: float,
    ) -> None:
        self.room, self.grant = lease.room, lease.grant
        self.lease, self.peers, self.prompt, self.num_pages = lease, peers, prompt, num_pages
        self.state = opened(num_pages, len(peers))
        self.packed_pages = b""
        self.linked = False  # the shell was asked for pages
        self.lent = False  # and has brought them
        self.begun = 0  # bit per rank that has a place for the whole prompt
        self.ready_at_s: float | None = None
        self.moving_at_s: float | None = None
        self.deadline_at_s, self.opened_at_s, self.progress_at_s = deadline_at_s, now, now
        # How long it may stand still before prefill is asked; grows while it does.
        self.resync_after_s = 0.0
        self.handoff = b""
        self.checks: list[ChunkCheck] = []
        self.story = Story()

    def shorten(self, prefix_tokens: int, num_pages: int) -> None:
        """Before anything is lent: decode has found more of the prompt than it had when the room
        was announced.
        """
        self.prompt = msgspec.structs.replace(self.prompt, prefix_tokens=prefix_tokens)
        self.num_pages, self.state = num_pages, opened(num_pages, len(self.peers))

    @property
    def phase(self) -> DecodePhase:
        return self.state.phase

    @property
    def first_cause(self) -> Cause:
        """Why it ended; of a room that has, and not in success."""
        assert self.state.cause is not None
        return self.state.cause

    @property
    def receiving(self) -> bool:
        """Chunks may still land."""
        return self.state.phase in (DecodePhase.WAITING_FOR_INPUT, DecodePhase.TRANSFERRING)

    @property
    def ending(self) -> RoomEnding:
        """Of a room that has just ended."""
        return RoomEnding(
            phase=self.state.phase,
            cause=self.state.cause,
            num_pages=self.num_pages,
            offers_pages=True,
            opened_at_s=self.opened_at_s,
            ready_at_s=self.ready_at_s,
            moving_at_s=self.moving_at_s,
        )

    def next_seq(self, rank: int) -> int:
        """The first chunk of `rank` that has not been received."""
        seq = self.state.next_seq[rank]
        return seq + sum(check.rank == rank for check in self.checks) if self.checks else seq

    def first_page(self, rank: int) -> int:
        """Where in the room's pages the next chunk of `rank` begins."""
        return self.state.filled[rank] + sum(
            check.message.pages for check in self.checks if check.rank == rank
        )

    def bootstrap(self, peer: PrefillPeer, target: Incarnation) -> Bootstrap:
        return Bootstrap(
            room=self.room,
            grant=self.grant,
            source=peer.key.incarnation,
            target=target,
            pages=self.packed_pages,
            prompt_tokens=self.prompt.tokens,
            prompt_digest=self.prompt.digest,
            prefix_tokens=self.prompt.prefix_tokens,
        )
