"""Rooms between pages of two sizes, at either endpoint: chunks are counted in the smaller pages."""

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
    RoomReleased,
    StartWrite,
    VerifyChunk,
)
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import CapacityError, Cause, Code, MisuseError
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.pages.fine import FinePages
from kvflow.protocols.pages.layout import PoolLayout, build_layout
from kvflow.protocols.prefill.records import PrefillRoomRecord, pinned_places
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.messages import Incarnation
from tests.protocols.alone import (
    DECODE,
    KEY,
    OTHER_KEY,
    SERVED,
    TWO,
    G,
    LoneDecode,
    LonePrefill,
    abort,
    ack,
    bootstrap,
    chunk_done,
    done,
    registered,
)

# The pages of the side that is not named have 4 tokens. A prompt has 11.
SMALL, LARGE = (
    build_layout([("k", "uint8", (8,))], page_size=size, num_pages=count)
    for size, count in ((2, 32), (8, 16))
)


def prefill_of(layout: PoolLayout) -> LonePrefill:
    prefill = LonePrefill()
    prefill.register(layout=layout)
    prefill.endpoint.route_opened(DECODE, prefill.now)
    return prefill


def acceptance(prefill: LonePrefill) -> wire.Registered:
    (found,) = [each for each in prefill.asked() if isinstance(each, wire.Registered)]
    assert not found.refusal
    return found


def matched(prefill: LonePrefill, pages: tuple[int, ...], prefix: int = 0) -> PrefillRoomRecord:
    prefill.asked()
    prefill.hear(bootstrap(pages=pages, prefix=prefix))
    record = prefill.open()
    prefill.asked()
    assert record.phase is PrefillPhase.WAITING_FOR_INPUT
    return record


def start(
    write: int, sources: tuple[int, ...], targets: tuple[int, ...], size: int, *held: int
) -> StartWrite:
    pages: Any = (sources, targets, (size,), held)
    return StartWrite(write, 1, DECODE, *pages)


class TestPrefill:
    @pytest.mark.parametrize(("layout", "sizes"), [(SMALL, (2,)), (LARGE, (4,))])
    def test_it_says_in_which_pages_it_counts(
        self, layout: PoolLayout, sizes: tuple[int, ...]
    ) -> None:
        accepted = acceptance(prefill_of(layout))
        assert accepted.page_sizes == sizes

    def test_of_equal_pages_it_says_nothing(self) -> None:
        same = LonePrefill().core.identity.layout
        assert acceptance(prefill_of(same)).page_sizes == ()

    def test_a_chunk_fills_a_part_of_a_large_page(self) -> None:
        """Large page n of decode has the pages 2n and 2n + 1 of four tokens."""
        prefill = prefill_of(LARGE)
        record = matched(prefill, (7, 2))
        assert (record.wanted, record.target_pages.tolist()) == ((3,), [14, 15, 4])
        assert prefill.send(record, 9) == [start(1, (9,), (14,), 4, 9)]
        assert prefill.send(record, 1, 5, last=True) == [start(2, (1, 5), (15, 4), 4, 1, 5)]
        assert record.placed == record.wanted
        assert prefill.ended(1) == [chunk_done(0, 1)]
        ending = [RoomDone(record.serial), RoomReleased(record.serial)]
        assert prefill.ended(2) == [chunk_done(1, 2, True), *ending]

    def test_a_page_fills_small_pages_after_a_prefix(self) -> None:
        """Decode has 6 tokens: half of our second page. It lacks 5, in three small pages."""
        prefill = prefill_of(SMALL)
        record = matched(prefill, (20, 3, 8), prefix=6)
        assert (record.wanted, record.target_pages.tolist()) == ((2,), [20, 3, 8])
        with pytest.raises(MisuseError, match="chunk of 3 pages, 2 pages of decode's are left"):
            prefill.send(record, 9, 1, 5, last=True)
        assert prefill.send(record, 9) == [start(1, (19,), (20,), 2, 9)]
        assert prefill.send(record, 5, last=True) == [start(2, (10, 11), (3, 8), 2, 5)]
        assert prefill.ended(1) == [chunk_done(0, 1)]
        assert prefill.ended(2)[0] == chunk_done(1, 2, True)

    def test_its_own_pages_count_while_a_write_for_an_ended_room_reads_them(self) -> None:
        prefill = prefill_of(SMALL)
        record = matched(prefill, tuple(range(6)))
        prefill.send(record, 9, 1)
        prefill.hear(abort())
        assert pinned_places(prefill.core.writes.values(), 1) == (2,)

    @pytest.mark.parametrize(
        ("layout", "pages", "prefix", "text"),
        [
            (LARGE, (7, 2, 3), 0, "3 pages lent, 11 tokens need 2 pages"),
            (LARGE, (7, 2), 4, "prefix_tokens 4 is neither a whole number of 8-token pages"),
            (LARGE, (7, 16), 0, "index 16 is outside 0..15"),
            (SMALL, (1, 2, 3), 0, "3 pages lent, 11 tokens need 6 pages"),
            (SMALL, (1, 2, 3, 4, 5), 3, "prefix_tokens 3 is neither a whole number of 2-token"),
            (SMALL, (1, 2, 3, 4, 5, 1), 0, "a page is named twice"),
        ],
    )
    def test_an_offer_is_checked_in_decodes_pages(
        self, layout: PoolLayout, pages: tuple[int, ...], prefix: int, text: str
    ) -> None:
        prefill = prefill_of(layout)
        prefill.asked()
        record = prefill.open()
        refusal, end, *_ = prefill.hear(bootstrap(pages=pages, prefix=prefix))
        assert text in refusal.cause.text and end == ack()
        assert record.phase is PrefillPhase.EXPECTED

    def test_a_room_of_too_many_small_pages_is_refused(self) -> None:
        ours = build_layout([("k", "uint8", (8,))], page_size=1, num_pages=16)
        theirs = build_layout([("k", "uint8", (8,))], page_size=1 << 16, num_pages=16)
        prefill = LonePrefill(layout=ours)
        prefill.register(layout=theirs)
        prefill.endpoint.route_opened(DECODE, prefill.now)
        prefill.asked()
        refusal, _ = prefill.hear(bootstrap(pages=tuple(range(9)), tokens=(1 << 19) + 1))
        assert refusal.cause.code is Code.BAD_REQUEST or refusal.cause.code is Code.CAPACITY
        assert "in the smaller of the two page sizes" in refusal.cause.text


