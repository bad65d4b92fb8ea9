"""Pools over memory that an engine describes by addresses and sizes, without arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvflow.memory.device import HOST
from kvflow.memory.pool import PagedPool, check_inside
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.components import Buffer, Component
from kvflow.protocols.pages.kinds import PAGE
from kvflow.protocols.pages.layout import PoolLayout, whole_number


class Region(NamedTuple):
    """One stream of a pool: page p lies at `address + p * page_bytes`.

    `size_bytes` is the size of the memory. Bytes at its end that do not fill a page are not used.
    `format` is compared between peers, because the bytes have no other description.
    """

    name: str
    address: int
    size_bytes: int
    page_bytes: int
    format: str = ""

    @property
    def num_pages(self) -> int:
        return self.size_bytes // self.page_bytes


def pool_at(
    regions: Sequence[Region],
    page_size: SupportsIndex,
    *,
    fingerprint: str = "",
    segment: SharedSegment | None = None,
    device: str = HOST,
) -> PagedPool:
    """Return a pool over `regions`, which have the same number of pages, without a copy.

    The pool does not own the memory: the caller keeps it allocated until every node over the pool
    is closed. In host memory, `PagedPool.array(name)` is uint8 [num_pages, page_bytes]. Memory on a
    `device` ("cuda:0") has no such view. `segment` is the shared segment that contains the regions,
    and `fingerprint` identifies the model; see `PagedPool.wrap`.

    Raises: LayoutError if there is no region, a region holds no page, regions overlap or have
    different numbers of pages, or a region is not in `segment`.
    """
    if not regions:
        raise LayoutError("a pool needs at least one region")
    sized = [_checked(region) for region in regions]
    first = sized[0]
    for region in sized:
        if region.num_pages != first.num_pages:
            raise LayoutError(
                f"region {region.name!r} has {region.num_pages} pages, {first.name!r} has "
                f"{first.num_pages}: regions of one pool have as many"
            )
    _check_apart(sized)
    components = tuple(
        Component(
            region.name,
            "uint8",
            (region.page_bytes,),
            number,
            0,
            region.page_bytes,
            PAGE,
            region.format,
        )
        for number, region in enumerate(sized)
    )
    buffers = tuple(
        Buffer(region.name, region.page_bytes, region.num_pages * region.page_bytes, region.address)
        for region in sized
    )
    slots = whole_number("page_size", page_size)
    layout = PoolLayout(
        slots, first.num_pages, components, buffers, tag="", fingerprint=fingerprint
    )
    layout.check()
    if segment is not None:
        check_inside(layout, segment)
    arrays = {c: _view(region) for c, region in zip(components, sized, strict=True)}
    return PagedPool(
        layout, segment=segment, arrays=arrays if device == HOST else None, device=device
    )


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
    return Region(name, address, size_bytes, page_bytes, region.format)


def _check_apart(regions: Sequence[Region]) -> None:
    for a, b in pairwise(sorted(regions, key=lambda region: region.address)):
        if a.address + a.num_pages * a.page_bytes > b.address:
            raise LayoutError(
                f"regions {a.name!r} and {b.name!r} share bytes: give every byte of a page once"
            )


def _view(region: Region) -> NDArray[Any]:
    count = region.num_pages * region.page_bytes
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(region.address))
    return flat.reshape(region.num_pages, region.page_bytes)
