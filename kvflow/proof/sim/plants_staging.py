"""Planted bugs in decodes with staging: places freed too early, and rooms that wait forever."""

from __future__ import annotations

from typing import Any

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.rooms import RoomPages
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.swap import swapped
from kvflow.protocols import waiting
from kvflow.protocols.machines.ownership import PageKind

PLANTS: list[Plant] = []
bug = planting(PLANTS, "no decode has staging")


@bug("staging given back before the copy ended", nodes=(32, "I13"))
def given_back_before_the_copy_ended() -> Installed:
    """A room does not know of the copies that still read its places of staging."""
    original = RoomPages.feed

    def feed(self: RoomPages, kind: PageKind, *rest: Any, **more: Any) -> None:
        if self.state.staging is None or kind not in (PageKind.USE, PageKind.IDLE):
            original(self, kind, *rest, **more)

    return swapped(RoomPages, "feed", feed)


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
