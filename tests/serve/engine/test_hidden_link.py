"""Hidden states between two stages: what arrives, how far one runs ahead, and what ends a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvflow.protocols.errors import LostError, MisuseError, PeerError
from kvflow.serve.engine.model.parallel.link import (
    MAX_IN_FLIGHT,
    HiddenReceiver,
    HiddenSender,
    check_address,
)

Ends = tuple[HiddenReceiver, HiddenSender]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/hidden"


@pytest.fixture
def ends(address: str) -> Iterator[Ends]:
    receiver, sender = HiddenReceiver(address), HiddenSender(address)
    for end in (receiver, sender):
        end.next_step()
    yield receiver, sender
    receiver.close()
    sender.close()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def begin(generation: int, *ends: HiddenReceiver | HiddenSender) -> None:
    for end in ends:
        end.begin(generation)
        end.next_step()


def blocked(executor: ThreadPoolExecutor, work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in the thread, and return once it sleeps there."""
    started, number = threading.Event(), []

    def run() -> Any:
        number.append(threading.get_native_id())
        started.set()
        return work()

    found = executor.submit(run)
    started.wait()
    status = Path(f"/proc/self/task/{number[0]}/wchan")
    while "poll" not in status.read_text() and not found.done():
        pass
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7, 16), (3, 1, 64), (2, 1, 300, 512)])
def test_every_bit_arrives(ends: Ends, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    receiver, sender = ends
    for n in range(3):
        hidden = torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype)
        sender.send(hidden)
        found = receiver.receive(torch.empty_like(hidden))
        assert found.dtype == dtype and torch.equal(found, hidden)
        found += 1  # it is the receiver's own, and can be written


def test_what_is_no_contiguous_tensor_arrives_too(ends: Ends) -> None:
    receiver, sender = ends
    hidden = torch.arange(60.0).reshape(1, 12, 5).transpose(1, 2)
    sender.send(hidden)
    assert torch.equal(receiver.receive(hidden), hidden)


def test_the_earlier_stage_runs_ahead_so_far_and_no_further(
    ends: Ends, thread: ThreadPoolExecutor
) -> None:
    receiver, sender = ends
    sent = [torch.full((1, 4, 8), float(n)) for n in range(MAX_IN_FLIGHT + 3)]
    for hidden in sent[:MAX_IN_FLIGHT]:
        sender.send(hidden)
    for n, hidden in enumerate(sent[MAX_IN_FLIGHT:]):
        waiting = blocked(thread, lambda hidden=hidden: sender.send(hidden))  # type: ignore[misc]
        assert not waiting.done() and sender.in_flight == MAX_IN_FLIGHT
        assert torch.equal(receiver.receive(sent[n]), sent[n])
        waiting.result(10)
    for hidden in sent[3:]:
        assert torch.equal(receiver.receive(hidden), hidden)


def test_abort_ends_a_wait_on_either_side_until_the_next_generation(
    ends: Ends, thread: ThreadPoolExecutor
) -> None:
    receiver, sender = ends
    hidden = torch.ones(1, 2, 3)
    waiting = blocked(thread, lambda: receiver.receive(hidden))
    receiver.abort()
    with pytest.raises(LostError, match="aborted in step 0"):
        waiting.result(10)
    for _ in range(MAX_IN_FLIGHT):
        sender.send(hidden)
    waiting = blocked(thread, lambda: sender.send(hidden))
    sender.abort()
    with pytest.raises(LostError, match="aborted"):
        waiting.result(10)
    with pytest.raises(LostError):
        receiver.receive(hidden)
    with pytest.raises(LostError):
        sender.send(hidden)
    begin(1, sender, receiver)
    sender.send(2 * hidden)
    assert torch.equal(receiver.receive(hidden), 2 * hidden)


def test_states_of_an_earlier_generation_are_dropped(ends: Ends, address: str) -> None:
    receiver, sender = ends
    hidden = torch.ones(1, 2, 3)
    begin(1, sender, receiver)
    late = HiddenSender(address)
    late.next_step()
    late.send(hidden)
    assert receiver._poller.poll(10_000)
    sender.send(2 * hidden)
    assert torch.equal(receiver.receive(hidden), 2 * hidden)
    late.close()
    assert receiver.dropped == 1


def test_every_generation_has_a_connection_of_its_own(ends: Ends) -> None:
    """A connection that has ended may lose a frame before ZMQ knows of its end."""
    receiver, sender = ends
    hidden = torch.ones(1, 2, 3)
    sender.send(hidden)
    receiver.receive(hidden)
    used = sender._socket
    begin(1, sender, receiver)
    sender.send(hidden)
    assert used.closed and not sender._socket.closed
    assert torch.equal(receiver.receive(hidden), hidden)


