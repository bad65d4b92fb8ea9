"""A link that decode loses: rooms end, loans wait for proof, and what proves them (I2, I4)."""

from __future__ import annotations

import pytest

from kvflow.protocols.commands import Dial, FreePages, HangUp, RoomFailed, StopWatch
from kvflow.protocols.errors import Cause, Code, LostError, MisuseError
from kvflow.protocols.machinery import TICK_WORK
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.wire import messages as wire
from tests.protocols.alone import (
    AT,
    ELSEWHERE,
    KEY,
    OTHER_PREFILL,
    PREFILL,
    SILENT,
    LoneDecode,
    abort,
    ack,
    beat,
    key_of,
    link,
    over,
    quarantined,
    rank_info,
    register,
    registered,
    to,
)

DIED = Cause(Code.PEER_LOST, f"{AT} died")


class TestSilence:
    def test_an_idle_link_is_dropped_and_says_what_is_settled(self, decode: LoneDecode) -> None:
        told = decode.tick(5)
        assert told == [to(register(fresh_from=2)), to(beat(2)), HangUp(KEY), StopWatch(KEY)]
        assert list(decode.endpoint.peers) == [] and len(decode.core.deadlines) == 0
        ledger = decode.core.ledger
        assert not ledger._by_source and not ledger._acknowledged, "nothing is kept of it"

    @pytest.mark.parametrize("after_s", [1.0, 1.2])
    def test_a_heartbeat_does_not_wait_for_thousands_of_rooms(
        self, decode: LoneDecode, after_s: float
    ) -> None:
        """Else a prefill that answers each of them would be silent by the time it is asked."""
        for room in range(2 * TICK_WORK + 5):
            decode.lent(room)
        told = decode.tick(after_s)
        asked = [len(entry[1].rooms) for entry in told if isinstance(entry[1], wire.Resync)]
        assert asked == [TICK_WORK - 1] and to(beat(2)) in told, (
            "the first of what is due is a repetition"
        )
        told = decode.tick()
        assert [type(entry[1]) for entry in told] == [wire.Resync], "and one is enough"
        decode.hear(beat())
        assert to(beat(2)) in decode.tick(1.0)

    def test_what_it_knows_and_what_is_settled(self, decode: LoneDecode) -> None:
        """The third grant ended in silence, and was never acknowledged: only an acceptance says
        that it is known.
        """
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
                assert decode.tick(3.75) and link(decode) is LinkPhase.UP, (
                    "it was received from when it accepted"
                )

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

    def test_it_registers_again_and_dials_again_until_it_is_accepted(
        self, decode: LoneDecode
    ) -> None:
        record = decode.lent()
        assert Dial(KEY) not in decode.tick(5)
        decode.tick()
        assert decode.endpoint.next_tick() == decode.now + 1
        for _ in range(4):
            assert decode.tick(1) == [to(register(fresh_from=3))]
            assert decode.hear(beat()) == [] and link(decode) is LinkPhase.SILENT
        assert decode.tick(1) == [HangUp(KEY), Dial(KEY), to(register(fresh_from=3))]
        assert decode.tick(1) == [to(register(fresh_from=3))], (
            "and the wait for the next dial begins anew"
        )
        told = decode.hear(registered(fresh_from=3))
        assert told == [to(abort(grant=record.grant, cause=SILENT))]
        assert link(decode) is LinkPhase.UP
        assert decode.hear(ack(grant=record.grant)) == [FreePages(record.grant)]
        assert decode.tick(1)[-1] == to(beat(3))

    def test_a_silent_prefill_that_refuses_is_asked_once(self, decode: LoneDecode) -> None:
        """It lives, and may know what became of its writes;
        it answers every Register the same way.
        """
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

    def test_every_rank_of_that_process(self, fresh: LoneDecode) -> None:
        fresh.up()
        fresh.up((rank_info(control="tcp://elsewhere:1"),))
        fresh.lent(7)
        fresh.lent(8, (rank_info(control="tcp://elsewhere:1"),))
        assert fresh.endpoint.declare_dead(PREFILL, "gone", fresh.now)[0] == 2
        assert list(fresh.endpoint.peers) == []
