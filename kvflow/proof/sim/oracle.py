"""Record of what really happened to pages, bytes and messages (I1-I3, I6-I9, I12, I13), made at the
data planes, the allocators and the wire. The handlers' own books are never consulted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from kvflow.memory.pool import PagedPool
from kvflow.proof.sim.content import content, handoff_of
from kvflow.proof.sim.dp_groups import DpGroups
from kvflow.proof.sim.loop import Process, VirtualLoop, current_process
from kvflow.proof.sim.outcome import Violation
from kvflow.proof.sim.pages import Books, grant_of
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.wire.messages import AbortAck, Bootstrap, ChunkDone, Goodbye, Message

if TYPE_CHECKING:
    from kvflow.handlers.rooms import DecodeRoom
    from kvflow.protocols.prefill.records import PrefillRoomRecord
    from kvflow.transports.control.memory import Frame
    from kvflow.transports.data.fake import FakeWrite


_DULL = {
    "source",
    "target",
    "layout",
    "address",
    "wire_version",
    "prompt_digest",
    "handoff",
    "checksum",
    "asked",
}


class Key(NamedTuple):
    """Promise: who may write, into whose pages, under which grant."""

    source: int
    target: int
    grant: int


class Seen:
    """One life of one node, as the world knows it."""

    def __init__(
        self,
        process: Process,
        incarnation: int,
        books: Books,
        pool: PagedPool,
        staging: Books | None = None,
    ) -> None:
        self.process, self.incarnation, self.books, self.pool = process, incarnation, books, pool
        self.lent = books if staging is None else staging  # of places that peers write
        self.malformed = 0
        self.troubled_at_s = -1.0  # when it was last cut off or halted
        self.stalled_until_s = -1.0  # until then its data plane moves no bytes
        self.proven_at_s = float("inf")  # when every watcher knows of its death
        self.ended = False  # crashed, or closed
        self.displaced = False  # alive, but another process has its address

    @property
    def alive(self) -> bool:
        return not self.ended

    @property
    def up(self) -> bool:
        """True while alive and not halted."""
        return not self.ended and self.process.parked is None


class Write:
    """One write as the oracle sees it: `sources` and `targets` page by page. The first `next`
    targets have landed, and some bytes of the one after.
    """

    __slots__ = ("begun_bytes", "key", "next", "outcome", "source", "sources", "target", "targets")

    def __init__(self, running: FakeWrite, key: Key, source: Seen, target: Seen) -> None:
        self.key, self.source, self.target = key, source, target
        self.sources: list[int] = running.source_pages.tolist()
        self.targets: list[int] = running.target_pages.tolist()
        self.next = self.begun_bytes = 0
        self.outcome: WriteOutcome | None = None


class Oracle:
    """Judge of one run. It keeps the first violation, and stops the loop at it."""

    def __init__(self, loop: VirtualLoop, tell: Callable[[str], None] | None) -> None:
        self.loop = loop
        self.violation: Violation | None = None
        # True during the clean-up after a run, whose events prove no violation.
        self.over = False
        self.by_process: dict[Process | None, Seen] = {}
        self.by_incarnation: dict[int, Seen] = {}
        self.by_address: dict[str, Seen] = {}  # of a data plane
        self.writes: dict[Key, list[Write]] = {}
        self.acked: set[Key] = set()
        # Grants that a goodbye names as unproven, by source and target.
        self.goodbyes: dict[tuple[int, int], frozenset[int]] = {}
        self.left: set[tuple[int, int]] = set()  # pairs whose goodbye was acknowledged
        # Time of the last disturbance, by link.
        self.link_disturbed_at_s: dict[tuple[str, bytes], float] = {}
        self.garbage: set[bytes] = set()  # frames that are no message
        self.writing: PrefillRoomRecord | None = None  # room whose write is about to start
        self.dp_groups = DpGroups(loop, self.by_incarnation, self.broken)
        self._tell = tell

    def join(self, seen: Seen, address: str) -> None:
        self.by_process[seen.process] = self.by_incarnation[seen.incarnation] = self.by_address[
            address
        ] = seen

    def broken(self, invariant: str, text: str) -> None:
        if self.violation is None and not self.over:
            self.violation = Violation(invariant, text, self.loop.time())
            self.trace(lambda: f"VIOLATION of {invariant}: {text}")
            self.loop.stop()

    def trace(self, line: Callable[[], str]) -> None:
        """Add a line to the story. The line is made only if the story has a reader."""
        if self._tell is not None:
            self._tell(line())

    # --- writes

    def write_began(self, address: str, running: FakeWrite) -> None:
        """Record a write, and verify that its grant is open and that it repeats no page (I3,
        I6).
        """
        source, target, record = (
            self.by_address[address],
            self.by_address[running.peer.address],
            self.writing,
        )
        key = Key(source.incarnation, target.incarnation, record.grant if record is not None else 0)
        write = running.seen = Write(running, key, source, target)  # type: ignore[attr-defined]
        earlier = self.writes.setdefault(key, [])
        self.trace(
            lambda: (
                f"write {write.sources} -> {write.targets} of grant {key.grant}, "
                f"{running.fault or 'no fault'}"
            )
        )
        if key in self.acked or key[:2] in self.goodbyes:
            self.broken("I6", f"{key} is closed, and a write begins")
        # The bytes of an earlier write may still arrive, so its targets stay taken.
        if any(page in other.targets for other in earlier for page in write.targets):
            self.broken("I3", f"{key}: {write.targets} are written again under the same grant")
        earlier.append(write)
        for page in write.sources:
            source.books.readers[page] += 1
        for page in write.targets:
            target.lent.writers[page] += 1

    def bytes_landed(self, running: FakeWrite, size_bytes: int) -> None:
        """Count bytes of a write, in the order of its pages. A page has landed with its last
        byte.
        """
        write: Write = running.seen  # type: ignore[attr-defined]
        write.begun_bytes += size_bytes
        while write.next < len(write.targets):
            in_rows = write.targets[write.next] >= write.target.lent.num_pages
            needed = running.row_bytes if in_rows else running.page_bytes
            if write.begun_bytes < needed:
                break
            write.begun_bytes -= needed
            self._page_landed(write)

    def _page_landed(self, write: Write) -> None:
        page = write.targets[write.next]
        write.next += 1
        books = write.target.lent
        books.writers[page] -= 1
        if grant_of(owner := books.owners[page]) != write.key.grant and not books.lost:
            self.broken(
                "I2", f"{write.key}: a byte lands on {books.name(page)}, which belongs to {owner!r}"
            )
        self.trace(lambda: f"{books.name(page)} of grant {write.key.grant} lands")

    def write_ended(self, running: FakeWrite, outcome: WriteOutcome) -> None:
        write: Write = running.seen  # type: ignore[attr-defined]
        write.outcome = outcome
        self.trace(
            lambda: (
                f"write of grant {write.key.grant} ends: {outcome.value}, {write.next} pages landed"
            )
        )
        for page in write.sources:
            write.source.books.readers[page] -= 1
        if outcome is not WriteOutcome.UNPROVEN:
            self._out_of_reach(write)

    def died(self, seen: Seen, proven_after_s: float) -> None:
        """Record that the data plane of a node copies no more bytes."""
        if not seen.ended:
            seen.ended, seen.proven_at_s = True, self.loop.time() + proven_after_s
        for key, writes in self.writes.items():
            if key.source == seen.incarnation:
                for write in writes:
                    self._out_of_reach(write)

    def _out_of_reach(self, write: Write) -> None:
        for page in write.targets[write.next :]:
            write.target.lent.writers[page] -= 1
        write.targets = write.targets[: write.next]

    # --- words

    def sent(self, frame: Frame, message: Message | None) -> None:
        """Verify a message against what its sender did."""
        process = current_process()
        sender = self.by_process[process]
        if message is None:
            return self.broken("I7", f"{sender.process.name} says what is no message")
        self.trace(lambda: self._worded(frame, message))
        mine = message.target if frame.to_prefill else message.source
        if mine != sender.incarnation:
            self.broken(
                "I6",
                f"{sender.process.name} ({sender.incarnation:x}) speaks for {mine:x}: {message}",
            )
        if frame.to_prefill:
            self.dp_groups.said(message)
        if type(message) is ChunkDone:
            self._chunk_said(Key(message.source, message.target, message.grant), message)
        elif type(message) is AbortAck:
            self._ack_said(Key(message.source, message.target, message.grant), message)
        elif type(message) is Goodbye and not frame.to_prefill:
            self._goodbye_said(message)
        elif type(message) is Bootstrap:
            for page in memoryview(message.pages).cast("i"):
                if grant_of(owner := sender.lent.owners[page]) != message.grant:
                    return self.broken(
                        "I6", f"grant {message.grant} lends {sender.lent.name(page)} of {owner!r}"
                    )
        return None

    def _worded(self, frame: Frame, message: Message) -> str:
        """Return a message as text: its receiver, and the fields that differ between messages."""
        hearer = self.by_incarnation.get(message.source if frame.to_prefill else message.target)
        said = {
            name: getattr(message, name) for name in message.__struct_fields__ if name not in _DULL
        }
        if type(message) is Bootstrap:
            said["pages"] = memoryview(message.pages).cast("i").tolist()
        words = ", ".join(f"{name}={value}" for name, value in said.items())
        return (
            f"to {hearer.process.name if hearer else 'nobody'}: {type(message).__name__}({words})"
        )

    def _chunk_said(self, key: Key, message: ChunkDone) -> None:
        writes = self.writes.get(key, [])[: message.seq + 1]
        # The last chunk may be empty, if decode has the rest.
        begun = message.seq + bool(message.pages)
        if len(writes) < begun or any(write.outcome is not WriteOutcome.LANDED for write in writes):
            self.broken("I3", f"{key}: chunk {message.seq} is said to have landed, and has not")
        elif message.pages and len(writes[-1].sources) != message.pages:
            self.broken(
                "I3",
                f"{key}: chunk {message.seq} has {len(writes[-1].sources)} pages, not "
                f"{message.pages}",
            )

    def _ack_said(self, key: Key, message: AbortAck) -> None:
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
            if key[:2] != pair or key.grant in unproven:
                continue
            if any(write.outcome is None for write in writes):
                self.broken("I12", f"{key}: goodbye is said while a write of it runs")
            if any(write.outcome is WriteOutcome.UNPROVEN for write in writes):
                self.broken("I2", f"{key}: goodbye is said, and a write of it may still land")

    def parted(self, source: int, decodes: Iterable[int]) -> None:
        """Record that these decodes acknowledged the prefill's goodbye, or sent their own."""
        self.left.update((source, decode) for decode in decodes)

    def settled(self, key: Key) -> bool:
        """Return True if the goodbye of its source ended this loan."""
        return key[:2] in self.left and key.grant not in self.goodbyes.get(key[:2], (key.grant,))

    def received(self, process: Process | None, frames: list[bytes]) -> None:
        if self.garbage:
            self.by_process[process].malformed += sum(data in self.garbage for data in frames)

    def disturbed(self, frame: Frame) -> None:
        """Record a disturbance of the link, from which both ends have to recover."""
        self.link_disturbed_at_s[frame.control, frame.peer] = self.loop.time()

    # --- bytes

    def landed(self, room: DecodeRoom, handoff: bytes) -> None:
        """Verify a room that landed at decode: every page from every rank, the right bytes and
        hand-over.
        """
        node, record = self.by_process[current_process()], room.record
        books, lent = node.books, room.lent.tolist()
        assert record is not None
        pages, digest = room.pages.tolist(), record.prompt.digest
        for rank, peer in enumerate(record.peers):
            writes = self.writes.get(Key(peer.key.incarnation, node.incarnation, record.grant), [])
            there = {page for write in writes for page in write.targets[: write.next]}
            if missing := [page for page in lent if page not in there]:
                self.broken(
                    "I8", f"room {room.room} succeeds, rank {rank} has not written pages {missing}"
                )
        for index, (page, place) in enumerate(zip(pages, lent, strict=True)):
            if node.lent.writers[place]:
                self.broken(
                    "I2",
                    f"room {room.room} succeeds while a write may still reach "
                    f"{node.lent.name(place)}",
                )
            if books.bytes.read(page) != self.expected(
                digest, index, len(pages), books.bytes.size(page)
            ):
                self.broken(
                    "I8", f"room {room.room} succeeds, {books.name(page)} has somebody else's bytes"
                )
        if handoff != handoff_of(digest):
            self.broken("I9", f"room {room.room} got another room's hand-over")

    def expected(self, digest: bytes, index: int, count: int, size_bytes: int) -> bytes:
        """Return the content of page `index` of the `count` pages that a room brings for a prompt
        of that digest.
        """
        return content(digest, index, size_bytes)
