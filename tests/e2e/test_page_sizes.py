"""`kvflow prefill` and `kvflow decode` with pages of two sizes: the answers of equal pages, and a
prefix that decode has cached does not travel.
"""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from tests.e2e.fleet import all_home, ask
from tests.e2e.service import Service
from tests.e2e.test_prefix import say


async def answers(prefill: int, decode: int, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that follow each prompt; those of one length in the order of the list."""
    service = Service(0, num_pages=256, prefix_cache="lru")
    names = [service.add("prefill", page_size=prefill), service.add("decode", page_size=decode)]
    try:
        await asyncio.gather(*map(service.start, names))
        router = await service.start_router()
        async with aiohttp.ClientSession() as session:
            found = [(await say(session, router, prompt, 6)).tokens for prompt in prompts]
            urls = [service.url(name) for name in names]
            assert await all_home(session, *urls)
            infos = [await ask(session, f"{url}/server_info") for url in urls]
            assert [info["page_size"] for info in infos] == [prefill, decode]
            assert all(info["prefix_cache"]["pages"] > 0 for info in infos)
            return found
    finally:
        await service.stop()


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
@pytest.mark.parametrize(("prefill", "decode"), [(16, 64), (64, 16)])
async def test_answers_are_those_of_equal_pages(prefill: int, decode: int) -> None:
    # Of random prompts, a few in a thousand have two tokens that are equally likely.
    dice = random.Random(7)
    begin = [dice.randrange(10, 900) for _ in range(200)]
    # Prompts that begin alike: decode has whole pages of its own size of each but the first.
    prompts = [[*begin[:count], dice.randrange(10, 900)] for count in (130, 150, 15, 63, 64, 199)]
    prompts += [begin[:128], begin[:192], begin]
    assert await answers(prefill, decode, prompts) == await answers(16, 16, prompts)
