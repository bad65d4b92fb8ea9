"""`kvflow up` with 40 % of the pages that its requests need: all end, with the tokens of a pool
that is large.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.e2e.fleet import all_home, running
from tests.soak import sized

REQUESTS, NEW_TOKENS, PAGE_SIZE = sized(24, 64), sized(48, 96), 16
SEED = 20


def prompts(dice: random.Random) -> list[list[int]]:
    return [
        [dice.randrange(10, 900) for _ in range(dice.randrange(8, 160))] for _ in range(REQUESTS)
    ]


async def answer(
    session: aiohttp.ClientSession, url: str, prompt: list[int], leave_after: int = 0
) -> list[int]:
    """The tokens of one streamed request, or its first `leave_after`,
    after which the client goes.
    """
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    found: list[int] = []
    async with session.post(f"{url}/generate", json=body) as stream:
        assert stream.status == 200, await stream.text()
        async for line in stream.content:
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line[6:])
                assert "error" not in event, event
                found = event["output_ids"]
                if leave_after and len(found) >= leave_after:
                    return found[:leave_after]
    return found


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as got:
        lines = (await got.text()).splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[:1] not in "#")
    }


async def tokens_of(
    fleet: Any, session: aiohttp.ClientSession, given: list[list[int]], ends: list[int]
) -> Any:
    found = await asyncio.gather(
        *(answer(session, fleet.url, prompt, end) for prompt, end in zip(given, ends, strict=True))
    )
    assert await all_home(session, *(child.url for child in (*fleet.prefills, *fleet.decodes)))
    return found, await metrics(session, fleet.decodes[0].url)


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_a_pool_of_40_percent_with_and_without_aborts() -> None:
    print("seed", SEED)
    dice = random.Random(SEED)
    given = prompts(dice)
    worst = sum(-(-(len(prompt) + NEW_TOKENS - 1) // PAGE_SIZE) for prompt in given)
    stay = [0] * REQUESTS
    leave = [dice.randrange(1, NEW_TOKENS) if n % 5 == 0 else 0 for n in range(REQUESTS)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with running(num_pages=2 * worst, new_token_ratio=1.0) as roomy:
            want, told = await tokens_of(roomy, session, given, stay)
            assert told["kvflow_retracts_total"] == 0
        short = {"num_pages": int(0.4 * worst), "new_token_ratio": 0.3}
        # Room for all that leave the pool, and for none; in a soak also for some of them.
        for host_bytes in sized((1 << 28, 0), (1 << 28, 1 << 19, 0)):
            async with running(**short, host_memory_bytes=host_bytes) as fleet:
                got, told = await tokens_of(fleet, session, given, stay)
                assert got == want
                assert told["kvflow_retracts_total"] > 0
                assert bool(told["kvflow_resumes_total"]) == bool(host_bytes)
                assert bool(told["kvflow_recomputes_total"]) == (host_bytes < 1 << 28)
                got, told = await tokens_of(fleet, session, given, leave)
                assert got == [
                    tokens[: end or None] for tokens, end in zip(want, leave, strict=True)
                ]
                assert (told["kvflow_host_memory_bytes"], told["kvflow_retracted_requests"]) == (
                    0,
                    0,
                )
                print(
                    host_bytes,
                    {
                        name: value
                        for name, value in told.items()
                        if "retract" in name or "resume" in name
                    },
                )
