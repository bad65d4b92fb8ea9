"""Optimistic prefill through HTTP: prefill legs that come long before decode's, and some whose
decode stays away.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvflow.serve.demo_model import DEMO_PROMPTS
from tests.e2e.fleet import WITHIN_S, all_home, ask, rank_is_home, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]

LANES = 12
PROMPTS = [" ".join(DEMO_PROMPTS * n) for n in (1, 2, 3)]
# As long as the longest, and without a page in common with it: no pool of 24 pages holds both.
OTHER = " ".join(reversed(PROMPTS[-1].split(" ")))
FAST = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


async def generate(
    session: aiohttp.ClientSession, url: str, prompt: str, **meeting: Any
) -> tuple[int, Any]:
    body = {"text": prompt, "sampling_params": FAST, **meeting}
    async with session.post(f"{url}/generate", json=body) as answer:
        return answer.status, msgspec.json.decode(await answer.read())


async def counted(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    samples = [sample for family in families for sample in family.samples]
    return {
        s.name.removeprefix("kvflow_optimistic_"): s.value
        for s in samples
        if "_optimistic_" in s.name
    }


@pytest.mark.parametrize(
    ("pp", "requests"), [pytest.param(1, 120, marks=pytest.mark.soak), (2, 72)]
)
async def test_a_storm_of_legs_that_come_before_their_decodes(
    pp: int, requests: int, seed: int
) -> None:
    """A pool of some two prompts.

    Who meets gets its tokens; who does not is told at the rendezvous; nothing leaks, at any
    rank."""
    chance = random.Random(seed)
    rooms = itertools.count(1)
    async with (
        running(pp=pp, optimistic_prefill=2, num_pages=24, rendezvous_s=2.5) as fleet,
        aiohttp.ClientSession() as session,
    ):
        [prefill], [decode] = fleet.prefills, fleet.decodes
        expected = [
            (await generate(session, fleet.url, prompt))[1]["output_ids"] for prompt in PROMPTS
        ]
        ended: Counter[str] = Counter()

        async def holding(count: int) -> None:
            async with asyncio.timeout(WITHIN_S):
                while (await counted(session, prefill.url))["requests"] != count:
                    pass

        hits = (await counted(session, prefill.url))["hits_total"]
        meeting = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": next(rooms),
        }
        early = asyncio.create_task(generate(session, prefill.url, PROMPTS[0], **meeting))
        await holding(1)
        status, answer = await generate(session, decode.url, PROMPTS[0], **meeting)
        assert status == 200 and answer["output_ids"] == expected[0], answer
        assert (await early)[0] == 200
        assert (await counted(session, prefill.url))["hits_total"] == hits + 1

        lost = (await counted(session, prefill.url))["lost_total"]
        async with asyncio.timeout(WITHIN_S):
            while (await counted(session, prefill.url))["lost_total"] == lost:
                meeting["bootstrap_room"] = next(rooms)
                alone = asyncio.create_task(generate(session, prefill.url, PROMPTS[-1], **meeting))
                await holding(1)
                assert (await generate(session, fleet.url, OTHER))[0] == 200
                status, answer = await alone
                assert (status, answer["error"]["code"]) == (504, "rendezvous"), answer

        async def begun(before: float) -> None:
            """Prefill has begun one more since, or has nowhere to."""
            for _ in range(20):
                if (await ask(session, f"{prefill.url}/server_info"))["optimistic_prefill"][
                    "starts"
                ] > before:
                    return

        async def one(number: int) -> None:
            which, room = chance.randrange(len(PROMPTS)), next(rooms)
            how = chance.choice(("meets", "meets", "meets", "never", "leaves", "decode leaves"))
            meeting = {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": prefill.bootstrap_port,
                "bootstrap_room": room,
            }
            before = (await ask(session, f"{prefill.url}/server_info"))["optimistic_prefill"][
                "starts"
            ]
            leg = asyncio.create_task(generate(session, prefill.url, PROMPTS[which], **meeting))
            await begun(before)
            if how == "never":
                status, answer = await leg
                assert (status, answer["error"]["code"]) == (504, "rendezvous"), answer
                ended[how] += 1
                return
            if how == "leaves":
                leg.cancel()
                await asyncio.wait([leg])
            other = asyncio.create_task(generate(session, decode.url, PROMPTS[which], **meeting))
            if how == "decode leaves":
                await asyncio.sleep(chance.uniform(0, 0.02))
                other.cancel()
            await asyncio.wait([leg, other])
            if how == "meets":
                status, answer = other.result()
                assert status == 200, answer
                assert answer["output_ids"] == expected[which]
            ended[how] += 1

        async def lane(number: int) -> None:
            for request in range(number, requests, LANES):
                await one(request)

        async with asyncio.timeout(120):
            await asyncio.gather(*(lane(number) for number in range(LANES)))
        assert await all_home(session, prefill.url, decode.url)
        # What the other ranks told last may be some tenths of a second old.
        async with asyncio.timeout(WITHIN_S):
            while not all(
                rank_is_home(rank)
                for rank in (await ask(session, f"{prefill.url}/server_info"))["ranks"]
            ):
                pass
        found = await counted(session, prefill.url)
        print(f"seed {seed}, PP {pp}: {dict(ended)}, {found}")
        assert found["starts_total"] >= found["hits_total"] + found["lost_total"]
        assert found["hits_total"] > hits and not found["requests"]
        info = await ask(session, f"{prefill.url}/server_info")
        assert (info["running"], info["waiting"]) == (0, 0)
