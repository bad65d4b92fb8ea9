"""Planted bugs of decodes with staging: places that return too early, rooms whose turn never
comes.
"""

from __future__ import annotations

from typing import Any

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.verify import ChunkVerifier
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.swap import swapped
from kvflow.protocols import waiting
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Arrivals

PLANTS: list[Plant] = []
bug = planting(PLANTS, "no decode has staging")


class _Unheld:
    """Arrivals whose places are not held while they are copied."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.begin, self.lent = arrivals.begin, self

    def hold(self, pages: PageIndices) -> None: ...

    def unhold(self, pages: PageIndices) -> None: ...


@bug("staging given back before the copy ended", nodes=(32, "I13"))
def given_back_before_the_copy_ended() -> Installed:
    """Nothing holds places of staging while they are copied to the room's own pages."""
    original = ChunkVerifier.begin

    def begin(verifier: ChunkVerifier, *arguments: Any) -> None:
        if verifier._arrivals is None:
            return original(verifier, *arguments)
        with swapped(verifier, "_arrivals", _Unheld(verifier._arrivals)):
            return original(verifier, *arguments)

    return swapped(ChunkVerifier, "begin", begin)


@bug("rooms that wait for staging are not woken", nodes=(5, "I7"))
def waiting_rooms_not_woken() -> Installed:
    """Places of staging come back, and the rooms that wait for them are not looked at."""
    return swapped(DecodeShell, "_lend_waiting", DecodeShell.run)


@bug("a large room is passed for ever", nodes=(141, "I7"))
def large_rooms_always_passed() -> Installed:
    """Rooms that fit into what is free of the staging go before one that does not, however long
    that one has waited.
    """
    return swapped(waiting, "PASSED_FOR_S", float("inf"))
