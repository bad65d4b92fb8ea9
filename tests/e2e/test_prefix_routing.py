"""Two prefills and two decodes with prefix caches: conversations by their cache events, beside
round robin.
"""

from __future__ import annotations

import asyncio
import random
import statistics

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.fleet import all_home, ask
from tests.e2e.service import Service, serving
from tests.e2e.test_prefix import Turn, say

USERS, TURNS = 16, 4  # with half of them, one decode has it all
POOL = {"num_pages": 4096, "page_size": 16}
EVENTS = '{"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}'


async def chats(url: str, seed: int) -> list[Turn]:
    """Every user's turns: one system prompt for all, a document of each user,
    then what was said.
    """
    dice = random.Random(seed)

    def words(least: int, most: int) -> list[int]:
        return [dice.randrange(10, 900) for _ in range(dice.randrange(least, most))]

    system = words(60, 70)
    documents = [words(300, 500) for _ in range(USERS)]
    said = [[words(5, 40) for _ in range(TURNS)] for _ in range(USERS)]

    async def chat(user: int) -> list[Turn]:
        prompt, turns = system + documents[user], []
        for question in said[user]:
            prompt = prompt + question
            turns.append(await say(session, url, prompt, 8))
            prompt = prompt + turns[-1].tokens
        return turns

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return [turn for turns in await asyncio.gather(*map(chat, range(USERS))) for turn in turns]


class Counted(msgspec.Struct):
    """What the workers of a role have looked up in their caches, in tokens."""

    asked: int
    hits: int


async def counted(session: aiohttp.ClientSession, service: Service, role: str) -> Counted:
    caches = [
        (await ask(session, f"{service.url(name)}/server_info"))["prefix_cache"]
        for name in service.names(role)
    ]
    return Counted(
        sum(cache["asked_tokens"] for cache in caches), sum(cache["hit_tokens"] for cache in caches)
    )


async def followed(session: aiohttp.ClientSession, url: str, workers: int) -> None:
    """This router knows the caches of so many workers by their events."""
    async with asyncio.timeout(20):
        while True:
            async with session.get(f"{url}/metrics") as answer:
                families = text_string_to_metric_families(await answer.text())
                samples = [sample for family in families for sample in family.samples]
            if (
                sum(s.value for s in samples if s.name == "kvflow_router_worker_events_followed")
                == workers
            ):
                return


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_conversations_find_their_turns_before() -> None:
    seed = 7  # of random prompts, a few in a thousand have two tokens that are equally likely
    async with serving(1, **POOL) as service:
        expected = await chats(await service.start_router(), seed)
    hit_rates: dict[str, dict[str, float]] = {}
    async with (
        aiohttp.ClientSession() as session,
        serving(2, **POOL, prefix_cache="lru", kv_events_config=EVENTS) as service,
    ):
        # What is slower only at first counts against the first.
        for policy in ("cache_aware", "again", "round_robin"):
            # Another router, which has sent nothing, knows from the workers' events who has which
            # conversation.
            url = await service.start_router(policy="cache_aware" if policy == "again" else policy)
            if policy != "round_robin":
                await followed(session, url, 4)
            before = {role: await counted(session, service, role) for role in ("prefill", "decode")}
            found = await chats(url, seed)
            assert [turn.tokens for turn in found] == [turn.tokens for turn in expected]
            after = {role: await counted(session, service, role) for role in before}
            hit_rates[policy] = {
                role: (after[role].hits - old.hits) / (after[role].asked - old.asked)
                for role, old in before.items()
            }
            ttft_ms = 1e3 * statistics.median(turn.first_token_s for turn in found)
            later_ms = 1e3 * statistics.median(
                turn.first_token_s for i, turn in enumerate(found) if i % TURNS
            )
            rates = ", ".join(f"{role} {rate:.1%}" for role, rate in hit_rates[policy].items())
            print(
                f"{policy}: hit rate {rates}; median TTFT {ttft_ms:.1f} ms, of later turns "
                f"{later_ms:.1f} ms"
            )
            loads = [
                (await ask(session, f"{service.url(n)}/server_info"))["bytes_moved"]
                for n in service.names("decode")
            ]
            assert min(loads) > 0, "one decode has it all"
            assert await all_home(
                session, *map(service.url, (*service.names("prefill"), *service.names("decode")))
            )
            if policy != "cache_aware":
                async with session.post(f"{url}/flush_cache") as flushed:
                    assert flushed.status == 200
            assert service.router is not None and await service.router.stop(10.0) == 0
    for role in ("prefill", "decode"):
        assert hit_rates["cache_aware"][role] > hit_rates["round_robin"][role] + 0.05
        assert hit_rates["again"][role] > 0.9
