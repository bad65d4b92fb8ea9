"""The ownership of a room's pages: every cell of its three tables, and paths through both sets."""

from __future__ import annotations

import itertools

import pytest

from kvflow.protocols.machines.ownership import (
    CLAIMED,
    SETTLED,
    TABLES,
    Ownership,
    PageCommand,
    PageKind,
    PagePhase,
    Source,
    step,
)
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, TransitionError

P, K, C = PagePhase, PageKind, PageCommand
STORE, OWN, STAGING = Source.STORE, Source.OWN, Source.STAGING
# Phase, event and next phase; "-" where nothing happens. What is not here cannot happen.
CELLS = """
    NONE        TAKE       TAKEN
    NONE        FREE       FREED
    NONE        ABANDON    FREED
    TAKEN       LEND       LENT
    TAKEN       USE        TAKEN
    TAKEN       LAND       LANDED
    TAKEN       QUARANTINE RETURNING
    TAKEN       FREE       RETURNING
    TAKEN       ABANDON    RETURNING
    LENT        USE        LENT
    LENT        LAND       LANDED
    LENT        QUARANTINE QUARANTINED
    LENT        FREE       RETURNING
    LENT        ABANDON    ABANDONED
    LANDED      KEEP       KEPT
    LANDED      CLOSE      FREED
    LANDED      ABANDON    -
    KEPT        CLOSE      -
    KEPT        ABANDON    -
    QUARANTINED FREE       RETURNING
    QUARANTINED ABANDON    ABANDONED
    RETURNING   CLOSE      -
    RETURNING   QUARANTINE -
    RETURNING   FREE       -
    RETURNING   ABANDON    -
    RETURNING   IDLE       FREED
    FREED       TAKE       FREED
    FREED       FREE       -
    FREED       CLOSE      -
    FREED       ABANDON    -
    ABANDONED   IDLE       WITHHELD
"""
# Cells of the other tables that differ; "x" where nothing can happen.
CHANGED = {
    STORE: "",
    OWN: "",
    STAGING: """
    TAKEN       USE        x
    TAKEN       LAND       x
    LENT        LAND       RETURNING
    LANDED      KEEP       x
    LANDED      CLOSE      x
    LANDED      ABANDON    x
    KEPT        CLOSE      x
    KEPT        ABANDON    x
""",
}
RETURNS = {(P.RETURNING, K.IDLE), (P.ABANDONED, K.IDLE), (P.FREED, K.TAKE)}
COMMANDS = {
    STORE: dict.fromkeys(RETURNS | {(P.LANDED, K.CLOSE)}, C.RETURN)
    | {(P.LANDED, K.KEEP): C.GIVE_TO_KEEPER, (P.LENT, K.QUARANTINE): C.GIVE_TO_QUARANTINE},
    # The store only holds the caller's own pages, and stops when nothing else can touch them.
    OWN: dict.fromkeys(RETURNS | {(P.TAKEN, K.LAND), (P.LENT, K.LAND)}, C.RETURN),
    STAGING: dict.fromkeys(RETURNS, C.RETURN) | {(P.LENT, K.QUARANTINE): C.GIVE_TO_QUARANTINE},
}


def cells(text: str) -> dict[tuple[PagePhase, PageKind], str]:
    rows = (line.split() for line in text.strip().splitlines())
    return {(P[phase], K[kind]): after for phase, kind, after in rows}


@pytest.mark.parametrize("source", Source)
def test_every_cell_is_as_it_is_written_here(source: Source) -> None:
    expected = cells(CELLS) | cells(CHANGED[source])
    for phase, kind in itertools.product(P, K):
        after = expected.get((phase, kind), "x")
        command = COMMANDS[source].get((phase, kind))
        cell = {"x": ERROR, "-": IGNORE}.get(after) or Move(
            P[after], () if command is None else (command,)
        )
        assert TABLES[source].cell(phase, kind) == cell, (phase, kind)


