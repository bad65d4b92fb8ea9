"""Decode's link table, cell by cell, against rules written down apart from it (I2, I4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from kvflow.protocols.machines.link import TABLE, LinkCommand, LinkKind, LinkPhase
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move
from tests.protocols.cells import cells, check_cell

P, K, C = LinkPhase, LinkKind, LinkCommand
PROOF = {K.DIED, K.DECLARED_DEAD}  # the writer writes no more: proven, or an operator's word
DUE = {K.REPEAT_DUE, K.SILENCE_DUE, K.REGISTER_DUE, K.REDIAL_DUE}
ALIVE = (P.REGISTERING, P.UP, P.PARTING, P.SILENT)
SENT_AGAIN = {
    P.UP: C.SEND_HEARTBEAT,
    P.PARTING: C.SEND_GOODBYE,
    P.REGISTERING: C.SEND_REGISTER,
    P.SILENT: C.SEND_REGISTER,
}


def expected(phase: LinkPhase, kind: LinkKind) -> object:
    if phase is P.GONE:  # never used again, but what it owes still ends on proof
        if kind in DUE or kind is K.LEAVE:  # it keeps no deadline, and nothing is said to it
            return ERROR
        return Move(P.GONE, (C.END_LOANS,)) if kind in PROOF else IGNORE
    if phase is P.REGISTERING and kind is K.DIED:  # nobody watches a writer before it has accepted
        return ERROR
    if kind in PROOF:
        return Move(P.GONE, (C.HANG_UP, C.LOSE_ROOMS, C.END_LOANS))
    if kind in (K.REPLACED, K.CLOSED):  # rooms end; loans wait for proof
        return Move(P.GONE, (C.HANG_UP, C.LOSE_ROOMS))
    if kind is K.HEARD:  # only an accepting answer to Register changes anything
        return IGNORE
    if kind is K.REPEAT_DUE:
        return Move(phase, (SENT_AGAIN[phase],))
    if kind is K.GOODBYE:  # whatever the link is: it is prefill's last word
        return Move(P.GONE, (C.ACKNOWLEDGE, C.HANG_UP, C.PART))
    if kind is K.ACKNOWLEDGED and phase is not P.PARTING:
        return IGNORE
    if kind is K.LEAVE and phase in (P.REGISTERING, P.SILENT):  # once: no answer can be expected
        return Move(P.GONE, (C.SEND_GOODBYE, C.HANG_UP, C.LOSE_ROOMS))
    if phase is P.PARTING and kind in (K.ACCEPTED, K.REFUSED):
        return IGNORE
    return {
        (P.REGISTERING, K.ACCEPTED): Move(P.UP, (C.WATCH_WRITER, C.START_ROOMS)),
        (P.REGISTERING, K.REFUSED): Move(P.GONE, (C.HANG_UP, C.LOSE_ROOMS)),
        (P.REGISTERING, K.REGISTER_DUE): Move(P.GONE, (C.HANG_UP, C.LOSE_ROOMS)),
        (P.UP, K.ACCEPTED): IGNORE,
        (P.UP, K.REFUSED): IGNORE,
        (P.UP, K.SILENCE_DUE): Move(P.SILENT, (C.LOSE_ROOMS, C.SEND_REGISTER)),
        (P.UP, K.LEAVE): Move(P.PARTING, (C.SEND_GOODBYE,)),
        (P.PARTING, K.ACKNOWLEDGED): Move(P.GONE, (C.HANG_UP, C.LOSE_ROOMS)),
        (P.SILENT, K.ACCEPTED): Move(P.UP, (C.ASK_LOANS,)),
        (P.SILENT, K.REFUSED): Move(P.SILENT, (C.ASK_LOANS,)),
        (P.SILENT, K.REDIAL_DUE): Move(P.SILENT, (C.REDIAL, C.SEND_REGISTER)),
    }.get((phase, kind), ERROR)


@cells(TABLE)
def test_cell(phase: LinkPhase, kind: LinkKind) -> None:
    check_cell(TABLE, phase, kind, expected(phase, kind))


@cells(TABLE)
def test_rules(phase: LinkPhase, kind: LinkKind) -> None:
    cell = TABLE.cell(phase, kind)
    if not isinstance(cell, Move):
        return
    # No silence, refusal or new incarnation is proof (I2).
    assert (C.END_LOANS in cell.commands) == (kind in PROOF)
    leaves = phase in ALIVE and cell.phase is P.GONE
    # The socket goes with the link: it has this decode's routing id.
    assert (C.HANG_UP in cell.commands) == leaves
    falls_silent = phase is P.UP and cell.phase is P.SILENT
    loses_rooms = bool({C.LOSE_ROOMS, C.PART} & set(cell.commands))
    assert loses_rooms == (leaves or falls_silent), "its rooms end as soon as it is not up"
    # Proof is prefill's own word, and no other.
    assert (C.PART in cell.commands) == (leaves and kind is K.GOODBYE)
    assert (C.START_ROOMS in cell.commands) == (phase is P.REGISTERING and cell.phase is P.UP)
    # Watched before a page is lent to it.
    assert (C.WATCH_WRITER in cell.commands) == (C.START_ROOMS in cell.commands)
    if cell.phase is P.SILENT:
        # A silent link always asks for something.
        assert {C.SEND_REGISTER, C.ASK_LOANS} & set(cell.commands)


def test_a_refusal_never_costs_a_link_that_was_up() -> None:
    assert TABLE.moves[P.UP, K.REFUSED] is None
    silent = TABLE.moves[P.SILENT, K.REFUSED]
    assert silent is not None and silent.phase is P.SILENT


def commands_after(kinds: Iterable[LinkKind]) -> list[LinkCommand]:
    """What a link that is up asks for, until one of these events is impossible."""
    phase, commands = P.UP, list[LinkCommand]()
    for kind in kinds:
        if TABLE.cell(phase, kind) is ERROR:
            break
        move = TABLE.moves[phase, kind]
        if move is not None:
            commands += move.commands
            phase = move.phase
    return commands


@pytest.mark.parametrize("first", sorted(set(K) - PROOF), ids=lambda kind: kind.name)
def test_no_sequence_without_proof_ends_a_loan(first: LinkKind) -> None:
    for others in itertools.product(sorted(set(K) - PROOF), repeat=2):
        assert C.END_LOANS not in commands_after((first, *others)), (first, *others)
