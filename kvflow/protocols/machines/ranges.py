"""Sets of grants, stored as ranges because many grants end around a few that stay open."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from kvflow.protocols.wire.messages import GrantId

Range = tuple[GrantId, GrantId]
"""The first grant, and the one after the last."""


class GrantRanges:
    """A set of grants, kept as ascending ranges with a gap between any two."""

    def __init__(self) -> None:
        self._starts: list[GrantId] = []
        self._ends: list[GrantId] = []

    def __len__(self) -> int:
        """Return the number of ranges, not of grants."""
        return len(self._starts)

    def __contains__(self, grant: GrantId) -> bool:
        at = bisect_right(self._starts, grant)
        return at > 0 and grant < self._ends[at - 1]

    def add(self, start: GrantId, end: GrantId) -> None:
        """Add the grants from `start` to below `end`, and merge them with the ranges they touch."""
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high], self._ends[low:high] = [start], [end]

    def pop_through(self, grant: GrantId) -> GrantId:
        """Remove every range that begins at or below `grant`. Returns `grant`, or the end of the
        last removed range if that end is higher.
        """
        taken = bisect_right(self._starts, grant)
        if taken:
            grant = max(grant, self._ends[taken - 1])
            del self._starts[:taken], self._ends[:taken]
        return grant

    def pop_first(self) -> GrantId:
        del self._starts[0]
        return self._ends.pop(0)
