"""Two decode shards in one process, each with the whole model and a copy of every stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.aio import Threads
from kvflow.protocols.errors import KvflowError, LostError
from kvflow.protocols.limits import Timing
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import ProcessIdentity
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.parallel.division import of_every_shard
from kvflow.serve.engine.model.parallel.neighbours import Neighbours
from kvflow.serve.engine.model.parallel.part import ModelPart
from kvflow.serve.engine.ranks import shard_wire as wire
from kvflow.serve.engine.ranks.shard_following import ShardFollower
from kvflow.serve.engine.ranks.shard_leading import ShardLeader
from kvflow.transports.host.identity import is_alive, own_identity
from tests.serve.engine.pair import EnginePair, Watched, greedy, prompt_of, tokens_of, until
from tests.serve.engine.tiny_models import Generated, Loaded


def copy_of(model: LoadedModel, shard: int) -> LoadedModel:
    """All of the model, over copy number `shard` of two of every stream."""

    def kind(found: StateKind | None) -> StateKind | None:
        return None if found is None else found._replace(replica=shard, replicas=2)

    layers = tuple(
        layer
        and layer._replace(
            keys=kind(layer.keys),
            values=kind(layer.values),
            indexer=kind(layer.indexer),
            conv=tuple(map(kind, layer.conv)),
            recurrent=tuple(map(kind, layer.recurrent)),
        )
        for layer in model.layers
    )
    part = ModelPart(shard=shard, shards=2)
    return dataclasses.replace(model, layers=layers, part=part, neighbours=Neighbours())


@contextlib.contextmanager
def some_process() -> Iterator[ProcessIdentity]:
    """A process to be killed in place of the second shard's, which is this one."""
    with subprocess.Popen(["sleep", "60"]) as child, contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        ticks = int(Path(f"/proc/{child.pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        yield msgspec.structs.replace(own_identity(), pid=child.pid, start_ticks=ticks)


class Shards:
    """A pair of engines, of which decode has two shards; `process` is said to be the second's."""

    def __init__(
        self,
        pair: EnginePair,
        leader: ShardLeader,
        follower: ShardFollower,
        following: asyncio.Task[None],
        process: ProcessIdentity,
        lost: list[LostError],
    ) -> None:
        self.pair, self.leader, self.follower, self.following = pair, leader, follower, following
        self.process, self.lost = process, lost

    @property
    def differing(self) -> list[str]:
        """The streams whose bytes differ between the shards."""
        pool = self.pair.target.pool
        names = {component.name for component in pool.layout.components}
        both = {name: [pool.array(name, replica=shard) for shard in range(2)] for name in names}
        assert any(np.isfinite(mine).any() for mine, _ in both.values())
        return [
            name
            for name, (mine, other) in both.items()
            if not np.array_equal(mine, other, equal_nan=True)
        ]


@asynccontextmanager
async def shards(model: LoadedModel, **options: Any) -> AsyncIterator[Shards]:
    first, second = copy_of(model, 0), copy_of(model, 1)
    pair = EnginePair(
        model, decode_model=first, copies=2, orders=("page_first", "page_first"), **options
    )
    here, there = (wire.ShardLink(end) for end in socket.socketpair())
    lost: list[LostError] = []
    leader = ShardLeader([here], first.neighbours, lost.append)
    with Threads("model") as thread, some_process() as process:
        follower = ShardFollower(second, there, thread, process)
        following = asyncio.create_task(follower.run())
        leader.start()
        try:
            await asyncio.to_thread(leader.share, pair.target.pool)
            first.neighbours.lead(leader)
            async with pair:
                yield Shards(pair, leader, follower, following, process, lost)
        finally:
            await asyncio.to_thread(leader.close)
            await asyncio.wait([following])
            there.close()


# How many of those that leave fit on the host at once depends on how long their copies take.
@pytest.mark.parametrize("host", [{"host_pages": 200}, {}], ids=["come back", "computed again"])
async def test_both_compute_and_keep_the_same(
    host: dict[str, int], llama: LoadedModel, generated: Generated
) -> None:
    prompts = [prompt_of(n, n) for n in (1, 3, 17, 40, 64, 30)]
    async with shards(llama, page_size=4, num_pages=50, new_token_ratio=0.0, **host) as both:
        pair = both.pair
        found = await pair.tokens_of_all(prompts, greedy(24))
        report = pair.decode.retraction
        assert report.resumes if host else report.recomputes, report
        await until(lambda: pair.home)
        assert not both.leader.sequences and not both.lost
        assert both.differing == []
    assert found == [generated("llama", prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_next"])
async def test_every_kind_of_state_is_followed(
    loaded: Loaded, generated: Generated, family: str
) -> None:
    model, prompts = loaded(family), [prompt_of(n, n) for n in (5, 21, 40)]
    asked = greedy(12, logprobs=2, hidden_states=True)
    async with shards(model, page_size=4) as both:
        outs = await asyncio.gather(*(both.pair.outputs(prompt, asked) for prompt in prompts))
        # Which is when the second shard has ended the last step, too.
        await until(lambda: both.pair.home)
        assert both.differing == []
    for prompt, found in zip(prompts, outs, strict=True):
        assert [out.token_id for out in found] == generated(family, prompt, 12)
        assert all(
            out.hidden_states is not None and len(out.top_logprobs) == 2 for out in found[1:]
        )


def held(both: Shards) -> Watched:
    assert both.follower._runner is not None
    return Watched(both.follower._runner, held=True)


async def test_pages_are_held_until_every_shard_has_ended_the_step(llama: LoadedModel) -> None:
    async with shards(llama) as both:
        pair, steps = both.pair, held(both)
        stream, _ = await pair.begun(prompt_of(40), greedy(9))
        second = await anext(stream)  # the first shard has ended that step
        assert second.finish_reason is None
        await until(steps.entered.is_set)
        await stream.aclose()
        assert pair.target.pages.returning_pages == 3 and pair.decode.load().running == 0
        steps.gate.set()
        await until(pair.target.pages.at_rest)
        assert both.differing == []


async def test_a_shard_that_fails_is_killed_before_its_pages_are_free(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shards(llama) as both:
        pair, steps = both.pair, held(both)
        steps.before = lambda: 1 // 0
        stream, _ = await pair.begun(prompt_of(40), greedy(200))
        await until(steps.entered.is_set)
        honest, alive = pair.target.pages.unhold, list[bool]()

        def unhold(pages: PageIndices) -> None:
            alive.append(is_alive(both.process))
            honest(pages)

        monkeypatch.setattr(pair.target.pages, "unhold", unhold)
        steps.gate.set()
        with pytest.raises(LostError, match="shard 1 of the model is gone"):
            await tokens_of(stream)
        await until(pair.target.pages.at_rest)
        assert alive and not any(alive)
        pair.decode.break_off(both.lost[0].cause())
        with pytest.raises(LostError, match="shard 1"):
            await pair.decode.admit(prompt_of(4), greedy(2))
        assert not pair.decode.healthy and not both.leader.shards[0].is_up
        with pytest.raises(ZeroDivisionError):
            await both.following


async def test_a_step_that_fails_at_the_first_shard_ends_all(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shards(llama) as both:
        monkeypatch.setattr(
            both.pair.decode._runner._cache.layers[1], "update", lambda *_, **__: 1 / 0
        )
        with pytest.raises(
            LostError, match="a decode step failed at the first shard: ZeroDivisionError"
        ):
            await both.pair.tokens(prompt_of(4), greedy(4))
        assert len(both.lost) == 1 and not is_alive(both.process)


class Other:
    """The far end of a leader's link, in the hands of a test."""

    def __init__(self, process: ProcessIdentity, timing: Timing | None = None) -> None:
        here, self.link = (wire.ShardLink(end) for end in socket.socketpair())
        self.lost: list[str] = []
        self.aborted = threading.Event()
        self.leader = ShardLeader(
            [here], self, lambda error: self.lost.append(str(error)), timing or Timing()
        )
        self.leader.start()
        self.link.send(wire.Hello(process))

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.leader.close()
        self.link.close()


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "cannot decode a 0-byte frame"),
        (msgspec.msgpack.encode([12, 1, []]), "cannot decode a 4-byte frame"),
        (msgspec.msgpack.encode([2, -1]), "cannot decode a 3-byte frame"),
    ],
)
async def test_what_a_shard_must_not_say_ends_it(frame: bytes, why: str) -> None:
    with some_process() as process, contextlib.closing(Other(process)) as other:
        other.link._connection.send_bytes(frame)
        await until(lambda: bool(other.lost))
        assert why in other.lost[0] and other.aborted.is_set()
        await until(lambda: not is_alive(process))
        with pytest.raises(LostError):
            other.link.receive()


async def test_a_silent_shard_is_lost_and_one_that_speaks_is_not() -> None:
    timing = Timing(heartbeat_s=0.05, lost_after_s=1.5)
    with some_process() as process, contextlib.closing(Other(process, timing)) as other:
        for _ in range(40):
            other.link.send(wire.Alive())
            assert not other.aborted.wait(0.05)
        assert other.aborted.wait(10)
        await until(lambda: bool(other.lost))
        await until(lambda: not is_alive(process))  # it has been killed, which takes a moment
        assert other.lost == ["shard 1 of the model is gone: it was silent for 1.5 s"]
        other.leader.wait()  # nothing that has been lost is waited for
        with pytest.raises(LostError, match="silent"):
            other.leader.announce([])


async def test_a_plan_that_cannot_be_meant_ends_the_shard(llama: LoadedModel) -> None:
    good = wire.PlannedRow(1, 0, np.arange(4).tobytes(), 1, np.zeros(1, np.int32).tobytes(), 9)
    outside = np.array([64], np.int32).tobytes()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"capacity": 0}, "goes on with sequence 1, which was not in the step before"),
        ({"pages": b""}, "tokens 0..4 have no place"),
        ({"tokens": b""}, "tokens 0..0 have no place"),
        ({"capacity": 3}, "tokens 0..4 have no place"),
        ({"pages": outside}, "index 64 is outside"),
    ]
    async with shards(llama, num_pages=64) as both:
        for wrong, why in cases:
            row = msgspec.structs.replace(good, **wrong)
            with pytest.raises(KvflowError, match=why):
                both.follower._rows(wire.Plan(1, (row,)))


