"""Everything that a small group of ranks can do: no rule is broken, and planted bugs are found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from kvflow.proof.group.plants import PLANTS as OF_SEEDS
from kvflow.proof.walk.breadth_first import walk
from kvflow.proof.walk.group import GroupWorld
from kvflow.proof.walk.group_worlds import WORLDS, GroupBounds
from kvflow.protocols.group.leader import GroupLeader
from kvflow.protocols.machines import group as tables
from kvflow.protocols.machines.group import LeaderKind, LeaderPhase
from kvflow.protocols.machines.tables import Move
from kvflow.protocols.wire.group import Vote

QUICK = ("loss", "failure-loss", "silence", "refused")
SLOW = ("reused",)
# Of worlds that are walked whole in a soak: two ranks, and one request. "reused" has what is in
# "order", and "reopened" is "failure-loss" with a second request.
LESS = {
    "failures": GroupBounds(ranks=2, failures=2, aborts=1),
    "leader-back": GroupBounds(ranks=2, crashes=1, restarts=False, leader_restarts=True),
}
Plant = Callable[[], AbstractContextManager[Any]]
SHARED = {plant.name: plant.install for plant in OF_SEEDS}
"""Bugs that seeds of a group find, too."""


def how_often(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name in QUICK:
        return ()
    return (pytest.mark.slow,) if name in SLOW else (pytest.mark.slow, pytest.mark.soak)


@pytest.mark.parametrize("name", [pytest.param(n, marks=how_often(n)) for n in WORLDS])
def test_nothing_is_broken(name: str) -> None:
    report = walk(GroupWorld(WORLDS[name][1]))
    print(name, report)
    assert not report["violations"], report
    assert report["states"] > 2_000
    assert report["rest_states"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", LESS)
def test_nothing_is_broken_in_less_of_a_world(name: str) -> None:
    report = walk(GroupWorld(LESS[name]))
    assert not report["violations"], report
    assert report["states"] > 1_000 and report["rest_states"] > 100


def _reports_twice() -> AbstractContextManager[Any]:
    feed = GroupLeader._feed

    def twice(self: GroupLeader, ticket: Any, kind: LeaderKind, cause: Any = None) -> None:
        record = self._requests.get(ticket)
        feed(self, ticket, kind, cause)
        if (
            record is not None
            and record.phase is LeaderPhase.FAILED
            and kind is not LeaderKind.CLOSED
        ):
            record.phase = LeaderPhase.RUNNING
            self._requests[ticket] = record

    return patch.object(GroupLeader, "_feed", twice)


def _a_vote_counts_for_two() -> AbstractContextManager[Any]:
    on_vote = GroupLeader._on_vote

    def mistaken(self: GroupLeader, member: Any, message: Any) -> None:
        record = self._requests.get(message.ticket)
        if record is not None and message.vote is not Vote.FAILED:
            record.missing &= ~(1 << (member.rank + 1) % self.world_size)
        on_vote(self, member, message)

    return patch.object(GroupLeader, "_on_vote", mistaken)


def _succeeds_with_the_first() -> AbstractContextManager[Any]:
    all_done = tables.LEADER.moves[LeaderPhase.RUNNING, LeaderKind.ALL_DONE]
    assert all_done is not None
    done = Move(LeaderPhase.SUCCEEDED, all_done.commands)
    return patch.dict(tables.LEADER.moves, {(LeaderPhase.RUNNING, LeaderKind.DONE): done})


def _refuses_at_rank_0_alone() -> AbstractContextManager[Any]:
    return patch.object(GroupLeader, "refuse", lambda self, room, cause: None)


def _a_room_in_use_fails_its_first_request() -> AbstractContextManager[Any]:
    refuse = GroupLeader.refuse

    def closes(self: GroupLeader, room: int, cause: Any) -> None:
        refuse(self, room, cause)
        for ticket in [ticket for ticket, record in self.requests.items() if record.room == room]:
            self.close(ticket, cause)

    return patch.object(GroupLeader, "refuse", closes)


PLANTS: dict[str, tuple[Plant, GroupBounds, str]] = {
    "a stage skips local failures": (
        SHARED["local failure skipped"],
        GroupBounds(ranks=2, failures=1),
        "rest",
    ),
    "a rank starts by itself": (
        SHARED["starts alone"],
        GroupBounds(ranks=2),
        "is not matched at rank",
    ),
    "a failure is told twice": (_reports_twice, GroupBounds(ranks=2, failures=2), "twice"),
    "the leader is lost, and nobody notices": (
        SHARED["leader lost unseen"],
        GroupBounds(ranks=2, crashes=1),
        "rest",
    ),
    "requests of a lost rank stay": (
        SHARED["rank lost unseen"],
        GroupBounds(ranks=2, crashes=1),
        "rest",
    ),
    "one rank's vote counts for two": (
        _a_vote_counts_for_two,
        GroupBounds(ranks=3),
        "nothing has happened to it",
    ),
    "a rank is not told of a refusal": (_refuses_at_rank_0_alone, WORLDS["refused"][1], "rest"),
    "a second request for a room fails the first": (
        _a_room_in_use_fails_its_first_request,
        WORLDS["reused"][1],
        "nothing has happened to it",
    ),
    "the first rank's end is everybody's": (
        _succeeds_with_the_first,
        GroupBounds(ranks=2),
        "has not landed",
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    install, bounds, wanted = PLANTS[name]
    with install():
        report = walk(GroupWorld(bounds))
    print(name, report.get("broken"), report.get("path"))
    assert report["violations"] == 1
    assert wanted in report["broken"]
