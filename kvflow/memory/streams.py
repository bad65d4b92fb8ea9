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
from kvflow.protocols.pages.layout import MAX_PAGE_SIZE, PoolLayout, whole_number

if TYPE_CHECKING:
    import torch

    Array = NDArray[Any] | torch.Tensor

Fields = Mapping[str, SupportsIndex]
"""Fields of a `Part`, by name; missing fields have their default."""


class Stream(NamedTuple):
    """A description of one array in memory.

    `strides` are in bytes; `start` and `end` bound the allocation that contains the array.
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

    @property
    def in_rows(self) -> bool:
        return self.unit == ROW

    @property
    def page_bytes(self) -> int:
        """Size of one page, or row, in bytes."""
        return math.prod(self.shape[1:]) * self.item_bytes

    @property
    def step(self) -> int:
        """Distance from one page, or row, to the next, in bytes."""
        return self.strides[0] if self.shape[0] > 1 else self.page_bytes


def streams_of(by_unit: Mapping[str, Mapping[str, Array]]) -> list[Stream]:
    """Describe each array; the keys of `by_unit` are SLOT, PAGE and ROW.

    Raises: LayoutError for a value that is not an array, an array without writable memory, or
    arrays on different devices.
    """
    found: list[Stream] = []
    for unit, arrays in by_unit.items():
        if not isinstance(arrays, Mapping):
            raise LayoutError(
                "a pool is made from a mapping of stream names to arrays, not from a "
                f"{_kind(arrays)}"
            )
        if twice := {s.name for s in found} & set(arrays):
            raise LayoutError(f"stream {min(twice)!r} is named twice")
        found.extend(_stream(name, array)._replace(unit=unit) for name, array in arrays.items())
    if not found:
        raise LayoutError("a pool needs at least one array")
    if elsewhere := next((s for s in found if s.device != found[0].device), None):
        raise LayoutError(
            f"stream {found[0].name!r} is on {found[0].device} and {elsewhere.name!r} on "
            f"{elsewhere.device}; all of a pool are on one device"
        )
    return found


def describe(
    streams: Sequence[Stream],
    page_size: SupportsIndex,
    *,
    tag: str = "",
    fingerprint: str = "",
    formats: Mapping[str, str] | None = None,
    num_pages: SupportsIndex | None = None,
    parts: Mapping[str, Fields] | None = None,
) -> PoolLayout:
    """Return the layout of a pool over `streams`. Streams whose pages interleave share a buffer.

    `num_pages` is required for a pool that has only rows, and refused for any other.

    Raises: LayoutError if the streams form no valid pool.
    """
    slots = whole_number("page_size", page_size)
    if not 1 <= slots <= MAX_PAGE_SIZE:
        raise LayoutError(f"page_size {slots} is outside 1..{MAX_PAGE_SIZE}")
    counts: dict[bool, int] = {False: _num_pages(streams, num_pages), True: 0}
    components: dict[str, Component] = {}
    buffers: list[Buffer] = []
    for in_rows in (False, True):
        stored = [s for s in streams if s.in_rows == in_rows]
        for stream in stored:
            _check(stream, stored[0], slots, typed=not tag)
        if stored:
            counts[in_rows] = stored[0].shape[0]
        for group in _interleaved(stored):
            buffers.append(_buffer(group, counts[in_rows]))
            components.update(
                (s.name, _component(s, len(buffers) - 1, buffers[-1], bool(tag))) for s in group
            )
    for what, given in (("formats", formats or {}), ("parts", parts or {})):
        if unknown := set(given) - set(components):
            raise LayoutError(f"{what} names {min(unknown)!r}, which is no stream of the pool")
    named = tuple(_described(components[s.name], formats or {}, parts or {}) for s in streams)
    _check_apart(named)
    layout = PoolLayout(slots, counts[False], named, tuple(buffers), tag, fingerprint, counts[True])
    layout.check()
    return layout


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


def _num_pages(streams: Sequence[Stream], given: SupportsIndex | None) -> int:
    if (paged := next((s for s in streams if not s.in_rows), None)) is not None:
        if given is not None:
            raise LayoutError(
                f"num_pages is for pools of nothing but rows: stream {paged.name!r} has pages"
            )
        # `describe` replaces this number with the number of pages in the streams.
        return 1
    if given is None:
        raise LayoutError(
            "a pool of nothing but rows needs num_pages: its pages count the tokens of its requests"
        )
    if (count := whole_number("num_pages", given)) < 1:
        raise LayoutError(f"num_pages {count}: a pool has at least one page")
    return count


def _component(s: Stream, number: int, buffer: Buffer, opaque: bool) -> Component:
    inner = s.shape[2:] if s.unit == SLOT else s.shape[1:]
    dtype, shape = (OPAQUE, (s.page_bytes,)) if opaque else (s.dtype, inner or (1,))
    return Component(s.name, dtype, shape, number, s.address - buffer.address, s.page_bytes, s.unit)


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


def _buffer(group: list[Stream], num_pages: int) -> Buffer:
    # The last page must end within the allocation, so the buffer may start before its first stream.
    first, size_bytes = group[0], group[0].step * num_pages
    # The bounds span all streams of the group: a tensor made by torch.from_numpy knows only the
    # memory of its own array.
    low, high = min(s.start for s in group), max(s.end for s in group)
    start = min(first.address, high - size_bytes)
    unit = ROW if first.in_rows else PAGE
    if start < low:
        raise LayoutError(
            f"stream {first.name!r}: {size_bytes} bytes of {unit}s leave its allocation of "
            f"{high - low} bytes"
        )
    return Buffer(first.name, first.step, size_bytes, start, unit)


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
    part = "row" if s.in_rows else "page"
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