def decode_of(*sizes: int, **more: Any) -> LoneDecode:
    """As `LoneDecode.up`, over a rank that counts in pages of these sizes."""
    decode = LoneDecode(**more)
    grant = decode.open(999)
    answer = registered(fresh_from=decode.core.next_grant)
    decode.hear(msgspec.structs.replace(answer, page_sizes=sizes))
    decode.close(grant)
    decode.hear(ack(999, grant))
    return decode


def lent(decode: LoneDecode, **more: Any) -> DecodeRoomRecord:
    grant = decode.open(**more)
    decode.lend(grant)
    return decode.endpoint.rooms[grant]


class TestDecode:
    def test_chunks_are_counted_in_small_pages_and_loans_in_its_own(self) -> None:
        decode = decode_of(2)
        record = lent(decode)
        assert record.state.pages == (6,) and record.counts == record.lease.counts == (3,)
        decode.hear(done(0, 1), done(1, 3))
        assert record.state.filled == ((4,),)
        assert decode.hear(done(2, 2, True)) == [RoomLanded(G, b""), RoomEnded(G)]

    @pytest.mark.parametrize(("pages", "last"), [(7, False), (5, True)])
    def test_counts_that_do_not_add_up_end_the_room(self, pages: int, last: bool) -> None:
        decode = decode_of(2)
        lent(decode)
        told = decode.hear(done(0, pages, last))
        assert isinstance(told[0], RoomFailed) and told[0].cause.code is Code.PROTOCOL_ERROR
        assert f"filled {pages} pages of 6" in told[0].cause.text
        if not last:
            assert decode.core.ledger.quarantined == (3,), "as many as were lent"
            assert decode.hear(ack(grant=G)) == [FreePages(G), RoomEnded(G)]

    def test_a_prefix_shortens_it(self) -> None:
        decode = decode_of(2)
        grant = decode.open()
        assert decode.endpoint.shorten(grant, 4) == (2,)
        decode.lend(grant, (7, 2))
        assert decode.endpoint.rooms[grant].state.pages == (4,)

    def test_each_chunk_is_summed_where_its_small_pages_are(self) -> None:
        decode = decode_of(2, verify=True)
        lent(decode)
        fine = FinePages((2,), (2,), (0,), (6,))
        for seq, count, span in ((0, 1, (0, 1)), (1, 5, (1, 6))):
            asked = decode.hear(done(seq, count, seq == 1, checksum=b"a"))
            assert asked == [VerifyChunk(G, 0, seq, (span,), SERVED, fine)]
            decode.endpoint.chunk_summed(G, 0, seq, b"a", decode.now)
        assert decode.asked() == [RoomLanded(G, b""), RoomEnded(G)]

    def test_pages_of_its_own_size_are_what_an_older_prefill_counts(self) -> None:
        assert lent(decode_of()).fine is None
        assert lent(decode_of(4)).state.pages == (3,)

    @pytest.mark.parametrize("sizes", [(3,), (8,), (0,), (2, 2), (1 << 40,)])
    def test_sizes_that_its_pages_do_not_have_are_refused(self, sizes: tuple[int, ...]) -> None:
        decode = LoneDecode()
        grant = decode.open()
        decode.asked()
        answer = registered(fresh_from=decode.core.next_grant)
        told = decode.hear(msgspec.structs.replace(answer, page_sizes=sizes))
        failure = next(command for command in told if isinstance(command, RoomFailed))
        assert failure.grant == grant and failure.cause.code is Code.PROTOCOL_ERROR
        assert "prefill at tcp://prefill:0 counts" in failure.cause.text

    def test_a_room_of_too_many_small_pages_is_not_lent(self) -> None:
        layout = build_layout([("k", "uint8", (8,))], page_size=1 << 16, num_pages=16)
        decode = decode_of(1, layout=layout)
        grant = decode.open(tokens=(1 << 19) + 1)
        with pytest.raises(CapacityError, match="in the smaller of the two page sizes"):
            decode.lend(grant, tuple(range(9)))
        assert not decode.endpoint.rooms[grant].lent
        decode.close(grant)

    def test_ranks_that_count_differently_are_refused(self) -> None:
        decode = LoneDecode()
        decode.open(999, TWO)
        fresh = decode.core.next_grant
        first, second = (
            registered(
                source=Incarnation(info.incarnation), rank=info.rank, size=2, fresh_from=fresh
            )
            for info in TWO
        )
        decode.hear(msgspec.structs.replace(first, page_sizes=(2,)), key=KEY)
        told = decode.hear(second, key=OTHER_KEY)
        failure = next(command for command in told if isinstance(command, RoomFailed))
        assert failure.cause == Cause(
            Code.REFUSED, "the ranks of prefill tcp://prefill:0 have pages of different sizes"
        )
