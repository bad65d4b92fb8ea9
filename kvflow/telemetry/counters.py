"""What one node has seen so far, in numbers."""

from __future__ import annotations

from kvflow.protocols.errors import Cause


class Counts:
    """Rooms and how they ended, bytes that have landed, chunks whose checksum did not agree, and messages that were
    dropped, by why."""

    def __init__(self) -> None:
        self.rooms_opened = 0
        self.endings: dict[str, int] = {}
        self.bytes_moved = 0
        self.mismatched = 0
        self.malformed = 0
        self.foreign = 0
        self.stale = 0
        self.undelivered = 0
        self.declared_dead = 0
        self.handler_errors = 0

    @property
    def dropped(self) -> dict[str, int]:
        """Messages that changed nothing, by why: no message at all, somebody else's, too late, nobody to take it."""
        return {
            "malformed": self.malformed,
            "foreign": self.foreign,
            "stale": self.stale,
            "undelivered": self.undelivered,
        }

    def ended(self, phase: str, cause: Cause | None) -> None:
        key = phase.lower() if cause is None else f"{phase.lower()}:{cause.code}"
        self.endings[key] = self.endings.get(key, 0) + 1
