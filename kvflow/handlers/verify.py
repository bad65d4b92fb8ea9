"""Verified transfers: prefill sums the pages it sends, decode those that landed; what they mean, the endpoint decides.

Sums run in threads, beside the write and beside each other; pages are held while they are read (I13), also by a sum
whose time is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Arrivals, Checksums, ChecksumTask, PageStore, Pending, Write, WriteOutcome


class ChecksummedWrite:
    """Implements `protocols.ports.Write`: a write and the sum of its source pages, over when both are.

    Where there is no sum the write counts as stopped: its bytes have landed, and nothing vouches for them.
    """

    def __init__(self, write: Write, task: ChecksumTask) -> None:
        self._write, self._task = write, task
        self.done: asyncio.Future[WriteOutcome] = asyncio.get_running_loop().create_future()
        write.done.add_done_callback(self._part_ended)
        task.done.add_done_callback(self._part_ended)

    @property
    def checksum(self) -> bytes:
        """Once it is done."""
        return self._task.done.result()

    @property
    def released(self) -> Pending[None]:
        """Resolves when the sum reads the source pages no more."""
        return self._task.released

    @property
    def landed_bytes(self) -> int:
        return self._write.landed_bytes

    @property
    def total_bytes(self) -> int:
        return self._write.total_bytes

    @property
    def error(self) -> str:
        return self._write.error or self._task.error

    def cancel(self) -> None:
        self._write.cancel()
        self._task.cancel()

    def _part_ended(self, _: object) -> None:
        if self._write.done.done() and self._task.done.done() and not self.done.done():
            outcome = self._write.done.result()
            if self._task.error and outcome is WriteOutcome.LANDED:
                outcome = WriteOutcome.CANCELLED
            self.done.set_result(outcome)


class ChunkVerifier:
    """The chunks of one room at decode that are being summed, or brought from where they have landed."""

    def __init__(
        self, store: PageStore, checksums: Checksums | None, arrivals: Arrivals | None, idle: Callable[[], None]
    ) -> None:
        """One of `checksums` and `arrivals` does it. `idle` is called whenever the last chunk has ended."""
        self._store, self._checksums, self._arrivals, self._idle = store, checksums, arrivals, idle
        self._running: set[ChecksumTask] = set()

    @property
    def running(self) -> bool:
        return bool(self._running)

    def begin(
        self,
        lent: PageIndices,
        pages: PageIndices,
        served: tuple[Served, ...],
        ended: Callable[[bytes, str], None],
    ) -> None:
        """Sum what was `served` of `pages`, or bring it there from what was `lent`; `ended` gets the answer, or, where
        there is none, an empty one and why."""
        arrivals = self._arrivals
        self._store.hold(pages)
        if arrivals is not None:
            arrivals.lent.hold(lent)
            task = arrivals.begin(lent, pages, served)
        else:
            assert self._checksums is not None
            task = self._checksums.begin(pages, served)
        self._running.add(task)

        def released(_: object) -> None:
            self._running.discard(task)
            self._store.unhold(pages)
            if arrivals is not None:
                arrivals.lent.unhold(lent)
            if not self._running:
                self._idle()

        task.released.add_done_callback(released)
        task.done.add_done_callback(lambda found: ended(found.result(), task.error))

    def cancel(self) -> None:
        """The room is over; its pages are free when nothing reads or writes them."""
        for task in self._running:
            task.cancel()
