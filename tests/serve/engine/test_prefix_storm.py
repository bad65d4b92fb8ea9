"""A storm over a prefill and a decode that cache prefixes; in the end nothing is locked."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from kvflow.protocols.errors import Code, KvflowError
from kvflow.serve.engine.model.load import LoadedModel
from tests.serve.engine.pair import EnginePair, greedy, prompt_of
from tests.serve.engine.storm import in_lanes, turns

LANES, REQUESTS, MOST_TOKENS = 8, 40, 24
HOWS = ("stays", "stays", "stays", "leaves", "prefill leaves", "stops reading")
LENGTHS = (1, 3, 8, 17, 24, 33, 40)  # tokens of what stands after a common beginning; pages have 4
SMALL = {"page_size": 4, "chunk_tokens": 16, "num_pages": 34, "source_pages": 24}
OFTEN = ("small", "optimistic", "write back", "little host tier")
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {"page_size": 4, "chunk_tokens": 16, "num_pages": 300},
    "small": SMALL,
    "retracts": {**SMALL, "new_token_ratio": 0.1, "host_pages": 100},
    "little host memory": {**SMALL, "new_token_ratio": 0.1, "host_pages": 8},
    "recomputes": {**SMALL, "new_token_ratio": 0.1},
    "optimistic": {**SMALL, "optimistic_tries": 2},
    "host tier": {**SMALL, "cache_host_pages": 40},
    "write back": {
        **SMALL,
        "new_token_ratio": 0.1,
        "host_pages": 100,
        "cache_host_pages": 40,
        "cache_options": {"write_policy": "write_back"},
    },
    "little host tier": {
        **SMALL,
        "new_token_ratio": 0.1,
        "host_pages": 100,
        "cache_host_pages": 12,
        "cache_options": {"write_policy": "write_through_selective"},
    },
}


STATEFUL_POOLS = (
    "retracts",
    "little host memory",
    "recomputes",
    "optimistic",
    "host tier",
    "write back",
)


def prompts() -> list[list[int]]:
    """Families that begin alike, of two pages, of six, and of none."""
    return [prompt_of(common, 1) + prompt_of(own, own) for common in (0, 8, 24) for own in LENGTHS]


class Storm:
    def __init__(self, pair: EnginePair, chance: random.Random, expected: list[list[int]]) -> None:
        self.pair, self.chance, self.expected = pair, chance, expected
        # Every kind of request is there, whatever chance says.
        self.hows = [HOWS[i % len(HOWS)] for i in range(REQUESTS)]
        chance.shuffle(self.hows)
        self.ended: Counter[str] = Counter()

    async def _weather(self) -> None:
        await self._turns()
        what = self.chance.random()
        if what < 0.2:
            self.chance.choice(self.pair.caches).flush()
        elif what < 0.3:
            self.pair.decode.retract_all()
        for side in (self.pair.source, self.pair.target):
            assert side.pages.free_pages + sum(side.pages.owned().values()) == side.pages.capacity

    async def request(self, number: int) -> None:
        await self._weather()
        await self._one(self.hows[number], self.chance.randrange(len(self.expected)))

    async def _turns(self) -> None:
        await turns(self.chance, 0, 1, 5, 30, 100, 300)

    async def _one(self, how: str, number: int) -> None:
        prompt, count = prompts()[number], self.chance.randrange(1, MOST_TOKENS + 1)
        most_read = self.chance.randrange(1, count + 1) if how == "stops reading" else count
        legs: list[asyncio.Task[Any]] = []
        reader = asyncio.create_task(self._read(prompt, count, most_read, legs))
        if how == "leaves":
            await self._turns()
            reader.cancel()
        elif how == "prefill leaves":
            await self._turns()
            begun = legs[:1]
            await asyncio.sleep(0)  # a task that has not begun would not close its room
            for leg in begun:
                leg.cancel()
        (found,) = await asyncio.gather(reader, return_exceptions=True)
        await asyncio.gather(*legs, return_exceptions=True)
        if how != "leaves" and isinstance(found, list):
            assert found == self.expected[number][:most_read], (how, number)
            self.ended["tokens"] += 1
        elif how == "leaves":
            assert isinstance(found, list | asyncio.CancelledError), found
            self.ended["gone"] += 1
        else:
            assert (
                how == "prefill leaves"
                and isinstance(found, KvflowError)
                and found.code is Code.CLIENT_GONE
            ), found
            self.ended["gone"] += 1

    async def _read(
        self, prompt: list[int], count: int, most_read: int, legs: list[asyncio.Task[Any]]
    ) -> list[int]:
        pair, params = self.pair, greedy(count, priority=self.chance.randrange(3))
        admission = await pair.decode.admit(prompt, params)
        try:
            prefix = await pair.decode.cached(prompt, admission=admission)
        except asyncio.CancelledError:
            admission.release()
            raise
        assert prefix is not None
        room = pair.room(prompt, prefix.tokens)
        if self.chance.random() < 0.3:
            room.gate.clear()
        legs.append(pair.send(room, prompt, params))
        found: list[int] = []
        try:
            async with aclosing(
                pair.decode.generate(room, prompt, params, admission, prefix)
            ) as tokens:
                legs.append(asyncio.create_task(self._open(room)))
                async for out in tokens:
                    found.append(out.token_id)
                    if len(found) == most_read:
                        break
        finally:
            room.gate.set()
        return found

    async def _open(self, room: Any) -> None:
        try:
            await self._turns()
        finally:
            room.gate.set()


_expected: dict[int, list[list[int]]] = {}


async def expected_of(model: LoadedModel) -> list[list[int]]:
    """Greedy tokens without a cache, which begin every shorter answer too."""
    if id(model) not in _expected:
        async with EnginePair(model, page_size=4, num_pages=1000) as pair:
            _expected[id(model)] = await pair.tokens_of_all(prompts(), greedy(MOST_TOKENS))
    return _expected[id(model)]


@pytest.mark.parametrize(
    "pool", [pytest.param(p, marks=() if p in OFTEN else pytest.mark.slow) for p in POOLS]
)
async def test_nothing_is_lost_and_nothing_is_wrong(
    pool: str, llama: LoadedModel, seed: int
) -> None:
    await storm_over(llama, pool, seed)


@pytest.mark.slow
@pytest.mark.parametrize("pool", STATEFUL_POOLS)
async def test_states_are_neither_lost_nor_mixed_up(
    pool: str, loaded: Callable[[str], LoadedModel], seed: int
) -> None:
    await storm_over(loaded("lfm2"), pool, seed)


async def storm_over(model: LoadedModel, pool: str, seed: int) -> None:
    expected = await expected_of(model)
    chance = random.Random(f"{seed} {pool}")
    policy = chance.choice(["lru", "lfu", "slru", "priority", "depth"])
    async with EnginePair(model, cache=policy, cache_states=5, **POOLS[pool]) as pair:
        storm = Storm(pair, chance, expected)
        async with asyncio.timeout(60):
            await in_lanes(LANES, REQUESTS, storm.request)
        assert storm.ended["tokens"] and storm.ended["gone"]
        await pair.rest()
        assert not pair.decode.retraction.retracted_now
