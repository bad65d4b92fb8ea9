"""Bounded worlds for the walk over a group of ranks. Each answers one question."""

from __future__ import annotations

from typing import NamedTuple


class GroupBounds(NamedTuple):
    """Limits on the number of events of each kind.

    A failure ends a room at one rank without a decision by the leader. In a silence, the leader
    gives up on a living rank, or a rank gives up on the living leader.
    """

    ranks: int = 3
    requests: int = 1
    failures: int = 0
    aborts: int = 0
    crashes: int = 0  # deaths of members; rank 0 takes the leader with it
    silences: int = 0
    # Requests that the leader cannot open: a rank is missing, or the room is in use. At most 1.
    refusals: int = 0
    same_room: bool = False  # True if all requests are for one room id
    restarts: bool = True  # True if a dead member may start again
    leader_restarts: bool = False


WORLDS: dict[str, tuple[str, GroupBounds]] = {
    "failures": ("two ranks of three fail, and the client goes", GroupBounds(failures=2, aborts=1)),
    "loss": ("one of three ranks dies, or the leader", GroupBounds(crashes=1)),
    "failure-loss": ("a rank fails, and one dies", GroupBounds(ranks=2, failures=1, crashes=1)),
    "silence": (
        "a rank that lives is taken for lost, or takes the leader for lost",
        GroupBounds(ranks=2, silences=1),
    ),
    "order": ("two requests, and a failure", GroupBounds(ranks=2, requests=2, failures=1)),
    "reopened": (
        "two requests, and a loss before, between or after",
        GroupBounds(ranks=2, requests=2, crashes=1),
    ),
    "reused": (
        (
            "two requests for one room id, the first of which may fail, and drain, when the second "
            "comes"
        ),
        GroupBounds(ranks=2, requests=2, failures=1, refusals=1, same_room=True),
    ),
    "refused": (
        "a request that comes while a rank is missing",
        GroupBounds(ranks=2, crashes=1, refusals=1),
    ),
    "leader-back": (
        "the leader dies, and another one answers at its address",
        GroupBounds(ranks=2, requests=2, crashes=1, restarts=False, leader_restarts=True),
    ),
}
