"""A matched room at prefill: chunks, their writes, and what decode is told (I2, I3, I4)."""

from __future__ import annotations

from typing import Any

import pytest

from kvflow.protocols.commands import (
    CancelWrite,
    CloseRoute,
    RoomDone,
    RoomReleased,
    RoomStopped,
    StartWrite,
)
from kvflow.protocols.errors import (
    AbortedError,
    CapacityError,
    Cause,
    Code,
    MisuseError,
    RefusedError,
)
from kvflow.protocols.limits import Bounds
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.prefill.records import pinned_places
from kvflow.protocols.wire.messages import MAX_HANDOFF_BYTES
from tests.protocols.alone import (
    BROKEN,
    DECODE,
    GONE,
    OTHER_DECODE,
    START,
    LonePrefill,
    abort,
    ack,
    announce,
    ask,
    beat,
    bootstrap,
    chunk_done,
    failed,
    indices,
    phase_of,
    stopped,
)

W = WriteOutcome
DIED = Cause(Code.PEER_LOST, f"decode {DECODE:016x} died")
SILENT = Cause(Code.PEER_LOST, f"decode {DECODE:016x} was silent for 5 s")


def start(write: int, room: int, sources: tuple[int, ...], targets: tuple[int, ...]) -> StartWrite:
    """As `seen` shows it."""
    pages: Any = (sources, targets)
    return StartWrite(write, room, DECODE, *pages)


def pinned(prefill: LonePrefill, peer: DecodePeer | None = None) -> int:
    (count,) = pinned_places(prefill.core.writes.values(), 1, peer)
    return count


class TestPinned:
    """Writes that a decode does not take hold our pages when their rooms are over."""

    def test_a_decode_that_takes_none_is_given_no_more(self) -> None:
        prefill = LonePrefill(bounds=Bounds(pinned_share=2 / 16)).up(DECODE, OTHER_DECODE)
        record = prefill.sending(1, 3)
        prefill.send(record, 4, last=True)
        assert pinned(prefill) == 0, "they may be on their way"
        prefill.hear(abort(7, 1))
        assert pinned(prefill) == pinned(prefill, record.peer) == 3
        first = prefill.matched(12, 5)
        # What was cancelled a moment ago may end at once.
        assert first.phase is PrefillPhase.WAITING_FOR_INPUT
        prefill.tick(prefill.core.timing.repeat_after_s)
        text = (
            "tokens held by writes to this decode that do not end, in whole pages: asked for 12, "
            "limit 8"
        )
        cause = Cause(Code.CAPACITY, text)
        engine = prefill.open(8)
        assert prefill.hear(bootstrap(8, 2)) == [
            failed(cause, 8, 2),
            ack(8, 2),
            *stopped(engine, cause),
        ]
        assert prefill.hear(announce(9, 3)) == [failed(cause, 9, 3), ack(9, 3)]
        late = prefill.open(9)
        assert late.state.cause == cause, "the engine's half that comes later is told too"
        prefill.hear(bootstrap(10, 1, OTHER_DECODE))
        assert prefill.open(10).phase is PrefillPhase.WAITING_FOR_INPUT, "other decodes are served"
        prefill.ended(1, W.UNPROVEN)
        assert pinned(prefill) == 1
        assert prefill.matched(11, 4).phase is PrefillPhase.WAITING_FOR_INPUT

    def test_a_refused_decode_says_nothing_of_what_another_has_announced(self) -> None:
        prefill = LonePrefill(bounds=Bounds(pinned_share=2 / 16)).up(DECODE, OTHER_DECODE)
        prefill.send(prefill.matched(), 1, 3, 4, last=True)
        prefill.hear(abort(7, 1))
        prefill.tick(prefill.core.timing.repeat_after_s)
        prefill.hear(announce(8, 1, OTHER_DECODE))
        cause = Cause(
            Code.CAPACITY,
            "tokens held by writes to this decode that do not end, in whole pages: asked for 12, "
            "limit 8",
        )
        assert prefill.hear(bootstrap(8, 2)) == [failed(cause, 8, 2), ack(8, 2)]
        engine = prefill.open(8)
        assert not engine.ended
        prefill.hear(bootstrap(8, 1, OTHER_DECODE))
        assert engine.phase is PrefillPhase.WAITING_FOR_INPUT
        prefill.close(engine)
        prefill.hear(abort(8, 1, OTHER_DECODE))
        # The next room of that number is not told what became of the refused one.
        assert not prefill.open(8).ended

    def test_as_many_as_the_limit_are_allowed(self) -> None:
        prefill = LonePrefill(bounds=Bounds(pinned_share=3 / 16)).up()
        prefill.sending(1, 3, 4, last=True)
        prefill.hear(abort(7, 1))
        prefill.tick(prefill.core.timing.repeat_after_s)
        assert pinned(prefill) == 3
        assert prefill.matched(8, 2).phase is PrefillPhase.WAITING_FOR_INPUT

    def test_without_a_limit_none_is_refused(self, prefill: LonePrefill) -> None:
        every = tuple(range(16))
        # Two prompts with one prefix send the same pages.
        for room in (7, 8):
            prefill.hear(bootstrap(room, room, pages=every, tokens=64))
            prefill.send(prefill.open(room, tokens=64), *every, last=True)
            prefill.hear(abort(room, room))
        prefill.tick(prefill.core.timing.repeat_after_s)
        assert pinned(prefill) == 32
        assert prefill.matched(9, 9).phase is PrefillPhase.WAITING_FOR_INPUT


