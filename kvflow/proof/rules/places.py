"""Rules for the places of one pool (I1, I2, I13): the owner of each, and who may still reach it.

A place is a page or a row. Rows are numbered after the pages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from kvflow.protocols.pages.layout import PoolLayout


class Receiver(Protocol):
    def broken(self, invariant: str, text: str) -> None: ...


class Home:
    """Record of every place in one pool. It does not rely on the code under test."""

    def __init__(self, who: str, layout: PoolLayout, judge: Receiver) -> None:
        self.who, self.judge, self.num_pages = who, judge, layout.num_pages
        self.owners: list[Hashable | None] = [None] * layout.num_places
        # Number of writes that may still land in each place.
        self.writers = [0] * layout.num_places
        # Number of model steps and copies that use each place, plus the writes that read from it.
        self.readers = [0] * layout.num_places
        # True after the pool's process died. Late writes into the pool then do no harm.
        self.lost = False

    @property
    def out(self) -> int:
        return len(self.owners) - self.owners.count(None)

    def name(self, place: int) -> str:
        return f"page {place}" if place < self.num_pages else f"row {place - self.num_pages}"

    def is_lent(self, place: int, target: int, grant: int) -> bool:
        """Return True if `target` lends the place under `grant`, even if it is in quarantine."""
        raise NotImplementedError

    def may_be_written(self, owner: Hashable) -> bool:
        """Return True for a room or a quarantine, because a write may still reach its places."""
        raise NotImplementedError

    # --- what happens to places

    def taken(self, places: Iterable[int], owner: Hashable) -> None:
        owners = self.owners
        for place in places:
            if owners[place] is not None:
                self.broken("I1", place, f"of {owners[place]!r} is handed out again")
            owners[place] = owner

    def moved(self, places: Iterable[int], owner: Hashable) -> None:
        reachable = self.may_be_written(owner)
        for place in places:
            self.owners[place] = owner
            if self.writers[place] and not reachable:
                self.broken("I2", place, f"goes to {owner!r} while a write may still reach it")

    def freed(self, places: Iterable[int]) -> None:
        for place in places:
            self.out_of_use(place, "free")
            self.owners[place] = None

    def out_of_use(self, place: int, what: str) -> None:
        """Verify that no reader or writer reaches a place that becomes free or idle.

        `what` names that state in the text of a violation.
        """
        if self.writers[place]:
            self.broken("I2", place, f"is {what} while a write may still reach it")
        if self.readers[place]:
            self.broken("I13", place, f"is {what} while it is read or computed")

    def broken(self, invariant: str, place: int, text: str) -> None:
        self.judge.broken(invariant, f"{self.who}: {self.name(place)} {text}")
