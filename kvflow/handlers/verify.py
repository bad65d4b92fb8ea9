"""Verified transfers: prefill sums the pages it sends, decode those that landed, and a chunk lands when both agree.

Sums run in threads, beside the write and beside each other; pages are held while they are read (I13).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Checksums, Flight, Landing, PageStore, Summing
from kvflow.protocols.wire.messages import ChunkDone

if TYPE_CHECKING:
    from kvflow.handlers.decode_room import DecodeSession


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


class _Check(NamedTuple):
    """One chunk that was heard of and is being summed."""

    rank: int
    message: ChunkDone
    pages: PageIndices
    summing: Summing


class ChunkChecks:
    """The chunks of one room at decode, from ChunkDone to landed; they land in the order they were heard of."""

    def __init__(self, session: DecodeSession, store: PageStore, checksums: Checksums) -> None:
        self._session, self._store, self._checksums = session, store, checksums
        self._under_way: deque[_Check] = deque()

    def under_way(self, rank: int) -> int:
        return sum(check.rank == rank for check in self._under_way)

    def begin(self, rank: int, message: ChunkDone) -> None:
        before = sum(check.message.pages for check in self._under_way if check.rank == rank)
        start = self._session.state.filled[rank] + before
        pages = self._session.pages[start : start + message.pages]
        self._store.hold(pages)
        check = _Check(rank, message, pages, self._checksums.begin(pages))
        self._under_way.append(check)
        check.summing.done.add_done_callback(self._check_ended)

    def cancel(self) -> None:
        """The room is over; its pages are free when the sums have ended."""
        for check in self._under_way:
            check.summing.cancel()

    def _check_ended(self, _: asyncio.Future[bytes]) -> None:
        while self._under_way and self._under_way[0].summing.done.done():
            check = self._under_way.popleft()
            self._store.unhold(check.pages)
            sent, found = check.message.checksum, check.summing.done.result()
            if sent and found == sent:
                self._session.chunk_landed(check.rank, check.message)
            elif self._session.open:
                self._session.chunk_differs(_difference(check, sent, found))


def _difference(check: _Check, sent: bytes, found: bytes) -> Cause:
    where = f"chunk {check.message.seq} of rank {check.rank}"
    if not sent:
        return Cause(Code.TRANSFER_ERROR, f"{where}: prefill sends no checksum, and this decode verifies transfers")
    if not found:
        return Cause(Code.ENGINE_ERROR, f"{where}: what landed could not be summed")
    return Cause(Code.TRANSFER_ERROR, f"{where}: checksum {sent.hex()} at prefill, {found.hex()} at decode")
