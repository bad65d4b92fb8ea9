"""Prefill's worker is frozen, or killed, while it writes into decode's blocks."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from functools import partial

import aiohttp
import pytest

from tests.engines import Prompt, eventually, random_prompt
from tests.vllm.asking import BothLegs, ask, is_empty, measure
from tests.vllm.conftest import LOST_AFTER_S, SLOW_BYTES_PER_S, Fleet

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(480)]
Session = aiohttp.ClientSession
COUNT = 16
LENGTH = 1400
MARGIN_S = 8.0  # for what a loaded machine does besides
QUARANTINE = "vllm:kvflow_quarantined_blocks"


class Caught:
    """Prompts on their way from the slow prefill to both decodes, a part of each written."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        rng = random.Random(seed)
        self.fleet = fleet
        self.prompts = [random_prompt(rng, LENGTH) for _ in range(3)]
        self.decodes = [fleet.failing, fleet.failing, fleet.recomputing]
        self.want: list[list[int]] = []
        self.legs: list[BothLegs] = []

    async def start(self, session: Session) -> None:
        """Return in the midst of the writes."""
        # The other decode computes what is to come, so that this one has nothing of it in its
        # cache.
        other = {
            self.fleet.failing.name: self.fleet.recomputing,
            self.fleet.recomputing.name: self.fleet.failing,
        }
        for prompt, decode in zip(self.prompts, self.decodes, strict=True):
            self.want.append((await ask(session, other[decode.name].url, prompt, COUNT)).tokens)
        failing = self.fleet.failing
        for prompt, decode in zip(self.prompts, self.decodes, strict=True):
            self.legs.append(BothLegs(session, self.fleet.slow_prefill, decode, prompt, COUNT))

        async def arrives() -> bool:
            return (
                await measure(session, failing.status_url, 'kvflow_rooms{state="transferring"}') > 0
            )

        await eventually(arrives, f"first blocks at {failing.name}")
        assert not any(leg.decode.done() for leg in self.legs)

    async def assert_told(self, within_s: float) -> None:
        """Two clients of an error and its cause; the third has the right tokens."""
        began = time.monotonic()
        async with asyncio.timeout(within_s):
            answers = [await leg.decode for leg in self.legs]
        print(f"all decodes had answered after {time.monotonic() - began:.2f} s")
        for answer in answers[:2]:
            assert answer.status == 502 and "kvflow: peer_lost" in answer.text, answer.text
            print(answer.text)
        assert answers[2].tokens == self.want[2]

    async def end(self) -> None:
        for leg in self.legs:
            leg.prefill.cancel()
        await asyncio.gather(*(leg.prefill for leg in self.legs), return_exceptions=True)


async def test_a_frozen_worker_keeps_blocks_in_quarantine_until_it_goes_on(
    session: Session, fleet: Fleet, seed: int
) -> None:
    caught, worker = Caught(fleet, seed), fleet.slow_prefill.worker
    await caught.start(session)
    worker.send_signal(signal.SIGSTOP)
    try:
        await caught.assert_told(LOST_AFTER_S + MARGIN_S)
        for server, count in ((fleet.failing, 2), (fleet.recomputing, 1)):
            for _ in range(3):  # steps of other requests do not change it
                await ask(session, server.url, [5, 6, 7], 1)
            async with session.get(f"{server.status_url}/health") as answer:
                health = await answer.json()
            blocks = count * (LENGTH // fleet.family.block)
            assert health["quarantined_blocks"] >= blocks, health
            await eventually(
                partial(is_held, session, server.url, blocks), "vLLM's own metric says so"
            )
    finally:
        worker.send_signal(signal.SIGCONT)
    for server in (fleet.failing, fleet.recomputing):
        await eventually(partial(is_empty, session, server), f"{server.name} has its blocks back")
    await caught.end()
    prompt: Prompt = random_prompt(random.Random(seed + 1), 100)
    again = await BothLegs(session, fleet.slow_prefill, fleet.failing, prompt, COUNT).answer()
    assert again.tokens == (await ask(session, fleet.recomputing.url, prompt, COUNT)).tokens


async def is_held(session: Session, url: str, blocks: int) -> bool:
    return await measure(session, url, QUARANTINE) >= blocks


async def test_a_killed_worker_is_an_error_or_computed_again(
    session: Session, fleet: Fleet, seed: int
) -> None:
    """The last of this fleet: vLLM ends with its worker."""
    caught = Caught(fleet, seed + 2)
    await caught.start(session)
    fleet.slow_prefill.worker.send_signal(signal.SIGKILL)
    # Sooner than the writes would have taken.
    await caught.assert_told(LENGTH * 4096 * 3 / SLOW_BYTES_PER_S)
    await caught.end()
    for server in (fleet.failing, fleet.recomputing):
        await eventually(partial(is_empty, session, server), f"{server.name} has its blocks back")
