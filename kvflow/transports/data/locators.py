"""Names of engines, and locators. A locator is an engine's description of a pool, compressed."""

from __future__ import annotations

import base64
import re
import secrets
import zlib

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import ProcessIdentity

MAX_LOCATOR = 4096
_MAX_BYTES = 64 << 10
_PRINTABLE = re.compile(r"[!-~]{1,4096}\Z", re.ASCII)


def new_name(process: ProcessIdentity) -> str:
    return f"{_prefix(process)}{secrets.token_hex(8)}"


def is_name_of(name: str, process: ProcessIdentity) -> bool:
    return name.startswith(_prefix(process))


def _prefix(process: ProcessIdentity) -> str:
    return f"kvflow-{process.pid}-{process.start_ticks}-"


def regions_of(layout: PoolLayout) -> list[tuple[int, int]]:
    """Return (address, size) of each memory region. Buffers that touch form one region."""
    return _joined(layout, adjacent=True)


def regions_apart(layout: PoolLayout) -> list[tuple[int, int]]:
    """Return (address, size) of each memory region. Only buffers that overlap form one region."""
    return _joined(layout, adjacent=False)


def _joined(layout: PoolLayout, *, adjacent: bool) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for address, size in sorted((b.address, b.size_bytes) for b in layout.buffers):
        # The spaces of one pool may share their memory.
        if joined and address < sum(joined[-1]) + adjacent:
            start, before = joined[-1]
            joined[-1] = (start, max(before, address + size - start))
        else:
            joined.append((address, size))
    return joined


def pack_locator(described: bytes) -> str:
    """Return a locator that carries a description.

    Raises: LayoutError when the locator would be too long.
    """
    locator = base64.b85encode(zlib.compress(described, 9)).decode()
    if len(locator) > MAX_LOCATOR:
        raise LayoutError(
            f"the pool's buffers take {len(locator)} characters to describe, the limit is "
            f"{MAX_LOCATOR}; use a page-first pool"
        )
    return locator


def unpack_locator(locator: str) -> bytes:
    """Return the description in a locator. Raises: ValueError naming what is wrong."""
    if not _PRINTABLE.match(locator):
        raise ValueError("not base 85")
    # The output is bounded, because a few bytes from the wire could expand to gigabytes.
    inflate = zlib.decompressobj()
    try:
        described = inflate.decompress(base64.b85decode(locator), _MAX_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflate.eof:
        raise ValueError(f"cut short, or more than {_MAX_BYTES} bytes")
    return described
