"""Components of places, parts of components, and the buffers that hold the places of a space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.kinds import OPAQUE, SLOT, check_kind, check_unit, unit_bytes

MAX_WHOLE = 1 << 20  # largest number of entries of a whole component
MAX_REPLICAS = 1024


class Part(NamedTuple):
    """The place of a component in a larger one. Along `axis`, the larger component has `whole`
    entries, and the part begins at entry `start`. The shape of the component gives the number of
    entries in the part. `whole` is 0 if the component is not a part of a larger one. If `replicas`
    ranks of a group hold the same bytes, the component is copy number `replica`.

    Shard 1 of 2 has K/V heads 4 to 7 of 8: `Part(start=4, whole=8)`. Both shards have the whole
    latent of MLA: `Part(replica=0, replicas=2)` and `Part(replica=1, replicas=2)`. Peers must state
    the same `axis`, even if they do not split the component.
    """

    start: int = 0
    whole: int = 0
    replica: int = 0
    replicas: int = 1
    axis: int = 0


ALL = Part()
"""The part that is all of a component, in one copy."""


class Component(msgspec.Struct, frozen=True, array_like=True):
    """One stream of data: `size_bytes` contiguous bytes at `offset` in every place of `buffer`.

    `shape` is the shape of one unit (slot, page or row); a page holds the `page_size` slots of its
    space. In an opaque pool `dtype` is "opaque" and `shape` is `(size_bytes,)`. `format` names the
    meaning of the bytes where `dtype` does not. The fields from `start` to `axis` are its `Part`:
    components with the same name are parts or copies of one larger component. `space` is the index
    of the space in the layout, and the same as that of the buffer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: int
    offset: int
    size_bytes: int
    unit: str = SLOT
    format: str = ""
    start: int = 0
    whole: int = 0
    replica: int = 0
    replicas: int = 1
    axis: int = 0
    space: int = 0

    @property
    def part(self) -> Part:
        return Part(self.start, self.whole, self.replica, self.replicas, self.axis)

    @property
    def end(self) -> int:
        """The entry after the last one of this component."""
        return self.start + self.shape[self.axis]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the component that this one is a part of."""
        if not self.whole:
            return self.shape
        return (*self.shape[: self.axis], self.whole, *self.shape[self.axis + 1 :])

    @property
    def span(self) -> tuple[str, int, int]:
        """The name, the first entry, and the entry after the last.

        All copies of a part have the same span.
        """
        return self.name, self.start, self.end

    @property
    def label(self) -> str:
        """The name for errors, with the entries of a part and the number of a copy."""
        entries = f"[{self.start}:{self.end} of {self.whole}]" if self.whole else ""
        copy = f" (copy {self.replica} of {self.replicas})" if self.replicas > 1 else ""
        return self.name + entries + copy


class Buffer(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of memory that holds the places of the space with index `space`.

    Place p begins at `address + p * page_bytes`. In the owner's own layout, the address is valid in
    the owner's process. For the layout that peers receive, see `ports.DataPlane.export`.
    """

    name: str
    page_bytes: int
    size_bytes: int
    address: int = 0
    space: int = 0


def by_name(components: Iterable[Component]) -> dict[str, list[Component]]:
    found: dict[str, list[Component]] = {}
    for c in components:
        found.setdefault(c.name, []).append(c)
    return found


def in_order(components: Iterable[Component]) -> list[Component]:
    """Return components sorted by name, first entry and copy number, so that both sides have the
    same order. Short names come first: "9.v" precedes "10.k", as in memory.
    """
    return sorted(components, key=lambda c: (len(c.name), c.name, c.start, c.replica))


