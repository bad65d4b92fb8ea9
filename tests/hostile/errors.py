"""Failures at prefill, as decode's client sees them: how soon, and with whose reason.

    python -m tests.hostile errors --failures 500

Four kinds, real ones: a body only prefill refuses, a prompt too long for prefill's pool, a model
step that raises after some pages have left, and one through the router.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import msgspec
import numpy as np

from kvflow.serve.config.sources import resolve
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.launch.supervisor import Fleet
from tests.e2e.fleet import all_home
from tests.hostile.nodes import Report

LANES = 4
GOOD = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
# by kind: the prompt, what prefill is asked for, the words of its reason
KINDS: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "bad_request": ([1] * 40, {**GOOD, "temperature": -1}, "temperature"),
    "too_long": (
        [1] * 600,
        GOOD,
        "prompt tokens in the KV pool (--num-pages, --pool-bytes, --mem-fraction): asked for 600, "
        "limit 512",
    ),
    "engine_error": ([7] * 300, GOOD, "prefill step failed: RuntimeError"),
}


class Seen(msgspec.Struct):
    kind: str
    status: int
    reason: bool
    total_s: float
    after_prefill_s: float = 0.0


async def direct(
    session: aiohttp.ClientSession, fleet: Fleet, kind: str, room: int, stream: bool
) -> Seen:
    """Both legs by hand, as any router sends them; what decode's client gets."""
    prefill, decode = fleet.prefills[0], fleet.decodes[0]
    ids, at_prefill, words = KINDS[kind]
    meeting = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": room,
    }
    body = {"input_ids": ids, "stream": stream, **meeting}
    started = time.perf_counter()
    ended: dict[str, float] = {}

    async def leg(name: str, url: str, sampling: dict[str, Any]) -> tuple[int, bytes]:
        async with session.post(
            f"{url}/generate", json={**body, "sampling_params": sampling}
        ) as answer:
            raw = await answer.read()
            ended[name] = time.perf_counter()
            return answer.status, raw

    _, (status, raw) = await asyncio.gather(
        leg("prefill", prefill.url, at_prefill), leg("decode", decode.url, GOOD)
    )
    after = max(0.0, ended["decode"] - ended["prefill"])
    return Seen(kind, status, words.encode() in raw, ended["decode"] - started, after)


async def routed(session: aiohttp.ClientSession, fleet: Fleet) -> Seen:
    ids, sampling, words = KINDS["engine_error"]
    started = time.perf_counter()
    async with session.post(
        f"{fleet.url}/generate", json={"input_ids": ids, "sampling_params": sampling}
    ) as answer:
        raw = await answer.read()
    return Seen(
        "engine_error_routed", answer.status, words.encode() in raw, time.perf_counter() - started
    )


async def run(failures: int = 500, seed: int = 0) -> Report:
    """That many failures, `LANES` at once."""
    rng = random.Random(seed)
    seen: list[Seen] = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kvflow.toml"
        config.write_text(
            "[prefill]\nnum_pages = 32\nchunked_prefill_size = 64\n[decode]\nnum_pages = 512\n"
        )
        given = {
            "model_path": str(DEMO_MODEL_DIR),
            "port": 0,
            "dtype": "float32",
            "poll_s": 0.2,
            "drain_timeout_s": 2.0,
        }
        patience = aiohttp.ClientTimeout(total=60)
        async with AsyncExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, PYTEST_PLANTED="tests.hostile.planted"))
            settings = resolve("up", given, env={})
            fleet = await stack.enter_async_context(Fleet(settings, given, str(config), quiet=True))
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=patience))
            numbers = iter(range(failures))

            async def lane() -> None:
                for i in numbers:
                    kind = (*KINDS, "routed")[i % 4]
                    room = rng.getrandbits(63)
                    found = (
                        routed(session, fleet)
                        if kind == "routed"
                        else direct(session, fleet, kind, room, i % 8 < 4)
                    )
                    seen.append(await found)

            await asyncio.gather(*(lane() for _ in range(LANES)))
            async with session.post(
                f"{fleet.url}/generate", json={"input_ids": [1] * 40, "sampling_params": GOOD}
            ) as good:
                good_status = good.status
            home = await all_home(session, fleet.prefills[0].url, fleet.decodes[0].url)
    return {
        "failures": len(seen),
        "by_kind": {
            kind: figures([s for s in seen if s.kind == kind])
            for kind in dict.fromkeys(s.kind for s in seen)
        },
        "all": figures(seen),
        "without_reason": sum(not s.reason for s in seen),
        "good_request_afterwards": good_status,
        "pages_home": home,
    }


def figures(seen: list[Seen]) -> dict[str, Any]:
    """Milliseconds from the request to the error, and from prefill's own answer to decode's."""
    found: dict[str, Any] = {"count": len(seen), "statuses": sorted({s.status for s in seen})}
    for name in ("total_s", "after_prefill_s"):
        p50, p99, most = np.percentile([getattr(s, name) * 1e3 for s in seen], (50, 99, 100))
        found[name.replace("_s", "_ms")] = {
            "p50": round(p50, 1),
            "p99": round(p99, 1),
            "max": round(most, 1),
        }
    return found


def faults(report: Report) -> list[str]:
    """A reason that was lost, an error that came late, something left."""
    found = (
        [f"{report['without_reason']} answers without prefill's reason"]
        if report["without_reason"]
        else []
    )
    if report["all"]["total_ms"]["p99"] >= 1000:
        found.append(f"p99 {report['all']['total_ms']['p99']} ms")
    if (
        any(status < 400 for status in report["all"]["statuses"])
        or report["good_request_afterwards"] != 200
    ):
        found.append(
            f"statuses {report['all']['statuses']}, then {report['good_request_afterwards']}"
        )
    return found + ([] if report["pages_home"] else ["pages are away"])
