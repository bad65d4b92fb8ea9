"""Tables are total, and what every table of ours must obey."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest

from kvflow.protocols.machines import (
    decode_room,
    grants,
    group,
    link,
    ownership,
    peer,
    prefill_room,
)
from kvflow.protocols.machines import loan as loans
from kvflow.protocols.machines.tables import ERROR, IGNORE, Cell, Move, Table, TransitionError, rest


class Lamp(IntEnum):
    OFF = 0
    ON = 1


class Press(IntEnum):
    UP = 0
    DOWN = 1


class Act(IntEnum):
    GLOW = 0


TABLE: Table[Lamp, Press, Act] = Table(
    Lamp,
    Press,
    {
        Lamp.OFF: {Press.UP: Move(Lamp.ON, (Act.GLOW,)), Press.DOWN: IGNORE},
        Lamp.ON: rest(Press, ERROR) | {Press.DOWN: Move(Lamp.OFF)},
    },
)
OURS = {
    "decode": decode_room.TABLE,
    "prefill": prefill_room.TABLE,
    "loans": loans.TABLE,
    # Places of staging never land: tests/protocols/test_ownership.py has every cell of theirs.
    "pages": ownership.TABLES[ownership.Source.STORE],
    "own pages": ownership.TABLES[ownership.Source.OWN],
    "link": link.TABLE,
    "peer": peer.TABLE,
    "grants": grants.TABLE,
    "group member": group.MEMBER,
    "group leader": group.LEADER,
}
# What has ended is in no table: nothing at all can reach it.
GONE = ("decode", "prefill", "loans", "peer", "group member", "group leader")
G, P = grants.GrantPhase, ownership.PagePhase
PAGES_ENDED = frozenset({P.KEPT, P.FREED, P.WITHHELD})
ENDS: dict[str, frozenset[Any]] = {
    "decode": decode_room.TERMINAL,
    "prefill": prefill_room.TERMINAL,
    "loans": frozenset({loans.LoanPhase.RETURNED}),
    "pages": PAGES_ENDED,
    "own pages": PAGES_ENDED,
    "link": frozenset({link.LinkPhase.GONE}),
    "peer": frozenset({peer.PeerPhase.FORGOTTEN}),
    "grants": frozenset({G.CLOSED, G.DOUBTFUL, G.BELOW, G.BELOW_DOUBTFUL}),
    "group member": frozenset({group.MemberPhase.ENDED}),
    "group leader": group.LEADER_TERMINAL,
}


def test_move_ignore_error() -> None:
    assert TABLE.moves[Lamp.OFF, Press.UP] == (Lamp.ON, (Act.GLOW,))
    assert TABLE.moves[Lamp.OFF, Press.DOWN] is None
    with pytest.raises(TransitionError, match=r"UP.*ON"):
        TABLE.moves[Lamp.ON, Press.UP]
    assert repr(TABLE.cell(Lamp.OFF, Press.DOWN)) == "IGNORE"
    assert repr(TABLE.cell(Lamp.ON, Press.UP)) == "ERROR"


def test_a_missing_cell_is_found_when_the_table_is_built() -> None:
    rows: dict[Lamp, dict[Press, Cell[Lamp, Act]]] = {
        Lamp.OFF: rest(Press, IGNORE),
        Lamp.ON: {Press.DOWN: IGNORE},
    }
    with pytest.raises(ValueError, match=r"Lamp.ON says nothing about UP"):
        Table(Lamp, Press, rows)
    with pytest.raises(ValueError, match=r"Lamp.ON says nothing about UP, DOWN"):
        Table(Lamp, Press, {Lamp.OFF: rest(Press, IGNORE)})


def test_a_cell_is_replaced() -> None:
    rows = {lamp: {press: TABLE.cell(lamp, press) for press in Press} for lamp in Lamp}
    table: Table[Lamp, Press, Act] = Table(Lamp, Press, rows)
    cells: list[Cell[Lamp, Act]] = [Move(Lamp.OFF), IGNORE, ERROR, ERROR, Move(Lamp.ON)]
    for cell in cells:
        table.put(Lamp.OFF, Press.UP, cell)
        assert table.cell(Lamp.OFF, Press.UP) == cell
        assert ((Lamp.OFF, Press.UP) in table.moves) is (cell is not ERROR)
    assert table.cell(Lamp.OFF, Press.DOWN) is IGNORE


def test_diagram_shows_moves_only() -> None:
    assert TABLE.mermaid().splitlines() == [
        "stateDiagram-v2",
        "    OFF --> ON: up",
        "    ON --> OFF: down",
    ]


@pytest.mark.parametrize("name", OURS)
class TestOurs:
    def test_enums_count_from_zero(self, name: str) -> None:
        table: Any = OURS[name]
        for enum in (table.phases, table.kinds):
            assert [int(value) for value in enum] == list(range(len(enum)))

    def test_ended_is_ended(self, name: str) -> None:
        table: Any = OURS[name]
        for phase in ENDS[name]:
            for kind in table.kinds:
                cell = table.cell(phase, kind)
                assert cell is ERROR or (
                    name not in GONE and (cell is IGNORE or cell.phase in ENDS[name])
                )

    def test_every_phase_is_reachable_and_can_end(self, name: str) -> None:
        table: Any = OURS[name]
        onward = {
            phase: {
                c.phase for kind in table.kinds if isinstance(c := table.cell(phase, kind), Move)
            }
            for phase in table.phases
        }
        starts = {
            "prefill": {prefill_room.PrefillPhase.EXPECTED, prefill_room.PrefillPhase.BOOTSTRAPPED}
        }
        reached: set[Any] = set(starts.get(name, {next(iter(table.phases))}))
        while more := {b for a in reached for b in onward[a]} - reached:
            reached |= more
        assert reached == set(table.phases)
        can_end = set(ENDS[name])
        while more := {a for a, there in onward.items() if there & can_end} - can_end:
            can_end |= more
        assert can_end == set(table.phases)

    def test_ways_into_an_end_are_one_way(self, name: str) -> None:
        """A move that stays must leave something to do, a count apart, or say IGNORE."""
        table: Any = OURS[name]
        for phase in table.phases:
            for kind in table.kinds:
                cell = table.cell(phase, kind)
                if isinstance(cell, Move) and cell.phase is phase and not cell.commands:
                    assert kind.name.startswith(("CHUNK", "USE")), (phase, kind)

    def test_diagram_names_every_phase(self, name: str) -> None:
        table: Any = OURS[name]
        drawn = table.mermaid()
        assert all(phase.name in drawn for phase in table.phases)
