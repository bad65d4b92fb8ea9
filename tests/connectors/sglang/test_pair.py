"""Requests at every moment of their life, in SGLang's sender and receiver."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.transports.control.curve import write_key
from tests.connectors.sglang.sglang_pair import PROMPT, ROOM, SLOT_BYTES, pair
from tests.fakes.sglang import KVPoll, KVTransferDestination
from tests.fakes.sglang import KVTransferError as Error

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("staging", ["auto", "always"])
def test_pages_and_metadata_arrive_together(monkeypatch: Patch, staging: str) -> None:
    with pair(monkeypatch, STAGING=staging) as each:
        for manager in (each.prefill, each.decode):
            is_staged = manager.thread.ask(lambda node: node.staging is not None)
            assert is_staged is (staging == "always")
        request = each.request()
        for number, slot in enumerate(each.source.slots):
            slot[2] = 10 + number
        request.match(9, 4, 7, slot=2)
        assert request.receiver.poll() == KVPoll.Transferring
        request.send(3, 1, 2)
        request.ends(request.receiver, KVPoll.Success)
        request.ends(request.sender, KVPoll.Success)
        assert each.landed(9, 4, 7) == [4, 2, 3]
        assert each.target.layers[:, [0, 1, 2, 3, 5, 6, 8]].sum() == 0
        for number, slot in enumerate(each.target.slots):
            assert slot[5].tolist() == [10 + number] * SLOT_BYTES[number]
            assert slot.sum() == slot[5].sum()
        metric = request.sender.get_transfer_metric()
        assert metric.transfer_total_bytes == 3 * 3 * 64 and metric.transfer_latency_s > 0
        request.sender.clear()
        request.receiver.clear()
        assert not request.receiver.abort_notified


def test_chunks_are_sent_as_they_are_computed(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        request.send(3, last=False)
        each.until(lambda: each.landed(9) == [4])
        assert request.receiver.poll() == KVPoll.Transferring
        assert request.sender.poll() == KVPoll.Transferring
        request.send(1, last=False)
        request.send(2)
        request.ends(request.receiver, KVPoll.Success)
        assert each.landed(9, 4, 7) == [4, 2, 3]


@pytest.mark.parametrize("staging", ["auto", "always"])
def test_window_pages_and_rows_arrive_with_the_last_chunk(monkeypatch: Patch, staging: str) -> None:
    with pair(monkeypatch, states=True, STAGING=staging) as each:
        request = each.request()
        # 10 tokens: the last 6 of them lie in the pages 1 and 2 of the prompt.
        request.match(9, 4, 7, states=[[5, 2], [np.array([1])]])
        request.send(3, last=False)
        each.until(lambda: each.landed(9) == [4])
        assert not each.target.window.any() and not each.target.rows.any()
        request.send(1, 2, states=[[0, 3], [np.array([2])]])
        request.ends(request.receiver, KVPoll.Success)
        assert each.landed(9, 4, 7) == [4, 2, 3]
        assert each.target.window[:, 0].tolist() == [0, 0, 103, 0, 0, 100]
        assert (each.target.window == each.target.window[:, :1]).all()
        assert each.target.rows[:, 0].tolist() == [0, 202, 0]


@pytest.mark.parametrize(("states", "radix"), [(True, True), (True, False), (False, True)])
def test_decode_warns_of_windows_beside_kept_prefixes(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture, states: bool, radix: bool
) -> None:
    with pair(monkeypatch, states=states, radix=radix):
        assert ("with a sliding window" in caplog.text) is (states and radix)


def test_too_few_window_pages_fail_the_request(monkeypatch: Patch) -> None:
    with pair(monkeypatch, states=True) as each:
        request = each.request()
        request.match(9, 4, 7, states=[[5, 2], [1]])
        request.send(3, 1, 2, states=[[0], [2]])
        assert "chunk of 3 pages, 1 'swa' pages and 1 row" in request.reason(request.sender)
        request.ends(request.receiver, KVPoll.Failed)


def test_the_slot_is_read_when_the_last_pages_are_sent(monkeypatch: Patch) -> None:
    """SGLang may give it to another request before the handoff has left."""
    with pair(monkeypatch) as each:
        request = each.request()
        each.source.slots[0][2] = 5
        request.match(9, 4, 7, slot=2)
        each.gate.open.clear()
        request.send(3, 1, 2)
        each.source.slots[0][2] = 6
        each.gate.open.set()
        request.ends(request.receiver, KVPoll.Success)
        assert set(each.target.slots[0][5]) == {5}


def test_pages_that_a_device_still_computes_wait(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        waited: list[bool] = []
        event = SimpleNamespace(query=lambda: bool(waited), synchronize=lambda: waited.append(True))
        request.sender._early_send_wait_event = event
        request.send(3, last=False)
        assert request.sender._early_send_wait_event is None
        assert request.sender.poll() == KVPoll.Transferring
        assert each.landed(9) == [0] and not waited
        request.send(1, 2)
        assert waited == [True]
        request.ends(request.receiver, KVPoll.Success)
        assert each.landed(9, 4, 7) == [4, 2, 3]


def test_an_event_that_has_passed_is_seen_by_a_poll(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        passed: list[int] = []
        request.sender._early_send_wait_event = SimpleNamespace(query=lambda: passed)
        request.send(3, last=False)
        passed.append(1)
        request.sender.poll()
        each.until(lambda: each.landed(9) == [4])
        request.send(1, 2)
        request.ends(request.receiver, KVPoll.Success)


def test_pages_on_a_device_are_lent_when_no_step_writes_them(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request, waited = each.request(), []
        request.at_decode()
        pool = each.decode.thread.pool

        def synchronize(device: str) -> None:
            waited.append((device, each.lent))

        monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
        monkeypatch.setattr(pool, "device", "cuda:0")
        request.lend(9, 4, 7)
        monkeypatch.setattr(pool, "device", "cpu")
        assert waited == [("cuda:0", [])] and each.lent == [4, 7, 9]
        request.receiver.clear()


def test_pages_without_an_event_are_sent_when_no_step_writes_them(monkeypatch: Patch) -> None:
    """A stage of a pipeline on a device names no event."""
    with pair(monkeypatch) as each:
        request, waited = each.request(), []
        request.match(9, 4, 7)
        pool = each.prefill.thread.pool

        def synchronize(device: str) -> None:
            waited.append((device, request.sender._chunks.copy(), each.landed(9)))

        monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
        monkeypatch.setattr(pool, "device", "cuda:0")
        request.send(3, 1, 2)
        monkeypatch.setattr(pool, "device", "cpu")
        assert waited == [("cuda:0", deque(), [0])]
        request.ends(request.receiver, KVPoll.Success)


@pytest.mark.parametrize(("prefix", "pages"), [(4, [9, 4]), (8, [9])])
def test_what_decode_has_does_not_travel(monkeypatch: Patch, prefix: int, pages: list[int]) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(*pages, prefix=prefix)
        request.send(*[3, 1, 2][-len(pages) :])
        request.ends(request.receiver, KVPoll.Success)
        request.ends(request.sender, KVPoll.Success)
        assert each.landed(*pages) == [4, 2, 3][-len(pages) :]


def test_a_sender_waits_for_decode(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.at_prefill()
        assert request.sender.poll() == KVPoll.Bootstrapping
        request.at_decode(init=False)
        assert request.receiver.poll() == KVPoll.Bootstrapping
        request.receiver.init(0)
        assert request.receiver.poll() == KVPoll.WaitingForInput
        assert request.sender.poll() == KVPoll.Bootstrapping
        request.receiver.abort()
        assert "aborted at decode" in request.reason(request.sender)


def test_two_prompts_do_not_meet_in_one_room(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request(other=[*PROMPT[:-1], 999])
        request.at_prefill()
        request.at_decode()
        request.lend(9, 4, 7)
        assert "prompt_mismatch" in request.reason(request.receiver)
        assert "prompt_mismatch" in request.reason(request.sender)
        assert each.target.layers.sum() == 0


def test_a_client_that_leaves_decode_ends_prefill(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        each.gate.open.clear()
        request.send(3, 1, 2)
        assert each.gate.reached.wait(20)
        request.receiver.abort()
        assert request.receiver.poll() == KVPoll.Failed
        # SGLang asks this before it uses the pages for another request.
        assert not each.decode.is_abort_release_safe(ROOM, 0)
        assert each.lent == [4, 7, 9] and request.receiver.abort_notified
        each.until_abort_arrives()
        each.gate.open.set()
        each.until(lambda: each.decode.is_abort_release_safe(ROOM, 0))
        assert each.lent == []
        assert "aborted at decode" in request.reason(request.sender)
        each.decode.clear_deferred_abort_state(ROOM)
        assert each.decode._owed == {}


def test_a_client_that_leaves_prefill_ends_decode(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        request.send(3, last=False)
        request.sender.abort()
        assert request.sender.poll() == KVPoll.Failed
        assert "aborted at prefill" in request.reason(request.receiver)
        request.send(1, 2)
        each.until(lambda: each.decode.is_abort_release_safe(ROOM, 0))


def test_a_sender_that_fails_during_a_write_cannot_succeed(monkeypatch: Patch) -> None:
    """SGLang reuses the source pages at once, while the write still reads them."""
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        each.gate.open.clear()
        request.send(3, 1, 2)
        assert each.gate.reached.wait(20)
        request.sender.abort()
        each.source.layers[:] = 77
        each.gate.open.set()
        assert "aborted at prefill" in request.reason(request.receiver)
        each.until(lambda: each.decode.is_abort_release_safe(ROOM, 0))


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_failure_at_another_rank_ends_the_room(monkeypatch: Patch, side: str) -> None:
    """SGLang takes the least state of all ranks, and then asks each for its reason."""
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        with pytest.raises(Error, match="failed at another rank"):
            getattr(request, side).failure_exception()
        other = request.receiver if side == "sender" else request.sender
        assert "failed at another rank" in request.reason(other)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_success_that_another_rank_did_not_have(monkeypatch: Patch, side: str) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        request.send(3, 1, 2)
        request.ends(request.receiver, KVPoll.Success)
        request.ends(request.sender, KVPoll.Success)
        with pytest.raises(Error, match="failed at another rank"):
            getattr(request, side).failure_exception()
        request.receiver.ensure_abort_notified(force_arm=True)
        assert request.receiver.abort_notified and each.decode.is_abort_release_safe(ROOM, 0)


def test_decode_that_drops_a_failed_request_holds_its_pages(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        each.gate.open.clear()
        request.send(3, 1, 2)
        assert each.gate.reached.wait(20)
        request.receiver.ensure_abort_notified(force_arm=True)
        assert request.receiver.poll() == KVPoll.Failed
        assert not each.decode.is_abort_release_safe(ROOM, 0)
        each.gate.open.set()
        each.until(lambda: each.decode.is_abort_release_safe(ROOM, 0))


def test_one_leg_that_never_comes(monkeypatch: Patch) -> None:
    with pair(monkeypatch, RENDEZVOUS_S=0.2) as each:
        alone = each.request(1)
        alone.at_prefill()
        assert "rendezvous" in alone.reason(alone.sender)
        other = each.request(2)
        other.at_decode()
        other.lend(9, 4, 7)
        assert "rendezvous" in other.reason(other.receiver)
        each.until(lambda: each.decode.is_abort_release_safe(2, 0))


def test_pages_that_do_not_come_in_time(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        each.decode.waiting_timeout = 0.1
        request = each.request()
        request.match(9, 4, 7)
        reason = request.reason(request.receiver)
        assert "deadline" in reason and "within 0.1 s (SGLANG_DISAGGREGATION_WAITING_" in reason
        assert "deadline" in request.reason(request.sender)
        each.until(lambda: each.decode.is_abort_release_safe(ROOM, 0))


def test_a_decode_that_refuses_before_it_announces(monkeypatch: Patch) -> None:
    """The prefill does not fit: SGLang aborts the receiver before it has called `init`."""
    with pair(monkeypatch) as each:
        each.decode.mismatch = "Page size mismatch: 1 and 2"
        assert not each.decode.try_ensure_parallel_info(each.address)
        request = each.request()
        request.at_prefill()
        request.at_decode(init=False)
        request.receiver.abort()
        assert "Page size mismatch" in request.reason(request.receiver)
        assert "Page size mismatch" in request.reason(request.sender)
        each.decode.mismatch, each.decode.attn_tp_size = "", 2
        assert not each.decode.try_ensure_parallel_info(each.address)
        assert "2 tensor-parallel ranks, and this decode 1" in each.decode.mismatches[each.address]
        assert each.address not in each.decode.prefill_info_table
        each.decode.attn_tp_size = 1
        assert each.decode.try_ensure_parallel_info(each.address)
        assert each.decode.mismatches == {}


def refused(each: Any, **fields: Any) -> SimpleNamespace:
    """A request that SGLang's queue refuses; it has no sender and no receiver."""
    host, port = each.address.split(":")
    values: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": int(port), "output_ids": []}
    values |= {"finished_reason": None, "to_finish": SimpleNamespace(message="4097 > 4096")}
    return SimpleNamespace(**{**values, "bootstrap_room": ROOM, **fields})


