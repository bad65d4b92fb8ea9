"""The roles of docs/two-machines.md on two machines with a bad line between them.

Prefill is on one, decode, router and clients are on the other, over mooncake. Tokens are those of
one machine; aborts and a cut of the line leave nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest

from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from tests.chaos.machines import Line, Machine, two_machines, unavailable_reason
from tests.chaos.pair import until
from tests.e2e.fleet import ask, is_home, running
from tests.soak import sized

pytest.importorskip("mooncake.engine")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason()),
]

ROUTER, START_S, STOP_S = "http://127.0.0.1:8000", 120.0, 20.0
EACH = sized(4, 12)  # requests of each client of the storm
MODEL = ("--model-path", str(DEMO_MODEL_DIR), "--dtype", "float32", "--num-pages", "512")
PLANE = ("--disaggregation-transfer-backend", "mooncake")
PROMPTS = [*DEMO_PROMPTS[:4], " ".join(DEMO_PROMPTS), " ".join(DEMO_PROMPTS * 6)]
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@dataclass
class Roles:
    """What runs where. `session` is that of a client on decode's machine."""

    prefill: str
    decode: str
    line: Line
    session: aiohttp.ClientSession

    async def generate(self, prompt: str, url: str = ROUTER, **more: Any) -> tuple[int, Any]:
        body = {"text": prompt, "sampling_params": SAMPLING, **more}
        async with self.session.post(f"{url}/generate", json=body) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def is_home(self) -> bool:
        return all(
            [
                is_home(await ask(self.session, f"{url}/server_info"))
                for url in (self.prefill, self.decode)
            ]
        )

    async def is_transferring(self) -> bool:
        return "transferring" in (await ask(self.session, f"{self.prefill}/server_info"))["rooms"]

    async def holds_quarantine(self) -> bool:
        return bool((await ask(self.session, f"{self.decode}/server_info"))["quarantine_pages"])


@asynccontextmanager
async def role(machine: Machine, name: str, *flags: str, url: str) -> AsyncIterator[None]:
    """`kvflow NAME` on a machine, until it is healthy; told to leave at the end, and killed if it
    does not.
    """
    argv = machine.command(
        sys.executable, "-m", "kvflow.cli", name, "--drain-timeout-s", "1", *flags
    )
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    said = asyncio.create_task(process.stderr.read())
    try:
        async with (
            aiohttp.ClientSession(connector=machine.connector()) as session,
            asyncio.timeout(START_S),
        ):
            while not await is_healthy(session, url):
                if process.returncode is not None:
                    raise AssertionError(f"{name} ended: {(await said).decode()}")
                await asyncio.sleep(0.1)
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(OSError, ValueError):  # it has ended
                os.kill(machine.inner(process.pid), number)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
                    break
        print(name, (await said).decode()[-4000:])


async def is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    with suppress(aiohttp.ClientError):
        async with session.get(f"{url}/health") as answer:
            return answer.status == 200
    return False


@asynccontextmanager
async def roles(seed: int, *of_prefill: str, of_both: Sequence[str] = ()) -> AsyncIterator[Roles]:
    async with AsyncExitStack() as stack:
        here, there, line = await stack.enter_async_context(two_machines(seed))
        prefill, decode = f"http://{here.address}:30000", f"http://{there.address}:30001"
        workers = (
            (
                here,
                "prefill",
                ("--port", "30000", "--disaggregation-bootstrap-port", "8998", *of_prefill),
                prefill,
            ),
            (there, "decode", ("--port", "30001"), decode),
        )
        for machine, name, flags, url in workers:
            given = (*MODEL, *PLANE, "--host", machine.address, *of_both, *flags)
            await stack.enter_async_context(role(machine, name, *given, url=url))
        flags = ("--prefill", prefill, "--decode", decode, "--port", "8000", "--poll-s", "0.5")
        await stack.enter_async_context(role(there, "router", *flags, url=ROUTER))
        session = aiohttp.ClientSession(connector=there.connector())
        yield Roles(prefill, decode, line, await stack.enter_async_context(session))


async def single_machine() -> list[list[int]]:
    """What the prompts give where prefill and decode share a machine."""
    async with running() as fleet, aiohttp.ClientSession() as session:
        found = []
        for prompt in PROMPTS:
            async with session.post(
                f"{fleet.url}/generate", json={"text": prompt, "sampling_params": SAMPLING}
            ) as got:
                found.append((await got.json())["output_ids"])
        return found


async def test_an_abort_storm_and_a_line_that_is_cut_for_longer_than_patience(seed: int) -> None:
    """Tokens are those of one machine; nothing is left of clients that leave.

    While the line is cut, requests end with an error of their own, or wait for it, and the same
    processes serve as before: nobody is restarted or declared dead. TCP sends again later and
    later, so what was on its way may take as long as the cut.
    """
    expected = await single_machine()
    # With the cache, pages of a prompt that was served before do not travel, and nothing is cut.
    slow, uncached = ("--transfer-rate-limit", "8000000"), ("--prefix-cache", "off")
    async with roles(seed, *slow, of_both=uncached) as pair:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            status, answer = await pair.generate(prompt)
            assert status == 200, answer
            assert answer["output_ids"] == tokens
        await abort_storm(pair, expected, random.Random(seed))
        await until(pair.is_home)

        asking = [asyncio.create_task(pair.generate(PROMPTS[-1])) for _ in range(4)]
        await until(pair.is_transferring)
        await pair.line.cut()
        await until(pair.holds_quarantine)
        await pair.line.set()
        answers = await asyncio.gather(*asking)
        print(f"seed {seed}:", [(got, answer.get("error")) for got, answer in answers])
        for status, answer in answers:
            assert status in (200, 502, 503, 504), answer
            if status == 200:
                assert answer["output_ids"] == expected[-1]

        async def serves() -> bool:
            return (await pair.generate(PROMPTS[-1]))[0] == 200

        await until(serves, within_s=60)
        await until(pair.is_home, within_s=120)


async def abort_storm(pair: Roles, expected: list[list[int]], chance: random.Random) -> None:
    """Half of the clients leave."""
    ended: Counter[str] = Counter()

    async def lane() -> None:
        for _ in range(EACH):
            which = chance.randrange(len(PROMPTS))
            asking = asyncio.create_task(pair.generate(PROMPTS[which]))
            if chance.random() < 0.5:
                await asyncio.wait([asking], timeout=chance.uniform(0, 0.5))
                asking.cancel()
                await asyncio.wait([asking])
                if asking.cancelled():
                    ended["left"] += 1
                    continue
            status, answer = await asking
            assert status == 200, answer
            assert answer["output_ids"] == expected[which]
            ended["ended"] += 1

    async with asyncio.timeout(240):
        await asyncio.gather(*(lane() for _ in range(8)))
    print(f"{dict(ended)}, {await pair.line.counts()}")
    assert ended["left"] and ended["ended"]
