"""What happens in one run: its size, its traffic and its faults."""

from __future__ import annotations

import msgspec

from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.pages.layout import build_layout

PAGE_SIZE, NUM_PAGES = 16, 64
LAYOUT = build_layout([("kv", "uint8", (8,))], page_size=PAGE_SIZE, num_pages=NUM_PAGES)
MAX_PROMPT_PAGES = 8


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a fleet, and the chances of what goes wrong. Times are virtual seconds."""

    prefills: int = 500
    decodes: int = 500
    rooms: int = 100_000
    traffic_s: float = 3_600.0  # the rooms arrive within this time
    # Each decode gets most of its rooms from so many prefills, as a router with affinity does it.
    # The others come from any prefill, over a link that is closed for the next one.
    partners: int = 2
    strays: float = 0.02
    # With the shipped times, an hour of heartbeats would be a hundred million events.
    timing: Timing = Timing(heartbeat_s=30.0, lost_after_s=100.0, rendezvous_s=30.0)
    bounds: Bounds = Bounds(links=6, targets=32, closed_grants=256, quarantine_share=0.75)
    deadline_s: float = 60.0  # of every room at decode
    # Accidents, as shares of `traffic_s`.
    rack_at: float = 0.25
    restart_at: float = 0.5
    partition_at: float = 0.75
    racks: int = 100  # the fleet stands in so many racks, and one of them is lost
    rack_down_s: float = 120.0
    restart_within_s: float = 10.0
    partition_s: float = 180.0
    declared_after_s: float = 60.0  # an operator declares the prefills of a lost rack dead
    # Chances: of a frame, of a write, of a room.
    drops: float = 0.001
    repeats: float = 0.001
    delays: float = 0.001
    write_errors: float = 0.0005
    leaves: float = 0.03  # decode's client goes away
    fails: float = 0.01  # prefill's engine fails
    missing: float = 0.005  # one half never comes

    @property
    def settles_s(self) -> float:
        """Time after which everything must be at rest: the longest wait of each part, in turn."""
        timing = self.timing
        return (
            self.deadline_s
            + 3 * timing.lost_after_s
            + 3 * timing.heartbeat_s
            + timing.rendezvous_s
            + self.declared_after_s
        )


def plan_of(nodes: int, rooms: int) -> Plan:
    """Return the plan of an hour with `nodes` prefills and as many decodes, in racks of 100."""
    return Plan(prefills=nodes, decodes=nodes, rooms=rooms, racks=max(2, nodes // 50))
