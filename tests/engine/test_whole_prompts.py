"""Prompts of whole pages that decode has whole, over real nodes: a last chunk without pages, and an
answer.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest

from kvflow.aio import Threads
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.decode import DecodeEngine
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from tests.engine.pair import greedy, prompt_of, until

PAGE_SIZE, PAGES, NEW_TOKENS = 4, 96, 4
WHOLE = [prompt_of(length, length) for length in (4, 8, 16, 32)]
BESIDE = [prompt_of(length, length) for length in (7, 17, 33)]
LANES, REQUESTS = 6, 60


class Nodes:
    """A prefill and a decode with caches, and requests through both."""

    def __init__(
        self, prefill: PrefillNode, decode: DecodeNode, engines: tuple[PrefillEngine, DecodeEngine]
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.sending, self.landing = engines
        self._rooms = itertools.count(1)

    async def ask(self, prompt: list[int]) -> tuple[TokenOut, list[int]]:
        """What prefill answers, and decode's tokens. Raises: what either raises."""
        room = next(self._rooms)
        leg = asyncio.create_task(self._prefill(room, prompt))
        try:
            tokens = await self._decode(room, prompt)
            return await leg, tokens
        finally:
            leg.cancel()
            await asyncio.wait([leg])

    async def _prefill(self, room: int, prompt: list[int]) -> TokenOut:
        return await self.sending.prefill(
            self.prefill.room(room, prompt), prompt, greedy(NEW_TOKENS)
        )

    async def _decode(self, room: int, prompt: list[int]) -> list[int]:
        engine, params = self.landing, greedy(NEW_TOKENS)
        admission = await engine.admit(prompt, params)
        try:
            prefix = await engine.cached(prompt, admission=admission)
            assert prefix is not None
            half = await self.decode.room(
                room, [self.prefill.info], prompt, prefix_tokens=prefix.tokens
            )
            return [
                out.token_id
                async for out in engine.generate(half, prompt, params, admission, prefix)
            ]
        finally:
            admission.release()


def _all_can_leave(cache: PrefixCache) -> bool:
    return cache.stats().pages == cache.evictable_pages


@asynccontextmanager
async def nodes(model: LoadedModel) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        layout = build_layout(
            model.streams, page_size=PAGE_SIZE, num_pages=PAGES, fingerprint=model.fingerprint
        )
        source, target = PagedPool.allocate(layout), PagedPool.allocate(layout, shared=True)
        threads = [stack.enter_context(Threads("model")) for _ in range(2)]
        caches = [PrefixCache(pool.pages, PAGE_SIZE) for pool in (source, target)]
        for pool, cache in zip((source, target), caches, strict=True):
            stack.callback(pool.close)
            stack.push_async_callback(cache.close)
        prefill = await stack.enter_async_context(PrefillNode(source, "local"))
        decode = await stack.enter_async_context(DecodeNode(target, "local"))
        sending = PrefillEngine(
            model, source, source.pages, threads[0], chunk_tokens=8, cache=caches[0]
        )
        landing = DecodeEngine(model, target, target.pages, threads[1], cache=caches[1])
        for engine in (sending, landing):
            await engine.start()
            stack.push_async_callback(engine.close)
        yield Nodes(prefill, decode, (sending, landing))
        await until(lambda: not (prefill.shell.endpoint.rooms or decode.shell.endpoint.rooms))
        for pool, cache in zip((source, target), caches, strict=True):
            await until(partial(_all_can_leave, cache))
            cache.flush()
            await until(pool.pages.at_rest)
        assert not prefill.counts.handler_errors and not decode.counts.handler_errors


@pytest.mark.parametrize("prompt", WHOLE, ids=len)
async def test_prefill_answers_a_prompt_that_decode_has_whole(
    prompt: list[int], llama: LoadedModel
) -> None:
    async with nodes(llama) as pair:
        _, tokens = await pair.ask(prompt)
        for _ in range(2):
            first, again = await pair.ask(prompt)
            assert again == tokens and first.token_id == tokens[0]


async def test_none_of_many_fails_beside_others_and_clients_that_leave(
    llama: LoadedModel, seed: int
) -> None:
    chance = random.Random(seed)
    async with nodes(llama) as pair:
        expected = [(await pair.ask(prompt))[1] for prompt in (*WHOLE, *BESIDE)]
        numbers = iter(range(REQUESTS))

        async def lane() -> None:
            for _ in numbers:
                which = chance.randrange(len(expected))
                asking = asyncio.create_task(pair.ask((*WHOLE, *BESIDE)[which]))
                if chance.random() < 0.2:
                    for _ in range(chance.choice((0, 1, 5, 30))):
                        await asyncio.sleep(0)
                    asking.cancel()
                    await asyncio.wait([asking])
                    continue
                first, tokens = await asking
                assert tokens == expected[which] and first.token_id == tokens[0]

        async with asyncio.TaskGroup() as lanes:
            for _ in range(LANES):
                lanes.create_task(lane())
