"""Times and bounds of the control plane, one place for both roles."""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. Deadlines measure liveness: a peer that answers heartbeats is never lost, however loaded it is."""

    heartbeat_s: float = 1.0
    lost_after_s: float = 5.0  # nothing heard for so long: rooms end, loans do not
    repeat_after_s: float = 0.4  # Register, Abort and Resync are said again after so long without an answer
    rendezvous_s: float = 30.0  # a half room waits so long for its other half
    register_s: float = 10.0  # and an opening room so long for a prefill that does not answer
    sweep_s: float = 0.1


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much is remembered about what has ended, and how much of a pool may wait for proof."""

    closed_grants: int = 65_536  # per peer
    ended_halves: int = 65_536
    targets: int = 1_024
    rooms: int = 32_768  # at prefill; decodes open none above it
    quarantine_share: float = 0.5  # of decode's pages: above it no room is opened
