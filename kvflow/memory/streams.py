"""Derives the layout of a pool from an engine's own arrays (numpy, or torch if it is loaded)."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.memory.device import HOST
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.components import Buffer, Component, Part
from kvflow.protocols.pages.kinds import OPAQUE, PAGE, ROW, SLOT
from kvflow.protocols.pages.layout import (
    MAX_PAGE_SIZE,
    PAGES,
    ROWS,
    PoolLayout,
    Space,
    whole_number,
)

if TYPE_CHECKING:
    import torch

    Array = NDArray[Any] | torch.Tensor

Fields = Mapping[str, SupportsIndex]
"""Fields of a `Part`, by name; missing fields have their default."""


class SpaceStreams(NamedTuple):
    """The arrays of one space of a pool (see `protocols.pages.spaces`).

    In a space with pages, `tensors` are [num_pages, page_size, *shape], and `per_page` are
    [num_pages, *shape]. If `page_size` is 0, the space has rows, and `tensors` are [num_rows,
    *shape]. If `window` is not 0, a room needs only the pages of its last `window` tokens.
    """

    tensors: Mapping[str, Array]
    page_size: SupportsIndex
    per_page: Mapping[str, Array] | None = None
    window: SupportsIndex = 0

    @property
    def arrays(self) -> dict[str, Array]:
        """All arrays of the space by the name of their stream."""
        return {**self.tensors, **(self.per_page or {})}


class Stream(NamedTuple):
    """A description of one array in memory.

    `strides` are in bytes; `start` and `end` bound the allocation that contains the array. `space`
    is the index of the array's space.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    address: int
    start: int
    end: int
    device: str
    unit: str = SLOT
    space: int = 0

    @property
    def place(self) -> str:
        """The kind of a place, "page" or "row"."""
        return ROW if self.unit == ROW else PAGE

    @property
    def page_bytes(self) -> int:
        """Size of one place in bytes."""
        return math.prod(self.shape[1:]) * self.item_bytes

    @property
    def step(self) -> int:
        """Distance from one place to the next, in bytes."""
        return self.strides[0] if self.shape[0] > 1 else self.page_bytes


def spaces_given(
    pages: SpaceStreams,
    rows: Mapping[str, Array] | None,
    more: Mapping[str, SpaceStreams] | None,
) -> dict[str, SpaceStreams]:
    """Return all spaces of a pool by name: pages, then rows if there are any, then those of `more`.

    Raises: LayoutError if two have one name.
    """
    found = {PAGES: pages}
    if rows:
        found[ROWS] = SpaceStreams(rows, 0)
    if twice := set(found) & set(more or {}):
        raise LayoutError(f"space {min(twice)!r} is given twice: its name is taken")
    return {**found, **(more or {})}


def streams_of(spaces: Mapping[str, SpaceStreams]) -> list[Stream]:
    """Describe each array of each space.

    Raises: LayoutError for a value that is not an array, an array without writable memory, or
    arrays on different devices.
    """
    found: list[Stream] = []
    for space, (name, given) in enumerate(spaces.items()):
        in_rows = not whole_number(f"space {name!r}: page_size", given.page_size)
        if in_rows and given.per_page:
            raise LayoutError(
                f"space {name!r}: per_page arrays need pages, and its page_size is 0, so it has "
                "rows"
            )
        for unit, arrays in ((ROW if in_rows else SLOT, given.tensors), (PAGE, given.per_page)):
            if arrays is not None:
                _add(found, unit, space, arrays)
    if not found:
        raise LayoutError("a pool needs at least one array")
    if elsewhere := next((s for s in found if s.device != found[0].device), None):
        raise LayoutError(
            f"stream {found[0].name!r} is on {found[0].device} and {elsewhere.name!r} on "
            f"{elsewhere.device}; all of a pool are on one device"
        )
    return found


def _add(found: list[Stream], unit: str, space: int, arrays: Mapping[str, Array]) -> None:
    if not isinstance(arrays, Mapping):
        raise LayoutError(
            f"a pool is made from a mapping of stream names to arrays, not from a {_kind(arrays)}"
        )
    if twice := {s.name for s in found} & set(arrays):
        raise LayoutError(f"stream {min(twice)!r} is named twice")
    found.extend(
        _stream(name, array)._replace(unit=unit, space=space) for name, array in arrays.items()
    )


