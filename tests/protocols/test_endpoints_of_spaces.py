"""Rooms of three spaces, at either endpoint: each space is counted apart from the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvflow.protocols.commands import (
    FreePages,
    RoomDone,
    RoomEnded,
    RoomFailed,
    RoomLanded,
    RoomMatched,
    RoomReleased,
    StopVerifying,
    VerifyChunk,
)
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import (
    Cause,
    Code,
    LayoutError,
    MisuseError,
    QuarantineError,
)
from kvflow.protocols.limits import Bounds
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.pages.layout import PoolLayout, resized
from kvflow.protocols.pages.spaces import Counts
from kvflow.protocols.ports import UnprovenLoan, WriteOutcome
from kvflow.protocols.prefill.records import PrefillRoomRecord, pinned_places
from tests.protocols.alone import (
    ADDRESS,
    DECODE,
    GONE,
    PREFILL,
    START,
    THREE,
    TOKENS,
    G,
    LoneDecode,
    LonePrefill,
    abort,
    ack,
    bootstrap,
    chunk_done,
    done,
    failed,
    indices,
    registered,
    to,
)
from tests.protocols.test_prefill_sending import start

# Three pages, three of the window, and a row: page n of the window is 16 + n, row n is 25 + n.
ROOM = (7, 2, 5, 20, 16, 24, 26)
WANTED = (3, 3, 1)
SERVED = served_of(THREE)


def prefill_of(layout: PoolLayout = THREE, **more: Any) -> LonePrefill:
    prefill = LonePrefill(layout=layout, **more)
    prefill.register(layout=layout)
    prefill.endpoint.route_opened(DECODE, prefill.now)
    prefill.asked()
    return prefill


def matched(prefill: LonePrefill) -> PrefillRoomRecord:
    prefill.hear(bootstrap(pages=ROOM))
    record = prefill.open()
    assert prefill.asked() == [RoomMatched(record.serial, 0)]
    return record


def decode_of(layout: PoolLayout = THREE, **more: Any) -> LoneDecode:
    """As `LoneDecode.up`, over a rank that serves all of this layout."""
    decode = LoneDecode(layout=layout, **more)
    grant = decode.open(999)
    answer = registered(fresh_from=decode.core.next_grant)
    decode.hear(msgspec.structs.replace(answer, served=served_of(layout)))
    decode.close(grant)
    decode.hear(ack(999, grant))
    return decode


def lent(decode: LoneDecode, room: int = 7, pages: tuple[int, ...] = ROOM) -> DecodeRoomRecord:
    grant = decode.open(room)
    decode.lend(grant, pages)
    return decode.endpoint.rooms[grant]


class TestPrefill:
    def test_chunks_may_have_places_of_some_spaces_only(self) -> None:
        prefill = prefill_of()
        record = matched(prefill)
        assert (record.wanted, record.placed) == (WANTED, (0, 0, 0))
        assert prefill.send(record, 18, 17) == [start(1, 1, (18, 17), (20, 16))]
        assert prefill.send(record, 1, 3) == [start(2, 1, (1, 3), (7, 2))]
        assert record.placed == (2, 2, 0)
        last = prefill.send(record, 4, 19, 25, last=True, handoff=b"h")
        assert last == [start(3, 1, (4, 19, 25), (5, 24, 26))]
        assert record.placed == WANTED
        assert prefill.ended(1) == [chunk_done(0, (0, 2, 0))]
        assert prefill.ended(2) == [chunk_done(1, (2, 0, 0))]
        told = [RoomDone(record.serial), RoomReleased(record.serial)]
        assert prefill.ended(3) == [chunk_done(2, (1, 1, 1), True, b"h"), *told]
        ((ending, _),) = prefill.counts.ended
        assert ending.counts == WANTED

    def test_a_last_chunk_may_bring_the_row_alone(self) -> None:
        prefill = prefill_of()
        record = matched(prefill)
        prefill.send(record, 1, 2, 3, 16, 17, 18)
        assert prefill.send(record, 27, last=True) == [start(2, 1, (27,), (26,))]

    @pytest.mark.parametrize(
        ("pages", "last", "text"),
        [
            ((17, 18), False, "chunk of 0 pages, 2 'window' pages and 0 rows, 3 pages, 1 'window'"),
            ((1, 17, 18), False, "chunk of 1 pages, 2 'window' pages and 0 rows"),
            ((1, 2, 3, 25), True, "chunk of 3 pages, 0 'window' pages and 1 row, 3 pages, 1 'win"),
            ((1, 2, 18, 25), True, "chunk of 2 pages, 1 'window' pages and 1 row"),
            ((1, 25), False, "a row in a chunk that is not the last"),
        ],
    )
    def test_a_chunk_that_overfills_or_lacks_one_space_is_refused(
        self, pages: tuple[int, ...], last: bool, text: str
    ) -> None:
        prefill = prefill_of()
        record = matched(prefill)
        prefill.send(record, 19, 20)
        with pytest.raises(MisuseError, match=f"^room 7: {text}"):
            prefill.send(record, *pages, last=last)
        assert record.placed == (0, 2, 0) and len(record.chunks) == 1

    def test_places_out_of_order_are_refused(self) -> None:
        prefill = prefill_of()
        record = matched(prefill)
        with pytest.raises(LayoutError, match="place 1 of space 'pages' follows place 19 of space"):
            prefill.send(record, 19, 1)
        assert record.placed == (0, 0, 0) and not record.chunks

    @pytest.mark.parametrize(
        ("pages", "text"),
        [
            (
                (7, 2, 5, 20, 16, 26),
                "3 pages, 2 'window' pages and 1 row lent, 11 tokens need 3 pages, 3 'window' "
                "pages and 1 row",
            ),
            ((7, 2, 5, 20, 16, 24), "3 pages, 3 'window' pages and 0 rows lent"),
            ((7, 2, 5, 20, 16, 24, 23), "3 pages, 4 'window' pages and 0 rows lent"),
            ((7, 2, 20, 5, 16, 24, 26), "place 5 of space 'pages' follows place 20 of space 'wind"),
            ((7, 2, 5, 20, 16, 24, 28), "index 28 is outside 0..27"),
        ],
    )
    def test_an_offer_with_other_places_is_refused_by_name(
        self, pages: tuple[int, ...], text: str
    ) -> None:
        prefill = prefill_of()
        record = prefill.open()
        refusal, end, *told = prefill.hear(bootstrap(pages=pages))
        assert text in refusal.cause.text and refusal.cause.code is Code.BAD_REQUEST
        assert (refusal, end) == (failed(refusal.cause), ack())
        assert told == [] and record.phase is PrefillPhase.EXPECTED

    def test_a_peer_of_another_window_is_refused(self) -> None:
        prefill = LonePrefill(layout=THREE)
        window = msgspec.structs.replace(THREE.spaces[1], window=7)
        spaces = (THREE.spaces[0], window, THREE.spaces[2])
        (answer,) = prefill.register(layout=msgspec.structs.replace(THREE, spaces=spaces))
        assert "window: window: prefill 5, decode 7" in answer.refusal

    def test_sizes_of_spaces_may_differ(self) -> None:
        """The two sides number the places of later spaces differently."""
        prefill, theirs = LonePrefill(layout=THREE), resized(THREE, (4, 5, 1))
        prefill.register(layout=theirs)
        prefill.endpoint.route_opened(DECODE, prefill.now)
        prefill.hear(bootstrap(pages=(3, 2, 1, 4, 6, 8, 9)))
        record = prefill.open()
        prefill.asked()
        assert prefill.send(record, 0, 1, 16) == [start(1, 1, (0, 1, 16), (3, 2, 4))]
        assert prefill.send(record, 2, 17, 18, 27, last=True) == [
            start(2, 1, (2, 17, 18, 27), (1, 6, 8, 9))
        ]

    @pytest.mark.parametrize(("share", "refusal"), [(0.3, "asked for 6, limit 4"), (0.34, "")])
    def test_writes_that_do_not_end_are_counted_by_space(self, share: float, refusal: str) -> None:
        """Of the window with its nine pages three are read, and three of sixteen others."""
        prefill = prefill_of(bounds=Bounds(pinned_share=share))
        record = matched(prefill)
        prefill.send(record, 1, 2, 3, 16, 17, 18)
        prefill.hear(abort())
        assert pinned_places(prefill.core.writes.values(), 3) == (3, 3, 0)
        assert pinned_places([], 3) == (0, 0, 0)
        prefill.tick(prefill.core.timing.repeat_after_s)
        answers = prefill.hear(bootstrap(8, 2, pages=(1, 3, 4, 17, 18, 19, 25)))
        assert bool(answers) == bool(refusal)
        assert not refusal or refusal in answers[0].cause.text
        prefill.ended(1, WriteOutcome.UNPROVEN)
        assert pinned_places(prefill.core.writes.values(), 3) == (0, 0, 0)


class TestDecode:
    def test_a_room_lands_when_every_space_is_filled(self) -> None:
        decode = decode_of()
        record = lent(decode)
        assert (record.counts, record.num_pages, record.lease.counts) == (WANTED, 7, WANTED)
        assert decode.hear(done(0, (0, 2, 0)), done(1, (3, 0, 0))) == []
        assert record.state.filled == ((3, 2, 0),)
        assert decode.hear(done(2, (0, 1, 1), True, b"h")) == [RoomLanded(G, b"h"), RoomEnded(G)]
        assert decode.counts.ended[-1][0].counts == WANTED
        assert len(decode.core.ledger) == 0

    @pytest.mark.parametrize(
        "pages",
        [(7, 2, 5, 20, 16, 24), (7, 2, 5, 20, 16, 24, 23), (7, 2, 5, 20, 16, 25, 26), (7, 2, 5)],
    )
    def test_other_places_than_it_needs_are_not_lent(self, pages: tuple[int, ...]) -> None:
        decode = decode_of()
        grant = decode.open()
        with pytest.raises(MisuseError, match="for a room of 3 pages, 3 'window' pages and 1 row"):
            decode.lend(grant, pages)
        with pytest.raises(LayoutError, match="place 5 of space 'pages' follows place 20"):
            decode.lend(grant, (7, 2, 20, 5, 16, 24, 26))
        record = decode.endpoint.rooms[grant]
        assert record.phase is DecodePhase.BOOTSTRAPPING and record.lease.counts == ()
        decode.lend(grant, ROOM)

    def test_a_prefix_shortens_every_space(self) -> None:
        decode = decode_of()
        grant = decode.open()
        assert decode.endpoint.shorten(grant, 8) == (1, 2, 1)
        decode.lend(grant, (7, 16, 17, 25))
        record = decode.endpoint.rooms[grant]
        assert record.state.pages == record.lease.counts == (1, 2, 1)
        assert decode.hear(done(0, (1, 2, 1), True)) == [RoomLanded(G, b""), RoomEnded(G)]

    @pytest.mark.parametrize(
        ("counts", "last", "said"),
        [
            ((0, 2, 0), False, "0 + 4 + 0"),
            ((3, 1, 2), False, "3 + 3 + 2"),
            ((4, 0, 0), False, "4 + 2 + 0"),
            ((3, 0, 1), True, "3 + 2 + 1"),
            ((3, 1, 0), True, "3 + 3 + 0"),
            ((2, 1, 1), True, "2 + 3 + 1"),
            # Another number of counts than spaces.
            ((3,), False, "3"),
            ((1, 1), False, "1 + 1"),
            ((0, 0, 0, 0), False, "0 + 0 + 0 + 0"),
            ((3, 1, 1, 0), True, "3 + 1 + 1 + 0"),
        ],
    )
    @pytest.mark.parametrize("more", [{}, {"verify": True}, {"staged": True}])
    def test_counts_that_do_not_add_up_end_the_room_and_its_loan_waits_for_proof(
        self, counts: Counts, last: bool, said: str, more: dict[str, Any]
    ) -> None:
        decode = decode_of(**more)
        record = lent(decode)
        decode.hear(done(0, (0, 2, 0), checksum=b"a"))
        if more:
            decode.endpoint.chunk_summed(G, 0, 0, b"a", decode.now)
            assert record.state.filled == ((0, 2, 0),)
        told = decode.hear(done(1, counts, last, checksum=b"b"))
        if told and isinstance(told[0], VerifyChunk):
            # What was sent fits, and is not all.
            assert last and record.receiving
            decode.endpoint.chunk_summed(G, 0, 1, b"b", decode.now)
            told = decode.asked()
        text = f"rank 0 filled {said} pages of 3 + 3 + 1 by chunk 1"
        why = Cause(Code.PROTOCOL_ERROR, text)
        if last:  # It proves that its writes are over.
            assert told == [RoomFailed(G, why), FreePages(G), RoomEnded(G)]
            return
        assert told == [RoomFailed(G, why), to(abort(grant=G, cause=why))]
        ledger = decode.core.ledger
        assert (len(ledger), ledger.quarantined) == (1, WANTED) and record.phase.name == "DRAINING"
        decode.hear(done(2, (3, 1, 1)), done(2, (1, 1)))  # which is stale, and no proof
        assert ledger.quarantined == WANTED
        assert decode.hear(ack(grant=G)) == [FreePages(G), RoomEnded(G)]
        assert (len(ledger), ledger.quarantined) == (0, (0, 0, 0))


class TestVerified:
    def test_each_chunk_is_summed_where_its_places_are(self) -> None:
        decode = decode_of(verify=True)
        record = lent(decode)
        assert decode.hear(done(0, (0, 2, 0), checksum=b"a")) == [
            VerifyChunk(G, 0, 0, ((3, 5),), SERVED)
        ]
        assert decode.hear(done(1, (2, 1, 0), checksum=b"b")) == [
            VerifyChunk(G, 0, 1, ((0, 2), (5, 6)), SERVED)
        ]
        decode.endpoint.chunk_summed(G, 0, 0, b"a", decode.now)
        assert record.state.filled == ((0, 2, 0),)
        assert decode.hear(done(2, (1, 0, 1), True, checksum=b"c")) == [
            VerifyChunk(G, 0, 2, ((2, 3), (6, 7)), SERVED)
        ]
        decode.endpoint.chunk_summed(G, 0, 2, b"c", decode.now)
        decode.endpoint.chunk_summed(G, 0, 1, b"b", decode.now)
        assert decode.asked() == [RoomLanded(G, b""), RoomEnded(G)]

    @pytest.mark.parametrize("counts", [(0, 2, 0), (1, 1), (9, 9, 9, 9)])
    @pytest.mark.parametrize("after", [(0, 1, 0), (3, 1, 1), (1,)])
    def test_one_that_does_not_fit_ends_the_room_after_those_before_it(
        self, counts: Counts, after: Counts
    ) -> None:
        """Nothing of it is summed, and nothing that comes later is."""
        decode = decode_of(verify=True)
        record = lent(decode)
        decode.hear(done(0, (0, 2, 0), checksum=b"a"))
        later = decode.hear(done(1, counts, checksum=b"b"), done(2, after, checksum=b"c"))
        assert later == [] and record.receiving and record.next_seq == [3]
        decode.endpoint.chunk_summed(G, 0, 0, b"a", decode.now)
        stop, failure, told = decode.asked()
        assert (stop, told) == (StopVerifying(G), to(abort(grant=G, cause=failure.cause)))
        assert failure.cause.code is Code.PROTOCOL_ERROR and decode.counts.mismatched == 0
        assert decode.core.ledger.quarantined == WANTED

    def test_a_difference_before_one_that_does_not_fit_is_the_cause(self) -> None:
        decode = decode_of(verify=True)
        lent(decode)
        decode.hear(done(0, (0, 2, 0), checksum=b"a"), done(1, (0, 2, 0), checksum=b"b"))
        decode.endpoint.chunk_summed(G, 0, 0, b"x", decode.now)
        _, failure, _ = decode.asked()
        assert failure.cause.code is Code.TRANSFER_ERROR and decode.counts.mismatched == 1


def test_a_chunk_of_too_many_pages_is_not_summed_in_a_pool_of_one_space() -> None:
    decode = LoneDecode(verify=True).up()
    decode.lent()
    text = "rank 0 filled 4 pages of 3 by chunk 0"
    failure, _ = decode.hear(done(0, 4, checksum=b"a"))
    assert failure == RoomFailed(G, Cause(Code.PROTOCOL_ERROR, text))


# --- quarantine


def in_quarantine(decode: LoneDecode, room: int, pages: tuple[int, ...], prefix: int = 0) -> None:
    """A room that lends these pages is aborted, and prefill cannot say that it writes no more."""
    grant = decode.open(room, prefix=prefix)
    decode.lend(grant, pages)
    decode.close(grant)
    decode.hear(ack(room, grant, drained=False))


def test_one_full_space_in_quarantine_is_enough_to_refuse_rooms() -> None:
    decode = decode_of()
    ledger = decode.core.ledger
    assert ledger.quarantine_limit == (8, 4, 1)
    in_quarantine(decode, 7, (25,), prefix=TOKENS)
    assert ledger.quarantined == ledger.overdue == (0, 0, 1)
    grant = decode.open(8, prefix=TOKENS)
    decode.lend(grant, (26,))
    decode.close(grant)
    decode.asked()
    assert (ledger.quarantined, ledger.overdue) == ((0, 0, 2), (0, 0, 1))
    decode.close(decode.open(9))  # the second may still be answered
    decode.hear(ack(8, grant, drained=False))
    with pytest.raises(QuarantineError, match="2 pages are in quarantine, more than 1"):
        decode.open(10)
    assert decode.endpoint.rooms == {}


def test_a_window_in_quarantine_is_counted_with_its_own_limit() -> None:
    spaces = (*THREE.spaces[:2], msgspec.structs.replace(THREE.spaces[2], count=30))
    decode = decode_of(msgspec.structs.replace(THREE, spaces=spaces))
    in_quarantine(decode, 7, ROOM)
    in_quarantine(decode, 8, (1, 17, 18, 27), prefix=8)
    ledger = decode.core.ledger
    assert ledger.overdue == (4, 5, 2) and ledger.quarantine_limit == (8, 4, 15)
    with pytest.raises(QuarantineError, match="5 pages are in quarantine, more than 4"):
        decode.open(9)


def loan(grant: int, *pages: int) -> UnprovenLoan:
    return UnprovenLoan(
        writer=ADDRESS,
        incarnation=PREFILL,
        control="tcp://there:1",
        rank=0,
        room=70 + grant,
        lease=(1, grant),
        pages=indices(*pages),
    )


@pytest.mark.parametrize("make", [decode_of, prefill_of])
def test_loans_of_an_earlier_node_count_in_their_spaces(make: Any) -> None:
    side = make()
    ledger, earlier = side.core.ledger, side.endpoint.earlier
    earlier.inherit([loan(1, 7, 20, 16, 26), loan(2, 27), loan(3)])
    assert ledger.quarantined == ledger.overdue == (1, 2, 2)
    (writer,) = earlier.writers.values()
    assert earlier.owed_by(writer) == (3, 5)
    with pytest.raises(QuarantineError, match="2 pages are in quarantine, more than 1"):
        ledger.check_quarantine()
    earlier.writer_died(writer.number)
    side.endpoint.tick(START)
    assert ledger.quarantined == ledger.overdue == (0, 0, 0)


def test_loans_in_another_pool_are_counted_by_its_numbers() -> None:
    """With staging, the pool that is lent from is smaller than that of an earlier node."""
    decode = decode_of(resized(THREE, (4, 3, 1)))
    decode.endpoint.earlier.inherit([loan(1, 7, 20, 26)], THREE)
    assert decode.core.ledger.quarantined == (1, 1, 1)


def test_a_room_that_was_never_lent_is_in_no_space_of_the_quarantine() -> None:
    decode = decode_of()
    grant = decode.open()
    decode.close(grant, GONE)
    ledger = decode.core.ledger
    assert len(ledger) == 1 and ledger.quarantined == (0, 0, 0)
    decode.tick(60)
    assert ledger.overdue == (0, 0, 0)
