"""A room at decode: announced, lent, filled chunk by chunk, and ended exactly once (I1, I2, I4, I8)."""

from __future__ import annotations

import itertools

import pytest

from kvflow.protocols.commands import (
    FreePages,
    HangUp,
    Linked,
    QuarantinePages,
    RoomEnded,
    RoomFailed,
    RoomLanded,
    StopVerifying,
    StopWatch,
    VerifyChunk,
)
from kvflow.protocols.decode import TICK_WORK
from kvflow.protocols.decode_rooms import DecodeRoomRecord
from kvflow.protocols.errors import AbortedError, Cause, Code, LostError, MisuseError, QuarantineError
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.wire.messages import GrantId, Message
from tests.protocols.alone import (
    BROKEN,
    GONE,
    KEY,
    ONE,
    OTHER_KEY,
    OTHER_PREFILL,
    PREFILL,
    START,
    TWO,
    LoneDecode,
    abort,
    ack,
    announce,
    ask,
    beat,
    bootstrap,
    chunk_done,
    failed,
    indices,
    registered,
    to,
)

LEAVING = Cause(Code.SHUTDOWN, "decode is shutting down")
G = GrantId(2)  # the first was used to link
DOUBT = Cause(Code.TRANSFER_ERROR, "prefill cannot prove where its writes went")


@pytest.fixture
def decode() -> LoneDecode:
    return LoneDecode().up()


def other(message: Message) -> tuple[object, Message]:
    return to(message, OTHER_KEY)


def done(seq: int, pages: int, last: bool = False, handoff: bytes = b"", **more: object) -> Message:
    return chunk_done(seq, pages, last, handoff, grant=G, **more)  # type: ignore[arg-type]


class TestOpening:
    def test_a_room_that_is_offered_at_once_announces_itself_by_that(self, decode: LoneDecode) -> None:
        assert decode.open(announce=False) == G and decode.asked() == [Linked(G)]
        assert decode.lend(G) == [to(bootstrap(grant=G))]
        assert decode.counts.rooms_opened == 2 and list(decode.endpoint.rooms) == [G]

    def test_where_a_link_is_missing_it_is_announced_all_the_same(self, decode: LoneDecode) -> None:
        grant = decode.open(ranks=TWO, announce=False)
        told = decode.asked()
        assert told[2:] == [to(announce(grant=grant)), other(announce(grant=grant, source=OTHER_PREFILL))]
        told = decode.hear(registered(source=OTHER_PREFILL, rank=4, fresh_from=grant), key=OTHER_KEY)
        assert Linked(grant) in told

    def test_what_cannot_be_offered_is_withdrawn(self, decode: LoneDecode) -> None:
        with pytest.raises(MisuseError, match="prefix_tokens 5 is neither"):
            decode.open(prefix=5)
        sent = decode.asked()
        cause = sent[0][1].cause
        assert sent == [to(abort(grant=G, cause=cause))] and "prefix_tokens 5" in cause.text
        assert not decode.endpoint.rooms and decode.counts.rooms_opened == 1
        decode.tick(0.5)
        assert to(abort(grant=G, cause=cause)) in decode.tick(), "until it is acknowledged"
        assert decode.hear(ack(grant=G)) == [] and len(decode.core.ledger) == 0
        with pytest.raises(MisuseError, match="room id"):
            decode.open(-1)
        assert decode.asked() == [] and decode.open() == 3

    def test_a_prefix_needs_no_pages(self, decode: LoneDecode) -> None:
        grant = decode.open(prefix=4)
        decode.asked()
        assert decode.lend(grant, (7, 2)) == [to(bootstrap(grant=grant, pages=(7, 2), prefix=4))]

    def test_a_refused_request_is_told_to_every_leg(self, decode: LoneDecode) -> None:
        decode.endpoint.refuse_room(7, ONE, BROKEN, decode.now)
        assert decode.asked() == [to(abort(grant=G, cause=BROKEN))] and not decode.endpoint.rooms
        with pytest.raises(LostError):
            decode.endpoint.refuse_room(7, (), BROKEN, decode.now)

    def test_while_too_much_is_in_quarantine_none_is_opened(self) -> None:
        decode = LoneDecode(bounds=Bounds(quarantine_share=0.2)).up()  # three pages of sixteen
        first, second = decode.lent(7), decode.lent(8)
        decode.close(first.grant)
        decode.lent(9)
        decode.close(second.grant)
        with pytest.raises(QuarantineError, match="6 pages are in quarantine, more than 3"):
            decode.open(10)
        sent = [command for command in decode.asked() if isinstance(command, tuple)]
        assert len(sent) == 1 and sent[0][1].cause.code is Code.CAPACITY


