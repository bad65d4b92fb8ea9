"""Which pages a directory holds, in the order of their use, and how many bytes they take.

In memory, under one lock that is never held across a call on a file."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvflow.serve.cache.storage.port import KEY_BYTES


class Entry(NamedTuple):
    """One file.

    Numbers are never used twice, so what removes a file cannot meet another one of the same key.
    """

    key: bytes
    number: int


class FileIndex:
    """Counts whole files: `file_bytes` each, those that are being written or could not be removed
    included.
    """

    def __init__(self, capacity_bytes: int, file_bytes: int) -> None:
        self._most, self._file_bytes, self._lock = (
            capacity_bytes // file_bytes,
            file_bytes,
            threading.Lock(),
        )
        # The one that was used last at the end.
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._stuck: list[Entry] = []
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
        """From what lies in the directory, the one that was used last at the end.

        Returns what is to be removed: all but the last of a key, and the first of what exceeds the
        capacity."""
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
        """It counts as used now."""
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
        """A new file, None where all there is room for is being written; and those whose place it
        takes, to be removed before it is written. They are found no more."""
        with self._lock:
            leaving = []
            while self._taken() >= self._most and (self._stuck or self._entries):
                leaving.append(
                    self._stuck.pop() if self._stuck else self._entries.popitem(last=False)[1]
                )
            if self._taken() >= self._most:
                return None, leaving
            return self._new(key), leaving

    def probe(self) -> Entry:
        """A file that is removed again, beyond the capacity. It is given up by `abandon`."""
        with self._lock:
            return self._new(bytes(KEY_BYTES))

    def abandon(self) -> None:
        """A file that was reserved is not there, and will not be."""
        with self._lock:
            self._writing -= 1

    def not_removed(self, entries: Iterable[Entry]) -> None:
        """Their files may still be there: they count, and go first, next time."""
        with self._lock:
            self._stuck.extend(entries)

    def commit(self, entry: Entry) -> bool:
        """Its file is whole and in its place.

        False when another one of this key was faster: then it has to be removed and abandoned."""
        with self._lock:
            if entry.key in self._entries:
                return False
            self._writing -= 1
            self._entries[entry.key] = entry
            return True

    def drop(self, entry: Entry) -> bool:
        """It is not to be found any more. Whether it was."""
        with self._lock:
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
