"""Decode's links: dialled, registered, lost, found again, and given up (I2, I4, I6)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvflow.protocols.commands import (
    Dial,
    FreePages,
    HangUp,
    Linked,
    RoomFailed,
    StopWatch,
    WatchWriter,
)
from kvflow.protocols.errors import (
    CapacityError,
    Cause,
    Code,
    LostError,
    MisuseError,
    PeerError,
    RefusedError,
)
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machinery import TICK_WORK
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.messages import Abort, GrantId, Incarnation
from kvflow.protocols.wire.ranks import RankInfo
from tests.protocols.alone import (
    AT,
    BROKEN,
    ELSEWHERE,
    GONE,
    KEY,
    ONE,
    OTHER_KEY,
    OTHER_PREFILL,
    OWN_ADDRESS,
    PREFILL,
    SILENT,
    START,
    TWO,
    LoneDecode,
    abort,
    ack,
    announce,
    beat,
    bootstrap,
    chunk_done,
    failed,
    key_of,
    link,
    over,
    quarantined,
    rank_info,
    register,
    registered,
    to,
)

NO_ANSWER = Cause(Code.PEER_LOST, f"{AT} did not answer for 10 s")


class TestRegistering:
    def test_a_room_dials_and_registers_and_is_announced_at_once(self, fresh: LoneDecode) -> None:
        grant = fresh.open()
        assert fresh.asked() == [Dial(KEY), to(register()), to(announce())]
        assert fresh.hear(registered(fresh_from=1)) == [
            WatchWriter(KEY, OWN_ADDRESS),
            Linked(grant),
        ]
        # The answer to a Register that was repeated.
        assert fresh.hear(registered(fresh_from=1)) == []
        assert fresh.open(8) == 2 and fresh.asked() == [Linked(GrantId(2)), to(announce(8, 2))]

    def test_a_rank_writes_the_parts_that_its_first_acceptance_names(
        self, fresh: LoneDecode
    ) -> None:
        fresh.open()
        accepted = registered(fresh_from=1)
        fresh.hear(accepted)
        fresh.hear(msgspec.structs.replace(accepted, served=()))
        assert next(iter(fresh.endpoint.peers)).served == accepted.served != ()

    def test_register_is_repeated_until_it_is_answered(self, fresh: LoneDecode) -> None:
        fresh.open(deadline_at_s=START + 99)
        fresh.asked()
        assert fresh.endpoint.next_tick() == START + 0.5
        assert fresh.tick(0.5) == [to(register()), to(announce())]
        fresh.hear(registered(fresh_from=1))
        assert to(register()) not in fresh.tick(0.5)

    def test_a_prefill_that_does_not_answer_is_given_up(self, fresh: LoneDecode) -> None:
        grant = fresh.open()
        for _ in range(15):
            fresh.tick(0.5)
        fresh.hear(beat())  # it is opening its route, and that takes long
        for _ in range(39):
            fresh.tick(0.25)
        assert link(fresh) is LinkPhase.REGISTERING
        told = fresh.tick(0.25)
        assert HangUp(KEY) in told and fresh.tick() == [*over(grant, NO_ANSWER), StopWatch(KEY)]
        assert list(fresh.endpoint.peers) == [] and len(fresh.core.deadlines) == 0

    @pytest.mark.parametrize("locked_out", [True, False])
    def test_a_refusal_ends_the_rooms_that_wait(self, fresh: LoneDecode, locked_out: bool) -> None:
        first, second = fresh.open(7), fresh.open(8)
        fresh.asked()
        why = Cause(Code.REFUSED, f"{AT} refused: no room here")
        if locked_out:
            why = Cause(Code.REFUSED, f"{AT} does not let this decode in: wrong key")
            fresh.endpoint.locked_out(KEY, "wrong key", fresh.now)
            assert fresh.asked() == [HangUp(KEY)] and fresh.endpoint.next_tick() == float("-inf")
            told = fresh.tick()
        else:
            hang_up, *told = fresh.hear(registered("no room here"))
            assert hang_up == HangUp(KEY)
        assert told == [*over(first, why), *over(second, why), StopWatch(KEY)]
        assert fresh.counts.endings == {"failed:refused": 2} and len(fresh.core.ledger) == 0
        assert fresh.open(9) == 3 and fresh.asked()[:2] == [Dial(KEY), to(register(fresh_from=3))]

    def test_only_a_link_that_registers_can_be_locked_out(self, decode: LoneDecode) -> None:
        decode.endpoint.locked_out(KEY, "an old key", decode.now)
        decode.endpoint.locked_out(OTHER_KEY, "an old key", decode.now)
        assert decode.asked() == [] and link(decode) is LinkPhase.UP
        decode.lent()
        decode.silence()
        decode.endpoint.locked_out(KEY, "an old key", decode.now)
        assert decode.asked() == [] == decode.tick() and link(decode) is LinkPhase.SILENT

    def test_a_heartbeat_is_sent_as_soon_as_it_is_due(self) -> None:
        fresh = LoneDecode(timing=Timing(heartbeat_s=0.5, repeat_after_s=2.0))
        fresh.open()
        fresh.hear(registered(fresh_from=1))
        assert fresh.endpoint.next_tick() == START + 0.5, "not when Register was to be repeated"

    def test_silence_is_looked_at_when_it_may_be_too_long(self) -> None:
        decode = LoneDecode(timing=Timing(heartbeat_s=60.0, repeat_after_s=60.0)).up()
        decode.lent()
        decode.now += 1
        decode.hear(beat())
        assert decode.tick() == [] and decode.endpoint.next_tick() == START + 6
        decode.endpoint.credit_stall(1.0, decode.now + 1)
        assert decode.tick(5) == [] and decode.endpoint.next_tick() == START + 7
        decode.tick(1)
        assert link(decode) is LinkPhase.SILENT

    def test_the_address_of_the_writer_is_the_first_that_was_named(self, fresh: LoneDecode) -> None:
        fresh.open()
        fresh.asked()
        assert fresh.hear(registered(fresh_from=1, address=None)) == [Linked(GrantId(1))]
        decode = LoneDecode().up()
        (peer,) = decode.endpoint.peers
        decode.hear(registered(fresh_from=9, address=None))
        assert peer.address == OWN_ADDRESS

    @pytest.mark.parametrize(
        ("answer", "why"),
        [
            (
                registered(source=OTHER_PREFILL, asked=PREFILL),
                Cause(Code.PEER_LOST, f"{AT} restarted: another incarnation answers"),
            ),
            (
                registered("full", source=OTHER_PREFILL, asked=PREFILL),
                Cause(Code.PEER_LOST, f"{AT} restarted: another incarnation answers"),
            ),
            (
                registered(rank=5),
                Cause(Code.PROTOCOL_ERROR, f"{AT} says it is rank 5, the registry says 0"),
            ),
        ],
    )
    def test_another_one_answers(self, fresh: LoneDecode, answer: wire.Message, why: Cause) -> None:
        grant = fresh.open()
        fresh.asked()
        told = [HangUp(KEY), *over(grant, why), StopWatch(KEY)]
        assert fresh.hear(answer) == told

    def test_the_answer_for_another_life_is_not_for_this_one(self, fresh: LoneDecode) -> None:
        old = rank_info(incarnation=OTHER_PREFILL)
        fresh.open(7, (old,))
        fresh.open(8)
        fresh.asked()
        answer = registered(source=PREFILL, asked=OTHER_PREFILL)
        told = fresh.hear(answer)
        assert told[0] == HangUp(key_of(old)) and link(fresh) is LinkPhase.REGISTERING
        assert fresh.hear(answer) == [] and fresh.counts.stale == 1, "that link is no more"
        assert fresh.hear(registered(asked=0, fresh_from=2)) == [
            WatchWriter(KEY, OWN_ADDRESS),
            Linked(GrantId(2)),
        ]

    def test_acceptance_of_an_older_register_is_none(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.silence()
        assert link(decode) is LinkPhase.SILENT and record.grant == 2
        assert decode.hear(registered(fresh_from=2)) == [] and decode.counts.stale == 1
        assert link(decode) is LinkPhase.SILENT
        decode.hear(registered(fresh_from=3))
        assert link(decode) is LinkPhase.UP

    def test_bad_and_foreign_frames_change_nothing(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.endpoint.receive(KEY, b"\xff", decode.now)
        assert (decode.asked(), decode.counts.malformed) == ([], 1)
        foreign: list[wire.Message] = [
            chunk_done(0, 3, True, target=78),
            chunk_done(0, 3, True, source=OTHER_PREFILL),
            chunk_done(0, 3, True, rank=1),
            failed(GONE, rank=1),
            ack(grant=record.grant, rank=1),
            ack(grant=record.grant, target=78),
            beat(source=OTHER_PREFILL),
            registered(target=Incarnation(78)),
        ]
        assert decode.hear(*foreign) == [] and decode.counts.foreign == 8
        assert decode.hear(chunk_done(0, 3, True), key=OTHER_KEY) == []
        assert decode.counts.foreign == 9
        assert (
            decode.hear(chunk_done(0, 3, True, source=OTHER_PREFILL, rank=1), key=OTHER_KEY) == []
        )
        assert decode.counts.foreign == 10, "it is not linked"
        assert record.state.next_seq == (0,) and len(decode.core.ledger) == 1


class TestWhichRanks:
    def test_what_a_registry_must_not_answer(self, fresh: LoneDecode) -> None:
        fresh.endpoint.bounds = Bounds()
        with pytest.raises(LostError, match="no rank of that prefill is known"):
            fresh.open(ranks=())
        with pytest.raises(
            PeerError, match="the registry names one incarnation for two ranks of tcp://prefill:0"
        ):
            fresh.open(ranks=(rank_info(size=2), rank_info(rank=1, size=2)))
        for ranks, text in (
            (
                (rank_info(), rank_info(rank=1, incarnation=OTHER_PREFILL)),
                "has world_size 1, and 2 ranks are given",
            ),
            ((rank_info(size=2),), "has world_size 2, and 1 rank is given"),
            ((rank_info(rank=1),), r"rank 1 is outside 0\.\.0"),
        ):
            with pytest.raises(PeerError, match=text):
                fresh.open(ranks=ranks)
        assert fresh.asked() == [] and fresh.open() == 1, "no grant was used"

    def test_how_many(self) -> None:
        fresh = LoneDecode(bounds=Bounds(ranks_per_room=2))
        fresh.open(ranks=TWO)
        three = tuple(rank_info(rank, incarnation=rank + 1, size=3) for rank in range(3))
        with pytest.raises(
            PeerError, match="prefill tcp://prefill:0 has 3 ranks; one room takes 2 at most"
        ):
            fresh.open(8, three)
        assert list(fresh.core.links.peers) == [KEY, OTHER_KEY] and len(fresh.endpoint.rooms) == 1

    def test_ranks_that_send_bytes_twice_are_refused_at_once(self, fresh: LoneDecode) -> None:
        fresh.endpoint.refuse_room(6, TWO, BROKEN, fresh.now)
        fresh.hear(registered(fresh_from=1))
        fresh.hear(registered(source=OTHER_PREFILL, rank=1, fresh_from=1), key=OTHER_KEY)
        with pytest.raises(RefusedError, match="come from rank 0 and from rank 1"):
            fresh.open(7, TWO)
        assert not fresh.endpoint.rooms

    def test_a_room_is_linked_when_every_rank_is(self, fresh: LoneDecode) -> None:
        grant = fresh.open(ranks=TWO)
        assert fresh.asked() == [
            *(
                Dial(KEY),
                to(register()),
                Dial(OTHER_KEY),
                to(register(source=OTHER_PREFILL), OTHER_KEY),
            ),
            *(to(announce()), to(announce(source=OTHER_PREFILL), OTHER_KEY)),
        ]
        assert fresh.hear(registered(size=2, fresh_from=1)) == [WatchWriter(KEY, OWN_ADDRESS)]
        answer = registered(source=OTHER_PREFILL, rank=1, size=2, fresh_from=1)
        assert fresh.hear(answer, key=OTHER_KEY) == [
            WatchWriter(OTHER_KEY, OWN_ADDRESS),
            Linked(grant),
        ]
        offered = [to(bootstrap()), to(bootstrap(source=OTHER_PREFILL), OTHER_KEY)]
        assert fresh.lend(grant) == offered

    @pytest.mark.parametrize("ranks", [ONE, TWO])
    def test_many_rooms_are_linked(self, fresh: LoneDecode, ranks: tuple[RankInfo, ...]) -> None:
        grants = [fresh.open(room, ranks) for room in range(2 * TICK_WORK + 1)]
        fresh.endpoint.close_room(grants[-2], GONE, fresh.now)
        fresh.asked()
        linked: list[list[GrantId]] = []
        for info in ranks:
            source = Incarnation(info.incarnation)
            answer = registered(
                source=source, rank=info.rank, size=len(ranks), fresh_from=fresh.core.next_grant
            )
            linked.append(
                [c.grant for c in fresh.hear(answer, key=key_of(info)) if isinstance(c, Linked)]
            )
        while fresh.endpoint.next_tick() == float("-inf"):
            linked.append([c.grant for c in fresh.tick() if isinstance(c, Linked)])
        assert max(map(len, linked)) == TICK_WORK
        assert sorted(grant for found in linked for grant in found) == [*grants[:-2], grants[-1]]

    def test_two_ranks_at_one_address(self, two: LoneDecode) -> None:
        with pytest.raises(
            PeerError, match="prefill at tcp://prefill:1 is rank 1, and was asked for as 0"
        ):
            two.open(ranks=(rank_info(incarnation=OTHER_PREFILL, control=OTHER_KEY.control),))

    def test_a_link_that_waits_for_its_end(self, decode: LoneDecode) -> None:
        decode.lent()
        decode.silence()
        decode.tick(1)
        with pytest.raises(
            LostError,
            match=r"prefill at tcp://prefill:0 is silent: prefill at .* was silent for 5 s",
        ):
            decode.open(8)

    def test_the_link_that_was_idle_for_longest_makes_place(self) -> None:
        other = (rank_info(incarnation=OTHER_PREFILL, control=OTHER_KEY.control),)
        decode = LoneDecode(bounds=Bounds(links=2)).up().up(other)
        decode.now += 1
        grant = decode.open(8, ONE)
        (third,) = ELSEWHERE
        with pytest.raises(CapacityError, match="links to prefill ranks: asked for 3, limit 2"):
            decode.lent(9, other)
            decode.open(10, (third,))
        assert list(decode.core.links.peers) == [KEY, OTHER_KEY] and len(decode.endpoint.rooms) == 2
        decode = LoneDecode(bounds=Bounds(links=2)).up().up(other)
        decode.now += 1
        grant = decode.open(8, ONE)
        decode.close(grant)
        decode.hear(ack(8, grant))
        told = decode.do(lambda: decode.open(9, (third,)))
        assert told[:3] == [HangUp(OTHER_KEY), StopWatch(OTHER_KEY), Dial(key_of(third))]
        assert len(decode.core.links.peers) == 2

    def test_a_room_does_not_close_the_links_that_it_needs_itself(self) -> None:
        decode = LoneDecode(bounds=Bounds(links=2)).up()
        decode.now += 1
        decode.up(ELSEWHERE)
        decode.open(7, TWO)
        assert list(decode.core.links.peers) == [KEY, OTHER_KEY]
        fresh = LoneDecode(bounds=Bounds(links=1))
        with pytest.raises(CapacityError, match="links to prefill ranks"):
            fresh.open(7, TWO)
        assert not fresh.endpoint.rooms and len(fresh.core.ledger) == 0
        fresh.open(8, ELSEWHERE)
        assert list(fresh.core.links.peers) == [key_of(ELSEWHERE[0])]

    def test_a_link_that_a_later_rank_needs_stays_open(self) -> None:
        decode = LoneDecode(bounds=Bounds(links=2)).up(TWO)
        decode.endpoint.writer_died(KEY, decode.now)
        decode.now += 1
        decode.up(ELSEWHERE)
        decode.open(8, TWO)
        told = decode.asked()
        assert HangUp(key_of(ELSEWHERE[0])) in told and HangUp(OTHER_KEY) not in told
        assert list(decode.core.links.peers) == [OTHER_KEY, KEY]

    def test_nothing_is_kept_of_prefills_that_are_gone(self) -> None:
        """Each restart of a prefill is another peer."""
        decode = LoneDecode(bounds=Bounds(links=2))
        for incarnation in range(300, 310):
            decode.up((rank_info(incarnation=incarnation),))
            decode.now += 1
        kept = decode.core.links
        assert len(kept.peers) == len(kept.coverage) == 2
        assert {peer.key for peers in kept.coverage for peer in peers} == set(kept.peers)

    def test_a_lost_link_makes_place_and_its_loans_wait_for_the_fence(
        self,
    ) -> None:
        other = (rank_info(incarnation=OTHER_PREFILL, control=OTHER_KEY.control),)
        decode = LoneDecode(bounds=Bounds(links=2)).up().up(other)
        decode.lent(8)
        decode.tick(4)
        decode.lent(9, other)
        decode.hear(beat(source=OTHER_PREFILL), key=OTHER_KEY)
        decode.silence(1)
        (third,) = ELSEWHERE
        told = decode.do(lambda: decode.open(10, (third,)))
        assert HangUp(KEY) in told and Dial(key_of(third)) in told
        assert link(decode) is LinkPhase.GONE and decode.core.ledger.quarantined_pages == 3
        with pytest.raises(CapacityError, match="links to prefill ranks: asked for 3, limit 2"):
            decode.open(11, (rank_info(incarnation=404, control="tcp://more:1"),))
        decode.endpoint.writer_died(KEY, decode.now)
        assert FreePages(GrantId(3)) in decode.asked()

    def test_one_that_owes_nothing_is_found_beside_one_that_does(self) -> None:
        decode = LoneDecode(bounds=Bounds(links=2)).up(ELSEWHERE)
        decode.lent(8, ELSEWHERE)
        decode.now += 1
        decode.up()
        decode.asked()
        told = decode.do(lambda: decode.open(9, (rank_info(incarnation=OTHER_PREFILL),)))
        assert told[:2] == [HangUp(KEY), StopWatch(KEY)]


class TestHeartbeats:
    def test_both_ways_keep_a_link_up(self, decode: LoneDecode) -> None:
        for _ in range(12):
            assert decode.tick(0.9) == [] and decode.endpoint.next_tick() == decode.now + 0.1
            assert decode.tick(0.1) == [to(beat(2))], "every grant below 2 has ended"
            assert decode.hear(beat()) == []
        assert link(decode) is LinkPhase.UP

    def test_they_say_what_is_settled_and_known_to_prefill(self, decode: LoneDecode) -> None:
        first, second = decode.lent(7), decode.lent(8)
        assert decode.tick(1)[0] == to(beat(2)), "the second and third are open"
        decode.hear(chunk_done(0, 3, True, room=8, grant=second.grant))
        # The second is open, and keeps nothing of the third.
        assert to(beat(2, settled=((3, 4),))) in decode.tick(1)
        decode.hear(chunk_done(0, 3, True, grant=first.grant))
        assert to(beat(4)) in decode.tick(1)

    @pytest.mark.parametrize(("late_s", "lost_at_s"), [(2.0, 7.0), (9.0, 9.0)])
    def test_its_own_stall_is_no_silence(
        self, decode: LoneDecode, late_s: float, lost_at_s: float
    ) -> None:
        decode.lent()
        decode.now += 4
        decode.endpoint.credit_stall(late_s, decode.now)
        decode.tick()
        decode.tick(lost_at_s - 4 - 0.1)
        assert link(decode) is LinkPhase.UP
        decode.tick(0.1)
        assert link(decode) is LinkPhase.SILENT


# --- silence and death


DIED = Cause(Code.PEER_LOST, f"{AT} died")


class TestSilence:
    def test_an_idle_link_is_dropped_and_says_what_is_settled(self, decode: LoneDecode) -> None:
        told = decode.tick(5)
        assert told == [to(register(fresh_from=2)), to(beat(2)), HangUp(KEY), StopWatch(KEY)]
        assert list(decode.endpoint.peers) == [] and len(decode.core.deadlines) == 0
        ledger = decode.core.ledger
        assert not ledger._by_source and not ledger._acknowledged, "nothing is kept of it"

    @pytest.mark.parametrize("after_s", [1.0, 1.2])
    def test_a_heartbeat_does_not_wait_for_rooms(self, decode: LoneDecode, after_s: float) -> None:
        for room in range(2 * TICK_WORK + 5):
            decode.lent(room)
        told = decode.tick(after_s)
        asked = [len(entry[1].rooms) for entry in told if isinstance(entry[1], wire.Resync)]
        # The first of what is due is a repetition.
        assert asked == [TICK_WORK - 1] and to(beat(2)) in told
        told = decode.tick()
        assert [type(entry[1]) for entry in told] == [wire.Resync], "and one is enough"
        decode.hear(beat())
        assert to(beat(2)) in decode.tick(1.0)

    def test_what_it_knows_and_what_is_settled(self, decode: LoneDecode) -> None:
        """Only an acceptance says that the third grant is known: it ended in silence."""
        for answer, settled in ((registered("full"), 3), (registered(fresh_from=4), 4)):
            decode = LoneDecode().up()
            record, waiting = decode.lent(7), decode.open(8)
            decode.silence()
            decode.hear(answer)
            told = decode.hear(ack(grant=record.grant)) + decode.tick(1)
            beats = [
                entry[1]
                for entry in told
                if isinstance(entry, tuple) and type(entry[1]) is type(beat())
            ]
            assert waiting == 3 and beats == [beat(settled)]
            if settled == 4:
                # It was received from when it accepted.
                assert decode.tick(3.75) and link(decode) is LinkPhase.UP

    def test_rooms_end_and_what_was_lent_waits_for_proof(self, decode: LoneDecode) -> None:
        record, waiting = decode.lent(7), decode.open(8)
        decode.asked()
        told = decode.tick(5)
        assert to(register(fresh_from=4)) in told and decode.endpoint.next_tick() == float("-inf")
        told = decode.tick()
        assert told == [
            RoomFailed(record.grant, SILENT),
            *quarantined(record.grant),
            *over(waiting, SILENT),
        ], "an Abort would only wait in a queue"
        assert record.state.cause == SILENT
        assert decode.counts.endings == {
            "aborted:client_gone": 1,
            "lost:peer_lost": 1,
            "failed:peer_lost": 1,
        }
        assert len(decode.core.ledger) == 1 and decode.core.ledger.quarantined_pages == 3

    def test_it_registers_and_dials_again_until_it_is_accepted(self, decode: LoneDecode) -> None:
        record = decode.lent()
        assert Dial(KEY) not in decode.tick(5)
        decode.tick()
        assert decode.endpoint.next_tick() == decode.now + 1
        for _ in range(4):
            assert decode.tick(1) == [to(register(fresh_from=3))]
            assert decode.hear(beat()) == [] and link(decode) is LinkPhase.SILENT
        assert decode.tick(1) == [HangUp(KEY), Dial(KEY), to(register(fresh_from=3))]
        # And the wait for the next dial begins anew.
        assert decode.tick(1) == [to(register(fresh_from=3))]
        told = decode.hear(registered(fresh_from=3))
        assert told == [to(abort(grant=record.grant, cause=SILENT))]
        assert link(decode) is LinkPhase.UP
        assert decode.hear(ack(grant=record.grant)) == [FreePages(record.grant)]
        assert decode.tick(1)[-1] == to(beat(3))

    def test_a_silent_prefill_that_refuses_is_asked_once(self, decode: LoneDecode) -> None:
        """It lives, and may know how its writes ended."""
        record = decode.lent()
        decode.silence()
        asked = [to(abort(grant=record.grant, cause=SILENT))]
        assert decode.hear(registered("full")) == asked and link(decode) is LinkPhase.SILENT
        assert decode.hear(registered("full")) == []
        decode.tick(1)
        assert decode.tick() == asked, "its Abort is repeated until it is answered"
        decode.hear(ack(grant=record.grant, drained=False))
        assert decode.hear(registered("full")) == []
        assert decode.hear(registered(fresh_from=3)) == asked, "accepted, it is asked again"
        decode.silence()
        assert decode.hear(registered("full")) == asked, "and once in every silence"

    def test_when_its_last_loan_ends_it_is_dropped(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.silence()
        told = decode.hear(ack(grant=record.grant))
        assert told == [FreePages(record.grant), to(beat(3)), HangUp(KEY), StopWatch(KEY)]
        assert list(decode.endpoint.peers) == [] and len(decode.core.deadlines) == 0


class TestTheWriterDies:
    def test_its_rooms_and_loans_end_at_once(self, decode: LoneDecode) -> None:
        record, waiting = decode.lent(7), decode.open(8)
        decode.asked()
        decode.endpoint.writer_died(KEY, decode.now)
        told = decode.asked()
        assert told == [
            HangUp(KEY),
            RoomFailed(record.grant, DIED),
            *quarantined(record.grant),
            *over(waiting, DIED),
            FreePages(record.grant),
            StopWatch(KEY),
        ]
        assert list(decode.endpoint.peers) == [] and len(decode.core.ledger) == 0
        decode.endpoint.writer_died(KEY, decode.now)
        assert decode.asked() == []

    def test_of_a_silent_link(self, decode: LoneDecode) -> None:
        record = decode.lent()
        decode.silence()
        decode.endpoint.writer_died(KEY, decode.now)
        told = [to(beat(2)), HangUp(KEY), FreePages(record.grant), StopWatch(KEY)]
        assert decode.asked() == told and decode.core.ledger.quarantined_pages == 0

    def test_of_a_link_that_is_gone(self, decode: LoneDecode) -> None:
        """Replaced by another incarnation, it is kept for what it owes."""
        record = decode.lent()
        decode.hear(registered(source=OTHER_PREFILL, asked=PREFILL))
        assert link(decode) is LinkPhase.GONE
        assert "link" not in {timer.kind for timer in decode.core.deadlines}, "nothing is due"
        with pytest.raises(LostError, match=r"is gone: prefill at .* restarted"):
            decode.open(8)
        decode.endpoint.writer_died(KEY, decode.now)
        assert decode.asked() == [FreePages(record.grant), StopWatch(KEY)]


class TestDeclaredDead:
    def test_its_rooms_and_loans_end_on_that_word(self, decode: LoneDecode) -> None:
        first, second = decode.lent(7), decode.lent(8)
        decode.silence()
        why = Cause(Code.PEER_LOST, f"{AT} was declared dead: rack 4 burns")
        assert decode.endpoint.declare_dead(PREFILL, "rack 4 burns", decode.now) == (2, 6)
        told = decode.asked()
        assert told == [
            *(to(abort(7, first.grant, cause=SILENT)), to(abort(8, second.grant, cause=SILENT))),
            *(to(beat(2)), HangUp(KEY)),
            *(FreePages(first.grant), FreePages(second.grant), StopWatch(KEY)),
        ], "should it live, it is told to stop"
        assert decode.counts.declared_dead == 1 and len(decode.core.ledger) == 0
        with pytest.raises(
            LostError, match="prefill 0000000000000065 at tcp://prefill:0 was declared dead"
        ):
            decode.open(9)
        with pytest.raises(MisuseError, match="no prefill 0000000000000065 is linked here"):
            decode.endpoint.declare_dead(PREFILL, "again", decode.now)
        assert why.text and decode.open(9, ELSEWHERE) == 4

    def test_while_it_is_up(self, decode: LoneDecode) -> None:
        record, waiting = decode.lent(7), decode.open(8)
        decode.asked()
        why = Cause(Code.PEER_LOST, f"{AT} was declared dead: rack 4 burns")
        assert decode.endpoint.declare_dead(PREFILL, "rack 4 burns", decode.now) == (2, 0)
        assert decode.asked() == [
            *(to(abort(7, record.grant, cause=why)), to(abort(8, waiting, cause=why)), HangUp(KEY)),
            *(RoomFailed(record.grant, why), *quarantined(record.grant)),
            *over(waiting, why),
            *(FreePages(record.grant), StopWatch(KEY)),
        ]
        assert list(decode.endpoint.peers) == []

    def test_and_nobody_elses(self) -> None:
        decode = LoneDecode().up().up(ELSEWHERE)
        decode.lent(8, ELSEWHERE)
        assert decode.endpoint.declare_dead(PREFILL, "gone", decode.now) == (0, 0)
        assert [peer.key for peer in decode.endpoint.peers] == [key_of(ELSEWHERE[0])]
        assert len(decode.endpoint.rooms) == 1
        elsewhere = Incarnation(ELSEWHERE[0].incarnation)
        assert decode.endpoint.declare_dead(elsewhere, "gone too", decode.now) == (1, 0)
        assert decode.counts.declared_dead == 2

    def test_every_rank_of_that_process(self, fresh: LoneDecode) -> None:
        fresh.up()
        fresh.up((rank_info(control="tcp://elsewhere:1"),))
        fresh.lent(7)
        fresh.lent(8, (rank_info(control="tcp://elsewhere:1"),))
        assert fresh.endpoint.declare_dead(PREFILL, "gone", fresh.now)[0] == 2
        assert list(fresh.endpoint.peers) == []


def aborts(told: list[Any]) -> int:
    return sum(isinstance(entry, tuple) and isinstance(entry[1], Abort) for entry in told)


def pass_time(decode: LoneDecode, after_s: float) -> list[Any]:
    """Everything asked for until nothing is due any more."""
    told: list[Any] = []
    decode.now += after_s
    while decode.endpoint.next_tick() <= decode.now:
        told += decode.tick()
    return told


def test_a_withdrawal_is_repeated_at_once_when_the_link_comes_up() -> None:
    decode = LoneDecode(timing=None)
    assert aborts(decode.close(decode.open())) == 1
    # Unanswered for five seconds, it is repeated less and less often.
    assert 1 < sum(aborts(pass_time(decode, 0.1)) for _ in range(50)) < 6
    assert aborts(decode.hear(registered(fresh_from=1)) + pass_time(decode, 0.0)) == 1
    assert aborts(pass_time(decode, 0.9)) == 1, "and from here on as often as at first"
