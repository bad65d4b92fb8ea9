"""`kvflow up --prefix-cache` with a prefill of several ranks: all of them begin a prompt at one
token.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import aiohttp
import pytest

from kvflow.serve.demo_model import DEMO_MODEL_DIR
from tests.e2e.fleet import all_home, ask, running
from tests.e2e.test_prefix import PAGE_SIZE, say
from tests.e2e.test_ranks import gauges, ranks_home
from tests.serve.engine import tiny_models
from tests.serve.engine.pair import prompt_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets"), pytest.mark.timeout(300)]

USERS, TURNS, TOKENS = 4, 4, 8


def chats() -> list[list[list[int]]]:
    """By user and turn, what stock transformers makes of it is the answer, which is part of the
    next turn's prompt.
    """
    stock, system = tiny_models.load_stock(DEMO_MODEL_DIR), prompt_of(100, 1)
    found = []
    for user in range(USERS):
        prompt, turns = list(system), []
        for turn in range(TURNS):
            prompt = [*prompt, *prompt_of(20 + 7 * turn, 10 + user)]
            turns.append(prompt)
            prompt = [*prompt, *tiny_models.generate(stock, prompt, TOKENS)]
        found.append([*turns, prompt])
    return found


async def caches_of(session: aiohttp.ClientSession, prefill: str) -> list[Any]:
    """Of each rank, once the others' last word of it is that of the first one."""
    async with asyncio.timeout(20):
        while True:
            found = [rank["cache"] for rank in await ranks_home(session, prefill)]
            if len({(cache["asked_tokens"], cache["hit_tokens"]) for cache in found}) == 1:
                return found
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "options",
    [
        # Part of the conversations, and all of them.
        {"pp": 2, "num_pages": 30, "cache_host_bytes": 1 << 24},
        pytest.param(
            {"pp": 2, "tp": 2, "decode_tp": 2, "optimistic_prefill": 2}, marks=pytest.mark.soak
        ),
    ],
)
async def test_a_turn_begins_where_the_caches_of_all_ranks_can(options: dict[str, Any]) -> None:
    settings = {"page_size": PAGE_SIZE, "prefix_cache": "lru", **options}
    async with running(**settings) as fleet, aiohttp.ClientSession() as session:
        prefill = fleet.prefills[0].url

        async def chat(prompts: list[list[int]]) -> list[int]:
            hits = []
            for prompt, following in itertools.pairwise(prompts):
                turn = await say(session, fleet.url, prompt, TOKENS)
                assert turn.tokens == following[len(prompt) : len(prompt) + TOKENS]
                hits.append(turn.cached_tokens)
            return hits

        conversations = chats()
        hits = await asyncio.gather(*map(chat, conversations))
        if "cache_host_bytes" in options:
            hits += [await chat(prompts) for prompts in conversations]
        assert await all_home(session, prefill, fleet.decodes[0].url)
        caches = await caches_of(session, prefill)
        print(options, hits, caches)
        assert caches[0]["hit_tokens"] == sum(map(sum, hits))
        if "cache_host_bytes" in options:
            assert all(cache["evicted_pages"] and cache["loaded_pages"] for cache in caches)
        else:
            for prompts, found in zip(conversations, hits, strict=True):
                whole = [len(prompt) // PAGE_SIZE * PAGE_SIZE for prompt in prompts]
                assert all(hit >= before for before, hit in zip(whole, found[1:], strict=False)), (
                    whole,
                    found,
                )
        shown = await gauges(session, prefill)
        for rank, cache in enumerate(caches):
            assert (
                shown[f'kvflow_rank_cache_hit_tokens_total{{rank="{rank}"}}'] == cache["hit_tokens"]
            )
        await session.post(f"{fleet.url}/flush_cache")
        async with asyncio.timeout(20):
            while any(
                cache["pages"] or cache["host_pages"] for cache in await caches_of(session, prefill)
            ):
                await asyncio.sleep(0.05)
        info = await ask(session, f"{prefill}/server_info")
        assert all(rank["pages_free"] == rank["pages_total"] for rank in info["ranks"])
        assert not any(
            rank["internal_errors"]["handler"] or rank["internal_errors"]["step"]
            for rank in info["ranks"]
        )
