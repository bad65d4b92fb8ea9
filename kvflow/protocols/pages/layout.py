"""What a paged pool looks like, in bytes: shared by the pools that own memory and the planes that move it.

A pool is `num_pages` pages of `page_size` token slots. What one page holds is a list of *components* (one layer's K,
one layer's V, a scale stream ...), each with its shape per token slot. Components lie in *buffers*: page-first pools
have one buffer in which a page is one block; layer-first pools have one buffer per component. Transfers are planned
component by component and merged where bytes are adjacent on both sides, so either kind can be copied into the other.

An *opaque* pool has a tag in place of shapes: its components are stretches of bytes, a page is their concatenation in
the order in which they are listed, and the tag stands for everything that those bytes mean.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsIndex

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import LayoutError

PageIndices = NDArray[np.int32]
Order = Literal["page_first", "layer_first"]

MAX_COMPONENTS = 4096
MAX_PAGES = 1 << 26
MAX_PAGE_SIZE = 1 << 16
MAX_LABEL = 256  # characters of a name, a tag, a fingerprint: refusals quote them, and refusals are bounded
MAX_DIFFERENCES = 5  # named in a refusal
MANY_PAGES = 256  # so many are looked up in ascending order: a million took 40 ms in any other
_BITMAP_PAGES = 1 << 21  # a larger bitmap leaves the processor's caches, and sorting is faster
OPAQUE = "opaque"  # the dtype of every component of a pool with a tag
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1, "int8": 1, "int32": 4}


class Component(msgspec.Struct, frozen=True, array_like=True):
    """One stream of a page: `page_size` slots of `shape` elements, contiguous, at `offset` in a page of `buffer`.

    In an opaque pool `dtype` is "opaque" and `shape` is `(size_bytes,)`, of the whole page.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: int
    offset: int
    size_bytes: int


