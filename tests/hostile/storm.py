"""An abort storm over HTTP: clients that leave at random points, beside clients whose answers must
be exact.

    python -m tests.hostile storm --requests 2000 [--router sglang]

Leaving happens before the headers, in mid-stream, or after a number of tokens. Every finished
answer is compared with the same request made alone before; afterwards every gauge is 0, pages are
home and no worker has grown.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import psutil

from kvflow.serve.demo_model import DEMO_PROMPTS
from kvflow.serve.launch.supervisor import Fleet
from tests.e2e.fleet import all_home, ask, running
from tests.e2e.sglang import sglang_router
from tests.hostile.nodes import Report

LANES = 16
LEAVING = 0.3
SIZES = (4, 24, 96)  # new tokens
GAUGES = (
    "kvflow_rooms",
    "kvflow_quarantine_pages",
    "kvflow_running_requests",
    "kvflow_waiting_requests",
    "kvflow_internal_errors_total",
)


def prompts() -> list[str]:
    """Short ones, and some of several chunks."""
    return [*DEMO_PROMPTS[:8], *(" ".join(DEMO_PROMPTS[i:] + DEMO_PROMPTS[:i]) for i in range(4))]


def request(prompt: str, size: int, stream: bool) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": size, "ignore_eos": True}
    return {"text": prompt, "stream": stream, "sampling_params": sampling}


async def answer(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[int]:
    """The token ids of a finished answer. Raises: AssertionError with the body of a failed one."""
    async with session.post(f"{url}/generate", json=body) as response:
        raw = await response.read()
    assert response.status == 200, (response.status, raw[:300])
    if body["stream"]:
        events = [line[6:] for line in raw.split(b"\n\n") if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]", raw[-300:]
        raw = events[-2]
    ids: list[int] = msgspec.json.decode(raw)["output_ids"]
    return ids


async def leave(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], rng: random.Random
) -> str:
    """Begin, and be gone: returns at which point."""
    point = rng.choice(("before headers", "mid-stream", "after tokens"))
    if point == "before headers":
        task = asyncio.ensure_future(session.post(f"{url}/generate", json=body))
        await asyncio.sleep(rng.random() * 0.1)
        if not task.cancel():
            task.result().close()
            return "too late"
        await asyncio.wait([task])
        return point
    async with session.post(f"{url}/generate", json=body | {"stream": True}) as response:
        events = (
            rng.randint(1, body["sampling_params"]["max_new_tokens"])
            if point == "after tokens"
            else 1
        )
        async for line in response.content:
            events -= line.startswith(b"data: ")
            if events <= 0:
                break
        if response.content.at_eof():
            return "too late"
        response.close()
    return point


async def gauges(session: aiohttp.ClientSession, fleet: Fleet) -> dict[str, float]:
    """Those that must be 0, by name and worker; the ones that are not."""
    found: dict[str, float] = {}
    for child in (*fleet.prefills, *fleet.decodes):
        async with session.get(f"{child.url}/metrics") as response:
            text = await response.text()
        for name, value in re.findall(r"^(\w+(?:{[^}]*})?) (\S+)$", text, re.M):
            owner = name.startswith("kvflow_pages{") and "free" not in name
            if (name.split("{")[0] in GAUGES or owner) and float(value):
                found[f"{child.role} {name}"] = float(value)
    return found


async def run(requests: int = 2_000, router: str = "kvflow", seed: int = 0) -> Report:
    """The storm through `kvflow up`'s own router, or SGLang's in its place."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    rss: list[dict[str, float]] = []
    home = False
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running(num_pages=2048, prefix_cache="off"))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        )
        url = (
            await stack.enter_async_context(sglang_router(fleet))
            if router == "sglang"
            else fleet.url
        )
        kinds = [(prompt, size) for prompt in prompts() for size in SIZES]
        # A few clients ask for some of them.
        kinds = rng.sample(kinds, min(len(kinds), requests // 4))
        references = {
            kind: await answer(session, fleet.url, request(*kind, False)) for kind in kinds
        }
        workers = {child.name: psutil.Process(child.process.pid) for child in fleet.children}

        async def lane(left: Any) -> None:
            for _ in left:
                kind, stream = rng.choice(kinds), rng.random() < 0.5
                if rng.random() < LEAVING:
                    seen[await leave(session, url, request(*kind, stream), rng)] += 1
                    continue
                try:
                    got = await answer(session, url, request(*kind, stream))
                except (AssertionError, aiohttp.ClientError) as error:
                    wrong.append(f"{type(error).__name__}: {error}"[:400])
                    continue
                seen["finished"] += 1
                if got != references[kind]:
                    wrong.append(
                        f"{kind[0][:20]!r} x {kind[1]}: {got} instead of {references[kind]}"
                    )

        for _ in range(4):
            left = iter(range(requests // 4))
            await asyncio.gather(*(lane(left) for _ in range(LANES)))
            home = await all_home(session, fleet.prefills[0].url, fleet.decodes[0].url)
            rss.append(
                {
                    name: round(process.memory_info().rss / 2**20, 1)
                    for name, process in workers.items()
                }
            )
        ended = {
            c.role: (await ask(session, f"{c.url}/server_info"))["rooms_ended"]
            for c in fleet.children[:2]
        }
        left_over = await gauges(session, fleet)
    return {
        "requests": requests,
        "router": router,
        "seen": dict(seen),
        "wrong": len(wrong),
        "first_wrong": wrong[:3],
        "rooms_ended": ended,
        "gauges_not_0": left_over,
        "pages_home": home,
        "rss_mib_by_quarter": rss,
        "rss_growth": {name: round(rss[3][name] / rss[1][name] - 1, 4) for name in rss[0]},
    }


def faults(report: Report) -> list[str]:
    """A wrong answer, something left, a worker that grew (told only of a storm long enough)."""
    found = [f"{report['wrong']} wrong answers: {report['first_wrong']}"] if report["wrong"] else []
    found += [f"{name} is {value}" for name, value in report["gauges_not_0"].items()]
    if report["requests"] >= 1_000:
        found += [
            f"{name} grew by {share:.1%}"
            for name, share in report["rss_growth"].items()
            if share >= 0.02
        ]
    return found + ([] if report["pages_home"] else ["pages are away"])