def describe(
    streams: Sequence[Stream],
    spaces: Mapping[str, SpaceStreams],
    *,
    tag: str = "",
    fingerprint: str = "",
    formats: Mapping[str, str] | None = None,
    num_pages: SupportsIndex | None = None,
    parts: Mapping[str, Fields] | None = None,
) -> PoolLayout:
    """Return the layout of a pool over `streams`, which are those of `spaces`. Streams whose pages
    interleave share a buffer.

    `num_pages` is required if the first space has no array, as in a pool that has only rows, and
    refused for any other.

    Raises: LayoutError if the streams form no valid pool.
    """
    components: dict[str, Component] = {}
    buffers: list[Buffer] = []
    found: list[Space] = []
    for i, (name, given) in enumerate(spaces.items()):
        stored = [s for s in streams if s.space == i]
        count = _count(stored, name, None if i else num_pages, first=not i)
        space = Space(name, count, *_sizes(name, given, first=not i))
        found.append(space)
        for stream in stored:
            _check(stream, stored[0], space.page_size, typed=not tag)
        for group in _interleaved(stored):
            buffers.append(_buffer(group, count))
            components.update(
                (s.name, _component(s, len(buffers) - 1, buffers[-1], bool(tag))) for s in group
            )
    for what, named in (("formats", formats or {}), ("parts", parts or {})):
        if unknown := set(named) - set(components):
            raise LayoutError(f"{what} names {min(unknown)!r}, which is no stream of the pool")
    every = tuple(_described(components[s.name], formats or {}, parts or {}) for s in streams)
    _check_apart(every)
    layout = PoolLayout(tuple(found), every, tuple(buffers), tag, fingerprint)
    layout.check()
    return layout


def _sizes(name: str, given: SpaceStreams, *, first: bool) -> tuple[int, int]:
    """Return the page size and the window of a space. Raises: LayoutError."""
    named = "" if first else f"space {name!r}: "
    size = whole_number(f"{named}page_size", given.page_size)
    if not first <= size <= MAX_PAGE_SIZE:
        raise LayoutError(f"{named}page_size {size} is outside {int(first)}..{MAX_PAGE_SIZE}")
    return size, whole_number(f"{named}window", given.window)


def _described(c: Component, formats: Mapping[str, str], parts: Mapping[str, Any]) -> Component:
    meaning, part = formats.get(c.name, ""), parts.get(c.name, {})
    if not isinstance(meaning, str):
        raise LayoutError(f"stream {c.name!r}: its format is a {_kind(meaning)}, not a str")
    if not isinstance(part, Mapping) or set(part) - set(Part._fields):
        raise LayoutError(
            f"stream {c.name!r}: its part {part!r} is not a mapping with some of "
            f"{', '.join(Part._fields)}"
        )
    fields = {
        field: whole_number(f"stream {c.name!r}: {field}", value) for field, value in part.items()
    }
    return msgspec.structs.replace(c, format=meaning, **fields)


def _count(
    stored: Sequence[Stream], name: str, num_pages: SupportsIndex | None, *, first: bool
) -> int:
    """Return how many places a space has, from its arrays or, without any, from `num_pages`.

    Raises: LayoutError.
    """
    if stored:
        if num_pages is not None:
            raise LayoutError(
                f"num_pages is for pools of nothing but rows: stream {stored[0].name!r} has pages"
            )
        # A scalar has no dimension, and `_check` refuses it.
        return stored[0].shape[0] if stored[0].shape else 1
    if not first:
        raise LayoutError(f"space {name!r} has no array")
    if num_pages is None:
        raise LayoutError(
            "a pool of nothing but rows needs num_pages: its pages count the tokens of its requests"
        )
    if (count := whole_number("num_pages", num_pages)) < 1:
        raise LayoutError(f"num_pages {count}: a pool has at least one page")
    return count


def _component(s: Stream, number: int, buffer: Buffer, opaque: bool) -> Component:
    inner = s.shape[2:] if s.unit == SLOT else s.shape[1:]
    dtype, shape = (OPAQUE, (s.page_bytes,)) if opaque else (s.dtype, inner or (1,))
    offset = s.address - buffer.address
    return Component(s.name, dtype, shape, number, offset, s.page_bytes, s.unit, space=s.space)


def _interleaved(streams: Sequence[Stream]) -> list[list[Stream]]:
    """Group streams whose pages interleave, such as views into one page-first array."""
    groups: list[list[Stream]] = []
    for s in sorted(streams, key=lambda s: s.address):
        first = groups[-1][0] if groups else None
        if (
            first is not None
            and s.step == first.step
            and s.address + s.page_bytes <= first.address + first.step
        ):
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


def _buffer(group: list[Stream], count: int) -> Buffer:
    # The last place must end within the allocation, so the buffer may start before its first
    # stream.
    first, size_bytes = group[0], group[0].step * count
    # The bounds span all streams of the group: a tensor made by torch.from_numpy knows only the
    # memory of its own array.
    low, high = min(s.start for s in group), max(s.end for s in group)
    start = min(first.address, high - size_bytes)
    if start < low:
        raise LayoutError(
            f"stream {first.name!r}: {size_bytes} bytes of {first.place}s leave its allocation of "
            f"{high - low} bytes"
        )
    return Buffer(first.name, first.step, size_bytes, start, first.space)


