"""What tests ask of SGLang servers, each leg by hand as a router does."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.engines import Prompt, random_prompt
from tests.sglang.servers import PAGE, Server


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


def random_prompts(
    rng: random.Random, count: int, longest: int, pages: Iterable[int] = (PAGE,)
) -> list[Prompt]:
    """Of all lengths, also at the edges of `pages`; a third shares a beginning with others."""
    edges = [1, 2, longest]
    for page in pages:
        edges += [each for each in (page - 1, page, page + 1, 2 * page) if each > 2]
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
        **fields: Any,
    ) -> None:
        """`legs` are the ones that are sent, and `other` is what decode is asked instead."""
        where: dict[str, Any] = {
            **fields,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": secrets.randbits(62),
        }
        self.prefill: asyncio.Task[Answer] | None = None
        self.decode: asyncio.Task[Answer] | None = None
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

    async def leave(self, legs: str = "prefill decode") -> None:
        """Disconnect those legs, as a router does for a client that leaves, and wait for all."""
        tasks = [task for task in (self.prefill, self.decode) if task is not None]
        for name in legs.split():
            task: asyncio.Task[Answer] | None = getattr(self, name)
            if task is not None:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def is_empty(session: aiohttp.ClientSession, server: Server) -> bool:
    """Nothing runs, and no page is held. SGLang flushes its cache only then.

    When it is idle, SGLang counts its pages itself, and ends with an error if one is missing.
    """
    async with session.post(f"{server.url}/flush_cache") as answer:
        return answer.status == 200
