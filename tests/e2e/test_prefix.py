"""`kvflow up --prefix-cache`: conversations whose turns cost what is new in them, by what official
clients see.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.e2e.fleet import all_home, ask, running
from tests.protocols.cache.decoders import VllmKVEventBatch, apply
from tests.protocols.cache.subscriber import Subscriber, block_hash, digest_chain
from tests.soak import sized

USERS, TURNS, PAGE_SIZE = sized(8, 16), sized(5, 8), 16


class Turn:
    """What one turn of one user was given and got."""

    def __init__(self, prompt: list[int], answer: dict[str, Any], first_token_s: float) -> None:
        meta = answer["meta_info"]
        self.prompt_tokens, self.first_token_s = len(prompt), first_token_s
        self.tokens: list[int] = answer["output_ids"]
        self.cached_tokens: int = meta["cached_tokens"]
        assert meta["prompt_tokens"] == len(prompt)


async def say(session: aiohttp.ClientSession, url: str, prompt: list[int], count: int) -> Turn:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    began, first_s, last = time.monotonic(), 0.0, b""
    async with session.post(f"{url}/generate", json=body) as stream:
        assert stream.status == 200, await stream.text()
        async for line in stream.content:
            if line.startswith(b"data: {"):
                first_s, last = first_s or time.monotonic() - began, line[6:]
    return Turn(prompt, msgspec.json.decode(last), first_s)


async def chats(url: str, seed: int) -> list[list[Turn]]:
    """Every user's turns; all users begin with one system prompt."""
    dice = random.Random(seed)
    system = [dice.randrange(10, 900) for _ in range(200)]
    said = [
        [[dice.randrange(10, 900) for _ in range(dice.randrange(5, 40))] for _ in range(TURNS)]
        for _ in range(USERS)
    ]

    async def chat(user: int) -> list[Turn]:
        prompt, turns = list(system), []
        for words in said[user]:
            prompt += words
            turns.append(await say(session, url, prompt, 8))
            prompt += turns[-1].tokens
        return turns

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*map(chat, range(USERS)))


async def moved(session: aiohttp.ClientSession, url: str) -> int:
    return int((await ask(session, f"{url}/server_info"))["bytes_moved"])


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_a_turn_costs_what_is_new_in_it() -> None:
    seed = 7  # of random prompts, a few in a thousand have two tokens that are equally likely
    pool = {"num_pages": 4096, "page_size": PAGE_SIZE}
    bytes_moved = {}
    async with aiohttp.ClientSession() as session:
        async with running(**pool, prefix_cache="off") as fleet:
            expected = await chats(fleet.url, seed)
            bytes_moved["off"] = await moved(session, fleet.decodes[0].url)
        async with running(**pool, prefix_cache="lru") as fleet:
            found = await chats(fleet.url, seed)
            bytes_moved["lru"] = await moved(session, fleet.decodes[0].url)
            urls = [child.url for child in (*fleet.prefills, *fleet.decodes)]
            assert await all_home(session, *urls)
            infos = [await ask(session, f"{url}/server_info") for url in urls]
            assert all(
                info["pages"]["cache"] == info["prefix_cache"]["pages"] > 0 for info in infos
            )
            await session.post(f"{fleet.url}/flush_cache")
            for url in urls:
                info = await ask(session, f"{url}/server_info")
                assert (
                    info["pages"]["free"] == info["pages"]["total"]
                    and not info["prefix_cache"]["pages"]
                )
        # A pool that holds half of the conversations, and host memory that holds all of them.
        async with running(
            num_pages=sized(56, 140),
            page_size=PAGE_SIZE,
            prefix_cache="lru",
            cache_host_bytes=1 << 26,
        ) as fleet:
            tiered = await chats(fleet.url, seed)
            urls = [child.url for child in (*fleet.prefills, *fleet.decodes)]
            assert await all_home(session, *urls)
            caches = [(await ask(session, f"{url}/server_info"))["prefix_cache"] for url in urls]
            print("tiers, prefill and decode:", caches)
            assert all(cache["evicted_pages"] and cache["loaded_pages"] for cache in caches)
    assert [[turn.tokens for turn in turns] for turns in tiered] == [
        [turn.tokens for turn in turns] for turns in found
    ]
    assert [[turn.tokens for turn in turns] for turns in found] == [
        [turn.tokens for turn in turns] for turns in expected
    ]
    assert all(turn.cached_tokens == 0 for turns in expected for turn in turns)
    for turns in found:
        for before, turn in itertools.pairwise(turns):
            assert turn.cached_tokens >= before.prompt_tokens // PAGE_SIZE * PAGE_SIZE, (
                "the turn before was not cached"
            )
    late = [
        statistics.median(turns[-1].first_token_s for turns in chat) for chat in (expected, found)
    ]
    print("first token of the last turn, cache off and on:", late, "bytes moved", bytes_moved)
    # Each turn moves what is new, in whole pages, where all of it moved before.
    assert bytes_moved["lru"] < 0.5 * bytes_moved["off"]


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_subscribers_know_what_is_cached() -> None:
    """The events of a prefill and a decode, as vLLM's subscribers read them: every cached page, per
    tier.
    """
    dice = random.Random(7)
    prompt = [dice.randrange(10, 900) for _ in range(100)]
    events = {
        "endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
        "topic": "kv",
    }
    settings = {"prefix_cache": "lru", "page_size": PAGE_SIZE, "cache_host_bytes": 1 << 24}
    async with (
        running(**settings, kv_events_config=json.dumps(events)) as fleet,
        aiohttp.ClientSession() as session,
    ):
        turn = await say(session, fleet.url, prompt, 30)
        known = [
            digest_chain(tokens, PAGE_SIZE) for tokens in (prompt, (prompt + turn.tokens)[:-1])
        ]
        for child, digests in zip((*fleet.prefills, *fleet.decodes), known, strict=True):
            async with asyncio.timeout(20):  # a thread copies them to the host
                while (await ask(session, f"{child.url}/server_info"))["prefix_cache"][
                    "saved_pages"
                ] < len(digests):
                    await asyncio.sleep(0.02)
            told = (await ask(session, f"{child.url}/server_info"))["kv_events"]
            held, newest = await replayed(told["replay_endpoint"])
            wanted = {block_hash(digest) for digest in digests}
            assert held == [wanted, wanted, set()], "device and host have it, storage has not"
            with closing(zmq.asyncio.Context.instance().socket(zmq.SUB)) as live:
                live.setsockopt(zmq.SUBSCRIBE, b"kv")
                live.connect(told["endpoint"])
                await live.recv_multipart()  # a heartbeat: the subscription has arrived
                await session.post(f"{child.url}/flush_cache")
                async with asyncio.timeout(20):
                    while not (batch := await next_batch(live))[1].events:
                        pass
                assert [type(event).__name__ for event in batch[1].events] == [
                    "VllmAllBlocksCleared"
                ]
                assert batch[0] > newest


