"""Interfaces of a page store. The tiers use a `Storage`. A `Backend` adapts one kind of store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import msgspec

KEY_BYTES = 32  # size of a page's digest, see `protocols.cache.hashes.page_hashes`


class Result(IntEnum):
    """The result for one page of a batch."""

    FAILED = 0
    """The store had an error, or was not called because of an earlier error."""
    DONE = 1
    """Put, lookup: the page is in the store. Get: the buffer has all bytes of the page, intact."""
    ABSENT = 2
    """Get, lookup: the page is not in the store. Put: there is no room for it."""
    DAMAGED = 3
    """Get: the bytes differ from those that were stored. The store removed the page if it could."""


class StorageCounts(msgspec.Struct):
    """Counters of a store since it was opened, in pages unless noted."""

    stored: int = 0
    not_stored: int = 0
    """Pages that were not stored, for any reason."""
    read: int = 0
    not_read: int = 0
    """Pages that were not read for any reason, including `absent` and `damaged` ones."""
    absent: int = 0
    damaged: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0
    errors: int = 0
    """Slices of calls in which the store had an error."""
    slow: int = 0
    """Slices that took too long, whatever their result."""
    stalls: int = 0
    """Calls that were abandoned because a slice did not end in time."""
    refused: int = 0
    """Calls that never began, because a breaker was open, every thread hung, or too many calls
    waited.
    """
    trips: int = 0
    """How often a breaker opened."""


class StorageState(StorageCounts, kw_only=True):
    """Counters of a store. `readable` and `writable` show which calls it accepts now."""

    name: str
    readable: bool
    writable: bool


class StorageCall(Protocol):
    """A batch call under way. Use it only on the event loop on which it began."""

    done: asyncio.Future[list[bool]]
    """Completes with one bool per key, in order: True if the page was stored, or read completely
    and correctly.

    It never completes with an exception. Cancelling it cancels the call.
    """
    released: asyncio.Future[None]
    """Completes when the store no longer accesses the buffers: together with `done`, or later if
    `done` completed while a slice was under way.
    """

    def cancel(self) -> None:
        """Begin no further slice, and complete `done` with the results so far.

        A slice under way continues, and `released` completes when it ends. Idempotent.
        """


class Storage(Protocol):
    """A store for pages of one identity, for one event loop. Store errors only show in results."""

    name: str
    value_bytes: int  # size of one page
    counts: StorageCounts

    @property
    def readable(self) -> bool:
        """True while the store accepts reads and lookups. False while it is paused after errors."""

    @property
    def writable(self) -> bool: ...

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> StorageCall:
        """Begin to store `buffers[i]` under `keys[i]`. Each buffer has `value_bytes` bytes, which
        must not change until the call is `released`.

        Raises: MisuseError for a key that is not a digest, or a buffer of another size.
        """

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> StorageCall:
        """Begin to read the page of `keys[i]` into `buffers[i]`.

        The bytes of a buffer are undefined until the call is `released`, and stay so after a
        failure.

        Raises: MisuseError as in `put`, and for a read-only buffer.
        """

    async def exists_prefix(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys in the store. A failed lookup counts as absent.

        Raises: MisuseError.
        """

    async def close(self) -> None:
        """Cancel every call, and wait a limited time. Calls that hang are abandoned."""


class Backend(Protocol):
    """Blocking code over one store. Several threads call it at once.

    An exception counts as FAILED for the whole batch. So a backend should catch errors, and return
    the results of the pages that it completed.
    """

    name: str
    value_bytes: int
    pages_at_once: int
    """Largest number of pages in one put or get, which cannot be stopped part-way."""

    def open(self) -> None:
        """Open the store. This is called first. Raises: MisuseError for a permanent error."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]: ...

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]: ...

    def exists(self, keys: Sequence[bytes]) -> list[Result]: ...

    def probe_reads(self) -> None:
        """Try to read. Raise any exception if reads should stay paused."""

    def probe_writes(self) -> None: ...

    def close(self) -> None:
        """Close the store. This is called once, while no other call runs."""
