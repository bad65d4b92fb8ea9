"""A prefill and a decode of vLLM whose transfers pass through host memory beside the KV cache, as
they do where it is on a device, answer what one vLLM answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engines import Prompt, at_once, eventually, start_all, stop_all
from tests.vllm.asking import (
    BothLegs,
    ask,
    is_empty,
    is_tie,
    measure,
    one_after_the_other,
    random_prompts,
)
from tests.vllm.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(480)]
COUNT = 24  # tokens of an answer
STAGED: dict[str, Any] = {"staging": "always", "staging_bytes": 16 << 20}
Pair = tuple[Server, Server]


@pytest.fixture(scope="module", params=["mooncake", pytest.param("local", marks=pytest.mark.soak)])
def staged(
    request: pytest.FixtureRequest, model_of: Callable[..., Path], logs: Path
) -> Iterator[Pair]:
    plane, model = request.param, model_of(1)
    prefill, decode = (
        Server(role, model, logs, name=f"staged-{role}-{plane}", transfer_backend=plane, **STAGED)
        for role in ("prefill", "decode")
    )
    try:
        start_all([prefill, decode])
        yield prefill, decode
    finally:
        stop_all([prefill, decode])


async def test_staged_answers_are_those_of_one_vllm(
    session: aiohttp.ClientSession, staged: Pair, seed: int
) -> None:
    prefill, decode = staged
    prompts = random_prompts(random.Random(seed), 20, 1500)

    async def through_both(number: int, prompt: Prompt) -> list[int]:
        if number % 2:
            return (await BothLegs(session, prefill, decode, prompt, COUNT).answer()).tokens
        answer = await one_after_the_other(session, prefill, decode, prompt, COUNT)
        return answer.tokens

    jobs = [partial(through_both, number, prompt) for number, prompt in enumerate(prompts)]
    found = await at_once(8, jobs)
    # Prefill computes its own pages, so it answers as a vLLM without a connector does.
    alone = await at_once(8, [partial(ask, session, prefill.url, p, COUNT) for p in prompts])
    for prompt, ours, answer in zip(prompts, found, alone, strict=True):
        if ours != answer.tokens:
            assert await is_tie(session, prefill, prompt, ours, answer.tokens), len(prompt)
    moved = await measure(session, decode.status_url, "kvflow_transfer_bytes_total")
    assert moved > sum(map(len, prompts)) * 1024 * 4 / 2
    for server in staged:
        assert "transfers pass through 16777216 bytes" in server.text()
        await eventually(partial(is_empty, session, server), f"{server.name} gives all back")
