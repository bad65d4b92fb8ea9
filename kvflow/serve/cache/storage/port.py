"""What the tiers ask of a store of pages, and what a store has to bring along."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import msgspec

KEY_BYTES = 32
"""Of a page's digest, `protocols.cache.hashes.page_hashes`."""


class Result(IntEnum):
    """What has become of one page of a batch."""

    FAILED = 0
    """The store had an error, or was not asked any more after one."""
    DONE = 1
    """Put: it is in the store, now or since before.

    Get: every byte is in the buffer, and right. Lookup: it is there."""
    ABSENT = 2
    """Get, lookup: it is not there. Put: there is no room for it."""
    DAMAGED = 3
    """Get: what was there is not what was stored. It has been removed, where that is possible."""


class StorageCounts(msgspec.Struct):
    """Pages, unless the name says otherwise; all only grow."""

    stored: int = 0
    not_stored: int = 0
    """For whatever reason."""
    read: int = 0
    not_read: int = 0
    """For whatever reason; those that were `absent` and `damaged` included."""
    absent: int = 0
    damaged: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0
    errors: int = 0
    """Slices of calls in which the store had an error."""
    slow: int = 0
    """Slices that took too long, whatever came of them."""
    stalls: int = 0
    """Calls that were given up, because a slice of them did not end."""
    refused: int = 0
    """Calls that were not begun: the store is left alone, or too many calls wait."""
    trips: int = 0
    """How often a breaker has opened."""


class StorageState(StorageCounts, kw_only=True):
    """What a store has done, and whether it is asked now."""

    name: str
    readable: bool
    writable: bool


class StorageCall(Protocol):
    """One batch that is under way. All of it is used on the event loop it was begun on."""

    done: asyncio.Future[list[bool]]
    """Per key, in their order: whether it was stored, or read whole and right.

    Never an error. Who cancels it cancels the call."""
    released: asyncio.Future[None]
    """When nothing touches the buffers any more: with `done`, or later, when a call to a store that
    hangs returns.
    """

    def cancel(self) -> None:
        """Nothing is begun any more: `done` has what had been done until now.

        The slice that is under way runs on until `released`. Idempotent."""


class Storage(Protocol):
    """A store of pages of one identity, for one event loop.

    None of its calls raises for what the store does.
    """

    name: str
    """Of its kind."""
    value_bytes: int
    """Of one page."""
    counts: StorageCounts

    @property
    def readable(self) -> bool:
        """Whether it is asked at all: false while it is left alone after errors."""

    @property
    def writable(self) -> bool: ...

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> StorageCall:
        """Store `buffers[i]` under `keys[i]`; each has `value_bytes` bytes and must not change
        until `released`.

        Raises: MisuseError for keys that are no digests, and buffers of another size.
        """

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> StorageCall:
        """Read the page of `keys[i]` into `buffers[i]`, whose bytes are undefined where the answer
        is False, and until `released`. Raises: MisuseError, as `put`, and for a buffer that is
        read-only."""

    async def exists_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are there; 0 when the store cannot say.

        Raises: MisuseError, as `put`.
        """

    async def close(self) -> None:
        """Cancel and drain every call. What hangs is left alone after a while."""


class Backend(Protocol):
    """Blocking code over one store; its calls come from several threads at once.

    Whatever it raises counts as FAILED for the whole batch, so what it has done of a batch is best
    returned.
    """

    name: str
    value_bytes: int
    pages_at_once: int
    """No more are put or read in one call: what takes long is not stopped,
    or given up, in between.
    """

    def open(self) -> None:
        """Once, before anything else. Raises: MisuseError for what will not change by itself."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]: ...

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]: ...

    def exists(self, keys: Sequence[bytes]) -> list[Result]: ...

    def probe_reads(self) -> None:
        """Returns when it makes sense to read again. Raises anything when it does not."""

    def probe_writes(self) -> None: ...

    def close(self) -> None:
        """Once, when no call runs."""