class Buffer(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of memory. Page p begins at `address + p * page_bytes`; the address is the owner's."""

    name: str
    page_bytes: int
    size_bytes: int
    address: int = 0


class PoolLayout(msgspec.Struct, frozen=True, array_like=True):
    """The descriptor two peers exchange once.

    `tag` makes the pages opaque: two such pools fit when their tags are equal. `fingerprint` names the model whose KV
    lies in the pool (model, dtype, tensor-parallel split, in whatever words both sides use); peers compare it as it is.
    """

    page_size: int
    num_pages: int
    components: tuple[Component, ...]
    buffers: tuple[Buffer, ...]
    tag: str = ""
    fingerprint: str = ""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all components together."""
        return sum(c.size_bytes for c in self.components)

    @property
    def size_bytes(self) -> int:
        return sum(b.size_bytes for b in self.buffers)

    def pages_for(self, tokens: int, prefix_tokens: int = 0) -> int:
        """Pages of `tokens` tokens, less those that the first `prefix_tokens` of them take."""
        return -(-tokens // self.page_size) - -(-prefix_tokens // self.page_size)

    def check(self) -> None:
        """Refuse a descriptor whose arithmetic does not hold. Called on everything that came over the wire.

        Raises: LayoutError naming the field.
        """
        if not 1 <= self.page_size <= MAX_PAGE_SIZE:
            raise LayoutError(f"page_size {self.page_size} is outside 1..{MAX_PAGE_SIZE}")
        if not 1 <= self.num_pages <= MAX_PAGES:
            raise LayoutError(f"num_pages {self.num_pages} is outside 1..{MAX_PAGES}")
        if not 1 <= len(self.components) <= MAX_COMPONENTS or not 1 <= len(self.buffers) <= MAX_COMPONENTS:
            raise LayoutError(
                f"{len(self.components)} components in {len(self.buffers)} buffers: each must be 1..{MAX_COMPONENTS}"
            )
        self._check_labels()
        for b in self.buffers:
            if b.page_bytes < 1 or b.address < 0 or b.size_bytes < b.page_bytes * self.num_pages:
                raise LayoutError(
                    f"buffer {b.name!r}: {b.size_bytes} bytes do not hold {self.num_pages} pages of {b.page_bytes}"
                )
        for c in self.components:
            self._check_component(c)

    def _check_labels(self) -> None:
        for what, label in (("tag", self.tag), ("fingerprint", self.fingerprint)):
            if len(label) > MAX_LABEL:
                raise LayoutError(f"{what} of {len(label)} characters is over the limit of {MAX_LABEL}")
        names = [c.name for c in self.components]
        for name in (*names, *(b.name for b in self.buffers)):
            if len(name) > MAX_LABEL:
                raise LayoutError(f"name {name[:40]!r}... of {len(name)} characters is over the limit of {MAX_LABEL}")
        if len(set(names)) != len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise LayoutError(f"component {twice!r} is named twice")

    def _check_component(self, c: Component) -> None:
        if self.tag:
            if c.dtype != OPAQUE or c.size_bytes < 1 or c.shape != (c.size_bytes,):
                raise LayoutError(
                    f"component {c.name!r} of an opaque pool: dtype {c.dtype!r} and shape {c.shape} are not "
                    f"{OPAQUE!r} and ({c.size_bytes},)"
                )
        elif c.dtype not in DTYPE_BYTES:
            raise _unknown_dtype(c.name, c.dtype)
        elif not c.shape or min(c.shape) < 1 or c.size_bytes != slot_bytes(c.dtype, c.shape) * self.page_size:
            raise LayoutError(f"component {c.name!r}: shape {c.shape} does not make {c.size_bytes} bytes")
        if not 0 <= c.buffer < len(self.buffers):
            raise LayoutError(f"component {c.name!r}: buffer {c.buffer} is outside 0..{len(self.buffers) - 1}")
        if c.offset < 0 or c.offset + c.size_bytes > self.buffers[c.buffer].page_bytes:
            raise LayoutError(
                f"component {c.name!r}: bytes {c.offset}..{c.offset + c.size_bytes} leave its buffer's page"
            )


def _unknown_dtype(name: str, dtype: str) -> LayoutError:
    known = ", ".join(DTYPE_BYTES)
    return LayoutError(f"component {name!r}: unknown dtype {dtype!r}; use {known}, or make the pool opaque with a tag")


def whole_number(name: str, value: SupportsIndex) -> int:
    """`value` as a Python int (numpy's integers are welcome, and do not survive on the wire). Raises: LayoutError."""
    try:
        return operator.index(value)
    except TypeError:
        raise LayoutError(f"{name} {value!r} is not an integer") from None


def slot_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one token slot of a component."""
    size = DTYPE_BYTES[dtype]
    for n in shape:
        size *= n
    return size


def build_layout(
    streams: Sequence[tuple[str, str, Sequence[SupportsIndex]]],
    *,
    page_size: SupportsIndex,
    num_pages: SupportsIndex,
    order: Order = "page_first",
    fingerprint: str = "",
) -> PoolLayout:
    """Lay out `streams` (name, dtype, shape per token slot) in one buffer (page-first) or in one each (layer-first).

    Raises: LayoutError.
    """
    slots, pages = whole_number("page_size", page_size), whole_number("num_pages", num_pages)
    sized: list[Component] = []
    for name, dtype, shape in streams:
        if dtype not in DTYPE_BYTES:
            raise _unknown_dtype(name, dtype)
        whole = tuple(whole_number(f"component {name!r}: shape", n) for n in shape)
        sized.append(Component(name, dtype, whole, 0, 0, slot_bytes(dtype, whole) * slots))
    return _placed(sized, slots, pages, order, fingerprint=fingerprint)


def opaque_layout(
    streams: Mapping[str, int],
    *,
    page_size: SupportsIndex,
    num_pages: SupportsIndex,
    tag: str,
    order: Order = "page_first",
    fingerprint: str = "",
) -> PoolLayout:
    """Lay out `streams` (name -> bytes per page) that only the engine can read; `tag` says how it reads them.

    Raises: LayoutError.
    """
    if not tag:
        raise LayoutError("tag is empty: an opaque pool needs one, which both sides must have in common")
    slots, pages = whole_number("page_size", page_size), whole_number("num_pages", num_pages)
    sizes = {name: whole_number(f"component {name!r}: size", size) for name, size in streams.items()}
    sized = [Component(name, OPAQUE, (size,), 0, 0, size) for name, size in sizes.items()]
    return _placed(sized, slots, pages, order, tag=tag, fingerprint=fingerprint)


def _placed(
    sized: list[Component], page_size: int, num_pages: int, order: Order, *, tag: str = "", fingerprint: str = ""
) -> PoolLayout:
    components: list[Component] = []
    end = 0
    for i, c in enumerate(sized):
        if order == "page_first":
            components.append(msgspec.structs.replace(c, offset=end))
            end += c.size_bytes
        elif order == "layer_first":
            components.append(msgspec.structs.replace(c, buffer=i))
        else:
            raise LayoutError(f"order {order!r} is neither 'page_first' nor 'layer_first'")
    if order == "page_first":
        buffers: tuple[Buffer, ...] = (Buffer("pages", end, end * num_pages),)
    else:
        buffers = tuple(Buffer(c.name, c.size_bytes, c.size_bytes * num_pages) for c in components)
    layout = PoolLayout(page_size, num_pages, tuple(components), buffers, tag, fingerprint)
    layout.check()
    return layout


def differences(source: PoolLayout, target: PoolLayout) -> list[str]:
    """Why pages of `source` cannot be copied into `target`, in words a person can act on; empty when they can.

    The first few: two models of 32 layers differ in all of them.
    """
    found: list[str] = []
    if source.fingerprint != target.fingerprint:
        found.append(f"model fingerprint: prefill {source.fingerprint!r}, decode {target.fingerprint!r}")
    if source.page_size != target.page_size:
        found.append(f"page_size: prefill {source.page_size}, decode {target.page_size}")
    if source.tag or target.tag:
        found.extend(_opaque_differences(source, target))
    else:
        found.extend(_typed_differences(source, target))
    more = len(found) - MAX_DIFFERENCES
    return found if more <= 0 else [*found[:MAX_DIFFERENCES], f"and {more} more"]


def _typed_differences(source: PoolLayout, target: PoolLayout) -> list[str]:
    found: list[str] = []
    theirs = {c.name: c for c in target.components}
    for c in source.components:
        other = theirs.pop(c.name, None)
        if other is None:
            found.append(f"{c.name}: only prefill has it")
        elif c.dtype != other.dtype:
            found.append(f"{c.name} dtype: prefill {c.dtype}, decode {other.dtype}")
        elif c.shape != other.shape:
            found.append(f"{c.name} shape (heads, dim): prefill {c.shape}, decode {other.shape}")
    found.extend(f"{name}: only decode has it" for name in theirs)
    return found


def _opaque_differences(source: PoolLayout, target: PoolLayout) -> list[str]:
    """Equal tags and sizes are enough; but a stream that both sides name must be the same bytes of the page."""
    found: list[str] = []
    if source.tag != target.tag:
        found.append(f"page tag: prefill {source.tag!r}, decode {target.tag!r}")
    if source.page_bytes != target.page_bytes:
        found.append(f"bytes per page: prefill {source.page_bytes}, decode {target.page_bytes}")
    if not found:
        theirs = page_stretches(target)
        for name, (start, end) in page_stretches(source).items():
            if (other := theirs.get(name)) is not None and other != (start, end):
                found.append(f"{name}: bytes {start}..{end} of a page at prefill, {other[0]}..{other[1]} at decode")
    return found


def page_stretches(layout: PoolLayout) -> dict[str, tuple[int, int]]:
    """Where each component begins and ends in the concatenation of all of them, in their order."""
    found: dict[str, tuple[int, int]] = {}
    end = 0
    for c in layout.components:
        found[c.name] = (end, end + c.size_bytes)
        end += c.size_bytes
    return found


def pack_pages(pages: PageIndices) -> bytes:
    """Page indices as they travel: little-endian int32, packed."""
    return np.ascontiguousarray(pages, dtype="<i4").tobytes()


def unpack_pages(packed: bytes, num_pages: int) -> PageIndices:
    """The indices in `packed`, each checked against the pool, none twice.

    Raises: LayoutError for a ragged length, an index outside 0..num_pages-1, or a page named twice.
    """
    if len(packed) % 4:
        raise LayoutError(f"pages: {len(packed)} bytes are not a list of int32 indices")
    pages = np.frombuffer(packed, dtype="<i4")
    if pages.size == 1 and 0 <= pages[0] < num_pages:
        return pages  # the short way, several times as fast
    if pages.size:
        ascending = bool((pages[1:] > pages[:-1]).all())  # as decode's allocator gives them
        low, high = (int(pages[0]), int(pages[-1])) if ascending else (int(pages.min()), int(pages.max()))
        if low < 0 or high >= num_pages:
            raise LayoutError(f"pages: index {low if low < 0 else high} is outside 0..{num_pages - 1}")
        if not ascending and names_twice(pages, low, high):
            raise LayoutError("pages: a page is named twice")
    return pages


def names_twice(pages: PageIndices, low: int, high: int) -> bool:
    """Whether an index occurs twice among `pages`, which are low..high: a million of them take 5 ms at most
    (`np.unique` takes a second)."""
    if (pages[1:] > pages[:-1]).all():
        return False
    if high - low < _BITMAP_PAGES:
        seen = np.zeros(high - low + 1, dtype=np.bool_)
        seen[np.subtract(pages, low, dtype=np.intp)] = True  # numpy would copy an index of another type to this one
        return int(np.count_nonzero(seen)) < pages.size
    return not ascends(np.sort(pages))


def ascends(pages: NDArray[np.integer[Any]]) -> bool:
    """Whether every index is larger than the one before it."""
    return bool((pages[1:] > pages[:-1]).all())
