"""Prefill asks a crowd of decodes for fewer heartbeats, and neither side is lost for that."""

from __future__ import annotations

from typing import Any

import pytest

from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.limits import Bounds
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.messages import MAX_PACE_MS
from tests.protocols.alone import (
    DECODE,
    OTHER_DECODE,
    PREFILL,
    LoneDecode,
    LonePrefill,
    beat,
    between,
    bootstrap,
    phase_of,
)

PACED = Bounds(idle_heartbeats_per_s=1)  # two decodes: every 2 s, three decodes: every 3 s


def paces(answers: list[Any]) -> list[int]:
    return [answer.pace_ms for answer in answers]


class TestAtPrefill:
    def test_as_many_decodes_as_it_takes_heartbeats_keep_the_usual_ones(self) -> None:
        prefill = LonePrefill(bounds=PACED).up(DECODE)
        assert paces(prefill.hear(beat())) == [0]
        prefill.up(OTHER_DECODE)
        assert paces(prefill.hear(beat())) == [2000]

    def test_the_pace_has_a_limit(self) -> None:
        prefill = LonePrefill(bounds=Bounds(idle_heartbeats_per_s=0)).up(DECODE)
        for number in range(70):
            prefill.up(wire.Incarnation(1000 + number))
        assert paces(prefill.hear(beat())) == [MAX_PACE_MS]

    def test_a_decode_without_a_room_may_be_silent_for_its_pace(self) -> None:
        prefill = LonePrefill(bounds=PACED).up(DECODE, OTHER_DECODE)
        prefill.hear(beat())
        first, other = prefill.endpoint.peers
        prefill.tick(6.9)
        assert (phase_of(first), phase_of(other)) == (PeerPhase.UP, PeerPhase.SILENT)
        assert first in prefill.endpoint.peers
        prefill.tick(0.2)
        assert phase_of(first) is PeerPhase.SILENT

    def test_with_a_room_it_is_lost_as_soon_as_ever(self) -> None:
        prefill = LonePrefill(bounds=PACED).up(DECODE, OTHER_DECODE)
        prefill.hear(beat())
        (first, _) = prefill.endpoint.peers
        prefill.tick(1.5)
        prefill.open(7)
        prefill.hear(bootstrap())
        prefill.tick(4.9)
        assert phase_of(first) is PeerPhase.UP
        prefill.tick(0.2)
        assert phase_of(first) is PeerPhase.SILENT

    def test_a_room_after_the_crowd_has_left_is_lost_as_soon(self) -> None:
        others = [wire.Incarnation(1000 + number) for number in range(10)]
        prefill = LonePrefill(bounds=PACED).up(DECODE, *others)
        prefill.hear(beat())
        (first, *_) = prefill.endpoint.peers
        # The timer is set anew while this decode may be silent for 16 s.
        prefill.tick(5.1)
        for other in others:
            prefill.hear(wire.Goodbye(**between(other)))
        assert list(prefill.endpoint.peers) == [first]
        assert paces(prefill.hear(beat())) == [0]
        prefill.open(7)
        prefill.hear(bootstrap())
        prefill.tick(5.1)
        assert phase_of(first) is PeerPhase.SILENT

    def test_who_keeps_to_its_pace_is_awaited_at_the_end(self) -> None:
        prefill = LonePrefill(bounds=PACED).up(DECODE, OTHER_DECODE)
        prefill.hear(beat())
        prefill.tick(6.5)
        prefill.endpoint.leave(prefill.now)
        prefill.endpoint.part(prefill.now)
        assert [peer.incarnation for peer in prefill.endpoint.unparted(prefill.now)] == [DECODE]

    def test_one_tick_looks_at_many_of_a_crowd(self) -> None:
        """Their heartbeats come one by one, and their silence is noticed together."""
        crowd = [wire.Incarnation(1000 + number) for number in range(20)]
        prefill = LonePrefill(bounds=PACED).up(*crowd)
        for incarnation in crowd:
            prefill.hear(beat(target=incarnation))  # it may be silent for 25 s from now on
            prefill.tick(0.005)
        # Timers of the usual silence are set anew.
        prefill.tick(5.0)
        due = [prefill.endpoint.core.silent_at_s(peer) for peer in prefill.endpoint.peers]
        may_be = [peer.received_at_s + 25.0 for peer in prefill.endpoint.peers]
        assert all(0 <= at - least < 0.2 for at, least in zip(due, may_be, strict=True))
        assert len(set(due)) <= 2 < len(set(may_be))
        ticks = 0
        while not all(phase_of(peer) is PeerPhase.SILENT for peer in prefill.endpoint.peers):
            prefill.tick(max(prefill.endpoint.next_tick() - prefill.now, 0.0))
            ticks += 1
        assert ticks <= 4
        assert min(due) <= prefill.now <= max(due) + 0.001

    def test_no_look_at_a_silence_comes_before_it(self) -> None:
        """The tick would set the same time again, and a clock that jumps to it would stand still.
        Rounding to a share of the pace led below some of these times.
        """
        crowd = [wire.Incarnation(1000 + number) for number in range(3)]
        prefill = LonePrefill(bounds=PACED).up(*crowd)
        prefill.hear(beat(target=crowd[0]))
        core, peer = prefill.endpoint.core, next(iter(prefill.endpoint.peers))
        assert peer.pace_s == 3
        for number in range(4000):
            peer.received_at_s = 1000 + number * 0.005
            assert core.silent_at_s(peer) >= peer.received_at_s + core.silent_after_s(peer)


