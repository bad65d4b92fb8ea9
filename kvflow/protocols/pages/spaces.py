"""The spaces of a pool: which kinds of places it has, and how many of each a prompt needs.

A model may keep several things for a request, each with pages of its own size and its own numbers:
all tokens for full attention, the last tokens for a sliding window, one row of state for Mamba or
linear attention, pages of an index. Each is a *space*. A *place* is a page or a row. A room lends
and sends places of every space.

In a list of places, such as a room's, place i of a space has the index `base + i`, where `base` is
the number of places in the spaces before it. The list has the places of the first space first, then
those of the second, and so on.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.kinds import PAGE, ROW

PageIndices = NDArray[np.int32]
Places = tuple[PageIndices, ...]
"""The places of one request, int32 [n] for each space, numbered within the space."""
Counts = tuple[int, ...]
"""A number of places for each space of a pool."""
Span = tuple[int, int]
"""The first position in a list, and the one after the last."""

MAX_SPACES = 16
MAX_PAGES = 1 << 26
MAX_ROWS = 1 << 20
MAX_PAGE_SIZE = 1 << 16
# The indices of places are 32-bit integers, which number all places of the largest pool.
MAX_PLACES = (1 << 31) - 1
# The longest name, tag, fingerprint or format, in characters. Refusals quote these texts, and the
# length of a refusal is bounded.
MAX_LABEL = 256

NO_PLACES: PageIndices = np.empty(0, dtype=np.int32)
"""No places."""


class Space(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` places of one kind, numbered from 0.

    A place is a page of `page_size` tokens, or a row if `page_size` is 0. A room needs one row,
    and as many pages as its prompt fills. If `window` is not 0, only the pages that hold the last
    `window` tokens of the prompt are needed.
    """

    name: str
    count: int
    page_size: int
    window: int = 0

    @property
    def in_rows(self) -> bool:
        return not self.page_size

    @property
    def unit(self) -> str:
        """The kind of a place, "page" or "row"."""
        return PAGE if self.page_size else ROW

    def wanted(self, tokens: int, prefix_tokens: int = 0) -> int:
        """Return how many places a prompt of `tokens` tokens fills, if its first `prefix_tokens`
        tokens are there already. The row is always filled anew.
        """
        if not self.page_size:
            return 1
        return -(-tokens // self.page_size) - self.first(tokens, prefix_tokens)

    def first(self, tokens: int, prefix_tokens: int = 0) -> int:
        """Return the number of pages of a prompt before the first one that is filled, 0 for rows.

        That page may begin inside the prefix: where the other side of a room has smaller pages, a
        prefix is a whole number of those.
        """
        if not self.page_size:
            return 0
        if prefix_tokens >= tokens:
            return -(-tokens // self.page_size)
        first = prefix_tokens // self.page_size
        return max(first, (tokens - self.window) // self.page_size) if self.window else first


def check_spaces(spaces: tuple[Space, ...]) -> None:
    """Check the spaces of a layout from the wire. Raises: LayoutError naming the field."""
    if not 1 <= len(spaces) <= MAX_SPACES:
        raise LayoutError(f"{len(spaces)} spaces: a pool has 1 to {MAX_SPACES}")
    if spaces[0].in_rows:
        raise LayoutError(
            f"space {spaces[0].name!r}: the first space of a pool has pages, which count the "
            "tokens of prompts"
        )
    for i, space in enumerate(spaces):
        # Only the first space keeps the short names that pools of one space have always had.
        named = "" if not i or space.in_rows else f"space {space.name!r}: "
        if not space.name or len(space.name) > MAX_LABEL:
            raise LayoutError(
                f"name of space {i} has {len(space.name)} characters, not 1..{MAX_LABEL}"
            )
        most = MAX_ROWS if space.in_rows else MAX_PAGES
        for field, value, least, limit in (
            (f"num_{space.unit}s", space.count, 1, most),
            ("page_size", space.page_size, 0, MAX_PAGE_SIZE),
            ("window", space.window, 0, MAX_PLACES),
        ):
            if not least <= value <= limit:
                raise LayoutError(f"{named}{field} {value} is outside {least}..{limit}")
        if space.in_rows and space.window:
            raise LayoutError(f"space {space.name!r} has rows, and rows have no window")
    if len({space.name for space in spaces}) < len(spaces):
        raise LayoutError(f"two spaces have one name: {', '.join(s.name for s in spaces)}")


def counts_fit(counts: Counts, most: Counts) -> bool:
    """Return True if no count is above the count of the same space in `most`."""
    # Most pools have one space, and a generator takes several times as long as this comparison.
    if len(counts) == 1:
        return counts[0] <= most[0]
    return all(count <= limit for count, limit in zip(counts, most, strict=True))


def counts_sum(counts: Counts, more: Counts) -> Counts:
    if len(counts) == 1:
        return (counts[0] + more[0],)
    return tuple(count + other for count, other in zip(counts, more, strict=True))


def counts_less(counts: Counts, less: Counts) -> Counts:
    if len(counts) == 1:
        return (counts[0] - less[0],)
    return tuple(count - other for count, other in zip(counts, less, strict=True))


def spans_at(wanted: Counts, done: Counts, counts: Counts) -> list[Span]:
    """Return where a chunk lies in a list of `wanted` places: for each space of which the chunk has
    places, the `counts` positions after the first `done` ones.
    """
    # Rooms of one space are common, and the loop below takes several times as long for them.
    if len(counts) == 1:
        return [(done[0], done[0] + counts[0])] if counts[0] else []
    spans: list[Span] = []
    base = 0
    for size, first, count in zip(wanted, done, counts, strict=True):
        if count:
            spans.append((base + first, base + first + count))
        base += size
    return spans


def taken(places: NDArray[Any], spans: list[Span] | tuple[Span, ...]) -> PageIndices:
    """Return the places at the given positions of a list, without a copy if there is one span."""
    if len(spans) == 1:
        first, end = spans[0]
        return places[first:end]
    return np.concatenate([NO_PLACES, *(places[first:end] for first, end in spans)])
