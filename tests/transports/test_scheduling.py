"""Who goes first: the slices of threads, as the kernel of this machine tells them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from kvflow.protocols.ports import Landing
from kvflow.transports import scheduling
from kvflow.transports.scheduling import LONG_SLICE_NS, kernel_knows, own_slice_ns, take_long_slice
from kvflow.transports.writer import WriteFlight, WriteThread
from tests.transports.peer_process import pages

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> T:
    """`work` in a thread of its own: a slice stays with the thread that took it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


@pytest.fixture
def usual_ns() -> int:
    """What a thread has that took none."""
    if not kernel_knows():
        pytest.skip("no slices are set on this kernel")
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


@pytest.mark.parametrize("copies", [True, False])
async def test_a_thread_that_copies_lets_others_go_first(usual_ns: int, copies: bool) -> None:
    thread, look = WriteThread("test", copies=copies), Look()
    thread.start()
    flight = WriteFlight(thread, look, pages(0), pages(0), 0)
    thread.submit(flight)
    await flight.done
    await thread.close()
    assert 0 < usual_ns == own_slice_ns() < LONG_SLICE_NS
    assert look.slice_ns == (LONG_SLICE_NS if copies else usual_ns)


def test_threads_it_starts_have_the_usual_slice(usual_ns: int) -> None:
    def look() -> tuple[int, int]:
        take_long_slice()
        return own_slice_ns(), in_thread(own_slice_ns)

    assert in_thread(look) == (LONG_SLICE_NS, usual_ns)


def test_a_thread_keeps_what_else_the_operator_has_set(usual_ns: int) -> None:
    def nice() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        take_long_slice()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), own_slice_ns()

    def batch() -> tuple[int, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        take_long_slice()
        policy = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        return policy, own_slice_ns()

    assert in_thread(nice) == (7, LONG_SLICE_NS)
    assert in_thread(batch) == (os.SCHED_BATCH, usual_ns)


@pytest.mark.parametrize("release", ["6.16.9-rc1+deb", "5.15.0", "unheard of"])
def test_on_other_kernels_nothing_happens(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(scheduling.platform, "release", lambda: release)
    monkeypatch.setattr(scheduling, "_call", lambda *_: pytest.fail("it was called"))
    in_thread(take_long_slice)
    assert own_slice_ns() == 0
