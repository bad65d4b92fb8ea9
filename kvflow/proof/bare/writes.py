"""Writes of a data plane in virtual time: pages land one by one, late, or never."""

from __future__ import annotations

from kvflow.proof.bare.decode import Decode, checksum_of
from kvflow.proof.bare.holds import Leg
from kvflow.proof.bare.node import Node
from kvflow.proof.bare.pages import Content, DecodePages, Pages
from kvflow.proof.rules.transfers import Write
from kvflow.proof.sim.times import LATE_S, PAGE_S, SLOW_PAGE_S, STALL_LOOK_S, STUCK_S
from kvflow.protocols.commands import StartWrite
from kvflow.protocols.ports import WriteOutcome

FAILS = ("late", "error")
DAMAGED = b"damaged"


class Writer(Node):
    is_prefill = True
    rank: int
    pages: Pages
    cells: list[Content | None]

    def write_ended(self, write: PacedWrite, checksum: bytes) -> None:
        raise NotImplementedError


class PacedWrite(Write):
    """A write by a process of the world. It stalls while the process is halted."""

    __slots__ = (
        "cancelled",
        "contents",
        "damages",
        "fault",
        "leg",
        "number",
        "pace_s",
        "source",
        "stops_at",
    )
    home: DecodePages

    def __init__(self, source: Writer, target: Decode, leg: Leg, command: StartWrite) -> None:
        key = source.incarnation, target.incarnation, leg.record.grant
        sources, targets = command.source_pages.tolist(), command.target_pages.tolist()
        super().__init__(leg.record, key, sources, source.pages, target.pages, targets)
        self.source, self.leg, self.number = source, leg, command.write
        self.cancelled = False
        # A chunk without pages never reaches the data plane, so it cannot fail there.
        self.fault = source.world.faults.of_write() if sources else ""
        if self.fault == "stuck" and source.world.freezes():
            self.fault = "frozen"
        self.pace_s = SLOW_PAGE_S if self.fault == "slow" else PAGE_S
        self.stops_at = len(targets) // 2 if self.fault in FAILS else len(targets)
        self.damages = source.world.damages()
        self.contents: list[Content | None] = []  # contents that the checksum covers

    def begin(self) -> None:
        if self.fault == "stuck":
            self.source.wait(STUCK_S, self.thaw)
        elif self.fault == "frozen":
            self.source.rules.transfers.frozen.add(self)
        else:
            self.source.wait(self.pace_s, self._slice)

    def thaw(self) -> None:
        self.fault = ""
        self.source.rules.transfers.frozen.discard(self)
        self._slice()

    def _slice(self) -> None:
        """Land the next page, or end the write. A cancelled write lands one more page and ends."""
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
                # The write failed before its first byte left, which proves that no byte arrives.
                elif not self.next:
                    return self._end(WriteOutcome.CANCELLED)
                return self._end(WriteOutcome.UNPROVEN)
        elif self.cancelled:
            return self._end(WriteOutcome.CANCELLED)
        return source.wait(self.pace_s, self._slice)

    def _land_page(self) -> None:
        source, content = self.source, self.source.cells[self.sources[self.next]]
        if source.world.variety.verify:
            self.contents.append(content)
            if self.damages and content is not None:
                content = (DAMAGED, content[1])
        part = self.targets[self.next]
        source.rules.transfers.page_landed(self)
        if content is not None:
            self.home.cells[part][source.rank] = content

    def _land_rest(self) -> None:
        while self.next < len(self.targets):
            self._land_page()

    def _end(self, outcome: WriteOutcome) -> None:
        self.source.rules.transfers.write_ended(self, outcome)
        checksum = checksum_of([*self.contents]) if self.source.world.variety.verify else b""
        self.source.write_ended(self, checksum)
