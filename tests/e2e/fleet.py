"""A router, a prefill and a decode of the demo model as real processes, for the tests that need
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from kvflow.serve.config.sources import resolve
from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.launch.supervisor import Fleet

WITHIN_S = 30.0
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[Fleet]:
    """`kvflow up` with small pools on free ports."""
    given = {
        "model_path": str(DEMO_MODEL_DIR),
        "port": 0,
        "num_pages": 512,
        "dtype": "float32",
        "poll_s": 0.2,
        "drain_timeout_s": 2.0,
        **changes,
    }
    async with Fleet(resolve("up", given, env={}), given, quiet=True) as fleet:
        yield fleet


async def ask(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as answer:
        return msgspec.json.decode(await answer.read())


async def generate(session: aiohttp.ClientSession, url: str, **changes: Any) -> tuple[int, Any]:
    """The status and the answer of a /generate, whose body has these changes."""
    body = {
        "text": DEMO_PROMPTS[0],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
        **changes,
    }
    async with session.post(f"{url}/generate", json=body) as answer:
        raw = await answer.read()
        return answer.status, (raw if changes.get("stream") else msgspec.json.decode(raw))


def is_home(info: Any) -> bool:
    """By a role's /server_info, nothing is left: pages, rows, rooms,
    and snapshots in host memory.
    """
    host_bytes = info["retraction"]["host_bytes_used"] if info["retraction"] else 0
    return info["pages"]["home"] and not (info["quarantine_pages"] or info["rooms"] or host_bytes)


def rank_is_home(rank: Any) -> bool:
    """By what /server_info of a prefill says of one of its ranks, nothing is left there."""
    return (
        rank["up"]
        and rank["pages_at_rest"]
        and not (rank["rooms"] or rank["tickets"] or rank["requests"])
    )


async def all_home(session: aiohttp.ClientSession, *urls: str) -> bool:
    """Every page of these roles becomes free, none stays in quarantine, no room is left, within
    `WITHIN_S`.
    """
    info: Any = None
    try:
        async with asyncio.timeout(WITHIN_S):
            for url in urls:
                info = await ask(session, f"{url}/server_info")
                while not is_home(info):
                    await asyncio.sleep(0.02)
                    info = await ask(session, f"{url}/server_info")
    except TimeoutError:
        names = (
            "role",
            "pages",
            "rows",
            "retraction",
            "rooms",
            "quarantine_pages",
            "rooms_ended",
            "running",
        )
        raise AssertionError({name: info[name] for name in names if info}) from None
    return True
