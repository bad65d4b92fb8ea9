"""Processes that begin as a copy of this one, with everything imported."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TypeVar

SHOW_OUTPUT = "MUTANTS_SHOW_OUTPUT"  # set it to see what judges print

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


def fork(work: Callable[[], None]) -> int:
    """Start `work` in a new process, without output but what is logged; its process id.

    Its status is 0 when `work` has returned. It is killed with this process: a mutant may loop for
    ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed a moment before
            os._exit(status)
        if not os.environ.get(SHOW_OUTPUT):
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        work()
        status = 0
    finally:  # nothing of the copy may go on: neither the caller's cleaning up nor its loops
        if status:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def in_a_child(work: Callable[[], T]) -> Callable[[], T]:
    """Start `work` in a new process; the returned function waits for its result. Raises:
    RuntimeError if the process died.
    """
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)

    def dump() -> None:
        with open(descriptor, "wb", closefd=False) as stream:
            pickle.dump(work(), stream)

    pid = fork(dump)

    def wait() -> T:
        try:
            if os.waitpid(pid, 0)[1]:
                raise RuntimeError("a process of the tool died; what it printed stands above")
            os.lseek(descriptor, 0, os.SEEK_SET)
            with open(descriptor, "rb", closefd=False) as stream:
                result: T = pickle.load(stream)
            return result
        finally:
            os.close(descriptor)

    return wait


def own_time_s(pid: int) -> float:
    """A clock that stands still while this process waits for a core. It counts from anywhere.

    Where the kernel does not tell how long a process has waited, it is the plain clock.
    """
    try:
        waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        waited_ns = 0
    return monotonic() - waited_ns / 1e9
