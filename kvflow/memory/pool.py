"""A paged pool: the memory of every buffer of a layout, and typed views that share this memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.device import HOST, memory_on, misplaced, stream_in
from kvflow.memory.places import PlaceAllocator
from kvflow.memory.quarantine import PoolQuarantine
from kvflow.memory.shared import SharedSegment
from kvflow.memory.streams import Fields, SpaceStreams, describe, spaces_given, streams_of
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.components import Component, by_name
from kvflow.protocols.pages.kinds import DTYPE_BYTES, OPAQUE, SLOT
from kvflow.protocols.pages.layout import PageIndices, PoolLayout, unit_named
from kvflow.protocols.ports import UnprovenLoan

if TYPE_CHECKING:
    import torch

    from kvflow.memory.streams import Array

_BUFFER_ALIGNMENT = 4096
_BITS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e8m0fnu": "uint8",
    OPAQUE: "uint8",
}
"""Integer dtypes in which numpy arrays hold the dtypes that numpy lacks."""


class PagedPool:
    """The memory of one pool, owned (`allocate`, `mapped`) or borrowed (`wrap`).

    The addresses in `layout.buffers` are addresses in this process.

    A decode node that closes leaves its unproven loans in `quarantine`, and every later node over
    this pool watches their writers. Until these loans end, no store of such a node hands out their
    pages.
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        memory: SharedSegment | None = None,
        segment: SharedSegment | None = None,
        arrays: Mapping[Component, Array] | None = None,
        device: str = HOST,
    ) -> None:
        """Use `allocate`, `mapped` or `wrap` instead. The pool closes `memory`; the caller closes
        `segment`.
        """
        self.layout = layout
        self.quarantine = PoolQuarantine(layout)
        self.device = device
        """Device of every buffer: "cpu", or the name of a torch device ("cuda:0")."""
        self._memory, self._segment = memory, segment
        self._arrays: dict[Component, Array] = dict(arrays or {})
        self._tensors: dict[tuple[str, int | None, int | None], torch.Tensor] = {}
        self._components = by_name(layout.components)
        self._allocators: tuple[PageAllocator, ...] = ()
        self._places: PageAllocator | PlaceAllocator | None = None
        self._closed = False

    @classmethod
    def allocate(
        cls, layout: PoolLayout, shared: bool = True, *, device: torch.device | str | None = None
    ) -> PagedPool:
        """Allocate zeroed memory for all buffers, in one piece.

        Without `device`, the memory is a pre-faulted segment. Peers on this machine can open it if
        `shared` is True. With `device`, torch allocates the memory on that device, and `shared` has
        no effect.

        Raises: LayoutError if the layout is invalid or there is not enough memory; MisuseError if
        `device` is given and torch is not installed.
        """
        layout.check()
        offsets: list[int] = []
        end = 0
        for buffer in layout.buffers:
            offsets.append(end)
            end += -(-buffer.size_bytes // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
        if device is not None:
            on_device = memory_on(device, end)
            layout = _placed(layout, offsets, on_device.data_ptr())
            streams = {c: stream_in(on_device, layout, c) for c in layout.components}
            return cls(layout, arrays=streams, device=str(on_device.device))
        memory = SharedSegment.create(end) if shared else SharedSegment.private(end)
        return cls(_placed(layout, offsets, memory.address), memory=memory)

    @classmethod
    def mapped(cls, layout: PoolLayout, segment: SharedSegment) -> PagedPool:
        """Return a pool over a segment that another process allocated and this process mapped.

        The pool closes `segment`. The addresses in `layout` are addresses in the other process.
        Raises: LayoutError if the buffers do not lie in the segment.
        """
        # `allocate` puts the first buffer at the beginning of the segment.
        first = layout.buffers[0].address
        layout = _placed(layout, [b.address - first for b in layout.buffers], segment.address)
        if any(
            b.address < segment.address
            or b.address + b.size_bytes > segment.address + segment.size_bytes
            for b in layout.buffers
        ):
            raise LayoutError(f"the buffers of the layout do not lie in {segment!r}")
        return cls(layout, memory=segment)

    @classmethod
    def wrap(
        cls,
        tensors: Mapping[str, Array],
        page_size: SupportsIndex,
        *,
        per_page: Mapping[str, Array] | None = None,
        window: SupportsIndex = 0,
        rows: Mapping[str, Array] | None = None,
        spaces: Mapping[str, SpaceStreams] | None = None,
        formats: Mapping[str, str] | None = None,
        num_pages: SupportsIndex | None = None,
        segment: SharedSegment | None = None,
        tag: str = "",
        fingerprint: str = "",
        parts: Mapping[str, Fields] | None = None,
    ) -> PagedPool:
        """Return a pool over an engine's own numpy arrays or torch tensors, without a copy.

        Each array is [num_pages, page_size, *shape]: one contiguous array per stream (layer-first),
        or views into one page-first array. The pool keeps them alive.

        `per_page`: arrays with one entry per page, [num_pages, *shape]. `window`: if it is not 0, a
        room needs only the pages of its last `window` tokens. `rows`: arrays with one entry per
        request, [num_rows, *shape]. `spaces`: the arrays of further spaces by name, which
        follow those of pages and rows, in the given order. `formats`: labels for streams whose
        bytes need more than a dtype to be understood; two peers must have equal labels.
        `num_pages`: required if `tensors` and `per_page` are empty, as in a pool of rows only,
        whose pages only count tokens; other pools derive it from their arrays. `segment`: the
        shared segment that contains the arrays (see `SharedSegment.memory`), so that prefills on
        this machine can write into them; the caller closes it. Without it the pool can send, and
        can receive over data planes other than local. `tag`: the pages are opaque, [num_pages, *any
        inner layout]; see `protocols.pages.layout`. `fingerprint`: identifies the model of the KV;
        peers with another fingerprint are refused. `parts`: for each array that holds a part, or
        one copy, of what several ranks hold together, the fields of
        `protocols.pages.components.Part`, as in `{"k": {"start": 4, "whole": 8}}`; by default an
        array holds the whole.

        Raises: LayoutError if a page of a stream is not contiguous, shapes disagree, or an array is
        not in `segment`.
        """
        given = spaces_given(SpaceStreams(tensors, page_size, per_page, window), rows, spaces)
        streams = streams_of(given)
        layout = describe(
            streams,
            given,
            tag=tag,
            fingerprint=fingerprint,
            formats=formats,
            num_pages=num_pages,
            parts=parts,
        )
        if segment is not None:
            check_inside(layout, segment)
        by_stream = {name: a for each in given.values() for name, a in each.arrays.items()}
        arrays = {c: by_stream[c.name] for c in layout.components}
        return cls(layout, segment=segment, arrays=arrays, device=streams[0].device)

    def __repr__(self) -> str:
        layout = self.layout
        memory = (
            "shared"
            if self.segment is not None
            else "private"
            if self.on_host
            else f"on {self.device}"
        )
        memory = "closed" if self._closed else memory
        tag = f", tag {layout.tag!r}" if layout.tag else ""
        places = " and ".join(
            f"{space.count} {unit_named(layout, i)}s"
            + (
                f" of {size} bytes"
                if space.in_rows
                else f", {space.page_size} tokens and {size} bytes each"
            )
            for i, (space, size) in enumerate(zip(layout.spaces, layout.place_bytes, strict=True))
        )
        return f"<PagedPool of {places}, in {len(layout.components)} streams{tag}, {memory}>"

    @property
    def unproven(self) -> list[UnprovenLoan]:
        """Unproven loans that earlier nodes left."""
        return self.quarantine.loans

    @property
    def allocators(self) -> tuple[PageAllocator, ...]:
        """Allocators of the spaces, created on first use. Successive nodes over the pool share
        them.
        """
        return self.places.allocators

    @property
    def pages(self) -> PageAllocator:
        """Allocator of the first space; see `allocators`."""
        return self.places.allocators[0]

    @property
    def rows(self) -> PageAllocator:
        """Allocator of the first space with rows. Raises: LayoutError for a pool without rows."""
        if (space := self.layout.row_space) is None:
            raise LayoutError("the pool has no rows: none of its streams is kept once per request")
        return self.places.allocators[space]

    @property
    def places(self) -> PageAllocator | PlaceAllocator:
        """Store from which rooms take places: `pages` or, in a pool with several spaces, a store
        over `allocators`.
        """
        if self._places is None:
            layout = self.layout
            self._allocators = self._allocators or tuple(
                PageAllocator(count, unit=unit_named(layout, space))
                for space, count in enumerate(layout.counts)
            )
            self._places = _store_over(layout, self._allocators)
            self.quarantine.keep_out_of(self._places, always=True)
        return self._places

    def places_over(self, pages: PageAllocator) -> PageAllocator | PlaceAllocator:
        """Return a store like `places` that uses `pages` instead of the pool's own allocator of the
        first space.
        """
        return _store_over(self.layout, [pages, *self.allocators[1:]])

    @property
    def segment(self) -> SharedSegment | None:
        """Segment that peers on this machine can open; None for private memory, and for arrays
        outside of a segment.
        """
        found = self._memory or self._segment
        return found if found is not None and found.fd >= 0 else None

    @property
    def on_host(self) -> bool:
        """True if the CPU can access every buffer."""
        return self.device == HOST

    @property
    def mapped_by(self) -> tuple[object, ...]:
        """Objects that keep the memory mapped while they are referenced, even after `close`. Read
        it before `close`.
        """
        return (
            *self._arrays.values(),
            *([self._memory.memory] if self._memory is not None else []),
        )

    def array(
        self, component_name: str, *, start: int | None = None, replica: int | None = None
    ) -> NDArray[Any]:
        """Return a numpy view of one component; in page-first pools it is strided.

        The view is [num_pages, page_size, *shape], [num_pages, *shape] for a component with one
        entry per page, or [num_rows, *shape] for one in rows, with the numbers of the component's
        space. A dtype that numpy lacks appears as
        unsigned integers: bfloat16 as uint16, float8 as uint8. In an opaque pool, a component is
        uint8 [num_pages, size_bytes] if kvflow allocated it, and has the shape of the engine's
        array if it was wrapped. `start` and `replica` select among several parts or copies with
        one name.

        Raises: LayoutError for an unknown name, if `start` and `replica` match more than one
        component or none, for a closed pool, or for memory that the CPU cannot access.
        """
        component = self._component(component_name, start, replica)
        given = self._arrays.get(component)
        if given is None:
            return self._view(component)
        if isinstance(given, np.ndarray):
            return given
        if given.device.type != "cpu":
            raise LayoutError(
                f"stream {component_name!r} is on {given.device}: numpy reads host memory only"
            )
        import torch

        bits = _BITS.get(str(given.dtype).removeprefix("torch."))
        found: NDArray[Any] = (
            (given if bits is None else given.view(getattr(torch, bits))).detach().numpy()
        )
        return found

    def tensor(
        self, component_name: str, *, start: int | None = None, replica: int | None = None
    ) -> torch.Tensor:
        """Return a torch view of one component, selected and shaped as by `array`.

        Raises: LayoutError for an unknown name, if `start` and `replica` match more than one
        component or none, for a closed pool, or for a component that is not aligned for its dtype;
        MisuseError if torch is not installed.
        """
        which = (component_name, start, replica)
        found = self._tensors.get(which)
        if found is None:
            found = self._tensors[which] = self._tensor(self._component(*which))
        return found

    def pages_bytes(self, pages: PageIndices) -> NDArray[np.uint8]:
        """Return a copy of whole pages of the first space; see `places_bytes`."""
        return self.places_bytes(0, pages)

    def rows_bytes(self, rows: PageIndices) -> NDArray[np.uint8]:
        """Return a copy of whole rows of the first space with rows; see `places_bytes`.

        In a pool without rows, a row has 0 bytes.
        """
        if (space := self.layout.row_space) is None:
            return np.empty((len(rows), 0), dtype=np.uint8)
        return self.places_bytes(space, rows)

    def places_bytes(self, space: int, indices: PageIndices) -> NDArray[np.uint8]:
        """Return a copy of whole places of a space, uint8 [n, place_bytes], component after
        component.

        Meant for tests. Raises: LayoutError for memory that the CPU cannot access.
        """
        if not self.on_host:
            raise LayoutError(f"the pool is on {self.device}, whose memory the CPU cannot read")
        indices = np.asarray(indices, dtype=np.int64)
        columns: list[NDArray[np.uint8]] = [np.empty((indices.size, 0), dtype=np.uint8)]
        for c in self.layout.components:
            if c.space != space:
                continue
            b, count = self.layout.buffers[c.buffer], self.layout.count_of(c)
            whole = (count - 1) * b.page_bytes + c.offset + c.size_bytes
            flat = np.ctypeslib.as_array((ctypes.c_uint8 * whole).from_address(b.address))
            shape, strides = (count, c.size_bytes), (b.page_bytes, 1)
            found = np.lib.stride_tricks.as_strided(
                flat[c.offset :], shape=shape, strides=strides, writeable=False
            )
            columns.append(found[indices])
        return np.concatenate(columns, axis=1)

    def close(self) -> None:
        """Release the memory, which is unmapped once its last view is gone. The segment of a
        wrapped pool stays open. Idempotent.

        While `unproven` is not empty, close a pool only at the end of the process. A writer that
        uses plain addresses (mooncake) could otherwise write into what is mapped there later.
        """
        self._closed = True
        self._tensors.clear()
        self._arrays.clear()
        if self._memory is not None:
            self._memory.close()

    def _component(self, name: str, start: int | None, replica: int | None) -> Component:
        if self._closed:
            raise LayoutError("the pool is closed")
        group = self._components.get(name)
        if group is None:
            names = ", ".join(list(self._components)[:5])
            raise LayoutError(
                f"the pool has no component {name!r}; it has {len(self._components)}: {names} ..."
            )
        found = [c for c in group if start in (None, c.start) and replica in (None, c.replica)]
        if len(found) != 1:
            labels = ", ".join(c.label for c in group[:5]) + (" ..." if len(group) > 5 else "")
            raise LayoutError(
                f"component {name!r}: start {start} and replica {replica} are those of "
                f"{len(found)} components, not of one; the pool has {labels}"
            )
        return found[0]

    def _view(self, c: Component) -> NDArray[Any]:
        # A pool without its own memory has an array for every component that the CPU can access.
        if self._memory is None:
            raise LayoutError(f"component {c.name!r} is on {self.device}, and has no array")
        b = self.layout.buffers[c.buffer]
        dtype = np.dtype(_BITS.get(c.dtype, c.dtype))
        page_size = self.layout.spaces[c.space].page_size
        shape = (page_size, *c.shape) if c.unit == SLOT and c.dtype != OPAQUE else c.shape
        inner: list[int] = [dtype.itemsize]
        for length in reversed(shape[1:]):
            inner.append(inner[-1] * length)
        start, strides = (
            b.address - self._memory.address + c.offset,
            (b.page_bytes, *reversed(inner)),
        )
        return np.ndarray(
            (self.layout.count_of(c), *shape), dtype, self._memory.memory, start, strides
        )

    def _tensor(self, c: Component) -> torch.Tensor:
        try:
            import torch
        except ModuleNotFoundError:
            raise MisuseError(
                "PagedPool.tensor needs torch, which is not installed: use PagedPool.array, or pip "
                "install 'kvflow[engine]'"
            ) from None
        given = self._arrays.get(c)
        if isinstance(given, torch.Tensor):
            return given
        bits = None if c.dtype == OPAQUE else _BITS.get(c.dtype)
        # torch.from_numpy refuses dtypes that numpy lacks, so it receives their bits as integers.
        seen = self._view(c) if given is None else given if bits is None else given.view(bits)
        itemsize = DTYPE_BYTES.get(c.dtype, 1)
        if any(step % itemsize for step in seen.strides) or seen.ctypes.data % itemsize:
            raise misplaced(c, self.layout.buffers[c.buffer].page_bytes)
        tensor = torch.from_numpy(seen)
        return tensor if bits is None else tensor.view(getattr(torch, c.dtype))


def _store_over(
    layout: PoolLayout, allocators: Sequence[PageAllocator]
) -> PageAllocator | PlaceAllocator:
    # A pool of one space needs no store over its only allocator.
    return allocators[0] if len(allocators) == 1 else PlaceAllocator(layout, allocators)


def _placed(layout: PoolLayout, offsets: Sequence[int], address: int) -> PoolLayout:
    buffers = zip(layout.buffers, offsets, strict=True)
    placed = tuple(msgspec.structs.replace(b, address=address + offset) for b, offset in buffers)
    return msgspec.structs.replace(layout, buffers=placed)


def check_inside(layout: PoolLayout, segment: SharedSegment) -> None:
    """Check that the buffers of `layout` lie in `segment`. Raises: LayoutError."""
    if segment.fd < 0:
        raise LayoutError(
            f"{segment!r} cannot be opened by a peer: make it with SharedSegment.create"
        )
    for b in layout.buffers:
        offset = b.address - segment.address
        if offset < 0 or offset + b.size_bytes > segment.size_bytes:
            raise LayoutError(
                f"stream {b.name!r} does not lie in {segment!r}: make it over its memory, as in "
                f"np.frombuffer(segment.memory, ...)"
            )
