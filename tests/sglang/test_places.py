"""Other data planes and other shapes of a pair answer what one SGLang answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engines import Prompt, at_once, eventually, start_all, stop_all
from tests.sglang.asking import BothLegs, ask, is_empty, random_prompts
from tests.sglang.conftest import Fleet
from tests.sglang.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.sglang, pytest.mark.timeout(480)]
CHUNKS = ("--chunked-prefill-size", "128")
RADIX = "--disaggregation-decode-enable-radix-cache"
COUNT = 16


@pytest.mark.parametrize(
    ("words", "prefill", "both"),
    [
        pytest.param((), {}, {"transfer_backend": "local", "page": 1}, id="local, page of 1"),
        pytest.param((RADIX,), {"stages": 2}, {}, id="two stages, decode keeps prefixes"),
        pytest.param((), {}, {"ranks": 2}, id="two ranks"),
        pytest.param((RADIX,), {"ranks": 2, "decode_tp_size": 1}, {}, id="two ranks at prefill"),
        pytest.param((), {}, {"transfer_backend": "nixl"}, id="nixl"),
    ],
)
async def test_answers_are_those_of_one_sglang(
    session: aiohttp.ClientSession,
    fleet: Fleet,
    model_of: Callable[[int], Path],
    logs: Path,
    seed: int,
    words: tuple[str, ...],
    prefill: dict[str, Any],
    both: dict[str, Any],
) -> None:
    model, name = model_of(1), "-".join(map(str, [*prefill.values(), *both.values()]))
    source = Server("prefill", model, logs, *CHUNKS, name=f"prefill-{name}", **prefill, **both)
    target = Server("decode", model, logs, *words, name=f"decode-{name}", **both)
    prompts = random_prompts(random.Random(seed), 16, 1000)

    async def one(prompt: Prompt) -> list[int]:
        return (await BothLegs(session, source, target, prompt, COUNT).answer()).tokens

    try:
        start_all([source, target])
        # With the second turn decode has prefixes of all prompts, where it keeps them.
        for _ in range(2):
            got = await at_once(6, [partial(one, prompt) for prompt in prompts])
            jobs = [partial(ask, session, fleet.single.url, prompt, COUNT) for prompt in prompts]
            wanted = await at_once(6, jobs)
            for prompt, ours, theirs in zip(prompts, got, wanted, strict=True):
                assert ours == theirs.tokens, len(prompt)
        for server in (source, target):
            await eventually(partial(is_empty, session, server), "it gives everything back")
    finally:
        stop_all([source, target])
