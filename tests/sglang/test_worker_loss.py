"""A prefill that is frozen, and then one that is killed, while it writes into decode's pages."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvflow.testing.freezing import freeze
from tests.engines import eventually, random_prompt
from tests.sglang.asking import BothLegs, ask, is_empty
from tests.sglang.conftest import LOST_AFTER_S, Fleet

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(480)]
Session = aiohttp.ClientSession
COUNT = 16


@asynccontextmanager
async def writing(session: Session, fleet: Fleet) -> AsyncIterator[list[BothLegs]]:
    """Two requests, whose pages `slow` writes for some seconds."""
    rng = random.Random(9)
    legs = [
        BothLegs(session, fleet.slow, fleet.decode, random_prompt(rng, 1200), COUNT)
        for _ in range(2)
    ]
    await asyncio.sleep(1.5)
    assert not any(each.decode is None or each.decode.done() for each in legs)
    try:
        yield legs
    finally:
        for each in legs:
            await each.leave()


async def assert_serves(session: Session, fleet: Fleet) -> None:
    prompt = random_prompt(random.Random(10), 700)
    ours = await BothLegs(session, fleet.prefill, fleet.decode, prompt, COUNT).answer()
    assert ours.tokens == (await ask(session, fleet.single.url, prompt, COUNT)).tokens


async def errors_of(legs: list[BothLegs], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        for each in legs:
            assert each.decode is not None
            answer = await each.decode
            assert answer.status == 500 and "peer_lost" in answer.text, answer.text


async def test_pages_of_a_frozen_prefill_are_not_used(session: Session, fleet: Fleet) -> None:
    """SGLang would use them after 30 s at most. Here they wait until the prefill continues."""
    async with writing(session, fleet) as legs:
        scheduler = fleet.slow.scheduler()
        await freeze(scheduler.pid)
        try:
            await errors_of(legs, LOST_AFTER_S + 20)
            await assert_serves(session, fleet)
            await asyncio.sleep(3)
            assert not await is_empty(session, fleet.decode), "a frozen write may still land"
        finally:
            scheduler.send_signal(signal.SIGCONT)
        await eventually(lambda: is_empty(session, fleet.decode), "there is proof", 60)
    await assert_serves(session, fleet)


async def test_pages_of_a_killed_prefill_come_back(session: Session, fleet: Fleet) -> None:
    """The last test of `slow`: SGLang's other processes end with the scheduler."""
    async with writing(session, fleet) as legs:
        fleet.slow.scheduler().kill()
        await errors_of(legs, LOST_AFTER_S + 20)
        await eventually(lambda: is_empty(session, fleet.decode), "its death is proof", 60)
    await assert_serves(session, fleet)
