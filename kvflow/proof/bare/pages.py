"""Places of one pool as the world sees them: who owns each, and what it contains.

The places of all spaces are numbered in one list: see `protocols.pages.spaces`.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

from kvflow.proof.rules.places import Home, Receiver
from kvflow.protocols.pages.layout import Counts, PoolLayout, Space

Token = tuple[int, int]
"""A space, and the first token of a page or of a part of one. It is 0 for a row."""
Content = tuple[bytes, Token]
"""A prompt's digest, and where in the prompt it is. Damage in transit replaces the digest with
`DAMAGED`.
"""
Lease = tuple[int, int]
"""Owner of pages that a decode lends: the decode's incarnation, and the grant."""


def splits_into(layout: PoolLayout, page_sizes: Counts) -> Counts:
    """Return the number of parts of a place in each space, if the two sides of a run have pages of
    different sizes: parts have `page_sizes` tokens. Returns an empty tuple if they have not.
    """
    if not page_sizes:
        return ()
    both = zip(layout.spaces, page_sizes, strict=True)
    return tuple(space.page_size // size if size else 1 for space, size in both)


@cache
def tokens_of(
    spaces: tuple[Space, ...], splits: Counts, tokens: int, prefix_tokens: int = 0
) -> tuple[tuple[Token, ...], ...]:
    """Return what each place of a room holds: a token for each part of it. The list has the places
    that fill a prompt after its prefix. The code under test has no share in it.
    """
    found: list[tuple[Token, ...]] = []
    for number, space in enumerate(spaces):
        split = splits[number] if splits else 1
        if space.in_rows:
            found.append(((number, 0),))
        elif prefix_tokens < tokens:
            size = space.page_size
            begin = first_token(space, tokens, prefix_tokens)
            for start in range(begin // size * size, tokens, size):
                found.append(tuple((number, start + part * size // split) for part in range(split)))
    return tuple(found)


def first_token(space: Space, tokens: int, prefix_tokens: int) -> int:
    """Return the first token that a room needs in a space."""
    return max(prefix_tokens, tokens - space.window if space.window else 0)


class Pages(Home):
    def __init__(
        self, who: str, judge: Receiver, layout: PoolLayout, page_sizes: Counts = ()
    ) -> None:
        super().__init__(who, layout, judge, splits_into(layout, page_sizes))
        # The first part of each place.
        self._parts = [0] * layout.num_places
        for part, place in reversed(list(enumerate(self.place_of))):
            self._parts[place] = part
        # The free places of each space.
        self._free = [
            list(range(base, base + count))
            for base, count in zip(layout.bases, layout.counts, strict=True)
        ]

    def parts_of(self, place: int) -> range:
        """Return the parts of a place, or the place itself if places are not divided."""
        split = self.splits[self.spaces[place]] if self.splits else 1
        return range(self._parts[place], self._parts[place] + split)

    def tokens_of(self, tokens: int, prefix_tokens: int = 0) -> tuple[tuple[Token, ...], ...]:
        """Return what the places of a room hold; see `tokens_of`."""
        return tokens_of(self.layout.spaces, self.splits, tokens, prefix_tokens)

    def is_lent(self, place: int, target: int, grant: int) -> bool:
        return self.owners[place] == (target, grant)

    def may_be_written(self, owner: Hashable) -> bool:
        return False

    def take(self, counts: Counts, owner: Hashable) -> list[int] | None:
        """Take places of each space. Returns None, and takes none, if too few are free."""
        for free, count in zip(self._free, counts, strict=True):
            if count > len(free):
                return None
        taken = [
            free.pop() for free, count in zip(self._free, counts, strict=True) for _ in range(count)
        ]
        self.taken(taken, owner)
        return taken

    def check(self, pages: list[int], owner: Hashable, what: str) -> None:
        """Verify that `owner` has these pages. `what` is the action in the text of a violation."""
        for page in pages:
            if self.owners[page] != owner:
                self.broken("I1", page, f"of {self.owners[page]!r} is {what} by {owner!r}")

    def give_back(self, pages: list[int], owner: Hashable) -> None:
        self.check(pages, owner, "given back")
        self.freed(pages)
        for page in pages:
            self._free[self.spaces[page]].append(page)


class DecodePages(Pages):
    """Pages of a decode. Those of a room belong to its lease, or to the user that keeps them."""

    def __init__(
        self, who: str, judge: Receiver, layout: PoolLayout, page_sizes: Counts = ()
    ) -> None:
        super().__init__(who, judge, layout, page_sizes)
        # Contents by part and rank, because each rank writes its own share of a page.
        self.cells: list[dict[int, Content]] = [{} for _ in self.place_of]

    def needed(
        self, places: list[int], tokens: int, prefix_tokens: int
    ) -> list[list[tuple[int, Token]]]:
        """Return, for each place of a room, the parts that have to be written, with what they hold
        then. A part before the prefix or the window, or after the prompt, need not be.
        """
        found: list[list[tuple[int, Token]]] = []
        for place, held in zip(places, self.tokens_of(tokens, prefix_tokens), strict=True):
            space = self.layout.spaces[self.spaces[place]]
            size = space.page_size // len(held)
            begin = first_token(space, tokens, prefix_tokens)
            both = zip(self.parts_of(place), held, strict=True)
            found.append(
                [
                    (part, token)
                    for part, token in both
                    if space.in_rows or (token[1] < tokens and token[1] + size > begin)
                ]
            )
        return found

    def keep(self, pages: list[int], lease: Lease) -> Hashable:
        user = ("user", *lease)
        self.check(pages, lease, "kept")
        self.moved(pages, user)
        return user

    def inherit(self, kept: set[Lease]) -> None:
        """Free all pages but those of the leases in `kept`, for the next decode over the pool."""
        for owner in set(self.owners) - kept - {None}:
            pages = [page for page, other in enumerate(self.owners) if other == owner]
            self.give_back(pages, owner)