def test_what_the_shards_of_a_model_keep() -> None:
    heads = StateKind("k", "float32", (2, 8), whole=4)
    few = StateKind("v", "float32", (1, 8), start=0, whole=1, replica=0, replicas=2)
    latent = StateKind("latent", "float32", (1, 24), replica=1, replicas=2)
    ring = StateKind("ring", "float32", (5, 2, 8), ROW, start=2, whole=4, axis=1)
    found = of_every_shard([heads, latent, ring], 2)
    assert [kind.name for kind in found] == ["k", "latent", "ring"] * 2
    places = [(0, 0), (0, 0), (0, 0), (2, 0), (0, 1), (2, 0)]
    assert [(kind.start, kind.replica) for kind in found] == places
    grouped = of_every_shard([few._replace(whole=2)], 4)
    assert [(kind.start, kind.replica) for kind in grouped] == [(0, 0), (0, 1), (1, 0), (1, 1)]


async def test_a_lost_shard_is_waited_for_until_its_process_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then it may write into the pool; here the signal is long in coming."""
    waits, poll = threading.Event(), select.poll

    def watched() -> select.poll:
        waits.set()
        return poll()

    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    monkeypatch.setattr(select, "poll", watched)
    with some_process() as process, contextlib.closing(Other(process)) as other:
        [shard] = other.leader.shards
        await until(lambda: shard.process >= 0)
        await asyncio.to_thread(other.leader.lost, 1, "it has ended")
        waits.clear()
        waiting = asyncio.create_task(asyncio.to_thread(other.leader.wait))
        assert await asyncio.to_thread(waits.wait, 20)
        assert not waiting.done() and is_alive(process)
        os.kill(process.pid, signal.SIGKILL)
        await waiting
        assert not is_alive(process)


def own_pidfds() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
    return count


async def test_a_leader_that_is_closed_has_no_descriptor_left_to_close_again() -> None:
    with some_process() as process:
        before, other = own_pidfds(), Other(process)
        [shard] = other.leader.shards
        await until(lambda: shard.process >= 0)
        for _ in range(2):
            other.close()
            assert shard.process < 0
        assert own_pidfds() <= before, "what earlier tests have left may be closed meanwhile"
        assert not other.lost and not other.aborted.is_set() and is_alive(process)


async def test_a_step_that_fails_while_a_leader_closes_is_an_error_all_the_same() -> None:
    with some_process() as process:
        other = Other(process)
        other.close()
        error = other.leader.failed(ValueError("no such row"))
        assert str(error) == "no such row"
        assert not other.lost and is_alive(process)
