"""Copies between a pool and host memory in virtual time: in two halves, with faults in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kvflow.aio import Job
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.loop import VirtualThread
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.pages import Books
from kvflow.proof.sim.times import COPY_S, SLOW_COPY_S
from kvflow.protocols.errors import TransferError
from kvflow.protocols.pages.layout import Places

HUNG_COPY_S = (0.3, 1.5)


class _Copy(NamedTuple):
    done: asyncio.Future[bool]
    job: Job[bool]
    work: Callable[[Places, Places], bool]
    halves: list[tuple[Places, Places]]
    used: list[tuple[Books, int]]
    fault: str


class CopyThread(VirtualThread):
    """Replacement for the executor of one direction. It has one thread, so copies run one by
    one.
    """

    def __init__(self, source: Books, target: Books, oracle: Oracle, faults: Faults) -> None:
        self._source, self._target, self._oracle, self._faults = source, target, oracle, faults
        self._waiting: deque[_Copy] = deque()
        self._running = False

    def begin(self, done: asyncio.Future[Any], job: Job[Any]) -> None:
        work, (pairing, source, target, *rest) = job.work, job.arguments
        halves = _halves(source, target)
        used = [(self._source, page) for page in source.pages.tolist()]
        used += [(self._target, page) for page in target.pages.tolist()]
        fault = self._faults.of_copy()
        if fault == "slow copy" and self._oracle.loop.rng.random() < 0.3:
            fault = "hung copy"
        self._waiting.append(
            _Copy(
                done,
                job,
                lambda s, t: work(pairing, s, t, *rest, job.is_cancelled),
                halves,
                used,
                fault,
            )
        )
        self._next()

    def _next(self) -> None:
        while self._waiting and not self._running:
            copy = self._waiting.popleft()
            if not copy.job.begin():
                continue
            self._running = True
            for books, page in copy.used:
                # While a copy runs, the books count it as a reader of both sides, so that a page
                # freed too early shows.
                books.readers[page] += 1
            text = f"copies {len(copy.used) // 2} pages, {copy.fault or 'no fault'}"
            self._oracle.trace(lambda text=text: text)  # type: ignore[misc]
            self._later(copy)

    def _later(self, copy: _Copy) -> None:
        loop = self._oracle.loop
        span = {"slow copy": SLOW_COPY_S, "hung copy": HUNG_COPY_S}.get(copy.fault, COPY_S)
        loop.call_later(loop.rng.uniform(*span), self._half, copy)

    def _half(self, copy: _Copy) -> None:
        whole = copy.work(*copy.halves.pop(0))
        if not whole or not copy.halves:
            self._end(copy)
            copy.done.set_result(whole)
        elif copy.fault == "failed copy":
            self._end(copy)
            copy.done.set_exception(TransferError("a copy fails half-way (on purpose)"))
        else:
            self._later(copy)

    def _end(self, copy: _Copy) -> None:
        for books, page in copy.used:
            books.readers[page] -= 1
        self._running = False
        self._oracle.loop.call_soon(self._next)


def _halves(source: Places, target: Places) -> list[tuple[Places, Places]]:
    half = len(source.pages) // 2
    parts = (slice(half), slice(half, None))
    return [
        (Places(source.pages[part], source.rows), Places(target.pages[part], target.rows))
        for part in parts
    ]
