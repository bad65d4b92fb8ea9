"""The few calls on files that the `file` store makes; tests put a disk that fails, or hangs, below
the real one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress


class Disk:
    """Each raises OSError. Several threads at once."""

    def write_new(self, path: str, parts: Sequence[bytes | memoryview], *, sync: bool) -> None:
        """A file that must not be there yet.

        An error may leave a part of it. `sync`: it is on the medium.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self.write(descriptor, parts)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
        """All of it: a disk that is nearly full takes a part of what it is given."""
        left = [memoryview(part) for part in parts]
        while left:
            written = os.writev(descriptor, left)
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if left:
                left[0] = left[0][written:]

    def rename(self, path: str, to: str, *, sync: bool) -> None:
        os.rename(path, to)
        if sync:
            folder = os.open(os.path.dirname(to), os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def read(self, path: str, header: bytearray, value: memoryview) -> int:
        """The first bytes of a file.

        Returns how many of all those asked for there are, and one more for a file that is longer.
        Marks it as used."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            parts, over, done = [memoryview(header), value], bytearray(1), 0
            while parts:
                if not (count := os.preadv(descriptor, [*parts, over], done)):
                    break
                done += count
                while parts and count >= parts[0].nbytes:
                    count -= parts.pop(0).nbytes
                if parts:
                    parts[0] = parts[0][count:]
            with suppress(OSError):  # a disk that is read-only now
                os.utime(descriptor)
            return done
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        """Nothing, where there is no such file."""
        with suppress(FileNotFoundError):
            os.unlink(path)
