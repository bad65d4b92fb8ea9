"""The pages in a directory, in the order of their use, and the bytes that they occupy.

The index is in memory, under a lock that is never held during a file operation.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvflow.serve.cache.storage.port import KEY_BYTES


class Entry(NamedTuple):
    """The file of one page. No number is used twice, so removing a file never hits a newer one."""

    key: bytes
    number: int


class FileIndex:
    """An index of files of equal size. Files that are being written or are stuck count as used."""

    def __init__(self, capacity_bytes: int, file_bytes: int) -> None:
        self._most = capacity_bytes // file_bytes
        self._file_bytes = file_bytes
        self._lock = threading.Lock()
        # These are in the order of their last use, so eviction takes the first entry.
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._stuck: list[Entry] = []  # files that could not be removed
        self._writing = 0
        self._number = 0

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._taken() * self._file_bytes

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def rebuild(self, found: Iterable[Entry]) -> list[Entry]:
        """Fill the index with files, least recently used first. Return the files to remove.

        These are files with the same key as a later one, and the least recently used files beyond
        the capacity.
        """
        with self._lock:
            surplus = []
            for entry in found:
                self._number = max(self._number, entry.number)
                if (older := self._entries.pop(entry.key, None)) is not None:
                    surplus.append(older)
                self._entries[entry.key] = entry
            while len(self._entries) > self._most:
                surplus.append(self._entries.popitem(last=False)[1])
            return surplus

    def find(self, key: bytes) -> Entry | None:
        """Return the file of `key`, if it is listed, and mark it as used now."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
            return entry

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._entries for key in keys]

    def last_used(self) -> Entry | None:
        with self._lock:
            return next(reversed(self._entries.values()), None)

    def reserve(self, key: bytes) -> tuple[Entry | None, list[Entry]]:
        """Reserve a new file for `key`. Return it, and the files to remove before it is written.

        The files to remove are no longer listed. The new file is None if files being written fill
        the capacity.
        """
        with self._lock:
            leaving = []
            # Files that could not be removed earlier go first: no page can be read from them.
            while self._taken() >= self._most and (self._stuck or self._entries):
                leaving.append(
                    self._stuck.pop() if self._stuck else self._entries.popitem(last=False)[1]
                )
            if self._taken() >= self._most:
                return None, leaving
            return self._new(key), leaving

    def probe(self) -> Entry:
        """Reserve a file for a probe, even beyond the capacity. End it with `abandon`."""
        with self._lock:
            return self._new(bytes(KEY_BYTES))

    def abandon(self) -> None:
        """End a reservation whose file was not kept."""
        with self._lock:
            self._writing -= 1

    def not_removed(self, entries: Iterable[Entry]) -> None:
        """Record files that could not be removed. `reserve` returns them first, to try again."""
        with self._lock:
            self._stuck.extend(entries)

    def commit(self, entry: Entry) -> bool:
        """List a complete file. Return False if its key is already listed: call `abandon` then."""
        with self._lock:
            if entry.key in self._entries:
                return False
            self._writing -= 1
            self._entries[entry.key] = entry
            return True

    def drop(self, entry: Entry) -> bool:
        """Remove a file from the index. Return True if it was listed."""
        with self._lock:
            # A newer file with the same key may be listed instead.
            if self._entries.get(entry.key) != entry:
                return False
            del self._entries[entry.key]
            return True

    def _new(self, key: bytes) -> Entry:
        self._writing += 1
        self._number += 1
        return Entry(key, self._number)

    def _taken(self) -> int:
        return len(self._entries) + len(self._stuck) + self._writing