async def next_batch(socket: zmq.asyncio.Socket) -> tuple[int, VllmKVEventBatch]:
    topic, seq, payload = await socket.recv_multipart()
    assert topic == b"kv"
    return int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload, type=VllmKVEventBatch)


async def replayed(endpoint: str) -> tuple[list[set[int]], int]:
    """What a subscriber holds that asks for everything, and the number of the last batch."""
    subscriber, newest = Subscriber(), -1
    with closing(zmq.asyncio.Context.instance().socket(zmq.DEALER)) as socket:
        socket.connect(endpoint)
        async with asyncio.timeout(20):
            await socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                _, _, seq, payload = await socket.recv_multipart()
                if int.from_bytes(seq, "big", signed=True) == -1:
                    return subscriber.content(), newest
                newest = int.from_bytes(seq, "big")
                apply(subscriber, msgspec.msgpack.decode(payload, type=VllmKVEventBatch))


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_what_was_cached_outlives_the_processes(tmp_path: Path) -> None:
    """A fleet that is killed, and the next one over the same directories."""
    dice = random.Random(11)
    prompt = [dice.randrange(10, 900) for _ in range(120)]
    settings = {
        "prefix_cache": "lru",
        "page_size": PAGE_SIZE,
        "cache_host_bytes": 1 << 24,
        "l3": "file",
    }
    async with aiohttp.ClientSession() as session:
        async with running(**settings, l3_dir=str(tmp_path)) as fleet:
            first = await say(session, fleet.url, prompt, 20)
            for child, pages in ((fleet.prefills[0], 7), (fleet.decodes[0], 8)):
                async with asyncio.timeout(40):
                    while (await cache_of(session, child.url))["stored_pages"] < pages:
                        # What the disk did not take in time is with the next request for it.
                        await say(session, fleet.url, prompt, 20)
            for child in (*fleet.prefills, *fleet.decodes):
                child.kill()
        async with running(**settings, l3_dir=str(tmp_path)) as fleet:
            again = await say(session, fleet.url, prompt, 20)
            assert again.tokens == first.tokens and again.cached_tokens == 112
            fetched = [
                (await cache_of(session, child.url))["fetched_pages"]
                for child in (*fleet.prefills, *fleet.decodes)
            ]
            assert fetched == [7, 7]


async def cache_of(session: aiohttp.ClientSession, url: str) -> Any:
    return (await ask(session, f"{url}/server_info"))["prefix_cache"]
