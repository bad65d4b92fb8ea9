"""Differences between two pools that prevent a copy from one into the other."""

from __future__ import annotations

from collections.abc import Iterator

from kvflow.protocols.pages.components import Component, by_name
from kvflow.protocols.pages.coverage import Spans, first_few, spans_of, within, without
from kvflow.protocols.pages.fine import undividable
from kvflow.protocols.pages.kinds import SLOT
from kvflow.protocols.pages.layout import PoolLayout, unit_named

Sides = tuple[str, str]


def differences(
    source: PoolLayout,
    target: PoolLayout,
    sides: Sides = ("prefill", "decode"),
    *,
    partly: bool = False,
    only: Spans | None = None,
) -> list[str]:
    """Return the reasons why `source` cannot be copied into `target`, in words for an operator. The
    list names only the first few differences, and is empty if there are none.

    `sides` gives the names of the two pools in the text. With `partly`, the target may have entries
    that the source lacks, because other ranks send them. If `only` is given, no other entries are
    compared. Pools whose pages have different sizes differ: describe them in the same pages first
    (`fine.in_common_pages`).
    """
    found: list[str] = []
    if source.fingerprint != target.fingerprint:
        found.append(_differ("model fingerprint", source.fingerprint, target.fingerprint, sides))
    found.extend(_space_differences(source, target, sides))
    if source.tag or target.tag:
        found.extend(_opaque_differences(source, target, sides))
    else:
        found.extend(_typed_differences(source, target, sides, partly, only))
    return first_few(found)


def _differ(what: str, ours: object, theirs: object, sides: Sides) -> str:
    shown = [repr(value) if isinstance(value, str) else str(value) for value in (ours, theirs)]
    return f"{what}: {sides[0]} {shown[0]}, {sides[1]} {shown[1]}"


def _space_differences(source: PoolLayout, target: PoolLayout, sides: Sides) -> Iterator[str]:
    ours, theirs = ([s.name for s in layout.spaces] for layout in (source, target))
    if ours != theirs:
        yield _differ("spaces", ", ".join(ours), ", ".join(theirs), sides)
        return
    for i, (mine, other) in enumerate(zip(source.spaces, target.spaces, strict=True)):
        named = f"{mine.name}: " if i else ""
        if (a := mine.page_size) != (b := other.page_size):
            larger = source if a > b else target
            why = undividable(larger, i, min(a, b)) if mine.in_rows == other.in_rows else ""
            yield _differ(f"{named}page_size", a, b, sides) + (f" ({why})" if why else "")
        if mine.window != other.window:
            yield _differ(f"{named}window", mine.window, other.window, sides)


def _typed_differences(
    source: PoolLayout, target: PoolLayout, sides: Sides, partly: bool, only: Spans | None
) -> Iterator[str]:
    ours, theirs = (
        {
            name: group
            for name, group in by_name(layout.components).items()
            if only is None or name in only
        }
        for layout in (source, target)
    )
    for name, group in ours.items():
        if name not in theirs:
            yield f"{name}: only {sides[0]} has it"
        elif (found := _kinds_differ(group[0], theirs[name][0], sides)) is not None:
            yield found
        else:
            yield from _parts_differ(group, theirs[name], sides, partly, only)
    if not partly:
        yield from (f"{name}: only {sides[1]} has it" for name in theirs if name not in ours)


def _kinds_differ(c: Component, other: Component, sides: Sides) -> str | None:
    if c.dtype != other.dtype:
        return f"{c.name} dtype: {sides[0]} {c.dtype}, {sides[1]} {other.dtype}"
    if c.unit != other.unit:
        return f"{c.name} unit: {sides[0]} one per {c.unit}, {sides[1]} one per {other.unit}"
    if c.space != other.space:
        return _differ(f"{c.name} space, by its index", c.space, other.space, sides)
    if c.whole_shape != other.whole_shape:
        what = "shape (heads, dim)" if len(c.shape) == 2 and c.unit == SLOT else "shape"
        return f"{c.name} {what}: {sides[0]} {c.whole_shape}, {sides[1]} {other.whole_shape}"
    if c.axis != other.axis:
        return _differ(f"{c.name} axis along which it is split", c.axis, other.axis, sides)
    if c.format != other.format:
        return _differ(f"{c.name} format", c.format, other.format, sides)
    return None


def _parts_differ(
    ours: list[Component], theirs: list[Component], sides: Sides, partly: bool, only: Spans | None
) -> Iterator[str]:
    # Most components are not split. Both sides then have the same single part.
    if len(ours) == len(theirs) == 1 and ours[0].span == theirs[0].span:
        return
    name = ours[0].name
    mine, other = spans_of(ours)[name], spans_of(theirs)[name]
    if only is not None:
        mine, other = within(mine, only[name]), within(other, only[name])
    for side, left in (
        (sides[0], without(mine, other)),
        (sides[1], [] if partly else without(other, mine)),
    ):
        yield from (f"{name}: only {side} has entries {first}..{end}" for first, end in left)


def _opaque_differences(source: PoolLayout, target: PoolLayout, sides: Sides) -> Iterator[str]:
    fits = True
    sizes = [
        (f"bytes per {unit_named(source, i)}", *both)
        for i, both in enumerate(zip(source.place_bytes, target.place_bytes, strict=False))
    ]
    for what, ours, theirs in (("page tag", source.tag, target.tag), *sizes):
        if ours != theirs:
            fits = False
            yield _differ(what, ours, theirs, sides)
    # Offsets cannot be compared if the pages differ in size or format.
    if not fits:
        return
    there = {(c.name, c.space): stretch for c, stretch in stretches(target)}
    for c, (start, end) in stretches(source):
        other = there.get((c.name, c.space))
        if other is not None and other != (start, end):
            whole = unit_named(source, c.space)
            yield (
                f"{c.name}: bytes {start}..{end} of a {whole} at {sides[0]}, "
                f"{other[0]}..{other[1]} at {sides[1]}"
            )


def stretches(layout: PoolLayout) -> Iterator[tuple[Component, tuple[int, int]]]:
    """Yield each component with the bytes [start, end) that it has in an opaque place. An opaque
    place is the concatenation of its components.
    """
    ends = [0] * len(layout.spaces)
    for c in layout.components:
        start = ends[c.space]
        ends[c.space] = start + c.size_bytes
        yield c, (start, start + c.size_bytes)
