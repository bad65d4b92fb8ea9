"""Goodbyes: what a prefill's proves and to whom, and what a decode's makes prefill forget."""

from __future__ import annotations

import pytest

from kvflow.protocols.commands import (
    CloseRoute,
    FreePages,
    HangUp,
    OpenRoute,
    RoomFailed,
    RoomReleased,
    StopWatch,
)
from kvflow.protocols.errors import AbortedError, Cause, Code, LostError
from kvflow.protocols.limits import Bounds
from kvflow.protocols.machinery import TICK_WORK
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill import peers as prefill_peers
from kvflow.protocols.wire.messages import Goodbye, GoodbyeAck, GrantId, Incarnation, RoomId
from tests.protocols.alone import (
    AT,
    DECODE,
    GONE,
    KEY,
    OTHER_DECODE,
    OTHER_KEY,
    OTHER_PREFILL,
    PREFILL,
    TIMING,
    TWO,
    G,
    LoneDecode,
    LonePrefill,
    abort,
    ack,
    announce,
    between,
    bootstrap,
    chunk_done,
    failed,
    link,
    to,
)

LEAVING = Cause(Code.SHUTDOWN, "prefill is shutting down")
SHUT_DOWN = Cause(Code.SHUTDOWN, f"{AT} has shut down")


def goodbye(*unproven: int, target: Incarnation = DECODE, source: Incarnation = PREFILL) -> Goodbye:
    return Goodbye(unproven=tuple(map(GrantId, unproven)), **between(target, source))


def acknowledged(target: Incarnation = DECODE, source: Incarnation = PREFILL) -> GoodbyeAck:
    return GoodbyeAck(**between(target, source))


def part(node: LonePrefill | LoneDecode) -> list[object]:
    node.endpoint.leave(node.now)
    node.endpoint.part(node.now)
    return node.asked()


