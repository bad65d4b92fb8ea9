"""Entries that two pools have in common, that no rank sends, or that two ranks send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvflow.protocols.pages.components import Component, by_name, copies_of
from kvflow.protocols.pages.layout import MAX_LABEL, PoolLayout

MAX_SHOWN = 5  # number of differences that one refusal names
Span = tuple[int, int]
"""The first entry, and the one after the last."""
Spans = Mapping[str, Sequence[Span]]
"""Spans by component name, in ascending order."""
# Peers with opaque pools may cut a page into different components, so only the whole page counts:
# one entry without a name.
_PAGE: Spans = {"": ((0, 1),)}
_Entry = Annotated[int, Meta(ge=0, le=1 << 40)]


class Served(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of each page, or row, that a prefill rank sends: entries `start` to `end` of the
    component `name`. A rank with an opaque pool sends whole pages, as one entry without a name.
    """

    name: Annotated[str, Meta(max_length=MAX_LABEL)]
    start: _Entry
    end: _Entry


class Overlap(NamedTuple):
    """The entries [first, end) that two components share, numbered within the larger component of
    which both are parts.
    """

    source: Component
    target: Component
    first: int
    end: int


def overlaps(
    source: Iterable[Component], target: Iterable[Component], only: Spans | None = None
) -> Iterator[Overlap]:
    """Yield, for each component of the target, the entries that the source has too. Each copy at
    the target counts as a component.

    Each overlap names one copy at the source: the copy with the target's number or, if the source
    has none, the first copy. If `only` is given, all other entries are left out.
    """
    there: dict[str, list[list[Component]]] = {}
    for copies in copies_of(source):
        there.setdefault(copies[0].name, []).append(copies)
    for t in target:
        for copies in there.get(t.name, ()):
            s = next((c for c in copies if c.replica == t.replica), copies[0])
            both = (max(s.start, t.start), min(s.end, t.end))
            for low, high in (both,) if only is None else only.get(t.name, ()):
                if (first := max(low, both[0])) < (end := min(high, both[1])):
                    yield Overlap(s, t, first, end)


def spans_of(components: Iterable[Component]) -> Mapping[str, list[Span]]:
    """Return the spans of each component name, in order. Copies of a part count once."""
    return {
        name: sorted({(c.start, c.end) for c in group})
        for name, group in by_name(components).items()
    }


def within(spans: Sequence[Span], limits: Sequence[Span]) -> list[Span]:
    """Return the parts of `spans` that are in `limits`."""
    both = ((max(first, low), min(end, high)) for first, end in spans for low, high in limits)
    return [(first, end) for first, end in both if first < end]


def without(wanted: Sequence[Span], given: Sequence[Span]) -> list[Span]:
    """Return the parts of `wanted` that are not in `given`. Both are sorted, and `wanted` has no
    overlaps.
    """
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


def served_of(layout: PoolLayout) -> tuple[Served, ...]:
    """List the parts that a prefill rank sends if it sends all of `layout`."""
    spans = _PAGE if layout.tag else spans_of(layout.components)
    return tuple(Served(name, *span) for name, group in spans.items() for span in group)


def sends_all(layout: PoolLayout, what: tuple[Served, ...]) -> bool:
    """Return True if `what` has the same parts as `served_of(layout)`, in any order."""
    # The order almost always matches, and comparing tuples costs less than building sets.
    return what == (served := served_of(layout)) or set(what) == set(served)


def spans_served(what: Iterable[Served]) -> Spans:
    found: dict[str, list[Span]] = {}
    for each in what:
        found.setdefault(each.name, []).append((each.start, each.end))
    return {name: sorted(spans) for name, spans in found.items()}


def uncovered(layout: PoolLayout, ranks: Sequence[tuple[Served, ...]]) -> str:
    """Return the reason why the ranks do not send every byte of a pool exactly once, or an empty
    string if they do (I8). `ranks` has the parts that each rank sends, by rank number.
    """
    wanted: Spans = _PAGE if layout.tag else spans_of(layout.components)
    given: dict[str, list[tuple[int, int, int]]] = {name: [] for name in wanted}
    found: list[str] = []
    for rank, what in enumerate(ranks):
        for each in what:
            if each.name not in given:
                found.append(f"{each.name!r} of rank {rank} has no place at decode")
            elif each.start >= each.end:
                found.append(
                    f"{each.name}: rank {rank} says that it sends entries {each.start}..{each.end}"
                )
            else:
                given[each.name].append((each.start, each.end, rank))
    for name, spans in wanted.items():
        found += _faults(name, spans, sorted(given[name]))
    return "; ".join(first_few(found))


def first_few(found: list[str]) -> list[str]:
    """Return the first `MAX_SHOWN` differences, followed by a text that counts the others. Models
    have many layers, so there may be many differences.
    """
    more = len(found) - MAX_SHOWN
    return found if more <= 0 else [*found[:MAX_SHOWN], f"and {more} more"]


def _faults(
    name: str, wanted: Sequence[Span], given: Sequence[tuple[int, int, int]]
) -> Iterator[str]:
    called = name or "a page"
    for (_, high, rank), (low, end, other) in pairwise(given):
        if low < high:
            yield (
                f"{called}: entries {low}..{min(high, end)} come from rank {rank} and from rank "
                f"{other}"
            )
    for first, end in without(wanted, [(low, high) for low, high, _ in given]):
        whole = (first, end) == (wanted[0][0], wanted[-1][1]) and len(wanted) == 1
        yield (
            f"{called}: {'no rank sends it' if whole else f'no rank sends entries {first}..{end}'}"
        )
