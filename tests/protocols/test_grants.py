"""The grant table against rules written apart from it, and the memory around it (I6)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.protocols.machines.grants import (
    TABLE,
    GrantCommand,
    GrantKind,
    GrantPhase,
    GrantTable,
    KeptBytes,
)
from kvflow.protocols.machines.ranges import GrantRanges
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move
from kvflow.protocols.wire.messages import AbortAck, ChunkDone, GrantId, Message, Rank, RoomId
from tests.protocols.cells import cells, check_cell

P, K, C = GrantPhase, GrantKind, GrantCommand
BEGUN = (P.ANNOUNCED, P.OPEN)
ENDED = (P.CLOSED, P.DOUBTFUL)  # remembered, with their last messages
BELOW = (P.BELOW, P.BELOW_DOUBTFUL)
DOUBT = (P.DOUBTFUL, P.BELOW_DOUBTFUL)
FROM_DECODE = (K.ANNOUNCE, K.BOOTSTRAP, K.ABORT, K.ASK)


def expected(phase: GrantPhase, kind: GrantKind) -> object:
    if kind in FROM_DECODE:
        return answer(phase, kind)
    if kind is K.JOIN:  # the engine's half of what was announced
        return Move(P.OPEN) if phase is P.ANNOUNCED else ERROR
    if kind is K.END:
        return Move(P.CLOSED) if phase in BEGUN else ERROR
    if kind is K.END_IN_DOUBT:  # only a room writes
        return Move(P.DOUBTFUL) if phase is P.OPEN else ERROR
    if kind is K.EVICT:
        return (
            Move(P.BELOW_DOUBTFUL if phase is P.DOUBTFUL else P.BELOW) if phase in ENDED else ERROR
        )
    assert kind is K.SETTLE  # of what is remembered, and is not a room's
    return Move(P.BELOW) if phase in (P.ANNOUNCED, *ENDED, P.BELOW_DOUBTFUL) else ERROR


def answer(phase: GrantPhase, kind: GrantKind) -> object:
    """What decode may send at any time."""
    if kind is K.ASK:
        return Move(phase, (C.RESEND if phase in (P.OPEN, *ENDED) else C.REPORT_UNKNOWN,))
    if kind is K.ABORT:
        if phase is P.OPEN:
            return Move(P.OPEN, (C.TELL_ROOM,))
        if phase in (P.UNKNOWN, P.ANNOUNCED):
            return Move(P.CLOSED, (C.END_OTHER_HALF, C.ACKNOWLEDGE))
        return Move(phase, (C.ACKNOWLEDGE,))
    if phase in ENDED:
        return Move(phase, (C.RESEND,))
    if phase in BELOW:
        return Move(phase, (C.REFUSE_STALE,))
    if kind is K.ANNOUNCE:
        if phase is P.OPEN:
            return Move(P.OPEN, (C.TELL_ROOM,))
        return Move(P.ANNOUNCED, (C.EXPECT,)) if phase is P.UNKNOWN else IGNORE
    return Move(P.OPEN, (C.TELL_ROOM if phase is P.OPEN else C.ADMIT,))


@cells(TABLE)
def test_cell(phase: GrantPhase, kind: GrantKind) -> None:
    check_cell(TABLE, phase, kind, expected(phase, kind))


@cells(TABLE)
def test_rules(phase: GrantPhase, kind: GrantKind) -> None:
    cell = TABLE.cell(phase, kind)
    if kind in FROM_DECODE:
        assert cell is not ERROR, "nothing that a decode sends is our own mistake"
    if not isinstance(cell, Move):
        return
    if phase in (*ENDED, *BELOW):
        # What has ended does not begin again.
        assert not {C.EXPECT, C.ADMIT, C.TELL_ROOM} & set(cell.commands)
        assert cell.phase not in BEGUN
    if phase in DOUBT and kind is not K.SETTLE:
        assert cell.phase in DOUBT, "doubt ends only when decode has settled the grant"
    if kind is K.ABORT:
        assert bool({C.ACKNOWLEDGE, C.TELL_ROOM} & set(cell.commands)), "every Abort gets an answer"


def _between(grant: int) -> dict[str, Any]:
    return {"room": 7, "grant": grant, "source": 1, "target": 2}


def ack(grant: int, *, drained: bool) -> AbortAck:
    return AbortAck(rank=Rank(0), drained=drained, **_between(grant))


def closed(table: GrantTable[str], grant: int, *, drained: bool = True) -> None:
    number = GrantId(grant)
    table.feed(number, K.BOOTSTRAP)
    table.rooms[number] = "room"
    table.end(number, (ack(grant, drained=drained),))


def test_the_memory_is_bounded_and_what_falls_out_of_it_stays_ended() -> None:
    table: GrantTable[str] = GrantTable(2, GrantId(1), KeptBytes())
    for grant in (1, 2, 3, 4):
        closed(table, grant)
    assert (table.remembered, table.low_water) == (2, 3)
    phases = [P.BELOW, P.BELOW, P.CLOSED, P.CLOSED, P.UNKNOWN]
    assert [table.phase(GrantId(g)) for g in range(1, 6)] == phases
    assert table.feed(GrantId(1), K.BOOTSTRAP) == (C.REFUSE_STALE,)
    assert table.feed(GrantId(3), K.BOOTSTRAP) == (C.RESEND,) and table.last_messages(GrantId(3))


def test_an_evicted_grant_in_doubt_is_never_called_drained() -> None:
    table: GrantTable[str] = GrantTable(1, GrantId(1), KeptBytes())
    closed(table, 1, drained=False)
    closed(table, 2)
    assert table.phase(GrantId(1)) is P.BELOW_DOUBTFUL
    assert not table.is_drained(GrantId(1)) and table.is_drained(GrantId(2))
    assert table.unproven() == (1,) and table.all_ended
    assert table.settle(GrantId(3)) == [] and not table.unproven() and table.is_drained(GrantId(1))
    assert table.settle(GrantId(3)) == [], "decode says so with every heartbeat"
    closed(table, 3, drained=False)
    closed(table, 4)
    # It has settled those below.
    assert table.settle(GrantId(3)) == [] and not table.is_drained(GrantId(3))


def test_what_is_settled_takes_no_memory() -> None:
    table: GrantTable[str] = GrantTable(2, GrantId(1), KeptBytes())
    for grant in (1, 2, 3, 4, 5):
        closed(table, grant, drained=grant % 2 == 0)
    table.feed(GrantId(6), K.ANNOUNCE)
    table.announcements.add(GrantId(6), RoomId(6))
    table.settle(GrantId(7))
    assert not (
        table._phases or table._sent or table._unsettled or table._evicted_in_doubt or table.rooms
    )
    assert not (table.announcements.rooms or table.announcements._order) and table.remembered == 0


@pytest.mark.parametrize("below", [4, 1 << 40])
def test_a_claim_to_have_settled_what_was_never_offered_changes_nothing(below: int) -> None:
    table: GrantTable[str] = GrantTable(8, GrantId(1), KeptBytes())
    closed(table, 2, drained=False)
    assert table.settle(GrantId(below)) is None
    assert (table.low_water, table.remembered, table.phase(GrantId(2))) == (1, 1, P.DOUBTFUL)
    closed(table, 3)
    assert table.settle(GrantId(3)) == [] and table.low_water == 3
    # The bound itself is not settled.
    assert table.phase(GrantId(3)) is P.CLOSED and table.remembered == 1


def test_what_is_settled_above_an_open_grant_takes_no_memory_and_does_not_begin_again() -> None:
    table: GrantTable[str] = GrantTable(1000, GrantId(1), KeptBytes())
    table.feed(GrantId(1), K.ANNOUNCE)
    table.announcements.add(GrantId(1), RoomId(1))
    for grant in range(2, 100):
        closed(table, grant, drained=grant % 2 == 0)
    closed(table, 102)
    assert table.settle(GrantId(1), [(GrantId(2), GrantId(100))]) == []
    assert table.remembered == 1 and not table.unproven() and table.low_water == 1
    assert table.feed(GrantId(50), K.BOOTSTRAP) == (C.REFUSE_STALE,)
    assert table.feed(GrantId(99), K.ANNOUNCE) == (C.REFUSE_STALE,)
    assert table.phase(GrantId(100)) is P.UNKNOWN, "it may be on its way"
    assert table.feed(GrantId(1), K.BOOTSTRAP) == (C.ADMIT,)
    table.rooms[GrantId(1)] = "room"
    table.end(GrantId(1), (ack(1, drained=True),))
    assert table.settle(GrantId(2)) == [] and table.low_water == 100 and not len(table._settled)


def test_what_was_announced_in_a_settled_range_is_withdrawn() -> None:
    table: GrantTable[str] = GrantTable(8, GrantId(1), KeptBytes())
    for grant in (1, 2, 3):
        table.feed(GrantId(grant), K.ANNOUNCE)
        table.announcements.add(GrantId(grant), RoomId(70 + grant))
    assert table.settle(GrantId(1), [(GrantId(2), GrantId(3))]) == [(2, 72)]
    assert table.phase(GrantId(2)) is P.BELOW and list(table.announcements.rooms) == [1, 3]
    assert table.settle(GrantId(2), [(GrantId(3), GrantId(4))]) == [(1, 71), (3, 73)]


def test_a_range_from_the_low_water_mark_on_raises_it() -> None:
    table: GrantTable[str] = GrantTable(8, GrantId(1), KeptBytes())
    closed(table, 1)
    closed(table, 2)
    assert table.settle(GrantId(1), [(GrantId(1), GrantId(3))]) == []
    assert table.low_water == 3 and not len(table._settled)


@pytest.mark.parametrize("bad", [(2, 2), (3, 2), (2, 4), (2, 1 << 40)])
def test_empty_ranges_and_those_never_offered_change_nothing(bad: tuple[int, int]) -> None:
    table: GrantTable[str] = GrantTable(8, GrantId(1), KeptBytes())
    closed(table, 1)
    closed(table, 2)
    good = (GrantId(1), GrantId(2))
    assert table.settle(GrantId(1), [good, (GrantId(bad[0]), GrantId(bad[1]))]) is None
    assert table.remembered == 2 and not len(table._settled)


def test_ranges_are_bounded_and_the_lowest_raises_the_low_water_mark() -> None:
    table: GrantTable[str] = GrantTable(2, GrantId(1), KeptBytes())
    table.begin_from(GrantId(1))
    closed(table, 20)
    ranges = [(GrantId(grant), GrantId(grant + 1)) for grant in (3, 6, 9)]
    table.settle(GrantId(1), ranges)
    assert table.low_water == 4 and len(table._settled) == 2
    assert [table.phase(GrantId(grant)) for grant in (2, 5, 6)] == [P.BELOW, P.UNKNOWN, P.BELOW]


def test_bytes_of_handoffs_are_counted_over_all_tables_until_they_are_forgotten() -> None:
    kept = KeptBytes()
    first, second = (GrantTable[str](8, GrantId(1), kept) for _ in range(2))
    for table, grant in ((first, 1), (first, 2), (second, 1)):
        number = GrantId(grant)
        table.feed(number, K.BOOTSTRAP)
        done = ChunkDone(
            rank=Rank(0), seq=0, pages=(1,), last=True, handoff=b"h" * 100, **_between(grant)
        )
        table.end(number, (done,))
    assert (kept.total, first.kept_bytes, second.kept_bytes) == (300, 200, 100)
    first.evict()
    assert (kept.total, first.kept_bytes, first.remembered, first.low_water) == (200, 100, 1, 2)
    first.settle(GrantId(3))
    assert (kept.total, first.kept_bytes) == (100, 0)
    second.forget()
    assert (kept.total, second.kept_bytes) == (0, 0)


def test_a_new_table_begins_where_decode_says() -> None:
    table: GrantTable[str] = GrantTable(8, GrantId(5), KeptBytes())
    assert table.phase(GrantId(4)) is P.BELOW and table.phase(GrantId(5)) is P.UNKNOWN
    assert table.feed(GrantId(4), K.ANNOUNCE) == (C.REFUSE_STALE,)
    assert table.settle(GrantId(5)) == [] and table.all_ended


def test_doubts_of_a_decode_that_was_forgotten_are_doubts_when_it_is_back() -> None:
    table: GrantTable[str] = GrantTable(8, GrantId(1), KeptBytes())
    table.remember_doubts((GrantId(2), GrantId(4)))
    assert table.unproven() == (2, 4) and table.low_water == 5
    assert not table.is_drained(GrantId(2))
    assert table.is_drained(GrantId(3))
    for grant in (4, 1):
        assert table.feed(GrantId(grant), K.BOOTSTRAP) == (C.REFUSE_STALE,)
    assert table.phase(GrantId(5)) is P.UNKNOWN and table.seen_below == 5
    assert table.settle(GrantId(5)) == [] and not table.unproven()


def test_grants_in_doubt_are_named_in_ascending_order() -> None:
    table: GrantTable[str] = GrantTable(8, GrantId(1), KeptBytes())
    # A set of these two iterates over 17 first.
    table.remember_doubts((GrantId(17), GrantId(2)))
    assert table.unproven() == (2, 17)


def test_a_withdrawn_announcement_has_no_messages_and_is_remembered() -> None:
    table: GrantTable[str] = GrantTable(8, GrantId(1), KeptBytes())
    table.feed(GrantId(1), K.ANNOUNCE)
    table.announcements.add(GrantId(1), RoomId(7))
    assert (table.all_ended, table.unproven()) == (False, ()), "nothing was offered"
    assert table.feed(GrantId(1), K.ABORT) == (C.END_OTHER_HALF, C.ACKNOWLEDGE)
    table.end(GrantId(1), ())
    assert table.all_ended and table.remembered == 1 and table.last_messages(GrantId(1)) == ()
    # Its pages came late: it does not begin.
    assert table.feed(GrantId(1), K.BOOTSTRAP) == (C.RESEND,)


def test_settling_withdraws_what_was_announced_and_never_offered_whatever_the_order() -> None:
    table: GrantTable[str] = GrantTable(8, GrantId(1), KeptBytes())
    for grant in (3, 1, 2, 4):
        table.feed(GrantId(grant), K.ANNOUNCE)
        table.announcements.add(GrantId(grant), RoomId(10 * grant))
    table.feed(GrantId(2), K.JOIN)  # prefill's half is here, the pages are not
    table.announcements.discard(GrantId(1))
    table.feed(GrantId(1), K.BOOTSTRAP)
    assert table.settle(GrantId(4)) == [(2, 20), (3, 30)]
    phases = [P.OPEN, P.OPEN, P.BELOW, P.ANNOUNCED]
    assert [table.phase(GrantId(grant)) for grant in (1, 2, 3, 4)] == phases
    assert table.settle(GrantId(5)) == [(4, 40)] and table.settle(GrantId(5)) == []


@settings(max_examples=300)
@given(st.data())
def test_the_memory_agrees_with_itself(data: st.DataObject) -> None:
    """Random lives of a few grants: counts and memory are what the phases say."""
    table: GrantTable[str] = GrantTable(2, GrantId(1), KeptBytes())
    for _ in range(data.draw(st.integers(0, 30))):
        grant = GrantId(data.draw(st.integers(1, 5)))
        match data.draw(
            st.sampled_from(["announce", "bootstrap", "abort", "end", "doubt", "settle"])
        ):
            case "end" | "doubt" as how:
                if table.phase(grant) is P.OPEN:
                    sent: tuple[Message, ...] = (ack(grant, drained=how == "end"),)
                    table.end(grant, sent)
            case "settle":
                table.settle(grant)
            case word:
                commands = table.feed(grant, K[word.upper()])
                if C.END_OTHER_HALF in commands:
                    table.end(grant, ())
                if C.EXPECT in commands:
                    table.announcements.add(grant, RoomId(grant))
                if C.ADMIT in commands:
                    table.rooms[grant] = "room"
                    table.announcements.discard(grant)
        phases = {number: table.phase(GrantId(number)) for number in range(1, 6)}
        assert table.remembered == sum(phase in ENDED for phase in phases.values()) <= 2
        assert set(table.rooms) == {number for number, phase in phases.items() if phase is P.OPEN}
        assert table.all_ended == (not any(phase in BEGUN for phase in phases.values()))
        unproven = [number for number, phase in phases.items() if phase in (P.OPEN, *DOUBT)]
        assert table.unproven() == tuple(unproven)
        announced = [number for number, phase in phases.items() if phase is P.ANNOUNCED]
        assert table.announcements.rooms == {
            GrantId(number): RoomId(number) for number in announced
        }
        assert all(
            phase is not P.UNKNOWN for number, phase in phases.items() if number < table.low_water
        )


# --- sets of grants as ranges


grants = st.integers(1, 20)


def contents(ranges: GrantRanges) -> set[int]:
    return {grant for grant in range(30) if GrantId(grant) in ranges}


def runs(numbers: set[int]) -> int:
    return sum(number - 1 not in numbers for number in numbers)


@given(st.lists(st.tuples(grants, st.integers(1, 5), st.none() | grants), max_size=8))
def test_it_holds_what_was_added_in_few_ranges(steps: list[tuple[int, int, int | None]]) -> None:
    ranges, plain = GrantRanges(), set[int]()
    for start, count, through in steps:
        ranges.add(GrantId(start), GrantId(start + count))
        plain |= set(range(start, start + count))
        if through is not None:
            end = through
            while end in plain:
                end += 1
            assert ranges.pop_through(GrantId(through)) == end
            plain = {grant for grant in plain if grant >= end}
        assert contents(ranges) == plain and len(ranges) == runs(plain)
    while len(ranges):
        lowest = min(plain)
        while lowest in plain:
            plain.discard(lowest)
            lowest += 1
        assert ranges.pop_first() == lowest
    assert not plain
