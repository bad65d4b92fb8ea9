"""Decode's links to prefill ranks: dialled, registered, lost, found again, and given up (I2, I4,
I6).
"""

from __future__ import annotations

import pytest

from kvflow.protocols.commands import Dial, FreePages, HangUp, Linked, StopWatch, WatchWriter
from kvflow.protocols.errors import CapacityError, Cause, Code, LostError, PeerError
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machinery import TICK_WORK
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.wire.messages import GrantId, Incarnation
from kvflow.protocols.wire.ranks import RankInfo
from tests.protocols.alone import (
    AT,
    ELSEWHERE,
    GONE,
    KEY,
    ONE,
    OTHER_KEY,
    OTHER_PREFILL,
    OWN_ADDRESS,
    PREFILL,
    START,
    TWO,
    LoneDecode,
    ack,
    announce,
    beat,
    bootstrap,
    chunk_done,
    failed,
    key_of,
    link,
    over,
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
        assert fresh.hear(registered(fresh_from=1)) == [], (
            "the answer to a Register that was repeated"
        )
        assert fresh.open(8) == 2 and fresh.asked() == [Linked(GrantId(2)), to(announce(8, 2))]

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
    def test_another_one_answers(self, fresh: LoneDecode, answer: object, why: Cause) -> None:
        grant = fresh.open()
        fresh.asked()
        told = [HangUp(KEY), *over(grant, why), StopWatch(KEY)]
        assert fresh.hear(answer) == told  # type: ignore[arg-type]

    def test_the_answer_to_what_another_life_was_asked_is_not_for_this_one(
        self, fresh: LoneDecode
    ) -> None:
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
            Linked(2),
        ]  # type: ignore[arg-type]

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
        foreign = [
            chunk_done(0, 3, True, target=78),
            chunk_done(0, 3, True, source=OTHER_PREFILL),
            chunk_done(0, 3, True, rank=1),
            failed(GONE, rank=1),
            registered(target=78),  # type: ignore[arg-type]
        ]
        assert decode.hear(*foreign) == [] and decode.counts.foreign == 5
        assert decode.hear(chunk_done(0, 3, True), key=OTHER_KEY) == []
        assert decode.counts.foreign == 6
        assert (
            decode.hear(chunk_done(0, 3, True, source=OTHER_PREFILL, rank=1), key=OTHER_KEY) == []
        )
        assert decode.counts.foreign == 7, "it is not linked"
        assert record.state.next_seq == (0,)


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

    def test_a_room_is_linked_when_every_rank_is(self, fresh: LoneDecode) -> None:
        grant = fresh.open(ranks=TWO)
        other = {"source": OTHER_PREFILL}
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
        answer = registered(rank=1, size=2, fresh_from=1, **other)  # type: ignore[arg-type]
        assert fresh.hear(answer, key=OTHER_KEY) == [
            WatchWriter(OTHER_KEY, OWN_ADDRESS),
            Linked(grant),
        ]
        offered = [to(bootstrap()), to(bootstrap(source=OTHER_PREFILL), OTHER_KEY)]
        assert fresh.lend(grant) == offered

    @pytest.mark.parametrize("ranks", [ONE, TWO])
    def test_many_rooms_are_linked_a_few_at_a_time_and_once(
        self, fresh: LoneDecode, ranks: tuple[RankInfo, ...]
    ) -> None:
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
        decode = LoneDecode(bounds=Bounds(links=2)).up().up(other)
        decode.now += 1
        grant = decode.open(8, ONE)
        decode.close(grant)
        decode.hear(ack(8, grant))
        told = decode.do(lambda: decode.open(9, (third,)))
        assert told[:3] == [HangUp(OTHER_KEY), StopWatch(OTHER_KEY), Dial(key_of(third))]
        assert len(decode.core.links.peers) == 2

    def test_nothing_is_kept_of_prefills_that_are_gone(self) -> None:
        """Each restart of a prefill is another peer."""
        decode = LoneDecode(bounds=Bounds(links=2))
        for incarnation in range(300, 310):
            decode.up((rank_info(incarnation=incarnation),))
            decode.now += 1
        kept = decode.core.links
        assert len(kept.peers) == len(kept.coverage) == 2
        assert {peer.key for peers in kept.coverage for peer in peers} == set(kept.peers)

    def test_one_that_is_lost_makes_place_where_none_is_idle_and_its_loans_wait_for_the_fence(
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
        assert to(beat(2, settled=((3, 4),))) in decode.tick(1), (
            "the second is open, and keeps nothing of the third"
        )
        decode.hear(chunk_done(0, 3, True, grant=first.grant))
        assert to(beat(4)) in decode.tick(1)

    @pytest.mark.parametrize(("late_s", "lost_at_s"), [(2.0, 7.0), (9.0, 9.0)])
    def test_its_own_standstill_is_nobodys_silence(
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
