"""Planted bugs in the spaces of a room: counted wrongly, or free at different times."""

from __future__ import annotations

from typing import Any

from kvflow.handlers.rooms import RoomPages
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.swap import swapped
from kvflow.proof.walk.plants_spaces import counts_in_another_space, drops_a_space
from kvflow.protocols.machines.ownership import PageKind

PLANTS: list[Plant] = []
bug = planting(PLANTS)

bug(
    "drops a space from a loan",
    "A lease counts no places of the last space.",
    nodes=(5, "I5"),
    bare=(1, "I5"),
)(drops_a_space)
bug(
    "counts a chunk's places in the wrong space",
    "The places of a chunk fill another space of its room.",
    nodes=(0, "I4"),
    bare=(0, "I4"),
)(counts_in_another_space)


@bug(
    "frees one space of a room early",
    nodes=(21, "I2"),
    unseen="it is in decode's shell, and bare endpoints have a plant of their own for it",
)
def frees_one_space_early() -> Installed:
    """The places of the last space return to the store when a room goes into quarantine."""
    original = RoomPages.feed

    def feed(self: RoomPages, kind: PageKind, *rest: Any, **more: Any) -> None:
        original(self, kind, *rest, **more)
        stores, layout = self._stores, self._stores.layout
        if kind is PageKind.QUARANTINE and not self.state.own and stores.staging is None:
            last = self.pages[self.pages >= layout.bases[-1]]
            if len(layout.spaces) > 1 and last.size:
                self.pages = self.pages[self.pages < layout.bases[-1]]
                stores.pages.give_back(last, self._owner)

    return swapped(RoomPages, "feed", feed)
