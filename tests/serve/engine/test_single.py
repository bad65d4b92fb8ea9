"""Prefill and decode in one process: requests end anywhere, and the pool is free again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Hashable
from typing import NoReturn

import pytest

from kvflow.protocols.errors import CapacityError
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.testing.cancellation import Steps
from tests.serve.engine.pair import EnginePair, Watched, greedy, prompt_of, tokens_of, until
from tests.serve.engine.single import SingleEngine, one_process


async def _first(tokens: AsyncGenerator[TokenOut, None]) -> TokenOut:
    return await anext(tokens)


async def test_one_process_equals_two_and_frees_everything(llama: LoadedModel) -> None:
    prompts = [prompt_of(n, n) for n in (1, 16, 100, 61)]
    async with one_process(llama, 30, chunk_tokens=32) as (engine, side):

        async def one(prompt: list[int]) -> list[TokenOut]:
            return [out async for out in engine.generate(prompt, greedy(12))]

        found = await asyncio.gather(*map(one, prompts))
        dropped = engine.generate(prompt_of(90), greedy(50))
        await anext(dropped)
        await dropped.aclose()
        early = asyncio.ensure_future(anext(engine.generate(prompt_of(200), greedy(50))))
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.wait([early])
        with pytest.raises(CapacityError):
            await anext(engine.generate(prompt_of(500), greedy(400)))
        await until(side.pages.at_rest)
        for at in itertools.count():
            tokens = engine.generate(prompt_of(200), greedy(50))
            steps = Steps(_first(tokens), at, at + 1)
            await asyncio.gather(steps.task(), return_exceptions=True)
            await tokens.aclose()
            await until(side.pages.at_rest)
            if steps.waits <= at:
                break
        assert at, "it waits for its tokens"
    async with EnginePair(llama, chunk_tokens=32) as pair:
        assert found == [await pair.outputs(p, greedy(12)) for p in prompts]


@pytest.fixture
async def engine(llama: LoadedModel) -> AsyncIterator[SingleEngine]:
    async with one_process(llama, 30) as (made, _):
        yield made


async def test_a_request_whose_pages_are_gone_keeps_no_promise_of_others(
    engine: SingleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(count: int, owner: Hashable) -> NoReturn:
        raise CapacityError("pages", count, 0)

    with monkeypatch.context() as patch:
        patch.setattr(engine._places, "take_room", refuse)
        with pytest.raises(CapacityError):
            await anext(engine.generate(prompt_of(40), greedy(4)))
    tokens = await tokens_of(engine.generate(prompt_of(400), greedy(80)))
    assert len(tokens) == 80, "which is all of the pool"


async def test_a_step_takes_no_more_of_the_prompts_than_it_may(llama: LoadedModel) -> None:
    async with one_process(llama, 30, starts=False, max_batch_tokens=24) as (engine, _):
        steps = Watched(engine.prefill.steps.runner)
        asked = [
            asyncio.ensure_future(tokens_of(engine.generate(prompt_of(length), greedy(1))))
            for length in (20, 30, 22)
        ]
        await asyncio.sleep(0)
        await engine.start()
        assert list(map(len, await asyncio.gather(*asked))) == [1, 1, 1]
    assert list(map(sum, steps.new)) == [24, 24, 24]