class TestPrefillSaysGoodbye:
    def test_to_every_decode_until_each_has_acknowledged_it(self) -> None:
        prefill = LonePrefill().up(DECODE, OTHER_DECODE)
        assert part(prefill) == [goodbye(), goodbye(target=OTHER_DECODE)]
        assert prefill.hear(acknowledged()) == [CloseRoute(DECODE)]
        assert [peer.incarnation for peer in prefill.endpoint.unparted(prefill.now)] == [
            OTHER_DECODE
        ]
        assert prefill.tick(TIMING.repeat_after_s) == [goodbye(target=OTHER_DECODE)]
        assert prefill.tick(TIMING.repeat_after_s) == [goodbye(target=OTHER_DECODE)]
        assert prefill.hear(acknowledged(OTHER_DECODE)) == [CloseRoute(OTHER_DECODE)]
        assert not prefill.core.peers and len(prefill.core.deadlines) == 0

    def test_to_a_crowd_in_several_ticks(self) -> None:
        crowd = [Incarnation(DECODE + n) for n in range(2 * TICK_WORK - 1)]
        prefill, said = LonePrefill().up(*crowd), []
        found = part(prefill)
        while found:
            assert len(found) <= TICK_WORK and prefill.endpoint.parting(prefill.now)
            said += found
            found = prefill.tick(0.0)
        assert said == [goodbye(target=decode) for decode in crowd]
        for decode in crowd:
            prefill.hear(acknowledged(decode))
        assert not prefill.endpoint.parting(prefill.now)

    def test_it_waits_for_none_that_has_been_silent(self, prefill: LonePrefill) -> None:
        prefill.tick(TIMING.lost_after_s)
        assert part(prefill) == [goodbye()] and not prefill.endpoint.parting(prefill.now)

    def test_not_to_one_that_died_while_a_write_runs(self, prefill: LonePrefill) -> None:
        prefill.sending(0, 1, 2, last=True)
        prefill.endpoint.peer_died(DECODE, prefill.now)
        prefill.asked()
        assert goodbye() not in part(prefill)
        assert CloseRoute(DECODE) in prefill.ended(1, WriteOutcome.UNPROVEN)

    def test_it_names_what_is_open_or_in_doubt_and_nothing_else(self, prefill: LonePrefill) -> None:
        doubtful, landed, running = (prefill.matched(room, room) for room in (1, 2, 3))
        for record in (doubtful, landed, running):
            prefill.send(record, 0, 1, 2, last=True)
        prefill.ended(1, WriteOutcome.UNPROVEN)
        prefill.ended(2)
        prefill.hear(announce(4, 4))
        assert part(prefill)[-1] == goodbye(1, 3)
        prefill.ended(3, WriteOutcome.CANCELLED)
        assert prefill.tick(TIMING.repeat_after_s) == [goodbye(1)], "the write has drained since"

    def test_a_bootstrap_on_its_way_is_refused(self, prefill: LonePrefill) -> None:
        part(prefill)
        assert prefill.hear(bootstrap(7, 1)) == [failed(LEAVING), ack()]
        with pytest.raises(AbortedError):
            prefill.open(7)

    def test_an_acknowledgement_comes_while_a_write_runs(self, prefill: LonePrefill) -> None:
        prefill.sending(0, 1, 2, last=True)
        part(prefill)
        assert prefill.hear(acknowledged()) == [], "its route is in use"
        assert prefill.tick(TIMING.repeat_after_s) == [], "it is said no more"
        assert not prefill.endpoint.parting(prefill.now)
        assert prefill.ended(1, WriteOutcome.CANCELLED) == [RoomReleased(1), CloseRoute(DECODE)]

    def test_a_decode_that_comes_back_has_not_received_it(self, prefill: LonePrefill) -> None:
        prefill.tick(TIMING.lost_after_s)
        part(prefill)
        assert prefill.register(fresh_from=5) == [goodbye()]

    def test_a_decode_that_registers_late_is_told_at_once_and_not_kept(self) -> None:
        prefill = LonePrefill()
        part(prefill)
        assert prefill.register() == [goodbye()] and not prefill.core.peers
        assert prefill.register() == [goodbye()], "it may not have received the last one"

    def test_a_decode_whose_route_is_being_opened(self) -> None:
        prefill = LonePrefill()
        prefill.register()
        assert part(prefill) == [goodbye()]
        assert prefill.hear(acknowledged()) == [CloseRoute(DECODE)]
        assert not prefill.endpoint.route_opened(DECODE, prefill.now), "the shell closes it"

    def test_it_is_withheld_if_it_proved_too_much(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefill_peers, "MAX_UNPROVEN", 1)
        prefill = LonePrefill().up(DECODE, OTHER_DECODE)
        for room, target in ((1, DECODE), (2, DECODE), (3, OTHER_DECODE)):
            prefill.hear(bootstrap(room, room, target))
            prefill.open(room)
            prefill.asked()
            prefill.send(prefill.endpoint.rooms[RoomId(room)], 0, 1, 2, last=True)
            prefill.ended(room, WriteOutcome.UNPROVEN)
        assert part(prefill) == [goodbye(3, target=OTHER_DECODE)]

    def test_an_acknowledgement_of_nothing_changes_nothing(self, prefill: LonePrefill) -> None:
        assert prefill.hear(acknowledged()) == [] and prefill.core.peers[DECODE].is_up
        assert prefill.counts.stale == 1

    def test_a_decode_that_dies_has_its_rooms_ended(self, prefill: LonePrefill) -> None:
        part(prefill)
        prefill.endpoint.peer_died(DECODE, prefill.now)
        assert prefill.asked() == [CloseRoute(DECODE)] and not prefill.core.peers


