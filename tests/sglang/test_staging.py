"""A prefill and a decode of SGLang whose transfers pass through host memory beside the KV cache, as
they do where it is on a device, answer what one SGLang answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from tests.engines import Prompt, at_once, eventually, start_all, stop_all
from tests.sglang.asking import Answer, BothLegs, ask, is_empty, random_prompts
from tests.sglang.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(480)]
COUNT = 16  # tokens of an answer
SIZE_BYTES = 8 << 20


class Staged(NamedTuple):
    single: Server
    prefill: Server
    decode: Server


@pytest.fixture(scope="module", params=["mooncake", pytest.param("local", marks=pytest.mark.soak)])
def staged(
    request: pytest.FixtureRequest, model_of: Callable[[int], Path], logs: Path
) -> Iterator[Staged]:
    plane, model = request.param, model_of(1)
    chunks = ["--chunked-prefill-size", "256"]

    def server(role: str, *words: str) -> Server:
        return Server(
            role,
            model,
            logs,
            *words,
            name=f"staged-{role}-{plane}",
            transfer_backend=plane,
            staging="always",
            staging_bytes=SIZE_BYTES,
            verify_transfers=True,
        )

    found = Staged(server("single"), server("prefill", *chunks), server("decode"))
    try:
        start_all(found)
        yield found
    finally:
        stop_all(found)


async def test_staged_answers_are_those_of_one_sglang(
    session: aiohttp.ClientSession, staged: Staged, seed: int
) -> None:
    prompts = random_prompts(random.Random(seed), 20, 1500)

    async def through_both(prompt: Prompt) -> Answer:
        return await BothLegs(session, staged.prefill, staged.decode, prompt, COUNT).answer()

    found = await at_once(6, [partial(through_both, prompt) for prompt in prompts])
    jobs = [partial(ask, session, staged.single.url, prompt, COUNT) for prompt in prompts]
    for prompt, ours, alone in zip(prompts, found, await at_once(6, jobs), strict=True):
        assert ours.tokens == alone.tokens, len(prompt)
    for server in (staged.prefill, staged.decode):
        assert f"transfers pass through {SIZE_BYTES} bytes" in server.text()
        await eventually(partial(is_empty, session, server), f"{server.name} gives all back")
