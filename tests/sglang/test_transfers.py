"""A prefill and a decode of SGLang answer what one SGLang answers, whoever leaves meanwhile."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import aiohttp
import pytest

from tests.engines import Prompt, at_once, eventually, random_prompt
from tests.sglang.asking import Answer, BothLegs, ask, is_empty, random_prompts
from tests.sglang.conftest import RENDEZVOUS_S, Fleet
from tests.sglang.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(480)]
Session = aiohttp.ClientSession
COUNT = 16  # tokens of an answer
LONG = 200  # of one whose client leaves before it ends


async def assert_same(session: Session, fleet: Fleet, prompts: list[Prompt]) -> None:
    async def one(prompt: Prompt) -> Answer:
        return await BothLegs(session, fleet.prefill, fleet.decode, prompt, COUNT).answer()

    got = await at_once(6, [partial(one, prompt) for prompt in prompts])
    jobs = [partial(ask, session, fleet.single.url, prompt, COUNT) for prompt in prompts]
    wanted = await at_once(6, jobs)
    for prompt, ours, theirs in zip(prompts, got, wanted, strict=True):
        assert ours.tokens == theirs.tokens, len(prompt)


async def assert_empty(session: Session, *servers: Server) -> None:
    for server in servers:
        await eventually(partial(is_empty, session, server), "it gives everything back")


async def test_greedy_answers_are_those_of_one_sglang(
    session: Session, fleet: Fleet, seed: int
) -> None:
    await assert_same(session, fleet, random_prompts(random.Random(seed), 24, 1500))
    await assert_empty(session, fleet.prefill, fleet.decode)


async def test_log_probabilities_of_the_first_token_travel(session: Session, fleet: Fleet) -> None:
    prompt = random_prompt(random.Random(3), 40)
    fields: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3}
    legs = BothLegs(session, fleet.prefill, fleet.decode, prompt, 4, **fields)
    ours = (await legs.answer()).body["meta_info"]["output_top_logprobs"]
    theirs = (await ask(session, fleet.single.url, prompt, 4, **fields)).body
    assert len(ours) == 4
    for mine, single in zip(ours, theirs["meta_info"]["output_top_logprobs"], strict=True):
        assert [token for _, token, _ in mine] == [token for _, token, _ in single]
        assert [value for value, _, _ in mine] == pytest.approx([v for v, _, _ in single], abs=1e-3)


@pytest.mark.parametrize(
    "legs",
    [
        "prefill decode",
        *(pytest.param(leg, marks=pytest.mark.soak) for leg in ("prefill", "decode")),
    ],
)
async def test_clients_that_leave_in_the_middle_of_a_write(
    session: Session, fleet: Fleet, seed: int, legs: str
) -> None:
    """`slow` writes for some two seconds a prompt."""
    rng = random.Random(f"{seed} {legs}")

    async def leave(prompt: Prompt) -> None:
        both = BothLegs(session, fleet.slow, fleet.decode, prompt, LONG)
        await asyncio.sleep(0.5 + rng.random())
        await both.leave(legs)

    await at_once(4, [partial(leave, random_prompt(rng, 600)) for _ in range(6)])
    await assert_empty(session, fleet.slow, fleet.decode)
    await assert_same(session, fleet, random_prompts(rng, 6, 800))


@pytest.mark.parametrize("leg", ["decode", pytest.param("prefill", marks=pytest.mark.soak)])
async def test_one_leg_that_never_comes(session: Session, fleet: Fleet, leg: str) -> None:
    prompt = random_prompt(random.Random(5), 100)
    legs = BothLegs(session, fleet.prefill, fleet.decode, prompt, COUNT, legs=leg)
    task = legs.prefill or legs.decode
    assert task is not None
    async with asyncio.timeout(RENDEZVOUS_S + 15):
        answer = await task
    assert answer.status == 500 and "rendezvous" in answer.text
    await assert_empty(session, fleet.prefill, fleet.decode)


async def test_legs_of_two_prompts_do_not_meet(session: Session, fleet: Fleet) -> None:
    prompt = random_prompt(random.Random(6), 100)
    legs = BothLegs(
        session, fleet.prefill, fleet.decode, prompt, COUNT, other=[*prompt[:-1], prompt[-1] + 1]
    )
    answer = await legs.answer()
    assert answer.status == 500 and "prompt_mismatch" in answer.text
    assert legs.prefill is not None and "prompt_mismatch" in legs.prefill.result().text
    await assert_empty(session, fleet.prefill, fleet.decode)