def follow(pages: Ownership, *events: PageKind | tuple[PageKind, Source]) -> list[object]:
    """Return the last state, after the commands of every event."""
    found: list[object] = []
    for event in events:
        kind, source = event if isinstance(event, tuple) else (event, None)
        pages, commands = step(pages, kind, source)
        found += commands
    return [*found, pages]


TAKE = K.TAKE, STORE
OPENED = (K.TAKE, STAGING), TAKE, K.LEND
STAGED = Ownership(staging=P.NONE)


def test_pages_return_when_the_last_thread_lets_them_go() -> None:
    assert follow(Ownership(), TAKE, K.LEND, K.USE, K.USE, K.FREE, K.IDLE) == [
        Ownership(P.RETURNING, uses=1)
    ]
    assert follow(Ownership(), TAKE, K.LEND, K.USE, K.FREE, K.IDLE) == [
        (STORE, C.RETURN),
        Ownership(P.FREED),
    ]


def test_a_thread_that_ends_early_returns_nothing() -> None:
    assert follow(Ownership(), TAKE, K.LEND, K.USE, K.IDLE) == [Ownership(P.LENT)]


def test_events_reach_the_sets_that_they_concern() -> None:
    assert follow(STAGED, *OPENED) == [Ownership(P.TAKEN, P.LENT)]
    assert follow(STAGED, *OPENED, K.USE, K.IDLE, K.LAND) == [
        (STAGING, C.RETURN),
        Ownership(P.LANDED, P.FREED),
    ]
    assert follow(STAGED, *OPENED, K.LAND, K.KEEP, K.CLOSE)[1:] == [
        (STORE, C.GIVE_TO_KEEPER),
        Ownership(P.KEPT, P.FREED),
    ]


def test_a_target_that_no_rank_can_reach_needs_no_quarantine() -> None:
    assert follow(STAGED, *OPENED, K.USE, K.QUARANTINE) == [
        (STAGING, C.GIVE_TO_QUARANTINE),
        Ownership(P.RETURNING, P.QUARANTINED, uses=1),
    ]
    assert follow(STAGED, *OPENED, K.QUARANTINE, K.FREE)[1:] == [
        (STORE, C.RETURN),
        (STAGING, C.RETURN),
        Ownership(P.FREED, P.FREED),
    ]


def test_a_use_concerns_both_sets() -> None:
    assert step(Ownership(P.TAKEN, P.LENT), K.USE)[0] == Ownership(P.TAKEN, P.LENT, uses=1)
    for sets in (P.TAKEN, P.FREED), (P.FREED, P.LENT):
        with pytest.raises(TransitionError, match="USE"):
            step(Ownership(*sets), K.USE)


def test_which_phases_claim_pages_and_which_are_settled() -> None:
    assert {P.TAKEN, P.LENT, P.QUARANTINED} == CLAIMED and {P.LANDED, P.KEPT, P.FREED} == SETTLED
    for phase in P:
        claims = phase in (P.TAKEN, P.LENT, P.QUARANTINED)
        assert Ownership(phase).claimed is claims
        assert Ownership(P.FREED, staging=phase).claimed is claims


def test_own_pages_are_let_go_as_own_pages() -> None:
    own = K.TAKE, OWN
    assert follow(Ownership(), own, K.FREE) == [(OWN, C.RETURN), Ownership(P.FREED, own=True)]
    assert follow(Ownership(), own, K.LEND, K.LAND, K.KEEP, K.CLOSE) == [
        (OWN, C.RETURN),
        Ownership(P.KEPT, own=True),
    ]
    assert follow(STAGED, (K.TAKE, STAGING), own, K.LEND, K.USE, K.ABANDON, K.IDLE) == [
        (OWN, C.RETURN),
        (STAGING, C.RETURN),
        Ownership(P.FREED, P.WITHHELD, own=True),
    ]
