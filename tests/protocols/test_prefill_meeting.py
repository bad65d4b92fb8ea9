"""Prefill's half of a room and decode's: they meet, or each hears why the other does not (I4)."""

from __future__ import annotations

import msgspec
import pytest

from kvflow.protocols.commands import RoomMatched, RoomReleased, RoomStopped
from kvflow.protocols.errors import AbortedError, Cause, Code, MisuseError, RoomInUseError
from kvflow.protocols.limits import Bounds
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire import messages as wire
from tests.protocols.alone import (
    BROKEN,
    DECODE,
    DIGEST,
    GONE,
    OTHER_DECODE,
    START,
    TIMING,
    TOKENS,
    LonePrefill,
    abort,
    ack,
    announce,
    ask,
    beat,
    begun,
    bootstrap,
    failed,
    phase_of,
    stopped,
)

IN_USE = Cause(Code.ROOM_IN_USE, "room 7 has a decode already")
DRAINS = Cause(Code.ROOM_IN_USE, "room 7 is in use: writes of the last room of that id still run")
LEAVING = Cause(Code.SHUTDOWN, "prefill is shutting down")


class TestMeeting:
    def test_the_engine_first(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        assert prefill.asked() == [] and phase_of(record) is PrefillPhase.EXPECTED
        # Not known yet.
        known = (record.half, record.grant, record.prefix_tokens, len(record.target_pages))
        assert known == (True, 0, 0, 0)
        assert prefill.hear(announce()) == [] and phase_of(record) is PrefillPhase.ANNOUNCED
        assert prefill.hear(bootstrap(prefix=4, pages=(7, 2))) == [RoomMatched(record.serial, 4)]
        assert record.target_pages.tolist() == [7, 2] and not record.half
        assert prefill.core.rooms == {7: record} and prefill.counts.rooms_opened == 1

    @pytest.mark.parametrize("first", ["engine", "decode"])
    def test_decode_hears_that_the_engine_has_begun(self, prefill: LonePrefill, first: str) -> None:
        told = prefill.hear(announce()) if first == "decode" else []
        record = prefill.open()
        assert told + prefill.asked() == []
        prefill.endpoint.begin_room(record)
        told = prefill.asked() if first == "decode" else prefill.asked() + prefill.hear(announce())
        assert told == [begun()]
        assert prefill.hear(announce()) == [begun()], "the first may have been lost"
        assert prefill.hear(bootstrap()) == [RoomMatched(record.serial, 0)]
        prefill.endpoint.begin_room(record)
        assert prefill.asked() == prefill.hear(announce()) == []

    def test_an_announcement_is_refused_when_its_time_is_over(self) -> None:
        timing = msgspec.structs.replace(TIMING, announced_s=10.0)
        prefill = LonePrefill(timing=timing).up(DECODE, OTHER_DECODE)
        prefill.hear(announce(1, 1))
        assert "announced" in {timer.kind for timer in prefill.core.deadlines}
        prefill.hear(announce(2, 2), announce(3, 3))
        prefill.hear(abort(1, 1), announce(4, 4))
        prefill.open(2)
        prefill.asked()
        prefill.now += 6
        prefill.hear(announce(5, 1, OTHER_DECODE), beat(), beat(target=OTHER_DECODE))
        assert not [word for word in prefill.tick(3.9) if isinstance(word, wire.RoomFailed)]
        late = Cause(Code.RENDEZVOUS, "room {}: prefill's half has not come within 10 s")
        told = [word for word in prefill.tick(0.2) if isinstance(word, wire.RoomFailed)]
        causes = {room: Cause(late.code, late.text.format(room)) for room in (3, 4, 5)}
        assert told == [failed(causes[3], 3, 3), failed(causes[4], 4, 4)]
        prefill.now += 3
        prefill.hear(beat(target=OTHER_DECODE))
        told = [word for word in prefill.tick(3) if isinstance(word, wire.RoomFailed)]
        assert failed(causes[5], 5, 1, target=OTHER_DECODE) in told
        assert not prefill.core.rendezvous.announced

    def test_the_time_of_one_that_was_joined_ends_no_other(self) -> None:
        prefill = LonePrefill(timing=msgspec.structs.replace(TIMING, announced_s=4.0)).up()
        prefill.hear(announce(1, 1))
        prefill.now += 3
        prefill.hear(announce(2, 2))
        prefill.open(1)
        prefill.asked()
        assert prefill.tick(1) == []
        cause = Cause(Code.RENDEZVOUS, "room 2: prefill's half has not come within 4 s")
        assert prefill.tick(3) == [failed(cause, 2, 2), ack(2, 2)]
        assert "announced" not in {timer.kind for timer in prefill.core.deadlines}

    def test_a_decode_that_lends_at_once_need_not_hear_it(self, prefill: LonePrefill) -> None:
        record = prefill.matched()
        prefill.endpoint.begin_room(record)
        assert prefill.asked() == []

    def test_when_a_room_met_and_moved_is_kept_for_its_ending(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        prefill.hear(announce())
        assert record.ready_at_s is None
        prefill.now += 1
        prefill.hear(bootstrap())
        prefill.now += 1
        prefill.send(record, 1, 2)
        prefill.now += 1
        prefill.send(record, 3, last=True)
        prefill.now += 1
        prefill.ended(1)
        prefill.ended(2)
        ((ending, at_s),) = prefill.counts.ended
        times = (ending.opened_at_s, ending.ready_at_s, ending.moving_at_s, at_s)
        assert times == (START, START + 1, START + 2, START + 4)
        assert (ending.counts, ending.offers_pages, ending.cause) == ((3,), False, None)

    def test_pages_without_an_announcement(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        assert prefill.hear(bootstrap()) == [RoomMatched(record.serial, 0)]

    def test_the_announcement_first(self, prefill: LonePrefill) -> None:
        assert prefill.hear(announce()) == []
        record = prefill.open()
        assert prefill.asked() == [] and record.phase is PrefillPhase.ANNOUNCED
        assert prefill.core.rendezvous.announced == {}
        assert prefill.hear(announce()) == [], "repeated"
        assert prefill.hear(bootstrap()) == [RoomMatched(record.serial, 0)]
        assert record.peer is not None
        peer = prefill.core.peers[record.peer.incarnation]
        assert peer.grants.announcements.rooms == {}

    def test_the_pages_first(self, prefill: LonePrefill) -> None:
        assert prefill.hear(announce(), bootstrap(prefix=8, pages=(5,))) == []
        assert prefill.core.rendezvous.announced == {}
        assert prefill.endpoint.rooms[wire.RoomId(7)].half
        record = prefill.open()
        assert prefill.asked() == [RoomMatched(record.serial, 8)]
        assert prefill.hear(bootstrap(prefix=8, pages=(5,))) == [], "repeated"

    def test_every_room_has_a_number_of_its_own(self, prefill: LonePrefill) -> None:
        first = prefill.open()
        assert prefill.close(first) == stopped(first, BROKEN) and first.serial == 1
        again = prefill.open()
        assert (again.serial, again.ended, first.ended) == (2, False, True)

    @pytest.mark.parametrize("pages_first", [True, False])
    @pytest.mark.parametrize(("tokens", "digest"), [(12, DIGEST), (TOKENS, b"e" * 32)])
    def test_another_prompt(
        self, prefill: LonePrefill, tokens: int, digest: bytes, pages_first: bool
    ) -> None:
        text = f"room 7: prefill's prompt has {tokens} tokens, decode's 11, or their ids differ"
        why = Cause(Code.PROMPT_MISMATCH, text)
        if pages_first:
            prefill.hear(bootstrap())
        record = prefill.open(tokens=tokens, digest=digest, deadline_at_s=START + 90)
        told = prefill.asked() if pages_first else prefill.hear(bootstrap())
        assert told == [failed(why), ack(), *stopped(record, why)]
        assert record.phase is PrefillPhase.FAILED
        assert prefill.counts.endings == {"failed:prompt_mismatch": 1}
        assert len(prefill.core.deadlines) == 1, "the silence of decode, and no room's"

    def test_what_ended_is_sent_again_when_decode_repeats(self, prefill: LonePrefill) -> None:
        prefill.hear(bootstrap())
        prefill.open(tokens=12)
        told = [
            message
            for message in prefill.asked()
            if not isinstance(message, RoomStopped | RoomReleased)
        ]
        assert len(told) == 2
        for message in (bootstrap(), announce(), ask((7, 1, 0))):
            assert prefill.hear(message) == told
        assert prefill.hear(abort()) == [ack()]


class TestWhileTheLastRoomOfThatIdDrains:
    """Whatever half comes has ended at once, and the other one is told the same."""

    REFUSED = (failed(DRAINS, 7, 1, target=OTHER_DECODE), ack(7, 1, target=OTHER_DECODE))

    @pytest.fixture(autouse=True)
    def drains(self, prefill: LonePrefill) -> None:
        prefill.up(OTHER_DECODE)
        record = prefill.matched(7, 1)
        prefill.send(record, 3)
        prefill.close(record)
        assert record.phase is PrefillPhase.DRAINING

    def test_the_engine_first(self, prefill: LonePrefill) -> None:
        with pytest.raises(RoomInUseError, match=DRAINS.text):
            prefill.open()
        assert prefill.asked() == []
        prefill.ended(1)
        assert prefill.hear(bootstrap(7, 1, OTHER_DECODE)) == [*self.REFUSED]
        self.at_rest(prefill)

    def test_decode_first(self, prefill: LonePrefill) -> None:
        assert prefill.hear(announce(7, 1, OTHER_DECODE)) == [*self.REFUSED]
        assert prefill.hear(bootstrap(7, 1, OTHER_DECODE)) == [*self.REFUSED], "said again"
        prefill.ended(1)
        record = prefill.open()
        assert prefill.asked() == stopped(record, DRAINS)
        self.at_rest(prefill)

    def test_both(self, prefill: LonePrefill) -> None:
        assert prefill.hear(bootstrap(7, 1, OTHER_DECODE)) == [*self.REFUSED]
        with pytest.raises(RoomInUseError):
            prefill.open()
        self.at_rest(prefill)
        with pytest.raises(RoomInUseError):
            prefill.open()
        assert prefill.hear(announce(7, 2, OTHER_DECODE))[0].cause == DRAINS
        self.at_rest(prefill)
        prefill.ended(1)
        record = prefill.open()
        # The next one works.
        assert prefill.hear(bootstrap(7, 3, OTHER_DECODE)) == [RoomMatched(record.serial, 0)]

    def test_the_engine_refuses(self, prefill: LonePrefill) -> None:
        prefill.endpoint.refuse_room(7, BROKEN, prefill.now)
        prefill.ended(1)
        assert prefill.hear(announce(7, 1, OTHER_DECODE))[0].cause == BROKEN
        self.at_rest(prefill)

    def test_decode_aborts_what_never_came(self, prefill: LonePrefill) -> None:
        assert prefill.hear(abort(7, 1, OTHER_DECODE)) == [ack(7, 1, target=OTHER_DECODE)]
        prefill.ended(1)
        record = prefill.open()
        assert prefill.asked() == stopped(record, GONE)

    @staticmethod
    def at_rest(prefill: LonePrefill) -> None:
        """Nothing is kept for a room to come."""
        assert len(prefill.core.rendezvous) == 0 and not prefill.core.rendezvous.announced


class TestOneOfAKind:
    def test_a_room_is_opened_once(self, prefill: LonePrefill) -> None:
        prefill.open()
        with pytest.raises(MisuseError, match=r"room 7 is in use$"):
            prefill.open()
        assert len(prefill.core.rendezvous) == 0
        with pytest.raises(MisuseError, match="room id -1"):
            prefill.open(-1)

    def test_a_refusal_of_a_room_that_the_engine_opened_changes_nothing(
        self, prefill: LonePrefill
    ) -> None:
        record = prefill.open()
        prefill.endpoint.refuse_room(7, BROKEN, prefill.now)
        assert prefill.asked() == [] and len(prefill.core.rendezvous) == 0 and not record.ended

    def test_a_second_announcement_is_refused(self, prefill: LonePrefill) -> None:
        prefill.up(OTHER_DECODE)
        prefill.hear(announce(7, 1))
        assert prefill.hear(announce(7, 2)) == [failed(IN_USE, 7, 2), ack(7, 2)]
        refused = [failed(IN_USE, 7, 1, target=OTHER_DECODE), ack(7, 1, target=OTHER_DECODE)]
        assert prefill.hear(announce(7, 1, OTHER_DECODE)) == refused
        # Pages of a third.
        assert prefill.hear(bootstrap(7, 3)) == [failed(IN_USE, 7, 3), ack(7, 3)]
        record = prefill.open()
        # The first one's place is kept.
        assert prefill.hear(bootstrap(7, 1)) == [RoomMatched(record.serial, 0)]

    @pytest.mark.parametrize("message", [announce(7, 2), bootstrap(7, 2)])
    @pytest.mark.parametrize("first", [announce(), bootstrap()])
    def test_a_room_has_one_decode(
        self, prefill: LonePrefill, first: wire.Message, message: wire.Message
    ) -> None:
        record = prefill.open()
        prefill.hear(first)
        assert prefill.hear(message) == [failed(IN_USE, 7, 2), ack(7, 2)]
        assert not record.ended and record.grant == 1

    def test_pages_for_another_room_than_was_announced(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        prefill.hear(announce())
        assert prefill.hear(bootstrap(8, 1)) == [] and record.bootstrap is None
        assert prefill.hear(bootstrap(7, 1)) == [RoomMatched(record.serial, 0)]

    def test_rooms_and_announcements_are_bounded(self) -> None:
        prefill = LonePrefill(bounds=Bounds(rooms=2)).up()
        prefill.hear(bootstrap(1, 1), bootstrap(2, 2))
        full = Cause(Code.CAPACITY, "rooms at prefill: asked for 3, limit 2")
        assert prefill.hear(bootstrap(3, 3)) == [failed(full, 3, 3), ack(3, 3)]
        prefill.hear(announce(4, 4), announce(5, 5))
        full = Cause(Code.CAPACITY, "announced rooms at prefill: asked for 3, limit 2")
        assert prefill.hear(announce(6, 6)) == [failed(full, 6, 6), ack(6, 6)]


class TestWhatIsOffered:
    @pytest.mark.parametrize(
        ("pages", "tokens", "prefix", "text"),
        [
            ((7, 2), 11, 0, "2 pages lent, 11 tokens need 3 pages"),
            ((7, 2, 5), 11, 4, "3 pages lent, 11 tokens need 2 pages"),
            ((), 0, 0, "0 pages lent, 0 tokens need 0"),
            ((7,), 11, 12, "prefix_tokens 12 is neither a whole number of 4-token pages"),
            ((7, 2), 11, 5, "prefix_tokens 5 is neither a whole number of 4-token pages"),
            ((7, 2, 16), 11, 0, "index 16 is outside 0..15"),
            ((7, 2, 7), 11, 0, "twice"),
        ],
    )
    @pytest.mark.parametrize("announced", [True, False])
    def test_it_has_to_add_up(
        self,
        prefill: LonePrefill,
        pages: tuple[int, ...],
        tokens: int,
        prefix: int,
        text: str,
        announced: bool,
    ) -> None:
        if announced:
            prefill.open()
            prefill.hear(announce())
        refusal, end, *more = prefill.hear(bootstrap(pages=pages, tokens=tokens, prefix=prefix))
        assert text in refusal.cause.text and (refusal, end) == (failed(refusal.cause), ack())
        assert len(more) == 2 * announced and not prefill.endpoint.rooms
        assert refusal.cause.code is (
            Code.PROTOCOL_ERROR if text.startswith("prefix") else Code.BAD_REQUEST
        )

    def test_a_room_in_a_pool_with_rows_ends_with_its_row(self) -> None:
        layout = build_layout([("k", "uint8", (8,))], page_size=4, num_pages=16, num_rows=2)
        prefill = LonePrefill(layout=layout)
        prefill.register(layout=layout)
        prefill.endpoint.route_opened(DECODE, prefill.now)
        prefill.asked()
        refusal, end = prefill.hear(bootstrap(pages=(7, 2, 5, 9)))
        text = "4 pages and 0 rows lent, 11 tokens need 3 pages and 1 row"
        assert text in refusal.cause.text and end == ack()
        refusal, end = prefill.hear(bootstrap(7, 3, pages=(7, 17, 2, 5)))
        assert "place 2 of space 'pages' follows place 17" in refusal.cause.text
        record = prefill.open(8)
        assert prefill.hear(bootstrap(8, 2, pages=(7, 2, 5, 17))) == [RoomMatched(record.serial, 0)]

    def test_all_of_the_prompt_may_be_there_already(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        assert prefill.hear(bootstrap(pages=(), prefix=TOKENS)) == [
            RoomMatched(record.serial, TOKENS)
        ]

    def test_a_pool_of_another_size(self, prefill: LonePrefill) -> None:
        assert prefill.hear(bootstrap(pages=(15, 0, 1))) == []


class TestTheOtherHalfNeverComes:
    def test_decode_refuses_before_its_room_was_asked_for(self, prefill: LonePrefill) -> None:
        assert prefill.hear(abort()) == [ack()]
        record = prefill.open()
        assert prefill.asked() == stopped(record, GONE)
        # That was told: the next room of this id is a new one.
        assert prefill.hear(announce(7, 2)) == []
        assert list(prefill.core.rendezvous.announced) == [7]
        # What has ended does not begin, and has nothing to send.
        assert prefill.hear(bootstrap(7, 1)) == []

    def test_decode_withdraws_what_it_announced(self, prefill: LonePrefill) -> None:
        assert prefill.hear(announce(), abort()) == [ack()]
        grants = prefill.core.peers[abort().target].grants
        assert prefill.core.rendezvous.announced == {} == grants.announcements.rooms
        assert grants.all_ended and not grants.unproven() and grants.remembered == 1
        record = prefill.open()
        assert prefill.asked() == stopped(record, GONE)

    def test_decode_refuses_while_the_engine_waits(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        assert prefill.hear(abort()) == [*stopped(record, GONE), ack()]
        # Decode knows: the next room of this id is a new one.
        assert prefill.hear(announce(7, 2)) == []

    def test_both_give_up_and_neither_is_told_of_the_other(self, prefill: LonePrefill) -> None:
        prefill.hear(abort())
        prefill.endpoint.refuse_room(7, BROKEN, prefill.now)
        assert prefill.asked() == [] == prefill.hear(announce(7, 2))
        prefill.close(prefill.open(8))
        assert prefill.hear(abort(8, 3)) == [ack(8, 3)] and not prefill.open(8).ended

    def test_an_abort_of_an_older_grant_leaves_a_newer_one(self, prefill: LonePrefill) -> None:
        prefill.hear(announce(7, 2))
        assert prefill.hear(abort(7, 1)) == [ack(7, 1)]
        record = prefill.open()
        assert not record.ended and prefill.asked() == [] and len(prefill.core.rendezvous) == 0

    def test_an_abort_of_another_grant_leaves_a_room_alone(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        prefill.hear(announce(7, 2))
        assert prefill.hear(abort(7, 1)) == [ack(7, 1)] and not record.ended
        assert prefill.hear(abort(7, 2)) == [ack(7, 2), *stopped(record, GONE)]

    @pytest.mark.parametrize("first", [announce(), bootstrap()])
    def test_decode_gives_up_after_it_came(self, prefill: LonePrefill, first: wire.Message) -> None:
        record = prefill.open()
        prefill.hear(first)
        assert prefill.hear(abort()) == [ack(), *stopped(record, GONE)]
        assert prefill.counts.endings == {"aborted:client_gone": 1}
        assert prefill.open().ended is False, "nothing is left of it"

    def test_decode_gives_up_pages_before_the_engine_came(self, prefill: LonePrefill) -> None:
        prefill.hear(bootstrap())
        assert prefill.hear(abort()) == [ack(), RoomReleased(1)]
        record = prefill.open()
        assert prefill.asked() == stopped(record, GONE), "why is kept for the engine"

    def test_the_engine_gives_up_before_anything_came(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        assert prefill.close(record) == stopped(record, BROKEN)
        assert prefill.hear(announce()) == [failed(BROKEN), ack()], "why is kept for decode"
        assert prefill.hear(announce(7, 2)) == [], "and told once"

    def test_the_engine_gives_up_and_the_pages_come(self, prefill: LonePrefill) -> None:
        prefill.close(prefill.open())
        assert prefill.hear(bootstrap()) == [failed(BROKEN), ack()]
        assert prefill.hear(bootstrap(7, 2)) == [] and len(prefill.endpoint.rooms) == 1

    def test_decode_came_and_the_engine_gives_up(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        prefill.hear(announce())
        assert prefill.close(record) == [failed(BROKEN), ack(), *stopped(record, BROKEN)]
        assert prefill.hear(announce(7, 2)) == [], "decode has been told"

    @pytest.mark.parametrize(
        ("came", "told"),
        [
            ([announce()], [failed(BROKEN), ack()]),
            ([bootstrap()], [failed(BROKEN), ack(), RoomReleased(1)]),
            ([], []),
        ],
    )
    def test_the_engines_request_was_refused(
        self, prefill: LonePrefill, came: list[wire.Message], told: list[object]
    ) -> None:
        prefill.hear(*came)
        prefill.endpoint.refuse_room(7, BROKEN, prefill.now)
        assert prefill.asked() == told
        assert prefill.counts.rooms_opened == (RoomReleased(1) in told), "a refusal opens none"
        prefill.hear(announce(7, 2))
        # Decode is told when it comes, unless it was.
        assert (7 in prefill.core.rendezvous.announced) == bool(came)

    def test_a_refusal_leaves_a_room_that_was_opened(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        prefill.endpoint.refuse_room(7, BROKEN, prefill.now)
        assert prefill.asked() == [] and not record.ended
        with pytest.raises(MisuseError, match="room id"):
            prefill.endpoint.refuse_room(-1, BROKEN, prefill.now)

    def test_reasons_are_kept_for_as_long_as_a_half_may_wait(self, prefill: LonePrefill) -> None:
        prefill.hear(abort(7, 1))
        prefill.now += 1
        prefill.hear(abort(8, 2), beat())
        assert len(prefill.core.rendezvous) == 2 and prefill.endpoint.next_tick() == START + 3
        prefill.tick(2)
        assert len(prefill.core.rendezvous) == 1 and prefill.endpoint.next_tick() == START + 4
        prefill.tick(1)
        assert len(prefill.core.rendezvous) == 0 and not prefill.open(8).ended


class TestDeadlines:
    def test_an_unannounced_half_ends_at_the_rendezvous(self, prefill: LonePrefill) -> None:
        record = prefill.open()
        prefill.hear(beat())
        assert prefill.endpoint.next_tick() == START + 3
        assert prefill.tick(2.9) == []
        why = Cause(Code.RENDEZVOUS, "room 7: nothing more came for 3.0 s")
        assert prefill.tick(0.1) == stopped(record, why)
        assert prefill.hear(announce()) == [failed(why), ack()]

    def test_so_do_pages_that_no_engine_asked_for(self, prefill: LonePrefill) -> None:
        prefill.hear(bootstrap())
        why = Cause(Code.RENDEZVOUS, "room 7: nothing more came for 3.0 s")
        assert prefill.tick(3) == [failed(why), ack(), RoomReleased(1)]
        record = prefill.open()
        assert prefill.asked() == stopped(record, why)

    def test_how_long_is_the_rooms_own(self, prefill: LonePrefill) -> None:
        record = prefill.open(rendezvous_s=1.5)
        prefill.tick(1.4)
        assert not record.ended
        prefill.tick(0.1)
        assert record.state.cause == Cause(Code.RENDEZVOUS, "room 7: nothing more came for 1.5 s")
        hasty = prefill.open(8, rendezvous_s=0.0)
        prefill.tick()
        assert hasty.ended
        patient = prefill.open(9, rendezvous_s=60.0)
        limited = prefill.open(10, rendezvous_s=60.0, deadline_at_s=prefill.now + 10)
        prefill.tick(59.9)
        assert limited.state.cause is not None and limited.state.cause.code is Code.DEADLINE
        assert not patient.ended
        prefill.tick(0.1)
        assert patient.ended

    @pytest.mark.parametrize(
        "come", ["announced later", "announced before", "offered later", "offered before"]
    )
    def test_one_whose_other_half_is_known_waits_for_its_own_deadline(
        self, prefill: LonePrefill, come: str
    ) -> None:
        message = announce() if come.startswith("announced") else bootstrap()
        prefill.hear(*([message] if come.endswith("before") else []))
        record = prefill.open(deadline_at_s=START + 20)
        prefill.hear(*([message] if come.endswith("later") else []))
        for _ in range(10):
            prefill.tick(1.999)
            prefill.hear(beat())
            assert not record.ended
        prefill.now = START + 20
        why = Cause(Code.DEADLINE, "room 7: nothing more came for 20.0 s")
        opened = record.opened_at_s
        assert opened == START
        assert prefill.tick() == [failed(why), ack(), *stopped(record, why)]

    def test_its_own_deadline_may_be_the_earlier_one(self, prefill: LonePrefill) -> None:
        record = prefill.open(deadline_at_s=START + 2)
        prefill.tick(2)
        assert record.state.cause is not None and record.state.cause.code is Code.DEADLINE
        prefill.hear(bootstrap(8, 2))
        record = prefill.open(8, deadline_at_s=START + 3)
        prefill.tick(1)
        assert record.ended

    def test_without_a_deadline_a_room_waits_for_its_decode(self, prefill: LonePrefill) -> None:
        first, second = prefill.open(7), prefill.open(8)
        prefill.hear(announce(7, 1), bootstrap(8, 2))
        for _ in range(100):
            prefill.tick(4)
            prefill.hear(beat())
        assert not first.ended and not second.ended
        assert [timer.kind for timer in prefill.core.deadlines] == ["silence"]


@pytest.mark.parametrize(
    ("engine", "decode", "told"),
    [
        (True, [], [RoomStopped(1, LEAVING), RoomReleased(1)]),
        (False, [announce()], [failed(LEAVING), ack()]),
        (False, [bootstrap()], [failed(LEAVING), ack(), RoomReleased(1)]),
        (True, [bootstrap()], [failed(LEAVING), ack(), RoomStopped(1, LEAVING), RoomReleased(1)]),
    ],
)
def test_a_prefill_that_leaves_ends_all_and_begins_nothing(
    prefill: LonePrefill, engine: bool, decode: list[wire.Message], told: list[object]
) -> None:
    if engine:
        prefill.open()
    prefill.hear(*decode)
    prefill.asked()
    prefill.endpoint.leave(prefill.now)
    assert prefill.asked() == told
    assert not prefill.endpoint.rooms and prefill.core.rendezvous.announced == {}
    prefill.endpoint.leave(prefill.now)
    assert prefill.asked() == []
    with pytest.raises(AbortedError, match="prefill is shutting down"):
        prefill.open(8)
    assert prefill.hear(announce(9, 9)) == [failed(LEAVING, 9, 9), ack(9, 9)]
    assert prefill.hear(bootstrap(10, 10)) == [failed(LEAVING, 10, 10), ack(10, 10)]
