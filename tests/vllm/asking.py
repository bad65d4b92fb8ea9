"""What tests ask of vLLM servers, by either order of the legs."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.engines import Prompt, random_prompt
from tests.vllm.servers import BLOCK, MODEL, Server

# Of two log-probabilities that are summed in another order, by data type. These models have logits
# above 8, where neighbours in bfloat16 are 0.0625 apart.
TIES = {"float32": 2e-3, "bfloat16": 0.125}


@dataclass
class Answer:
    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        assert self.status == 200, self.text
        found: list[int] = self.body["choices"][0]["token_ids"]
        return found

    @property
    def text(self) -> str:
        error = self.body.get("error", self.body)
        return f"{self.status}: {error.get('message', error)}"


def new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=300),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )


def random_prompts(rng: random.Random, count: int, longest: int) -> list[Prompt]:
    """Of all lengths, also at the edges of blocks; a third shares a beginning with others."""
    shared = random_prompt(rng, longest // 2)
    edges = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, longest]
    prompts = []
    for number in range(count):
        length = edges[number] if number < len(edges) else rng.randrange(1, longest + 1)
        own = random_prompt(rng, length)
        if number % 3 == 0 and number >= len(edges):
            begin = shared[: rng.choice([BLOCK, 100, 10 * BLOCK, len(shared)])]
            own = (begin + own)[:length]
        prompts.append(own)
    rng.shuffle(prompts)
    return prompts


def body_of(
    prompt: Prompt | list[Prompt], count: int, params: object = None, **fields: Any
) -> dict[str, Any]:
    found = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
    }
    found |= {"return_token_ids": True, **fields}
    return found if params is None else found | {"kv_transfer_params": params}


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Prompt | list[Prompt],
    count: int,
    params: object = None,
    **fields: Any,
) -> Answer:
    body = body_of(prompt, count, params, **fields)
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        return Answer(answer.status, await answer.json())


async def ask_prefill(
    session: aiohttp.ClientSession, prefill: Server, prompt: Prompt
) -> dict[str, Any]:
    """The first leg of two that follow each other. Returns what decode is to be given."""
    answer = await ask(session, prefill.url, prompt, 1, {"do_remote_decode": True})
    assert answer.status == 200, answer.text
    params: dict[str, Any] = answer.body["kv_transfer_params"]
    return params


async def one_after_the_other(
    session: aiohttp.ClientSession, prefill: Server, decode: Server, prompt: Prompt, count: int
) -> Answer:
    return await ask(
        session, decode.url, prompt, count, await ask_prefill(session, prefill, prompt)
    )


class BothLegs:
    """Both legs at once, each a task that can be cancelled."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prefill: Server,
        decode: Server,
        prompt: Prompt,
        count: int,
    ) -> None:
        room = secrets.randbelow((1 << 53) - 1) + 1
        first = {"do_remote_decode": True, "kvflow_room": room}
        address = {"remote_host": "127.0.0.1", "remote_port": prefill.bootstrap_port}
        second = {"do_remote_prefill": True, "kvflow_room": room, **address}
        self.prefill = asyncio.create_task(ask(session, prefill.url, prompt, 1, first))
        self.decode = asyncio.create_task(ask(session, decode.url, prompt, count, second))

    async def answer(self) -> Answer:
        """Return decode's when the other leg has ended. Raises: CancelledError."""
        with suppress(asyncio.CancelledError, aiohttp.ClientError):
            await self.prefill
        return await self.decode


async def is_tie(
    session: aiohttp.ClientSession,
    single: Server,
    prompt: Prompt,
    a: list[int],
    b: list[int],
    dtype: str = "float32",
) -> bool:
    """Return True where one vLLM gives both tokens the same log-probability, in this data type."""
    if len(a) != len(b):
        return False
    where = next(n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    answer = await ask(
        session, single.url, prompt + a[:where], 1, logprobs=2, return_tokens_as_token_ids=True
    )
    top: dict[str, float] = answer.body["choices"][0]["logprobs"]["top_logprobs"][0]
    high, low = sorted(top.values())[-2:][::-1]
    return {f"token_id:{a[where]}", f"token_id:{b[where]}"} <= set(top) and high - low < TIES[dtype]


async def measure(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """Sum of a metric's samples over their labels; 0 where there are none yet."""
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return sum(
        float(value)
        for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M)
    )


async def is_empty(session: aiohttp.ClientSession, server: Server) -> bool:
    """No block in use or in quarantine; vLLM says so with a step, so one is made."""
    answer = await ask(session, server.url, [5, 6, 7], 1, cache_salt=secrets.token_hex(8))
    assert answer.status == 200, answer.text
    found = [
        await measure(session, server.url, f"vllm:{name}")
        for name in ("kv_cache_usage_perc", "kvflow_quarantined_blocks")
    ]
    return not any(found)
