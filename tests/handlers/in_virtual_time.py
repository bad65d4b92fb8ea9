"""Plays an ending in virtual time: the other side's client must hear of it in under a second."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.proof.sim.loop import VirtualLoop
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.limits import Timing
from kvflow.testing import pair as pair_module
from kvflow.testing.pair import Pair, pair
from tests.handlers.scenes import WHY

Ending = Callable[[Pair], Awaitable[tuple[Awaitable[object], Code, str]]]
"""Ends a room, and returns what the other side's client waits for, and what it must be told."""
Scene = Callable[[Pair], Awaitable[tuple[PrefillRoom, DecodeRoom]]]


def closed(side: str, scene: Scene, why: Cause = WHY) -> Ending:
    """The user of one side closes the room."""

    async def ending(p: Pair) -> tuple[Awaitable[object], Code, str]:
        source, target = await scene(p)
        (source if side == "prefill" else target).close(why)
        return target.landed() if side == "prefill" else source.done(), why.code, why.text

    ending.__name__ = f"{side}_closes_{scene.__name__}_{why.code}"
    return ending


def in_virtual_time(
    ending: Ending, lost: tuple[type, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the times that ship; of each class in `lost` the first message never arrives."""
    loop = VirtualLoop(random.Random(seed))
    monkeypatch.setattr(pair_module, "monotonic", loop.time)
    took_s: list[float] = []

    async def main() -> None:
        async with pair(timing=Timing()) as p:
            for kind in lost:
                p.network.drop(kind)
            # What comes before the end costs some milliseconds of virtual time.
            began_at_s = loop.time()
            waiting, code, text = await ending(p)
            with pytest.raises(KvflowError) as caught:
                await waiting
            took_s.append(loop.time() - began_at_s)
            assert caught.value.code is code and text in str(caught.value)

    loop.play(main())
    assert not loop.raised
    loop.close()
    assert took_s[0] < 1.0
