"""The pages of one node, and the rules that end a run."""

from __future__ import annotations

from collections.abc import Hashable


class BrokenError(AssertionError):
    """An invariant is broken. This error ends the run."""


def broken(invariant: str, text: str) -> None:
    """End the run. Raises: BrokenError."""
    raise BrokenError(f"{invariant}: {text}")


class Pool:
    """Pages, the owner of each, and what each contains: the room whose prompt it holds."""

    __slots__ = ("cells", "free", "name", "owners")

    def __init__(self, name: str, num_pages: int) -> None:
        self.name = name
        self.owners: list[Hashable] = [None] * num_pages
        self.cells = [-1] * num_pages
        self.free = list(range(num_pages))

    def take(self, count: int, owner: Hashable) -> list[int] | None:
        """Take pages, or return None and take none if too few are free. A page that is in use must
        not be among them (I1).
        """
        if count > len(self.free):
            return None
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            if self.owners[page] is not None:
                broken("I1", f"page {page} of {self.name} is taken twice")
            self.owners[page] = owner
        return taken

    def give_back(self, pages: list[int], owner: Hashable) -> None:
        for page in pages:
            if self.owners[page] != owner:
                text = f"page {page} of {self.name} is {self.owners[page]!r}'s, not {owner!r}'s"
                broken("I1", text)
            self.owners[page] = None
        self.free += pages