class TestChunks:
    def test_each_goes_onto_the_next_of_decodes_pages(self, prefill: LonePrefill) -> None:
        record = prefill.matched()
        assert prefill.send(record, 1, 3) == [start(1, 1, (1, 3), (7, 2))]
        assert prefill.send(record, 4, last=True, handoff=b"h") == [start(2, 1, (4,), (5,))]
        assert prefill.ended(1, checksum=b"sum") == [chunk_done(0, 2, checksum=b"sum")]
        assert phase_of(record) is PrefillPhase.TRANSFERRING and list(prefill.core.writes) == [2]
        done = [chunk_done(1, 1, True, b"h"), RoomDone(1), RoomReleased(1)]
        assert prefill.ended(2) == done and phase_of(record) is PrefillPhase.SUCCESS
        # It missed them.
        assert prefill.hear(bootstrap()) == [chunk_done(0, 2, checksum=b"sum"), done[0]]
        assert prefill.counts.endings == {"success": 1}
        assert not prefill.core.writes
        assert not prefill.endpoint.rooms
        assert len(prefill.core.deadlines) == 1 and len(prefill.core.rendezvous) == 0

    def test_they_are_told_in_the_order_of_their_queue(self, prefill: LonePrefill) -> None:
        record = prefill.matched()
        for page, last in ((1, False), (2, False), (3, True)):
            prefill.send(record, page, last=last)
        assert prefill.ended(3) == [] == prefill.ended(2)
        done = [chunk_done(0, 1), chunk_done(1, 1), chunk_done(2, 1, True)]
        assert prefill.ended(1) == [*done, RoomDone(1), RoomReleased(1)]

    def test_a_pause_between_two(self, prefill: LonePrefill) -> None:
        record = prefill.sending(1)
        assert prefill.ended(1) == [chunk_done(0, 1)]
        assert record.phase is PrefillPhase.WAITING_FOR_INPUT
        prefill.send(record, 2, 3, last=True)
        assert prefill.ended(2) == [chunk_done(1, 2, True), RoomDone(1), RoomReleased(1)]

    def test_the_last_one_may_have_no_pages(self, prefill: LonePrefill) -> None:
        record = prefill.sending(1, 2, 3)
        assert prefill.send(record, last=True, handoff=b"h") == [start(2, 1, (), ())]
        assert prefill.ended(2) == []
        done = [chunk_done(0, 3), chunk_done(1, 0, True, b"h"), RoomDone(1), RoomReleased(1)]
        assert prefill.ended(1) == done

    def test_a_room_of_no_pages_is_done_when_its_write_ended(self, prefill: LonePrefill) -> None:
        prefill.hear(bootstrap(pages=(), prefix=11))
        record = prefill.open()
        prefill.asked()
        assert prefill.send(record, last=True) == [start(1, 1, (), ())]
        assert record.phase is PrefillPhase.TRANSFERRING and not record.ended
        assert prefill.ended(1) == [chunk_done(0, 0, True), RoomDone(1), RoomReleased(1)]
        assert prefill.counts.endings == {"success": 1}

    def test_the_end_of_a_write_is_told_once(self, prefill: LonePrefill) -> None:
        prefill.sending(1)
        assert prefill.ended(1) and prefill.ended(1) == [] == prefill.ended(99)

    def test_writes_of_all_rooms_have_numbers_of_their_own(self, prefill: LonePrefill) -> None:
        first, second = prefill.matched(7, 1), prefill.matched(8, 2)
        prefill.send(first, 1)
        assert prefill.send(second, 2) == [start(2, 2, (2,), (7,))]
        assert prefill.ended(2) == [chunk_done(0, 1, room=8, grant=2)]


