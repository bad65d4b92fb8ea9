"""A prefill and a decode of vLLM answer what one vLLM answers, whoever leaves meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import aiohttp
import openai
import pytest

from kvflow.serve.launch.child import Child
from tests.engines import Prompt, at_once, eventually, random_prompt
from tests.vllm.asking import (
    Answer,
    BothLegs,
    ask,
    ask_prefill,
    is_empty,
    is_tie,
    measure,
    one_after_the_other,
    random_prompts,
)
from tests.vllm.conftest import Fleet, finds_loaded_prompts
from tests.vllm.servers import BLOCK, MODEL

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(480)]
Session = aiohttp.ClientSession
COUNT = 24  # tokens of an answer
LONG = 500  # of one whose client leaves before it ends
MOVED = "kvflow_transfer_bytes_total"


async def assert_same(
    session: Session, fleet: Fleet, prompts: list[Prompt], got: list[list[int]]
) -> None:
    answers = await at_once(8, [partial(ask, session, fleet.single.url, p, COUNT) for p in prompts])
    for prompt, ours, answer in zip(prompts, got, answers, strict=True):
        if ours != answer.tokens:
            assert len(ours) == COUNT
            differ = len(prompt), ours, answer.tokens
            assert await is_tie(session, fleet.single, prompt, ours, answer.tokens), differ


@asynccontextmanager
async def routed(fleet: Fleet, legs: str) -> AsyncIterator[str]:
    """URL of a router in front of the fast pair."""
    words = f"--engine vllm --legs {legs} --port 0 --prefill {fleet.prefill.url}".split()
    router = Child("router", "router", [*words, "--decode", fleet.decode.url], quiet=True)
    try:
        await router.start(os.environ, 60)
        yield router.url
    finally:
        await router.stop(20)


@pytest.mark.parametrize("legs", ["sequential", "together"])
async def test_greedy_answers_through_the_router_are_those_of_one_vllm(
    session: Session, fleet: Fleet, legs: str, seed: int
) -> None:
    prompts = random_prompts(random.Random(f"{seed} {legs}"), 30, 1500)
    before = await measure(session, fleet.decode.status_url, MOVED)
    async with (
        routed(fleet, legs) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):

        async def complete(prompt: Prompt) -> list[int]:
            tokens: list[int] = []
            fields = {"ignore_eos": True, "return_token_ids": True}
            stream = await client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=COUNT,
                temperature=0,
                stream=True,
                extra_body=fields,
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    tokens += (choice.model_extra or {}).get("token_ids") or []
            return tokens

        got = await at_once(8, [partial(complete, p) for p in prompts])
        # One prompt has a single token.
        alone = await measure(session, url, "kvflow_router_decoded_alone_total")
        assert alone <= sum(len(prompt) < fleet.least_tokens for prompt in prompts)
    await assert_same(session, fleet, prompts, got)
    # They share beginnings, which decode has from the first on; most of the rest has to come from
    # prefill.
    moved = await measure(session, fleet.decode.status_url, MOVED) - before
    assert moved > sum(map(len, prompts)) * fleet.token_bytes / 2
    if fleet.family.layers == 4:  # there is nothing else
        pages = sum(-(-len(prompt) // BLOCK) for prompt in prompts)
        assert moved < pages * BLOCK * fleet.token_bytes


@finds_loaded_prompts
async def test_a_prompt_that_decode_has_cached_moves_nothing(
    session: Session, fleet: Fleet, seed: int
) -> None:
    prompt = random_prompt(random.Random(seed), 10 * BLOCK + 7)
    first = await one_after_the_other(session, fleet.prefill, fleet.decode, prompt, COUNT)
    moved = await measure(session, fleet.decode.status_url, MOVED)
    again = await one_after_the_other(session, fleet.prefill, fleet.decode, prompt, COUNT)
    together = await BothLegs(session, fleet.prefill, fleet.decode, prompt, COUNT).answer()
    assert await measure(session, fleet.decode.status_url, MOVED) == moved > 0
    await assert_same(session, fleet, [prompt] * 3, [first.tokens, again.tokens, together.tokens])


async def test_one_transfer_serves_the_first_of_several_prompts(
    session: Session, fleet: Fleet, seed: int
) -> None:
    """Those that no answer of prefill's speaks of wait for nobody there, and fail nowhere."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, 3 * BLOCK + number) for number in range(3)]
    before = await measure(session, fleet.prefill.status_url, "kvflow_rooms_failed_total")
    for asked, fields in ((prompts, {}), (prompts[:1], {"n": 2, "temperature": 0.5})):
        first = await ask(
            session, fleet.prefill.url, asked, 1, {"do_remote_decode": True}, **fields
        )
        assert first.status == 200, first.text
        params = first.body["kv_transfer_params"]
        answer = await ask(session, fleet.decode.url, asked, COUNT, params, **fields)
        assert answer.status == 200, answer.text
        found = [choice["token_ids"] for choice in answer.body["choices"]]
        if fields:
            assert len(found) == 2
        else:
            await assert_same(session, fleet, asked, found)
        assert not await measure(session, fleet.prefill.status_url, "kvflow_rooms"), (
            "one waits for its deadline"
        )
    assert await measure(session, fleet.prefill.status_url, "kvflow_rooms_failed_total") == before


