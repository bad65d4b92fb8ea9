"""Prefill and the silence or death of its decodes; and how much a tick does (I4, I11)."""

from __future__ import annotations

import pytest

from kvflow.protocols.commands import CloseRoute
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machinery import TICK_WORK
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.wire import messages as wire
from tests.protocols.alone import (
    DECODE,
    OTHER_DECODE,
    START,
    TIMING,
    LonePrefill,
    ack,
    announce,
    beat,
    failed,
    registered,
    stopped,
)

IN_USE = Cause(Code.ROOM_IN_USE, f"room {2 * TICK_WORK} has a decode already")
SILENT = Cause(Code.PEER_LOST, f"decode {DECODE:016x} was silent for 5 s")


def phase(prefill: LonePrefill) -> PeerPhase:
    return prefill.core.peers[DECODE].phase


def test_silence_counts_from_the_last_message(prefill: LonePrefill) -> None:
    prefill.tick(3)
    prefill.hear(beat())
    prefill.tick(4.9)
    assert phase(prefill) is PeerPhase.UP and prefill.endpoint.next_tick() == START + 8
    prefill.tick(0.1)
    assert phase(prefill) is PeerPhase.SILENT


def test_whatever_is_received_ends_the_silence(prefill: LonePrefill) -> None:
    prefill.tick(5)
    assert prefill.hear(beat()) == [beat()] and phase(prefill) is PeerPhase.UP
    prefill.tick(5)
    assert prefill.register(fresh_from=3) == [registered(fresh_from=3)]
    assert phase(prefill) is PeerPhase.UP
    assert prefill.endpoint.next_tick() == prefill.now + 5


@pytest.mark.parametrize(("late_s", "lost_at_s"), [(2.0, 7.0), (9.0, 9.0)])
def test_its_own_stall_is_no_silence(prefill: LonePrefill, late_s: float, lost_at_s: float) -> None:
    prefill.now += 4
    prefill.endpoint.credit_stall(late_s, prefill.now)
    prefill.tick(lost_at_s - 4 - 0.1)
    assert phase(prefill) is PeerPhase.UP
    prefill.tick(0.1)
    assert phase(prefill) is PeerPhase.SILENT


@pytest.mark.parametrize(("waited_s", "credit_s"), [(1.0, 1.0), (1.5, 1.5), (2.0, 1.5)])
def test_a_room_that_waits_is_given_the_standstill_and_a_heartbeat(
    prefill: LonePrefill, waited_s: float, credit_s: float
) -> None:
    """But no more than it has waited."""
    record = prefill.open(8)
    prefill.now += waited_s
    prefill.endpoint.credit_stall(0.5, prefill.now)
    assert record.deadline_at_s == START + TIMING.rendezvous_s + credit_s


def test_announcements_of_a_silent_decode_are_void_and_only_its_own(prefill: LonePrefill) -> None:
    prefill.up(OTHER_DECODE)
    prefill.hear(announce(8, 1))
    prefill.hear(announce(9, 1, OTHER_DECODE))
    prefill.now += 4
    prefill.hear(beat(target=OTHER_DECODE))
    assert prefill.tick(1) == [failed(SILENT, 8), ack(8)]
    assert list(prefill.core.rendezvous.announced) == [9]
    record = prefill.open(8)
    assert prefill.asked() == stopped(record, SILENT)
    # It was lost: it hears again.
    assert prefill.hear(announce(8, 1)) == [failed(SILENT, 8), ack(8)]


def test_a_silent_decode_that_dies_is_forgotten(prefill: LonePrefill) -> None:
    prefill.tick(5)
    prefill.endpoint.peer_died(DECODE, prefill.now)
    assert prefill.asked() == [CloseRoute(DECODE)] and not prefill.core.peers
    prefill.endpoint.peer_died(DECODE, prefill.now)
    assert prefill.asked() == []


def test_a_decode_that_dies_while_it_is_up_leaves_no_timer(prefill: LonePrefill) -> None:
    prefill.hear(announce(8, 1))
    prefill.endpoint.peer_died(DECODE, prefill.now)
    died = Cause(Code.PEER_LOST, f"decode {DECODE:016x} died")
    # Its announcement is void.
    assert prefill.asked() == [failed(died, 8), ack(8), CloseRoute(DECODE)]
    assert prefill.core.rendezvous.announced == {}
    prefill.tick(3)
    assert len(prefill.core.deadlines) == 0


@pytest.mark.parametrize("how", ["leave", "die"])
def test_many_rooms_end_a_few_at_a_time(prefill: LonePrefill, how: str) -> None:
    rooms = [prefill.matched(room, room) for room in range(1, 2 * TICK_WORK + 2)]
    if how == "leave":
        prefill.endpoint.leave(prefill.now)
    else:
        prefill.endpoint.peer_died(DECODE, prefill.now)
    ended = []
    while True:
        prefill.asked()
        ended.append(sum(record.ended for record in rooms))
        if prefill.endpoint.next_tick() != float("-inf"):
            break
        prefill.endpoint.tick(prefill.now)
    assert ended == [TICK_WORK, 2 * TICK_WORK, 2 * TICK_WORK + 1]
    assert (DECODE in prefill.core.peers) == (how == "leave"), "dead, and its last room has ended"


