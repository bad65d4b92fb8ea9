"""Time to first token of prompts whose decode comes late, with and without `--optimistic-prefill`.

    python -m kvflow.bench.early [--turns N] [--gap-s S]

Two `kvflow up` run side by side and receive requests in turn. Prefill's leg comes first. Decode's
leg follows after the gap, and starts the clock. This is the best case, because prefill is idle
otherwise. Where requests wait for prefill, the option gains no time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from kvflow.bench.serve import Server, serving
from kvflow.protocols.errors import KvflowError
from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS

PROMPT = " ".join(DEMO_PROMPTS * 12)  # about a thousand tokens
_rooms = itertools.count(1)


async def bench_early(turns: int, gap_s: float) -> dict[str, Any]:
    """Measure both servers in `turns` turns.

    Returns {"off" | "on": {"ms": times to first token, "median_ms"}, "optimistic": counters,
    "gap_s"}.

    Raises: KvflowError if a server does not start, or refuses a request.
    """
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(
                serving(str(DEMO_MODEL_DIR), 1, arguments=arguments)
            )
            for name, arguments in (("off", ()), ("on", ("--optimistic-prefill=1",)))
        }
        session = await stack.enter_async_context(aiohttp.ClientSession())
        seen: dict[str, list[float]] = {name: [] for name in servers}
        # Turn -1 warms up: its times are left out, but the counters include it.
        for turn in range(-1, turns):
            # The order alternates, so that neither server always runs first.
            for name in list(servers)[:: 1 if turn % 2 else -1]:
                first_ms = await _first_token_ms(session, servers[name], gap_s)
                if turn >= 0:
                    seen[name].append(first_ms)
        async with session.get(f"{servers['on'].urls['prefill']}/server_info") as answer:
            counts = (await answer.json())["optimistic_prefill"]
    figures = {name: {"ms": ms, "median_ms": statistics.median(ms)} for name, ms in seen.items()}
    return {**figures, "optimistic": counts, "gap_s": gap_s}


async def _first_token_ms(session: aiohttp.ClientSession, server: Server, gap_s: float) -> float:
    prefill, decode = server.urls["prefill"], server.urls["decode"]
    async with session.get(f"{prefill}/server_info") as answer:
        port = (await answer.json())["disaggregation_bootstrap_port"]
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
    room = {"bootstrap_room": next(_rooms)}
    body = {"text": PROMPT, "sampling_params": sampling, **meeting, **room}
    leg = asyncio.ensure_future(session.post(f"{prefill}/generate", json=body))
    try:
        await asyncio.sleep(gap_s)
        began = time.perf_counter()
        async with session.post(f"{decode}/generate", json={**body, "stream": True}) as answer:
            line = b""
            while b'"output_ids":[' not in line:
                line = await answer.content.readline()
                if not line:
                    raise KvflowError(f"decode answered {answer.status} without a token")
            first_ms = (time.perf_counter() - began) * 1e3
            await answer.read()
    finally:
        (await leg).release()
    return round(first_ms, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kvflow.bench.early", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--turns", type=int, default=7, help="pairs of requests that are measured")
    parser.add_argument(
        "--gap-s",
        type=float,
        default=1.5,
        help="seconds from prefill's leg to decode's; less than 5",
    )
    given = parser.parse_args()
    sys.stdout.write(
        json.dumps(asyncio.run(bench_early(given.turns, given.gap_s)), indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
