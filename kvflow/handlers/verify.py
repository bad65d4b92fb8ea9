"""Verified transfers: prefill sums the pages it sends, decode those that landed; what they mean, the endpoint decides.

Sums run in threads, beside the write and beside each other; pages are held while they are read (I13).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Checksums, Flight, Landing, PageStore, Summing


class SummedFlight:
    """Implements `protocols.ports.Flight`: a write and the sum of its source pages, over when both are."""

    def __init__(self, flight: Flight, summing: Summing) -> None:
        self._flight, self._summing = flight, summing
        self.done: asyncio.Future[Landing] = asyncio.get_running_loop().create_future()
        flight.done.add_done_callback(self._part_ended)
        summing.done.add_done_callback(self._part_ended)

    @property
    def checksum(self) -> bytes:
        """Once it is done."""
        return self._summing.done.result()

    @property
    def landed_bytes(self) -> int:
        return self._flight.landed_bytes

    @property
    def total_bytes(self) -> int:
        return self._flight.total_bytes

    @property
    def error(self) -> str:
        return self._flight.error

    def cancel(self) -> None:
        self._flight.cancel()
        self._summing.cancel()

    def _part_ended(self, _: object) -> None:
        if self._flight.done.done() and self._summing.done.done() and not self.done.done():
            self.done.set_result(self._flight.done.result())


class ChunkVerifier:
    """The checksums of one room at decode that are being computed."""

    def __init__(self, store: PageStore, checksums: Checksums, idle: Callable[[], None]) -> None:
        """`idle` is called whenever the last one has ended."""
        self._store, self._checksums, self._idle = store, checksums, idle
        self._running: set[Summing] = set()

    @property
    def running(self) -> bool:
        return bool(self._running)

    def begin(self, pages: PageIndices, ended: Callable[[bytes], None]) -> None:
        """Sum `pages`; `ended` gets the checksum, empty when it could not be computed."""
        self._store.hold(pages)
        summing = self._checksums.begin(pages)
        self._running.add(summing)

        def done(future: asyncio.Future[bytes]) -> None:
            self._running.discard(summing)
            self._store.unhold(pages)
            ended(future.result())
            if not self._running:
                self._idle()

        summing.done.add_done_callback(done)

    def cancel(self) -> None:
        """The room is over; its pages are free when the sums have ended."""
        for summing in self._running:
            summing.cancel()
