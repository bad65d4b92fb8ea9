"""The prefill table against rules written apart from it, and its counting (I3, I4, I12)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.prefill_room import (
    TABLE,
    TERMINAL,
    PrefillCommand,
    PrefillEvent,
    PrefillKind,
    PrefillPhase,
    PrefillRoomState,
    step,
)
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move
from kvflow.protocols.ports import WriteOutcome
from tests.protocols.cells import cells, check_cell

P, K, C = PrefillPhase, PrefillKind, PrefillCommand
ENDINGS = {K.ABORT_RECEIVED, K.ENDED_LOCALLY, K.TARGET_LOST, K.MISMATCHED}
IN_DOUBT = {K.WRITE_FAILED, K.ALL_DOUBTFUL}
WRITES = {K.CHUNK_LANDED, K.IDLE, K.ALL_LANDED, *IN_DOUBT, K.ALL_STOPPED, K.DRAINED, K.UNPROVEN}
# matched() or done() is awaited.
HAS_ENGINE = {P.EXPECTED, P.ANNOUNCED, P.WAITING_FOR_INPUT, P.TRANSFERRING}
# A decode asks for it.
HAS_DECODE = {P.ANNOUNCED, P.BOOTSTRAPPED, P.WAITING_FOR_INPUT, P.TRANSFERRING}


def ending(phase: PrefillPhase, kind: PrefillKind) -> object:
    """What an open room does about a reason to end, with nothing running."""
    tell = (C.TELL_ENDED,) if phase in HAS_ENGINE else ()
    if kind is K.ABORT_RECEIVED:  # decode knows why; it waits for the proof only
        return Move(P.ABORTED, (C.SEND_DRAINED, *tell, C.END))
    if phase is P.EXPECTED and kind is K.ENDED_LOCALLY:  # no decode is known to send anything to
        return Move(P.FAILED, (C.TELL_ENDED, C.END))
    if kind is K.MISMATCHED:  # both halves are there, whichever came first
        tell = (C.TELL_ENDED,)
    return Move(P.FAILED, (C.SEND_FAILED, C.SEND_DRAINED, *tell, C.END))


def expected(phase: PrefillPhase, kind: PrefillKind) -> object:
    if phase in TERMINAL:  # in no table any more, and nothing of it runs
        return ERROR
    if phase is P.DRAINING:  # the ends of writes decide; new work would be our own mistake
        last = {
            K.DRAINED: Move(P.ABORTED, (C.SEND_DRAINED, C.END)),
            K.UNPROVEN: Move(P.LOST, (C.SEND_UNPROVEN, C.END)),
        }
        # A lost target's rooms that drain are left alone.
        late = (K.CHUNK_LANDED, K.ABORT_RECEIVED, K.ENDED_LOCALLY)
        return last.get(kind, IGNORE if kind in late else ERROR)
    halves = phase in (P.EXPECTED, P.ANNOUNCED, P.BOOTSTRAPPED)
    if kind is K.ANNOUNCED:  # once, by the decode that will offer pages
        return Move(P.ANNOUNCED) if phase is P.EXPECTED else ERROR
    if kind is K.MATCHED:
        return Move(P.WAITING_FOR_INPUT, (C.TELL_MATCHED,)) if halves else ERROR
    if kind is K.CHUNK_QUEUED:
        return ERROR if halves else Move(P.TRANSFERRING, (C.START_WRITE,))
    if kind in WRITES:
        if phase is not P.TRANSFERRING:  # nothing runs
            return ERROR
        return {
            K.CHUNK_LANDED: Move(P.TRANSFERRING, (C.SEND_CHUNK_DONE,)),
            K.IDLE: Move(P.WAITING_FOR_INPUT, (C.SEND_CHUNK_DONE,)),
            K.ALL_LANDED: Move(P.SUCCESS, (C.SEND_CHUNK_DONE, C.TELL_SUCCESS, C.END)),
            K.WRITE_FAILED: Move(P.DRAINING, (C.SEND_FAILED, C.TELL_ENDED, C.CANCEL_WRITES)),
            K.ALL_STOPPED: Move(P.ABORTED, (C.SEND_FAILED, C.SEND_DRAINED, C.TELL_ENDED, C.END)),
            K.ALL_DOUBTFUL: Move(P.LOST, (C.SEND_FAILED, C.SEND_UNPROVEN, C.TELL_ENDED, C.END)),
        }.get(kind, ERROR)
    if kind is K.MISMATCHED and not halves:
        return ERROR
    if phase is P.EXPECTED and kind in (K.ABORT_RECEIVED, K.TARGET_LOST):  # there is no decode yet
        return ERROR
    if phase is not P.TRANSFERRING:
        return ending(phase, kind)
    failed = () if kind is K.ABORT_RECEIVED else (C.SEND_FAILED,)
    return Move(P.DRAINING, (*failed, C.TELL_ENDED, C.CANCEL_WRITES))


@cells(TABLE)
def test_cell(phase: PrefillPhase, kind: PrefillKind) -> None:
    check_cell(TABLE, phase, kind, expected(phase, kind))


@cells(TABLE)
def test_rules(phase: PrefillPhase, kind: PrefillKind) -> None:
    cell = TABLE.cell(phase, kind)
    if not isinstance(cell, Move):
        return
    commands = list(cell.commands)
    assert (C.END in commands) == (cell.phase in TERMINAL), "the end comes once, with the last move"
    assert not commands or C.END not in commands[:-1], "and nothing after it"
    acks = commands.count(C.SEND_DRAINED) + commands.count(C.SEND_UNPROVEN)
    ended_early = cell.phase in TERMINAL and cell.phase is not P.SUCCESS
    known = phase in HAS_DECODE | {P.DRAINING} or kind is K.MISMATCHED
    # One verdict on the loan, when nothing runs any more.
    assert acks == (1 if ended_early and known else 0)
    if cell.phase in (P.TRANSFERRING, P.DRAINING):
        # Writes still run.
        assert not {C.SEND_DRAINED, C.SEND_UNPROVEN, C.TELL_SUCCESS, C.END} & set(commands)
    if C.SEND_DRAINED in commands:
        assert kind not in IN_DOUBT | {K.UNPROVEN}, "never drained after doubt"
    assert (C.SEND_UNPROVEN in commands) == (cell.phase is P.LOST)
    # Only what landed (I3).
    assert (C.SEND_CHUNK_DONE in commands) == (kind in (K.CHUNK_LANDED, K.IDLE, K.ALL_LANDED))
    assert (C.TELL_SUCCESS in commands) == (cell.phase is P.SUCCESS)
    if C.SEND_FAILED in commands:
        # The other side is told first, whatever else there is to do.
        assert commands[0] is C.SEND_FAILED
        assert kind is not K.ABORT_RECEIVED, "decode ended it"
    assert (C.CANCEL_WRITES in commands) == (cell.phase is P.DRAINING)


def queued(*, last: bool = False) -> PrefillEvent:
    return PrefillEvent(K.CHUNK_QUEUED, last=last)


def ended(outcome: WriteOutcome, cause: Cause | None = None) -> PrefillEvent:
    return PrefillEvent(None, outcome=outcome, cause=cause)


def run(*events: PrefillEvent) -> tuple[PrefillRoomState, list[PrefillCommand]]:
    room, said = PrefillRoomState(P.WAITING_FOR_INPUT), list[PrefillCommand]()
    for event in events:
        room, commands = step(room, event)
        said.extend(commands)
    return room, said


def test_states_are_frozen_values_and_step_is_pure() -> None:
    room, _ = run(queued())
    with pytest.raises(AttributeError):
        room.phase = P.LOST  # type: ignore[misc]
    assert step(room, queued()) == step(room, queued())
    assert room == run(queued())[0] and hash(room) == hash(run(queued())[0])


def test_chunks_land_one_after_the_other_or_together() -> None:
    landed = ended(WriteOutcome.LANDED)
    together, _ = run(queued(), queued(last=True), landed)
    assert together.phase is P.TRANSFERRING
    for events in (
        [queued(), queued(last=True), landed, landed],
        [queued(), landed, queued(last=True), landed],
    ):
        room, said = run(*events)
        assert room.phase is P.SUCCESS
        assert said.count(C.SEND_CHUNK_DONE) == 2 and said[-2:] == [C.TELL_SUCCESS, C.END]


@pytest.mark.parametrize(
    "why", [K.ABORT_RECEIVED, K.ENDED_LOCALLY, K.TARGET_LOST], ids=lambda value: value.name
)
@pytest.mark.parametrize("outcomes", list(itertools.product(WriteOutcome, repeat=2)), ids=str)
def test_an_ending_waits_for_every_write_and_remembers_doubt(
    why: PrefillKind, outcomes: tuple[WriteOutcome, WriteOutcome]
) -> None:
    room, said = run(
        queued(), queued(), PrefillEvent(why, cause=Cause(Code.CLIENT_GONE)), ended(outcomes[0])
    )
    assert room.phase is P.DRAINING
    assert not {C.SEND_DRAINED, C.SEND_UNPROVEN, C.END} & set(said)
    room, commands = step(room, ended(outcomes[1]))
    doubt = WriteOutcome.UNPROVEN in outcomes
    assert room.phase is (P.LOST if doubt else P.ABORTED)
    assert commands == (C.SEND_UNPROVEN if doubt else C.SEND_DRAINED, C.END)


def test_a_write_in_doubt_fails_the_room_and_decode_is_told_at_once() -> None:
    cause = Cause(Code.TRANSFER_ERROR, "reset")
    room, said = run(queued(), queued(last=True), ended(WriteOutcome.UNPROVEN, cause))
    assert room.phase is P.DRAINING and said[-3:] == [C.SEND_FAILED, C.TELL_ENDED, C.CANCEL_WRITES]
    room, commands = step(room, ended(WriteOutcome.LANDED))
    assert (room.phase, commands, room.cause) == (P.LOST, (C.SEND_UNPROVEN, C.END), cause)


def test_a_write_that_stopped_short_fails_the_room_and_leaves_no_doubt() -> None:
    """The plane refused it, or stopped it by itself: every byte that was submitted has landed."""
    cause = Cause(Code.TRANSFER_ERROR, "refused")
    room, commands = step(run(queued())[0], ended(WriteOutcome.CANCELLED, cause))
    assert (room.phase, room.cause) == (P.ABORTED, cause)
    assert commands == (C.SEND_FAILED, C.SEND_DRAINED, C.TELL_ENDED, C.END)
    room, commands = step(run(queued(), queued())[0], ended(WriteOutcome.CANCELLED, cause))
    assert room.phase is P.DRAINING and commands == (C.SEND_FAILED, C.TELL_ENDED, C.CANCEL_WRITES)
    room, commands = step(room, ended(WriteOutcome.LANDED))
    assert (room.phase, commands) == (P.ABORTED, (C.SEND_DRAINED, C.END))


def test_the_first_cause_is_kept() -> None:
    first, second = Cause(Code.CLIENT_GONE), Cause(Code.TRANSFER_ERROR)
    room, _ = run(
        queued(), PrefillEvent(K.ABORT_RECEIVED, cause=first), ended(WriteOutcome.UNPROVEN, second)
    )
    assert (room.phase, room.cause) == (P.LOST, first)


@settings(max_examples=400)
@given(st.data())
def test_whatever_happens_nothing_ends_while_it_runs(data: st.DataObject) -> None:
    """Random lives; only chunks after the last one or the end are left out, as the handler does."""
    room, said = PrefillRoomState(P.WAITING_FOR_INPUT), list[PrefillCommand]()
    running, doubt = 0, False
    for _ in range(data.draw(st.integers(0, 14))):
        if room.phase in TERMINAL:
            break
        can_send = room.phase in (P.WAITING_FOR_INPUT, P.TRANSFERRING) and not room.last_queued
        # A room that has ended is not among those a lost decode loses.
        losable = room.phase is not P.DRAINING
        choices = (
            ["abort", "local"]
            + ["lost"] * losable
            + ["send"] * 4 * can_send
            + ["write"] * 3 * bool(running)
        )
        match data.draw(st.sampled_from(choices)):
            case "send":
                event, running = queued(last=data.draw(st.booleans())), running + 1
            case "write":
                outcome = data.draw(st.sampled_from(WriteOutcome))
                event, running = ended(outcome), running - 1
                doubt = doubt or outcome is WriteOutcome.UNPROVEN
            case other:
                kinds = {"abort": K.ABORT_RECEIVED, "local": K.ENDED_LOCALLY, "lost": K.TARGET_LOST}
                event = PrefillEvent(kinds[other], cause=Cause(Code.CLIENT_GONE, other))
        room, commands = step(room, event)
        said.extend(commands)
        assert not (
            running and {C.SEND_DRAINED, C.SEND_UNPROVEN, C.TELL_SUCCESS, C.END} & set(commands)
        )
        assert not (doubt and {C.SEND_DRAINED, C.TELL_SUCCESS} & set(commands))
        assert room.queued - room.ended == running
    assert said.count(C.END) == (room.phase in TERMINAL)
    assert said.count(C.TELL_SUCCESS) + said.count(C.TELL_ENDED) <= 1
    if not running:
        assert room.phase is not P.DRAINING, "a drained room has ended"
