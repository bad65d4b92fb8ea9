"""What tests ask of SGLang servers, each leg by hand as a router does."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from tests.sglang.servers import PAGE, Server

Prompt = list[int]
T = TypeVar("T")


@dataclass
class Answer:
    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        assert self.status == 200, self.text
        found: list[int] = self.body["output_ids"]
        return found

    @property
    def text(self) -> str:
        return f"{self.status}: {self.body.get('error', self.body)}"


def new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=120),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )


def random_prompts(rng: random.Random, count: int, longest: int) -> list[Prompt]:
    """Of all lengths, also at the edges of pages; a third shares a beginning with others."""
    edges = [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, longest]
    shared = random_prompt(rng, longest // 2)
    prompts = []
    for number in range(count):
        length = edges[number] if number < len(edges) else rng.randrange(1, longest + 1)
        own = random_prompt(rng, length)
        if number % 3 == 0 and number >= len(edges):
            own = (shared[: rng.randrange(len(shared))] + own)[:length]
        prompts.append(own)
    rng.shuffle(prompts)
    return prompts


def random_prompt(rng: random.Random, length: int) -> Prompt:
    return [rng.randrange(3, 4000) for _ in range(length)]


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: Prompt, count: int, **fields: Any
) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, **fields}
    async with session.post(f"{url}/generate", json=body) as answer:
        return Answer(answer.status, await answer.json())


class BothLegs:
    """Both legs at once, each a task that can be cancelled."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prefill: Server,
        decode: Server,
        prompt: Prompt,
        count: int,
        *,
        legs: str = "prefill decode",
        other: Prompt | None = None,
    ) -> None:
        """`legs` are the ones that are sent, and `other` is what decode is asked instead."""
        where = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": secrets.randbits(62),
        }
        self.prefill = self.decode = None
        if "prefill" in legs:
            self.prefill = asyncio.create_task(ask(session, prefill.url, prompt, count, **where))
        if "decode" in legs:
            asked = ask(session, decode.url, other or prompt, count, **where)
            self.decode = asyncio.create_task(asked)

    async def answer(self) -> Answer:
        """Return decode's when the other leg has ended."""
        assert self.prefill is not None and self.decode is not None
        await asyncio.wait([self.prefill, self.decode])
        return self.decode.result()

    async def leave(self) -> None:
        """Disconnect both, as a router does for a client that leaves."""
        tasks = [task for task in (self.prefill, self.decode) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def at_once(count: int, jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Results of all jobs in their order, so many of them at a time."""
    gate = asyncio.Semaphore(count)

    async def gated(job: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await job()

    return list(await asyncio.gather(*map(gated, jobs)))
