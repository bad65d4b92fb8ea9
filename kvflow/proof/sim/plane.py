"""Data plane in virtual time. Pages land one by one, and some writes stall, fail, or land late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.times import LATE_S, PAGE_S, SLOW_PAGE_S, STALL_LOOK_S, STUCK_S
from kvflow.proof.sim.variety import LATE, LATE_FENCE_S, NEVER, PROMPT
from kvflow.protocols.errors import TransferError
from kvflow.protocols.ports import PlaneAddress, WriteOutcome
from kvflow.transports.data.fake import FakeNetwork, FakePlane, FakeWrite, Fault


class PacedPlane(FakePlane):
    """Data plane whose writes advance by timers of the writing process, and halt with it."""

    drains_at_once = False

    def __init__(self, network: FakeNetwork, oracle: Oracle, faults: Faults, fences: str) -> None:
        """Join `network`. `fences` is one of the values that `variety` defines."""
        super().__init__(network)
        self._oracle, self._faults, self._fences = oracle, faults, fences
        # Start and end of the worker's last stall.
        self._stalls = (0.0, 0.0)

    @property
    def stalled_s(self) -> float:  # type: ignore[override]
        begun_s, end_s = self._stalls
        now = self._oracle.loop.time()
        return now - begun_s if self.writes and begun_s <= now < end_s else 0.0

    def stall(self, for_s: float) -> None:
        """Halt the worker for `for_s` seconds. 0 ends an earlier halt."""
        now = self._oracle.loop.time()
        self._stalls = (now, now + for_s)

    def die(self) -> None:
        super().die()
        proven_after_s = {PROMPT: 0.0, LATE: LATE_FENCE_S}.get(self._fences, float("inf"))
        self._oracle.died(self._oracle.by_address[self.address], proven_after_s)

    async def fence(self, writer: PlaneAddress) -> None:
        if self._fences == NEVER:
            raise TransferError("no death can be proven from here")
        await super().fence(writer)
        if self._fences == LATE:
            await asyncio.sleep(self._oracle.loop.rng.uniform(0, LATE_FENCE_S))

    def began(self, write: FakeWrite) -> None:
        fault = self._faults.of_write()
        write.fault = {"stuck": Fault.STUCK, "late": Fault.LATE, "error": Fault.ERROR}.get(fault)
        self._oracle.write_began(self.address, write)
        if write.fault is Fault.STUCK:
            self._after(STUCK_S, self._unstick, write)
        else:
            slow = fault == "slow"
            self._after(SLOW_PAGE_S if slow else PAGE_S, self._slice, write, slow)

    def copied(self, write: FakeWrite, size_bytes: int) -> None:
        self._oracle.bytes_landed(write, size_bytes)

    def ended(self, write: FakeWrite, outcome: WriteOutcome) -> None:
        self._oracle.write_ended(write, outcome)

    def keep_late(self, write: FakeWrite) -> None:
        super().keep_late(write)
        self._after(LATE_S, self._land, write)

    def _slice(self, write: FakeWrite, slow: bool) -> None:
        """Land the current page. A cancelled write ends after that page."""
        if write.done.done():
            return
        if self._oracle.loop.time() < self._stalls[1]:
            return self._after(STALL_LOOK_S, self._slice, write, slow)
        # A real plane cannot recall the page that is under way when the cancel comes.
        if write.cancelled and write.fault is None:
            write.landed_bytes += write.copy(write.page_bytes)
        write.move(write.page_bytes)
        if not write.done.done():
            self._after(SLOW_PAGE_S if slow else PAGE_S, self._slice, write, slow)
        return None

    def _unstick(self, write: FakeWrite) -> None:
        write.fault = None
        self._slice(write, False)

    def _land(self, write: FakeWrite) -> None:
        if write in self._late:
            self._late.remove(write)
            write.copy(1 << 62)

    def _after(
        self, between_s: tuple[float, float], work: Callable[..., None], *arguments: object
    ) -> None:
        loop = self._oracle.loop
        loop.call_later(loop.rng.uniform(*between_s), work, *arguments)
