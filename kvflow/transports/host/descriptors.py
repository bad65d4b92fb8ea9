"""Limits derived from the number of descriptors that this process may have (`ulimit -n`)."""

from __future__ import annotations

import fcntl
import os
import resource
from contextlib import suppress


def descriptors_for(most: int) -> int:
    """Return `most`, or half of this process's limit on descriptors if that is less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, soft // 2)


def prepare_descriptors(most: int) -> None:
    """Let the kernel enlarge this process's table of descriptors for `most` of them, or for half of
    its limit.

    The kernel doubles the table when it is full. In a process with several threads, the thread that
    opens the next descriptor then waits for every other core, for 10 to 90 ms.
    """
    # If the table cannot grow now, the code that needs a descriptor later reports the error.
    with suppress(OSError):
        fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.close(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, descriptors_for(most) - 1))
        finally:
            os.close(fd)
