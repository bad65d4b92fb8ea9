"""Interfaces of a store of pages: `Storage` for the tiers, and `Backend` for a kind of store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import msgspec

KEY_BYTES = 32
"""Size of a page's digest, see `protocols.cache.hashes.page_hashes`."""


class Result(IntEnum):
    """The result of a call for one page of a batch."""

    FAILED = 0
    """The store had an error, or was not asked after an earlier error."""
    DONE = 1
    """Put: the page is in the store, possibly since before.

    Get: every byte is in the buffer, and right. Lookup: the page is in the store."""
    ABSENT = 2
    """Get, lookup: the page is not in the store. Put: there is no room for it."""
    DAMAGED = 3
    """Get: the bytes are not those that were stored. The store removed the page if it could."""


class StorageCounts(msgspec.Struct):
    """Counters of a store, in pages unless noted; they only grow."""

    stored: int = 0
    not_stored: int = 0
    """For any reason."""
    read: int = 0
    not_read: int = 0
    """For any reason, `absent` and `damaged` included."""
    absent: int = 0
    damaged: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0
    errors: int = 0
    """Slices of calls in which the store had an error."""
    slow: int = 0
    """Slices that took too long, with any result."""
    stalls: int = 0
    """Calls that were given up, because a slice did not end."""
    refused: int = 0
    """Calls that never began: the store is left alone, or too many calls wait."""
    trips: int = 0
    """Times that a breaker opened."""


class StorageState(StorageCounts, kw_only=True):
    """Counters of a store, and whether it takes calls now."""

    name: str
    readable: bool
    writable: bool


class StorageCall(Protocol):
    """One batch that is under way. Used only on the event loop on which it began."""

    done: asyncio.Future[list[bool]]
    """Per key, in order: True if the page was stored, or read whole and right.

    It never has an error. Cancelling it cancels the call."""
    released: asyncio.Future[None]
    """Done once the store no longer accesses the buffers: with `done`, or later when a call to a
    hanging store returns.
    """

    def cancel(self) -> None:
        """Begin no further slice, and complete `done` with the results so far.

        The slice that is under way continues until `released`. Idempotent."""


class Storage(Protocol):
    """A store of pages of one identity, for one event loop.

    Its calls raise no error of the store.
    """

    name: str
    """Name of the kind of store."""
    value_bytes: int
    """Size of one page."""
    counts: StorageCounts

    @property
    def readable(self) -> bool:
        """True while it takes reads and lookups: not while it is left alone after errors."""

    @property
    def writable(self) -> bool: ...

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> StorageCall:
        """Begin to store `buffers[i]` under `keys[i]`; each has `value_bytes` bytes and must not
        change until `released`.

        Raises: MisuseError for keys that are no digests, and buffers of another size.
        """

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> StorageCall:
        """Begin to read the page of `keys[i]` into `buffers[i]`.

        The bytes are undefined until `released`, and afterwards where `done` has False. Raises:
        MisuseError, as `put`, and for a buffer that is read-only."""

    async def exists_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are in the store; 0 when it cannot answer.

        Raises: MisuseError, as `put`.
        """

    async def close(self) -> None:
        """Cancel every call and wait for its end; calls that hang are left after a while."""


class Backend(Protocol):
    """Blocking code over one store, called from several threads at once.

    An error that it raises counts as FAILED for the whole batch, so it should rather return the
    results of the pages that it finished.
    """

    name: str
    value_bytes: int
    pages_at_once: int
    """Most pages put or read in one call, which is neither stopped nor given up in between."""

    def open(self) -> None:
        """Open the store, once and first. Raises: MisuseError for an error that waiting cannot
        mend.
        """

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]: ...

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]: ...

    def exists(self, keys: Sequence[bytes]) -> list[Result]: ...

    def probe_reads(self) -> None:
        """Try a read. Return if it works; raise any error if reads should stay paused."""

    def probe_writes(self) -> None: ...

    def close(self) -> None:
        """Close the store, once, when no call runs."""
