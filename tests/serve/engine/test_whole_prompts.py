"""Prompts of whole pages that decode has whole, over real nodes: a last chunk without pages."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.params import TokenOut
from tests.serve.engine.nodes import Nodes, nodes
from tests.serve.engine.pair import greedy, prompt_of, tokens_of
from tests.serve.engine.storm import in_lanes, turns

NEW_TOKENS = 4
WHOLE = [prompt_of(length, length) for length in (4, 8, 16, 32)]
BESIDE = [prompt_of(length, length) for length in (7, 17, 33)]
LANES, REQUESTS = 6, 60


class Asking:
    """Requests through the nodes of a prefill and a decode with caches."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._rooms = itertools.count(1)

    async def ask(self, prompt: list[int]) -> tuple[TokenOut, list[int]]:
        room, nodes = next(self._rooms), self._nodes
        prefilling = nodes.sending.prefill(
            nodes.prefill.room(room, prompt), prompt, greedy(NEW_TOKENS)
        )
        leg = asyncio.create_task(prefilling)
        try:
            tokens = await self._decode(room, prompt)
            return await leg, tokens
        finally:
            leg.cancel()
            await asyncio.wait([leg])

    async def _decode(self, room: int, prompt: list[int]) -> list[int]:
        engine, params = self._nodes.landing, greedy(NEW_TOKENS)
        admission = await engine.admit(prompt, params)
        try:
            prefix = await engine.cached(prompt, admission=admission)
            assert prefix is not None
            half = await self._nodes.decode.room(
                room, [self._nodes.prefill.info], prompt, prefix_tokens=prefix.tokens
            )
            return await tokens_of(engine.generate(half, prompt, params, admission, prefix))
        finally:
            admission.release()


@pytest.mark.parametrize("prompt", WHOLE, ids=len)
async def test_prefill_answers_a_prompt_that_decode_has_whole(
    prompt: list[int], llama: LoadedModel
) -> None:
    async with nodes(llama, caches=True, chunk_tokens=8) as found:
        pair = Asking(found)
        _, tokens = await pair.ask(prompt)
        for _ in range(2):
            first, again = await pair.ask(prompt)
            assert again == tokens and first.token_id == tokens[0]


async def test_none_of_many_fails_beside_others_and_clients_that_leave(
    llama: LoadedModel, seed: int
) -> None:
    chance = random.Random(seed)
    async with nodes(llama, caches=True, chunk_tokens=8) as found:
        pair = Asking(found)
        expected = [(await pair.ask(prompt))[1] for prompt in (*WHOLE, *BESIDE)]

        async def one(_: int) -> None:
            which = chance.randrange(len(expected))
            asking = asyncio.create_task(pair.ask((*WHOLE, *BESIDE)[which]))
            if chance.random() < 0.2:
                await turns(chance, 0, 1, 5, 30)
                asking.cancel()
                await asyncio.wait([asking])
                return
            first, tokens = await asking
            assert tokens == expected[which] and first.token_id == tokens[0]

        await in_lanes(LANES, REQUESTS, one)
