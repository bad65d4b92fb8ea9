"""Rules for every step of the walk over a group. A broken one raises AssertionError."""

from __future__ import annotations

from typing import Any

from kvflow.protocols.group.leader import RequestDecided
from kvflow.protocols.group.member import RequestSettled, TicketKey

Facts = set[tuple[Any, ...]]
"""Events so far, as tuples that begin with the kind of the event."""

MATCHED, LANDED = "matched", "landed"


def check_decided(key: TicketKey, command: RequestDecided, facts: Facts, ranks: int) -> None:
    if any(fact[:2] == ("decided", key) for fact in facts):
        raise AssertionError(f"request {key.ticket} was decided twice")
    if command.cause is not None and not {("bad", key), ("risky", key)} & facts:
        raise AssertionError(f"request {key.ticket} fails, and nothing has happened to it")
    if command.cause is None and (missing := _without(LANDED, key, facts, ranks)):
        where = f"has not landed at rank {missing[0]}"
        raise AssertionError(f"request {key.ticket} succeeded, and {where}")
    facts.add(("decided", key, command.cause))


def check_started(key: TicketKey, rank: int, facts: Facts, ranks: int) -> None:
    if missing := _without(MATCHED, key, facts, ranks):
        raise AssertionError(
            f"request {key.ticket} starts at rank {rank}, and is not matched at rank {missing[0]}"
        )
    number = next(fact[2] for fact in facts if fact[:2] == ("start", key))
    # Each fact makes states differ, so only the last start at each rank is kept.
    for fact in [fact for fact in facts if fact[:3] == ("started", rank, key.leader)]:
        if fact[3] >= number:
            text = f"rank {rank} starts request {key.ticket} out of the group's order"
            raise AssertionError(text)
        facts.remove(fact)
    facts.add(("started", rank, key.leader, number))


def check_settled(command: RequestSettled, rank: int, facts: Facts) -> None:
    if any(fact[:3] == ("settled", rank, command.key) for fact in facts):
        raise AssertionError(
            f"rank {rank} was told twice what became of request {command.key.ticket}"
        )
    decided = [fact for fact in facts if fact[:2] == ("decided", command.key)]
    if command.cause is None and (not decided or decided[0][2] is not None):
        raise AssertionError(f"rank {rank} takes request {command.key.ticket} for a success, alone")
    facts.add(("settled", rank, command.key))


def _without(what: str, key: TicketKey, facts: Facts, ranks: int) -> list[int]:
    return [rank for rank in range(ranks) if (what, key, rank) not in facts]
