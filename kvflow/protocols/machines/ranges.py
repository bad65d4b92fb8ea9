"""Sets of grants as ranges: what has ended around the few that are still open."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from kvflow.protocols.wire.messages import GrantId

Range = tuple[GrantId, GrantId]
"""The first grant, and the one behind the last."""


class GrantRanges:
    """Disjoint ranges of grants that do not touch, ascending."""

    def __init__(self) -> None:
        self._starts: list[GrantId] = []
        self._ends: list[GrantId] = []

    def __len__(self) -> int:
        """The number of ranges, not of grants."""
        return len(self._starts)

    def __contains__(self, grant: GrantId) -> bool:
        at = bisect_right(self._starts, grant)
        return at > 0 and grant < self._ends[at - 1]

    def add(self, start: GrantId, end: GrantId) -> None:
        """Put the grants from `start` to below `end` into the set, which is joined with what it
        touches.
        """
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high], self._ends[low:high] = [start], [end]

    def pop_through(self, grant: GrantId) -> GrantId:
        """Take out whatever lies below `grant`.

        Returns where the range ends that contains `grant` or ends there, else `grant`; that range
        is taken out, too."""
        taken = bisect_right(self._starts, grant)
        if taken:
            grant = max(grant, self._ends[taken - 1])
            del self._starts[:taken], self._ends[:taken]
        return grant

    def pop_first(self) -> GrantId:
        """Take out the lowest range. Returns its end."""
        del self._starts[0]
        return self._ends.pop(0)
