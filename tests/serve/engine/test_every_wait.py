"""Every wait of the engines' requests and of their close is cancelled (I12)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from kvflow.protocols.errors import KvflowError
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.testing.cancellation import Steps
from tests.serve.engine.pair import EnginePair, FakeRoom, greedy, prompt_of, until

PROMPT = prompt_of(27)
TOKENS = greedy(4)
Work = Coroutine[Any, Any, object]
Scene = Callable[[EnginePair], Awaitable[Work]]


def beside(work: Work) -> None:
    asyncio.ensure_future(work).add_done_callback(lambda task: task.cancelled() or task.exception())


def send(pair: EnginePair, room: FakeRoom) -> Work:
    return pair.prefill.prefill(room.prefill_half, PROMPT, TOKENS)


async def read(pair: EnginePair) -> None:
    admission = await pair.decode.admit(PROMPT, TOKENS)
    room = pair.room(PROMPT)
    beside(send(pair, room))
    async with aclosing(pair.decode.generate(room, PROMPT, TOKENS, admission)) as tokens:
        async for _ in tokens:
            pass


async def prefilling(pair: EnginePair) -> Work:
    return send(pair, pair.room(PROMPT))


async def prefilling_slowly(pair: EnginePair) -> Work:
    room = pair.room(PROMPT)
    room.gate.clear()  # all is computed, and nothing lands
    asyncio.get_running_loop().call_later(0.02, room.gate.set)
    return send(pair, room)


async def prefilling_in_turn(pair: EnginePair) -> Work:
    first = pair.room(PROMPT)
    first.gate.clear()  # it has all the pages
    beside(send(pair, first))
    await until(lambda: first.sends != [])
    asyncio.get_running_loop().call_later(0.02, first.gate.set)
    return await prefilling(pair)


async def generating(pair: EnginePair) -> Work:
    return read(pair)


async def generating_in_turn(pair: EnginePair) -> Work:
    beside(read(pair))
    await until(lambda: pair.decode.load().running == 1 or pair.rooms != [])
    return read(pair)


async def compute(pair: EnginePair) -> None:
    async with aclosing(pair.decode.compute(PROMPT, TOKENS)) as tokens:
        async for _ in tokens:
            pass


async def computing_in_turn(pair: EnginePair) -> Work:
    beside(read(pair))
    beside(compute(pair))
    await until(lambda: pair.decode.load().running == 1 or pair.rooms != [])
    return compute(pair)


async def closing_prefill(pair: EnginePair) -> Work:
    beside(read(pair))
    await until(lambda: pair.source.pages.held_pages > 0)
    return pair.prefill.close()


async def closing_decode(pair: EnginePair) -> Work:
    beside(read(pair))
    await until(lambda: pair.target.pages.held_pages > 0)
    return pair.decode.close()


@pytest.mark.parametrize("how", ["once", "late", "twice", "throughout"])
@pytest.mark.parametrize(
    "scene",
    [
        prefilling,
        prefilling_slowly,
        prefilling_in_turn,
        generating,
        generating_in_turn,
        computing_in_turn,
        closing_prefill,
        closing_decode,
    ],
)
async def test_every_wait(llama: LoadedModel, scene: Scene, how: str) -> None:
    before = asyncio.all_tasks()
    for first in itertools.count():
        plan = range(first, first + {"once": 1, "late": 1, "twice": 2, "throughout": 6}[how])
        async with EnginePair(
            llama,
            page_size=4,
            chunk_tokens=10,
            num_pages=16,
            source_pages=9,
            local_prefill_chunk=8,
        ) as pair:
            steps = Steps(await scene(pair), *plan, after_s=0.003 if how == "late" else 0.0)
            (result,) = await asyncio.gather(steps.task(), return_exceptions=True)
            assert not isinstance(result, Exception) or isinstance(result, KvflowError), result
            for closing, side in ((closing_prefill, pair.source), (closing_decode, pair.target)):
                assert scene is not closing or not side.pages.held_pages, "a step outlived it"
            pair.has_to_rest = False
        for room in pair.rooms:
            room.close()
        await until(lambda: pair.home)
        assert not pair.prefill.load().running + pair.prefill.load().waiting
        assert not pair.decode.load().running + pair.decode.load().waiting
        assert not pair.decode._budget._live, "promises nobody will keep"
        await until(lambda: asyncio.all_tasks() <= before)
        if steps.waits <= first:
            break
    print(f"{scene.__name__}, {how}: {first} waits")
    assert first
