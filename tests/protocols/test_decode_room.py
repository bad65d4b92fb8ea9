"""The decode table against rules written apart from it, and the counting around it (I4, I8)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.decode_room import (
    TABLE,
    TERMINAL,
    DecodeCommand,
    DecodeEvent,
    DecodeKind,
    DecodePhase,
    DecodeRoomState,
    opened,
    step,
)
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move
from tests.protocols.cells import cells, check_cell

P, K, C = DecodePhase, DecodeKind, DecodeCommand
CHUNKS = {K.CHUNK_LANDED, K.ALL_LANDED}
LOANS = {K.LOANS_ENDED, K.LOANS_DOUBTFUL}
ENDINGS = {K.ROOM_FAILED, K.ENDED_LOCALLY, K.SOURCE_LOST}
LENT = {P.WAITING_FOR_INPUT, P.TRANSFERRING}  # prefill has our pages, and the room is open


def expected(phase: DecodePhase, kind: DecodeKind) -> object:
    if phase in TERMINAL:  # in no table any more
        return ERROR
    if phase is P.DRAINING:  # the client has its error; only the loans decide how it ends
        return {
            K.LOANS_ENDED: Move(P.ABORTED, (C.END,)),
            K.LOANS_DOUBTFUL: Move(P.LOST, (C.END,)),
        }.get(kind, IGNORE if kind in ENDINGS else ERROR)
    if kind in LOANS:  # loans are recalled first
        return ERROR
    if kind is K.LENT:
        return Move(P.WAITING_FOR_INPUT, (C.SEND_BOOTSTRAP,)) if phase is P.BOOTSTRAPPING else ERROR
    if kind in CHUNKS:
        if phase not in LENT:  # no page was lent
            return ERROR
        landed = Move(P.SUCCESS, (C.TELL_LANDED, C.END))
        return landed if kind is K.ALL_LANDED else Move(P.TRANSFERRING)
    assert kind in ENDINGS
    # Nothing is lent: it ends at once, and its announcements are withdrawn.
    if phase is P.BOOTSTRAPPING:
        end = P.ABORTED if kind is K.ENDED_LOCALLY else P.FAILED
        return Move(end, (C.TELL_FAILED, C.RECALL_LOANS, C.END))
    if kind is K.ENDED_LOCALLY:
        return Move(P.DRAINING, (C.TELL_FAILED, C.RECALL_LOANS))
    return Move(
        P.LOST if kind is K.SOURCE_LOST else P.FAILED, (C.TELL_FAILED, C.RECALL_LOANS, C.END)
    )


@cells(TABLE)
def test_cell(phase: DecodePhase, kind: DecodeKind) -> None:
    check_cell(TABLE, phase, kind, expected(phase, kind))


@cells(TABLE)
def test_rules(phase: DecodePhase, kind: DecodeKind) -> None:
    cell = TABLE.cell(phase, kind)
    if not isinstance(cell, Move):
        return
    commands = list(cell.commands)
    assert (C.END in commands) == (cell.phase in TERMINAL), "the end comes once, with the last move"
    assert (C.TELL_LANDED in commands) == (cell.phase is P.SUCCESS)
    still_open = phase in LENT | {P.BOOTSTRAPPING}
    closes = still_open and cell.phase not in LENT
    told = commands.count(C.TELL_LANDED) + commands.count(C.TELL_FAILED)
    # The client gets one answer, as soon as the room is no longer open.
    assert told == (1 if closes else 0)
    recalls = closes and cell.phase is not P.SUCCESS
    # Loans are recalled when a room ends early, and only then.
    assert (C.RECALL_LOANS in commands) == recalls
    if C.TELL_FAILED in commands:
        assert commands[0] is C.TELL_FAILED, "the client first"


def chunk(seq: int, *pages: int, last: bool = False, rank: int = 0) -> DecodeEvent:
    return DecodeEvent(K.CHUNK_LANDED, rank, seq, pages or (1,), last)


def waiting(pages: int = 3, ranks: int = 1) -> DecodeRoomState:
    room, commands = step(opened((pages,), ranks), DecodeEvent(K.LENT))
    assert commands == (C.SEND_BOOTSTRAP,)
    return room


def test_states_are_frozen_values_and_step_is_pure() -> None:
    room = waiting()
    with pytest.raises(AttributeError):
        room.phase = P.LOST  # type: ignore[misc]
    event = chunk(0)
    assert step(room, event) == step(room, event)
    assert room == waiting() and hash(room) == hash(waiting())
    assert hash(event) == hash(chunk(0))


def test_chunks_in_order_until_all_pages_are_filled() -> None:
    room = waiting(3)
    room, commands = step(room, chunk(0))
    assert (room.phase, commands, room.filled) == (P.TRANSFERRING, (), ((1,),))
    room, commands = step(room, chunk(1, 2, last=True))
    assert (room.phase, commands, room.filled) == (P.SUCCESS, (C.TELL_LANDED, C.END), ((3,),))


@pytest.mark.parametrize("seq", [0, 2, 5])
def test_repeats_and_gaps_change_nothing(seq: int) -> None:
    room, _ = step(waiting(), chunk(0))
    assert step(room, chunk(seq)) == (room, ())


@pytest.mark.parametrize(
    "event",
    [chunk(0, 4), chunk(0, 4, last=True), chunk(0, 2, last=True), chunk(0, 0, last=True)],
    ids=["too many", "too many at last", "too few at last", "none at last"],
)
def test_chunks_that_do_not_add_up_end_the_room(event: DecodeEvent) -> None:
    room, commands = step(waiting(3), event)
    assert room.phase is P.DRAINING and commands == (C.TELL_FAILED, C.RECALL_LOANS)
    assert room.cause is not None and room.cause.code is Code.PROTOCOL_ERROR


def test_success_needs_every_rank() -> None:
    room = waiting(2, ranks=3)
    for rank in (2, 0):
        room, commands = step(room, chunk(0, 2, last=True, rank=rank))
        assert (room.phase, commands) == (P.TRANSFERRING, ())
    # Once more does not stand for another rank.
    room, commands = step(room, chunk(0, 2, last=True, rank=2))
    assert (room.phase, commands) == (P.TRANSFERRING, ())
    room, commands = step(room, chunk(0, 1, rank=1))
    assert room.phase is P.TRANSFERRING
    room, commands = step(room, chunk(1, 1, last=True, rank=1))
    assert (room.phase, commands) == (P.SUCCESS, (C.TELL_LANDED, C.END))


def test_the_first_cause_is_kept() -> None:
    first, second = Cause(Code.CLIENT_GONE, "first"), Cause(Code.PEER_LOST, "second")
    room, _ = step(waiting(), DecodeEvent(K.ENDED_LOCALLY, cause=first))
    room, _ = step(room, DecodeEvent(K.SOURCE_LOST, cause=second))
    room, _ = step(room, DecodeEvent(K.LOANS_DOUBTFUL, cause=second))
    assert (room.phase, room.cause) == (P.LOST, first)


events = st.one_of(
    st.builds(
        DecodeEvent,
        st.sampled_from([K.CHUNK_LANDED]),
        st.integers(0, 1),
        st.integers(0, 3),
        st.integers(0, 3).map(lambda count: (count,)),
        st.booleans(),
    ),
    st.builds(DecodeEvent, st.sampled_from(sorted(ENDINGS))),
)


@settings(max_examples=300)
@given(st.lists(events, max_size=20))
def test_whatever_a_peer_sends_success_is_full_and_ends_once(received: list[DecodeEvent]) -> None:
    room, ends, told = waiting(3, ranks=2), 0, 0
    for event in received:
        if room.phase in TERMINAL:
            break
        room, commands = step(room, event)
        ends += commands.count(C.END)
        told += commands.count(C.TELL_LANDED) + commands.count(C.TELL_FAILED)
        assert max(room.filled) <= (3,)
        if room.phase is P.SUCCESS:
            assert room.filled == ((3,), (3,)) and room.finished == 3
    if room.phase is P.DRAINING:
        room, commands = step(room, DecodeEvent(K.LOANS_ENDED))
        ends += commands.count(C.END)
    assert ends == (room.phase in TERMINAL) and told == (room.phase in TERMINAL)
