"""Who goes first, seen from outside: the official client's `priority`, against a decode with one
place.
"""

from __future__ import annotations

import asyncio

import aiohttp
import openai
import pytest

from kvflow.serve.demo_model import DEMO_PROMPTS
from kvflow.serve.launch.supervisor import Fleet
from tests.e2e.fleet import WITHIN_S, all_home, ask, running

LONG = 1000  # tokens: some seconds, in which the others join the queue

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]


async def until_load(
    session: aiohttp.ClientSession, fleet: Fleet, running: int, waiting: int
) -> None:
    """Decode serves so many requests, and so many stand in its queue."""
    info = None
    async with asyncio.timeout(WITHIN_S):
        while info is None or (info["running"], info["waiting"]) != (running, waiting):
            await asyncio.sleep(0.02)
            info = await ask(session, f"{fleet.decodes[0].url}/server_info")


@pytest.mark.parametrize("low_first", [False, pytest.param(True, marks=pytest.mark.soak)])
async def test_of_those_that_wait_the_more_urgent_is_served_first(low_first: bool) -> None:
    async with (
        running(max_running_requests=1, schedule_low_priority_values_first=low_first) as fleet,
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client,
        aiohttp.ClientSession() as session,
    ):
        served: list[int] = []

        async def send(prompt: str, tokens: int, priority: int) -> None:
            extra = {"priority": priority, "ignore_eos": True}
            answer = await client.completions.create(
                model="default", prompt=prompt, max_tokens=tokens, extra_body=extra
            )
            assert answer.usage is not None and answer.usage.completion_tokens == tokens
            served.append(priority)

        long = asyncio.ensure_future(send(DEMO_PROMPTS[0], LONG, 1))
        await until_load(session, fleet, 1, 0)
        priorities = [0, -7, 3, 9]
        sent = [long]
        for number, priority in enumerate(priorities, 1):
            sent.append(asyncio.ensure_future(send(DEMO_PROMPTS[number], 4, priority)))
            await until_load(session, fleet, 1, number)
        await asyncio.gather(*sent)
        assert served == [1, *sorted(priorities, reverse=not low_first)]
        assert await all_home(session, fleet.prefills[0].url, fleet.decodes[0].url)
