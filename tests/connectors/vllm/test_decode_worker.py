"""A load at every moment of its life, in decode's worker."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

import kvflow
from kvflow.connectors.vllm import decode_worker
from kvflow.connectors.vllm.messages import Computed, Offer
from kvflow.protocols.errors import Cause, Code
from tests.connectors.vllm.worker_pair import (
    MANY_GROUPS,
    NAME,
    PATIENCE_S,
    PROMPT,
    ROOM,
    Pair,
    pair,
)


def fail_at_prefill(each: Pair) -> None:
    each.step_prefill(sources=[each.source()], finished={NAME: True})


@pytest.mark.parametrize("is_staged", [False, True])
def test_one_leg_after_the_other(is_staged: bool) -> None:
    with pair(is_staged=is_staged) as each:
        each.gate.open.clear()
        each.send_all(3, 1, 2)
        assert not each.sent
        each.load(9, 4, 7)
        assert each.lent == [4, 7, 9]
        each.gate.open.set()
        each.ends("sent received")
        each.assert_loaded()
        moved = each.decode.stats.take()
        assert moved is not None and moved["received_bytes"] == [3 * 64]


def test_an_announced_load_is_ready_when_its_prefill_has_begun() -> None:
    with pair(load_deadline_s=60) as each:
        each.step_decode(targets=[each.target(workers=2)])
        each.step_prefill(sources=[each.source()])
        each.until(lambda: each.room_phase() == "ANNOUNCED")
        assert not each.ready
        each.step_prefill(begun=["another's", NAME])
        each.until(lambda: each.ready)
        assert each.ready == {NAME: {0}} and not each.failures
        assert not each.decode._due_s, "no deadline before anything is lent"
        each.step_prefill(computed={NAME: Computed([[3, 1, 2]], True)}, finished={NAME: False})
        each.step_decode(offers={NAME: Offer([[9, 4, 7]], 0)})
        each.ends("sent received")
        each.assert_loaded()


def test_an_announced_load_that_fails_at_one_worker_waits_for_none() -> None:
    with pair() as each:
        fail_at_prefill(each)
        each.step_decode(targets=[each.target(workers=3)])
        each.until(lambda: each.ready)
        assert each.ready == {NAME: {0, 1, 2}}
        each.step_decode(abandoned=[NAME])


def test_a_deadline_is_that_of_blocks_that_are_lent() -> None:
    with pair(load_deadline_s=0.05) as each:
        each.step_prefill(sources=[each.source()])
        each.step_decode(targets=[each.target()])
        other = each.target(room=8, name="other")
        each.step_decode(targets=[other], offers={"other": Offer([[1, 2, 3]], 0)})
        each.until(lambda: each.failures["other"])
        assert (
            each.causes["other"].code == Code.DEADLINE
            and "load_deadline_s" in each.causes["other"].text
        )
        assert not each.failures[NAME] and not each.ready
        each.step_decode(held={"other": {0}}, offers={NAME: Offer([[9, 4, 7]], 0)})
        each.hold()
        each.step_prefill(finished={NAME: True})


@pytest.mark.parametrize(("prefix_tokens", "blocks"), [(4, [9, 4]), (8, [9]), (10, [])])
@pytest.mark.parametrize("is_announced", [False, True])
def test_what_decode_has_does_not_travel(
    prefix_tokens: int, blocks: list[int], is_announced: bool
) -> None:
    with pair() as each:
        each.offer(Offer([blocks] if blocks else (), prefix_tokens), is_announced=is_announced)
        each.send_all(3, 1, 2)
        each.ends("sent received" if blocks else "sent")
        assert list(each.target_pages[blocks]) == [2, 3][2 - len(blocks) :]
        moved = each.prefill.stats.take()
        assert moved is not None and moved["sent_bytes"] == [64 * len(blocks)]


@pytest.mark.parametrize("is_sent", [False, True])
def test_it_is_over_while_only_announced(is_sent: bool) -> None:
    """vLLM waits for nothing then; prefill hears of it."""
    with pair() as each:
        each.step_decode(targets=[each.target()])
        if is_sent:
            each.send_all(3, 1, 2)
        each.step_decode(abandoned=[NAME])
        if not is_sent:
            each.until(lambda: not each.decode.is_busy)
            each.send_all(3, 1, 2)
        each.ends("sent")


def test_it_is_over_at_once() -> None:
    with pair() as each:
        offers = {NAME: Offer([[9, 4, 7]], 0)}
        each.step_decode(targets=[each.target()], offers=offers, abandoned=[NAME])
        each.ends("received")


def test_it_is_over_while_it_is_written() -> None:
    with pair() as each:
        each.load_halfway()
        each.step_decode(abandoned=[NAME])
        each.until(lambda: each.decode._targets[NAME].cause is not None)
        assert not each.received and each.decode.quarantined_blocks == 3
        assert each.lent == [4, 7, 9]
        each.gate.open.set()
        each.ends("sent received")


def test_a_staged_load_lands_when_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, may_copy = threading.Event(), threading.Event()
    copy_in = kvflow.Staging.copy_in

    def held(self: kvflow.Staging, *args: Any) -> bool:
        copies.set()
        assert may_copy.wait(PATIENCE_S)
        return copy_in(self, *args)

    monkeypatch.setattr(kvflow.Staging, "copy_in", held)
    with pair(is_staged=True) as each:
        each.send_all(3, 1, 2)
        each.load(9, 4, 7)
        assert copies.wait(PATIENCE_S)
        each.step_decode()
        assert not each.received and each.lent == [4, 7, 9] and not each.target_pages.any()
        may_copy.set()
        each.ends("sent received")
        each.assert_loaded()


def test_it_is_over_when_it_has_landed() -> None:
    with pair() as each:
        each.send_all(3, 1, 2)
        each.load(9, 4, 7)
        each.until(lambda: not each.decode._targets)
        each.step_decode(abandoned=[NAME])
        each.ends("sent received")


def test_it_fails_while_only_announced() -> None:
    with pair() as each:
        fail_at_prefill(each)
        each.step_decode(targets=[each.target()])
        each.until(lambda: each.decode._targets[NAME].cause is not None)
        assert not each.failures, "nobody waits for it yet"
        each.step_decode(offers={NAME: Offer([[9, 4, 7]], 0)})
        each.hold()
        each.ends("sent received failed")
        assert each.causes[NAME].code == Code.CLIENT_GONE


def test_it_fails_while_only_announced_and_is_over_or_has_all() -> None:
    with pair() as each:
        for offers, abandoned in (({}, [NAME]), ({NAME: Offer((), 10)}, [])):
            fail_at_prefill(each)
            each.step_decode(targets=[each.target()])
            each.until(lambda: each.decode._targets[NAME].cause is not None)
            each.step_decode(offers=offers, abandoned=abandoned)
            each.until_rest()
            each.sent.clear()
        assert not each.received and not each.failures


def test_a_failure_of_what_is_not_waited_for_is_none() -> None:
    with pair() as each:
        each.offer(Offer((), 10), is_announced=False)
        fail_at_prefill(each)
        each.until_rest()
        assert not (each.decode.stats.take() or {"failed": {}})["failed"]


def test_a_load_has_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(load_deadline_s=3600) as each:
        each.load(9, 4, 7)
        with each.decode._lock:
            monkeypatch.setattr(decode_worker, "time", SimpleNamespace(monotonic=lambda: 100.0))
            each.decode._due_s[NAME] = 100.5
            assert each.decode._expire() == 0.5 and NAME in each.decode._due_s
            each.decode._due_s[NAME] = 100.0
            each.decode._expire()
            assert NAME not in each.decode._due_s
            monkeypatch.undo()
        each.hold()
        assert each.causes[NAME].code == Code.DEADLINE


def test_it_is_over_after_it_was_told_and_before_it_is_held() -> None:
    with pair() as each:
        fail_at_prefill(each)
        each.load(9, 4, 7)
        each.until(lambda: each.failures[NAME] and each.released[NAME])
        each.step_decode(abandoned=[NAME])
        each.ends("sent received failures")


@pytest.mark.parametrize("is_over", [False, True])
def test_held_blocks_are_released_when_nothing_writes_them(is_over: bool) -> None:
    with pair(load_deadline_s=60) as each:
        each.load_halfway()
        each.pass_deadline()
        each.hold()
        assert each.received == each.failed == {NAME: 1} and each.causes[NAME].code == Code.DEADLINE
        assert not each.released and each.decode.quarantined_blocks == 3
        if is_over:
            each.step_decode(abandoned=[NAME])
        each.step_decode(held={NAME: {0}})
        assert not each.released and list(each.decode.thread.pages.busy([4])) == [4]
        each.gate.open.set()
        each.ends("sent received failed")


@pytest.mark.parametrize("is_announced", [False, True])
def test_what_is_refused_is_told_to_both_sides(is_announced: bool) -> None:
    refusal = Cause(Code.REFUSED, "prefill is for decodes of 2 workers")
    with pair() as each:
        each.send_all(3, 1, 2)
        each.offer(Offer([[9, 4, 7]], 0), is_announced=is_announced, refusal=refusal)
        each.hold()
        each.ends("sent received failed")
        assert each.causes == {NAME: refusal} and not each.target_pages.any()


@pytest.mark.parametrize("refusal", [None, Cause(Code.REFUSED, "too many workers")])
def test_what_a_node_will_not_take_fails(refusal: Cause | None) -> None:
    """A misuse is raised at once: also then vLLM hears of it, which waits for the blocks."""
    with pair() as each:
        each.offer(Offer([[9, 4, 7]], 0), is_announced=False, room=-1, refusal=refusal)
        each.hold()
        assert each.causes[NAME].code == Code.BAD_REQUEST and "room id -1" in each.causes[NAME].text
        each.ends("received failed")


def test_an_offer_that_does_not_fit_fails() -> None:
    with pair() as each:
        each.offer(Offer([[9]], 0), is_announced=True)
        each.hold()
        each.ends("received failed")
        assert "1 pages given, its prompt needs 3" in each.causes[NAME].text


def test_a_room_that_is_in_use_fails() -> None:
    with pair() as each:
        each.load(9, 4, 7)
        offer = Offer([[1, 2, 3]], 0)
        each.step_decode(targets=[each.target(name="again")], offers={"again": offer})
        each.until(lambda: each.failures["again"])
        assert each.causes["again"].code == Code.ROOM_IN_USE
        each.step_decode(held={"again": {0}})
        each.send_all(3, 1, 2)
        each.ends("sent received", again="received failed")
        each.assert_loaded()


def test_a_prefill_that_is_closed() -> None:
    with pair(lost_after_s=0.8) as each:
        each.match()
        each.prefill.close()
        each.hold()
        each.ends("received failed")
        assert each.causes[NAME].code in (Code.SHUTDOWN, Code.PEER_LOST)


def test_a_prefill_that_is_silent() -> None:
    """Its loop stands still in the middle of a write, and so its link is lost."""
    awake = threading.Event()
    with pair(lost_after_s=0.8) as each:
        each.load_halfway()
        loop = each.prefill.thread._running()
        loop.post(lambda: (awake.wait(20), None)[1])
        each.hold()
        assert each.causes[NAME].code == Code.PEER_LOST and not each.released
        assert each.lent == [4, 7, 9]
        awake.set()
        each.gate.open.set()
        each.ends("sent received failed")


def test_a_prefill_that_is_not_there() -> None:
    with pair() as each:
        target = each.target()
        target.prefill = ["127.0.0.1:1"]
        each.step_decode(targets=[target], offers={NAME: Offer([[9, 4, 7]], 0)})
        each.hold()
        each.ends("received failed")
        assert each.causes[NAME].code == Code.PEER_LOST


def test_closing_ends_what_is_under_way() -> None:
    with pair() as each:
        each.load(9, 4, 7)
        room = each.decode._targets[NAME].room
        each.decode.close()
        assert room is not None and isinstance(room.error, kvflow.AbortedError) and room.released
        assert each.decode.thread.pages.at_rest() and room.room == ROOM
        each.hold()


def test_blocks_held_for_another_worker_are_not_held_for_this_one() -> None:
    """Its own failure is not counted yet: vLLM would free what may still be written."""
    with pair(load_deadline_s=60) as each:
        each.load_halfway()
        each.pass_deadline()
        each.until(lambda: each.failures[NAME])
        each.step_decode(held={NAME: {1}})
        assert not each.received
        each.step_decode(held={NAME: {0, 1}})
        assert each.received == each.failed == {NAME: 1}


@pytest.mark.parametrize("is_announced", [False, True])
def test_decode_needs_no_state_of_a_prompt_that_it_computes(is_announced: bool) -> None:
    """An empty offer ends such a room, and neither side calls it a failure."""
    with pair(groups=MANY_GROUPS) as each:
        each.step_prefill(sources=[each.source()])
        each.offer(Offer((), len(PROMPT)), is_announced=is_announced)
        each.step_prefill(finished={NAME: False})
        each.ends("sent")
        for side in (each.prefill, each.decode):
            assert not (side.stats.take() or {"failed": {}})["failed"]


def test_blocks_that_vllm_lacks_fail_the_load() -> None:
    refusal = Cause(Code.CAPACITY, "vLLM lacks blocks of 'window'")
    with pair() as each:
        each.step_prefill(sources=[each.source()])
        each.offer(Offer([[9, 4]], 0, refusal), is_announced=True)
        each.hold()
        each.step_prefill(finished={NAME: True})
        each.ends("sent received failed")
        assert each.causes[NAME].text == refusal.text
