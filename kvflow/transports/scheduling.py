"""Let woken threads run before one that copies (Linux 6.17 and later; elsewhere nothing changes).

On a machine whose cores are all busy, a woken thread may wait until the scheduler's next tick (4 ms at 250 Hz): longer
than the data plane takes to stop. A thread with a longer time slice than others lets them run first whenever they are
woken; its share of the processor stays the same, and no privilege is needed. Gain and cost: "Threads" in
ARCHITECTURE.md. Kernels 6.12 to 6.16 take such slices too, and keep threads that were not woken waiting for all of it.

Source: sched_setattr(2), and the kernel's documentation of EEVDF, its scheduler: of the threads that have not had more
than their share, it runs the one whose slice is to end first.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys

LONG_SLICE_NS = 100_000_000  # the most the kernel takes; the usual one grows with the cores: 1.4 ms on two
OLDEST_KERNEL = (6, 17)
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}  # of sched_setattr, sched_getattr
_RESET_ON_FORK = 1


class _Attributes(ctypes.Structure):
    """`struct sched_attr`, as it was first published."""

    _fields_ = (
        *(("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64)),
        *(("nice", ctypes.c_int32), ("priority", ctypes.c_uint32)),
        *(("slice_ns", ctypes.c_uint64), ("deadline_ns", ctypes.c_uint64), ("period_ns", ctypes.c_uint64)),
    )


def kernel_knows() -> bool:
    """Whether this machine is one on which slices are set."""
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    known = sys.platform == "linux" and sys.maxsize > 2**32 and platform.machine() in _NUMBERS
    return known and release is not None and (int(release[1]), int(release[2])) >= OLDEST_KERNEL


def take_long_slice() -> None:
    """For the calling thread, not for those it starts; one under another policy (batch, real time) is left alone."""
    if (attributes := _own()) is not None:
        attributes.slice_ns = LONG_SLICE_NS
        attributes.flags |= _RESET_ON_FORK
        _call(0, ctypes.byref(attributes), 0)


def own_slice_ns() -> int:
    """The calling thread's slice as the kernel tells it, 0 where it tells none; for tests."""
    attributes = _own()
    return 0 if attributes is None else int(attributes.slice_ns)


def _own() -> _Attributes | None:
    attributes = _Attributes()
    if not kernel_knows() or _call(1, ctypes.byref(attributes), ctypes.sizeof(attributes), 0):
        return None
    return attributes if attributes.policy == os.SCHED_OTHER else None


def _call(which: int, *arguments: object) -> int:
    """sched_setattr (0) or sched_getattr (1) for the calling thread; not 0 where it is forbidden."""
    return int(ctypes.CDLL(None).syscall(_NUMBERS[platform.machine()][which], 0, *arguments))
