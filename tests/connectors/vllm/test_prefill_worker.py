"""Prefill in a worker: what is sent and when, and when vLLM may use the blocks for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvflow.connectors.vllm import prefill_worker
from kvflow.connectors.vllm.messages import Computed, Offer, StepMeta
from kvflow.node.threads.rooms import RoomEvent
from kvflow.protocols.errors import Code
from tests.connectors.vllm.worker_pair import MANY_GROUPS, NAME, PAGES, ROOM, Pair, pair


def computed(*blocks: int, is_all: bool = False) -> dict[str, Computed]:
    return {NAME: Computed([blocks], is_all)}


def busy_sources(each: Pair) -> list[int]:
    return sorted(each.prefill.thread.pages.busy(range(PAGES)))


def test_blocks_stream_as_they_are_computed() -> None:
    with pair() as each:
        each.match()
        each.step_prefill(computed=computed(3))
        each.until(lambda: each.target_pages[9] == 4)
        assert not each.received and each.room().left == 2
        each.step_prefill(computed=computed(3))  # a step that fills no block
        each.step_prefill(computed=computed(3, 1, 2, is_all=True))
        each.ends("received")
        each.assert_loaded()
        each.step_prefill(computed=computed(3, 1, 2, is_all=True))  # all of it was sent before
        each.step_prefill(finished={NAME: False})  # vLLM has not asked before
        each.ends("sent received")


def test_a_window_that_is_computed_in_two_steps_is_sent_once() -> None:
    with pair(groups=MANY_GROUPS) as each:
        each.step_prefill(sources=[each.source()])
        each.offer(Offer([[20, 21], [22, 23], [24]], 0), is_announced=True)
        each.until(lambda: each.room().matched)
        each.step_prefill(computed={NAME: Computed([[1], [2, 3], []], False)})
        assert list(each.room().counts_left) == [1, 1, 1]
        whole = Computed([[1, 4], [2, 3, 5], [6]], True)
        each.step_prefill(computed={NAME: whole}, finished={NAME: False})
        each.ends("sent received")


def test_what_was_computed_before_decode_came_is_sent_when_it_comes() -> None:
    with pair() as each:
        each.step_prefill(sources=[each.source()], computed=computed(3, 1))
        each.load(9, 4, 7)
        each.until(lambda: each.target_pages[4] == 2)
        each.step_prefill(computed=computed(3, 1, 2, is_all=True), finished={NAME: False})
        each.ends("sent received")
        each.assert_loaded()


def test_what_decode_had_is_neither_sent_nor_counted() -> None:
    with pair() as each:
        each.step_prefill(sources=[each.source()])
        prefix = each.prefill.thread.pool.layout.page_size
        each.offer(Offer([[4, 7]], prefix), is_announced=True)
        each.until(lambda: each.room().matched)
        each.step_prefill(computed=computed(3, 1, 2, is_all=True), finished={NAME: False})
        each.ends("sent received")
        assert list(each.target_pages[[9, 4, 7]]) == [0, 2, 3]
        moved = each.prefill.stats.take()
        assert moved is not None and moved["sent_bytes"] == [
            2 * each.prefill.thread.pool.layout.page_bytes
        ]


def test_blocks_stay_until_nothing_reads_them() -> None:
    with pair() as each:
        each.load_halfway()
        each.step_decode(abandoned=[NAME])
        each.until(lambda: each.room().error is not None)
        each.step_prefill()
        assert not each.sent and busy_sources(each) == [1, 2, 3]
        each.gate.open.set()
        each.ends("sent received")


@pytest.mark.parametrize("has_started", [False, True])
def test_vllm_aborts_the_request(has_started: bool) -> None:
    with pair() as each:
        each.step_prefill(sources=[each.source()])
        each.load(9, 4, 7)
        if has_started:
            each.until(lambda: each.room().matched)
            each.step_prefill(computed=computed(3))
        each.step_prefill(finished={NAME: True})
        each.hold()
        each.ends("sent received failed")
        # A client that leaves is no failure.
        assert not (each.prefill.stats.take() or {"failed": {}})["failed"]


def test_no_decode_comes_before_the_deadline() -> None:
    with pair(source_deadline_s=0.1) as each:
        each.send_all(3, 1, 2)
        each.ends("sent")
        moved = each.prefill.stats.take()
        assert moved is not None and moved["failed"] == {Code.RENDEZVOUS: 1}
        each.load(9, 4, 7)  # too late: it is told so, and does not wait for prefill's end
        each.hold()
        each.ends("sent received failed")
        assert not each.target_pages.any()


def test_one_that_decode_has_announced_is_kept_for_it() -> None:
    with pair(source_deadline_s=0.1) as each:
        each.step_decode(targets=[each.target()])
        each.until(
            lambda: each.prefill.thread.ask(
                lambda node: ROOM in node.shell.endpoint.core.rendezvous.announced
            )
        )
        each.send_all(3, 1, 2)
        # Its deadline passes later than the first's would.
        other = each.source(room=8, name="other")
        each.step_prefill(sources=[other], finished={"other": False})
        each.until(lambda: each.sent["other"])
        assert not each.sent[NAME]
        each.step_decode(offers={NAME: Offer([[9, 4, 7]], 0)})
        each.ends("sent received", other="sent")


def test_a_room_that_is_in_use_is_not_sent() -> None:
    with pair() as each:
        each.step_prefill(sources=[each.source()])
        again = each.source(name="again")
        each.step_prefill(
            sources=[again],
            computed={"again": Computed([[5, 6, 8]], True)},
            finished={"again": False},
        )
        assert each.sent == {"again": 1}
        each.load(9, 4, 7)
        each.step_prefill(computed=computed(3, 1, 2, is_all=True), finished={NAME: False})
        each.ends("sent received", again="sent")
        each.assert_loaded()


def test_too_few_blocks_fail_the_room() -> None:
    """A request that has lost its blocks before it ended: nothing is sent in their stead."""
    with pair() as each:
        each.load(9, 4, 7)
        each.send_all()
        each.hold()
        each.ends("sent received failed")
        assert "chunk of 0 pages, 3 pages of decode's are left" in each.causes[NAME].text


# --- preemption


def test_what_was_sent_before_a_preemption_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_worker, "_PREEMPTION_S", 20.0)
    with pair() as each:
        each.match()
        each.step_prefill(computed=computed(3, 1))
        each.step_prefill(preempted=[NAME])
        assert not busy_sources(each) and each.room().error is None
        each.source_pages[[3, 1]] = 99  # others' now
        each.step_prefill(computed=computed(10))
        each.step_prefill(computed=computed(10, 11))
        each.step_prefill(computed=computed(10, 11, 12, is_all=True), finished={NAME: False})
        each.ends("sent received")
        assert list(each.target_pages[[9, 4, 7]]) == [4, 2, 13]


def test_a_write_that_outlasts_a_preemption_ends_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_worker, "_PREEMPTION_S", 0.02)
    with pair() as each:
        each.match()
        each.gate.open.clear()
        each.step_prefill(computed=computed(3, 1, 2, is_all=True))
        assert each.gate.reached.wait(20)
        each.step_prefill(preempted=[NAME])
        each.source_pages[[3, 1, 2]] = 99
        each.gate.open.set()  # whatever it reads now
        each.hold()
        assert each.failed == each.received == {NAME: 1} and each.causes[NAME].code == Code.CAPACITY
        each.step_prefill(finished={NAME: False})
        each.ends("sent received failed")
        assert each.decode.stats.take() is not None


def test_decodes_half_comes_in_the_middle_of_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are waited for must not be sent meanwhile."""
    with pair() as each:
        each.step_prefill(sources=[each.source()], computed=computed(3, 1, 2, is_all=True))
        wait_released, handle = each.prefill.thread.wait_released, each.prefill._handle
        handled: list[object] = []

        def waits(blocks: Sequence[int], timeout_s: float | None = None) -> bool:
            released = wait_released(blocks, timeout_s)
            each.load(9, 4, 7)
            each.until(lambda: each.room().matched)
            each.until(lambda: handled)
            return released

        def handles(event: RoomEvent[Any]) -> None:
            handle(event)
            handled.append(event)

        with monkeypatch.context() as patch:
            patch.setattr(each.prefill, "_handle", handles)
            patch.setattr(each.prefill.thread, "wait_released", waits)
            each.gate.open.clear()
            each.prefill.preempt(StepMeta(preempted=[NAME]))
        assert not busy_sources(each)
        each.source_pages[[3, 1, 2]] = 99
        each.gate.open.set()
        each.step_prefill(computed=computed(10, 11, 12, is_all=True), finished={NAME: False})
        each.ends("sent received")
        assert list(each.target_pages[[9, 4, 7]]) == [11, 12, 13]
