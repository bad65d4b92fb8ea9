"""A rank whose steps cannot go on reports it, because the first one would wait forever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import Cause, Code, KvflowError, LostError, OwnershipError, WireError
from kvflow.protocols.pages.kinds import StateKind
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import Incarnation, Rank
from kvflow.serve.engine.model.grammars import Grammar
from kvflow.serve.engine.ranks import following, wire
from kvflow.serve.engine.ranks.following import StepFollower
from kvflow.serve.engine.ranks.leading import StepLeader
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.testing.pair import until
from tests.serve.engine.stages import a_status

PLAN = wire.Plan(generation=1, step=1, rows=(wire.PlannedRow(1, 0, 1, 0),))


class Socket:
    """Implements `ControlSocket` in memory. An error in `frames` is raised."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.sent: list[bytes] = []
        self.gone: set[bytes] = set()  # peers

    async def receive(self) -> list[tuple[bytes, bytes]]:
        frame = await self.frames.get()
        if isinstance(frame, Exception):
            raise frame
        return [(b"", frame)]

    def send(self, frame: bytes, peer: bytes = b"", *, at_once: bool = False) -> bool:
        if peer in self.gone:
            return False
        self.sent.append(frame)
        return True


class Follower:
    """A follower that cannot give requests back, and whose status may be unknown."""

    def __init__(self, rank: int = 1, shards: int = 1) -> None:
        socket: Any = Socket()
        self.socket = socket
        steps: Any = SimpleNamespace(
            cache=None,
            runner=SimpleNamespace(rest=lambda: None),
            give_back=self._give_back,
            adjustments_of=lambda params, sequence: None,
            layout=build_layout([StateKind("k", "int8", (1,))], page_size=4, num_pages=8),
            pages=PageAllocator(1),
            rows=None,
        )
        hello: Any = SimpleNamespace(rank=rank)
        self.aborts: list[bool] = []  # for each: of the other shards too
        neighbours: Any = SimpleNamespace(
            begin=lambda generation: None,
            abort=lambda *, shards=True: self.aborts.append(shards),
            broken=False,
        )
        self.steps = StepFollower(
            steps,
            socket,
            hello=hello,
            status=self._status,
            neighbours=neighbours,
            shards=shards,
        )
        self.steps._say_hello = lambda: None  # type: ignore[method-assign]
        self.inner = steps
        self.status_error: Exception | None = None

    def _give_back(self, request: Any) -> None:
        raise OwnershipError("page 3 is free already")

    def _status(self) -> Any:
        if self.status_error is not None:
            raise self.status_error
        return wire.Begin(generation=1)

    @property
    def said(self) -> list[wire.ToFirst]:
        return list(map(wire.parse_at_first, self.socket.sent))

    def hear(self, *messages: wire.ToOthers) -> None:
        for message in messages:
            self.socket.frames.put_nowait(wire.encode(message))

    def open(self, ticket: int) -> Any:
        """A request of three tokens, which has its places."""
        self.add(ticket)
        found: Any = self.steps.requests[ticket]
        sequence = SimpleNamespace(prompt_length=3, computed=0, page_count=1)
        found.request = SimpleNamespace(ticket=ticket, choice=None, sequence=sequence)
        return found.request

    def add(self, *tickets: int) -> None:
        room: Any = SimpleNamespace(ended=False, prefix_tokens=0)
        for ticket in tickets:
            self.steps.add(ticket, room, np.arange(3), SamplingParams())

    def drop(self) -> None:
        self.open(1)
        self.hear(wire.Drop(ticket=1))

    def lose_status(self) -> None:
        self.status_error = ZeroDivisionError("pages of a pool of none")

    def lose_socket(self) -> None:
        self.socket.frames.put_nowait(OSError("the socket was closed"))


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        (Follower.drop, "OwnershipError: page 3"),
        (Follower.lose_status, "ZeroDivisionError: pages of"),
        (Follower.lose_socket, "OSError: the socket"),
    ],
)
async def test_a_task_that_ends_makes_the_rank_unusable(
    fail: Callable[[Follower], None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    follower = Follower()
    await follower.steps.start()
    fail(follower)
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(LostError, match=f"steps of this rank have ended: {text}"),
    ):
        await asyncio.wait_for(follower.steps.unusable, 20)
    assert "ended" in caplog.text
    await follower.steps.close()


@pytest.mark.parametrize(
    ("rank", "failed", "finishes"),
    [
        (1, None, True),
        (1, 2, True),
        (1, 3, True),
        (1, 0, False),
        (1, 1, False),
        (2, None, False),
        (2, 0, False),
    ],
)
async def test_shards_of_the_first_stage_finish_a_step_that_failed_in_another_stage(
    rank: int, failed: int | None, finishes: bool
) -> None:
    """Of two stages with two shards each: ranks 0 and 1 wait for each other within every layer."""
    follower = Follower(rank, shards=2)
    steps = follower.steps
    steps._receive(wire.Begin(generation=1))
    steps._stepping = True
    cause = Cause(Code.ENGINE_ERROR, "it broke down")
    steps._receive(
        wire.End(generation=1, cause=cause, failed=None if failed is None else Rank(failed))
    )
    assert steps._finishing is finishes and follower.aborts == [not finishes]


async def test_a_step_that_fails_while_the_shards_finish_ends_their_wait_for_it() -> None:
    """The generation is over, so a report of the failure would reach no rank that acts on it."""
    steps = (follower := Follower(1, shards=2)).steps
    running, go_on = asyncio.Event(), asyncio.Event()

    async def run(rows: Any, requests: Any) -> None:
        running.set()
        await go_on.wait()
        raise ZeroDivisionError

    follower.inner.run, follower.inner.give_back = run, lambda request: None
    follower.open(1)
    await steps.start()
    follower.hear(wire.Begin(generation=1), PLAN)
    await asyncio.wait_for(running.wait(), 20)
    follower.hear(wire.End(generation=1, cause=Cause(Code.PEER_LOST)))
    await until(lambda: follower.aborts == [False])
    go_on.set()
    await until(lambda: not steps.requests)
    assert follower.aborts == [False, True] and steps.failed_steps == 1
    assert follower.socket.sent == [wire.encode(wire.Begin(generation=1))], "its status only"
    await steps.close()


async def test_only_a_step_that_runs_is_broken_off() -> None:
    steps = (follower := Follower()).steps
    running, go_on = asyncio.Event(), asyncio.Event()

    async def run(rows: Any, requests: Any) -> None:
        running.set()
        await go_on.wait()

    follower.inner.run, follower.inner.give_back = run, lambda request: None
    follower.open(1)
    await steps.start()
    cause = Cause(Code.ENGINE_ERROR, "it broke down")
    follower.hear(wire.Begin(generation=1), PLAN)
    await asyncio.wait_for(running.wait(), 20)
    follower.hear(wire.End(generation=1, cause=cause))
    await until(lambda: follower.aborts == [True])
    go_on.set()
    await until(lambda: not steps.requests)
    follower.hear(wire.Begin(generation=2), wire.End(generation=2, cause=cause))
    await until(lambda: steps._generation == 2 and not steps._open)
    assert follower.aborts == [True]
    await steps.close()


async def test_a_generation_that_is_over_or_runs_does_not_begin_again() -> None:
    steps = Follower().steps
    for generation in (2, 2, 3, 1):
        steps._receive(wire.Begin(generation=generation))
    assert (steps._generation, steps.dropped) == (2, 3)
    steps._receive(wire.End(generation=2, cause=Cause(Code.ENGINE_ERROR)))
    steps._receive(wire.Begin(generation=2))
    assert (steps._generation, steps.dropped) == (2, 4)


async def test_a_generation_that_cannot_begin_makes_the_rank_unusable_and_runs_no_step() -> None:
    steps = Follower().steps

    def refuse(generation: int) -> None:
        raise LostError("the link of hidden states is gone")

    neighbours: Any = steps._neighbours
    neighbours.begin = refuse
    steps._receive(wire.Begin(generation=1))
    with pytest.raises(LostError, match="hidden states is gone"):
        await steps.unusable
    steps._receive(PLAN)
    assert steps.dropped == 1 and not steps._queue


async def test_what_is_computed_leaves_once_it_has_started_here_and_at_the_first_rank() -> None:
    steps = (follower := Follower()).steps
    sent: list[int] = []
    follower.inner.send = lambda request: sent.append(request.ticket)
    for ticket in (1, 2):
        follower.open(ticket)
    steps.started(1)
    steps._receive(wire.Keep(ticket=2))
    assert sent == []
    steps._receive(wire.Keep(ticket=1))
    steps.started(2)
    assert sent == [1, 2]


async def test_pages_that_cannot_be_sent_end_their_own_room() -> None:
    steps = (follower := Follower()).steps
    closed: list[str] = []
    for error in (ZeroDivisionError(), ZeroDivisionError(), LostError("decode is gone")):

        def fail(request: Any, error: Exception = error) -> None:
            raise error

        follower.inner.send = fail
        request = follower.open(1)
        request.room = SimpleNamespace(close=lambda cause: closed.append(str(cause)))
        steps._send(request)
    assert closed == [
        *2 * ["engine_error: sending pages failed: ZeroDivisionError"],
        "peer_lost: decode is gone",
    ]
    assert steps.failed_steps == 2


@pytest.mark.parametrize("succeeded", [False, True])
async def test_the_cache_keeps_what_every_rank_has_computed(succeeded: bool) -> None:
    steps = (follower := Follower()).steps
    kept: list[int] = []
    follower.inner.keep, follower.inner.give_back = (
        lambda request: kept.append(request.ticket),
        lambda request: None,
    )
    follower.open(1)
    steps._apply(wire.Drop(ticket=1, succeeded=succeeded))
    assert kept == [1] * succeeded and not steps.requests


async def test_a_rank_says_what_it_has_of_a_prompt_when_that_is_loaded() -> None:
    steps = (follower := Follower()).steps
    follower.inner.find = lambda request, tokens: None
    loading: list[Any] = []
    loads: Any = steps._loads

    def begin(request: Any) -> bool:
        loading.append(request)
        return True

    loads.begin = begin
    follower.add(1)
    assert not follower.socket.sent, "the first rank does not ask who has opened it"
    steps._receive(wire.Begin(generation=1))
    steps._apply(wire.Find(generation=1, number=7, ticket=1, tokens=2))
    assert not follower.socket.sent
    [request] = loading
    steps._answer(request)
    assert follower.said == [wire.Found(number=7, tokens=0)]


async def test_a_request_is_reported_when_its_grammar_is_compiled() -> None:
    steps = (follower := Follower()).steps
    go, closed = asyncio.Event(), list[Cause]()
    follower.inner.samples = True

    async def compiled(params: SamplingParams, sequence: Any) -> Any:
        await go.wait()
        if params.grammar == Grammar("regex", "odd"):
            raise ZeroDivisionError
        return SimpleNamespace(over=lambda sequence: sequence)

    follower.inner.compiled = compiled
    room: Any = SimpleNamespace(ended=False, prefix_tokens=0, close=closed.append)
    for ticket, text in ((1, "a"), (2, "odd"), (3, "b")):
        steps.add(ticket, room, np.arange(3), SamplingParams(grammar=Grammar("regex", text)))
    steps._drop(3)
    with pytest.raises(WireError, match="request 1, and this rank has not compiled its grammar"):
        await steps._ready(wire.PlannedRow(1, 0, 1, 0))
    steps._find(wire.Find(generation=1, number=7, ticket=1, tokens=2))
    assert follower.said == [wire.Found(number=7, tokens=0)]
    go.set()
    await until(lambda: not steps._compiling)
    opened = wire.Opened(ticket=1)
    assert follower.said[1:] == [opened]
    assert [cause.code for cause in closed] == [Code.ENGINE_ERROR]
    request: Any = steps._new_request(1, steps.requests[1])
    assert request.draw.adjustments is request.sequence
    # A first rank that did not know this process yet has dropped the report.
    steps._hello = a_status(1)  # type: ignore[assignment]
    StepFollower._say_hello(steps)
    assert follower.said[2:] == [a_status(1), opened]


async def test_no_two_requests_own_the_same_places() -> None:
    steps = (follower := Follower()).steps
    for ticket in (1, 2):
        follower.open(ticket)
    owners = {
        steps._new_request(ticket, found).sequence.owner for ticket, found in steps.requests.items()
    }
    assert len(owners) == 2


async def test_a_status_is_told_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "STATUS_S", 0.0)
    follower, looks = Follower(), 0
    told = [a_status(1, pid=1), a_status(1, pid=2)]

    def status() -> wire.Status:
        nonlocal looks
        looks += 1
        return told[looks > 9]

    follower.steps._status = status
    await follower.steps.start()
    await until(lambda: looks > 20)
    assert follower.said == told
    await follower.steps.close()


