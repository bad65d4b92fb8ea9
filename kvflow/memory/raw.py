"""Pools over memory that an engine describes by addresses and sizes, without arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvflow.memory.device import HOST
from kvflow.memory.pool import PagedPool, check_inside
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.components import ALL, Buffer, Component, Part
from kvflow.protocols.pages.kinds import PAGE, ROW, SLOT
from kvflow.protocols.pages.layout import PAGES, PoolLayout, Space, whole_number


class Region(NamedTuple):
    """One stream of a pool: place p lies at `address + p * page_bytes`.

    `size_bytes` is the size of the memory. Bytes at its end that do not fill a place are not used.
    `format` is compared between peers, because the bytes have no other description. If the bytes
    lie token by token, `slot_shape` is the shape of one token, in bytes, and `part` says which part
    of a larger stream it is. Otherwise a place is one piece.
    """

    name: str
    address: int
    size_bytes: int
    page_bytes: int
    format: str = ""
    slot_shape: tuple[int, ...] = ()
    part: Part = ALL

    @property
    def num_pages(self) -> int:
        return self.size_bytes // self.page_bytes


class SpaceRegions(NamedTuple):
    """The regions of one space: pages of `page_size` tokens, or rows if `page_size` is 0. `window`
    is that of `protocols.pages.spaces.Space`.
    """

    regions: Sequence[Region]
    page_size: SupportsIndex
    window: SupportsIndex = 0


def pool_at(
    regions: Sequence[Region],
    page_size: SupportsIndex,
    *,
    spaces: Mapping[str, SpaceRegions] | None = None,
    fingerprint: str = "",
    segment: SharedSegment | None = None,
    device: str = HOST,
) -> PagedPool:
    """Return a pool over `regions`, which have the same number of pages, without a copy.

    `spaces` are the further spaces of the pool, by name, after that of `regions`. The pool does not
    own the memory: the caller keeps it allocated until every node over the pool is closed. In host
    memory, `PagedPool.array(name)` is uint8 [num_pages, page_bytes], or [num_pages, page_size,
    *slot_shape] for a region with that. Memory on a `device`
    ("cuda:0") has no such view. `segment` is the shared segment that contains the regions, and
    `fingerprint` identifies the model; see `PagedPool.wrap`.

    Raises: LayoutError if a space has no region, a region holds no page, regions overlap, regions
    of one space have different numbers of pages, or a region is not in `segment`.
    """
    described: list[Space] = []
    components: list[Component] = []
    buffers: list[Buffer] = []
    arrays: dict[Component, Any] = {}
    given = {PAGES: SpaceRegions(regions, page_size), **(spaces or {})}
    for number, (name, each) in enumerate(given.items()):
        sized = [_checked(region) for region in each.regions]
        described.append(_space(name, each, sized))
        for region in sized:
            slots = described[-1].page_size
            unit = SLOT if region.slot_shape else PAGE if slots else ROW
            component = Component(
                region.name,
                "uint8",
                region.slot_shape or (region.page_bytes,),
                len(buffers),
                0,
                region.page_bytes,
                unit,
                region.format,
                *region.part,
                space=number,
            )
            size_bytes = region.num_pages * region.page_bytes
            buffers.append(
                Buffer(region.name, region.page_bytes, size_bytes, region.address, number)
            )
            components.append(component)
            if device == HOST:
                shape = (slots, *region.slot_shape) if region.slot_shape else (region.page_bytes,)
                arrays[component] = _view(region).reshape(region.num_pages, *shape)
    _check_apart(buffers)
    layout = PoolLayout(
        tuple(described), tuple(components), tuple(buffers), tag="", fingerprint=fingerprint
    )
    layout.check()
    if segment is not None:
        check_inside(layout, segment)
    return PagedPool(layout, segment=segment, arrays=arrays or None, device=device)


def _space(name: str, given: SpaceRegions, regions: Sequence[Region]) -> Space:
    if not regions:
        raise LayoutError(
            "a pool needs at least one region"
            if name == PAGES
            else f"space {name!r} needs at least one region"
        )
    first = regions[0]
    for region in regions:
        if region.num_pages != first.num_pages:
            raise LayoutError(
                f"region {region.name!r} has {region.num_pages} pages, {first.name!r} has "
                f"{first.num_pages}: regions of one space have as many"
            )
    slots = whole_number("page_size", given.page_size)
    return Space(name, first.num_pages, slots, whole_number("window", given.window))


def _checked(region: Region) -> Region:
    """Return the region with plain integers, which the wire format needs. Raises: LayoutError."""
    name = region.name
    address, size_bytes, page_bytes = (
        whole_number(f"region {name!r}: {field}", getattr(region, field))
        for field in ("address", "size_bytes", "page_bytes")
    )
    if address < 1 or page_bytes < 1 or size_bytes < page_bytes:
        raise LayoutError(
            f"region {name!r}: {size_bytes} bytes at address {address} do not hold one page of "
            f"{page_bytes} bytes"
        )
    return region._replace(address=address, size_bytes=size_bytes, page_bytes=page_bytes)


def _check_apart(buffers: Sequence[Buffer]) -> None:
    for a, b in pairwise(sorted(buffers, key=lambda buffer: buffer.address)):
        if a.address + a.size_bytes > b.address:
            raise LayoutError(
                f"regions {a.name!r} and {b.name!r} share bytes: give every byte of a place once"
            )


def _view(region: Region) -> NDArray[Any]:
    count = region.num_pages * region.page_bytes
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(region.address))
    return flat.reshape(region.num_pages, region.page_bytes)