class TestLending:
    def test_once_and_after_linked(self, decode: LoneDecode) -> None:
        fresh = LoneDecode()
        grant = fresh.open()
        with pytest.raises(MisuseError, match="room 7: pages can be lent once, after Linked"):
            fresh.lend(grant)
        grant = decode.open()
        with pytest.raises(MisuseError, match="room 7: 2 pages for a room of 3"):
            decode.lend(grant, (1, 2))
        decode.lend(grant)
        with pytest.raises(MisuseError, match="room 7: pages can be lent once, after Linked"):
            decode.lend(grant)

    def test_too_late(self, decode: LoneDecode) -> None:
        grant = decode.open()
        decode.asked()
        ended = [RoomFailed(grant, GONE), to(abort(grant=grant)), FreePages(grant), RoomEnded(grant)]
        assert decode.close(grant) == ended
        assert decode.endpoint.lend(grant, indices(1, 2, 3), decode.now) is False and decode.asked() == []
        assert decode.close(grant) == [] and decode.hear(ack(grant=grant)) == []

    def test_prefill_is_given_time_to_answer_it(self, decode: LoneDecode) -> None:
        grant = decode.open()
        decode.now += 0.375
        decode.lend(grant)
        assert to(ask((7, grant, 0))) not in decode.tick(0.375)
        assert to(ask((7, grant, 0))) in decode.tick(0.125)

    def test_a_rank_that_has_ended_its_half_is_offered_nothing(self) -> None:
        decode = LoneDecode().up(TWO)
        grant = decode.open(ranks=TWO)
        decode.asked()
        assert decode.hear(failed(BROKEN, grant=grant)) == [
            RoomFailed(grant, BROKEN),
            to(abort(grant=grant, cause=BROKEN)),
            other(abort(grant=grant, cause=BROKEN, source=OTHER_PREFILL)),
            FreePages(grant),
            RoomEnded(grant),
        ]