async def test_a_request_that_was_dropped_before_it_came_is_not_kept() -> None:
    follower = Follower()
    await follower.steps.start()
    follower.hear(wire.Drop(ticket=2))
    await until(lambda: follower.steps._dropped_ahead == {2})
    follower.add(1, 2, 3)
    assert set(follower.steps.requests) == {1, 3} and not follower.steps._dropped_ahead
    await follower.steps.close()


async def test_a_rank_that_is_closed_is_not_unusable() -> None:
    follower = Follower()
    await follower.steps.start()
    await until(lambda: bool(follower.socket.sent))
    await follower.steps.close()
    assert not follower.steps.unusable.done()


def first_rank(
    world_size: int,
    told: list[KvflowError],
    on_broken: Callable[[Cause], None] = lambda _: None,
    *,
    shards: int = 1,
    abort: Callable[..., None] = lambda **_: None,
) -> tuple[StepLeader, Any]:
    socket: Any = Socket()
    nothing: Any = lambda *_: None  # noqa: E731
    neighbours: Any = SimpleNamespace(begin=nothing, abort=abort, broken=False)
    names = ("hello", "opened", "token", "agreed", "ready")
    steps = StepLeader(
        socket,
        world_size=world_size,
        shards=shards,
        places=(1, 0),
        neighbours=neighbours,
        on_unusable=told.append,
        on_broken=on_broken,
        **dict.fromkeys((f"on_{name}" for name in names), nothing),
    )
    return steps, socket


