"""Times and bounds of the control plane, one place for both roles."""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. Deadlines measure liveness: a peer that answers heartbeats is never lost, however loaded it is."""

    heartbeat_s: float = 1.0
    lost_after_s: float = 5.0  # without a heartbeat for this long the link is lost: rooms end, loans do not
    repeat_after_s: float = 0.4  # Register, Announce, Abort and Resync are repeated after this long without an answer
    rendezvous_s: float = 5.0  # how long half a room waits for a partner that has not announced itself
    register_s: float = 10.0  # how long an opening room waits for a prefill that does not answer


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much is remembered, how much one request may ask for, and how much of a pool may wait for proof."""

    closed_grants: int = 65_536  # per peer
    ended_halves: int = 65_536
    targets: int = 1_024  # decodes registered at one prefill
    rooms: int = 32_768  # at prefill; decodes open none above it
    links: int = 512  # prefill ranks one decode is connected to
    ranks_per_room: int = 64
    quarantine_share: float = 0.5  # of decode's pages: above it no room is opened
