"""Rule book of whole nodes, fed with what data planes, allocators and the wire show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvflow.memory.pool import PagedPool
from kvflow.proof.rules.book import Rules
from kvflow.proof.rules.both_sides import promises_of
from kvflow.proof.rules.transfers import Arrival, Write
from kvflow.proof.rules.words import worded
from kvflow.proof.sim.content import content
from kvflow.proof.sim.dp_groups import DpGroups
from kvflow.proof.sim.loop import Process, VirtualLoop, current_process
from kvflow.proof.sim.pages import Books
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.wire.messages import Message

if TYPE_CHECKING:
    from kvflow.handlers.rooms import DecodeRoom
    from kvflow.protocols.prefill.records import PrefillRoomRecord
    from kvflow.transports.control.memory import Frame
    from kvflow.transports.data.fake import FakeWrite


class Seen:
    """One process of one node, as observed from outside."""

    def __init__(
        self,
        process: Process,
        incarnation: int,
        books: Books,
        pool: PagedPool,
        staging: Books | None = None,
    ) -> None:
        self.process, self.incarnation, self.books, self.pool = process, incarnation, books, pool
        self.lent = books if staging is None else staging  # books of the pool that peers write into
        self.malformed = 0
        self.troubled_at_s = -1.0  # time of its last recovery from a halt, a cut or a jam
        self.stalled_until_s = -1.0  # end of the last stall of its data plane
        self.proven_at_s = float("inf")  # time by which every watcher knows of its death
        self.ended = False  # True after a crash or a close
        self.displaced = False  # True once another process has its address

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def alive(self) -> bool:
        return not self.ended

    @property
    def up(self) -> bool:
        return not self.ended and self.process.parked is None

    def reaches(self, target: int) -> bool:
        """Always True: in this simulation, prefill never gives up on a living decode."""
        return True


class PlaneWrite(Write):
    """A fake plane's write, with the number of bytes that have landed on its next page."""

    __slots__ = ("begun_bytes",)

    begun_bytes: int


class Oracle(Rules):
    """Rule book of one run of whole nodes. It stops the loop at the first violation."""

    def __init__(self, loop: VirtualLoop, tell: Callable[[str], None] | None) -> None:
        super().__init__(loop.time, loop.later, loop.stop, tell)
        self.loop = loop
        self.by_process: dict[Process | None, Seen] = {}
        self.by_incarnation: dict[int, Seen] = {}
        self.rooms.sides = self.by_incarnation
        self.by_address: dict[str, Seen] = {}  # by address of the node's data plane
        self.garbage: set[bytes] = set()  # frames that are not messages
        self.writing: PrefillRoomRecord | None = None  # room whose write is about to start
        self.dp_groups = DpGroups(loop, self.by_incarnation, self.broken)

    def join(self, seen: Seen, address: str) -> None:
        self.by_process[seen.process] = seen
        self.by_incarnation[seen.incarnation] = self.by_address[address] = seen

    # --- the data planes

    def write_began(self, address: str, running: FakeWrite) -> None:
        source, target = self.by_address[address], self.by_address[running.peer.address]
        record = self.writing
        assert record is not None
        write = running.seen = PlaneWrite(  # type: ignore[attr-defined]
            record,
            (source.incarnation, target.incarnation, record.grant),
            running.source_pages.tolist(),
            source.books,
            target.lent,
            running.target_pages.tolist(),
        )
        write.begun_bytes = 0
        self.trace(
            lambda: (
                f"write {write.sources} -> {write.targets} of grant {record.grant}, "
                f"{running.fault or 'no fault'}"
            )
        )
        self.transfers.write_began(write)

    def bytes_landed(self, running: FakeWrite, size_bytes: int) -> None:
        """Count a write's landed bytes, page after page. A page lands with its last byte."""
        write: PlaneWrite = running.seen  # type: ignore[attr-defined]
        write.begun_bytes += size_bytes
        while write.next < len(write.targets):
            needed = running.place_bytes[write.home.spaces[write.targets[write.next]]]
            if write.begun_bytes < needed:
                break
            write.begun_bytes -= needed
            self.transfers.page_landed(write)

    def write_ended(self, running: FakeWrite, outcome: WriteOutcome) -> None:
        self.transfers.write_ended(running.seen, outcome)  # type: ignore[attr-defined]

    def died(self, seen: Seen, proven_after_s: float) -> None:
        if not seen.ended:
            seen.ended, seen.proven_at_s = True, self.loop.time() + proven_after_s
        self.transfers.died(seen.incarnation)

    # --- the wire

    def sent(self, frame: Frame, message: Message | None) -> None:
        sender = self.by_process[current_process()]
        self.trace(lambda: self._worded(frame, message))
        self.transfers.sent(sender, message, sender.lent if frame.to_prefill else None)
        if frame.to_prefill and message is not None:
            self.dp_groups.said(message)

    def _worded(self, frame: Frame, message: Message | None) -> str:
        hearer = None
        if message is not None:
            hearer = self.by_incarnation.get(message.source if frame.to_prefill else message.target)
        return f"to {hearer.name if hearer else 'nobody'}: {worded(message)}"

    def received(self, process: Process | None, frames: list[bytes]) -> None:
        if self.garbage:
            self.by_process[process].malformed += sum(data in self.garbage for data in frames)

    def disturbed(self, frame: Frame) -> None:
        self.rooms.disturbed(frame.control, int.from_bytes(frame.peer[1:], "big"))

    # --- bytes

    def landed(self, room: DecodeRoom, lent: Sequence[int], handoff: bytes) -> None:
        node, record = self.by_process[current_process()], room.record
        assert record is not None
        pages, digest, content_of = room.pages.tolist(), record.prompt.digest, node.books.bytes

        def is_right(index: int, rank: int) -> bool:
            # All ranks write their shares into the same places, so one comparison covers them all.
            if rank:
                return True
            page = pages[index]
            right = self.expected(digest, index, len(pages), content_of.size(page))
            return content_of.read(page) == right

        keys = promises_of(node.incarnation, record)
        self.transfers.landed(Arrival(room.room, keys, node.lent, lent, is_right, digest, handoff))

    def expected(self, digest: bytes, index: int, count: int, size_bytes: int) -> bytes:
        """Return the content of page `index` of the `count` pages that a room transfers."""
        return content(digest, index, size_bytes)
