"""How a room at decode ends, what is asked for again, and how a decode leaves (I2, I4, I11)."""

from __future__ import annotations

import itertools

import pytest

from kvflow.protocols.commands import (
    FreePages,
    HangUp,
    RoomEnded,
    RoomFailed,
    RoomLanded,
    StopWatch,
)
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import AbortedError, Cause, Code
from kvflow.protocols.machinery import COUNTED_AT_ONCE, TICK_WORK
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import GrantId
from tests.protocols.alone import (
    BROKEN,
    ELSEWHERE,
    GONE,
    KEY,
    ONE,
    OTHER_KEY,
    OTHER_PREFILL,
    PREFILL,
    START,
    TWO,
    G,
    LoneDecode,
    abort,
    ack,
    announce,
    ask,
    beat,
    bootstrap,
    chunk_done,
    done,
    failed,
    key_of,
    other,
    phase_of,
    quarantined,
    registered,
    to,
)

LEAVING = Cause(Code.SHUTDOWN, "decode is shutting down")


def proof_may_come(decode: LoneDecode) -> bool:
    """Return the property as it is now: mypy keeps what an assertion says of it."""
    return decode.core.proof_may_come


class TestEndings:
    def test_by_the_client_and_prefill_has_drained(self, decode: LoneDecode) -> None:
        record = decode.lent()
        assert decode.close(G) == [RoomFailed(G, GONE), to(abort(grant=G))]
        assert phase_of(record) is DecodePhase.DRAINING
        assert decode.close(G, BROKEN) == [] == decode.hear(failed(BROKEN, grant=G))
        assert decode.core.ledger.quarantined_pages == 3
        assert decode.hear(ack(grant=G)) == [FreePages(G), RoomEnded(G)]
        assert phase_of(record) is DecodePhase.ABORTED
        assert record.state.cause == GONE and decode.core.ledger.quarantined_pages == 0
        told = [line.what for line in record.story.lines()]
        # Also what came late.
        assert told == ["lent", "ended_locally", "ended_locally", "room_failed", "loans_ended"]
        assert decode.hear(ack(grant=G)) == [] and decode.counts.stale == 1

    def test_and_prefill_cannot_say(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.close(G)
        assert decode.hear(ack(room=8, grant=G)) == [] and decode.counts.stale == 1
        assert decode.hear(ack(grant=G, drained=False)) == quarantined(G)
        assert record.phase is DecodePhase.LOST and decode.counts.endings["lost:client_gone"] == 1
        text = "transfer_error: prefill cannot prove where its writes went"
        assert record.story.lines()[-1].text == text
        decode.endpoint.writer_died(KEY, decode.now)
        assert decode.asked() == [HangUp(KEY), FreePages(G), StopWatch(KEY)]

    def test_what_was_never_offered_or_is_proven_is_not_in_doubt(self, decode: LoneDecode) -> None:
        doubt, again = ack(grant=G, drained=False), GrantId(G + 1)
        decode.lent()
        decode.hear(ack(grant=G))
        assert decode.hear(doubt) == [], "it has said that its writes have ended"
        assert decode.close(G) == [RoomFailed(G, GONE), FreePages(G), RoomEnded(G)]
        decode.open(8)
        decode.asked()
        assert decode.hear(ack(8, again, drained=False)) == [], "it has no page to write to"
        assert to(abort(8, again)) in decode.close(again), "it must hear that the room has ended"
        assert [*decode.core.ledger.grants_of(decode.core.links.peers[KEY])] == [again]
        assert decode.hear(ack(8, again, drained=False)) == []
        assert len(decode.core.ledger) == 0 == decode.core.ledger.quarantined_pages

    def test_one_rank_has_drained_and_one_cannot_say(self, two: LoneDecode) -> None:
        record = two.lent(ranks=TWO)
        grant = record.grant
        two.close(grant)
        unproven = ack(grant=grant, drained=False, source=OTHER_PREFILL, rank=1)
        assert two.hear(unproven, key=OTHER_KEY) == []
        assert two.hear(ack(grant=grant)) == quarantined(grant)
        assert record.phase is DecodePhase.LOST and record.state.cause == GONE
        assert two.hear(ack(grant=grant, source=OTHER_PREFILL, rank=1), key=OTHER_KEY) == [
            FreePages(grant)
        ]

    def test_by_prefill(self, decode: LoneDecode) -> None:
        record = decode.lent()
        told = [RoomFailed(G, BROKEN), to(abort(grant=G, cause=BROKEN)), *quarantined(G)]
        assert decode.hear(failed(BROKEN, grant=G)) == told and record.phase is DecodePhase.FAILED
        assert decode.hear(ack(grant=G)) == [FreePages(G)]

    def test_by_prefill_that_has_proven_it_already(self, decode: LoneDecode) -> None:
        decode.lent()
        assert decode.hear(ack(grant=G)) == []
        assert decode.tick(1)[-1] != to(beat(3)), "its RoomFailed was lost, and must be asked for"
        told = [RoomFailed(G, BROKEN), FreePages(G), RoomEnded(G)]
        assert decode.hear(failed(BROKEN, grant=G)) == told

    def test_messages_about_other_rooms_do_not_end_it(self, decode: LoneDecode) -> None:
        decode.lent()
        assert decode.hear(failed(BROKEN, room=8, grant=G), failed(BROKEN, grant=9)) == []
        assert decode.counts.stale == 2
        decode.up(ELSEWHERE)
        stranger = failed(BROKEN, grant=G, source=key_of(ELSEWHERE[0]).incarnation)
        assert decode.hear(stranger, key=key_of(ELSEWHERE[0])) == []
        # It is not one of the room's ranks.
        assert decode.counts.stale == 3 and G in decode.endpoint.rooms

    def test_the_last_chunk_of_a_draining_room_is_proof(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.hear(done(0, 1))
        decode.close(G)
        assert decode.hear(done(2, 1, True), done(0, 1), done(1, 1)) == []
        assert decode.counts.stale == 3 and len(decode.core.ledger) == 1
        assert decode.hear(done(1, 2, True)) == [FreePages(G), RoomEnded(G)]
        assert "success" not in decode.counts.endings

    def test_by_its_deadline(self, decode: LoneDecode) -> None:
        record = decode.lent(deadline_at_s=START + 2.254)
        decode.tick(2.25)
        assert record.phase is DecodePhase.WAITING_FOR_INPUT
        why = Cause(Code.DEADLINE, "room 7: deadline of 2.25 s has passed")
        told = decode.tick(0.01)
        assert told[:2] == [RoomFailed(G, why), to(abort(grant=G, cause=why))]
        decode.hear(ack(grant=G))
        grant = decode.open(8, deadline_at_s=decode.now + 60)
        decode.close(grant)
        # It goes with its room.
        assert {timer.kind for timer in decode.core.deadlines} == {"link", "repeat"}

    def test_by_a_deadline_that_has_passed_already(self, decode: LoneDecode) -> None:
        decode.open(deadline_at_s=START - 0.25)
        assert Cause(Code.DEADLINE, "room 7: deadline of 0 s has passed") in [
            command.cause for command in decode.tick() if isinstance(command, RoomFailed)
        ]

    def test_one_that_drains_is_past_its_deadline(self, decode: LoneDecode) -> None:
        record = decode.lent(deadline_at_s=START + 2)
        decode.close(G)
        decode.silence(2)
        assert record.state.cause == GONE
        assert not any(timer.kind == "stalled" for timer in decode.core.deadlines)


class TestAborts:
    def test_they_are_repeated_less_and_less_often(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.close(G)
        sent = []
        for _ in range(80):
            decode.now += 0.5
            told = decode.tick() + decode.tick() + decode.hear(beat())
            sent += [decode.now - START] * (to(abort(grant=G)) in told)
        assert sent == [0.5, 1.5, 3.5, 7.5, 15.5, 23.5, 31.5, 39.5]

    def test_an_answer_makes_the_others_come_soon(self, decode: LoneDecode) -> None:
        first, second = decode.lent(7), decode.lent(8)
        decode.close(first.grant)
        decode.close(second.grant)
        for _ in range(20):
            decode.hear(beat())
            decode.tick(0.5)
        decode.hear(ack(grant=first.grant))
        (peer,) = decode.endpoint.peers
        assert peer.repeat_after_s == 0.5
        assert decode.tick() == [] == decode.tick(), "soon, and not at once"
        decode.tick(0.5)
        assert decode.tick() == [to(abort(8, second.grant))]
        decode.hear(ack(8, second.grant))
        decode.tick(1)
        decode.tick(1)
        # Nothing is asked for any more.
        assert "repeat" not in {timer.kind for timer in decode.core.deadlines}

    def test_silence_does_not_make_them_come_sooner(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.close(G)
        for _ in range(20):
            decode.hear(beat())
            decode.tick(0.5)
        (peer,) = decode.endpoint.peers
        assert peer.repeat_after_s == 8.0
        decode.silence()
        assert peer.phase is LinkPhase.SILENT and peer.repeat_after_s == 8.0

    def test_answers_to_others_do_not_put_them_off(self, decode: LoneDecode) -> None:
        decode.now += 1
        decode.tick()
        first, second = decode.lent(7), decode.lent(8)
        decode.close(first.grant)
        decode.close(second.grant)
        decode.now += 0.375
        decode.hear(ack(grant=first.grant))
        decode.tick(0.125)
        assert to(abort(8, second.grant)) in decode.tick()

    def test_what_was_withdrawn_before_prefill_knew_this_decode_is_told_when_it_does(self) -> None:
        fresh = LoneDecode()
        grant = fresh.open()
        fresh.close(grant)
        for _ in range(4):
            fresh.tick(0.75)
        fresh.tick()
        assert fresh.core.deadlines.next_at_s() > fresh.now
        fresh.hear(registered(fresh_from=1))
        fresh.tick()
        assert fresh.tick() == [to(abort(grant=grant))]
        assert next(iter(fresh.endpoint.peers)).repeat_after_s == 1.0

    def test_one_that_takes_prefill_long_does_not_delay_the_next(self, decode: LoneDecode) -> None:
        first, second = decode.lent(7), decode.lent(8)
        decode.close(first.grant)
        for _ in range(16):
            decode.hear(beat())
            decode.tick(0.5)
        decode.hear(beat())
        decode.close(second.grant)
        decode.tick(0.25)
        decode.close(decode.lent(9).grant)
        decode.tick(0.25)
        assert to(abort(8, second.grant)) in decode.tick(), "and those after it do not put it off"

    def test_only_what_is_recalled_is_repeated(self, decode: LoneDecode) -> None:
        decode.lent(7)
        withdrawn = decode.open(8)
        decode.close(withdrawn)
        decode.tick(0.5)
        assert [message for _, message in decode.tick() if type(message) is type(abort())] == [
            abort(8, withdrawn)
        ]


class TestAsking:
    """Resync: what was not received is asked for, and what prefill does not know is sent again."""

    def test_an_announcement_is_repeated_less_and_less_often(self, decode: LoneDecode) -> None:
        grant = decode.open()
        decode.asked()
        sent = []
        for _ in range(80):
            decode.hear(beat())
            told = [message for _, message in decode.tick(0.5)]
            sent += [decode.now - START] * (announce(grant=grant) in told)
            assert not any(type(message) is type(ask()) for message in told), "no page was offered"
        assert [b - a for a, b in itertools.pairwise(sent)][:5] == [1.0, 2.0, 4.0, 8.0, 8.0]

    def test_it_asks_from_the_first_chunk_it_has_not_received(self, decode: LoneDecode) -> None:
        decode.lent()
        assert decode.endpoint.next_tick() == START + 0.5
        assert to(ask((7, G, 0))) in decode.tick(0.5)
        assert to(ask((7, G, 0))) not in decode.tick(0.5) + decode.tick(0.25)
        decode.hear(done(0, 2))
        assert decode.tick(0.25) == [] and decode.tick(0.125) == []
        assert to(ask((7, G, 1))) in decode.tick(0.125), "half a second after it has come"

    def test_half_a_second_is_counted_from_the_last_chunk(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.tick(0.25)
        decode.hear(done(0, 1))
        assert decode.tick(0.25) == [] == decode.tick(0.125)
        assert to(ask((7, G, 1))) in decode.tick(0.125)

    @pytest.mark.parametrize("chunks", [0, 1])
    def test_what_moved_is_asked_about_as_at_first(self, decode: LoneDecode, chunks: int) -> None:
        grant = decode.open()
        for _ in range(28 - 14 * chunks):
            decode.hear(beat())
            decode.tick(0.5)
        decode.lend(grant)
        for _ in range(28 * chunks):
            decode.hear(beat())
            decode.tick(0.5)
        for seq in range(chunks):
            decode.hear(done(seq, 1))
        assert to(ask((7, G, chunks))) not in decode.tick(0.25)
        assert to(ask((7, G, chunks))) in decode.tick(0.25) + decode.tick()

    def test_one_message_asks_about_all_rooms_of_a_link(self, two: LoneDecode) -> None:
        first, second = two.lent(7, TWO), two.lent(8, TWO)
        last = chunk_done(0, 3, True, grant=first.grant, source=OTHER_PREFILL, rank=1)
        two.hear(last, key=OTHER_KEY)
        third = two.lent(9, TWO)
        two.hear(chunk_done(0, 3, True, room=9, grant=third.grant))
        asked = [entry for entry in two.tick(0.5) if type(entry[1]) is type(ask())]
        assert asked == [
            to(ask((7, first.grant, 0), (8, second.grant, 0))),
            other(ask((8, second.grant, 0), (9, third.grant, 0), source=OTHER_PREFILL)),
        ], "the other rank has given all it has for the first"

    def test_nothing_is_asked_of_a_link_that_is_not_up(self, decode: LoneDecode) -> None:
        decode.now += 1.625
        decode.lent()
        told = [decode.tick(after_s) for after_s in (0.5, 1.0, 2.125)]
        asked = [[message for _, message in sent if type(message) is type(ask())] for sent in told]
        # It fell silent; its room is lost in the next tick.
        assert asked == [[ask((7, G, 0))], [ask((7, G, 0))], []]
        assert decode.core.links.peers[KEY].phase is LinkPhase.SILENT and G in decode.endpoint.rooms

    def test_what_prefill_does_not_know_is_offered_again(self, decode: LoneDecode) -> None:
        decode.lent()
        # Each is answered once.
        assert decode.hear(ask((7, G, 0), (7, G, 0))) == [to(bootstrap(grant=G))]
        assert decode.hear(ask((9, 9, 0))) == []
        decode.hear(done(0, 1))
        assert decode.hear(ask((7, G, 0))) == [], "an old question"
        why = Cause(Code.STALE_GRANT, "room 7: prefill remembers nothing of it")
        assert decode.hear(ask((7, G, 1))) == [RoomFailed(G, why), to(abort(grant=G, cause=why))]
        assert decode.hear(ask((7, G, 1))) == []

    def test_a_room_without_pages_has_nothing_to_offer(self, decode: LoneDecode) -> None:
        grant = decode.open()
        decode.asked()
        assert decode.hear(ask((7, grant, 0)), ask((7, grant, 1))) == []
        assert grant in decode.endpoint.rooms

    def test_only_a_rank_of_the_room_that_owes_something_may_ask(self) -> None:
        decode = LoneDecode().up(TWO).up(ELSEWHERE)
        record = decode.lent(7, ELSEWHERE)
        assert decode.hear(ask((7, record.grant, 0), source=OTHER_PREFILL), key=OTHER_KEY) == []
        both = decode.lent(8, TWO)
        decode.hear(chunk_done(0, 3, True, room=8, grant=both.grant))
        # It may forget it.
        assert decode.hear(ask((8, both.grant, 1))) == [] and not both.state.cause
        offered = [other(bootstrap(8, both.grant, source=OTHER_PREFILL))]
        assert decode.hear(ask((8, both.grant, 0), source=OTHER_PREFILL), key=OTHER_KEY) == offered


class TestLeaving:
    def test_no_room_is_opened_and_all_are_aborted(self, decode: LoneDecode) -> None:
        lent, waiting = decode.lent(7), decode.open(8)
        decode.asked()
        decode.endpoint.leave(decode.now)
        sent = [to(abort(7, lent.grant, cause=LEAVING)), to(abort(8, waiting, cause=LEAVING))]
        assert decode.asked() == [
            *(RoomFailed(lent.grant, LEAVING), sent[0], RoomFailed(waiting, LEAVING), sent[1]),
            *(FreePages(waiting), RoomEnded(waiting)),
        ]
        with pytest.raises(AbortedError, match="decode is shutting down"):
            decode.open(9)
        assert decode.asked() == [to(abort(9, 4, cause=LEAVING))]
        decode.endpoint.leave(decode.now)
        assert decode.asked() == [] and list(decode.endpoint.rooms) == [lent.grant]

    def test_close_hangs_up_on_all(self, two: LoneDecode) -> None:
        two.endpoint.close(two.now)
        ends = [end(key) for key in (KEY, OTHER_KEY) for end in (HangUp, StopWatch)]
        assert two.asked() == ends

    def test_a_room_may_end_while_others_are_dealt_with(self, decode: LoneDecode) -> None:
        rooms = [decode.open(room) for room in range(TICK_WORK + 2)]
        decode.endpoint.leave(decode.now)
        assert list(decode.endpoint.rooms) == rooms[-2:]
        decode.close(rooms[-2])
        decode.tick()
        assert not decode.endpoint.rooms
        assert decode.counts.endings["aborted:shutdown"] == TICK_WORK + 1

    def test_and_so_may_its_loans(self, decode: LoneDecode) -> None:
        """The link is lost, and the last chunk of a room has come before its turn."""
        rooms = [decode.lent(room) for room in range(TICK_WORK + 3)]
        grants = [record.grant for record in rooms]
        decode.hear(registered(source=OTHER_PREFILL, asked=PREFILL))
        landed = decode.hear(chunk_done(0, 3, True, room=TICK_WORK + 2, grant=grants[-1]))
        decode.tick()
        assert RoomLanded(grants[-1], b"") in landed and decode.counts.endings["success"] == 1
        assert decode.counts.endings["lost:peer_lost"] == TICK_WORK + 2
        assert len(decode.core.ledger) == TICK_WORK + 2

    def test_ends_are_counted_many_at_once(self, decode: LoneDecode) -> None:
        before, ended = sum(decode.counts.endings.values()), []
        for room in range(COUNTED_AT_ONCE + 1):
            decode.close(decode.open(room))
            ended.append(len(decode.counts.ended))
        assert ended == [*range(1, COUNTED_AT_ONCE), 0, 1]
        assert sum(decode.counts.endings.values()) == before + COUNTED_AT_ONCE + 1

    def test_nothing_is_linked_once_it_is_closed(self, decode: LoneDecode) -> None:
        decode.endpoint.close(decode.now)
        decode.asked()
        with pytest.raises(AbortedError, match="decode is shutting down"):
            decode.open(9)
        with pytest.raises(AbortedError, match="decode is shutting down"):
            decode.endpoint.refuse_room(9, ONE, BROKEN, decode.now)
        assert decode.asked() == [] and not list(decode.endpoint.peers)

    def test_whether_proof_may_still_come(self, decode: LoneDecode) -> None:
        fresh = LoneDecode()
        fresh.open()
        assert not proof_may_come(fresh), "it has never answered"
        assert not proof_may_come(decode), "nothing is owed"
        record = decode.lent()
        assert proof_may_come(decode)
        decode.close(record.grant)
        decode.hear(ack(grant=record.grant, drained=False))
        assert not proof_may_come(decode), "it cannot say"
        lent, elsewhere = decode.up(ELSEWHERE).lent(), key_of(ELSEWHERE[0])
        decode.now += 4
        decode.hear(beat(source=elsewhere.incarnation), key=elsewhere)
        decode.tick(1)
        # It is silent, and the other one owes nothing.
        assert decode.core.tasks and not proof_may_come(decode)
        decode.tick()
        assert not proof_may_come(decode) and lent.state.cause
        decode.endpoint.receive(
            KEY, encode(registered(fresh_from=decode.core.next_grant)), decode.now
        )
        assert proof_may_come(decode), "and answers again: it is asked"

    def test_proof_may_come_for_loans_that_are_yet_to_be_asked_for(self, two: LoneDecode) -> None:
        for room in range(2 * TICK_WORK):
            two.lent(room, TWO)
        two.silence()
        while two.core.tasks:
            two.tick()
        assert not proof_may_come(two)
        # The tasks for the dead rank come before those for the one that answers again.
        two.endpoint.writer_died(OTHER_KEY, two.now)
        two.hear(registered(fresh_from=two.core.next_grant, size=2))
        back = two.endpoint.link_to(TWO[0])
        assert back is not None and not two.core.ledger.awaits(back)
        assert proof_may_come(two)

    def test_close_hangs_up_and_leaves_loans_unproven(self, decode: LoneDecode) -> None:
        lent, waiting = decode.lent(7), decode.open(8)
        decode.asked()
        decode.endpoint.close(decode.now)
        assert decode.asked()[-4:] == [RoomEnded(waiting), HangUp(KEY), *quarantined(lent.grant)]
        assert len(decode.core.ledger) == 1 and decode.core.ledger.quarantined_pages == 3
        assert lent.state.cause == LEAVING and not decode.endpoint.rooms

    def test_many_rooms_end_a_few_at_a_time_and_at_the_end_all(self, decode: LoneDecode) -> None:
        rooms = [decode.lent(room) for room in range(2 * TICK_WORK + 1)]
        decode.endpoint.leave(decode.now)
        ended = [sum(_has_ended(record) for record in rooms)]
        while decode.endpoint.next_tick() == float("-inf"):
            decode.endpoint.tick(decode.now)
            ended.append(sum(_has_ended(record) for record in rooms))
        assert ended == [TICK_WORK, 2 * TICK_WORK, 2 * TICK_WORK + 1]
        decode = LoneDecode().up()
        rooms = [decode.lent(room) for room in range(3 * TICK_WORK)]
        decode.endpoint.close(decode.now)
        assert all(_has_ended(record) for record in rooms) and not decode.endpoint.rooms

    def test_many_deadlines_strike_a_few_at_a_time(self, decode: LoneDecode) -> None:
        for room in range(TICK_WORK + 3):
            decode.open(room, deadline_at_s=START + 0.25)
        decode.tick(0.25)
        assert len(decode.endpoint.rooms) == 3
        decode.tick()
        assert len(decode.endpoint.rooms) == 0


def _has_ended(record: DecodeRoomRecord) -> bool:
    return record.state.cause is not None
