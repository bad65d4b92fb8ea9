"""One write of a data plane in virtual time: pages land one by one; some writes stall, fail, land
late or never end.
"""

from __future__ import annotations

from kvflow.proof.bare.decode import Decode, checksum_of
from kvflow.proof.bare.holds import Leg, Write
from kvflow.proof.bare.node import Node
from kvflow.proof.bare.pages import Content, name_of
from kvflow.proof.sim.times import LATE_S, PAGE_S, SLOW_PAGE_S, STALL_LOOK_S, STUCK_S
from kvflow.protocols.commands import StartWrite
from kvflow.protocols.ports import WriteOutcome

FAILS = ("late", "error")
DAMAGED = b"damaged"


class Writer(Node):
    """Node whose data plane writes."""

    rank: int
    cells: list[Content | None]  # content of its pages
    reaching: dict[PacedWrite, None]  # writes that may still land

    def write_ended(self, write: PacedWrite, checksum: bytes) -> None:
        raise NotImplementedError


class PacedWrite(Write):
    """Write by the writer's process: it stands still while the process is halted."""

    __slots__ = ("cancelled", "contents", "damages", "fault", "pace_s", "source", "stops_at")

    def __init__(self, source: Writer, target: Decode, leg: Leg, command: StartWrite) -> None:
        key = source.incarnation, target.incarnation, leg.record.grant
        sources, targets = command.source_pages.tolist(), command.target_pages.tolist()
        super().__init__(command.write, key, leg, sources, target.pages, targets)
        self.source = source
        self.cancelled = False
        # A chunk without pages passes no data plane, so it cannot fail there.
        self.fault = source.world.faults.of_write() if sources else ""
        if self.fault == "stuck" and source.world.freezes():
            self.fault = "frozen"
        self.pace_s = SLOW_PAGE_S if self.fault == "slow" else PAGE_S
        self.stops_at = len(targets) // 2 if self.fault in FAILS else len(targets)
        self.damages = source.world.damages()
        self.contents: list[Content | None] = []  # read so far, for the checksum

    def begin(self) -> None:
        if self.fault == "stuck":
            self.source.wait(STUCK_S, self.thaw)
        elif self.fault != "frozen":
            self.source.wait(self.pace_s, self._slice)

    def thaw(self) -> None:
        self.fault = ""
        self._slice()

    def _slice(self) -> None:
        """Land the page under way. A cancelled write ends with it."""
        source = self.source
        if self.targets and source.clock.now < source.stalled_until_s:
            return source.wait(STALL_LOOK_S, self._slice)
        if self.next < self.stops_at:
            self._land_page()
        if self.next == len(self.targets):
            return self._end(WriteOutcome.LANDED)
        if self.fault in FAILS:
            if self.next == self.stops_at:
                if self.fault == "late":
                    source.wait(LATE_S, self._land_rest)
                # It failed before its first byte left, which proves that no byte arrives.
                elif not self.next:
                    return self._end(WriteOutcome.CANCELLED)
                return self._end(WriteOutcome.UNPROVEN)
        elif self.cancelled:
            return self._end(WriteOutcome.CANCELLED)
        return source.wait(self.pace_s, self._slice)

    def _land_page(self) -> None:
        """Write one page into the target's pool, and verify that it belongs to the grant (I2)."""
        page, source = self.targets[self.next], self.source
        content = source.cells[self.sources[self.next]]
        self.next += 1
        if source.world.variety.verify:
            self.contents.append(content)
            if self.damages and content is not None:
                content = (DAMAGED, content[1])
        target = self.home
        target.writers[page] -= 1
        owner, (_, lender, grant) = target.owners[page], self.key
        # Pages of a decode that left are renamed, and its writers may still reach them.
        if owner != grant and owner != name_of(lender, grant) and not target.lost:
            source.oracle.broken(
                "I2", f"{self.key}: a byte lands on page {page}, which belongs to {owner}"
            )
        if source.world.tell is not None:
            source.say(f"page {page} of grant {self.key[2]} lands")
        if content is not None:
            target.cells[page][source.rank] = content

    def _land_rest(self) -> None:
        """Land the rest of a write that was reported as unproven."""
        while self.next < len(self.targets):
            self._land_page()
        self.out_of_reach()

    def _end(self, outcome: WriteOutcome) -> None:
        self.outcome = outcome
        if self.source.world.tell is not None:
            self.source.say(
                f"write of grant {self.key[2]} ends: {outcome.value}, {self.next} pages landed"
            )
        if outcome is not WriteOutcome.LANDED:
            self.source.oracle.stopped.add(self.leg.record.room)
        if outcome is not WriteOutcome.UNPROVEN:
            self.out_of_reach()
        checksum = checksum_of([*self.contents]) if self.source.world.variety.verify else b""
        self.source.write_ended(self, checksum)

    def out_of_reach(self) -> None:
        """Record that no more of this write can land."""
        self.source.reaching.pop(self, None)
        writers = self.home.writers
        for page in self.targets[self.next :]:
            writers[page] -= 1
        del self.targets[self.next :]
