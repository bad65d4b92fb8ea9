"""HTTP between router and workers, cut by a proxy in between: every request ends, and its pages
come home.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvflow.serve.demo_model import DEMO_PROMPTS
from kvflow.serve.launch.child import Child
from kvflow.serve.launch.supervisor import Fleet
from tests.chaos.pair import until
from tests.chaos.proxy import FAULTS, Proxy, disturb
from tests.e2e.fleet import all_home, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

LANES, ENOUGH_FAULTS, PAUSE_S = 8, 8, 0.1
REFERENCE = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}


@asynccontextmanager
async def router_through(fleet: Fleet, prefill: Proxy, decode: Proxy) -> AsyncIterator[str]:
    """A second router of the same workers, which reaches them through the proxies."""
    urls = [
        f
        for role, proxy in (("prefill", prefill), ("decode", decode))
        for f in (f"--{role}", url_of(proxy))
    ]
    router = Child("router", "router", ["--port", "0", *urls], quiet=True)
    try:
        await router.start(dict(os.environ), 30)
        yield router.url
    finally:
        await router.stop(5)


def url_of(proxy: Proxy) -> str:
    return f"http://127.0.0.1:{proxy.port}"


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


async def generate(
    session: aiohttp.ClientSession, url: str, prompt: str, stream: bool
) -> tuple[int, Any]:
    body = {"text": prompt, "sampling_params": REFERENCE, "stream": stream}
    async with session.post(f"{url}/generate", json=body) as answer:
        return answer.status, (await answer.text()) if stream else (await answer.json())


async def counted(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum of a counter's values, whatever its labels."""
    async with session.get(f"{url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    return sum(
        sample.value for family in families for sample in family.samples if sample.name == name
    )


# No plane takes part in what is cut.
@pytest.mark.parametrize(
    "plane",
    ["local", *(pytest.param(plane, marks=pytest.mark.soak) for plane in ("mooncake", "nixl"))],
    indirect=True,
)
async def test_requests_end_whatever_http_does(plane: str, seed: int) -> None:
    chance = random.Random(seed)
    changes = {"disaggregation_transfer_backend": plane, "transfer_rate_limit": 16 << 20}
    async with running(**changes) as fleet, aiohttp.ClientSession() as session:
        workers = {"prefill": fleet.prefills[0].url, "decode": fleet.decodes[0].url}
        async with (
            Proxy(port_of(workers["prefill"])) as prefill,
            Proxy(port_of(workers["decode"])) as decode,
            router_through(fleet, prefill, decode) as url,
        ):
            for cut, proxy in (("prefill", prefill), ("decode", decode)):
                before = await counted(session, url, "kvflow_retries_total")
                ended = await asked_while_cut(session, url, proxy, chance)
                retries = await counted(session, url, "kvflow_retries_total") - before
                print(f"{plane}, {cut} cut: {dict(ended)}, {retries:g} tries more")
                assert ended[200] and (len(ended) > 1 or retries)
                assert await all_home(session, *workers.values())

                async def back() -> bool:
                    return (await generate(session, url, DEMO_PROMPTS[0], False))[0] == 200

                await until(back)
                assert await all_home(session, *workers.values())


async def asked_while_cut(
    session: aiohttp.ClientSession, url: str, proxy: Proxy, chance: random.Random
) -> Counter[int]:
    """How requests have ended, by status; 0 for a stream that broke."""
    references = [(await generate(session, url, prompt, False)) for prompt in DEMO_PROMPTS[:2]]
    assert [status for status, _ in references] == [200, 200]
    before = await counted(session, url, "kvflow_retries_total")
    ended: Counter[int] = Counter()
    faults, has_met = 0, False

    async def lane(number: int) -> None:
        which, stream = number % 2, number % 4 > 1
        while faults < ENOUGH_FAULTS or not has_met:
            try:
                async with asyncio.timeout(120):
                    status, answer = await generate(session, url, DEMO_PROMPTS[which], stream)
            except aiohttp.ClientError:
                status, answer = 0, None
            ended[status] += 1
            if status == 200 and not stream:  # an answer that came is the answer
                assert answer["output_ids"] == references[which][1]["output_ids"]
            elif status != 200:
                # Or all would be refused while nobody is there.
                await asyncio.sleep(PAUSE_S)

    lanes = asyncio.gather(*(lane(number) for number in range(LANES)))
    # On a busy machine an answer takes seconds, and prefill's leg a small part of them.
    while (faults < ENOUGH_FAULTS or not has_met) and not lanes.done():
        await asyncio.sleep(chance.uniform(0.3, 0.8))
        await disturb(proxy, FAULTS[faults % len(FAULTS)], chance.uniform(0, 0.5))
        faults += 1
        has_met = len(ended) > 1 or await counted(session, url, "kvflow_retries_total") > before
    await lanes
    return ended