def test_discarded_states_do_not_wait_for_credit_and_are_not_sent(
    ends: Ends, thread: ThreadPoolExecutor
) -> None:
    receiver, sender = ends
    hidden = torch.ones(1, 2, 3)
    for _ in range(MAX_IN_FLIGHT):
        sender.send(hidden)
    waiting = blocked(thread, lambda: sender.send(hidden))
    sender.discard()
    waiting.result(10)
    for _ in range(MAX_IN_FLIGHT):
        receiver.receive(hidden)
    sender.send(hidden)
    assert sender._sent == MAX_IN_FLIGHT
    begin(1, sender, receiver)
    sender.send(2 * hidden)
    assert torch.equal(receiver.receive(hidden), 2 * hidden)
    sender.discard()
    sender.abort()
    with pytest.raises(LostError):
        sender.send(hidden)


def test_a_later_generation_ends_the_present_one_and_is_not_lost(ends: Ends) -> None:
    receiver, sender = ends
    begin(7, sender)
    hidden = torch.ones(1, 2, 3)
    sender.send(hidden)
    with pytest.raises(LostError, match="generation 0 has ended: the stage before is in 7 already"):
        receiver.receive(hidden)
    begin(7, receiver)
    assert torch.equal(receiver.receive(hidden), hidden)
    with pytest.raises(MisuseError, match="generation 6 of hidden states is older"):
        receiver.begin(6)


def test_other_hidden_states_than_this_step_needs_are_refused(ends: Ends) -> None:
    receiver, sender = ends
    wanted = r"float32 \[1, 2, 3\] of step 0, call 0"
    sender.send(torch.ones(1, 3, 3))
    with pytest.raises(
        PeerError, match=rf"hidden states are float32 \[1, 3, 3\] of step 0, call 0, not {wanted}"
    ):
        receiver.receive(torch.ones(1, 2, 3))
    begin(1, sender, receiver)
    sender.next_step()
    sender.send(torch.ones(1, 2, 3, dtype=torch.bfloat16))
    with pytest.raises(
        PeerError, match=rf"hidden states are bfloat16 \[1, 2, 3\] of step 1, call 0, not {wanted}"
    ):
        receiver.receive(torch.ones(1, 2, 3))


@pytest.mark.parametrize(
    "frames",
    [
        *([b""], [b"x" * 100], [b"\x95\x00\x00\x00\xa7float32\x91\x01"]),
        [b"\x95\x00\x00\x00\xa1x\x99" + 9 * b"\x01", b""],
        [b"\x95\x00\x00\x00\xa2\xff\xfe\x91\x01", b""],  # a dtype that is not UTF-8
    ],
)
def test_what_is_no_message_is_counted_and_dropped(ends: Ends, frames: list[bytes]) -> None:
    receiver, sender = ends
    sender._socket.send_multipart(frames)
    hidden = torch.ones(1, 2, 3)
    sender.send(hidden)
    assert torch.equal(receiver.receive(hidden), hidden)
    assert receiver.dropped == 1


def test_credit_that_makes_no_sense_is_dropped(ends: Ends) -> None:
    receiver, sender = ends
    hidden = torch.ones(1, 2, 3)
    sender.send(hidden)
    receiver.receive(hidden)
    for credit in (b"\xc1", b"\x92\x00\xcd\x7f\xff", b"\x92\x05\x00"):
        receiver._socket.send(credit)
    waiting = sender._poller
    while sender.dropped < 3:
        waiting.poll(5000)
        sender._take_credits(wait=False)
    assert sender.in_flight == 0


def test_a_stage_that_is_started_again_is_found_at_its_address(ends: Ends, address: str) -> None:
    receiver, sender = ends
    hidden = torch.ones(1, 2, 3)
    sender.send(hidden)
    receiver.receive(hidden)
    sender.send(hidden)  # never received
    receiver.close()
    with_new = HiddenReceiver(address)
    begin(1, sender, with_new)
    sender.send(3 * hidden)
    assert torch.equal(with_new.receive(hidden), 3 * hidden)
    with_new.close()


REACHED = ["tcp://0.0.0.0:0", "tcp://10.0.0.1:5", "tcp://*:5", "tcp://localhost:1"]


@pytest.mark.parametrize("address", [*REACHED, "ipc://@x", "inproc://x", "x"])
def test_addresses_that_others_can_reach_are_refused(address: str) -> None:
    for end in (HiddenReceiver, HiddenSender):
        with pytest.raises(
            MisuseError, match=r"neither ipc://PATH nor tcp:// of a loopback address"
        ):
            end(address)


def test_the_path_of_a_unix_socket_has_107_bytes_at_most() -> None:
    check_address("ipc:///" + 106 * "a")
    with pytest.raises(MisuseError, match="at most 107 bytes"):
        check_address("ipc:///" + 107 * "a")


def test_an_address_that_cannot_be_bound_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="hidden states cannot be passed at ipc"):
        HiddenReceiver(f"ipc://{tmp_path}/missing/x")


def test_loopback_ports_work_as_well() -> None:
    receiver = HiddenReceiver("tcp://127.0.0.1:*")
    sender = HiddenSender(receiver.address)
    hidden = torch.randn(1, 2, 3)
    for end in (receiver, sender):
        end.next_step()
    sender.send(hidden)
    assert torch.equal(receiver.receive(hidden), hidden)
    receiver.close()
    sender.close()
    sender.abort()  # after its end: no effect
    assert receiver._socket.closed
