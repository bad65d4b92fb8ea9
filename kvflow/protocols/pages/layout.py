"""The byte layout of a paged pool, shared by the pools that own the memory and the data planes that
copy the pages.

A pool is `num_pages` pages of `page_size` token slots, and `num_rows` rows for the state that a
model keeps once per request. A page or a row is a list of *components* (one layer's K, one layer's
V, a scale stream, a layer's ssm state ...), each with its shape per unit: token slot, page or row
(see `kinds`). Components lie in *buffers*. A page-first pool has one buffer in which each page is
one block, and one for rows. A layer-first pool has one buffer per component. Transfers are planned
component by component and merged where bytes are adjacent on both sides, so either kind can be
copied into the other.

An *opaque* pool has a tag instead of shapes: its components are stretches of bytes, a page is their
concatenation in the listed order, and the tag names the format of those bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, SupportsIndex

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
from kvflow.protocols.pages.kinds import OPAQUE, PAGE, ROW, SLOT, StateKind, check_kind, unit_bytes

PageIndices = NDArray[np.int32]
Order = Literal["page_first", "layer_first"]

MAX_COMPONENTS = 4096
MAX_PAGES = 1 << 26
MAX_ROWS = 1 << 20
MAX_PAGE_SIZE = 1 << 16
# The longest name, tag, fingerprint or format, in characters. Refusals quote these texts, and the
# length of a refusal is bounded.
MAX_LABEL = 256
# Lists of at least this many pages are sorted before they index an array. With a million unsorted
# pages, indexing took 40 ms.
MANY_PAGES = 256
# A larger bitmap does not fit the processor's caches, and sorting is then faster.
_BITMAP_PAGES = 1 << 21


class Places(NamedTuple):
    """Pages and rows of one request in one pool, int32 [n] each.

    In a list that holds both, such as a room's, row r has the index `num_pages + r`.
    """

    pages: PageIndices
    rows: PageIndices


NO_PLACES: PageIndices = np.empty(0, dtype=np.int32)
"""No pages, or no rows."""


class PoolLayout(msgspec.Struct, frozen=True, array_like=True):
    """The description of a pool. When decode registers, it sends prefill the layout of its pool.

    `tag` makes the pages opaque: two such pools fit only if their tags are equal. `fingerprint`
    names the model whose KV lies in the pool (model, dtype, tensor-parallel split, in any words on
    which both sides agree). Two pools fit only if their fingerprints are equal.
    """

    page_size: int
    num_pages: int
    components: tuple[Component, ...]
    buffers: tuple[Buffer, ...]
    tag: str = ""
    fingerprint: str = ""
    num_rows: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all components together."""
        return sum(c.size_bytes for c in self.components if not c.in_rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all components together."""
        return sum(c.size_bytes for c in self.components if c.in_rows)

    @property
    def size_bytes(self) -> int:
        return sum(b.size_bytes for b in self.buffers)

    @property
    def dtypes(self) -> str:
        """The dtypes of all components, each once, such as "bfloat16, float32"."""
        return ", ".join(dict.fromkeys(c.dtype for c in self.components))

    def count_of(self, part: Component | Buffer) -> int:
        """Return how many pages, or rows, a component or buffer has."""
        return self.num_rows if part.in_rows else self.num_pages

    @property
    def served(self) -> PoolLayout:
        """This layout with only what a prefill rank sends: see `components.served`."""
        found = served(self.components)
        if len(found) == len(self.components):
            return self
        return msgspec.structs.replace(self, components=found)

    @property
    def num_places(self) -> int:
        """The number of pages and rows together."""
        return self.num_pages + self.num_rows

    def numbered(self, places: Places) -> PageIndices:
        """Return the pages and then the rows in one list; see `Places`."""
        return np.concatenate(
            (places.pages, places.rows + np.int32(self.num_pages)), dtype=np.int32
        )

    def split(self, indices: PageIndices) -> Places:
        """Return the pages and the rows of one list, both in the order of the list."""
        if not self.num_rows or not (in_rows := indices >= self.num_pages).any():
            return Places(indices, NO_PLACES)
        return Places(indices[~in_rows], indices[in_rows] - np.int32(self.num_pages))

    def room_bytes(self, count: int) -> int:
        """Return the size in bytes of a room with `count` places. In a pool with rows, the last
        place is a row.
        """
        rows = bool(self.num_rows and count)
        return (count - rows) * self.page_bytes + rows * self.row_bytes

    def check_places(self, indices: PageIndices, *, last: bool = True) -> None:
        """Check the places that a room lends, or a chunk sends, in a pool with rows. A room has one
        row, which is its last place and belongs to the last chunk. Raises: LayoutError.
        """
        in_rows = indices >= self.num_pages
        if (found := int(in_rows.sum())) != last or (last and not in_rows[-1]):
            raise LayoutError(
                f"{found} rows among {indices.size} "
                f"places{'' if last else ' of a chunk that is not the last'}: a room has one row, "
                f"as the last of its places (row r is {self.num_pages} + r)"
            )

    def pages_for(self, tokens: int, prefix_tokens: int = 0) -> int:
        """Return how many pages `tokens` tokens need, less those of the first `prefix_tokens`."""
        return -(-tokens // self.page_size) - -(-prefix_tokens // self.page_size)

    def check(self) -> None:
        """Check the arithmetic of a layout from the wire. Raises: LayoutError naming the field."""
        for name, value, least, most in (
            ("page_size", self.page_size, 1, MAX_PAGE_SIZE),
            ("num_pages", self.num_pages, 1, MAX_PAGES),
            ("num_rows", self.num_rows, 0, MAX_ROWS),
        ):
            if not least <= value <= most:
                raise LayoutError(f"{name} {value} is outside {least}..{most}")
        if len(self.components) > MAX_COMPONENTS or not 1 <= len(self.buffers) <= MAX_COMPONENTS:
            raise LayoutError(
                f"{len(self.components)} components in {len(self.buffers)} buffers: at most "
                f"{MAX_COMPONENTS} of each, and at least one buffer"
            )
        self._check_labels()
        for b in self.buffers:
            _check_buffer(b, self.count_of(b))
        for c in self.components:
            check_component(c, self.page_size, opaque=bool(self.tag))
            self._check_place(c)
        check_together(self.components)
        if not self.num_rows and any(c.in_rows for c in self.components):
            raise LayoutError(
                f"0 rows: a pool with components of the unit {ROW!r} has at least one"
            )

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
        if c.in_rows != b.in_rows:
            raise LayoutError(
                f"component {c.name!r}: its unit is {c.unit!r}, that of its buffer {b.name!r} "
                f"{b.unit!r}"
            )
        if c.offset < 0 or c.offset + c.size_bytes > b.page_bytes:
            raise LayoutError(
                f"component {c.name!r}: bytes {c.offset}..{c.offset + c.size_bytes} leave its "
                f"buffer's {'row' if c.in_rows else 'page'}"
            )


def _check_buffer(b: Buffer, count: int) -> None:
    if b.unit not in (PAGE, ROW):
        raise LayoutError(f"buffer {b.name!r}: unit {b.unit!r} is neither {PAGE!r} nor {ROW!r}")
    if b.page_bytes < 1 or b.address < 0 or b.size_bytes < b.page_bytes * count:
        raise LayoutError(
            f"buffer {b.name!r}: {b.size_bytes} bytes do not hold {count} {b.unit}s of "
            f"{b.page_bytes}"
        )


def whole_number(name: str, value: SupportsIndex) -> int:
    """Convert `value`, perhaps a numpy integer, to a Python int. Raises: LayoutError."""
    # The wire format cannot encode numpy integers.
    try:
        return operator.index(value)
    except TypeError:
        raise LayoutError(f"{name} {value!r} is not an integer") from None


def build_layout(
    streams: Iterable[StateKind | tuple[Any, ...]],
    *,
    page_size: SupportsIndex,
    num_pages: SupportsIndex,
    num_rows: SupportsIndex = 0,
    order: Order = "page_first",
    fingerprint: str = "",
) -> PoolLayout:
    """Lay out `streams`, each a `StateKind` or a tuple of its first fields (name, dtype, shape,
    ...). A page-first layout has one buffer for pages and one for rows. A layer-first layout has
    one buffer per stream.

    Raises: LayoutError.
    """
    slots = whole_number("page_size", page_size)
    sized: list[Component] = []
    for name, dtype, shape, unit, meaning, *part in (StateKind(*stream) for stream in streams):
        check_kind(name, dtype, unit)
        sizes = tuple(whole_number(f"component {name!r}: shape", n) for n in shape)
        size_bytes = unit_bytes(dtype, sizes) * (slots if unit == SLOT else 1)
        fields = zip(Part._fields, part, strict=True)
        checked = (whole_number(f"component {name!r}: {field}", value) for field, value in fields)
        sized.append(Component(name, dtype, sizes, 0, 0, size_bytes, unit, meaning, *checked))
    pages, rows = whole_number("num_pages", num_pages), whole_number("num_rows", num_rows)
    return _placed(sized, order, PoolLayout(slots, pages, (), (), "", fingerprint, rows))


def opaque_layout(
    streams: Mapping[str, int],
    *,
    page_size: SupportsIndex,
    num_pages: SupportsIndex,
    tag: str,
    rows: Mapping[str, int] | None = None,
    num_rows: SupportsIndex = 0,
    order: Order = "page_first",
    fingerprint: str = "",
) -> PoolLayout:
    """Lay out an opaque pool, whose bytes only the engine can read. `streams` has the bytes per
    page by name, `rows` the bytes per row by name, and `tag` names the format of the bytes.

    Raises: LayoutError.
    """
    if not tag:
        raise LayoutError(
            "tag is empty: an opaque pool needs one, which both sides must have in common"
        )
    slots, pages = whole_number("page_size", page_size), whole_number("num_pages", num_pages)
    sized: list[Component] = []
    for unit, named in ((SLOT, streams), (ROW, rows or {})):
        sizes = {
            name: whole_number(f"component {name!r}: size", size) for name, size in named.items()
        }
        sized.extend(
            Component(name, OPAQUE, (size,), 0, 0, size, unit) for name, size in sizes.items()
        )
    count = whole_number("num_rows", num_rows)
    return _placed(sized, order, PoolLayout(slots, pages, (), (), tag, fingerprint, count))


def resized(layout: PoolLayout, *, num_pages: int, num_rows: int) -> PoolLayout:
    """Return a page-first layout of the same components, with other numbers of pages and rows.
    Raises: LayoutError.
    """
    unplaced = [msgspec.structs.replace(c, buffer=0, offset=0) for c in layout.components]
    empty = msgspec.structs.replace(
        layout, num_pages=num_pages, num_rows=num_rows, components=(), buffers=()
    )
    return _placed(unplaced, "page_first", empty)


def _placed(sized: list[Component], order: Order, empty: PoolLayout) -> PoolLayout:
    if order not in ("page_first", "layer_first"):
        raise LayoutError(f"order {order!r} is neither 'page_first' nor 'layer_first'")
    components: list[Component] = []
    buffers: list[Buffer] = []
    at: dict[str, int] = {}  # index of the current buffer, by unit
    for c in sized:
        unit = ROW if c.in_rows else PAGE
        if order == "layer_first" or unit not in at:
            at[unit] = len(buffers)
            buffers.append(Buffer(c.name if order == "layer_first" else f"{unit}s", 0, 0, 0, unit))
        i = at[unit]
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
