"""A fleet of bare endpoints: an hour of rooms, a lost rack, a restart of all, a partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from kvflow.proof.fleet.plan import Plan, plan_of
from kvflow.proof.fleet.run import simulate_fleet
from kvflow.proof.sim.swap import swapped
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.ledger import Ledger
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from tests.soak import sized

SMALL = Plan(
    prefills=12, decodes=12, rooms=1_500, traffic_s=900.0, racks=3, write_errors=0.01, drops=0.01
)
ACCIDENTS = ("nodes of the lost rack", "nodes restarted", "writes without proof")


def quiet(text: str) -> None:
    """Say nothing."""


@pytest.mark.parametrize("seed", range(3))
def test_a_small_fleet_keeps_every_promise(seed: int) -> None:
    report = simulate_fleet(SMALL, seed, quiet)
    seen = report["seen"]
    assert not report["violation"]
    assert all(seen[accident] for accident in ACCIDENTS)
    assert seen["landed"] > 0.7 * SMALL.rooms
    assert seen["failed at decode: deadline"] and seen["failed at decode: peer_lost"]


def test_heartbeats_at_the_pace_of_a_crowd_lose_no_promise() -> None:
    """Every prefill takes one heartbeat a second of all its idle decodes together."""
    seen = {}
    for beats in (1, 100):
        bounds = msgspec.structs.replace(SMALL.bounds, idle_heartbeats_per_s=beats)
        plan = msgspec.structs.replace(
            SMALL, timing=Timing(heartbeat_s=1.0), bounds=bounds, partition_s=40.0
        )
        report = simulate_fleet(plan, 3, quiet)
        assert not report["violation"]
        seen[beats] = report["seen"]["frames"]
    assert seen[1] < 0.75 * seen[100]


def test_a_seed_repeats_a_run() -> None:
    first, second = (simulate_fleet(SMALL, 7, quiet) for _ in range(2))
    assert {**first, "cpu_s": 0} == {**second, "cpu_s": 0}


@pytest.mark.slow
def test_a_fleet_for_an_hour() -> None:
    nodes, rooms = sized((400, 60_000), (5_000, 1_000_000))
    report = simulate_fleet(plan_of(nodes, rooms), 1, print)
    assert not report["violation"]
    assert all(report["seen"][accident] for accident in ACCIDENTS)
    assert report["seen"]["landed"] > 0.9 * rooms


# --- planted bugs: a simulator that finds none of them proves nothing


@contextmanager
def freed_on_abort() -> Iterator[None]:
    """Decode frees the pages of a room that ended, although prefill may still write."""
    with swapped(Ledger, "room_ended", lambda self, lease: True):
        yield


@contextmanager
def rooms_stay() -> Iterator[None]:
    """Decode loses the deadline of its rooms."""
    opened = DecodeEndpoint.open_room

    def without(self: Any, *arguments: Any, **named: Any) -> Any:
        return opened(self, *arguments, **{**named, "deadline_at_s": float("inf")})

    with swapped(DecodeEndpoint, "open_room", without):
        yield


@contextmanager
def acknowledged_at_once() -> Iterator[None]:
    """Prefill reports every write as landed."""
    ended = PrefillEndpoint.write_ended

    def landed(self: Any, write: int, outcome: Any, now: float, **named: Any) -> None:
        ended(self, write, type(outcome).LANDED, now)

    with swapped(PrefillEndpoint, "write_ended", landed):
        yield


@contextmanager
def links_stay() -> Iterator[None]:
    """Decode never closes a link to make place for another one."""
    with swapped(DecodeCore, "make_place", lambda self, needed, now: None):
        yield


@pytest.mark.parametrize(
    ("plant", "invariant"),
    [
        (freed_on_abort, "I2"),
        (rooms_stay, "I4"),
        (acknowledged_at_once, "I8"),
        (links_stay, "I6"),
    ],
)
def test_a_planted_bug_is_found(plant: Callable[[], Any], invariant: str) -> None:
    plan = SMALL
    if plant is links_stay:
        plan = Plan(
            prefills=12,
            decodes=12,
            rooms=1_500,
            traffic_s=900.0,
            racks=3,
            strays=0.5,
            bounds=Bounds(links=3, targets=32, closed_grants=256, quarantine_share=0.75),
        )
    with plant():
        report = simulate_fleet(plan, 0, quiet)
    assert report["violation"].startswith(invariant), report["violation"]
