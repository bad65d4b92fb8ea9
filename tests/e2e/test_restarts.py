"""Workers that are restarted, killed and flooded under load: what their clients see of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from kvflow.config import flag_of
from kvflow.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.launch.child import Child
from tests.e2e.fleet import all_home, ask

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes"), pytest.mark.timeout(600)]

START_S = 120.0
CLIENTS, REQUESTS = 8, 500
TOKENS = 64


class Ended(NamedTuple):
    """How one request ended: "done", or the error that its client got; after how many tokens, and seconds."""

    how: str
    tokens: int
    seconds: float
    stream: bool


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


class Service:
    """Two prefills and two decodes at ports of their own, which they keep when they are restarted."""

    def __init__(self, **changes: Any) -> None:
        common = {"model_path": str(DEMO_MODEL_DIR), "num_pages": 512, "dtype": "float32", "drain_timeout_s": 60}
        self._flags = {**common, **changes}
        self._ports = {f"{role}-{i}": (free_port(), free_port()) for role in ("prefill", "decode") for i in range(2)}
        self.workers: dict[str, Child] = {}
        self.router: Child | None = None

    def names(self, role: str) -> list[str]:
        return [name for name in self._ports if name.startswith(role)]

    def bootstrap_port(self, name: str) -> int:
        return self._ports[name][1]

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name][0]}"

    async def start(self, name: str) -> None:
        role = name.partition("-")[0]
        port, bootstrap_port = self._ports[name]
        flags = {**self._flags, "port": port}
        if role == "prefill":
            flags["disaggregation_bootstrap_port"] = bootstrap_port
        words = [word for flag, value in flags.items() for word in (flag_of(flag), str(value))]
        self.workers[name] = Child(name, role, words, quiet=True)
        await self.workers[name].start(os.environ, START_S)

    async def restart(self, name: str) -> float:
        """SIGTERM, wait for its end, start it again at the same port. Returns the seconds that its drain took."""
        began = time.monotonic()
        assert await self.workers[name].stop(START_S) == 0
        drained_s = time.monotonic() - began
        await self.start(name)
        return drained_s

    async def start_router(self, **changes: Any) -> str:
        urls = [word for name in self._ports for word in (f"--{name.partition('-')[0]}", self.url(name))]
        words = [word for flag, value in changes.items() for word in (flag_of(flag), str(value))]
        self.router = Child("router", "router", ["--port", "0", *urls, *words], quiet=True)
        await self.router.start(os.environ, START_S)
        return self.router.url

    async def stop(self) -> None:
        children = [*self.workers.values(), *([self.router] if self.router else [])]
        for child in children:
            child.kill()
        for child in children:
            await child.stop(1.0)


@asynccontextmanager
async def serving(**changes: Any) -> AsyncIterator[Service]:
    service = Service(**changes)
    try:
        await asyncio.gather(*(service.start(name) for role in ("prefill", "decode") for name in service.names(role)))
        yield service
    finally:
        await service.stop()


async def generate(session: aiohttp.ClientSession, url: str, number: int, tokens: int = TOKENS) -> Ended:
    """One request, every other one streamed."""
    stream = bool(number % 2)
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"text": f"{DEMO_PROMPTS[number % len(DEMO_PROMPTS)]} {number}", "sampling_params": sampling}
    began, got = time.monotonic(), 0
    try:
        async with session.post(f"{url}/generate", json={**body, "stream": stream}) as answer:
            if not stream or answer.status != 200:
                document = msgspec.json.decode(await answer.read())
                how = "done" if answer.status == 200 else f"{answer.status} {document['error']['code']}"
                got = len(document.get("output_ids", ()))
            else:
                how, got = await _read_stream(answer)
    except (aiohttp.ClientError, msgspec.DecodeError) as error:
        how = type(error).__name__
    if how == "done":
        assert got == tokens, (number, got)
    return Ended(how, got, time.monotonic() - began, stream)


async def _read_stream(answer: aiohttp.ClientResponse) -> tuple[str, int]:
    """How a stream ended, and after how many tokens; each event repeats what came before it, with one token more."""
    got: list[int] = []
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            return "done", len(got)
        event = msgspec.json.decode(line[6:])
        if "error" in event:
            return f"event {event['error']['code']}", len(got)
        assert event["output_ids"][: len(got)] == got, "another generation"
        got = event["output_ids"]
    return "cut off", len(got)


async def under_load(url: str, disturb: Callable[[], Awaitable[None]]) -> list[Ended]:
    """`REQUESTS` from `CLIENTS` clients, spread over the time that `disturb` takes: none of them waits for it."""
    numbers = iter(range(REQUESTS))
    ended: list[Ended] = []
    disturbing = asyncio.ensure_future(disturb())

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            ended.append(await generate(session, url, number))
            if not disturbing.done() and REQUESTS - len(ended) < 2 * CLIENTS:  # the last ones come after it
                await asyncio.wait([disturbing])

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
    await disturbing
    assert len(ended) == REQUESTS
    return ended


def told(name: str, ended: list[Ended]) -> None:
    """Print how the requests ended."""
    ways = Counter(one.how for one in ended)
    seconds = sorted(one.seconds for one in ended)
    print(f"{name}: {dict(ways)}; {seconds[len(seconds) // 2]:.2f} s median, {seconds[-1]:.2f} s at most")


async def retries(session: aiohttp.ClientSession, url: str) -> dict[str, int]:
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = [line for line in lines if line.startswith("kvflow_retries_total{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in found}


async def rolling(service: Service) -> None:
    """Every worker once, one after another."""
    for name in (*service.names("prefill"), *service.names("decode")):
        drained_s = await service.restart(name)
        print(f"  {name} restarted, drained in {drained_s:.2f} s")


async def test_a_rolling_restart_loses_nothing() -> None:
    async with serving() as service, aiohttp.ClientSession() as session:
        url = await service.start_router()
        ended = await under_load(url, lambda: rolling(service))
        told("rolling restart, kvflow router", ended)
        print(f"  retries by why: {await retries(session, url)}")
        assert Counter(one.how for one in ended) == {"done": REQUESTS}
        assert await all_home(session, *map(service.url, service.workers))


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_killed_worker_costs_only_what_had_its_first_token(victim: str) -> None:
    async with serving() as service, aiohttp.ClientSession() as session:
        url = await service.start_router()

        async def kill() -> None:
            served = 0
            async with asyncio.timeout(START_S):
                while served < 20:
                    await asyncio.sleep(0.01)
                    served = (await ask(session, f"{service.url(victim)}/server_info"))["rooms_ended"].get("success", 0)
            service.workers[victim].process.send_signal(signal.SIGKILL)
            await service.workers[victim].process.wait()
            await service.start(victim)

        ended = await under_load(url, kill)
        told(f"kill -9 of {victim}", ended)
        print(f"  retries by why: {await retries(session, url)}")
        lost = [one for one in ended if one.how != "done"]
        assert all(one.stream and one.tokens and one.how == "event peer_lost" for one in lost), lost
        assert len(lost) <= CLIENTS
        assert await all_home(session, *map(service.url, service.workers))


async def test_four_hundred_at_once_are_all_served() -> None:
    async with serving() as service, aiohttp.ClientSession() as session:
        url = await service.start_router()
        timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as flood:
            ended = await asyncio.gather(*(generate(flood, url, number) for number in range(400)))
        told("400 at once", ended)
        assert Counter(one.how for one in ended) == {"done": 400}
        assert await retries(session, url) == {}
        assert await all_home(session, *map(service.url, service.workers))
