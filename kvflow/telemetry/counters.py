"""Counters and histograms of one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from operator import mul

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.ports import RoomEnding
from kvflow.telemetry.histogram import (
    BOOTSTRAP_SECONDS,
    TRANSFER_BYTES,
    TRANSFER_BYTES_PER_SECOND,
    TRANSFER_SECONDS,
    Histogram,
)

# Rooms that ended for these causes did not fail: the client no longer wanted the result.
_WANTED = frozenset({Code.CLIENT_GONE, Code.ABORTED})
# Failures with these causes count as "bootstrap", even if decode has already offered its pages.
_NEVER_MET = frozenset(
    {
        *(Code.RENDEZVOUS, Code.REFUSED, Code.PROMPT_MISMATCH, Code.ROOM_IN_USE, Code.STALE_GRANT),
        *(Code.BAD_REQUEST, Code.CAPACITY),
    }
)


class TransferMeasures:
    """Histograms over ended rooms.

    `bootstrap_seconds` is the time from the opening of a room until the other side is ready. At
    decode, `allocation_seconds` is the time from then until decode offers its pages. The
    `transfer_*` histograms cover only rooms that succeeded. A transfer lasts until the end of the
    room. At prefill it begins with the first chunk. At decode it begins with the offer of pages, so
    it includes the model's steps at prefill.
    """

    def __init__(self) -> None:
        self.bootstrap_seconds = Histogram(BOOTSTRAP_SECONDS)
        self.allocation_seconds = Histogram(BOOTSTRAP_SECONDS)
        self.transfer_seconds = Histogram(TRANSFER_SECONDS)
        self.transfer_bytes = Histogram(TRANSFER_BYTES)
        self.transfer_bytes_per_second = Histogram(TRANSFER_BYTES_PER_SECOND)

    def observe(self, rooms: Sequence[tuple[RoomEnding, float, int]]) -> None:
        """Add rooms, as (ending, time of the end, size in bytes)."""
        bootstrap: list[float] = []
        allocation: list[float] = []
        transfer: list[float] = []
        sizes: list[float] = []
        rates: list[float] = []
        for ending, ended_at_s, size_bytes in rooms:
            ready_at_s, moving_at_s = ending.ready_at_s, ending.moving_at_s
            if ready_at_s is not None:
                bootstrap.append(max(0.0, ready_at_s - ending.opened_at_s))
                if moving_at_s is not None and ending.offers_pages:
                    allocation.append(max(0.0, moving_at_s - ready_at_s))
            if ending.cause is None and moving_at_s is not None:
                seconds = max(0.0, ended_at_s - moving_at_s)
                transfer.append(seconds)
                sizes.append(size_bytes)
                if seconds and size_bytes:
                    rates.append(size_bytes / seconds)
        self.bootstrap_seconds.observe_all(bootstrap)
        self.allocation_seconds.observe_all(allocation)
        self.transfer_seconds.observe_all(transfer)
        self.transfer_bytes.observe_all(sizes)
        self.transfer_bytes_per_second.observe_all(rates)


def failed_in(ending: RoomEnding) -> str:
    """Return the stage in which a room failed: "engine", "bootstrap" or "transfer".

    The result is empty if the room succeeded, or if its client left or aborted the request.
    """
    if ending.cause is None or ending.cause.code in _WANTED:
        return ""
    if ending.cause.code is Code.ENGINE_ERROR:
        return "engine"
    return (
        "bootstrap" if ending.moving_at_s is None or ending.cause.code in _NEVER_MET else "transfer"
    )


class Counts:
    """Counters of one node. Implements `protocols.ports.Observer`."""

    def __init__(self, place_bytes: Sequence[int] = (0,)) -> None:
        """`place_bytes` are the bytes of one place of each space of the pool."""
        self._place_bytes = tuple(place_bytes)
        self.rooms_opened = 0
        self.ended: list[tuple[RoomEnding, float]] = []
        self._endings: Counter[tuple[IntEnum, Code | None]] = Counter()
        self._failures: Counter[tuple[str, Code]] = Counter()
        # Requests that ended before they had a room.
        self.refusals: Counter[Code] = Counter()
        self._transfers = TransferMeasures()
        # Bytes that prefill's writes moved, including those of rooms that failed.
        self.bytes_written = 0
        self._bytes_received = 0
        self.mismatched = 0
        self.malformed = 0
        self.foreign = 0
        self.stale = 0
        self.undelivered = 0
        self.declared_dead = 0
        self.handler_errors = 0

    @property
    def endings(self) -> dict[str, int]:
        """Number of ended rooms, by terminal phase and, unless the room succeeded, by the cause's
        code: "failed:rendezvous", for example.
        """
        self.count_ended()
        return {
            phase.name.lower() if code is None else f"{phase.name.lower()}:{code}": count
            for (phase, code), count in self._endings.items()
        }

    @property
    def failures(self) -> Counter[tuple[str, Code]]:
        """Number of failed rooms, and of requests that failed after their room succeeded, by stage
        (see `failed_in`) and by the code of the cause.
        """
        self.count_ended()
        return self._failures

    @property
    def transfers(self) -> TransferMeasures:
        self.count_ended()
        return self._transfers

    @property
    def bytes_moved(self) -> int:
        """Bytes that landed. At decode, only those of rooms that succeeded are counted."""
        self.count_ended()
        return self.bytes_written + self._bytes_received

    @property
    def dropped(self) -> dict[str, int]:
        """Number of dropped messages, by reason.

        "malformed" messages cannot be decoded, "foreign" ones have a wrong sender or target, and
        "stale" ones come too late. "undelivered" ones are our own, and could not be sent.
        """
        return {
            "malformed": self.malformed,
            "foreign": self.foreign,
            "stale": self.stale,
            "undelivered": self.undelivered,
        }

    def count_ended(self) -> None:
        place_bytes = self._place_bytes
        rooms: list[tuple[RoomEnding, float, int]] = []
        for ending, ended_at_s in self.ended:
            cause = ending.cause
            self._endings[ending.phase, None if cause is None else cause.code] += 1
            if cause is not None and (where := failed_in(ending)):
                self._failures[where, cause.code] += 1
            # A room that ended before its pages were known has no counts.
            size_bytes = sum(map(mul, ending.counts, place_bytes))
            if cause is None and ending.offers_pages:
                self._bytes_received += size_bytes
            rooms.append((ending, ended_at_s, size_bytes))
        self._transfers.observe(rooms)
        self.ended.clear()

    def room_refused(self, cause: Cause) -> None:
        if cause.code not in _WANTED:
            self.refusals[cause.code] += 1

    def engine_failed(self, code: Code) -> None:
        """Count a request that failed after its room succeeded."""
        if code not in _WANTED:
            self._failures["engine", code] += 1

    def message_dropped(self, why: str) -> None:
        setattr(self, why, getattr(self, why) + 1)
