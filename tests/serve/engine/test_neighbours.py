"""A step beside other processes of the model: hidden states, aborts, and lost shards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvflow.protocols.errors import LostError, PeerError
from kvflow.serve.engine.model.parallel.link import (
    MAX_IN_FLIGHT,
    HiddenReceiver,
    HiddenSender,
)
from kvflow.serve.engine.model.parallel.neighbours import Neighbours

GROUP: Any = SimpleNamespace()
GONE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer "
    "[127.0.0.1]:40351. This may indicate a remote process failure."
)


def test_what_gloo_says_of_a_shard_that_is_gone_ends_the_group() -> None:
    neighbours = Neighbours(shards=GROUP)
    with (
        pytest.raises(
            LostError, match=r"^a shard of this stage is gone: Connection closed by peer \[127"
        ),
        neighbours.step([]),
    ):
        raise RuntimeError(GONE)
    assert neighbours.broken
    with pytest.raises(LostError, match="start all processes of the stage again"):
        neighbours.begin(1)


def test_a_step_that_was_aborted_before_it_began_does_not_begin_until_the_next_generation() -> None:
    neighbours = Neighbours()
    neighbours.abort()
    with pytest.raises(LostError, match="aborted before it began"), neighbours.step([]):
        raise AssertionError("it began")
    neighbours.begin(1)
    with neighbours.step([]):
        pass
    neighbours.rest()
    neighbours.wait_for_followers()  # there are none


def test_a_step_that_a_lost_shard_aborted_says_why_it_did_not_begin() -> None:
    """The loss may be noticed between two steps."""

    def check() -> None:
        raise LostError("shard 1 of the model is gone: it has ended")

    neighbours = Neighbours()
    followers: Any = SimpleNamespace(check=check)
    neighbours.lead(followers)
    neighbours.abort()
    with pytest.raises(LostError, match="shard 1 of the model is gone"), neighbours.step([]):
        raise AssertionError("it began")


@pytest.mark.parametrize("shards", [False, True])
def test_an_abort_leaves_the_shards_of_a_stage_to_each_other_where_it_is_told_to(
    shards: bool,
) -> None:
    done: list[str] = []

    def part(name: str) -> Any:
        return SimpleNamespace(
            abort=lambda: done.append(f"abort {name}"),
            discard=lambda: done.append(f"discard {name}"),
            begin=lambda generation: done.append(f"begin {name} {generation}"),
            next_step=lambda: None,
            close=lambda: done.append(f"close {name}"),
        )

    neighbours = Neighbours(part("source"), part("sink"), part("shards"))
    neighbours.abort(shards=shards)
    ended = ["abort sink", "abort shards"] if shards else ["discard sink"]
    assert done == ["abort source", *ended]
    assert neighbours.broken is shards
    done.clear()
    if not shards:
        with neighbours.step([]):
            pass
        neighbours.begin(3)
        assert done == ["begin source 3", "begin sink 3"]
        done.clear()
    neighbours.close()
    assert done == ["close source", "close sink", "close shards"]


def test_a_shard_whose_send_waits_runs_as_many_calls_as_the_other_shards(tmp_path: Path) -> None:
    """The next stage takes nothing more, for one of its ranks is frozen. The other shards of this
    stage may have had one more credit, and already run the next call with this one.
    """
    sender = HiddenSender(f"ipc://{tmp_path}/hidden")
    shards: Any = SimpleNamespace(close=lambda: None)
    neighbours = Neighbours(sink=sender, shards=shards)
    calls: list[int] = []

    def step() -> None:
        with neighbours.step([]):
            for call in range(MAX_IN_FLIGHT + 3):
                sender.send(torch.ones(1, 2, 3))
                calls.append(call)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(step)
        while len(calls) < MAX_IN_FLIGHT:
            assert not running.done()
        neighbours.abort(shards=False)
        running.result(10)
    assert len(calls) == MAX_IN_FLIGHT + 3 and not neighbours.broken
    neighbours.close()


@pytest.mark.parametrize(
    ("error", "shards"),
    [(RuntimeError("shapes differ"), GROUP), (ValueError(GONE), GROUP), (RuntimeError(GONE), None)],
)
def test_another_error_of_a_step_is_raised_as_it_is(error: Exception, shards: Any) -> None:
    neighbours = Neighbours(shards=shards)
    with pytest.raises(type(error)) as caught, neighbours.step([]):
        raise error
    assert caught.value is error and not neighbours.broken
    neighbours.begin(1)


def test_what_an_earlier_step_has_left_is_not_taken_for_that_of_this_one(tmp_path: Path) -> None:
    receiver, sender = (
        HiddenReceiver(f"ipc://{tmp_path}/hidden"),
        HiddenSender(f"ipc://{tmp_path}/hidden"),
    )
    before, after = Neighbours(sink=sender), Neighbours(source=receiver)
    hidden = torch.ones(1, 2, 3)
    with before.step([]):
        sender.send(hidden)
        sender.send(hidden)
    with after.step([]):
        receiver.receive(hidden)
    with before.step([]):
        sender.send(hidden)
    with (
        pytest.raises(PeerError, match=r"of step 0, call 1, not .* of step 1, call 0"),
        after.step([]),
    ):
        receiver.receive(hidden)
    for neighbours in (before, after):
        neighbours.close()
        neighbours.close()
