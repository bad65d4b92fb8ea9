"""A `file` store in a directory of the test, over a disk that does what the test tells it."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from kvflow.serve.cache.storage.call import Call
from kvflow.serve.cache.storage.disk import Disk
from kvflow.serve.cache.storage.file import FileBackend
from kvflow.serve.cache.storage.guarded import GuardedStorage, Limits
from kvflow.serve.cache.storage.port import Result
from kvflow.serve.cache.storage.record import HEADER_BYTES

VALUE_BYTES = 3 * 4096 - HEADER_BYTES + 1  # a file takes 4 blocks
FILE_BYTES = 4 * 4096
IDENTITY = sha256(b"a model").digest()
QUICK = Limits(slow_s=5, stall_s=5, pause_s=0.02, max_pause_s=0.1)
"""Long waits for what has to work, short ones for what has to be tried again."""


class FaultyDisk(Disk):
    """The real one, but for calls named in `fails` (an errno) or `waits` (until the event)."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.waits: dict[str, threading.Event] = {}
        self.begun = threading.Semaphore(0)  # released by each call that waits
        self.counted: dict[str, int] = {}

    def hold(self, *calls: str) -> threading.Event:
        go = threading.Event()
        self.waits.update(dict.fromkeys(calls, go))
        return go

    def go_on(self) -> None:
        """Nothing fails or waits any more."""
        self.fails.clear()
        waits = list(self.waits.values())
        self.waits.clear()
        for go in waits:
            go.set()

    async def waited(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=20)

    def _step(self, what: str) -> None:
        self.counted[what] = self.counted.get(what, 0) + 1
        if (event := self.waits.get(what)) is not None:
            self.begun.release()
            assert event.wait(30)
        if (number := self.fails.get(what)) is not None:
            raise OSError(number, errno.errorcode[number])

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
        if "write" in self.fails:  # a part of it is written: what a full disk does
            super().write(descriptor, [parts[0], memoryview(parts[1])[:1000]])
        self._step("write")
        super().write(descriptor, parts)

    def rename(self, path: str, to: str, *, sync: bool) -> None:
        self._step("rename")
        super().rename(path, to, sync=sync)

    def read(self, path: str, header: bytearray, value: memoryview) -> int:
        self._step("read")
        return super().read(path, header, value)

    def remove(self, path: str) -> None:
        self._step("remove")
        super().remove(path)


def key(number: int) -> bytes:
    return sha256(b"key %d" % number).digest()


def value(number: int, size: int = VALUE_BYTES) -> memoryview:
    return memoryview(bytearray(random.Random(number).randbytes(size)))


def empty(count: int, size: int = VALUE_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def values(*numbers: int) -> list[memoryview]:
    return [value(number) for number in numbers]


def backend(
    path: Path, pages: int = 100, *, disk: Disk | None = None, identity: bytes = IDENTITY
) -> FileBackend:
    return FileBackend(str(path), identity, VALUE_BYTES, pages * FILE_BYTES, disk=disk)


def opened(
    path: Path, pages: int = 100, *, disk: Disk | None = None, identity: bytes = IDENTITY
) -> FileBackend:
    found = backend(path, pages, disk=disk, identity=identity)
    found.open()
    return found


def put(store: FileBackend, *numbers: int) -> list[Result]:
    return store.put(keys(*numbers), values(*numbers))


def get(store: FileBackend, *numbers: int) -> list[Result]:
    """What becomes of each page; what is read is what was put."""
    found = store.get(keys(*numbers), into := empty(len(numbers)))
    for number, page, result in zip(numbers, into, found, strict=True):
        assert result is not Result.DONE or page == value(number)
    return found


async def ended(call: Call) -> list[bool]:
    async with asyncio.timeout(20):
        await asyncio.shield(call.released)
        return await asyncio.shield(call.done)


async def wrote(pages: GuardedStorage, *numbers: int) -> list[bool]:
    return await ended(pages.put(keys(*numbers), values(*numbers)))


async def read(pages: GuardedStorage, *numbers: int) -> list[bool]:
    """Which pages come back; those are what was put."""
    found = await ended(pages.get(keys(*numbers), into := empty(len(numbers))))
    for number, page, is_there in zip(numbers, into, found, strict=True):
        assert not is_there or page == value(number)
    return found


@asynccontextmanager
async def store(
    path: Path, pages: int = 100, *, disk: Disk | None = None, **limits: Any
) -> AsyncIterator[GuardedStorage]:
    """`limits`: those that are not `QUICK`."""
    given = msgspec.structs.replace(QUICK, **limits)
    made = await GuardedStorage.open(backend(path, pages, disk=disk), given)
    try:
        yield made
    finally:
        await made.close()


def pages_in(path: Path) -> list[Path]:
    return sorted(path.glob("*/??/*"))


def unfinished_in(path: Path) -> list[Path]:
    return list(path.glob("*/writing/*"))
