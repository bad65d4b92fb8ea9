"""`kvflow bench stalls`: the stalls of both event loops under the largest legal requests.

While a case runs, an idle process runs the same ticker, which shows the lateness that the machine
alone causes.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import aiohttp
import msgspec
import numpy as np
from tokenizers import Tokenizer

from kvflow.bench.crowds import crowds
from kvflow.bench.pair import Process
from kvflow.http.app import MAX_BODY_BYTES
from kvflow.protocols.wire.messages import MAX_PAGES_PER_ROOM
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.engine.scheduler.stops import MAX_STOP_CHARACTERS, MAX_STOPS

ROLES = ("prefill", "decode", "idle")
STREAM_TOKENS = 4_000
PROMPT_TOKENS = 131_072
BOOTSTRAP_PAGES = MAX_PAGES_PER_ROOM  # pages of one token
# A case is repeated for this long, because a percentile of few ticks has little meaning.
WATCH_S = 5.0

Case = tuple[str, str, dict[str, Any]]


def cases() -> list[Case]:
    """Return the name, the path and the body of each case."""
    ids = np.random.default_rng(1).integers(0, 100_000, BOOTSTRAP_PAGES).tolist()
    logprobs = {"return_logprob": True, "top_logprobs_num": 20}
    many = {"sampling_params": {"max_new_tokens": STREAM_TOKENS}, **logprobs}
    few = {"sampling_params": {"max_new_tokens": 2}, "stream": True}
    token, stops = _near_misses()
    tokens = {"prompt": [1], "max_tokens": STREAM_TOKENS}
    completion = {**tokens, "logprobs": 20}
    matched = {**tokens, "logit_bias": {token: 100}, "stop": stops}
    spare = MAX_BODY_BYTES - 4096
    return [
        (
            "4,000 tokens, top-20, /generate stream",
            "/generate",
            {"input_ids": [1], "stream": True, **many},
        ),
        ("4,000 tokens, top-20, /generate", "/generate", {"input_ids": [1], **many}),
        (
            "4,000 tokens, top-20, completions stream",
            "/v1/completions",
            {**completion, "stream": True},
        ),
        ("4,000 tokens, top-20, completions", "/v1/completions", completion),
        ("4,000 tokens, 64 stop strings nearly met", "/v1/completions", matched),
        ("prompt of 131,072 tokens", "/generate", {"input_ids": ids[:PROMPT_TOKENS], **few}),
        ("largest Bootstrap: 524,288 pages", "/generate", {"input_ids": ids, **few}),
        # The request is refused, but only after tokenization: the text has too many tokens.
        ("8 MiB of text", "/generate", {"text": ("Once upon a time. " * (spare // 18)), **few}),
    ]


def _near_misses() -> tuple[int, list[str]]:
    """Return the demo model's longest token of spaces, and stop strings as long as limits allow.

    A text of many such tokens contains every stop string except for its last character.
    """
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    longest = max(texts, key=lambda token: 0 if texts[token].strip(" ") else len(texts[token]))
    spaces = " " * (MAX_STOP_CHARACTERS // MAX_STOPS - 1)
    return longest, [spaces + chr(0x4E00 + number) for number in range(MAX_STOPS)]


async def bench_stalls(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every case in each of `rounds` rounds, and return the maximum of each figure.

    Returns {"rounds", "cases": {case: {role: {"ticks", "late_p50_ms", "late_p99_ms", "late_max_ms",
    "stall_p99_ms", "stall_max_ms"}}}}. `late` is a tick's lateness, and `stall` is the part of it
    that the loop caused (see `child.StallTicker`).
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        workers: dict[str, Process] = {}
        for role in ROLES:
            worker = await Process.run_module("kvflow.bench.stalls_worker", role)
            workers[role] = await stack.enter_async_context(worker)
        tokenizer = str(DEMO_MODEL_DIR / "tokenizer.json")
        ready = await asyncio.gather(
            *(worker.ask("setup", tokenizer=tokenizer) for worker in workers.values())
        )

        async def measure(name: str, turn: int, run: Callable[[], Awaitable[int]]) -> None:
            await asyncio.gather(*(worker.ask("watch") for worker in workers.values()))
            number = await run()
            seen = {role: await worker.ask("watched") for role, worker in workers.items()}
            late = (f"{role} p99 {seen[role]['late_p99_ms']:.1f} ms" for role in ROLES)
            say(f"round {turn + 1} of {rounds}: {name}, {number} of them: {', '.join(late)}")
            worst = found.setdefault(name, seen)
            for role, figures in seen.items():
                worst[role] = {key: max(at, worst[role][key]) for key, at in figures.items()}

        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as session:
            client = _Client(session, dict(zip(ROLES, ready, strict=True)))
            # The first request pays for imports and links, so it does not count.
            await client.send(
                "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
            )
            for turn in range(rounds):
                for name, path, body in cases():
                    await measure(name, turn, partial(client.repeat, path, body))
        for turn in range(rounds):
            for name, crowd in crowds().items():
                await measure(name, turn, partial(crowd, workers["prefill"], ready[0], WATCH_S))
    return {"rounds": rounds, "cases": found}


class _Client:
    """A client that sends a body to both legs, as a router does, and reads both answers."""

    def __init__(self, session: aiohttp.ClientSession, made: dict[str, dict[str, Any]]) -> None:
        self._session = session
        self._ports = made["prefill"]["port"], made["decode"]["port"]
        self._bootstrap_port = made["prefill"]["bootstrap_port"]
        self._room = 0

    async def repeat(self, path: str, body: dict[str, Any]) -> int:
        """Send a body repeatedly for `WATCH_S`, and return the number of requests."""
        loop = asyncio.get_running_loop()
        until_s, sent = loop.time() + WATCH_S, 0
        while loop.time() < until_s:
            await self.send(path, body)
            sent += 1
        return sent

    async def send(self, path: str, body: dict[str, Any]) -> None:
        self._room += 1
        prefill = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._bootstrap_port}
        raw = msgspec.json.encode({**body, **prefill, "bootstrap_room": self._room})
        await asyncio.gather(
            *(self._leg(f"http://127.0.0.1:{port}{path}", raw) for port in self._ports)
        )

    async def _leg(self, url: str, raw: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(url, data=io.BytesIO(raw), headers=headers) as answer:
            end = b""
            # Parsing more than the end would take CPU from the roles that are measured.
            async for chunk in answer.content.iter_any():
                end = (end + chunk)[-4096:]
        if answer.status not in (200, 400) or (answer.status == 200 and b'"error"' in end):
            raise RuntimeError(f"{url} answered {answer.status}: {end[:300]!r}")
