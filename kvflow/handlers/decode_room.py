"""A room at decode, as its user holds it: everything known about the room lives in this object (I5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Self

from kvflow.handlers.callbacks import call_all
from kvflow.handlers.verify import ChunkChecks
from kvflow.protocols.errors import Cause, Code, MisuseError, room_error
from kvflow.protocols.machines.decode_room import (
    TERMINAL,
    DecodeCommand,
    DecodeEvent,
    DecodeKind,
    DecodePhase,
    DecodeRoom,
    opened,
    step,
)
from kvflow.protocols.machines.ledger import Grant
from kvflow.protocols.machines.loan import LoanKey, LoanKind, LoanPhase
from kvflow.protocols.machines.story import Line, Story
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.wire.messages import ChunkDone

if TYPE_CHECKING:
    from kvflow.handlers.decode import DecodeHandlers
    from kvflow.handlers.link import Link


class DecodeSession:
    """One room's pages and their fate. Close it, or use it as an async context manager; then nothing is left behind."""

    def __init__(
        self,
        home: DecodeHandlers,
        links: Sequence[Link],
        grant: Grant,
        prompt_tokens: int,
        digest: bytes,
        deadline_at_s: float,
    ) -> None:
        self._home = home
        self.links = links
        self.grant = grant
        self.room = grant.room
        self.prompt_tokens, self.digest = prompt_tokens, digest
        self.deadline_at_s = deadline_at_s
        self.state: DecodeRoom = opened(len(grant.pages), len(links))
        self.progress_at_s = home.now()
        self.opened_at_s = self.progress_at_s
        self._handoff = b""
        self._landed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._on_end: list[Callable[[], None]] = []
        self._kept = False
        self._story = Story()
        self._checks = None if home.checksums is None else ChunkChecks(self, home.pages, home.checksums)

    @property
    def pages(self) -> PageIndices:
        """The room's pages, int32 [pages of the prompt]; theirs to read after `landed`."""
        return self.grant.pages

    @property
    def ended(self) -> bool:
        return self.state.phase in TERMINAL

    def story(self) -> Sequence[Line]:
        return self._story.lines()

    async def landed(self) -> bytes:
        """Wait for every page from every rank. Returns prefill's hand-over.

        Raises: KvflowError by what ended the room (see errors.py); its `code` is the first cause.
        """
        return await asyncio.shield(self._landed)

    def keep(self, owner: Hashable) -> PageIndices:
        """Take the landed pages over: they are `owner`'s now, and closing the room leaves them alone.

        Raises: MisuseError before they have landed, or a second time.
        """
        if self.state.phase is not DecodePhase.SUCCESS or self._kept:
            raise MisuseError(f"room {self.room}: pages can be kept once, after landed()")
        self._home.pages.move(self.grant.pages, self.grant.owner, owner)
        self._kept = True
        return self.grant.pages

    def close(self, cause: Cause | None = None) -> None:
        """End the room, in any state, any number of times. Before it landed this is an abort: the caller is told at
        once, and pages that are still lent come home when their loans end."""
        self.feed(DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=cause or Cause(Code.CLIENT_GONE)))
        if self.state.phase is DecodePhase.SUCCESS and not self._kept:
            self._kept = True
            self._home.ledger.room_ended(self.grant)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back once, when the room has ended; at once if it has."""
        if self.ended:
            callback()
        else:
            self._on_end.append(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def open(self) -> bool:
        """Chunks may still land."""
        return self.state.phase in (DecodePhase.WAITING_FOR_INPUT, DecodePhase.TRANSFERRING)

    def next_seq(self, rank: int) -> int:
        """The first chunk of `rank` not heard of."""
        return self.state.next_seq[rank] + (self._checks.under_way(rank) if self._checks is not None else 0)

    def in_doubt(self, rank: int) -> bool:
        """`rank` has said that it cannot vouch for its writes, and cannot take that back."""
        return any(loan.phase is LoanPhase.DOUBTFUL for loan in self.grant.loans if loan.link is self.links[rank])

    def chunk_done(self, rank: int, message: ChunkDone) -> None:
        """An in-order ChunkDone: it has landed; where transfers are verified, as soon as its checksum agrees."""
        self.progress_at_s = self._home.now()
        if message.last:  # proof, whatever its checksum says
            link = self.links[rank]
            self._home.ledger.feed(LoanKey(link.source, link.rank, message.grant), LoanKind.LANDED)
        if self._checks is not None and self.open:
            self._checks.begin(rank, message)
        else:
            self.chunk_landed(rank, message)

    def chunk_landed(self, rank: int, message: ChunkDone) -> None:
        """The hand-over is the lowest rank's that brings one."""
        if message.handoff and not self._handoff:
            self._handoff = message.handoff
        self.feed(DecodeEvent(DecodeKind.CHUNK_LANDED, rank, message.seq, message.pages, message.last))

    def chunk_differs(self, cause: Cause) -> None:
        """What landed is not what prefill sent: the room ends here, and a prefill that still writes is told why."""
        self._home.counts.mismatched += 1
        self.close(cause)

    def feed(self, event: DecodeEvent) -> None:
        """The one place that changes the room's state."""
        self.state, commands = step(self.state, event)
        if commands or event.kind is not DecodeKind.CHUNK_LANDED:
            self._story.tell(self._home.now(), event.kind, self.state.phase, str(event.cause or ""))
        for command in commands:
            _RUN[command](self)

    def _send_bootstrap(self) -> None:
        self._home.lend(self)

    def _recall_loans(self) -> None:
        self.grant.on_change = self._loans_changed
        self._home.ledger.recall(self.grant, self._cause)
        if self.grant.on_change is not None:  # else they ended at once, and the room with them
            self._loans_changed()

    def _tell_landed(self) -> None:
        if not self._landed.done():
            self._landed.set_result(self._handoff)

    def _tell_failed(self) -> None:
        if self._checks is not None:
            self._checks.cancel()
        if not self._landed.done():
            self._landed.set_exception(room_error(self._cause))
            self._landed.exception()  # the room's user may never ask: then nobody is to be warned

    @property
    def _cause(self) -> Cause:
        return self.state.cause or Cause(Code.PROTOCOL_ERROR)

    def _loans_changed(self) -> None:
        """Called by the ledger once loans are recalled: tell the machine when none is left that could be proven."""
        if not self.grant.loans:
            self.feed(DecodeEvent(DecodeKind.LOANS_ENDED))
        elif self.grant.doubtful:
            cause = Cause(Code.TRANSFER_ERROR, "prefill cannot prove where its writes went")
            self.feed(DecodeEvent(DecodeKind.LOANS_DOUBTFUL, cause=cause))

    def _end(self) -> None:
        if self.state.phase is DecodePhase.SUCCESS:
            self._home.forget(self, None)
        else:
            self._kept = True
            self._home.ledger.room_ended(self.grant)
            self._home.forget(self, self._cause)
        call_all(self._on_end, self._home.counts)


_RUN: dict[DecodeCommand, Callable[[DecodeSession], None]] = {
    DecodeCommand.SEND_BOOTSTRAP: DecodeSession._send_bootstrap,
    DecodeCommand.RECALL_LOANS: DecodeSession._recall_loans,
    DecodeCommand.TELL_LANDED: DecodeSession._tell_landed,
    DecodeCommand.TELL_FAILED: DecodeSession._tell_failed,
    DecodeCommand.END: DecodeSession._end,
}
