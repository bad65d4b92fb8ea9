"""`kvflow bench overcommit`: requests per second of a decode whose pool is too small.

Three servers receive the same requests in the same turns. The first has a pool for the worst case
of all requests. The others have only a share of those pages. One runs in safe mode
(`--new-token-ratio 1.0`), which reserves every request's worst case, and one is over-committed. All
answers must equal those of the first server. Over-commitment helps requests that end early, at a
stop token.

The gain depends on the fixed cost of a step and on the cost of each row. Where rows cost most, for
example with the demo model on a CPU, a larger batch saves little. So the report has a bound, the
first server's rate divided by safe mode's. It also has the cost of a step, fitted to the seconds
and steps of all turns.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from kvflow.bench.figures import Say, extremes
from kvflow.bench.fixed_cost import build_fixed_cost_model
from kvflow.bench.serve import Server, serving
from kvflow.protocols.errors import KvflowError
from kvflow.serve.demo_model import DEMO_MODEL_DIR

PAGE_SIZE = 16
ROOMY, SAFE, OVER = "all fit", "safe mode", "over-committed"
COUNTERS = ("retracts", "resumes", "recomputes")
STEPS = "decode_steps"


@dataclass(frozen=True)
class OvercommitPlan:
    """Parameters of `bench_overcommit`.

    The small pools have the fraction `share` of the pages needed at worst. `ratio` is the
    `--new-token-ratio` of the over-committed server.
    """

    requests: int = 64
    new_tokens: int = 200
    share: float = 0.4
    ratio: float = 0.3
    host_bytes: int = 1 << 28
    turns: int = 5
    threads: int = 1
    fixed_cost: bool = False
    seed: int = 1


class _Turn(NamedTuple):
    seconds: float
    steps: int


async def bench_overcommit(plan: OvercommitPlan, say: Say) -> dict[str, Any]:
    """Measure the three servers under two loads: requests that end early, and requests that do not.

    Returns {load: {server: requests per second, "ratio": over-committed / safe mode, "bound": all
    fit / safe mode, "batch": {server: tokens per step}, "step_ms": cost of a step, counters}}.

    Raises: KvflowError if a server does not start, or an answer differs.
    """
    dice = random.Random(plan.seed)
    prompts = [
        [dice.randrange(10, 4000) for _ in range(dice.randrange(16, 200))]
        for _ in range(plan.requests)
    ]
    worst = sum(-(-(len(prompt) + plan.new_tokens - 1) // PAGE_SIZE) for prompt in prompts)
    pages = int(worst * plan.share)
    say(
        f"{plan.requests} requests need {worst} pages at worst; the small pools have {pages}; seed "
        f"{plan.seed}"
    )
    shapes = {ROOMY: (2 * worst, 1.0), SAFE: (pages, 1.0), OVER: (pages, plan.ratio)}
    sizes = {"requests": plan.requests, "worst_pages": worst, "pages": pages}
    report: dict[str, Any] = {**sizes, "seed": plan.seed}
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        servers: dict[str, Server] = {}
        model = str(DEMO_MODEL_DIR)
        if plan.fixed_cost:
            model = stack.enter_context(TemporaryDirectory(prefix="kvflow-fixed-cost-"))
            await asyncio.to_thread(build_fixed_cost_model, Path(model))
        for name, (count, ratio) in shapes.items():
            arguments = (
                "--dtype=float32",
                f"--page-size={PAGE_SIZE}",
                f"--num-pages={count}",
                f"--new-token-ratio={ratio}",
                f"--host-memory-bytes={plan.host_bytes}",
            )
            servers[name] = await stack.enter_async_context(
                serving(model, plan.threads, arguments=arguments)
            )
        bodies = [_body(prompt, plan.new_tokens) for prompt in prompts]
        # Stop tokens come from the full answers, so that each of them occurs.
        full = await _answers(session, servers[ROOMY], bodies)
        early = [_stopping(body, tokens, dice) for body, tokens in zip(bodies, full, strict=True)]
        for load, given in (("early ends", early), ("no early ends", bodies)):
            report[load] = await _load(session, servers, given, plan.turns)
            say(f"{load}: {report[load]}")
    return report


async def _load(
    session: aiohttp.ClientSession,
    servers: dict[str, Server],
    bodies: list[dict[str, Any]],
    turns: int,
) -> dict[str, Any]:
    seen: dict[str, list[_Turn]] = {name: [] for name in servers}
    before = await _counters(session, servers[OVER])
    want = await _answers(session, servers[ROOMY], bodies)
    # Turn -1 warms up: its times are left out, but `COUNTERS` include it.
    for turn in range(-1, turns):
        names = list(servers)
        # The order alternates, so that no server always runs first.
        for name in names[:: 1 if turn % 2 else -1]:
            steps = (await _counters(session, servers[name]))[STEPS]
            begun = time.perf_counter()
            got = await _answers(session, servers[name], bodies)
            seconds = time.perf_counter() - begun
            if got != want:
                wrong = sum(a != b for a, b in zip(got, want, strict=True))
                raise KvflowError(
                    f"{name}: {wrong} of {len(want)} answers differ from those of a pool that is "
                    "never full"
                )
            if turn >= 0:
                steps = (await _counters(session, servers[name]))[STEPS] - steps
                seen[name].append(_Turn(seconds, steps))
    after = await _counters(session, servers[OVER])
    # Prefill, not decode, computes the first token of each answer.
    decoded = sum(len(tokens) - 1 for tokens in want)
    found: dict[str, Any] = {
        name: round(len(bodies) / float(np.median([turn.seconds for turn in rounds])), 2)
        for name, rounds in seen.items()
    }
    found["ratio"], found["bound"] = _ratio(seen[OVER], seen[SAFE]), _ratio(seen[ROOMY], seen[SAFE])
    found["batch"] = {
        name: round(decoded / float(np.median([turn.steps for turn in rounds])), 1)
        for name, rounds in seen.items()
    }
    found["step_ms"] = _step_cost([turn for rounds in seen.values() for turn in rounds], decoded)
    return (
        found
        | {"tokens": sum(map(len, want))}
        | {name: after[name] - before[name] for name in COUNTERS}
    )


def _ratio(over: list[_Turn], under: list[_Turn]) -> dict[str, float]:
    """Return the spread, over all turns, of the rate of `over` divided by the rate of `under`."""
    return extremes([slow.seconds / fast.seconds for fast, slow in zip(over, under, strict=True)])


def _step_cost(turns: list[_Turn], tokens: int) -> dict[str, float]:
    """Return the ms of a step and of each row in it, by a linear fit; empty if there is none."""
    # Turns with the same number of steps do not determine a line.
    if len({turn.steps for turn in turns}) < 2:
        return {}
    fixed, rest = np.polyfit(
        [turn.steps for turn in turns], [turn.seconds * 1e3 for turn in turns], 1
    )
    return {"fixed": round(float(fixed), 3), "row": round(float(rest) / tokens, 4)}


async def _answers(
    session: aiohttp.ClientSession, server: Server, bodies: list[dict[str, Any]]
) -> list[list[int]]:
    return await asyncio.gather(*(_answer(session, server.urls["router"], body) for body in bodies))


async def _answer(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[int]:
    async with session.post(f"{url}/generate", json=body) as answer:
        text = await answer.read()
        if answer.status != 200:
            raise KvflowError(f"POST /generate: {answer.status} {text[:200]!r}")
        tokens: list[int] = msgspec.json.decode(text)["output_ids"]
        return tokens


def _body(prompt: list[int], new_tokens: int) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }


def _stopping(body: dict[str, Any], tokens: list[int], dice: random.Random) -> dict[str, Any]:
    """Return the request with a stop token that ends it at about a random position."""
    # The request ends where its stop token first occurs, so only first positions are candidates.
    wanted = dice.randrange(len(tokens))
    first = {token: at for at, token in reversed(list(enumerate(tokens)))}
    token = min(first, key=lambda token: abs(first[token] - wanted))
    stop = {"stop_token_ids": [token], "ignore_eos": False}
    return {**body, "sampling_params": {**body["sampling_params"], **stop}}


async def _counters(session: aiohttp.ClientSession, server: Server) -> dict[str, int]:
    async with session.get(f"{server.urls['decode']}/metrics") as answer:
        samples = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines())
    return {name: int(float(samples[f"kvflow_{name}_total"])) for name in (*COUNTERS, STEPS)}
