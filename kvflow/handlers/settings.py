"""Times and bounds of the control plane, one place for both roles."""

from __future__ import annotations

import msgspec

from kvflow.protocols.errors import Cause


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. Deadlines measure liveness: a peer that answers heartbeats is never lost, however loaded it is."""

    heartbeat_s: float = 1.0
    lost_after_s: float = 5.0  # nothing heard for so long: rooms end, loans do not
    repeat_after_s: float = 0.4  # Register, Abort and Resync are said again after so long without an answer
    rendezvous_s: float = 30.0  # a half room waits so long for its other half
    register_s: float = 10.0  # and an opening room so long for a prefill that does not answer
    sweep_s: float = 0.1


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much is remembered about what has ended."""

    closed_grants: int = 65_536  # per peer
    ended_halves: int = 65_536
    targets: int = 1_024


class Counts:
    """What was dropped, repeated or refused; read by /metrics."""

    def __init__(self) -> None:
        self.rooms_opened = 0
        self.endings: dict[str, int] = {}
        self.bytes_moved = 0
        self.malformed = 0
        self.foreign = 0
        self.stale = 0
        self.undelivered = 0
        self.handler_errors = 0

    def ended(self, phase: str, cause: Cause | None) -> None:
        key = phase.lower() if cause is None else f"{phase.lower()}:{cause.code}"
        self.endings[key] = self.endings.get(key, 0) + 1
