"""A rank whose steps cannot go on says so: else the first one would wait for it for ever, and call
itself healthy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvflow.protocols.errors import Cause, Code, KvflowError, LostError, OwnershipError
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import Incarnation, Rank
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.ranks.following import StepFollower
from kvflow.serve.engine.ranks.leading import StepLeader
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.testing.pair import until


class Socket:
    """Implements `ControlSocket`, in memory.

    Frames as they are put into `frames`; an error is raised instead.
    """

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.sent: list[bytes] = []

    async def receive(self) -> list[tuple[bytes, bytes]]:
        frame = await self.frames.get()
        if isinstance(frame, Exception):
            raise frame
        return [(b"", frame)]

    def send(self, frame: bytes, peer: bytes = b"", *, at_once: bool = False) -> bool:
        self.sent.append(frame)
        return True


class Follower:
    """One whose requests can be given back to nobody, and whose status may be unknown."""

    def __init__(self, rank: int = 1, shards: int = 1) -> None:
        socket: Any = Socket()
        self.socket = socket
        steps: Any = SimpleNamespace(
            cache=None, runner=SimpleNamespace(rest=lambda: None), give_back=self._give_back
        )
        hello: Any = SimpleNamespace(rank=rank)
        self.aborts: list[bool] = []  # for each: of the other shards too
        neighbours: Any = SimpleNamespace(
            begin=lambda generation: None,
            abort=lambda *, shards: self.aborts.append(shards),
            broken=False,
        )
        self.steps = StepFollower(
            steps,
            socket,
            hello=hello,
            status=self._status,
            neighbours=neighbours,
            eos_ids=frozenset(),
            shards=shards,
        )
        self.steps._say_hello = lambda: None  # type: ignore[method-assign]
        self.status_error: Exception | None = None

    def _give_back(self, request: Any) -> None:
        raise OwnershipError("page 3 is free already")

    def _status(self) -> Any:
        if self.status_error is not None:
            raise self.status_error
        return wire.Begin(generation=1)

    def drop(self) -> None:
        room: Any = SimpleNamespace(ended=False)
        self.steps.add(1, room, np.arange(3), SamplingParams())
        self.steps.requests[1].request = SimpleNamespace(ticket=1)  # type: ignore[assignment]
        self.socket.frames.put_nowait(wire.encode(wire.Drop(ticket=1)))

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
        await asyncio.wait_for(follower.steps.unusable, 5)
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
    steps = (follower := Follower(rank, shards=2)).steps
    steps._receive(wire.Begin(generation=1))
    steps._stepping = True
    cause = Cause(Code.ENGINE_ERROR, "it broke down")
    steps._receive(
        wire.End(generation=1, cause=cause, failed=None if failed is None else Rank(failed))
    )
    assert steps._finishing is finishes and follower.aborts == [not finishes]


async def test_a_request_that_was_dropped_before_it_came_is_not_kept() -> None:
    follower = Follower()
    await follower.steps.start()
    follower.socket.frames.put_nowait(wire.encode(wire.Drop(ticket=2)))
    await until(lambda: follower.steps._dropped_ahead == {2})
    room: Any = SimpleNamespace(ended=False)
    for ticket in (1, 2, 3):
        follower.steps.add(ticket, room, np.arange(3), SamplingParams())
    assert set(follower.steps.requests) == {1, 3} and not follower.steps._dropped_ahead
    await follower.steps.close()


async def test_a_rank_that_is_closed_is_not_unusable() -> None:
    follower = Follower()
    await follower.steps.start()
    await until(lambda: bool(follower.socket.sent))
    await follower.steps.close()
    assert not follower.steps.unusable.done()


def first_rank(world_size: int, told: list[KvflowError]) -> tuple[StepLeader, Any]:
    """And its socket."""
    socket: Any = Socket()
    nothing: Any = lambda *_: None  # noqa: E731
    neighbours: Any = SimpleNamespace(begin=nothing, abort=nothing, broken=False)
    steps = StepLeader(
        socket,
        world_size=world_size,
        shards=1,
        places=(1, 0),
        neighbours=neighbours,
        on_hello=nothing,
        on_opened=nothing,
        on_token=nothing,
        on_agreed=nothing,
        on_broken=nothing,
        on_ready=nothing,
        on_unusable=told.append,
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