class TestWhatCannotBeSent:
    @pytest.mark.parametrize(
        ("sent", "pages", "last", "text"),
        [
            ((), (1, 2, 3, 4), False, "room 7: chunk of 4 pages, 3 pages of decode's are left"),
            ((1, 2), (3, 4), True, "room 7: chunk of 2 pages, 1 pages of decode's are left"),
            ((1,), (2,), True, "room 7: chunk of 1 pages, 2 pages of decode's are left"),
            ((1,), (), True, "room 7: chunk of 0 pages, 2 pages of decode's are left"),
            ((1,), (), False, "room 7: a chunk without pages that is not the last"),
            ((1, 2, 3), (), False, "room 7: a chunk without pages that is not the last"),
        ],
    )
    def test_other_pages_than_are_left(
        self,
        prefill: LonePrefill,
        sent: tuple[int, ...],
        pages: tuple[int, ...],
        last: bool,
        text: str,
    ) -> None:
        record = prefill.matched()
        if sent:
            prefill.send(record, *sent)
        with pytest.raises(MisuseError, match=f"^{text}$"):
            prefill.send(record, *pages, last=last)
        assert prefill.asked() == [] and record.placed == (len(sent),), "nothing was queued"
        assert len(record.chunks) == bool(sent)

    def test_a_handoff_before_the_last_chunk(self, prefill: LonePrefill) -> None:
        record = prefill.matched()
        with pytest.raises(
            MisuseError, match="room 7: handoff of 1 bytes with a chunk that is not the last"
        ):
            prefill.send(record, 1, handoff=b"h")

    def test_before_it_is_matched_and_after_the_last(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        with pytest.raises(MisuseError, match=r"room 7: send\(\) before matched\(\)"):
            prefill.send(record, 1)
        prefill.hear(bootstrap())
        prefill.send(record, 1, 2, 3, last=True)
        for _ in range(2):  # while it runs, and when it has landed
            with pytest.raises(MisuseError, match=r"room 7: send\(\) after the last chunk"):
                prefill.send(record, last=True)
            prefill.ended(1)
        assert record.phase is PrefillPhase.SUCCESS

    def test_too_large_a_hand_over(self, prefill: LonePrefill) -> None:
        record = prefill.matched()
        with pytest.raises(
            CapacityError, match=f"asked for {MAX_HANDOFF_BYTES + 1}, limit {MAX_HANDOFF_BYTES}"
        ):
            prefill.send(record, 1, 2, 3, last=True, handoff=bytes(MAX_HANDOFF_BYTES + 1))
        prefill.send(record, 1, 2, 3, last=True, handoff=bytes(MAX_HANDOFF_BYTES))

    def test_into_a_room_that_has_ended_or_drains(self, prefill: LonePrefill) -> None:
        drains, ended = prefill.matched(7, 1), prefill.matched(8, 2)
        prefill.send(drains, 1)
        prefill.hear(abort(7, 1))
        with pytest.raises(AbortedError, match="the client is gone"):
            prefill.send(drains, 2)
        prefill.close(ended)
        with pytest.raises(RefusedError, match="the engine gave up"):
            prefill.send(ended, 2)
        assert prefill.asked() == []

    def test_a_chunk_is_checked_once(self, prefill: LonePrefill) -> None:
        """The caller has called `check_chunk`, and took hold of the pages in between."""
        record = prefill.matched()
        prefill.endpoint.check_chunk(record, indices(1, 2, 3), True, 0)
        prefill.endpoint.queue_chunk(
            record, indices(1, 2, 3), last=True, handoff=b"", now=START, checked=True
        )
        assert prefill.asked() == [start(1, 1, (1, 2, 3), (7, 2, 5))]
        with pytest.raises(MisuseError):
            prefill.endpoint.queue_chunk(record, indices(1), last=True, handoff=b"", now=START)


class TestWritesThatFail:
    @pytest.mark.parametrize(
        ("outcome", "error", "text", "drained"),
        [
            (W.CANCELLED, "", "the data plane stopped the write", True),
            (W.CANCELLED, "EIO", "EIO", True),
            (W.UNPROVEN, "", "the data plane cannot say what landed", False),
            (W.UNPROVEN, "ETIMEDOUT", "ETIMEDOUT", False),
        ],
    )
    def test_the_only_one(
        self, prefill: LonePrefill, outcome: W, error: str, text: str, drained: bool
    ) -> None:
        record = prefill.sending(1)
        why = Cause(Code.TRANSFER_ERROR, text)
        told = [failed(why), ack(drained=drained), RoomStopped(1, why), RoomReleased(1)]
        assert prefill.ended(1, outcome, error=error) == told
        assert record.phase is (PrefillPhase.ABORTED if drained else PrefillPhase.LOST)
        (peer,) = prefill.endpoint.peers
        assert peer.grants.unproven() == (() if drained else (record.grant,))
        assert peer.grants.is_drained(record.grant) is drained
        assert prefill.hear(abort()) == [ack(drained=drained)]
        # It does not begin again.
        assert prefill.hear(bootstrap()) == [failed(why), ack(drained=drained)]

    def test_others_that_run_are_stopped_and_awaited(self, prefill: LonePrefill) -> None:
        record = prefill.matched()
        for page in (1, 2, 3):
            prefill.send(record, page, last=page == 3)
        assert prefill.ended(2, W.UNPROVEN, error="EIO") == [] == prefill.ended(3)
        why = Cause(Code.TRANSFER_ERROR, "EIO")
        told = [failed(why), RoomStopped(1, why), ack(drained=False), RoomReleased(1)]
        assert prefill.ended(1) == [chunk_done(0, 1), *told]  # all ended, and one is in doubt

    def test_doubt_stays_whatever_ends_later(self, prefill: LonePrefill) -> None:
        record = prefill.matched()
        for page in (1, 2, 3):
            prefill.send(record, page, last=page == 3)
        why = Cause(Code.TRANSFER_ERROR, "EIO")
        stop = [failed(why), RoomStopped(1, why), CancelWrite(2), CancelWrite(3)]
        assert prefill.ended(1, W.UNPROVEN, error="EIO") == stop
        assert record.phase is PrefillPhase.DRAINING
        assert prefill.ended(2) == []
        assert prefill.ended(3, W.CANCELLED) == [ack(drained=False), RoomReleased(1)]
        assert prefill.counts.endings == {"lost:transfer_error": 1}


class TestRoomsThatEndWhileTheyWrite:
    def test_by_decode(self, prefill: LonePrefill) -> None:
        record = prefill.sending(1)
        prefill.send(record, 2)
        prefill.ended(2)
        # What has ended needs no stop.
        assert prefill.hear(abort()) == [RoomStopped(1, GONE), CancelWrite(1)]
        assert prefill.hear(abort()) == [], "repeated: the answer comes when it has drained"
        assert prefill.close(record) == []
        assert prefill.ended(1, W.CANCELLED) == [ack(), RoomReleased(1)]
        assert prefill.hear(abort()) == [ack()]
        assert record.state.cause == GONE, "the first cause is kept"
        chunks = [line.text for line in record.story.lines() if line.what == "write_ended"]
        assert chunks == ["chunk 0, 1 pages: cancelled", "chunk 1, 1 pages: landed"]

    def test_by_the_engine(self, prefill: LonePrefill) -> None:
        record = prefill.sending(1)
        assert prefill.close(record) == [failed(BROKEN), RoomStopped(1, BROKEN), CancelWrite(1)]
        assert prefill.ended(1) == [ack(), RoomReleased(1)]
        assert prefill.close(record) == [], "closing is idempotent"
        told = [line.text for line in record.story.lines()]
        assert told == ["", "", "engine_error: the engine gave up", "chunk 0, 1 pages: landed"]

    def test_by_its_deadline(self, prefill: LonePrefill) -> None:
        record = prefill.matched(deadline_at_s=START + 4)
        prefill.send(record, 1)
        assert prefill.tick(3.9) == []
        why = Cause(Code.DEADLINE, "room 7: nothing more came for 4.0 s")
        assert prefill.tick(0.1) == [failed(why), RoomStopped(1, why), CancelWrite(1)]
        assert prefill.ended(1) == [ack(), RoomReleased(1)] and record.state.cause == why

    def test_one_that_drains_is_past_its_deadline(self, prefill: LonePrefill) -> None:
        record = prefill.matched(deadline_at_s=START + 4)
        prefill.send(record, 1)
        prefill.close(record)
        assert prefill.tick(4.5) == [] and record.state.cause == BROKEN

    def test_by_the_silence_of_decode(self, prefill: LonePrefill) -> None:
        prefill.sending(1)
        assert prefill.tick(5) == [failed(SILENT), RoomStopped(1, SILENT), CancelWrite(1)]
        assert prefill.ended(1) == [ack(), RoomReleased(1)], "it may hear"
        assert prefill.endpoint.next_tick() == float("inf"), "of a silent decode nothing is due"

    def test_by_the_death_of_decode(self, prefill: LonePrefill) -> None:
        first, second = prefill.matched(7, 1), prefill.matched(8, 2)
        prefill.send(first, 1)
        prefill.endpoint.peer_died(DECODE, prefill.now)
        assert prefill.asked() == [
            *(RoomStopped(1, DIED), CancelWrite(1), RoomStopped(2, DIED), RoomReleased(2))
        ], "nothing is sent to it"
        assert second.ended
        assert prefill.hear(beat(), announce(9, 9)) == [] and prefill.counts.stale == 2
        assert prefill.register() == []
        assert [p.phase for p in prefill.endpoint.peers] == [PeerPhase.GONE]
        prefill.endpoint.peer_died(DECODE, prefill.now)
        assert prefill.asked() == []
        # The route last: no write runs on it.
        assert prefill.ended(1) == [RoomReleased(1), CloseRoute(DECODE)]
        assert list(prefill.endpoint.peers) == [] and len(prefill.core.deadlines) == 0

    @pytest.mark.parametrize("lost", ["silent", "dead"])
    def test_by_a_decode_that_is_then_lost(self, prefill: LonePrefill, lost: str) -> None:
        record = prefill.sending(1)
        prefill.hear(abort())
        if lost == "dead":
            prefill.endpoint.peer_died(DECODE, prefill.now)
        assert prefill.tick(5) == [] == prefill.tick(5)
        assert prefill.ended(1) == (
            [RoomReleased(1), CloseRoute(DECODE)] if lost == "dead" else [ack(), RoomReleased(1)]
        )
        assert record.state.cause == GONE

    def test_by_leaving(self, prefill: LonePrefill) -> None:
        record = prefill.sending(1)
        prefill.endpoint.leave(prefill.now)
        why = Cause(Code.SHUTDOWN, "prefill is shutting down")
        assert prefill.asked() == [failed(why), RoomStopped(1, why), CancelWrite(1)]
        assert prefill.endpoint.rooms == {7: record}
        assert prefill.ended(1) == [ack(), RoomReleased(1)] and not prefill.endpoint.rooms


class TestDecodeAsks:
    """Resync: what was missed is sent again, and what is not known here is named."""

    def test_chunks_from_the_first_it_has_not_received(self, prefill: LonePrefill) -> None:
        record = prefill.sending(1)
        prefill.ended(1)
        prefill.send(record, 2, 3, last=True)
        assert prefill.hear(ask((7, 1, 0))) == [chunk_done(0, 1)]
        assert prefill.hear(ask((7, 1, 1))) == []
        prefill.ended(2)
        assert prefill.hear(ask((7, 1, 1))) == [chunk_done(1, 2, True)]
        assert prefill.hear(ask((7, 1, 0))) == [chunk_done(0, 1), chunk_done(1, 2, True)]
        assert prefill.hear(beat(2)) == [beat()]
        assert prefill.hear(ask((7, 1, 0))) == [ask((7, 1, 0))], "decode has settled it"

    def test_how_it_ended(self, prefill: LonePrefill) -> None:
        record = prefill.sending(1)
        prefill.ended(1)
        prefill.close(record)
        assert prefill.hear(ask((7, 1, 1))) == [failed(BROKEN), ack()]

    def test_a_grant_is_answered_once(self, prefill: LonePrefill) -> None:
        prefill.sending(1)
        prefill.ended(1)
        assert prefill.hear(ask((7, 1, 0), (7, 1, 0), (9, 4, 0), (9, 4, 0))) == [
            chunk_done(0, 1),
            ask((9, 4, 0)),
        ]

    def test_announced_and_not_offered_is_as_good_as_unknown(self, prefill: LonePrefill) -> None:
        prefill.open(7)
        prefill.hear(announce(7, 1), announce(8, 2))
        assert prefill.hear(ask((7, 1, 0), (8, 2, 0))) == [ask((7, 1, 0), (8, 2, 0))]
        prefill.hear(bootstrap(7, 1))
        assert prefill.hear(ask((7, 1, 0))) == []


class TestBelowTheLowWater:
    def test_nothing_begins(self) -> None:
        prefill = LonePrefill()
        prefill.register(fresh_from=5)
        prefill.up()
        record = prefill.open(7)
        stale = Cause(Code.STALE_GRANT, "grant 4 is below 5: it has ended")
        for message in (announce(7, 4), bootstrap(7, 4)):
            assert prefill.hear(message) == [failed(stale, 7, 4), ack(7, 4)]
        assert prefill.hear(abort(7, 4)) == [ack(7, 4)]
        assert prefill.hear(ask((7, 4, 2))) == [ask((7, 4, 2))]
        assert prefill.core.rooms == {7: record} and prefill.core.rendezvous.announced == {}
        assert record.phase is PrefillPhase.EXPECTED and record.bootstrap is None

    def test_what_was_evicted_in_doubt_is_never_called_drained(self) -> None:
        prefill = LonePrefill(bounds=Bounds(closed_grants=1)).up()
        for grant, outcome in ((1, W.UNPROVEN), (2, W.CANCELLED)):
            prefill.send(prefill.matched(7, grant), 1)
            prefill.ended(grant, outcome)
        stale = Cause(Code.STALE_GRANT, "grant 1 is below 2: it has ended")
        assert prefill.hear(bootstrap(7, 1)) == [failed(stale), ack(drained=False)]
        assert prefill.hear(abort(7, 1)) == [ack(drained=False)]


def test_handoffs_are_kept_up_to_a_limit_and_the_decode_with_most_loses_the_oldest() -> None:
    prefill = LonePrefill(bounds=Bounds(kept_bytes=200)).up(DECODE, OTHER_DECODE)
    for number, target in enumerate((OTHER_DECODE, DECODE, DECODE), 1):
        prefill.hear(bootstrap(number, number, target))
        record = prefill.open(number)
        prefill.send(record, 1, 2, 3, last=True, handoff=b"h" * 100)
        prefill.ended(number)
    kept = {peer.incarnation: peer.grants.kept_bytes for peer in prefill.endpoint.peers}
    assert kept == {DECODE: 100, OTHER_DECODE: 100} and prefill.core.kept.total == 200
    assert prefill.hear(ask((2, 2, 0))) == [ask((2, 2, 0))], "it has the chunk, or begins again"
    prefill.endpoint.peer_died(OTHER_DECODE, prefill.now)
    assert prefill.core.kept.total == 100


def test_every_message_about_a_room_says_which_rank_sends_it() -> None:
    prefill = LonePrefill(rank=3).up()
    record = prefill.sending(1)
    done = prefill.ended(1)
    ended = [message for message in done + prefill.close(record) if hasattr(message, "rank")]
    assert [type(message).__name__ for message in ended] == ["ChunkDone", "RoomFailed", "AbortAck"]
    assert {message.rank for message in ended} == {3} and prefill.register()[0].rank == 3
