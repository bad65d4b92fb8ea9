"""A fleet whose transfers pass through staging, as they do on a GPU: the tokens of one without, and
all at rest.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest

from kvflow.serve.demo_model import DEMO_PROMPTS
from tests.e2e.fleet import all_home, ask, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
PLANES = [pytest.param("local", marks=pytest.mark.soak), "mooncake"]


async def answers(backend: str, abort: bool = False, **changes: Any) -> list[str]:
    """Eight prompts of one to eight sentences at once; with `abort` as many others are given up in
    mid-transfer.
    """
    async with (
        running(disaggregation_transfer_backend=backend, **changes) as fleet,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):

        async def one(n: int, timeout_s: float = 60) -> str:
            body = {"text": " ".join(DEMO_PROMPTS[:1] * n), "sampling_params": GREEDY}
            async with (
                asyncio.timeout(timeout_s),
                session.post(f"{fleet.url}/generate", json=body) as answer,
            ):
                assert answer.status == 200, await answer.text()
                return str(msgspec.json.decode(await answer.read())["text"])

        given_up = [asyncio.ensure_future(one(n, 0.02 * n)) for n in range(1, 9 * abort)]
        found = await asyncio.gather(*(one(n) for n in range(1, 9)))
        await asyncio.gather(*given_up, return_exceptions=True)
        urls = [*(child.url for child in fleet.prefills), *(child.url for child in fleet.decodes)]
        assert await all_home(session, *urls)
        assert not (await ask(session, f"{urls[-1]}/server_info"))["quarantine_pages"]
        return found


@pytest.mark.parametrize("backend", PLANES)
async def test_tokens_are_those_of_a_fleet_without(backend: str) -> None:
    pytest.importorskip("mooncake") if backend == "mooncake" else None
    plain = await answers(backend)
    assert await answers(backend, staging="always", verify_transfers=True) == plain
    # A prompt or two at a time.
    little = await answers(backend, abort=True, staging="always", staging_bytes=400_000)
    assert little == plain
