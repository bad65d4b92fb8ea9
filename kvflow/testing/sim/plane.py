"""A data plane in virtual time: page after page lands, some writes stall, fail, or land when nobody expects them."""

from __future__ import annotations

from collections.abc import Callable

from kvflow.protocols.ports import Landing
from kvflow.testing.sim.faults import Faults
from kvflow.testing.sim.oracle import Oracle
from kvflow.transports.data.fake import FakeFlight, FakeNetwork, FakePlane, Fault

PAGE_S = (0.0002, 0.004)  # a page takes so long
SLOW_PAGE_S = (0.05, 0.3)
STUCK_S = (0.2, 2.0)  # a stuck write moves on after so long
LATE_S = (0.01, 3.0)  # and what was given up lands after so long


class PacedPlane(FakePlane):
    """Everything a write does is a timer of the process that writes: a halted process writes nothing."""

    drains_at_once = False

    def __init__(self, network: FakeNetwork, oracle: Oracle, faults: Faults) -> None:
        super().__init__(network)
        self._oracle, self._faults = oracle, faults

    def began(self, flight: FakeFlight) -> None:
        fault = self._faults.of_write()
        flight.fault = {"stuck": Fault.STUCK, "late": Fault.LATE, "error": Fault.ERROR}.get(fault)
        self._oracle.write_began(self.address, flight)
        if flight.fault is Fault.STUCK:
            self._after(STUCK_S, self._unstick, flight)
        else:
            self._after(SLOW_PAGE_S if fault == "slow" else PAGE_S, self._slice, flight, fault == "slow")

    def copied(self, flight: FakeFlight, size_bytes: int) -> None:
        self._oracle.page_landed(flight)

    def ended(self, flight: FakeFlight, landing: Landing) -> None:
        self._oracle.write_ended(flight, landing)

    def keep_late(self, flight: FakeFlight) -> None:
        super().keep_late(flight)
        self._after(LATE_S, self._land, flight)

    def _slice(self, flight: FakeFlight, slow: bool) -> None:
        """The page that was under way lands; a cancelled write ends with it."""
        if flight.done.done():
            return
        if flight.cancelled and flight.fault is None:
            flight.landed_bytes += flight.copy(flight.page_bytes)
        flight.move(flight.page_bytes)
        if not flight.done.done():
            self._after(SLOW_PAGE_S if slow else PAGE_S, self._slice, flight, slow)

    def _unstick(self, flight: FakeFlight) -> None:
        flight.fault = None
        self._slice(flight, False)

    def _land(self, flight: FakeFlight) -> None:
        if flight in self._late:
            self._late.remove(flight)
            flight.copy(1 << 62)

    def _after(self, between_s: tuple[float, float], work: Callable[..., None], *arguments: object) -> None:
        loop = self._oracle.loop
        loop.call_later(loop.rng.uniform(*between_s), work, *arguments)
