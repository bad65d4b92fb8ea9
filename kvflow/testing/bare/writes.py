"""One write of a data plane in virtual time: page after page lands, and some stall, fail, land late or never end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvflow.protocols.commands import StartWrite
from kvflow.protocols.ports import Landing
from kvflow.testing.bare.decode import Decode, checksum_of
from kvflow.testing.bare.pages import Content
from kvflow.testing.sim.times import LATE_S, PAGE_S, SLOW_PAGE_S, STALL_LOOK_S, STUCK_S

if TYPE_CHECKING:
    from kvflow.testing.bare.prefill import Leg, Prefill

FAILS = ("late", "error")
DAMAGED = b"damaged"


class Write:
    """`sources` and `targets` page by page, `next` of them in the target's memory. All of it is done by the writer's
    process: while that is halted nothing moves."""

    __slots__ = (
        *("cancelled", "contents", "damages", "fault", "key", "landing", "leg", "next", "number", "pace_s", "source"),
        *("sources", "stops_at", "target", "targets"),
    )

    def __init__(self, source: Prefill, target: Decode, leg: Leg, command: StartWrite) -> None:
        self.source, self.target, self.leg, self.number = source, target, leg, command.write
        self.key = source.incarnation, target.incarnation, leg.record.grant
        self.sources: list[int] = command.source_pages.tolist()
        self.targets: list[int] = command.target_pages.tolist()
        self.next = 0
        self.landing: Landing | None = None
        self.cancelled = False
        self.fault = source.world.faults.of_write()
        if self.fault == "stuck" and source.world.freezes():
            self.fault = "frozen"
        self.pace_s = SLOW_PAGE_S if self.fault == "slow" else PAGE_S
        self.stops_at = len(self.targets) // 2 if self.fault in FAILS else len(self.targets)
        self.damages = source.world.damages()
        self.contents: list[Content | None] = []  # what was read, for the checksum

    def begin(self) -> None:
        if self.fault == "stuck":
            self.source.wait(STUCK_S, self._unstick)
        elif self.fault != "frozen":
            self.source.wait(self.pace_s, self._slice)

    def _unstick(self) -> None:
        self.fault = ""
        self._slice()

    def _slice(self) -> None:
        """The page that was under way lands; a cancelled write ends with it."""
        source = self.source
        if source.clock.now < source.stalled_until_s:
            return source.wait(STALL_LOOK_S, self._slice)
        if self.next < self.stops_at:
            self._land_page()
        if self.next == len(self.targets):
            return self._end(Landing.LANDED)
        if self.fault in FAILS:
            if self.next == self.stops_at:
                if self.fault == "late":
                    source.wait(LATE_S, self._land_rest)
                return self._end(Landing.UNPROVEN)
        elif self.cancelled:
            return self._end(Landing.DRAINED)
        return source.wait(self.pace_s, self._slice)

    def _land_page(self) -> None:
        page, source = self.targets[self.next], self.source
        content = source.cells[self.sources[self.next]]
        self.next += 1
        if source.world.variety.verify:
            self.contents.append(content)
            if self.damages and content is not None:
                content = (DAMAGED, content[1])
        target = self.target.pages
        target.writers[page] -= 1
        if target.owners[page] != self.key[2] and not target.lost:
            source.oracle.broken(
                "I2", f"{self.key}: a byte lands on page {page}, which belongs to {target.owners[page]}"
            )
        if source.world.tell is not None:
            source.say(f"page {page} of grant {self.key[2]} lands")
        if content is not None:
            target.cells[page][source.rank] = content

    def _land_rest(self) -> None:
        """What nobody expects any more."""
        while self.next < len(self.targets):
            self._land_page()
        self.out_of_reach()

    def _end(self, landing: Landing) -> None:
        self.landing = landing
        if self.source.world.tell is not None:
            self.source.say(f"write of grant {self.key[2]} ends: {landing.value}, {self.next} pages landed")
        if landing is Landing.UNPROVEN:
            self.source.oracle.doubted.add(self.leg.record.room)
        else:
            self.out_of_reach()
        checksum = checksum_of([*self.contents]) if self.source.world.variety.verify else b""
        self.source.write_ended(self, checksum)

    def out_of_reach(self) -> None:
        """Nothing more of it can land."""
        self.source.reaching.pop(self, None)
        writers = self.target.pages.writers
        for page in self.targets[self.next :]:
            writers[page] -= 1
        del self.targets[self.next :]
