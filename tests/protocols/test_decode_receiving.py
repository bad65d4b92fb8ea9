"""A room at decode: announced, lent, filled by chunks, and ended once (I1, I2, I4, I8)."""

from __future__ import annotations

from typing import Any

import pytest

from kvflow.protocols.commands import (
    FreePages,
    Linked,
    RoomBegun,
    RoomEnded,
    RoomFailed,
    RoomLanded,
    StopVerifying,
    VerifyChunk,
)
from kvflow.protocols.decode.records import Prompt
from kvflow.protocols.errors import (
    Cause,
    Code,
    LayoutError,
    LostError,
    MisuseError,
    QuarantineError,
)
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire.messages import GrantId
from tests.protocols.alone import (
    BROKEN,
    DIGEST,
    GONE,
    ONE,
    OTHER_KEY,
    OTHER_PREFILL,
    SERVED,
    TOKENS,
    TWO,
    G,
    LoneDecode,
    abort,
    ack,
    announce,
    ask,
    beat,
    begun,
    bootstrap,
    chunk_done,
    done,
    failed,
    indices,
    other,
    over,
    registered,
    to,
)


class TestOpening:
    def test_a_room_that_is_lent_at_once_needs_no_announcement(self, decode: LoneDecode) -> None:
        assert decode.open(announce=False) == G and decode.asked() == [Linked(G)]
        assert decode.lend(G) == [to(bootstrap(grant=G))]
        assert decode.counts.rooms_opened == 2 and list(decode.endpoint.rooms) == [G]

    def test_where_a_link_is_missing_it_is_announced_all_the_same(self) -> None:
        decode = LoneDecode().up(size=2)
        grant = decode.open(ranks=TWO, announce=False)
        told = decode.asked()
        assert told[2:] == [
            to(announce(grant=grant)),
            other(announce(grant=grant, source=OTHER_PREFILL)),
        ]
        told = decode.hear(
            registered(source=OTHER_PREFILL, rank=1, size=2, fresh_from=grant), key=OTHER_KEY
        )
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
        """A recalled loan counts once its Abort is repeated without an answer."""
        decode = LoneDecode(bounds=Bounds(quarantine_share=0.2)).up()  # three pages of sixteen
        first, second = decode.lent(7), decode.lent(8)
        decode.close(first.grant)
        decode.tick(0.25)
        decode.close(second.grant)
        decode.lent(9)
        decode.tick(0.25)
        decode.tick()  # both Aborts are repeated, the second one early
        assert decode.core.ledger.overdue_pages == 3
        decode.lent(10)
        assert decode.core.ledger.quarantined_pages == 6
        decode.tick(1.0)
        decode.tick()
        with pytest.raises(QuarantineError, match="6 pages are in quarantine, more than 3"):
            decode.open(11)
        sent = [command for command in decode.asked() if isinstance(command, tuple)]
        assert len(sent) == 1 and sent[0][1].cause.code is Code.CAPACITY
        assert FreePages(first.grant) in decode.hear(ack(grant=first.grant))
        decode.lent(12)


class TestBeginning:
    def test_it_is_told_once(self, decode: LoneDecode) -> None:
        grant = decode.open()
        decode.asked()
        assert decode.hear(begun(grant=grant)) == [RoomBegun(grant)]
        assert decode.hear(begun(grant=grant)) == [], "repeated"
        assert decode.hear(begun(room=8, grant=grant)) == decode.hear(begun(grant=grant + 1)) == []
        assert decode.counts.dropped["stale"] == 2

    def test_every_rank_has_to_say_so(self) -> None:
        decode = LoneDecode().up(size=2)
        grant = decode.open(ranks=TWO)
        decode.hear(
            registered(source=OTHER_PREFILL, rank=1, size=2, fresh_from=grant), key=OTHER_KEY
        )
        mine, theirs = begun(grant=grant), begun(grant=grant, rank=1, source=OTHER_PREFILL)
        assert decode.hear(mine, mine) == []
        assert decode.hear(theirs, key=OTHER_KEY) == [RoomBegun(grant)]

    def test_a_room_that_has_lent_or_drains_is_not_told(self, decode: LoneDecode) -> None:
        first, second = decode.lent(7), decode.lent(8)
        assert decode.hear(begun(room=7, grant=first.grant)) == []
        decode.close(second.grant)
        decode.asked()
        assert second.phase is DecodePhase.DRAINING
        assert decode.hear(begun(room=8, grant=second.grant)) == []