def heartbeat(pace_ms: int) -> wire.Heartbeat:
    return wire.Heartbeat(source=PREFILL, target=DECODE, pace_ms=pace_ms)


def is_heartbeat(command: Any) -> bool:
    return isinstance(command, tuple) and type(command[1]) is wire.Heartbeat


def link_of(decode: LoneDecode) -> PrefillPeer:
    (peer,) = decode.endpoint.peers
    return peer


def beats(decode: LoneDecode, for_s: float, *, step_s: float = 0.25, answer: int | None) -> int:
    """Let time pass, and return how many heartbeats decode sends. Each is answered with the pace
    `answer`, or not at all.
    """
    seen = 0
    for _ in range(round(for_s / step_s)):
        sent = [command for command in decode.tick(step_s) if is_heartbeat(command)]
        seen += len(sent)
        if sent and answer is not None:
            decode.hear(heartbeat(answer))
    return seen


class TestAtDecode:
    @pytest.mark.parametrize(("pace_ms", "count"), [(0, 20), (900, 20), (4000, 5), (10_000, 2)])
    def test_an_idle_link_keeps_to_the_pace(self, pace_ms: int, count: int) -> None:
        decode = LoneDecode().up()
        decode.hear(heartbeat(pace_ms))
        # The first ones report what is settled, and end the usual intervals.
        beats(decode, 2.0, answer=pace_ms)
        assert abs(beats(decode, 20.0, answer=pace_ms) - count) <= 1
        assert phase_of(link_of(decode)) is LinkPhase.UP

    def test_an_open_room_brings_the_usual_heartbeats_back_at_once(self) -> None:
        decode = LoneDecode().up()
        decode.hear(heartbeat(10_000))
        beats(decode, 2.0, answer=10_000)
        assert beats(decode, 8.0, answer=10_000) <= 1
        decode.open()
        assert beats(decode, 0.25, answer=10_000) == 1
        assert beats(decode, 4.0, answer=10_000) == 4
        assert phase_of(link_of(decode)) is LinkPhase.UP

    def test_a_prefill_that_is_gone_is_lost_soon_after_a_room_opens(self) -> None:
        decode = LoneDecode().up()
        decode.hear(heartbeat(10_000))
        beats(decode, 2.0, answer=10_000)
        beats(decode, 8.0, answer=None)
        assert phase_of(link_of(decode)) is LinkPhase.UP
        decode.open()
        beats(decode, 3.75, answer=None)
        assert phase_of(link_of(decode)) is LinkPhase.UP
        beats(decode, 0.5, answer=None)
        assert not list(decode.endpoint.peers), "it is lost, and owes nothing"

    def test_without_a_room_it_is_lost_a_pace_later_and_asked_several_times(self) -> None:
        decode = LoneDecode().up()
        decode.hear(heartbeat(10_000))
        beats(decode, 2.0, answer=10_000)
        assert beats(decode, 13.5, answer=None) >= 3, "a lost heartbeat is repeated"
        beats(decode, 1.0, answer=None)
        assert not list(decode.endpoint.peers)
