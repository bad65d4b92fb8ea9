"""File operations of the `file` store. Tests replace them with a disk that fails or hangs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress


class Disk:
    """Operations on files. Several threads may call them at once. Each may raise OSError."""

    def write_new(self, path: str, parts: Sequence[bytes | memoryview], *, sync: bool) -> None:
        """Write a new file, which must not exist yet.

        After an error, a part of the file may remain. With `sync`, return only when the file is on
        the medium.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self.write(descriptor, parts)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write `parts` one after another, completely."""
        # A `writev` may write less than it was given, for example if the disk is nearly full.
        left = [memoryview(part) for part in parts]
        while left:
            written = os.writev(descriptor, left)
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if left:
                left[0] = left[0][written:]

    def rename(self, path: str, to: str, *, sync: bool) -> None:
        os.rename(path, to)
        # A rename changes the folder, so the folder must be synced to make it durable.
        if sync:
            folder = os.open(os.path.dirname(to), os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def read(self, path: str, header: bytearray, value: memoryview) -> int:
        """Fill `header` and `value` from the start of a file, and mark the file as used now.

        Return the number of bytes read. If the file is too long, this is one more than `header` and
        `value` hold.
        """
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # `over` receives one byte past the expected end, if the file has more.
            parts, over, done = [memoryview(header), value], bytearray(1), 0
            while parts:
                if not (count := os.preadv(descriptor, [*parts, over], done)):
                    break
                done += count
                while parts and count >= parts[0].nbytes:
                    count -= parts.pop(0).nbytes
                if parts:
                    parts[0] = parts[0][count:]
            # The time of use is only a hint. A disk that became read-only can still be read.
            with suppress(OSError):
                os.utime(descriptor)
            return done
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        """Remove a file. It is not an error if the file does not exist."""
        with suppress(FileNotFoundError):
            os.unlink(path)