class TestChunks:
    def test_all_of_them(self, decode: LoneDecode) -> None:
        record = decode.lent()
        assert decode.hear(done(0, 2)) == [] and record.phase is DecodePhase.TRANSFERRING
        assert decode.hear(done(1, 1, True, b"h")) == [RoomLanded(G, b"h"), RoomEnded(G)]
        assert decode.counts.endings == {"aborted:client_gone": 1, "success": 1} and decode.counts.bytes_moved == 3
        assert len(decode.core.ledger) == 0 and not decode.endpoint.rooms and len(decode.core.deadlines) == 2
        assert decode.tick(1)[-1] == to(beat(3))

    def test_repeated_missing_and_foreign_ones_count_for_nothing(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.hear(done(0, 1))
        for message in (done(0, 1), done(2, 1), done(1, 1, room=8), chunk_done(1, 1, grant=9)):
            assert decode.hear(message) == []
        assert decode.counts.stale == 4 and record.state.filled == (1,)

    def test_a_rank_that_could_not_vouch_for_its_writes_lands_nothing_more(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.hear(ack(grant=G, drained=False))
        assert decode.hear(done(0, 1), done(0, 3, True)) == [] and decode.counts.stale == 2
        assert record.state.filled == (0,) and len(decode.core.ledger) == 1

    def test_what_does_not_add_up_ends_the_room(self, decode: LoneDecode) -> None:
        record = decode.lent()
        told = decode.hear(done(0, 2, True))
        why = Cause(Code.PROTOCOL_ERROR, "rank 0 filled 2 pages of 3 by chunk 0")
        assert told == [RoomFailed(G, why), FreePages(G), RoomEnded(G)], "its last chunk has proven its writes"
        assert record.phase is DecodePhase.ABORTED

    def test_the_hand_over_is_the_first_ranks_that_brings_one(self) -> None:
        decode = LoneDecode().up(TWO)
        record = decode.lent(ranks=TWO)
        decode.hear(chunk_done(0, 3, True, b"first", grant=record.grant))
        told = decode.hear(
            chunk_done(0, 3, True, b"second", grant=record.grant, source=OTHER_PREFILL, rank=4), key=OTHER_KEY
        )
        assert told == [RoomLanded(record.grant, b"first"), RoomEnded(record.grant)]

    def test_ranks_fill_the_room_each_at_its_own_pace(self) -> None:
        decode = LoneDecode().up(TWO)
        record = decode.lent(ranks=TWO)
        decode.hear(chunk_done(0, 2, grant=record.grant, source=OTHER_PREFILL, rank=4), key=OTHER_KEY)
        assert (record.next_seq(0), record.next_seq(1), record.first_page(0), record.first_page(1)) == (0, 1, 0, 2)


class TestVerifiedChunks:
    """With `verify` a chunk lands when the checksum of what is there agrees with prefill's."""

    @pytest.fixture
    def decode(self) -> LoneDecode:
        return LoneDecode(verify=True).up()

    def summed(self, decode: LoneDecode, seq: int, checksum: bytes, rank: int = 0, grant: GrantId = G) -> list[object]:
        decode.endpoint.chunk_summed(grant, rank, seq, checksum, decode.now)
        return decode.asked()

    def test_they_land_in_the_order_they_came_in(self, decode: LoneDecode) -> None:
        record = decode.lent()
        assert decode.hear(done(0, 2, checksum=b"a")) == [VerifyChunk(G, 0, 0, 0, 2)]
        assert decode.hear(done(1, 1, True, b"h", checksum=b"b")) == [VerifyChunk(G, 0, 1, 2, 1)]
        assert len(decode.core.ledger) == 0, "the last one is proof, whatever its checksum says"
        assert self.summed(decode, 1, b"b") == [] and record.state.filled == (0,)
        assert self.summed(decode, 0, b"a") == [RoomLanded(G, b"h"), RoomEnded(G)]
        assert self.summed(decode, 0, b"a") == []

    @pytest.mark.parametrize(
        ("sent", "found", "code", "text"),
        [
            (b"a", b"b", Code.TRANSFER_ERROR, "chunk 0 of rank 0: checksum 61 at prefill, 62 at decode"),
            (b"", b"b", Code.TRANSFER_ERROR, "chunk 0 of rank 0: prefill sends no checksum, and this decode verifies"),
            (b"a", b"", Code.ENGINE_ERROR, "chunk 0 of rank 0: the checksum of the landed pages could not be computed"),
        ],
    )
    def test_a_difference_ends_the_room(
        self, decode: LoneDecode, sent: bytes, found: bytes, code: Code, text: str
    ) -> None:
        decode.lent()
        decode.hear(done(0, 1, checksum=sent), done(1, 1, checksum=b"c"))
        stop, failure, told = self.summed(decode, 0, found)
        assert (stop, told) == (StopVerifying(G), to(abort(grant=G, cause=failure.cause)))  # type: ignore[attr-defined]
        assert failure.cause.code is code and failure.cause.text.startswith(text)  # type: ignore[attr-defined]
        assert decode.counts.mismatched == 1
        assert self.summed(decode, 1, b"c") == [] and self.summed(decode, 0, sent or b"x") == []

    def test_the_sums_of_other_chunks_are_not_its_own(self) -> None:
        decode = LoneDecode(verify=True).up(TWO)
        record = decode.lent(ranks=TWO)
        grant = record.grant
        decode.hear(chunk_done(0, 1, grant=grant, checksum=b"a"), chunk_done(1, 1, grant=grant, checksum=b"b"))
        decode.hear(
            chunk_done(0, 2, grant=grant, checksum=b"c", source=OTHER_PREFILL, rank=4),
            chunk_done(1, 1, True, grant=grant, checksum=b"d", source=OTHER_PREFILL, rank=4),
            key=OTHER_KEY,
        )
        assert [(check.rank, check.message.seq) for check in record.checks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert (record.next_seq(0), record.first_page(0), record.next_seq(1), record.first_page(1)) == (2, 2, 2, 3)
        assert self.summed(decode, 0, b"c", 1, grant) == [] == self.summed(decode, 1, b"b", 0, grant)
        assert record.state.filled == (0, 0)
        assert self.summed(decode, 0, b"a", 0, grant) == [] and record.state.filled == (2, 2)
        self.summed(decode, 1, b"d", 1, grant)
        assert record.state.finished == 0b10 and decode.counts.mismatched == 0

    def test_a_chunk_without_pages_has_no_sum(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.hear(done(0, 3, checksum=b"a"))
        assert decode.hear(done(1, 0, True, b"h")) == [VerifyChunk(G, 0, 1, 3, 0)]
        assert self.summed(decode, 0, b"a") == [] and self.summed(decode, 1, b"") == [RoomLanded(G, b"h"), RoomEnded(G)]

    def test_prefill_gives_up_a_room_whose_last_chunk_is_being_summed(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.hear(done(0, 3, True, checksum=b"a"))
        ended = [StopVerifying(G), RoomFailed(G, BROKEN), FreePages(G), RoomEnded(G)]
        assert decode.hear(failed(BROKEN, grant=G)) == ended, "its loan has ended already"

    def test_a_room_that_ends_stops_them(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.hear(done(0, 1, checksum=b"a"))
        assert decode.close(G) == [StopVerifying(G), RoomFailed(G, GONE), to(abort(grant=G))]
        assert self.summed(decode, 0, b"z") == [] and decode.counts.mismatched == 0
        assert record.state.filled == (0,)
        assert self.summed(decode, 0, b"a", grant=GrantId(99)) == []


class TestEndings:
    def test_by_the_client_and_prefill_has_drained(self, decode: LoneDecode) -> None:
        record = decode.lent()
        assert decode.close(G) == [RoomFailed(G, GONE), to(abort(grant=G))] and record.phase is DecodePhase.DRAINING
        assert decode.close(G, BROKEN) == [] == decode.hear(failed(BROKEN, grant=G))
        assert decode.core.ledger.quarantined_pages == 3
        assert decode.hear(ack(grant=G)) == [FreePages(G), RoomEnded(G)] and record.phase is DecodePhase.ABORTED
        assert record.state.cause == GONE and decode.core.ledger.quarantined_pages == 0
        told = [line.what for line in record.story.lines()]
        assert told == ["lent", "ended_locally", "ended_locally", "room_failed", "loans_ended"], "also what came late"
        assert decode.hear(ack(grant=G)) == [] and decode.counts.stale == 1

    def test_and_prefill_cannot_say(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.close(G)
        assert decode.hear(ack(room=8, grant=G)) == [] and decode.counts.stale == 1
        assert decode.hear(ack(grant=G, drained=False)) == [QuarantinePages(G), RoomEnded(G)]
        assert record.phase is DecodePhase.LOST and decode.counts.endings["lost:client_gone"] == 1
        assert record.story.lines()[-1].text == "transfer_error: prefill cannot prove where its writes went"
        decode.endpoint.writer_died(KEY, decode.now)
        assert decode.asked() == [HangUp(KEY), FreePages(G), StopWatch(KEY)]

    def test_one_rank_has_drained_and_one_cannot_say(self) -> None:
        decode = LoneDecode().up(TWO)
        record = decode.lent(ranks=TWO)
        grant = record.grant
        decode.close(grant)
        unproven = ack(grant=grant, drained=False, source=OTHER_PREFILL, rank=4)
        assert decode.hear(unproven, key=OTHER_KEY) == []
        assert decode.hear(ack(grant=grant)) == [QuarantinePages(grant), RoomEnded(grant)]
        assert record.phase is DecodePhase.LOST and record.state.cause == GONE
        assert decode.hear(ack(grant=grant, source=OTHER_PREFILL, rank=4), key=OTHER_KEY) == [FreePages(grant)]

    def test_by_prefill(self, decode: LoneDecode) -> None:
        record = decode.lent()
        told = [RoomFailed(G, BROKEN), to(abort(grant=G, cause=BROKEN)), QuarantinePages(G), RoomEnded(G)]
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
        decode.up(TWO[1:])
        assert decode.hear(failed(BROKEN, grant=G, source=OTHER_PREFILL, rank=4), key=OTHER_KEY) == []
        assert decode.counts.stale == 3 and G in decode.endpoint.rooms, "it is not one of the room's ranks"

    def test_the_last_chunk_of_a_room_that_drains_is_proof_all_the_same(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.hear(done(0, 1))
        decode.close(G)
        assert decode.hear(done(2, 1, True)) == [] == decode.hear(done(0, 1)) == decode.hear(done(1, 1))
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
        assert {timer.kind for timer in decode.core.deadlines} == {"link", "repeat"}, "it goes with its room"

    def test_one_that_drains_is_past_its_deadline(self, decode: LoneDecode) -> None:
        record = decode.lent(deadline_at_s=START + 2)
        decode.close(G)
        decode.tick(2)
        decode.tick()
        assert record.state.cause == GONE and not any(timer.kind == "stalled" for timer in decode.core.deadlines)


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
        assert "repeat" not in {timer.kind for timer in decode.core.deadlines}, "nothing is asked for any more"

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

    def test_only_what_is_recalled_is_repeated(self, decode: LoneDecode) -> None:
        decode.lent(7)
        withdrawn = decode.open(8)
        decode.close(withdrawn)
        decode.tick(0.5)
        assert [message for _, message in decode.tick() if type(message) is type(abort())] == [abort(8, withdrawn)]


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

    def test_one_message_asks_about_all_rooms_of_a_link(self) -> None:
        decode = LoneDecode().up(TWO)
        first, second = decode.lent(7, TWO), decode.lent(8)
        last = chunk_done(0, 3, True, grant=first.grant, source=OTHER_PREFILL, rank=4)
        decode.hear(last, key=OTHER_KEY)
        third = decode.lent(9, TWO[1:])
        asked = [entry for entry in decode.tick(0.5) if type(entry[1]) is type(ask())]
        assert asked == [
            to(ask((7, first.grant, 0), (8, second.grant, 0))),
            other(ask((9, third.grant, 0), source=OTHER_PREFILL)),
        ], "the other rank has given all it has for the first"

    def test_nothing_is_asked_of_a_link_that_is_not_up(self, decode: LoneDecode) -> None:
        decode.now += 1.625
        decode.lent()
        told = [decode.tick(after_s) for after_s in (0.5, 1.0, 2.125)]
        asked = [[message for _, message in sent if type(message) is type(ask())] for sent in told]
        assert asked == [[ask((7, G, 0))], [ask((7, G, 0))], []], "it fell silent; its room is lost in the next tick"
        assert decode.core.links.peers[KEY].phase is LinkPhase.SILENT and G in decode.endpoint.rooms

    def test_what_prefill_does_not_know_is_offered_again(self, decode: LoneDecode) -> None:
        decode.lent()
        assert decode.hear(ask((7, G, 0), (7, G, 0))) == [to(bootstrap(grant=G))], "each is answered once"
        assert decode.hear(ask((9, 9, 0))) == []
        decode.hear(done(0, 1))
        assert decode.hear(ask((7, G, 0))) == [], "an old question"
        why = Cause(Code.STALE_GRANT, "room 7: prefill remembers nothing of it")
        assert decode.hear(ask((7, G, 1))) == [RoomFailed(G, why), to(abort(grant=G, cause=why))]
        assert decode.hear(ask((7, G, 1))) == []

    def test_a_room_whose_pages_are_not_taken_yet_has_nothing_to_offer(self, decode: LoneDecode) -> None:
        grant = decode.open()
        decode.asked()
        assert decode.hear(ask((7, grant, 0)), ask((7, grant, 1))) == [] and grant in decode.endpoint.rooms

    def test_only_a_rank_of_the_room_that_owes_something_may_ask(self) -> None:
        decode = LoneDecode().up(TWO)
        record = decode.lent()
        assert decode.hear(ask((7, record.grant, 0), source=OTHER_PREFILL), key=OTHER_KEY) == []
        both = decode.lent(8, TWO)
        decode.hear(chunk_done(0, 3, True, room=8, grant=both.grant))
        assert decode.hear(ask((8, both.grant, 1))) == [] and not both.state.cause, "it may forget it"
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

    def test_close_hangs_up_on_all(self) -> None:
        decode = LoneDecode().up(TWO)
        decode.endpoint.close(decode.now)
        assert decode.asked() == [HangUp(KEY), StopWatch(KEY), HangUp(OTHER_KEY), StopWatch(OTHER_KEY)]

    def test_a_room_may_end_while_others_are_dealt_with(self, decode: LoneDecode) -> None:
        rooms = [decode.open(room) for room in range(TICK_WORK + 2)]
        decode.endpoint.leave(decode.now)
        assert list(decode.endpoint.rooms) == rooms[-2:]
        decode.close(rooms[-2])
        decode.tick()
        assert not decode.endpoint.rooms and decode.counts.endings["aborted:shutdown"] == TICK_WORK + 1

    def test_and_so_may_its_loans(self, decode: LoneDecode) -> None:
        """The link is lost, and the last chunk of a room has come before its turn."""
        rooms = [decode.lent(room) for room in range(TICK_WORK + 3)]
        grants = [record.grant for record in rooms]
        decode.hear(registered(source=OTHER_PREFILL, asked=PREFILL))
        landed = decode.hear(chunk_done(0, 3, True, room=TICK_WORK + 2, grant=grants[-1]))
        decode.tick()
        assert RoomLanded(grants[-1], b"") in landed and decode.counts.endings["success"] == 1
        assert decode.counts.endings["lost:peer_lost"] == TICK_WORK + 2 and len(decode.core.ledger) == TICK_WORK + 2

    def test_close_hangs_up_and_leaves_loans_unproven(self, decode: LoneDecode) -> None:
        lent, waiting = decode.lent(7), decode.open(8)
        decode.asked()
        quarantined = [QuarantinePages(lent.grant), RoomEnded(lent.grant)]
        decode.endpoint.close(decode.now)
        assert decode.asked()[-4:] == [RoomEnded(waiting), HangUp(KEY), *quarantined]
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


def test_the_story_tells_what_happened_to_a_room(decode: LoneDecode) -> None:
    record = decode.lent()
    decode.hear(done(0, 1), done(1, 2, True))
    assert [line.what for line in record.story.lines()] == ["lent", "chunk_landed"], "the last one, and its end"


def test_its_times_and_bounds_have_defaults() -> None:
    decode = LoneDecode(timing=None)
    assert decode.core.timing == Timing() and decode.endpoint.bounds == Bounds()
