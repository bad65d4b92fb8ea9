"""Disk faults below a shipped `file` store, in virtual time: errors, hangs, torn and lost pages.

The store works in real threads, each of which runs only while the event loop waits for it. Where
the disk takes time, the thread pauses until a timer of its process wakes it. If the process is
killed, the thread stops there, in the middle of a file.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvflow.aio import Job
from kvflow.proof.sim.loop import VirtualLoop, VirtualThread, current_process
from kvflow.proof.sim.times import THREAD_S
from kvflow.proof.sim.virtual_thread import LockStep
from kvflow.serve.cache.storage.disk import Disk
from kvflow.serve.cache.storage.record import HEADER_BYTES

STEP_S = (0.00005, 0.001)
HANG_S = (0.2, 2.0)
ON_DISKS = ("disk error", "disk full", "disk hangs", "page torn", "page lost")


class KilledError(BaseException):
    """Raised in a thread of a store whose process was killed."""


class StoreThreads(VirtualThread):
    """Replacement for a store's threads, each of which runs only while the loop waits for it."""

    def __init__(self, loop: VirtualLoop, steps: list[LockStep[Any]]) -> None:
        self._loop, self._steps = loop, steps

    def begin(self, done: asyncio.Future[Any], job: Job[Any]) -> None:
        self._loop.call_later(self._loop.rng.uniform(*THREAD_S), self._start, done, job.run)

    def _start(self, done: asyncio.Future[Any], work: Callable[[], Any]) -> None:
        process = current_process()
        assert process is not None
        step: LockStep[Any] = LockStep(self._loop, process, work)
        self._steps.append(step)
        step.answer.add_done_callback(partial(_pass_on, done))


def _pass_on(done: asyncio.Future[Any], answer: asyncio.Future[Any]) -> None:
    if answer.cancelled() or done.done():
        return
    error = answer.exception()
    if error is None:
        done.set_result(answer.result())
    elif isinstance(error, KilledError):
        done.set_result(None)
    else:
        done.set_exception(error)


class DiskFaults:
    """Disk faults of one run. Each kind is enabled in half of the runs."""

    def __init__(self, rng: random.Random, struck: Counter[str]) -> None:
        """Draw the kinds. `struck` counts the faults."""
        self.rng, self.struck, self.on = rng, struck, True
        self.kinds = frozenset(kind for kind in ON_DISKS if rng.random() < 0.5)
        self._every = rng.randint(3, 20)
        self.uses = 0  # number of file accesses, from which file times are made

    def strikes(self, kind: str, *, most: bool = False) -> bool:
        """Return True if a fault of this kind strikes now. With `most`, the chance is one half."""
        if not self.on or kind not in self.kinds or self.rng.randrange(2 if most else self._every):
            return False
        self.struck[kind] += 1
        return True


class FaultyDisk(Disk):
    """The real disk with injected faults, as one process sees it."""

    def __init__(self, faults: DiskFaults) -> None:
        self._faults = faults
        self.dead = False
        # Keys of pages whose files were completed. The disk may have lost some of them since.
        self.whole: set[bytes] = set()

    def _takes_time(self) -> None:
        thread = threading.current_thread()
        if isinstance(thread, LockStep):
            hangs = self._faults.strikes("disk hangs")
            thread.stand(self._faults.rng.uniform(*(HANG_S if hangs else STEP_S)))
        if self.dead:
            raise KilledError

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
        whole = b"".join(bytes(part) for part in parts)
        cut = self._faults.rng.randint(0, len(whole))
        # Write in two steps, so that a killed process can leave an incomplete file.
        super().write(descriptor, [whole[:cut]])
        self._takes_time()
        if self._faults.strikes("disk full"):
            raise OSError(errno.ENOSPC, "no space is left (on purpose)")
        super().write(descriptor, [whole[cut:]])

    def rename(self, path: str, to: str, *, sync: bool) -> None:
        self._takes_time()
        self._fails()
        super().rename(path, to, sync=sync)
        self._used(to)
        self.whole.add(bytes.fromhex(os.path.basename(to).partition(".")[0]))

    def read(self, path: str, header: bytearray, value: memoryview) -> int:
        self._takes_time()
        self._fails()
        size = super().read(path, header, value)
        self._used(path)
        return size

    def remove(self, path: str) -> None:
        if self.dead:
            raise KilledError
        super().remove(path)

    def _used(self, path: str) -> None:
        """Set the file's times from a counter, so that their order is the same in every run."""
        self._faults.uses += 1
        at_ns = self._faults.uses * 1_000_000
        os.utime(path, ns=(at_ns, at_ns))

    def _fails(self) -> None:
        if self._faults.strikes("disk error"):
            raise OSError(errno.EIO, "an error (on purpose)")


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvflow-sim-")


def empty_folder() -> Path:
    """Return the temporary folder of this process, after removing all files in it.

    The subfolders stay for the next run, because making thousands of them takes longer than a run.
    """
    root = Path(_folder().name)
    for path in (*root.glob("*/*/??/*"), *root.glob("*/*/writing/*")):
        path.unlink()
    return root


def spoil(folder: Path, faults: DiskFaults, *, most: bool = False) -> None:
    """Remove some files and damage others, like a failing disk.

    `most` simulates a crash of the machine: half of the remaining files are torn, if the run has
    this fault.
    """
    for path in files_in(folder):
        if faults.strikes("page lost"):
            path.unlink()
        elif faults.strikes("page torn", most=most):
            data = bytearray(path.read_bytes())
            cut = faults.rng.randrange(HEADER_BYTES, len(data))
            # The length stays the same, so that only the checksum can reveal the damage.
            data[cut:] = bytes(byte ^ 0x5A for byte in data[cut:])
            stat = path.stat()
            path.write_bytes(data)
            os.utime(path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))


def files_in(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.glob("*/??/*")))
