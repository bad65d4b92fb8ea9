"""`kvflow up` with models that keep a state for each request: who has no row waits for one, and
with `--prefix-cache` turns go on from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.fleet import all_home, ask, running
from tests.e2e.test_cli_parity import CHUNK, LENGTHS, PAGE_SIZE
from tests.e2e.test_prefix import say
from tests.serve.engine.pair import prompt_of

NEW = 8
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]


async def test_a_conversation_goes_on_from_its_last_state(
    tiny: Callable[[str], Path], expected: Callable[[str, list[int], int], list[int]]
) -> None:
    pool = {"page_size": 4, "chunked_prefill_size": 16, "num_pages": 256}
    given = {
        **pool,
        "prefix_cache": "lru",
        "cache_host_bytes": 1 << 20,
        "cache_state_bytes": 1 << 20,
    }
    async with (
        running(model_path=str(tiny("qwen3_next")), served_model_name="tiny", **given) as fleet,
        aiohttp.ClientSession() as session,
    ):
        prompt, cached = prompt_of(37), []
        for turn in range(3):
            found = await say(session, fleet.url, prompt, NEW)
            assert found.tokens == expected("qwen3_next", prompt, NEW)
            cached.append(found.cached_tokens)
            prompt = prompt + found.tokens + prompt_of(5, turn)
        assert cached == [0, 32, 48], (
            "of 37 and of 50 tokens, what ends two tokens or more before the last"
        )
        # In whole pages, all of which decode has the second time: its row comes alone.
        whole = prompt_of(48)
        tokens = [(await say(session, fleet.url, whole, NEW)).tokens for _ in range(2)]
        assert tokens == [expected("qwen3_next", whole, NEW)] * 2
        urls = [child.url for child in (*fleet.prefills, *fleet.decodes)]
        assert await all_home(session, *urls)
        prefill, decode = [(await ask(session, f"{url}/server_info")) for url in urls]
        assert (
            prefill["prefix_cache"]["states"]
            and prefill["rows"]["free"] == prefill["rows"]["total"]
        )
        assert decode["prefix_cache"]["hit_tokens"] and not decode["prefix_cache"]["limit_states"]
        await session.post(f"{fleet.url}/flush_cache")
        for url in urls:
            found_now = (await ask(session, f"{url}/server_info"))["prefix_cache"]
            assert not (found_now["pages"] or found_now["states"])


async def test_more_requests_than_rows_wait_for_one(
    tiny: Callable[[str], Path], expected: Callable[[str, list[int], int], list[int]]
) -> None:
    sizes = {"page_size": PAGE_SIZE, "chunked_prefill_size": CHUNK, "max_running_requests": 4}
    async with (
        running(model_path=str(tiny("falcon_h1")), **sizes) as fleet,
        aiohttp.ClientSession() as session,
    ):
        prompts = [prompt_of(length, length) for length in LENGTHS]
        turns = await asyncio.gather(*(say(session, fleet.url, p, NEW) for p in prompts))
        assert [turn.tokens for turn in turns] == [expected("falcon_h1", p, NEW) for p in prompts]
        assert await all_home(session, *(c.url for c in (*fleet.prefills, *fleet.decodes)))
