"""Verified transfers. Prefill computes checksums of the pages that it sends, decode computes
checksums of the pages that landed, and decode's endpoint compares the two.

Checksums run in threads, in parallel with writes and with each other. Pages stay held while a
thread reads them, even after its checksum timed out (I13). A checksum of a few bytes is computed at
once, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from kvflow.aio import ENDS_PROCESS
from kvflow.handlers.rooms import RoomPages
from kvflow.protocols.machines.ownership import PageKind
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.fine import FinePages
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.pages.spaces import Counts, Span, taken
from kvflow.protocols.ports import Checksums, ChecksumTask

log = logging.getLogger(__name__)


class Begin(Protocol):
    """Starts the work on a chunk."""

    def __call__(
        self,
        lent: PageIndices,
        pages: PageIndices,
        served: tuple[Served, ...],
        page_sizes: Counts = (),
        /,
    ) -> ChecksumTask:
        """Compute the checksum of the parts that one rank sent (`served`). With staging, copy them
        from the lent places to the room's pages. For `page_sizes` see `ports.Arrivals`.
        """


class NoSum:
    """A checksum or copy that could not be started. Implements `protocols.ports.ChecksumTask`."""

    def __init__(self, error: str) -> None:
        loop = asyncio.get_running_loop()
        self.error = error
        self.done: asyncio.Future[bytes] = loop.create_future()
        self.released: asyncio.Future[None] = loop.create_future()
        self.done.set_result(b"")
        self.released.set_result(None)

    def cancel(self) -> None:
        """Do nothing, because the task has already ended."""


def begun(begin: Callable[..., ChecksumTask], *of: Any) -> ChecksumTask:
    """Return the task that `begin` starts, or a failed task if it raises."""
    try:
        return begin(*of)
    except ENDS_PROCESS:
        raise
    except BaseException as error:
        log.exception("a checksum or copy could not be begun")
        return NoSum(f"it could not be begun: {type(error).__name__}: {error}")


def summed_at_once(sums: Checksums, *of: Any) -> bytes:
    """Return the checksum if it takes no thread, otherwise empty bytes: also if this fails, because
    a thread then computes it, and reports an error that it meets as well.
    """
    try:
        return sums.at_once(*of)
    except ENDS_PROCESS:
        raise
    except BaseException:  # noqa: BLE001 - the thread tries it again
        return b""


def chunk_places(
    layout: PoolLayout, places: PageIndices, spans: tuple[Span, ...], fine: FinePages | None
) -> PageIndices:
    """Return the places at the positions `spans` of a room's list of places or, with `fine`, of its
    fine pages.
    """
    return taken(places if fine is None else fine.of(layout, places), spans)


class ChunkVerifier:
    """The running checksums of one decode room or, with staging, the copies to its pages."""

    def __init__(
        self, pages: RoomPages, lent: PoolLayout, begin: Begin, released: Callable[[], None]
    ) -> None:
        """`lent` is the layout of the pool whose pages the room lends. `released` is called for
        each chunk, when no thread uses its pages any more.
        """
        self._pages, self._begin, self._released = pages, begin, released
        self._lent_layout = lent
        self._running: set[ChecksumTask] = set()

    def begin(
        self,
        spans: tuple[Span, ...],
        served: tuple[Served, ...],
        fine: FinePages | None,
        ended: Callable[[bytes, str], None],
    ) -> None:
        """Start to checksum or copy the parts of a chunk that one rank sent (`served`). `spans` are
        the positions of the chunk in the room's list of places or, with `fine`, in that of its fine
        pages.

        `ended` receives the checksum and an empty text, or an empty checksum and the reason why
        there is none.
        """
        # The room keeps its pages until the thread is done with them, even if the room ends first
        # (I13).
        self._pages.feed(PageKind.USE)
        lent = chunk_places(self._lent_layout, self._pages.lent, spans, fine)
        pages = chunk_places(self._pages.layout, self._pages.pages, spans, fine)
        sizes: Counts = () if fine is None else fine.page_sizes
        task = begun(self._begin, lent, pages, served, sizes)
        self._running.add(task)

        def released(_: object) -> None:
            self._running.discard(task)
            self._pages.feed(PageKind.IDLE)
            self._released()

        def report(_: object) -> None:
            ended(task.done.result(), task.error)

        def done(found: Any) -> None:
            # A checksum is reported once its thread no longer uses the pages. A failure is reported
            # at once, because the thread may hang.
            (task.released if found.result() else task.done).add_done_callback(report)

        task.released.add_done_callback(released)
        task.done.add_done_callback(done)

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()