def served(components: Iterable[Component]) -> tuple[Component, ...]:
    """Return the components that a prefill rank sends: all those that it alone has, and its share
    of those that `replicas` ranks have.

    Each name has a number, and the rank with copy r sends the components whose number modulo
    `replicas` is r. Components with the same unit, dtype and shape are numbered in one sequence, so
    that ranks send about equally many bytes. All ranks with copies use the same names, so exactly
    one of them sends each component.
    """
    every, numbers = tuple(components), dict[str, int]()
    counts: Counter[tuple[object, ...]] = Counter()
    for c in in_order(every):
        if c.name not in numbers:
            alike = (c.space, c.unit, c.dtype, c.whole_shape)
            numbers[c.name] = counts[alike]
            counts[alike] += 1
    return tuple(c for c in every if numbers[c.name] % c.replicas == c.replica)


def check_component(c: Component, page_size: int, *, opaque: bool) -> None:
    """Check the sizes of one component, apart from its place in a buffer. Raises: LayoutError."""
    if opaque:
        check_unit(c.name, c.unit)
        if c.dtype != OPAQUE or c.size_bytes < 1 or c.shape != (c.size_bytes,):
            raise LayoutError(
                f"component {c.name!r} of an opaque pool: dtype {c.dtype!r} and shape {c.shape} "
                f"are not {OPAQUE!r} and ({c.size_bytes},)"
            )
        if c.part != ALL:
            raise LayoutError(
                f"component {c.name!r}: an opaque pool has no parts and no copies: only its engine "
                "reads it"
            )
        return
    check_kind(c.name, c.dtype, c.unit)
    units = page_size if c.unit == SLOT else 1
    if not c.shape or min(c.shape) < 1 or c.size_bytes != unit_bytes(c.dtype, c.shape) * units:
        raise LayoutError(
            f"component {c.name!r}: shape {c.shape} does not make {c.size_bytes} bytes"
        )
    if c.part != ALL:
        _check_part(c)


def _check_part(c: Component) -> None:
    for field, value, least, most in (
        ("axis", c.axis, 0, len(c.shape) - 1),
        ("whole", c.whole, 0, MAX_WHOLE),
        ("replicas", c.replicas, 1, MAX_REPLICAS),
        ("replica", c.replica, 0, c.replicas - 1),
    ):
        if not least <= value <= most:
            raise LayoutError(f"component {c.name!r}: {field} {value} is outside {least}..{most}")
    if not c.whole and c.start:
        raise LayoutError(
            f"component {c.name!r}: start {c.start} without whole: a part says of how many entries "
            "it is one"
        )
    if c.whole and (c.start < 0 or c.end > c.whole):
        raise LayoutError(
            f"component {c.name!r}: entries {c.start}..{c.end} are not within its whole of "
            f"{c.whole}"
        )


def check_together(components: Sequence[Component]) -> None:
    """Check that components of one name fit together as parts or copies. Raises: LayoutError."""
    # In most pools all names differ, so there is no group to check.
    if len({c.name for c in components}) == len(components):
        return
    for name, group in by_name(components).items():
        seen: set[tuple[int, int]] = set()
        for c in group:
            if (c.start, c.replica) in seen:
                raise LayoutError(
                    f"component {name!r} is named twice{'' if c.part == ALL else f': {c.label}'}"
                )
            seen.add((c.start, c.replica))
        for c in group[1:]:
            if (what := _differs(group[0], c)) is not None:
                raise LayoutError(f"component {name!r}: its parts differ in {what}")
        for a, b in pairwise(in_order(group)):
            if a.span != b.span and b.start < a.end:
                raise LayoutError(
                    f"component {name!r}: {a.label} and {b.label} overlap, and are not copies"
                )


def _differs(a: Component, b: Component) -> str | None:
    for what in ("dtype", "unit", "space", "format", "axis", "whole_shape"):
        ours, theirs = getattr(a, what), getattr(b, what)
        if ours != theirs:
            return f"{what}: {ours} and {theirs}"
    return None


def copies_of(components: Iterable[Component]) -> list[list[Component]]:
    """Group components by their span, in order of spans. Each group has the copies of one part."""
    return [list(group) for _, group in groupby(in_order(components), key=lambda c: c.span)]
