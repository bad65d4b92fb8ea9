"""The memory that this process can still allocate: the machine's free memory, within the limits of
the process's control groups.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

_log = logging.getLogger(__name__)
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_Files = tuple[str, str, str]
_V2: _Files = ("memory.max", "memory.current", "inactive_file")
_V1: _Files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Available(msgspec.Struct, frozen=True, order=True):
    """An amount of memory that can still be allocated, and a description of what limits it."""

    size_bytes: int
    limit: str

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes are available ({self.limit})"


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Available | None:
    """Return the smallest amount that the machine or an enclosing control group (v1 or v2) has
    left.

    Returns None if no amount is known.
    """
    return min((*_of_machine(proc), *_of_groups(proc, cgroups)), default=None)


@contextmanager
def one_at_a_time() -> Generator[None]:
    """Let one process of this installation at a time count free memory and allocate it.

    Processes that start together would otherwise count the same memory twice. Where the file system
    has no locks, this logs a warning and waits for nobody.
    """
    # The lock is on the package's directory, which all processes of one installation share.
    folder = Path(__file__).parents[1]
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            _log.warning(
                "%s cannot be locked (%s): processes that start at the same time may count the "
                "same free memory",
                folder,
                error,
            )
        yield
    finally:
        # Closing is not enough: a child that was forked meanwhile keeps the file open.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _of_machine(proc: Path) -> Iterator[Available]:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield Available(int(line.split()[1]) * 1024, "memory of the machine")


def _of_groups(proc: Path, cgroups: Path) -> Iterator[Available]:
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root, files = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", _V1
        else:
            continue
        # In a container the path may be the host's. The root of the mount is then the group of this
        # process.
        group = root / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            yield from _of_group(folder, files)


def _of_group(folder: Path, files: _Files) -> Iterator[Available]:
    limit, used = _lines(folder / files[0]), _lines(folder / files[1])
    # A group without a limit has "max" in this file.
    if not limit or not used or not limit[0].isdigit():
        return
    # The kernel drops inactive file pages before it refuses memory, so they count as available.
    cached = sum(
        int(line.split()[1])
        for line in _lines(folder / "memory.stat")
        if line.startswith(files[2] + " ")
    )
    left = max(0, int(limit[0]) - int(used[0]) + cached)
    yield Available(left, f"control group {folder}, limit {limit[0]}")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