async def test_requests_that_are_cut_off_leave_the_others_alone_and_nothing_behind(
    session: Session, fleet: Fleet, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.randrange(100, 1500)) for _ in range(40)]
    cuts = ["" if n % 3 else ("prefill", "decode", "both")[n // 3 % 3] for n in range(40)]
    # Seconds: about what a request takes on two cores.
    moments = [rng.random() * 2.5 for _ in prompts]

    async def together(prompt: Prompt, cut: str, moment: float) -> Answer | None:
        count = LONG if cut in ("decode", "both") else COUNT
        legs = BothLegs(session, fleet.prefill, fleet.decode, prompt, count)
        if cut:
            await asyncio.wait([legs.decode], timeout=moment)
            for leg in ("prefill", "decode") if cut == "both" else (cut,):
                getattr(legs, leg).cancel()
        with suppress(asyncio.CancelledError):
            return await legs.answer()
        return None

    async def sequential(prompt: Prompt, cut: str, moment: float) -> Answer | None:
        if not cut:
            return await one_after_the_other(session, fleet.prefill, fleet.decode, prompt, COUNT)
        if cut == "both":  # decode is never asked
            await ask_prefill(session, fleet.prefill, prompt)
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(moment if cut == "prefill" else None):
                params = await ask_prefill(session, fleet.prefill, prompt)
            if cut == "prefill":  # it was over sooner
                return await ask(session, fleet.decode.url, prompt, COUNT, params)
            async with asyncio.timeout(moment):
                return await ask(session, fleet.decode.url, prompt, LONG, params)
        return None

    jobs = [
        lambda way=together if n % 2 else sequential, case=case: way(*case)
        for n, case in enumerate(zip(prompts, cuts, moments, strict=True))
    ]
    answers = await at_once(8, jobs)
    left = [
        answer is None
        for answer, cut in zip(answers, cuts, strict=True)
        if cut in ("decode", "both")
    ]
    assert sum(left) > len(left) / 2, "too few left before their answers ended"
    served = [
        (prompt, answer.tokens)
        for prompt, answer, cut in zip(prompts, answers, cuts, strict=True)
        if answer and (not cut or (cut == "prefill" and answer.status == 200))
    ]
    assert len(served) >= cuts.count("")
    await assert_same(
        session, fleet, [prompt for prompt, _ in served], [tokens for _, tokens in served]
    )
    for server in (fleet.prefill, fleet.decode):
        await eventually(partial(is_empty, session, server), f"{server.name} gives everything back")
        assert not await measure(session, server.status_url, "kvflow_rooms")