MANY = range(1, 2 * TICK_WORK + 2)


def to_the_end(prefill: LonePrefill) -> list[int]:
    """How many announcements were left after each turn, until nothing is due at once."""
    left = []
    while True:
        left.append(len(prefill.core.rendezvous.announced))
        if prefill.endpoint.next_tick() != float("-inf"):
            return left
        prefill.endpoint.tick(prefill.now)


@pytest.mark.parametrize(
    "how", ["leave", "die", "fall silent", "withdraw by heartbeat", "withdraw by register"]
)
def test_many_announcements_are_void_a_few_at_a_time(prefill: LonePrefill, how: str) -> None:
    prefill.hear(*(announce(room, room) for room in MANY))
    if how == "leave":
        prefill.endpoint.leave(prefill.now)
    elif how == "die":
        prefill.endpoint.peer_died(DECODE, prefill.now)
    elif how == "fall silent":
        prefill.endpoint.tick(prefill.now + 5)
    elif how == "withdraw by heartbeat":
        prefill.hear(beat(len(MANY) + 1))
    else:
        prefill.register(fresh_from=len(MANY) + 1)
    assert to_the_end(prefill) == [len(MANY) - TICK_WORK, len(MANY) - 2 * TICK_WORK, 0]
    told = [message.room for message in prefill.asked() if isinstance(message, wire.RoomFailed)]
    assert how.startswith("withdraw") or told == list(MANY)
    assert (DECODE in prefill.core.peers) == (how != "die")
    if how != "leave":
        record = prefill.open(MANY[-1])
        # And that is told once.
        assert record.ended and prefill.open(MANY[-1]).phase is PrefillPhase.EXPECTED


@pytest.mark.parametrize("how", ["fall silent", "withdraw"])
def test_an_engine_does_not_join_what_is_about_to_be_void(prefill: LonePrefill, how: str) -> None:
    """The turn of its announcement has not come."""
    prefill.up(OTHER_DECODE)
    prefill.hear(*(announce(room, room) for room in MANY))
    prefill.now += 4
    prefill.hear(beat(target=OTHER_DECODE))
    prefill.now += 1
    if how == "withdraw":
        prefill.hear(beat(len(MANY) + 1))
    else:
        prefill.endpoint.tick(prefill.now)
    last, other = MANY[-1], MANY[-2]
    assert last in prefill.core.rendezvous.announced
    record = prefill.open(last)
    assert record.ended
    assert record.state.cause is not None
    assert record.state.cause.code in (Code.PEER_LOST, Code.CLIENT_GONE)
    prefill.asked()
    assert prefill.hear(announce(other, 7, OTHER_DECODE))[:1] != [
        failed(IN_USE, other, 7, OTHER_DECODE)
    ]
    to_the_end(prefill)
    assert prefill.open(last).phase is PrefillPhase.EXPECTED


def test_a_decode_that_is_heard_again_keeps_what_was_not_void_yet(prefill: LonePrefill) -> None:
    prefill.hear(*(announce(room, room) for room in MANY))
    prefill.endpoint.tick(prefill.now + 5)
    prefill.now += 5
    left = len(prefill.core.rendezvous.announced)
    assert left
    prefill.hear(beat())
    to_the_end(prefill)
    assert len(prefill.core.rendezvous.announced) == left
    assert prefill.open(MANY[-1]).phase is PrefillPhase.ANNOUNCED


def test_a_room_that_ended_by_itself_is_not_ended_again(prefill: LonePrefill) -> None:
    rooms = [prefill.matched(room, room) for room in range(1, TICK_WORK + 3)]
    prefill.endpoint.leave(prefill.now)
    prefill.asked()
    assert prefill.close(rooms[-2], Cause(Code.CLIENT_GONE, "gone"))
    prefill.tick()
    assert rooms[-2].state.cause == Cause(Code.CLIENT_GONE, "gone") and rooms[-1].ended


def test_many_deadlines_strike_a_few_at_a_time(prefill: LonePrefill) -> None:
    rooms = [prefill.open(room) for room in range(1, TICK_WORK + 3)]
    prefill.tick(3)
    assert sum(record.ended for record in rooms) == TICK_WORK
    assert prefill.endpoint.next_tick() <= prefill.now
    prefill.tick()
    assert all(record.ended for record in rooms)


def test_its_times_and_bounds_have_defaults() -> None:
    prefill = LonePrefill(timing=None)
    assert prefill.core.timing == Timing() and prefill.core.bounds == Bounds()
    # Nothing has stood still yet.
    assert LonePrefill(timing=Timing(lost_after_s=0.5)).endpoint.unavailable_reason == ""
