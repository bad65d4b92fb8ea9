"""Rules for the places of one pool (I1, I2, I13): the owner of each, and who may still reach it.

A place is a page or a row. The places of all spaces are numbered in one list: see
`protocols.pages.spaces`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import cache
from typing import Protocol

from kvflow.protocols.pages.layout import Counts, PoolLayout


class Receiver(Protocol):
    def broken(self, invariant: str, text: str) -> None: ...


@cache
def spaces_of_places(counts: Counts) -> tuple[int, ...]:
    """Return the space of each place, in a pool with `counts` places of its spaces."""
    return tuple(space for space, count in enumerate(counts) for _ in range(count))


class Home:
    """Record of every place in one pool. It does not rely on the code under test."""

    def __init__(self, who: str, layout: PoolLayout, judge: Receiver, splits: Counts = ()) -> None:
        """If the pages of the other side have another size, writes name parts of places, and
        `splits` is the number of parts of a place in each space.
        """
        self.who, self.judge, self.layout, self.splits = who, judge, layout, splits
        # The place that each part is in.
        self.place_of: Sequence[int] = range(layout.num_places)
        if splits:
            spaces = zip(layout.bases, layout.counts, splits, strict=True)
            self.place_of = [
                base + number
                for base, count, split in spaces
                for number in range(count)
                for _ in range(split)
            ]
        self.owners: list[Hashable | None] = [None] * layout.num_places
        # The space of each place.
        self.spaces = spaces_of_places(layout.counts)
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
        index = self.spaces[place]
        space, number = self.layout.spaces[index], place - self.layout.bases[index]
        # A page of the first space needs no name: all pools have that space.
        return (
            f"{space.unit} {number}{f' of {space.name!r}' if index and not space.in_rows else ''}"
        )

    def counted(self, places: Collection[int]) -> Counts:
        """Return how many of these places each space has."""
        if len(self.layout.spaces) == 1:
            return (len(places),)
        found = [0] * len(self.layout.spaces)
        for place in places:
            found[self.spaces[place]] += 1
        return tuple(found)

    def owned(self) -> dict[Hashable, Counts]:
        """Return how many places of each space every owner has."""
        if len(self.layout.spaces) == 1:
            in_all = Counter(self.owners)
            del in_all[None]
            return {owner: (count,) for owner, count in in_all.items()}
        found: dict[Hashable, list[int]] = {}
        if self.owners.count(None) < len(self.owners):
            for owner, space in zip(self.owners, self.spaces, strict=True):
                if owner is not None:
                    found.setdefault(owner, [0] * len(self.layout.spaces))[space] += 1
        return {owner: tuple(counts) for owner, counts in found.items()}

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
