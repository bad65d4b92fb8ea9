"""Sliding windows in rows, or in pages: what prefill and decode that were started otherwise say to
a client.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvflow.serve.config.catalog import flag_of
from kvflow.serve.launch.child import Child
from tests.e2e.fleet import all_home, ask, running

PROMPT, NEW = [(i * i * 31 + i * 7) % 509 + 2 for i in range(50)], 12
BODY = {
    "input_ids": PROMPT,
    "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
}
Tiny = Callable[[str], Path]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(f"{url}/generate", json=body) as answer:
        return await answer.json()


@pytest.mark.parametrize("rings", ["auto", pytest.param("never", marks=pytest.mark.soak)])
async def test_one_flag_for_the_whole_fleet(
    rings: str, tiny: Tiny, expected: Callable[[str, list[int], int], list[int]]
) -> None:
    path = str(tiny("gpt_oss"))
    async with (
        running(model_path=path, served_model_name="tiny", sliding_window_rows=rings) as fleet,
        aiohttp.ClientSession() as session,
    ):
        answers = await asyncio.gather(*(post(session, fleet.url, BODY) for _ in range(3)))
        assert [answer["output_ids"] for answer in answers] == [
            expected("gpt_oss", PROMPT, NEW)
        ] * 3
        info = await ask(session, f"{fleet.decodes[0].url}/server_info")
        assert bool(info["rows"]["total"]) == (rings == "auto")
        assert await all_home(session, *(child.url for child in (*fleet.prefills, *fleet.decodes)))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("sliding_window_rows", "never"),
        pytest.param("attention", "pad", marks=pytest.mark.soak),
    ],
    ids=["never", "pad"],
)
async def test_a_decode_that_was_started_otherwise_is_refused(
    flag: str, value: str, tiny: Tiny
) -> None:
    """Both legs are told what differs, in the word of the flag."""
    given = {"model_path": str(tiny("gpt_oss")), "port": 0, "num_pages": 64, "dtype": "float32"}
    settings = {
        "prefill": {**given, "disaggregation_bootstrap_port": 0},
        "decode": {**given, flag: value},
    }
    children = {
        role: Child(
            role,
            role,
            [word for name, set_to in own.items() for word in (flag_of(name), str(set_to))],
            quiet=True,
        )
        for role, own in settings.items()
    }
    try:
        await asyncio.gather(*(child.start(os.environ, 120) for child in children.values()))
        port = children["prefill"].bootstrap_port
        legs = {**BODY, "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 7}
        async with aiohttp.ClientSession() as session:
            answers = await asyncio.gather(
                *(post(session, child.url, legs) for child in children.values())
            )
        for answer in answers:
            assert (
                "layer0.k.sliding_window_rows: only prefill has it" in answer["error"]["message"]
            ), answer
    finally:
        for child in children.values():
            child.kill()
        for child in children.values():
            await child.stop(1.0)