@pytest.mark.parametrize("first", ["the refusal", "the other half"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_that_sglang_refuses_ends_at_the_other_side(
    monkeypatch: Patch, role: str, first: str
) -> None:
    """Before, its other half waited for KVFLOW_SGLANG_RENDEZVOUS_S."""
    with pair(monkeypatch) as each:
        request = each.request()
        come = request.at_prefill if role == "decode" else request.at_decode
        if first == "the other half":
            come()
        getattr(each, role).refuse(refused(each))
        if first == "the refusal":
            come()
        side = request.sender if role == "decode" else request.receiver
        assert f"bad_request: SGLang refuses it at {role}: 4097 > 4096" in request.reason(side)


@pytest.mark.parametrize("fields", [{"output_ids": [5]}, {"bootstrap_host": "2.2.2.2"}])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_had_a_prefill_or_has_none_is_not_refused(
    monkeypatch: Patch, role: str, fields: dict[str, Any]
) -> None:
    """A retracted request, and a health check of SGLang, whose prefill does not exist."""
    with pair(monkeypatch) as each:
        getattr(each, role).refuse(refused(each, **fields))
        request = each.request()
        request.match(9, 4, 7)
        request.send(3, 1, 2)
        request.ends(request.receiver, KVPoll.Success)
        request.ends(request.sender, KVPoll.Success)


def test_a_refusal_that_cannot_be_sent_ends_nothing(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        for manager in (each.prefill, each.decode):
            manager.refuse(refused(each, bootstrap_room=None))


def test_a_room_that_is_in_use(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        first, second = each.request(), each.request()
        first.match(9, 4, 7)
        second.at_prefill()
        assert "room_in_use" in second.reason(second.sender)
        second.send(3)
        first.send(3, 1, 2)
        first.ends(first.receiver, KVPoll.Success)


def test_prefill_that_goes_away(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        each.decode.try_ensure_parallel_info(each.address)
        request = each.request()
        request.match(9, 4, 7)
        each.prefill.teardown()
        assert "shutdown" in request.reason(request.receiver)
        assert request.sender.poll() == KVPoll.Failed
        late = each.request(8)
        late.at_prefill()
        assert "closed" in late.reason(late.sender)


def test_a_prefill_that_cannot_be_reached_is_forgotten(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        each.address = "127.0.0.1:1"
        each.decode.try_ensure_parallel_info(each.address)
        request = each.request()
        request.at_decode()
        assert "peer_lost" in request.reason(request.receiver)
        assert each.address not in each.decode.prefill_info_table


def test_metadata_of_another_size_fails_the_request(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        each.prefill.metadata._slot_bytes[1] = 4
        request.match(9, 4, 7)
        request.send(3, 1, 2)
        assert "slots of [64, 4] bytes, and decode's of [64, 8]" in request.reason(request.receiver)
        assert each.target.slots[0].sum() == 0


def test_a_request_that_prefill_drops_ends_at_decode(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        request.sender.clear()
        assert "prefill dropped the request" in request.reason(request.receiver)
        each.until(lambda: each.decode.is_abort_release_safe(ROOM, 0))


def test_decode_that_drops_a_request_without_a_room_owes_nothing(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.at_decode(init=False)
        request.receiver.ensure_abort_notified()
        assert request.receiver.abort_notified and each.decode.is_abort_release_safe(ROOM, 0)
        assert "decode dropped the request" in request.reason(request.receiver)


def test_a_decode_that_closes_may_still_abort_its_requests(monkeypatch: Patch) -> None:
    """Prefill can then not be told of the cause, but it sees decode leave."""
    with pair(monkeypatch) as each:
        request = each.request()
        request.at_decode(init=False)
        each.decode.teardown()
        request.receiver.abort()
        assert "aborted at decode" in request.reason(request.receiver)


def test_both_sides_use_the_key_of_the_control_link(monkeypatch: Patch, tmp_path: Path) -> None:
    write_key(str(tmp_path / "key"))
    with pair(monkeypatch, CONTROL_KEY_FILE=tmp_path / "key") as each:
        request = each.request()
        request.match(9, 4, 7)
        request.send(3, 1, 2)
        request.ends(request.receiver, KVPoll.Success)
        request.ends(request.sender, KVPoll.Success)


def test_bytes_that_change_on_their_way_fail_the_request(monkeypatch: Patch) -> None:
    with pair(monkeypatch, VERIFY_TRANSFERS=1) as each:
        request = each.request()
        request.match(9, 4, 7)
        # Not at prefill, which computes its checksum in parallel with the write.
        each.gate.landed = lambda: each.target.layers[1, 4].fill(99)
        request.send(3, 1, 2)
        assert "checksum" in request.reason(request.receiver)


def test_a_wrong_number_of_pages_fails_the_request(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        request.send(3, 1)
        assert "chunk of 2 pages" in request.reason(request.sender)
        assert "chunk of 2 pages" in request.reason(request.receiver)
        other = each.request(8)
        other.at_decode()
        other.lend(9, 4)
        assert "2 pages given, its prompt needs 3" in other.reason(other.receiver)


def test_pages_beside_the_device_are_refused(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.at_decode()
        for fields in ({"destination": KVTransferDestination.HOST}, {"device_kv_indices": [1]}):
            with pytest.raises(NotImplementedError, match="no host destinations"):
                request.receiver.send_metadata([1, 2, 3], 5, **fields)
        request.receiver.clear()


def test_a_reason_that_sglang_records_is_told(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        request = each.request()
        request.at_decode()
        request.receiver.abort()
        each.decode.failure_records[ROOM] = "the recomputation failed"
        assert request.reason(request.receiver) == "the recomputation failed"
        assert each.decode.failure_records == {}


def test_a_sender_without_a_prompt_fails(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        sender = each.sender_class(each.prefill, each.address, 9)
        assert sender.poll() == KVPoll.Failed
        receiver = each.receiver_class(each.decode, each.address, 9)
        receiver.init(0)
        receiver.send_metadata([1], 0)
        assert receiver.poll() == KVPoll.Failed
        for half in (sender, receiver):
            with pytest.raises(Error, match="no prompt"):
                half.failure_exception()


def test_events_are_not_kept(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        for room in range(1, 6):
            request = each.request(room)
            request.match(9, 4, 7)
            request.send(3, 1, 2)
            request.ends(request.receiver, KVPoll.Success)
            request.ends(request.sender, KVPoll.Success)
        each.until_rest()
        for manager in (each.prefill, each.decode):
            each.until(lambda: not manager.thread._rooms)  # noqa: B023 - called at once
            assert len(manager.thread._events) <= 4


def test_the_states_of_all_stages_are_one(monkeypatch: Patch) -> None:
    """The first stage is as far as the last one of all, and fails with any of them."""

    class Store(dict[int, int]):
        others: list[int | None] = [KVPoll.Bootstrapping]  # noqa: RUF012 - one test

        def collect(self, room: int) -> list[int | None]:
            return [self.get(room), *self.others]

    with pair(monkeypatch) as each:
        store = each.prefill.request_status = Store()
        each.prefill.place = each.prefill.place._replace(stages=2)
        request = each.request()
        request.match(9, 4, 7)
        sender = request.sender
        assert sender.poll_pp_consensus() == KVPoll.Bootstrapping
        store.others[0] = None
        assert sender.poll_pp_consensus() == KVPoll.Bootstrapping
        store.others[0] = KVPoll.WaitingForInput
        assert sender.poll_pp_consensus() == KVPoll.WaitingForInput
        store.others[0] = KVPoll.Failed
        assert sender.poll_pp_consensus() == KVPoll.Failed
        assert store == {ROOM: KVPoll.WaitingForInput}
        # Only the last stage hands metadata over, and this is the first.
        request.send(3, 1, 2)
        assert "not SGLang's metadata" in request.reason(request.receiver)
        request.ends(sender, KVPoll.Success)
        assert store == {ROOM: KVPoll.Success}
        sender.clear()
        assert store == {}


def test_success_is_told_when_nothing_uses_the_pages(monkeypatch: Patch) -> None:
    """SGLang reuses them at once, and "landed" and "done" come before "released"."""
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        request.send(3, 1, 2)
        request.ends(request.receiver, KVPoll.Success)
        request.ends(request.sender, KVPoll.Success)
        for half in (request.receiver, request.sender):
            half.conclude_state, half._room.released = None, False
            assert half.poll() == KVPoll.Transferring
            half._room.released = True
            assert half.poll() == KVPoll.Success


@pytest.mark.parametrize(("pages", "count"), [([], 0), ([3], 1)])
def test_a_sender_that_has_sent_waits_for_its_close(
    monkeypatch: Patch, pages: list[int], count: int
) -> None:
    """Only then can no write that still reads the pages make decode's half succeed."""
    with pair(monkeypatch) as each:
        request = each.request()
        request.match(9, 4, 7)
        if pages:
            request.send(*pages, last=False)
        settled: list[int] = []
        settle = each.prefill.settle

        def counted() -> None:
            settled.append(1)
            settle()

        monkeypatch.setattr(each.prefill, "settle", counted)
        request.sender.abort()
        request.sender.abort()
        assert len(settled) == count
        assert "aborted at prefill" in request.reason(request.receiver)


def test_a_rest_ends_with_the_nodes_news(monkeypatch: Patch) -> None:
    """A manager without rooms does not rest, because only requests wait for news."""
    with pair(monkeypatch) as each:
        monkeypatch.setattr(sys.modules[type(each.prefill).__module__], "REST_S", 60.0)
        each.prefill.rest()
        request = each.request()
        request.at_decode()
        request.lend(9, 4, 7)
        request.at_prefill()
        while request.sender.poll() != KVPoll.WaitingForInput:
            each.prefill.rest()
        request.sender.init(3, 2)
        request.send(3, 1, 2)
        while request.sender.poll() != KVPoll.Success:
            each.prefill.rest()
        while request.receiver.poll() != KVPoll.Success:
            each.decode.rest()
        each.prefill.rest()


def test_a_closed_node_settles_at_once(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        each.prefill.teardown()
        each.prefill.settle()


def test_roles_change_only_when_every_page_has_a_proof(monkeypatch: Patch) -> None:
    with pair(monkeypatch) as each:
        close = each.decode.thread.close
        monkeypatch.setattr(each.decode.thread, "close", lambda: ["a loan"])
        with pytest.raises(RuntimeError, match="1 loans of pages are without proof"):
            each.decode.teardown()
        monkeypatch.setattr(each.decode.thread, "close", close)
        assert each.decode._zmq_ctx.closed and each.decode.server_socket.closed


@pytest.mark.parametrize(("before_s", "then_s"), [(0.005, 0.0005), (0.0001, 0.0001)])
def test_the_scheduler_hands_over_pythons_lock_soon(
    monkeypatch: Patch, before_s: float, then_s: float
) -> None:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(before_s)
    try:
        with pair(monkeypatch):
            assert sys.getswitchinterval() == pytest.approx(then_s)
    finally:
        sys.setswitchinterval(usual_s)
