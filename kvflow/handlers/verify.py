"""Verified transfers: prefill sums the pages it sends, decode those that landed; the endpoint
compares the sums.

Sums run in threads, beside the write and beside each other. Pages are held while they are read
(I13), also by a sum that took too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvflow.aio import ENDS_PROCESS
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import (
    Arrivals,
    Checksums,
    ChecksumTask,
    PageStore,
)

log = logging.getLogger(__name__)


class NoSum:
    """A checksum that could not be started. Implements `protocols.ports.ChecksumTask`."""

    def __init__(self, error: str) -> None:
        loop = asyncio.get_running_loop()
        self.error = error
        self.done: asyncio.Future[bytes] = loop.create_future()
        self.released: asyncio.Future[None] = loop.create_future()
        self.done.set_result(b"")
        self.released.set_result(None)

    def cancel(self) -> None:
        """Return at once: the task is over from the start."""


def begun(begin: Callable[..., ChecksumTask], *of: Any) -> ChecksumTask:
    """Return the task that `begin` starts, or a failed task where `begin` raises.

    The room that waits for the checksum must receive an answer in either case.
    """
    try:
        return begin(*of)
    except ENDS_PROCESS:
        raise
    except BaseException as error:
        log.exception("a checksum or copy could not be begun")
        return NoSum(f"it could not be begun: {type(error).__name__}: {error}")


class ChunkVerifier:
    """The chunks of one room at decode that are being summed, or copied from the staging to their
    pages.
    """

    def __init__(
        self,
        store: PageStore,
        checksums: Checksums | None,
        arrivals: Arrivals | None,
        released: Callable[[], None],
    ) -> None:
        """Exactly one of `checksums` and `arrivals` does the work.

        `released` is called each time a chunk ended and the pages that it read or wrote are no
        longer held.
        """
        self._store, self._checksums, self._arrivals, self._released = (
            store,
            checksums,
            arrivals,
            released,
        )
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
        """Sum what a rank `served` of `pages`, or copy it there from `lent`.

        `ended` receives the checksum and an empty text, or an empty checksum and the reason.
        """
        arrivals = self._arrivals
        # The pages stay held until the thread lets them go, even if the room ends before (I13).
        self._store.hold(pages)
        if arrivals is not None:
            arrivals.lent.hold(lent)
            task = begun(arrivals.begin, lent, pages, served)
        else:
            assert self._checksums is not None
            task = begun(self._checksums.begin, pages, served)
        self._running.add(task)

        def released(_: object) -> None:
            self._running.discard(task)
            self._store.unhold(pages)
            if arrivals is not None:
                arrivals.lent.unhold(lent)
            self._released()

        task.released.add_done_callback(released)
        task.done.add_done_callback(lambda found: ended(found.result(), task.error))

    def cancel(self) -> None:
        """Stop the sums and copies of a room that is over.

        Its pages become free when no thread reads or writes them.
        """
        for task in self._running:
            task.cancel()
