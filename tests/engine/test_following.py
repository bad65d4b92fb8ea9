"""A rank whose steps cannot go on says so: else the first one would wait for it for ever, and call itself healthy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvflow.engine.ranks import wire
from kvflow.engine.ranks.following import StepFollower
from kvflow.engine.ranks.leading import StepLeader
from kvflow.engine.scheduler.params import SamplingParams
from kvflow.protocols.errors import KvflowError, LostError, OwnershipError
from kvflow.testing.pair import until


class Socket:
    """Implements `ControlSocket`, in memory. Frames as they are put into `frames`; an error is raised instead."""

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

    def __init__(self) -> None:
        socket: Any = Socket()
        self.socket = socket
        steps: Any = SimpleNamespace(cache=None, runner=SimpleNamespace(rest=lambda: None), give_back=self._give_back)
        hello: Any = SimpleNamespace(rank=1)
        neighbours: Any = SimpleNamespace(begin=lambda generation: None, abort=lambda **_: None, broken=False)
        self.steps = StepFollower(
            steps, socket, hello=hello, status=self._status, neighbours=neighbours, eos_ids=frozenset()
        )  # fmt: skip
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
    with caplog.at_level(logging.ERROR), pytest.raises(LostError, match=f"steps of this rank have ended: {text}"):
        await asyncio.wait_for(follower.steps.unusable, 5)
    assert "ended" in caplog.text
    await follower.steps.close()


async def test_a_rank_that_is_closed_is_not_unusable() -> None:
    follower = Follower()
    await follower.steps.start()
    await until(lambda: bool(follower.socket.sent))
    await follower.steps.close()
    assert not follower.steps.unusable.done()


async def test_a_first_rank_that_hears_nothing_any_more_is_unusable() -> None:
    told: list[KvflowError] = []
    socket: Any = Socket()
    nothing: Any = lambda *_: None  # noqa: E731
    neighbours: Any = SimpleNamespace(begin=nothing, abort=nothing, broken=False)
    steps = StepLeader(
        socket, world_size=2, shards=1, places=(1, 0), neighbours=neighbours, on_hello=nothing, on_opened=nothing,
        on_token=nothing, on_agreed=nothing, on_broken=nothing, on_ready=nothing, on_unusable=told.append,
    )  # fmt: skip
    await steps.start()
    socket.frames.put_nowait(OSError("the socket was closed"))
    await until(lambda: bool(told))
    assert "OSError: the socket was closed" in str(told[0])
    await steps.close()