def test_a_first_rank_names_the_ranks_that_are_not_ready() -> None:
    steps, _ = first_rank(4, [])
    assert steps.unavailable_reason == "rank 1, 2, 3 is not ready for a step"
    hello: Any = SimpleNamespace(member=5, rank=2)
    steps._on_rank_ready(routing_id(Incarnation(5)), hello)
    assert steps.unavailable_reason == "rank 1, 3 is not ready for a step"


async def test_a_first_rank_that_hears_nothing_any_more_is_unusable() -> None:
    told: list[KvflowError] = []
    steps, socket = first_rank(2, told)
    await steps.start()
    socket.frames.put_nowait(OSError("the socket was closed"))
    await until(lambda: bool(told))
    assert "OSError: the socket was closed" in str(told[0])
    await steps.close()


async def test_a_first_rank_listens_to_the_process_that_a_rank_is_now() -> None:
    steps, _ = first_rank(2, [])
    for member in (5, 6):
        hello: Any = SimpleNamespace(member=member, rank=1, pages=1, rows=0)
        steps._on_rank_ready(routing_id(Incarnation(member)), hello)
        if member == 5:
            steps.break_off(Cause(Code.ENGINE_ERROR, "it broke down"))
    assert steps.ready
    before, now = (routing_id(Incarnation(member)) for member in (5, 6))
    steps._receive(before, wire.encode(a_status(1)))
    assert (steps.statuses, steps.dropped) == ({}, 1)
    steps._receive(now, wire.encode(a_status(1)))
    steps._receive(now, wire.encode(a_status(2)))
    assert steps.statuses == {1: a_status(1)}, "a rank speaks for itself"