class TestDecodeIsTold:
    def test_every_loan_ended_those_prefill_never_received_too(self, decode: LoneDecode) -> None:
        decode.lent(1)
        decode.open(2)
        decode.asked()
        told = decode.hear(goodbye())
        assert told[:2] == [to(acknowledged()), HangUp(KEY)]
        assert [entry for entry in told if type(entry) is RoomFailed] == [
            RoomFailed(G, SHUT_DOWN),
            RoomFailed(GrantId(3), SHUT_DOWN),
        ]
        assert {entry.grant for entry in told if type(entry) is FreePages} == {G, 3}
        assert told[-1] == StopWatch(KEY)
        # Prefill has gone: it is asked nothing.
        assert not any(isinstance(entry, tuple) for entry in told[1:])
        assert len(decode.core.ledger) == 0
        assert not decode.core.links.peers
        assert len(decode.core.deadlines) == 0

    def test_loans_in_doubt_end_when_it_comes_after_a_silence(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.tick(TIMING.lost_after_s)
        decode.tick()
        assert decode.core.ledger.quarantined_pages == 3
        told = decode.hear(goodbye())
        assert told[:2] == [to(acknowledged()), HangUp(KEY)] and FreePages(G) in told
        assert decode.core.ledger.quarantined_pages == 0
        assert not decode.core.links.peers

    def test_what_it_names_stays_on_loan_and_the_fence_ends_it(self, decode: LoneDecode) -> None:
        decode.lent(1)
        decode.lent(2)
        told = decode.hear(goodbye(G))
        assert FreePages(G) not in told and FreePages(GrantId(3)) in told
        assert link(decode) is LinkPhase.GONE and decode.core.ledger.quarantined_pages == 3
        with pytest.raises(LostError, match="shut down"):
            decode.open(3)
        decode.endpoint.writer_died(KEY, decode.now)
        assert FreePages(G) in decode.asked() and not decode.core.links.peers

    def test_a_withdrawn_room_that_it_names_ends(self, decode: LoneDecode) -> None:
        grant = decode.open(1)
        decode.endpoint.close_room(grant, GONE, decode.now)
        decode.hear(goodbye(grant))
        assert len(decode.core.ledger) == 0 and not decode.core.links.peers

    def test_a_room_whose_writes_have_been_proven_over_ends(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.hear(ack(grant=G))
        told = decode.hear(goodbye())
        assert RoomFailed(G, SHUT_DOWN) in told and FreePages(G) in told
        assert len(decode.core.ledger) == 0 and not decode.core.links.peers

    def test_of_another_incarnation_it_is_no_proof(self, decode: LoneDecode) -> None:
        decode.lent()
        assert decode.hear(goodbye(source=OTHER_PREFILL)) == [] and decode.counts.foreign == 1
        assert link(decode) is LinkPhase.UP and len(decode.core.ledger) == 1

    def test_over_the_link_to_another_prefill_it_is_no_proof(self, two: LoneDecode) -> None:
        record = two.lent(7, TWO)
        assert two.hear(goodbye(), key=OTHER_KEY) == [] and two.counts.foreign == 1
        assert len(record.lease.loans) == 2

    def test_the_other_ranks_of_a_room_are_asked_for_their_proof(self, two: LoneDecode) -> None:
        record = two.lent(7, TWO)
        told = two.hear(goodbye())
        assert (OTHER_KEY, abort(grant=record.grant, cause=SHUT_DOWN, source=OTHER_PREFILL)) in told
        assert FreePages(record.grant) not in told
        assert FreePages(record.grant) in two.hear(
            ack(grant=record.grant, source=OTHER_PREFILL, rank=1), key=OTHER_KEY
        )

    def test_a_room_whose_last_chunk_has_landed_from_there_goes_on(self, two: LoneDecode) -> None:
        record = two.lent(7, TWO)
        two.hear(chunk_done(0, 3, last=True, grant=record.grant))
        told = two.hear(goodbye())
        assert not any(type(entry) is RoomFailed for entry in told) and record.receiving

    def test_a_link_that_registers_is_refused_so(self) -> None:
        decode = LoneDecode()
        grant = decode.open(7)
        decode.asked()
        told = decode.hear(goodbye())
        assert told[:2] == [to(acknowledged()), HangUp(KEY)]
        assert RoomFailed(grant, SHUT_DOWN) in told
        assert not decode.core.links.peers


class TestDecodeSaysGoodbye:
    def test_until_it_is_acknowledged(self, decode: LoneDecode) -> None:
        assert part(decode) == [to(goodbye())] and link(decode) is LinkPhase.PARTING
        assert decode.endpoint.next_tick() == decode.now + TIMING.repeat_after_s
        assert decode.tick(TIMING.repeat_after_s) == [to(goodbye())]
        assert decode.endpoint.parting(decode.now)
        assert decode.hear(acknowledged()) == [HangUp(KEY), StopWatch(KEY)]
        assert not decode.core.links.peers

    def test_not_to_one_that_is_gone_and_still_owes_a_loan(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.hear(goodbye(G))
        assert to(goodbye()) not in part(decode) and link(decode) is LinkPhase.GONE
        assert not decode.endpoint.parting(decode.now)

    def test_one_that_has_been_silent_is_not_awaited(self, decode: LoneDecode) -> None:
        part(decode)
        assert not decode.endpoint.parting(decode.now + TIMING.lost_after_s)

    def test_links_that_owe_nothing_are_dropped_on_the_way(self, fresh: LoneDecode) -> None:
        grant = fresh.open(7, TWO)
        fresh.close(grant)
        fresh.hear(ack(grant=grant))
        fresh.hear(ack(grant=grant, source=OTHER_PREFILL, rank=1), key=OTHER_KEY)
        assert len(fresh.core.links.peers) == 2
        part(fresh)
        assert not fresh.core.links.peers

    def test_once_where_no_answer_can_be_expected(self) -> None:
        silent = LoneDecode().up()
        silent.lent()
        silent.tick(TIMING.lost_after_s)
        silent.tick()
        assert part(silent)[:2] == [to(goodbye()), HangUp(KEY)] and link(silent) is LinkPhase.GONE
        fresh = LoneDecode()
        fresh.open(7)
        fresh.asked()
        assert to(goodbye()) in part(fresh) and not fresh.core.links.peers

    def test_prefill_says_goodbye_at_the_same_time(self, decode: LoneDecode) -> None:
        part(decode)
        assert decode.hear(goodbye()) == [to(acknowledged()), HangUp(KEY), StopWatch(KEY)]

    def test_prefill_dies_meanwhile(self, decode: LoneDecode) -> None:
        part(decode)
        decode.endpoint.writer_died(KEY, decode.now)
        assert decode.asked() == [HangUp(KEY), StopWatch(KEY)]

    def test_it_can_be_closed_before_the_answer(self, decode: LoneDecode) -> None:
        part(decode)
        decode.endpoint.part(decode.now)  # said already
        decode.endpoint.close(decode.now)
        assert decode.asked() == [HangUp(KEY), StopWatch(KEY)]


class TestPrefillIsTold:
    def test_it_forgets_the_decode_and_answers_every_time(self, prefill: LonePrefill) -> None:
        assert prefill.hear(goodbye()) == [acknowledged(), CloseRoute(DECODE)]
        assert not prefill.core.peers
        assert prefill.hear(goodbye()) == [acknowledged()]
        assert prefill.register() == [] and prefill.counts.stale == 1, "sent before the goodbye"
        assert len(prefill.core.deadlines) == 0

    def test_rooms_end_and_the_route_closes_after_their_writes(self, prefill: LonePrefill) -> None:
        record = prefill.sending(0, 1, 2, last=True)
        prefill.open(8)
        prefill.hear(announce(8, 2))
        told = prefill.hear(goodbye())
        assert told[0] == acknowledged() and CloseRoute(DECODE) not in told
        assert record.ended and 8 not in prefill.endpoint.rooms
        assert record.first_cause == Cause(Code.SHUTDOWN, f"decode {DECODE:016x} has shut down")
        assert prefill.hear(goodbye()) == [acknowledged()], "the first answer was lost"
        assert prefill.ended(1, WriteOutcome.CANCELLED)[-1] == CloseRoute(DECODE)

    def test_doubts_and_silence_keep_nothing_of_it(self, prefill: LonePrefill) -> None:
        prefill.send(prefill.matched(), 0, 1, 2, last=True)
        prefill.ended(1, WriteOutcome.UNPROVEN)
        prefill.tick(TIMING.lost_after_s)
        assert prefill.hear(goodbye()) == [acknowledged(), CloseRoute(DECODE)]
        assert not prefill.core.peers

    def test_its_route_is_being_opened(self) -> None:
        prefill = LonePrefill()
        assert isinstance(prefill.register()[0], OpenRoute)
        assert prefill.hear(goodbye()) == [acknowledged(), CloseRoute(DECODE)]
        assert not prefill.endpoint.route_opened(DECODE, prefill.now)

    @pytest.mark.parametrize("record", ["both", "displaced", "in doubt"])
    def test_one_that_was_displaced_comes_never_again(
        self, prefill: LonePrefill, record: str
    ) -> None:
        former = prefill.core.former
        if record != "in doubt":
            former.displaced[OTHER_DECODE] = GrantId(5)
        if record != "displaced":
            former.in_doubt[OTHER_DECODE] = (GrantId(3),)
        prefill.hear(goodbye(target=OTHER_DECODE))
        assert not former.displaced and not former.in_doubt
        assert prefill.register(OTHER_DECODE) == []

    def test_of_a_stranger_nothing_is_kept(self, prefill: LonePrefill) -> None:
        assert prefill.hear(goodbye(target=OTHER_DECODE)) == [acknowledged(OTHER_DECODE)]
        assert not prefill.core.former.parted

    def test_over_the_link_of_another_decode_it_is_foreign(self) -> None:
        prefill = LonePrefill().up(DECODE, OTHER_DECODE)
        assert prefill.hear(goodbye(), sender=OTHER_DECODE) == [] and DECODE in prefill.core.peers
        assert prefill.counts.foreign == 1

    def test_those_that_have_parted_are_bounded(self) -> None:
        prefill = LonePrefill(bounds=Bounds(closed_grants=1)).up(DECODE, OTHER_DECODE)
        prefill.hear(goodbye(), goodbye(target=OTHER_DECODE))
        assert list(prefill.core.former.parted) == [OTHER_DECODE]

    def test_they_take_no_place_among_those_that_may_come_back(self) -> None:
        prefill = LonePrefill(bounds=Bounds(closed_grants=1)).up()
        prefill.core.former.displaced[OTHER_DECODE] = GrantId(5)
        prefill.hear(announce(7, 1), goodbye())
        assert list(prefill.core.former.parted) == [DECODE]
        assert prefill.core.former.displaced == {OTHER_DECODE: 5}


def test_what_is_named_is_read_back(prefill: LonePrefill, decode: LoneDecode) -> None:
    """The whole way: a prefill in doubt about one of two rooms, and the decode that lent to it."""
    decode.lent(1)
    decode.lent(2)
    prefill.hear(bootstrap(1, G), bootstrap(2, 3))
    for room in (1, 2):
        prefill.open(room)
    prefill.asked()
    for write, room in enumerate((1, 2), 1):
        prefill.send(prefill.endpoint.rooms[RoomId(room)], 0, 1, 2, last=False)
        prefill.ended(write, WriteOutcome.UNPROVEN if room == 1 else WriteOutcome.LANDED)
    said = [message for message in part(prefill) if type(message) is Goodbye]
    assert said == [goodbye(G)]
    decode.hear(*said)
    assert decode.core.ledger.quarantined_pages == 3
