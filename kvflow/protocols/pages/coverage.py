"""Which bytes of one pool which others hold: what overlaps, what nobody has, and what comes twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvflow.protocols.pages.components import Component, by_name, copies_of

Span = tuple[int, int]
"""The first entry, and the one after the last."""


class Overlap(NamedTuple):
    """What one source component has of one target component: entries `first` to `end` of what both are parts of."""

    source: Component
    target: Component
    first: int
    end: int


def overlaps(source: Iterable[Component], target: Iterable[Component]) -> Iterator[Overlap]:
    """For each target component, copies included, the parts of it that the source has, each from one copy: the one of
    its own number if there is one."""
    there: dict[str, list[list[Component]]] = {}
    for copies in copies_of(source):
        there.setdefault(copies[0].name, []).append(copies)
    for t in target:
        for copies in there.get(t.name, ()):
            s = next((c for c in copies if c.replica == t.replica), copies[0])
            first, end = max(s.start, t.start), min(s.end, t.end)
            if first < end:
                yield Overlap(s, t, first, end)


def spans_of(components: Iterable[Component]) -> dict[str, list[Span]]:
    """The entries of each name, in order, copies once."""
    return {name: sorted({(c.start, c.end) for c in group}) for name, group in by_name(components).items()}


def without(wanted: Sequence[Span], given: Sequence[Span]) -> list[Span]:
    """What of `wanted` is not in `given`; both in order, and `wanted` without overlaps."""
    left: list[Span] = []
    for first, end in wanted:
        at = first
        for low, high in given:
            if high > at and low < end:
                if low > at:
                    left.append((at, low))
                at = high
        if at < end:
            left.append((at, end))
    return left
