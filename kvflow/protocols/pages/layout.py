"""The byte layout of a paged pool, shared by the pools that own the memory and the data planes that
copy the pages.

A pool has places of one or more spaces (see `spaces`): pages of some number of token slots, and
rows for the state that a model keeps once per request. A place is a list of *components* (one
layer's K, one layer's V, a scale stream, a layer's ssm state ...), each with its shape per unit:
token slot, page or row (see `kinds`). Components lie in *buffers*, each of one space. A page-first
pool has one buffer for each space, in which each place is one block. A layer-first pool has one
buffer per component. Transfers are planned component by component and merged where bytes are
adjacent on both sides, so either kind can be copied into the other.

An *opaque* pool has a tag instead of shapes: its components are stretches of bytes, a place is
their concatenation in the listed order, and the tag names the format of those bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, SupportsIndex

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.components import (
    Buffer,
    Component,
    Part,
    check_component,
    check_together,
    served,
)
from kvflow.protocols.pages.kinds import OPAQUE, ROW, SLOT, StateKind, check_kind, unit_bytes
from kvflow.protocols.pages.spaces import (
    MAX_LABEL,
    MAX_PAGE_SIZE,
    NO_PLACES,
    Counts,
    PageIndices,
    Places,
    Space,
    check_spaces,
)

__all__ = [
    "MAX_COMPONENTS",
    "MAX_LABEL",
    "MAX_PAGE_SIZE",
    "NO_PLACES",
    "Counts",
    "Order",
    "PageIndices",
    "Places",
    "PoolLayout",
    "Space",
    "build_layout",
    "opaque_layout",
    "resized",
]

Order = Literal["page_first", "layer_first"]

MAX_COMPONENTS = 4096
# Lists of at least this many pages are sorted before they index an array. With a million unsorted
# pages, indexing took 40 ms.
MANY_PAGES = 256
# A larger bitmap does not fit the processor's caches, and sorting is then faster.
_BITMAP_PAGES = 1 << 21
PAGES, ROWS = "pages", "rows"
"""Names of the spaces in a pool that is made without named spaces."""


class PoolLayout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The description of a pool. When decode registers, it sends prefill the layout of its pool.

    `tag` makes the pages opaque: two such pools fit only if their tags are equal. `fingerprint`
    names the model whose KV lies in the pool (model, dtype, tensor-parallel split, in any words on
    which both sides agree). Two pools fit only if their fingerprints are equal.

    Prefixes and positions of prompts are counted in pages of the first space: `page_size`,
    `num_pages` and `page_bytes` are those of its pages. `num_rows` and `row_bytes` are those of the
    first space with rows, and 0 in a pool without one.
    """

    spaces: tuple[Space, ...]
    components: tuple[Component, ...]
    buffers: tuple[Buffer, ...]
    tag: str = ""
    fingerprint: str = ""

    @property
    def page_size(self) -> int:
        """Tokens per page of the first space."""
        return self.spaces[0].page_size

    @property
    def num_pages(self) -> int:
        """Number of pages of the first space."""
        return self.spaces[0].count

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the first space, all components together."""
        return self.place_bytes[0]

    @property
    def num_rows(self) -> int:
        """Number of rows of the first space with rows, or 0 if there is none."""
        return 0 if self.row_space is None else self.spaces[self.row_space].count

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all components together."""
        return 0 if self.row_space is None else self.place_bytes[self.row_space]

    @cached_property
    def row_space(self) -> int | None:
        """Index of the first space with rows."""
        return next((i for i, space in enumerate(self.spaces) if space.in_rows), None)

    @cached_property
    def place_bytes(self) -> tuple[int, ...]:
        """Bytes of one place of each space, all components together."""
        found = [0] * len(self.spaces)
        for c in self.components:
            found[c.space] += c.size_bytes
        return tuple(found)

    @cached_property
    def counts(self) -> Counts:
        """Number of places of each space."""
        return tuple(space.count for space in self.spaces)

    @cached_property
    def num_places(self) -> int:
        """Number of places of all spaces together."""
        return sum(self.counts)

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """Index of the first place of each space, in a list with places of all spaces."""
        return tuple(accumulate(self.counts[:-1], initial=0))

    @property
    def size_bytes(self) -> int:
        return sum(b.size_bytes for b in self.buffers)

    @property
    def dtypes(self) -> str:
        """The dtypes of all components, each once, such as "bfloat16, float32"."""
        return ", ".join(dict.fromkeys(c.dtype for c in self.components))

    def count_of(self, part: Component | Buffer) -> int:
        """Return how many places the space of a component or buffer has."""
        return self.spaces[part.space].count

    def unit_of(self, part: Component | Buffer) -> str:
        """Return what a place of a component or buffer is, "page" or "row"."""
        return self.spaces[part.space].unit

    @property
    def served(self) -> PoolLayout:
        """This layout with only what a prefill rank sends: see `components.served`."""
        found = served(self.components)
        if len(found) == len(self.components):
            return self
        return msgspec.structs.replace(self, components=found)

    def numbered(self, places: Sequence[PageIndices]) -> PageIndices:
        """Return the places of all spaces in one list; see `spaces`."""
        return np.concatenate(
            [own + np.int32(base) for own, base in zip(places, self.bases, strict=True)],
            dtype=np.int32,
        )

    def split(self, indices: PageIndices) -> Places:
        """Return the places of one list by space, each in the order of the list."""
        if len(self.spaces) == 1:
            return (indices,)
        spaces = self.spaces_at(indices)
        return tuple(
            indices[spaces == space] - np.int32(base) for space, base in enumerate(self.bases)
        )

    def counted(self, indices: PageIndices) -> Counts:
        """Return how many places of each space a list has."""
        if len(self.spaces) == 1:
            return (indices.size,)
        if len(self.spaces) == 2:
            later = int(np.count_nonzero(indices >= self.bases[1]))
            return (indices.size - later, later)
        found = np.bincount(self.spaces_at(indices), minlength=len(self.spaces))
        return tuple(found.tolist())

    def wanted(self, tokens: int, prefix_tokens: int = 0) -> Counts:
        """Return how many places of each space a prompt fills; see `Space.wanted`."""
        spaces = self.spaces
        # Most pools have one space, and a generator takes several times as long as this call.
        if len(spaces) == 1:
            return (spaces[0].wanted(tokens, prefix_tokens),)
        return tuple(space.wanted(tokens, prefix_tokens) for space in spaces)

    def room_bytes(self, counts: Counts) -> int:
        """Return the size in bytes of `counts` places."""
        return sum(n * size for n, size in zip(counts, self.place_bytes, strict=True))

    def check_order(self, indices: PageIndices) -> None:
        """Check that a list has the places of each space together, in the order of the spaces.
        Raises: LayoutError.
        """
        if len(self.spaces) == 1 or indices.size < 2:
            return
        # Lists usually ascend, and every ascending list is in order.
        if bool((indices[1:] > indices[:-1]).all()):
            return
        spaces = self.spaces_at(indices)
        if (found := np.flatnonzero(spaces[1:] < spaces[:-1])).size:
            at = int(found[0])
            names = [self.spaces[int(space)].name for space in spaces[at : at + 2]]
            raise LayoutError(
                f"place {indices[at + 1]} of space {names[1]!r} follows place {indices[at]} of "
                f"space {names[0]!r}: a list has the places of all spaces in the order "
                f"{', '.join(repr(space.name) for space in self.spaces)}"
            )

    def described(self, counts: Counts) -> str:
        """Return counts in words, such as "3 pages and 1 row"."""
        words = [
            f"{count} {'' if not i or space.in_rows else repr(space.name) + ' '}"
            f"{space.unit}{'s' if count != 1 or not space.in_rows else ''}"
            for i, (space, count) in enumerate(zip(self.spaces, counts, strict=True))
        ]
        return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))

    def pages_for(self, tokens: int, prefix_tokens: int = 0) -> int:
        """Return how many pages of the first space `tokens` tokens need, less those of the first
        `prefix_tokens`.
        """
        return -(-tokens // self.page_size) - self.first_page(tokens, prefix_tokens)

    def first_page(self, tokens: int, prefix_tokens: int = 0) -> int:
        """Return the number of pages of the first space before the first one that a room sends:
        `prefix_tokens` of the prompt are at decode. That page may begin inside the prefix, if the
        pages of decode are smaller.
        """
        return self.spaces[0].first(tokens, prefix_tokens)

    def spaces_at(self, indices: PageIndices) -> NDArray[np.intp]:
        """Return the index of the space of each place of a list."""
        return self._starts.searchsorted(indices, side="right")

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Index of the first place of each space after the first."""
        return np.array(self.bases[1:])

    def check(self) -> None:
        """Check the arithmetic of a layout from the wire. Raises: LayoutError naming the field."""
        check_spaces(self.spaces)
        if len(self.components) > MAX_COMPONENTS or not 1 <= len(self.buffers) <= MAX_COMPONENTS:
            raise LayoutError(
                f"{len(self.components)} components in {len(self.buffers)} buffers: at most "
                f"{MAX_COMPONENTS} of each, and at least one buffer"
            )
        self._check_labels()
        for b in self.buffers:
            if not 0 <= b.space < len(self.spaces):
                raise LayoutError(
                    f"buffer {b.name!r}: space {b.space} is outside 0..{len(self.spaces) - 1}"
                )
            _check_buffer(b, self.spaces[b.space])
        for c in self.components:
            self._check_place(c)
            check_component(c, self.spaces[c.space].page_size, opaque=bool(self.tag))
        check_together(self.components)

    def _check_labels(self) -> None:
        for what, label in (("tag", self.tag), ("fingerprint", self.fingerprint)):
            if len(label) > MAX_LABEL:
                raise LayoutError(
                    f"{what} of {len(label)} characters is over the limit of {MAX_LABEL}"
                )
        names = [c.name for c in self.components]
        for name in (*names, *(b.name for b in self.buffers), *(c.format for c in self.components)):
            if len(name) > MAX_LABEL:
                raise LayoutError(
                    f"name {name[:40]!r}... of {len(name)} characters is over the limit of "
                    f"{MAX_LABEL}"
                )

    def _check_place(self, c: Component) -> None:
        if not 0 <= c.buffer < len(self.buffers):
            raise LayoutError(
                f"component {c.name!r}: buffer {c.buffer} is outside 0..{len(self.buffers) - 1}"
            )
        b = self.buffers[c.buffer]
        if c.space != b.space:
            raise LayoutError(
                f"component {c.name!r} is in space {c.space}, its buffer {b.name!r} in {b.space}"
            )
        unit = self.unit_of(b)
        if (c.unit == ROW) != (unit == ROW):
            raise LayoutError(
                f"component {c.name!r}: its unit is {c.unit!r}, that of its space "
                f"{self.spaces[c.space].name!r} {unit!r}"
            )
        if c.offset < 0 or c.offset + c.size_bytes > b.page_bytes:
            raise LayoutError(
                f"component {c.name!r}: bytes {c.offset}..{c.offset + c.size_bytes} leave its "
                f"buffer's {unit}"
            )


def _check_buffer(b: Buffer, space: Space) -> None:
    if b.page_bytes < 1 or b.address < 0 or b.size_bytes < b.page_bytes * space.count:
        raise LayoutError(
            f"buffer {b.name!r}: {b.size_bytes} bytes do not hold {space.count} {space.unit}s of "
            f"{b.page_bytes}"
        )


def unit_named(layout: PoolLayout, space: int) -> str:
    """Return the word for a place of a space in error texts: "page" in the first space, "row" in
    the first space with rows, and such as "'window' page" in another one.
    """
    found = layout.spaces[space]
    return found.unit if space in (0, layout.row_space) else f"{found.name!r} {found.unit}"


def whole_number(name: str, value: SupportsIndex) -> int:
    """Convert `value`, perhaps a numpy integer, to a Python int. Raises: LayoutError."""
    # The wire format cannot encode numpy integers.
    try:
        return operator.index(value)
    except TypeError:
        raise LayoutError(f"{name} {value!r} is not an integer") from None


def spaces_of(page_size: int, num_pages: int, num_rows: int = 0) -> tuple[Space, ...]:
    """Return the spaces of a pool of pages and, if `num_rows` is not 0, rows."""
    pages = Space(PAGES, num_pages, page_size)
    return (pages, Space(ROWS, num_rows, 0)) if num_rows else (pages,)


def build_layout(
    streams: Iterable[StateKind | tuple[Any, ...]],
    *,
    page_size: SupportsIndex = 0,
    num_pages: SupportsIndex = 0,
    num_rows: SupportsIndex = 0,
    spaces: Sequence[Space] = (),
    order: Order = "page_first",
    fingerprint: str = "",
) -> PoolLayout:
    """Lay out `streams`, each a `StateKind` or a tuple of its first fields (name, dtype, shape,
    ...). A page-first layout has one buffer per space. A layer-first layout has one buffer per
    stream.

    The pool has either `spaces`, or `num_pages` pages of `page_size` tokens and `num_rows` rows. A
    stream that names no space is in the first one or, if its unit is the row, in the first one with
    rows.

    Raises: LayoutError.
    """
    found = tuple(spaces) or spaces_of(
        whole_number("page_size", page_size),
        whole_number("num_pages", num_pages),
        whole_number("num_rows", num_rows),
    )
    sized: list[Component] = []
    for stream in streams:
        kind = StateKind(*stream)
        check_kind(kind.name, kind.dtype, kind.unit)
        sizes = tuple(whole_number(f"component {kind.name!r}: shape", n) for n in kind.shape)
        space = space_named(found, kind.space, kind.name, kind.unit)
        slots = found[space].page_size if kind.unit == SLOT else 1
        part = {
            field: whole_number(f"component {kind.name!r}: {field}", getattr(kind, field))
            for field in Part._fields
        }
        size_bytes, places = unit_bytes(kind.dtype, sizes) * slots, (0, 0)
        component = Component(
            kind.name, kind.dtype, sizes, *places, size_bytes, kind.unit, kind.format, **part
        )
        sized.append(msgspec.structs.replace(component, space=space))
    return _placed(sized, order, PoolLayout(found, (), (), "", fingerprint))


def opaque_layout(
    streams: Mapping[str, int],
    *,
    page_size: SupportsIndex = 0,
    num_pages: SupportsIndex = 0,
    tag: str,
    rows: Mapping[str, int] | None = None,
    num_rows: SupportsIndex = 0,
    spaces: Sequence[Space] = (),
    per_space: Mapping[str, Mapping[str, int]] | None = None,
    order: Order = "page_first",
    fingerprint: str = "",
) -> PoolLayout:
    """Lay out an opaque pool, whose bytes only the engine can read. `streams` has the bytes per
    page of the first space by name, `rows` the bytes per row by name, `per_space` the bytes per
    place of other spaces, by the space's name and the stream's. `tag` names the format of the
    bytes. The spaces are given as for `build_layout`.

    Raises: LayoutError.
    """
    if not tag:
        raise LayoutError(
            "tag is empty: an opaque pool needs one, which both sides must have in common"
        )
    found = tuple(spaces) or spaces_of(
        whole_number("page_size", page_size),
        whole_number("num_pages", num_pages),
        whole_number("num_rows", num_rows),
    )
    groups = [("", SLOT, streams), ("", ROW, rows or {})]
    for name, more in (per_space or {}).items():
        in_rows = any(space.name == name and space.in_rows for space in found)
        groups.append((name, ROW if in_rows else SLOT, more))
    sized: list[Component] = []
    for named, unit, group in groups:
        for name, given in group.items():
            size = whole_number(f"component {name!r}: size", given)
            space = space_named(found, named, name, unit)
            sized.append(Component(name, OPAQUE, (size,), 0, 0, size, unit, space=space))
    return _placed(sized, order, PoolLayout(found, (), (), tag, fingerprint))


def space_named(spaces: Sequence[Space], name: str, stream: str, unit: str) -> int:
    """Return the index of the space that a stream names, or of its default space if `name` is
    empty. Raises: LayoutError if there is no such space.
    """
    for i, space in enumerate(spaces):
        if space.name == name if name else space.in_rows == (unit == ROW):
            return i
    if not name and unit == ROW:
        raise LayoutError(
            f"component {stream!r}: 0 rows: a pool with components of the unit {ROW!r} has at "
            "least one"
        )
    names = ", ".join(repr(space.name) for space in spaces)
    raise LayoutError(f"component {stream!r}: space {name!r} is none of {names}")


def resized(layout: PoolLayout, counts: Counts) -> PoolLayout:
    """Return a page-first layout of the same components, with other numbers of places. A space
    whose count is 0 stays, with one place. Raises: LayoutError.
    """
    unplaced = [msgspec.structs.replace(c, buffer=0, offset=0) for c in layout.components]
    spaces = tuple(
        msgspec.structs.replace(space, count=max(1, count))
        for space, count in zip(layout.spaces, counts, strict=True)
    )
    empty = PoolLayout(spaces, (), (), layout.tag, layout.fingerprint)
    return _placed(unplaced, "page_first", empty)


def _placed(sized: list[Component], order: Order, empty: PoolLayout) -> PoolLayout:
    if order not in ("page_first", "layer_first"):
        raise LayoutError(f"order {order!r} is neither 'page_first' nor 'layer_first'")
    components: list[Component] = []
    buffers: list[Buffer] = []
    at: dict[int, int] = {}  # index of the current buffer, by space
    for c in sized:
        if order == "layer_first" or c.space not in at:
            at[c.space] = len(buffers)
            name = c.name if order == "layer_first" else empty.spaces[c.space].name
            buffers.append(Buffer(name, 0, 0, 0, c.space))
        i = at[c.space]
        components.append(msgspec.structs.replace(c, buffer=i, offset=buffers[i].page_bytes))
        buffers[i] = msgspec.structs.replace(
            buffers[i], page_bytes=buffers[i].page_bytes + c.size_bytes
        )
    sized_buffers = tuple(
        msgspec.structs.replace(b, size_bytes=b.page_bytes * empty.count_of(b)) for b in buffers
    )
    layout = msgspec.structs.replace(empty, components=tuple(components), buffers=sized_buffers)
    layout.check()
    return layout


def names_twice(pages: PageIndices, low: int, high: int) -> bool:
    """Return True if an index occurs twice among `pages`, which lie in low..high."""
    # A million indices take at most 5 ms (`np.unique` takes a second).
    if ascends(pages):
        return False
    if high - low < _BITMAP_PAGES:
        seen = np.zeros(high - low + 1, dtype=np.bool_)
        # numpy would convert indices of any other type to intp in a second pass.
        seen[np.subtract(pages, low, dtype=np.intp)] = True
        return int(np.count_nonzero(seen)) < pages.size
    return not ascends(np.sort(pages))


def ascends(pages: NDArray[np.integer[Any]]) -> bool:
    return bool((pages[1:] > pages[:-1]).all())
