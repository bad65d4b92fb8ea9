"""Who goes first: the slices of threads, as the kernel of this machine tells them."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from kvflow.protocols.ports import Landing
from kvflow.transports import scheduling
from kvflow.transports.scheduling import LONG_SLICE_NS, make_patient, own_slice_ns
from kvflow.transports.writer import WriteFlight, WriteThread
from tests.transports.peer_process import pages

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> T:
    """`work` in a thread of its own: a slice stays with the thread that was given it."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def usual_ns() -> int:
    """What a thread has that nobody gave a slice."""
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    if release < (6, 12) or not own_slice_ns():
        pytest.skip("this kernel knows no slices of a thread's own")
    return own_slice_ns()


class Look:
    """Work that is done at once, and remembers on which slice it began."""

    landing, landed_bytes, error, pause_s = Landing.LANDED, 0, "", 0.0
    slice_ns = 0

    def begin(self, flight: WriteFlight) -> Look:
        self.slice_ns = own_slice_ns()
        return self

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        return 0


async def test_the_thread_of_a_plane_lets_others_go_first(usual_ns: int) -> None:
    thread, look = WriteThread("test"), Look()
    thread.start()
    flight = WriteFlight(thread, look, pages(0), pages(0), 0)
    thread.submit(flight)
    await flight.done
    await thread.close()
    assert look.slice_ns == LONG_SLICE_NS > usual_ns == own_slice_ns()


def test_a_thread_keeps_what_else_the_operator_has_set(usual_ns: int) -> None:
    def nice() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        make_patient()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), own_slice_ns()

    def batch() -> tuple[int, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        make_patient()
        policy = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        return policy, own_slice_ns()

    assert in_thread(nice) == (7, LONG_SLICE_NS)
    assert in_thread(batch) == (os.SCHED_BATCH, usual_ns)


def test_where_the_call_is_unknown_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_CALLS", {})
    in_thread(make_patient)
    assert own_slice_ns() == 0
