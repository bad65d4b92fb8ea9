"""What one node has seen so far, in numbers."""

from __future__ import annotations

from collections import Counter
from enum import IntEnum

from kvflow.protocols.errors import Cause, Code


class Counts:
    """Implements `protocols.ports.Observer`: rooms and how they ended, pages and bytes that have landed, chunks whose
    checksum differed, and messages that were dropped, by why."""

    def __init__(self, page_bytes: int = 0) -> None:
        self._page_bytes = page_bytes
        self.rooms_opened = 0
        self._endings: Counter[tuple[IntEnum, Code | None]] = Counter()
        self.bytes_moved = 0
        self.mismatched = 0
        self.malformed = 0
        self.foreign = 0
        self.stale = 0
        self.undelivered = 0
        self.declared_dead = 0
        self.handler_errors = 0

    @property
    def endings(self) -> dict[str, int]:
        """Rooms by their terminal phase and, but for a success, the code of their cause."""
        return {
            phase.name.lower() if code is None else f"{phase.name.lower()}:{code}": count
            for (phase, code), count in self._endings.items()
        }

    @property
    def dropped(self) -> dict[str, int]:
        """Messages that changed nothing, by why: not decodable, another peer's, too late, no peer to deliver it to."""
        return {
            "malformed": self.malformed,
            "foreign": self.foreign,
            "stale": self.stale,
            "undelivered": self.undelivered,
        }

    def room_opened(self) -> None:
        self.rooms_opened += 1

    def room_ended(self, phase: IntEnum, cause: Cause | None) -> None:
        self._endings[phase, None if cause is None else cause.code] += 1

    def message_dropped(self, why: str) -> None:
        setattr(self, why, getattr(self, why) + 1)

    def pages_moved(self, count: int) -> None:
        self.bytes_moved += count * self._page_bytes

    def chunk_mismatched(self) -> None:
        self.mismatched += 1

    def peer_declared_dead(self) -> None:
        self.declared_dead += 1
