"""Let threads that carry messages run before the one that copies (Linux 6.12 and later; elsewhere nothing changes).

On a machine whose cores are all busy, a thread that is woken may wait until the running one's time is up, which the
kernel looks at once in 4 ms: longer than the data plane takes to stop. A thread with a longer slice than others lets
them go first whenever they are woken; its share of the processor stays the same, and no privilege is needed. What that
is worth: "Threads" in ARCHITECTURE.md.

Source: sched_setattr(2), and the kernel's documentation of EEVDF, its scheduler: of the threads that have not had more
than their share, it runs the one whose slice is to end first.
"""

from __future__ import annotations

import ctypes
import os
import platform

LONG_SLICE_NS = 100_000_000  # the most the kernel takes; usual is 0.7 ms, and more with more cores
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}  # sched_setattr, sched_getattr
_SYSCALL = ctypes.CDLL(None, use_errno=True).syscall


class _Attributes(ctypes.Structure):
    """`struct sched_attr`, as it was first published."""

    _fields_ = (
        *(("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64)),
        *(("nice", ctypes.c_int32), ("priority", ctypes.c_uint32)),
        *(("slice_ns", ctypes.c_uint64), ("deadline_ns", ctypes.c_uint64), ("period_ns", ctypes.c_uint64)),
    )


def make_patient() -> None:
    """Give the calling thread a long slice. A thread under another policy (batch, idle, real time) is left alone."""
    if (attributes := _own()) is not None:
        attributes.slice_ns = LONG_SLICE_NS
        attributes.size = ctypes.sizeof(attributes)
        _SYSCALL(_CALLS[platform.machine()][0], 0, ctypes.byref(attributes), 0)


def own_slice_ns() -> int:
    """The calling thread's slice as the kernel tells it; 0 where it tells none."""
    attributes = _own()
    return 0 if attributes is None else int(attributes.slice_ns)


def _own() -> _Attributes | None:
    calls, attributes = _CALLS.get(platform.machine()), _Attributes()
    if calls is None or _SYSCALL(calls[1], 0, ctypes.byref(attributes), ctypes.sizeof(attributes), 0):
        return None
    return attributes if attributes.policy == os.SCHED_OTHER else None
