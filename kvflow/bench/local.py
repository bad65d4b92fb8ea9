"""`kvflow bench local`: first tokens and gaps with and without prompts that decode computes itself.

Two routers stand in front of the same prefills and decodes. One sends every request to a pair, and
the other sends requests to decode alone within `--local-prefill-tokens`. Both receive the same
requests at the same times after the start of a turn, and their turns alternate. The requests are a
mix of short prompts, of long ones, and of questions about documents that were asked about before.
All tokens of both routers must be equal.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import msgspec

from kvflow.bench.figures import Row, Say, medians, places, quartiles
from kvflow.bench.serve import Server, serving
from kvflow.protocols.errors import KvflowError
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.launch.child import Child

PAIRS, LOCAL = "pairs", "decode alone"
KINDS = "short", "repeated", "long"
DOCUMENTS = 8
START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class LocalPlan:
    """Parameters of `bench_local`.

    `rate` is the number of requests per second. `tokens` and `chunk` are `--local-prefill-tokens`
    of the second router and `--local-prefill-chunk` of the decodes.
    """

    requests: int = 120
    rate: float = 12.0
    new_tokens: int = 40
    tokens: int = 256
    chunk: int = 128
    workers: int = 2
    turns: int = 5
    threads: int = 1
    seed: int = 1


class _Asked(NamedTuple):
    at_s: float  # when the request is sent, in seconds after the start of its turn
    kind: str
    prompt: list[int]


class _Answer(NamedTuple):
    kind: str
    tokens: list[int]
    first_ms: float
    gaps_ms: list[float]  # between two events of the stream, each of which has some tokens


async def bench_local(plan: LocalPlan, say: Say) -> dict[str, Any]:
    """Measure both routers.

    Returns {"table": one row for each router, with medians over the turns of percentiles in ms,
    "ratio": quartiles of the second router's figures divided by the first one's of the same turn,
    "turns": the rows of each turn, "alone": how many of the "asked" requests of the second router
    decode got alone}.

    Raises: KvflowError if a server does not start, or if an answer differs.
    """
    dice = random.Random(plan.seed)
    documents = [_words(dice, 300, 1000) for _ in range(DOCUMENTS)]
    async with AsyncExitStack() as stack:
        server, routers = await stack.enter_async_context(_both_routers(plan))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        seen: dict[str, list[Row]] = {name: [] for name in routers}
        # Turn -1 warms up, and its figures are left out.
        for turn in range(-1, plan.turns):
            asked = _mix(plan, documents, dice)
            found: dict[str, list[_Answer]] = {}
            names = list(routers)
            for name in names[:: 1 if turn % 2 else -1]:
                # Both begin with the documents in the caches, and nothing else.
                await _refill(session, server, routers, documents)
                found[name] = await _turn(session, routers[name], asked, plan.new_tokens)
            _check_same(found)
            if turn >= 0:
                for name, answers in found.items():
                    seen[name].append(_figures(answers))
                    say(f"turn {turn}, {name}: {seen[name][-1]}")
        alone = await _sent_alone(session, routers[LOCAL])
    table = [{"router": name, **medians(rows)} for name, rows in seen.items()]
    both = list(zip(seen[PAIRS], seen[LOCAL], strict=True))
    ratio = {
        figure: quartiles([ours[figure] / theirs[figure] for theirs, ours in both])
        for figure in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "itl_p99")
    }
    asked_in_all = plan.requests * (plan.turns + 1)
    return {"table": table, "ratio": ratio, "turns": seen, "alone": alone, "asked": asked_in_all}


@asynccontextmanager
async def _both_routers(plan: LocalPlan) -> AsyncIterator[tuple[Server, dict[str, str]]]:
    arguments = (
        "--dtype=float32",
        "--prefix-cache=lru",
        f"--prefill-workers={plan.workers}",
        f"--decode-workers={plan.workers}",
        f"--local-prefill-chunk={plan.chunk}",
    )
    async with serving(str(DEMO_MODEL_DIR), plan.threads, arguments=arguments) as server:
        workers = [
            word
            for name, url in server.urls.items()
            if not name.startswith("router")
            for word in (f"--{name.partition('-')[0]}", url)
        ]
        more = [f"--local-prefill-tokens={plan.tokens}", "--log-level=warning", "--port=0"]
        child = Child("local router", "router", [*workers, *more], quiet=True)
        try:
            await child.start(os.environ, START_TIMEOUT_S)
            yield server, {PAIRS: server.urls["router"], LOCAL: child.url}
        finally:
            child.kill()
            await child.stop(1.0)


def _words(dice: random.Random, least: int, most: int) -> list[int]:
    return [dice.randrange(10, 4000) for _ in range(dice.randrange(least, most))]


def _mix(plan: LocalPlan, documents: list[list[int]], dice: random.Random) -> list[_Asked]:
    """Return the requests of one turn: 40 % short ones, 40 % questions, and 20 % long ones."""
    asked, at_s = [], 0.0
    for _ in range(plan.requests):
        at_s += dice.expovariate(plan.rate)
        kind = dice.choices(KINDS, (4, 4, 2))[0]
        if kind == "short":
            prompt = _words(dice, 8, 64)
        elif kind == "repeated":
            prompt = dice.choice(documents) + _words(dice, 5, 40)
        else:
            prompt = _words(dice, 500, 1500)
        asked.append(_Asked(at_s, kind, prompt))
    return asked


async def _refill(
    session: aiohttp.ClientSession,
    server: Server,
    routers: dict[str, str],
    documents: list[list[int]],
) -> None:
    """Empty all caches, and let each router ask about each document once."""
    for url in routers.values():
        async with session.post(f"{url}/flush_cache"):
            pass
    for url in routers.values():
        await asyncio.gather(*(_answer(session, url, "", one, 2) for one in documents))


async def _turn(
    session: aiohttp.ClientSession, url: str, asked: list[_Asked], new_tokens: int
) -> list[_Answer]:
    begun_s = time.perf_counter()

    async def one(request: _Asked) -> _Answer:
        await asyncio.sleep(begun_s + request.at_s - time.perf_counter())
        return await _answer(session, url, request.kind, request.prompt, new_tokens)

    return await asyncio.gather(*map(one, asked))


async def _answer(
    session: aiohttp.ClientSession, url: str, kind: str, prompt: list[int], new_tokens: int
) -> _Answer:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    begun_s, events, times = time.perf_counter(), [], []
    async with session.post(f"{url}/generate", json=body) as answer:
        if answer.status != 200:
            raise KvflowError(f"POST /generate: {answer.status} {(await answer.text())[:200]!r}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                events.append(line)
                times.append(time.perf_counter())
    last = msgspec.json.decode(events[-1].removeprefix(b"data: "))
    if "error" in last:
        raise KvflowError(f"POST /generate: {last['error']}")
    gaps = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
    return _Answer(kind, last["output_ids"], 1e3 * (times[0] - begun_s), gaps)


def _check_same(found: dict[str, list[_Answer]]) -> None:
    both = zip(*found.values(), strict=True)
    wrong = sum(one.tokens != other.tokens for one, other in both)
    if wrong:
        raise KvflowError(f"{wrong} answers of the two routers differ")


def _figures(answers: list[_Answer]) -> Row:
    firsts = [answer.first_ms for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps_ms]
    found = places(firsts, ttft_p50=50, ttft_p95=95) | places(gaps, itl_p50=50, itl_p95=95)
    found |= places(gaps, itl_p99=99)
    for kind in KINDS:
        own = [answer.first_ms for answer in answers if answer.kind == kind]
        found |= places(own or [0.0], **{f"{kind}_p50": 50.0})
    return found


async def _sent_alone(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = "kvflow_router_worker_local_prompts_total{"
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(name))