@pytest.mark.parametrize(
    ("shards", "failed", "aborts"), [(2, True, [{}]), (2, False, []), (1, True, [])]
)
async def test_a_step_that_fails_at_the_first_rank_ends_the_wait_of_its_shards(
    shards: int, failed: bool, aborts: list[Any]
) -> None:
    """Even when the generation is over already, for another cause."""
    told: list[Any] = []
    steps, _ = first_rank(4, [], shards=shards, abort=lambda **how: told.append(how))
    steps.stepped(failed=failed)
    assert told == aborts


async def test_a_first_rank_that_is_closed_reads_no_more() -> None:
    steps, _ = first_rank(2, [])
    await steps.start()
    await steps.close()
    assert steps._task is not None and steps._task.cancelled()


async def test_a_step_is_announced_to_all_before_the_loss_of_one_ends_its_generation() -> None:
    """The other shards run an announced step with this one, which gives no places back before."""
    broken: list[Cause] = []
    steps, socket = first_rank(4, [], broken.append)
    peers = {rank: Incarnation(4 + rank) for rank in (1, 2, 3)}
    for rank, member in peers.items():
        hello: Any = SimpleNamespace(member=member, rank=rank, pages=1, rows=0)
        steps._on_rank_ready(routing_id(member), hello)
    assert steps.ready
    socket.sent.clear()
    socket.gone.add(routing_id(peers[2]))
    row: Any = SimpleNamespace(sequence=SimpleNamespace(computed=0), new=1, logits=0)
    request: Any = SimpleNamespace(ticket=1)
    steps.announce([row], [request])
    assert (broken, steps.unavailable_reason) == ([], "")
    await until(lambda: bool(broken))
    assert broken[0].code is Code.PEER_LOST and steps.unavailable_reason
    told = [type(wire.parse_at_others(frame)) for frame in socket.sent]
    assert told == [wire.Plan] * 2 + [wire.End] * 2