class TestLending:
    def test_a_room_in_a_pool_with_rows_ends_with_its_row(self) -> None:
        layout = build_layout([("k", "uint8", (8,))], page_size=4, num_pages=16, num_rows=2)
        decode = LoneDecode(layout=layout).up()
        grant = decode.open()
        text = "room 7: 4 pages and 0 rows for a room of 3 pages and 1 row"
        with pytest.raises(MisuseError, match=text):
            decode.lend(grant, (7, 2, 5, 9))
        with pytest.raises(LayoutError, match="place 5 of space 'pages' follows place 17 of space"):
            decode.lend(grant, (7, 2, 17, 5))
        decode.lend(grant, (7, 2, 5, 17))
        lease = decode.endpoint.rooms[grant].lease
        assert (lease.counts, lease.num_pages) == ((3, 1), 4)

    def test_a_prefix_can_grow_until_pages_are_lent(self, decode: LoneDecode) -> None:
        grant = decode.open()
        assert decode.endpoint.shorten(grant, 8) == (1,)
        decode.lend(grant, (7,))
        with pytest.raises(MisuseError, match="room 7: its pages have been lent, with the prefix"):
            decode.endpoint.shorten(grant, 8)

    def test_once_and_after_linked(self, decode: LoneDecode) -> None:
        fresh = LoneDecode()
        grant = fresh.open()
        with pytest.raises(MisuseError, match="room 7: pages can be lent once, after Linked"):
            fresh.lend(grant)
        grant = decode.open()
        with pytest.raises(MisuseError, match="room 7: 2 pages for a room of 3 pages"):
            decode.lend(grant, (1, 2))
        decode.lend(grant)
        with pytest.raises(MisuseError, match="room 7: pages can be lent once, after Linked"):
            decode.lend(grant)

    def test_too_late(self, decode: LoneDecode) -> None:
        grant = decode.open()
        decode.asked()
        told, *ended = over(grant, GONE)
        assert decode.close(grant) == [told, to(abort(grant=grant)), *ended]
        assert decode.endpoint.lend(grant, indices(1, 2, 3), decode.now) is False
        assert decode.asked() == []
        assert decode.close(grant) == [] and decode.hear(ack(grant=grant)) == []

    def test_prefill_is_given_time_to_answer_it(self, decode: LoneDecode) -> None:
        grant = decode.open()
        decode.now += 0.375
        decode.lend(grant)
        assert to(ask((7, grant, 0))) not in decode.tick(0.375)
        assert to(ask((7, grant, 0))) in decode.tick(0.125)

    def test_a_rank_that_has_ended_its_half_is_offered_nothing(self, two: LoneDecode) -> None:
        grant = two.open(ranks=TWO)
        two.asked()
        assert two.hear(failed(BROKEN, grant=grant)) == [
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
        assert decode.counts.endings == {"aborted:client_gone": 1, "success": 1}
        assert decode.counts.bytes_moved == 3
        assert len(decode.core.ledger) == 0
        assert not decode.endpoint.rooms
        assert len(decode.core.deadlines) == 2
        assert decode.tick(1)[-1] == to(beat(3))

    def test_repeated_missing_and_foreign_ones_count_for_nothing(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.hear(done(0, 1))
        for message in (done(0, 1), done(2, 1), done(1, 1, room=8), chunk_done(1, 1, grant=9)):
            assert decode.hear(message) == []
        assert decode.counts.stale == 4 and record.state.filled == ((1,),)

    def test_a_rank_in_doubt_lands_nothing_more(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.hear(ack(grant=G, drained=False))
        assert decode.hear(done(0, 1), done(0, 3, True)) == [] and decode.counts.stale == 2
        assert record.state.filled == ((0,),) and len(decode.core.ledger) == 1

    def test_what_does_not_add_up_ends_the_room(self, decode: LoneDecode) -> None:
        record = decode.lent()
        told = decode.hear(done(0, 2, True))
        why = Cause(Code.PROTOCOL_ERROR, "rank 0 filled 2 pages of 3 by chunk 0")
        # Its last chunk has proven its writes.
        assert told == [RoomFailed(G, why), FreePages(G), RoomEnded(G)]
        assert record.phase is DecodePhase.ABORTED

    def test_the_hand_over_is_the_first_ranks_that_brings_one(self, two: LoneDecode) -> None:
        record = two.lent(ranks=TWO)
        two.hear(chunk_done(0, 3, True, b"first", grant=record.grant))
        told = two.hear(
            chunk_done(0, 3, True, b"second", grant=record.grant, source=OTHER_PREFILL, rank=1),
            key=OTHER_KEY,
        )
        assert told == [RoomLanded(record.grant, b"first"), RoomEnded(record.grant)]

    def test_ranks_fill_the_room_each_at_its_own_pace(self, two: LoneDecode) -> None:
        record = two.lent(ranks=TWO)
        two.hear(chunk_done(0, 2, grant=record.grant, source=OTHER_PREFILL, rank=1), key=OTHER_KEY)
        assert record.next_seq == [0, 1]
        assert [record.spans_of(rank, (1,)) for rank in (0, 1)] == [((0, 1),), ((2, 3),)]


def summed(
    decode: LoneDecode,
    seq: int,
    checksum: bytes,
    rank: int = 0,
    grant: GrantId = G,
    error: str = "",
) -> list[Any]:
    decode.endpoint.chunk_summed(grant, rank, seq, checksum, decode.now, error=error)
    return decode.asked()


class TestVerifiedChunks:
    """With `verify` a chunk lands when the checksum of what is there agrees with prefill's."""

    @pytest.fixture
    def decode(self) -> LoneDecode:
        return LoneDecode(verify=True).up()

    def test_they_land_in_the_order_they_came_in(self, decode: LoneDecode) -> None:
        record = decode.lent()
        assert decode.hear(done(0, 2, checksum=b"a")) == [VerifyChunk(G, 0, 0, ((0, 2),), SERVED)]
        assert decode.hear(done(1, 1, True, b"h", checksum=b"b")) == [
            VerifyChunk(G, 0, 1, ((2, 3),), SERVED)
        ]
        assert len(decode.core.ledger) == 0, "the last one is proof, whatever its checksum says"
        assert summed(decode, 1, b"b") == [] and record.state.filled == ((0,),)
        assert summed(decode, 0, b"a") == [RoomLanded(G, b"h"), RoomEnded(G)]
        assert summed(decode, 0, b"a") == []

    @pytest.mark.parametrize(
        ("sent", "found", "code", "text"),
        [
            (
                b"a",
                b"b",
                Code.TRANSFER_ERROR,
                "chunk 0 of rank 0: checksum 61 at prefill, 62 at decode",
            ),
            (
                b"",
                b"b",
                Code.TRANSFER_ERROR,
                "chunk 0 of rank 0: prefill sends no checksum, and this decode verifies",
            ),
            (
                b"a",
                b"",
                Code.ENGINE_ERROR,
                "chunk 0 of rank 0: the checksum of the landed pages could not be computed",
            ),
        ],
    )
    def test_a_difference_ends_the_room(
        self, decode: LoneDecode, sent: bytes, found: bytes, code: Code, text: str
    ) -> None:
        decode.counts.mismatched = 2  # earlier ones
        decode.lent()
        decode.hear(done(0, 1, checksum=sent), done(1, 1, checksum=b"c"))
        stop, failure, told = summed(decode, 0, found)
        assert (stop, told) == (StopVerifying(G), to(abort(grant=G, cause=failure.cause)))
        assert failure.cause.code is code and failure.cause.text.startswith(text)
        assert not failure.cause.text.endswith(": ")
        assert decode.counts.mismatched == 3
        assert summed(decode, 1, b"c") == [] and summed(decode, 0, sent or b"x") == []

    def test_the_sums_of_other_chunks_are_not_its_own(self) -> None:
        decode = LoneDecode(verify=True).up(TWO)
        record = decode.lent(ranks=TWO)
        grant = record.grant
        decode.hear(
            chunk_done(0, 1, grant=grant, checksum=b"a"),
            chunk_done(1, 1, grant=grant, checksum=b"b"),
        )
        decode.hear(
            chunk_done(0, 2, grant=grant, checksum=b"c", source=OTHER_PREFILL, rank=1),
            chunk_done(1, 1, True, grant=grant, checksum=b"d", source=OTHER_PREFILL, rank=1),
            key=OTHER_KEY,
        )
        found = [(check.rank, check.message.seq) for check in record.checks]
        assert found == [(0, 0), (0, 1), (1, 0), (1, 1)] and record.next_seq == [2, 2]
        assert [record.spans_of(rank, (1,)) for rank in (0, 1)] == [((2, 3),), None]
        assert summed(decode, 0, b"c", 1, grant) == [] == summed(decode, 1, b"b", 0, grant)
        assert record.state.filled == ((0,), (0,))
        assert summed(decode, 0, b"a", 0, grant) == [] and record.state.filled == ((2,), (2,))
        summed(decode, 1, b"d", 1, grant)
        assert record.state.finished == 0b10 and decode.counts.mismatched == 0

    def test_a_chunk_without_pages_has_no_sum(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.hear(done(0, 3, checksum=b"a"))
        assert decode.hear(done(1, 0, True, b"h")) == [VerifyChunk(G, 0, 1, (), SERVED)]
        assert summed(decode, 0, b"a") == []
        assert summed(decode, 1, b"") == [RoomLanded(G, b"h"), RoomEnded(G)]

    def test_prefill_gives_up_a_room_while_the_last_sum_runs(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.hear(done(0, 3, True, checksum=b"a"))
        ended = [StopVerifying(G), RoomFailed(G, BROKEN), FreePages(G), RoomEnded(G)]
        assert decode.hear(failed(BROKEN, grant=G)) == ended, "its loan has ended already"

    def test_a_room_that_ends_stops_them(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.hear(done(0, 1, checksum=b"a"))
        assert decode.close(G) == [StopVerifying(G), RoomFailed(G, GONE), to(abort(grant=G))]
        assert summed(decode, 0, b"z") == [] and decode.counts.mismatched == 0
        assert record.state.filled == ((0,),)
        assert summed(decode, 0, b"a", grant=GrantId(99)) == []


class TestStagedRooms:
    """Where pages are `staged`, a chunk lands when it was copied to its use; no sum is compared."""

    @pytest.fixture
    def decode(self) -> LoneDecode:
        return LoneDecode(staged=True).up()

    def test_they_land_when_they_have_been_brought(self, decode: LoneDecode) -> None:
        record = decode.lent()
        assert decode.hear(done(0, 2)) == [VerifyChunk(G, 0, 0, ((0, 2),), SERVED)]
        assert decode.hear(done(1, 1, True, b"h", checksum=b"of prefill")) == [
            VerifyChunk(G, 0, 1, ((2, 3),), SERVED)
        ]
        # Proof, but nothing is there yet.
        assert len(decode.core.ledger) == 0 and record.state.filled == ((0,),)
        assert summed(decode, 1, b"brought") == [] and record.state.filled == ((0,),)
        assert summed(decode, 0, b"brought") == [RoomLanded(G, b"h"), RoomEnded(G)]

    def test_one_that_was_not_brought_ends_the_room(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.hear(done(0, 1))
        stop, failure, told = summed(decode, 0, b"", error="the device is lost")
        assert (stop, told) == (StopVerifying(G), to(abort(grant=G, cause=failure.cause)))
        text = (
            "chunk 0 of rank 0: the pages could not be brought to where they are used: the device "
            "is lost"
        )
        assert failure.cause == Cause(Code.ENGINE_ERROR, text)
        assert decode.counts.mismatched == 0, "nothing was compared"

    def test_where_both_are_asked_for_sums_are_compared(self) -> None:
        decode = LoneDecode(staged=True, verify=True).up()
        decode.lent()
        decode.hear(done(0, 1, checksum=b"a"))
        assert summed(decode, 0, b"b") and decode.counts.mismatched == 1


def test_the_story_tells_what_happened_to_a_room(decode: LoneDecode) -> None:
    record = decode.lent()
    decode.hear(done(0, 1), done(1, 2, True))
    # The last one, and its end.
    assert [line.what for line in record.story.lines()] == ["lent", "chunk_landed"]


def test_its_times_and_bounds_have_defaults() -> None:
    decode = LoneDecode(timing=None)
    assert decode.core.timing == Timing()
    assert decode.endpoint.bounds == Bounds()
    assert not decode.core.verify
    assert Prompt(TOKENS, DIGEST).prefix_tokens == 0
