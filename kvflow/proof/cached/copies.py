"""Copies between a pool and host memory, one at a time in each direction."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from kvflow.aio import Job
from kvflow.proof.sim.copies import FAILED, Copy
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.loop import VirtualThread
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.pages import Books
from kvflow.protocols.errors import TransferError


class CopyThread(VirtualThread):
    """Executor for one direction. Like a single thread, it runs one copy at a time."""

    def __init__(self, source: Books, target: Books, oracle: Oracle, faults: Faults) -> None:
        self._source, self._target, self._oracle, self._faults = source, target, oracle, faults
        self._waiting: deque[Copy] = deque()
        self._running = False

    def begin(self, done: asyncio.Future[Any], job: Job[Any]) -> None:
        fault = self._faults.of_copy()
        if fault == "slow copy" and self._oracle.loop.rng.random() < 0.3:
            fault = "hung copy"
        self._waiting.append(
            Copy(job, self._source, self._target, fault, lambda answer: self._end(done, answer))
        )
        self._next()

    def _next(self) -> None:
        while self._waiting and not self._running:
            copy = self._waiting.popleft()
            if copy.job.begin():
                self._running = True
                text = f"copies {len(copy.used) // 2} pages, {copy.fault or 'no fault'}"
                self._oracle.trace(lambda text=text: text)  # type: ignore[misc]
                copy.begin(self._oracle.loop)

    def _end(self, done: asyncio.Future[Any], answer: bool | None) -> None:
        self._running = False
        self._oracle.loop.call_soon(self._next)
        if answer is None:
            done.set_exception(TransferError(FAILED))
        else:
            done.set_result(answer)
