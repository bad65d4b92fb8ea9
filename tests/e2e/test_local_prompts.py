"""Prompts that decode computes itself, in real fleets: the answers of a pair, whatever happens to
them on their way.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import msgspec
import pytest

from kvflow.serve.demo_model import DEMO_PROMPTS
from tests.e2e.fleet import all_home, ask, generate, running
from tests.near import Near

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]

COUNT = 14
ALONE = {"compute_prompt": True}
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 7, "max_new_tokens": 12}


def words(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(10, 900) for _ in range(count)]


def bodies(dice: random.Random) -> dict[str, dict[str, Any]]:
    """Requests by what is special about them, each for /generate."""
    long = words(dice, 700)
    return {
        "one token": {"input_ids": [77], "sampling_params": GREEDY},
        "a page": {"input_ids": words(dice, 16), "sampling_params": GREEDY},
        "long": {"input_ids": long, "sampling_params": GREEDY},
        "as cached": {"input_ids": [*long, *words(dice, 9)], "sampling_params": GREEDY},
        "cached whole": {"input_ids": long[:640], "sampling_params": GREEDY},
        "a text": {"text": DEMO_PROMPTS[0], "sampling_params": GREEDY},
        "sampled": {"input_ids": words(dice, 99), "sampling_params": SAMPLED},
        "choices": {"input_ids": words(dice, 50), "sampling_params": {**SAMPLED, "n": 3}},
        "several": {
            "input_ids": [words(dice, 5), words(dice, 40)],
            "sampling_params": [GREEDY, SAMPLED],
        },
        "logprobs": {
            "input_ids": words(dice, 60),
            "sampling_params": {**SAMPLED, "frequency_penalty": 0.5},
            "return_logprob": True,
            "top_logprobs_num": 3,
            "token_ids_logprob": [5, 9],
        },
        "hidden": {
            "input_ids": words(dice, 60),
            "sampling_params": GREEDY,
            "return_hidden_states": "last",
        },
        "a salt": {"input_ids": long, "sampling_params": GREEDY, "cache_salt": "s"},
        "one new token": {
            "input_ids": words(dice, 60),
            "sampling_params": {**GREEDY, "max_new_tokens": 1},
        },
    }


def told(answer: Any) -> Any:
    """The answer without what differs between two requests, and with numbers that are near."""
    if isinstance(answer, list):
        return [told(one) for one in answer]
    if isinstance(answer, float):
        return Near(answer)
    if isinstance(answer, dict):
        return {
            name: told(value)
            for name, value in answer.items()
            if name not in ("id", "cached_tokens", "e2e_latency")
        }
    return answer


async def answered(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(f"{url}/generate", json=body) as answer:
        document = msgspec.json.decode(await answer.read())
        assert answer.status == 200, document
        return document


async def streamed(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], leave_after: int = 0
) -> list[int]:
    """The tokens of a stream, or those after which the client leaves."""
    tokens: list[int] = []
    async with session.post(f"{url}/generate", json={**body, "stream": True}) as stream:
        assert stream.status == 200, await stream.text()
        async for line in stream.content:
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line[6:])
                assert "error" not in event, event
                tokens = event["output_ids"]
                if leave_after and len(tokens) >= leave_after:
                    return tokens[:leave_after]
    return tokens


async def counted(session: aiohttp.ClientSession, url: str) -> Any:
    return (await ask(session, f"{url}/server_info"))["local_prompts"]


@pytest.mark.parametrize("shards", [1, 2])
async def test_answers_are_those_of_a_pair(shards: int) -> None:
    """Each request alone with an empty cache, by a pair with an empty cache, and once more alone
    with what was cached then. All at once, in chunks of 16 tokens.
    """
    given = bodies(random.Random(4))
    async with (
        aiohttp.ClientSession() as session,
        running(decode_tp=shards, local_prefill_chunk=16) as fleet,
    ):
        decode = fleet.decodes[0].url

        async def all_of(url: str, **more: Any) -> list[Any]:
            answers = (answered(session, url, body | more) for body in given.values())
            return [told(answer) for answer in await asyncio.gather(*answers)]

        alone = await all_of(decode, **ALONE)
        assert (await ask(session, f"{fleet.prefills[0].url}/server_info"))["rooms_ended"] == {}
        assert (await ask(session, f"{decode}/rooms"))["rooms"] == []
        await session.post(f"{fleet.url}/flush_cache")
        pairs = await all_of(fleet.url)
        for name, ours, theirs in zip(given, alone, pairs, strict=True):
            assert ours == theirs, name
        before = (await counted(session, decode))["tokens"]
        assert await all_of(decode, **ALONE) == pairs
        # Of the long prompts, all but the ends were cached.
        assert (await counted(session, decode))["tokens"] - before < 300
        status, found = await generate(session, decode, **ALONE, logprob_start_len=0)
        assert status == 200, "without return_logprob, the start has no meaning"
        status, found = await generate(
            session, decode, **ALONE, return_logprob=True, logprob_start_len=0
        )
        assert status == 502 and "a pair does" in found["error"]["message"]
        assert await all_home(session, fleet.prefills[0].url, decode)


@pytest.mark.parametrize("host_bytes", [1 << 28, 0])
async def test_a_router_that_mixes_both_in_a_pool_that_is_too_small(host_bytes: int) -> None:
    """Some clients leave, some of them before the first token. Prompts of both kinds are
    retracted. All tokens are those of pairs in a pool that is large.
    """
    dice = random.Random(11)
    system = words(dice, 64)
    prompts = [
        [*system[: 64 * (i % 2)], *words(dice, dice.randrange(8, 180))] for i in range(COUNT)
    ]
    sampling = {"temperature": 0, "max_new_tokens": 96, "ignore_eos": True}
    given = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
    short = {"num_pages": 26, "new_token_ratio": 0.0, "host_memory_bytes": host_bytes}
    mixed = {"local_prefill_tokens": 100, "local_prefill_chunk": 16}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        running(**short, **mixed) as fleet,
    ):
        decode = fleet.decodes[0].url
        workers = fleet.prefills[0].url, decode
        # Pairs serve prompts whose echo is wanted; see test_overcommit.py for those in small pools.
        want = await asyncio.gather(
            *(streamed(session, fleet.url, {**one, "echo": True}) for one in given)
        )
        assert await counted(session, decode) == {"chunk": 16, "prompts": 0, "tokens": 0}
        await session.post(f"{fleet.url}/flush_cache")
        for leave in (0, 1):
            stay = [dice.randrange(1, 96) if leave and i % 3 == 0 else 0 for i in range(COUNT)]
            got = await asyncio.gather(
                *(streamed(session, fleet.url, one, n) for one, n in zip(given, stay, strict=True))
            )
            assert got == [tokens[: n or None] for tokens, n in zip(want, stay, strict=True)]
            assert await all_home(session, *workers)
        info = await ask(session, f"{decode}/server_info")
        assert 0 < info["local_prompts"]["prompts"] < 2 * COUNT and info["retraction"]["retracts"]
        # Others leave while decode computes their prompts.
        tasks = [asyncio.create_task(answered(session, decode, one | ALONE)) for one in given]
        async with asyncio.timeout(20):
            while await counted(session, decode) == info["local_prompts"]:
                await asyncio.sleep(0.001)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.wait(tasks)
        for task, tokens in zip(tasks, want, strict=True):
            assert task.cancelled() or task.result()["output_ids"] == tokens
        assert await all_home(session, *workers)
        for one, tokens in zip(given[:3], want, strict=False):
            assert await streamed(session, fleet.url, one) == tokens