def _kind(value: object) -> str:
    return type(value).__name__


def _stream(name: str, array: Array) -> Stream:
    # Torch need not be imported: a caller that passes a tensor has loaded it.
    torch = sys.modules.get("torch")
    if isinstance(array, np.ndarray):
        return _of_numpy(name, array)
    if torch is not None and isinstance(array, torch.Tensor):
        return _of_torch(name, array)
    raise LayoutError(
        f"stream {name!r} is a {_kind(array)}, neither a numpy array nor a torch tensor"
    )


def _of_numpy(name: str, array: NDArray[Any]) -> Stream:
    if not array.flags.writeable:
        raise LayoutError(f"array {name!r} is read-only: pages of a pool are written in place")
    if array.dtype.hasobject or not array.dtype.isnative:
        raise LayoutError(
            f"array {name!r}: dtype {array.dtype} is not plain numbers in this machine's byte order"
        )
    start, end = _bounds(_allocation(array))
    at, dtype = array.__array_interface__["data"][0], array.dtype
    return Stream(
        name, dtype.name, array.shape, array.strides, dtype.itemsize, at, start, end, HOST
    )


def _allocation(array: NDArray[Any]) -> NDArray[Any]:
    owner: Any = array
    while (owner := getattr(owner, "base", None)) is not None:
        if isinstance(owner, np.ndarray):
            array = owner
    return array


def _bounds(array: NDArray[Any]) -> tuple[int, int]:
    low = high = array.__array_interface__["data"][0]
    for length, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, (length - 1) * stride), high + max(0, (length - 1) * stride)
    return low, high + array.itemsize


def _of_torch(name: str, tensor: torch.Tensor) -> Stream:
    if str(tensor.layout) != "torch.strided" or tensor.device.type == "meta":
        raise LayoutError(
            f"tensor {name!r} ({tensor.layout} on {tensor.device}) has no memory of its own to "
            "write into"
        )
    size, storage = tensor.element_size(), tensor.untyped_storage()
    start = storage.data_ptr()
    return Stream(
        name,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tuple(step * size for step in tensor.stride()),
        size,
        tensor.data_ptr(),
        start,
        start + storage.nbytes(),
        HOST if tensor.device.type == HOST else str(tensor.device),
    )


def _check(s: Stream, first: Stream, page_size: int, *, typed: bool) -> None:
    part = s.place
    in_slots = typed and s.unit == SLOT
    wanted = "[num_pages, page_size, ...]" if in_slots else f"[num_{part}s, ...]"
    if len(s.shape) < (2 if in_slots else 1) or not math.prod(s.shape):
        raise LayoutError(
            f"stream {s.name!r}: shape {s.shape} is not {wanted} with at least one element"
        )
    if s.shape[0] != first.shape[0]:
        raise LayoutError(
            f"stream {s.name!r} has {s.shape[0]} {part}s, {first.name!r} has {first.shape[0]}: "
            f"streams of one pool have as many; shape is {wanted}"
        )
    if in_slots and s.shape[1] != page_size:
        raise LayoutError(
            f"stream {s.name!r}: shape {s.shape} is not {wanted} with a page_size of {page_size}; "
            "pages of another inner layout need a tag"
        )
    inner = list(zip(s.shape[1:], s.strides[1:], strict=True))
    # The dimensions of an opaque page may be in any order in memory.
    if not typed:
        inner.sort(key=lambda dimension: dimension[1], reverse=True)
    if not _dense(inner, s.item_bytes):
        raise LayoutError(
            f"stream {s.name!r}: one {part} of it is not contiguous (shape {s.shape}, strides "
            f"{s.strides})"
        )
    if s.shape[0] > 1 and s.strides[0] < s.page_bytes:
        raise LayoutError(
            f"stream {s.name!r}: {part}s of {s.page_bytes} bytes overlap, {s.strides[0]} bytes "
            "apart"
        )


def _dense(dimensions: list[tuple[int, int]], item_bytes: int) -> bool:
    """Return True if dimensions of (length, stride in bytes), outermost first, leave no gap."""
    expected = item_bytes
    for length, stride in reversed(dimensions):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def _check_apart(components: Sequence[Component]) -> None:
    for a, b in pairwise(sorted(components, key=lambda c: (c.buffer, c.offset))):
        if a.buffer == b.buffer and a.offset + a.size_bytes > b.offset:
            raise LayoutError(
                f"streams {a.name!r} and {b.name!r} share bytes: give every byte of a page once"
            )
