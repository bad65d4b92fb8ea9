"""Decodes that register: accepted, refused, displaced, or told what may not begin (I6)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvflow.protocols.commands import CloseRoute, OpenRoute, RoomMatched, WatchProcess
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machinery import TICK_WORK
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.pages.spaces import Space
from kvflow.protocols.ports import PlaneAddress, WriteOutcome
from kvflow.protocols.wire import messages as wire
from tests.protocols.alone import (
    ADDRESS,
    BROKEN,
    DECODE,
    DIGEST,
    LAYOUT,
    OTHER_DECODE,
    OTHER_PREFILL,
    PREFILL,
    START,
    THIRD_DECODE,
    TIMING,
    TOKENS,
    LonePrefill,
    abort,
    ack,
    announce,
    ask,
    beat,
    between,
    bootstrap,
    failed,
    phase_of,
    register,
    registered,
    stopped,
)

FULL = "2 decodes are registered already; prefill's max_decodes (--max-decodes) allows no more"
SMALLER = build_layout([("k", "uint8", (8,))], page_size=3, num_pages=16)


def named_by(decode: wire.Incarnation) -> PlaneAddress:
    """Whatever was sent as its owner."""
    return msgspec.structs.replace(ADDRESS, owner=decode)


def refusal(prefill: LonePrefill, target: wire.Incarnation = DECODE) -> str:
    """Why this decode is refused; no way into its pool is opened."""
    answer, *more = prefill.register(target)
    assert more == [] and answer == registered(answer.refusal, target) and answer.refusal
    return str(answer.refusal)


def test_who_names_a_pool_is_not_taken_from_the_wire() -> None:
    prefill = LonePrefill()
    lie = msgspec.structs.replace(ADDRESS, owner=OTHER_DECODE)
    assert prefill.register(address=lie) == [OpenRoute(DECODE, named_by(DECODE), LAYOUT)]


def test_a_decode_is_accepted_when_its_route_is_open() -> None:
    prefill = LonePrefill()
    assert prefill.register(fresh_from=4) == [OpenRoute(DECODE, named_by(DECODE), LAYOUT)]
    assert prefill.register(fresh_from=4) == [beat()], "it takes long: decode must not give up"
    prefill.endpoint.route_opened(DECODE, prefill.now)
    assert prefill.asked() == [WatchProcess(DECODE, named_by(DECODE)), registered(fresh_from=4)]
    # An older Register came later.
    assert prefill.register(fresh_from=2) == [registered(fresh_from=4)]
    assert prefill.register(fresh_from=6) == [registered(fresh_from=6)]
    prefill.endpoint.route_opened(DECODE, prefill.now)
    prefill.endpoint.route_refused(DECODE, "too late", prefill.now)
    prefill.endpoint.route_opened(OTHER_DECODE, prefill.now)
    prefill.endpoint.route_refused(OTHER_DECODE, "never asked", prefill.now)
    prefill.endpoint.peer_died(OTHER_DECODE, prefill.now)
    assert prefill.asked() == []
    assert [peer.incarnation for peer in prefill.endpoint.peers] == [DECODE]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"wire_version": 0}, f"wire version 0, this prefill speaks {wire.WIRE_VERSION}"),
        (
            {"address": msgspec.structs.replace(ADDRESS, backend="local")},
            "data planes differ: prefill fake, decode lo",
        ),
        ({"layout": SMALLER}, "page_size"),
        ({"layout": msgspec.structs.replace(LAYOUT, spaces=(Space("pages", -1, 4),))}, "num_pages"),
    ],
)
def test_what_does_not_fit_is_refused_and_not_kept(fields: dict[str, object], text: str) -> None:
    prefill = LonePrefill()
    answer, *more = prefill.register(DECODE, **fields)
    assert text in answer.refusal and answer == registered(answer.refusal) and more == []
    assert list(prefill.endpoint.peers) == [] and prefill.endpoint.next_tick() == float("inf")


def test_another_incarnation_is_told_who_serves_here_now() -> None:
    prefill = LonePrefill()
    answer = registered("another incarnation serves here now", asked=OTHER_PREFILL)
    assert prefill.hear(register(source=OTHER_PREFILL)) == [answer]
    assert prefill.up().hear(bootstrap(source=OTHER_PREFILL)) == [answer]
    assert prefill.counts.stale == 2 and not prefill.endpoint.rooms


def test_bad_bytes_and_borrowed_names_change_nothing(prefill: LonePrefill) -> None:
    prefill.endpoint.receive(b"k", b"\xff", prefill.now)
    assert (prefill.asked(), prefill.counts.malformed) == ([], 1)
    assert prefill.hear(announce(), sender=OTHER_DECODE) == []
    assert prefill.hear(register(THIRD_DECODE), sender=OTHER_DECODE) == []
    assert prefill.counts.foreign == 2 and prefill.core.rendezvous.announced == {}


def test_a_stalled_prefill_refuses_newcomers_and_answers_no_heartbeats(
    prefill: LonePrefill,
) -> None:
    prefill.endpoint.note_stall(5.0)
    assert prefill.endpoint.unavailable_reason == "" and prefill.hear(beat()) == [beat()]
    prefill.endpoint.note_stall(5.1)
    assert prefill.hear(beat()) == []
    text = "the worker of the fake data plane has not moved for 5 s"
    assert refusal(prefill, OTHER_DECODE) == text == prefill.endpoint.unavailable_reason
    assert prefill.register() == [registered(text, fresh_from=1)]
    prefill.endpoint.note_stall(float("inf"))
    assert prefill.endpoint.unavailable_reason == "the worker of the fake data plane has died"


class TestRefusedByTheRoute:
    def test_the_reason_is_told_and_announced_rooms_end(self, opening: LonePrefill) -> None:
        record = opening.open(7)
        assert opening.hear(announce(7, 1), announce(8, 2)) == []
        opening.endpoint.route_refused(DECODE, "no such segment", opening.now)
        why = Cause(Code.REFUSED, "no such segment")
        sent = opening.asked()
        assert sent[:3] == [registered("no such segment"), failed(why, 8, 2), ack(8, 2)]
        assert sent[3:] == [failed(why), ack(), *stopped(record, why)]
        assert list(opening.endpoint.peers) == [] and not opening.endpoint.rooms
        other = opening.open(8)
        # Its half came later.
        assert opening.asked() == stopped(other, why)

    def test_what_the_engine_has_ended_is_kept_for_it(self) -> None:
        """Its next Register may be on the way behind what it announces."""
        prefill = LonePrefill()
        prefill.register()
        prefill.endpoint.route_refused(DECODE, "no such segment", prefill.now)
        prefill.close(prefill.open(7))
        prefill.asked()
        assert prefill.hear(announce(7, 2)) == []
        prefill.register()
        prefill.endpoint.route_opened(DECODE, prefill.now)
        prefill.asked()
        assert prefill.hear(announce(7, 2)) == [failed(BROKEN, 7, 2), ack(7, 2)]

    def test_only_what_the_engine_has_ended_is_kept(self, opening: LonePrefill) -> None:
        opening.endpoint.route_refused(DECODE, "no such segment", opening.now)
        assert opening.hear(abort(7, 2), announce(7, 3)) == [registered("no such segment")]
        record = opening.open(7)
        why = Cause(Code.REFUSED, "prefill refused this decode: no such segment")
        # The latest word.
        assert opening.asked() == stopped(record, why)

    def test_rooms_that_it_announces_or_refuses_later_end_too(self, opening: LonePrefill) -> None:
        opening.endpoint.route_refused(DECODE, "no such segment", opening.now)
        first, second = opening.open(7), opening.open(8)
        opening.asked()
        why = Cause(Code.REFUSED, "prefill refused this decode: no such segment")
        assert opening.hear(announce(7, 1)) == stopped(first, why)
        own = Cause(Code.CAPACITY, "no pages")
        told = stopped(second, own)
        assert opening.hear(abort(8, 2, cause=own)) == told
        assert opening.counts.stale == 0
        assert opening.hear(bootstrap(9, 3), beat(), ask((9, 3, 0))) == []
        assert opening.counts.stale == 3

    def test_rooms_of_one_that_never_registered_are_nobodys(self) -> None:
        prefill = LonePrefill()
        record = prefill.open(7)
        assert prefill.hear(announce(7, 1), abort(7, 1)) == []
        assert prefill.counts.stale == 2 and not record.ended

    def test_it_may_come_back(self) -> None:
        prefill = LonePrefill()
        prefill.register(layout=SMALLER)
        prefill.up()
        prefill.endpoint.peer_died(DECODE, prefill.now)
        assert prefill.asked() == [CloseRoute(DECODE)]
        record = prefill.open(7)
        # An old refusal is forgotten.
        assert prefill.hear(announce(7, 1)) == [] and not record.ended

    def test_what_it_sent_before_does_not_begin_when_it_is_back(self, opening: LonePrefill) -> None:
        opening.hear(announce(8, 4))
        opening.endpoint.route_refused(DECODE, "no such segment", opening.now)
        assert list(opening.core.former.displaced.items()) == [(DECODE, 5)]
        opening.register(OTHER_DECODE, layout=SMALLER)
        assert OTHER_DECODE not in opening.core.former.displaced, "nothing is kept of a stranger"
        opening.up()
        stale = Cause(Code.STALE_GRANT, "grant 4 is below 5: it has ended")
        assert opening.hear(bootstrap(8, 4)) == [failed(stale, 8, 4), ack(8, 4)]
        assert not opening.core.former.displaced

    def test_reasons_are_bounded_and_the_oldest_goes_first(self) -> None:
        prefill = LonePrefill(bounds=Bounds(targets=2))
        for target in (DECODE, OTHER_DECODE, THIRD_DECODE):
            prefill.register(target, layout=SMALLER)
        assert list(prefill.core.refused) == [OTHER_DECODE, THIRD_DECODE]


class TestWhileTheRouteIsOpened:
    def test_only_what_needs_no_route_is_taken(self, opening: LonePrefill) -> None:
        record = opening.open(7)
        assert opening.hear(bootstrap(7, 1), ask((7, 1, 0))) == [] and opening.counts.stale == 2
        assert opening.hear(beat()) == [beat()]
        assert opening.hear(announce(7, 1)) == [] and record.peer is not None
        assert opening.hear(abort(7, 1)) == [ack(), *stopped(record, _gone())]
        assert opening.counts.stale == 2

    def test_silence_counts_from_the_day_it_is_open(self, opening: LonePrefill) -> None:
        opening.now += 4
        opening.endpoint.route_opened(DECODE, opening.now)
        (peer,) = opening.endpoint.peers
        assert peer.received_at_s == opening.now
        opening.tick(4.9)
        assert phase_of(peer) is PeerPhase.UP
        opening.tick(0.1)
        assert phase_of(peer) is PeerPhase.SILENT


class TestPlacesAreBounded:
    BOUNDS = Bounds(targets=2, closed_grants=1)

    def test_a_newcomer_is_refused_while_all_are_needed(self) -> None:
        prefill = LonePrefill(bounds=self.BOUNDS).up(DECODE, OTHER_DECODE)
        assert refusal(prefill, THIRD_DECODE) == FULL
        prefill.tick(5)
        assert prefill.register(THIRD_DECODE)[0] == CloseRoute(DECODE)

    @pytest.mark.parametrize(
        "field", [{"boot_id": "x"}, {"pid_namespace": "x"}, {"pid": 9}, {"start_ticks": 9}], ids=str
    )
    def test_one_process_takes_so_many_places_and_no_more(self, field: dict[str, Any]) -> None:
        prefill = LonePrefill(bounds=Bounds(decodes_per_process=2)).up(DECODE, OTHER_DECODE)
        assert refusal(prefill, THIRD_DECODE) == "2 decodes of process 1 are registered already"
        lie = msgspec.structs.replace(
            ADDRESS.process, network_namespace="another", time_namespace="another"
        )
        prefill.register(THIRD_DECODE, address=msgspec.structs.replace(ADDRESS, process=lie))
        assert [peer.incarnation for peer in prefill.endpoint.peers] == [DECODE, OTHER_DECODE]
        other = msgspec.structs.replace(
            ADDRESS, process=msgspec.structs.replace(ADDRESS.process, **field)
        )
        named = msgspec.structs.replace(other, owner=THIRD_DECODE)
        assert prefill.register(THIRD_DECODE, address=other) == [
            OpenRoute(THIRD_DECODE, named, LAYOUT)
        ]
        fourth = wire.Incarnation(THIRD_DECODE + 1)
        prefill.tick(5)
        assert prefill.register(fourth)[0] == CloseRoute(DECODE), "a silent one makes place"

    def test_one_address_takes_so_many_places_and_an_unknown_one_takes_any(self) -> None:
        prefill = LonePrefill(bounds=Bounds(decodes_per_address=1))

        def register_from(address: str, decode: int) -> list[Any]:
            message = register(wire.Incarnation(decode))
            prefill.core.register(message, prefill.now, lambda: address)
            return prefill.asked()

        for decode, address in enumerate(("10.0.0.1", "10.0.0.2", "", ""), 300):
            assert type(register_from(address, decode)[0]) is OpenRoute
            prefill.endpoint.route_opened(wire.Incarnation(decode), prefill.now)
            prefill.asked()
        assert register_from("10.0.0.2", 304)[0].refusal == (
            "1 decodes at 10.0.0.2 are registered already; prefill's decodes_per_address "
            "(--decodes-per-address) allows no more at one address"
        )
        prefill.tick(5)
        silent, more = register_from("10.0.0.2", 304)
        assert silent == CloseRoute(wire.Incarnation(301)) and type(more) is OpenRoute

    @pytest.mark.parametrize("doubt", [False, True])
    def test_a_silent_decode_makes_place_and_its_doubts_are_remembered(self, doubt: bool) -> None:
        prefill = LonePrefill(bounds=self.BOUNDS).up(DECODE)
        prefill.sending(1)
        prefill.ended(1, WriteOutcome.UNPROVEN if doubt else WriteOutcome.CANCELLED)
        prefill.now += 1
        prefill.up(OTHER_DECODE)
        prefill.tick(5)
        prefill.hear(beat(target=OTHER_DECODE))
        assert prefill.register(THIRD_DECODE) == [
            CloseRoute(DECODE),
            OpenRoute(THIRD_DECODE, named_by(THIRD_DECODE), LAYOUT),
        ]
        assert prefill.core.former.in_doubt == ({DECODE: (1,)} if doubt else {})
        prefill.up(THIRD_DECODE).tick(5)
        assert prefill.register(DECODE, fresh_from=2)[0] == CloseRoute(OTHER_DECODE)
        prefill.up(DECODE)
        # It is back, and asks what became of its loan.
        assert prefill.hear(abort()) == [ack(drained=not doubt)]
        assert not prefill.core.former.in_doubt
        # As it was before.
        assert prefill.core.peers[DECODE].grants.unproven() == ((1,) if doubt else ())

    def test_one_that_has_no_doubts_makes_place_first_and_only_so_many_are_remembered(self) -> None:
        prefill = LonePrefill(bounds=Bounds(targets=2, closed_grants=1)).up(DECODE, OTHER_DECODE)
        prefill.send(prefill.matched(), 1)
        prefill.ended(1, WriteOutcome.UNPROVEN)
        prefill.tick(5)
        assert prefill.register(THIRD_DECODE)[0] == CloseRoute(OTHER_DECODE)
        prefill.up(THIRD_DECODE)
        prefill.hear(bootstrap(8, 1, THIRD_DECODE))
        record = prefill.open(8)
        prefill.send(record, 1)
        prefill.ended(2, WriteOutcome.UNPROVEN)
        prefill.tick(5)
        prefill.up(OTHER_DECODE)
        assert prefill.core.former.in_doubt == {DECODE: (1,)}
        prefill.tick(5)
        assert prefill.register(DECODE, fresh_from=2)[0] == CloseRoute(OTHER_DECODE)
        prefill.up(DECODE).tick(5)
        prefill.up(OTHER_DECODE).tick(5)
        prefill.core.former.in_doubt[wire.Incarnation(5)] = (wire.GrantId(9),)
        prefill.up(wire.Incarnation(111))
        assert refusal(prefill, wire.Incarnation(112)) == FULL

    def test_one_that_has_no_doubts_makes_place_however_many_are_remembered(self) -> None:
        prefill = LonePrefill(bounds=Bounds(targets=1, closed_grants=1)).up()
        prefill.core.former.in_doubt[OTHER_DECODE] = (wire.GrantId(8), wire.GrantId(9))
        prefill.tick(5)
        assert prefill.register(THIRD_DECODE)[0] == CloseRoute(DECODE)

    def test_a_displaced_decode_that_is_refused_when_it_is_back(self, prefill: LonePrefill) -> None:
        prefill.core.former.in_doubt[OTHER_DECODE] = (wire.GrantId(3),)
        prefill.register(OTHER_DECODE, layout=SMALLER)
        assert prefill.core.former.in_doubt == {OTHER_DECODE: (3,)}
        prefill.endpoint.leave(prefill.now)
        named = wire.Goodbye(unproven=(wire.GrantId(3),), **between(OTHER_DECODE))
        assert prefill.register(OTHER_DECODE) == [named]

    def test_a_lost_decode_gives_way_to_one_for_which_something_else_is_short(self) -> None:
        prefill = LonePrefill().up(DECODE, OTHER_DECODE)
        prefill.tick(5)
        prefill.register(THIRD_DECODE)
        again = OpenRoute(THIRD_DECODE, named_by(THIRD_DECODE), LAYOUT)
        for gone in (DECODE, OTHER_DECODE):
            prefill.endpoint.route_short(THIRD_DECODE, "no staging is left", prefill.now)
            assert prefill.asked() == [CloseRoute(gone), again]
        prefill.endpoint.route_short(THIRD_DECODE, "no staging is left", prefill.now)
        assert prefill.asked() == [registered("no staging is left", THIRD_DECODE)]
        prefill.endpoint.route_short(THIRD_DECODE, "no staging is left", prefill.now)
        assert prefill.asked() == [] and not prefill.core.peers

    def test_a_silent_decode_whose_write_runs_keeps_its_place(self) -> None:
        prefill = LonePrefill(bounds=Bounds(targets=1)).up()
        prefill.sending(0, 1, 2, last=True)
        prefill.tick(5)
        (answer,) = prefill.register(OTHER_DECODE)
        assert answer.refusal and list(prefill.core.peers) == [DECODE]

    def test_a_route_that_is_open_is_not_short_of_anything(self) -> None:
        prefill = LonePrefill().up(DECODE, OTHER_DECODE)
        prefill.tick(5)
        prefill.up(OTHER_DECODE)
        prefill.endpoint.route_short(OTHER_DECODE, "no staging is left", prefill.now)
        assert prefill.asked() == [] and len(prefill.core.peers) == 2

    def test_what_a_displaced_decode_sent_earlier_does_not_begin_when_it_is_back(self) -> None:
        prefill = LonePrefill(bounds=self.BOUNDS).up(DECODE, OTHER_DECODE)
        prefill.hear(announce(7, 4), abort(7, 4))
        prefill.tick(5)
        prefill.hear(beat(target=OTHER_DECODE))
        prefill.up(THIRD_DECODE)
        assert list(prefill.core.former.displaced.items()) == [(DECODE, 5)]
        prefill.tick(5)
        prefill.up(DECODE)
        stale = Cause(Code.STALE_GRANT, "grant 4 is below 5: it has ended")
        assert prefill.hear(bootstrap(8, 4)) == [failed(stale, 8, 4), ack(8, 4)]
        # The other one made place, and is remembered.
        assert list(prefill.core.former.displaced) == [OTHER_DECODE]
        prefill.tick(5)
        prefill.up(OTHER_DECODE)
        assert list(prefill.core.former.displaced) == [THIRD_DECODE]
        prefill.tick(5)
        prefill.up(wire.Incarnation(111))
        # So many are remembered, the latest ones.
        assert list(prefill.core.former.displaced) == [DECODE]


class TestWhatWasWithdrawn:
    """Register and Heartbeat say which grants will never be offered: a lost Abort is made good."""

    def test_by_register(self, prefill: LonePrefill) -> None:
        record = prefill.open(7)
        assert prefill.hear(announce(7, 1), announce(8, 2), announce(9, 3)) == []
        why = Cause(Code.CLIENT_GONE, "decode has withdrawn the room")
        ended = [ack(7, 1), *stopped(record, why)]
        assert prefill.register(fresh_from=3) == [registered(fresh_from=3), *ended]
        other = prefill.open(8)
        # Never came, and ended.
        assert prefill.asked() == stopped(other, why)
        assert prefill.hear(announce(8, 4)) == [], "and that was told once"
        assert list(prefill.core.rendezvous.announced) == [9, 8], "the third is still expected"

    def test_by_heartbeat(self, prefill: LonePrefill) -> None:
        record = prefill.open(7)
        prefill.hear(announce(7, 1), announce(8, 2))
        why = Cause(Code.CLIENT_GONE, "decode has withdrawn the room")
        ended = [ack(7, 1), *stopped(record, why)]
        assert prefill.hear(beat(2)) == [beat(), *ended]
        assert list(prefill.core.rendezvous.announced) == [8]

    def test_a_heartbeat_about_unknown_grants_is_not_its_own(self, prefill: LonePrefill) -> None:
        prefill.hear(announce(7, 1))
        never_sent = beat(3), beat(settled=((1, 1 << 40),))
        assert prefill.hear(*never_sent) == [] and prefill.counts.foreign == 2
        assert list(prefill.core.rendezvous.announced) == [7]


def test_a_room_is_matched_whatever_its_decode_registered_again(prefill: LonePrefill) -> None:
    prefill.hear(bootstrap(7, 1))
    prefill.register(fresh_from=2)
    record = prefill.endpoint.open_room(7, TOKENS, DIGEST, now=prefill.now)
    assert prefill.asked() == [RoomMatched(record.serial, 0)] and record.peer is not None
    assert record.peer.incarnation == DECODE != PREFILL


def _gone() -> Cause:
    return Cause(Code.CLIENT_GONE, "the client is gone")


# --- decodes that were forgotten, refused or dead (found by the bare simulator)


@pytest.fixture
def announced(opening: LonePrefill) -> LonePrefill:
    """The decode whose route is being opened has announced a room as grant 3."""
    opening.hear(announce(7, 3))
    return opening


def refuse_route(prefill: LonePrefill) -> list[Any]:
    prefill.endpoint.route_refused(DECODE, "no descriptor is left", prefill.now)
    return prefill.asked()


def assert_stale(told: list[Any]) -> None:
    failed, acknowledged = told
    assert isinstance(failed, wire.RoomFailed) and failed.cause.code is Code.STALE_GRANT
    assert isinstance(acknowledged, wire.AbortAck) and acknowledged.drained


def test_the_refusal_ends_the_announcement(announced: LonePrefill) -> None:
    acks = [word for word in refuse_route(announced) if isinstance(word, wire.AbortAck)]
    assert [(word.grant, word.drained) for word in acks] == [(3, True)]


REFUSED = 0


@pytest.mark.parametrize(
    ("steps", "stale", "fresh"),
    [
        pytest.param([REFUSED, 1], [3], [4], id="refused"),
        pytest.param([REFUSED, 1, REFUSED, 1], [3], [], id="refused-twice"),
        # Decode comes back, asks for later grants only and is refused; its first Register arrives
        # once more.
        pytest.param([REFUSED, 9, REFUSED, 1], [3, 8], [9], id="refused-as-it-asks-for-later-ones"),
        pytest.param([9, REFUSED, 1], [3], [], id="refused-after-it-asked-for-later-ones"),
    ],
)
def test_what_ended_with_a_refusal_does_not_begin_again(
    announced: LonePrefill, steps: list[int], stale: list[int], fresh: list[int]
) -> None:
    """Each step is a refusal, or a Register with the first grant that it asks for."""
    for step in steps:
        refuse_route(announced) if step == REFUSED else announced.register(fresh_from=step)
    for grant in stale:
        assert_stale(announced.hear(announce(7, grant)))
    for grant in fresh:
        assert announced.hear(announce(7, grant)) == []


def test_what_a_dead_decode_had_sent_before_begins_nothing(announced: LonePrefill) -> None:
    """Its death is observed before the last of its messages has been read."""
    announced.endpoint.route_opened(DECODE, announced.now)
    announced.endpoint.peer_died(DECODE, announced.now)
    announced.asked()
    assert not announced.core.peers
    announced.register()
    assert_stale(announced.hear(announce(7, 3)))


def test_nothing_is_kept_of_a_decode_that_announced_nothing_and_little_of_the_others() -> None:
    prefill = LonePrefill(bounds=Bounds(closed_grants=2))
    prefill.register()
    refuse_route(prefill)
    assert not prefill.core.former.displaced
    prefill.register()
    prefill.hear(announce(7, 1))
    refuse_route(prefill)
    assert prefill.core.former.displaced == {DECODE: 2}


# --- silence and death


IN_USE = Cause(Code.ROOM_IN_USE, f"room {2 * TICK_WORK} has a decode already")
SILENT = Cause(Code.PEER_LOST, f"decode {DECODE:016x} was silent for 5 s")


def phase(prefill: LonePrefill) -> PeerPhase:
    return prefill.core.peers[DECODE].phase


@pytest.mark.parametrize("message", [beat(), register()], ids=["heartbeat", "register"])
def test_silence_counts_from_the_last_message(prefill: LonePrefill, message: wire.Message) -> None:
    prefill.tick(3)
    prefill.hear(message)
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


def test_a_withdrawn_announcement_that_an_engine_finds_leaves_no_timer(
    prefill: LonePrefill,
) -> None:
    last = TICK_WORK + 1
    prefill.hear(*(announce(room, room) for room in range(1, last + 1)))
    prefill.hear(beat(last + 1))
    assert list(prefill.core.rendezvous.announced) == [last]
    assert prefill.open(last).ended
    assert "announced" not in {timer.kind for timer in prefill.core.deadlines}


def test_what_decode_aborts_before_its_turn_is_not_refused_as_well(prefill: LonePrefill) -> None:
    last = TICK_WORK + 2
    prefill.hear(*(announce(room, room) for room in range(1, last + 1)))
    prefill.endpoint.leave(prefill.now)
    prefill.asked()
    told = prefill.hear(abort(last, last))
    assert [type(message) for message in told if message.room == last] == [wire.AbortAck]


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
