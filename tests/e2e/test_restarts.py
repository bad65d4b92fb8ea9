"""Workers that are restarted, killed and flooded under load: what their clients see of it."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from kvflow.serve.demo_model import DEMO_PROMPTS
from tests.e2e.fleet import all_home, ask
from tests.e2e.service import START_S, Service, serving
from tests.e2e.sglang import router_over
from tests.soak import sized

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets"), pytest.mark.timeout(600)]

CLIENTS, REQUESTS, FLOOD = 8, 500, sized(150, 400)
TOKENS = 64


class Ended(NamedTuple):
    """How one request ended: "done", or the error that its client got; after how many tokens, and
    seconds.
    """

    how: str
    tokens: int
    seconds: float
    stream: bool


async def generate(
    session: aiohttp.ClientSession, url: str, number: int, tokens: int = TOKENS
) -> Ended:
    """One request, every other one streamed."""
    stream = bool(number % 2)
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {
        "text": f"{DEMO_PROMPTS[number % len(DEMO_PROMPTS)]} {number}",
        "sampling_params": sampling,
    }
    began, got = time.monotonic(), 0
    try:
        async with session.post(f"{url}/generate", json={**body, "stream": stream}) as answer:
            if answer.status != 200:  # sglang_router's own text about a refused stream is not JSON
                how = " ".join(
                    [str(answer.status), *re.findall(r'"code": ?"(\w+)"', await answer.text())]
                )
            elif not stream:
                how, got = "done", len(msgspec.json.decode(await answer.read())["output_ids"])
            else:
                how, got = await _read_stream(answer)
    except (aiohttp.ClientError, msgspec.DecodeError) as error:
        how = type(error).__name__
    if how == "done":
        assert got == tokens, (number, got)
    return Ended(how, got, time.monotonic() - began, stream)


async def _read_stream(answer: aiohttp.ClientResponse) -> tuple[str, int]:
    """How a stream ended, and after how many tokens; each event repeats what came before it, with
    one token more.
    """
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
    """`REQUESTS` from `CLIENTS` clients, spread over the time that `disturb` takes: none of them
    waits for it.
    """
    numbers = iter(range(REQUESTS))
    ended: list[Ended] = []
    disturbing = asyncio.ensure_future(disturb())

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            ended.append(await generate(session, url, number))
            # The last ones come after it.
            if not disturbing.done() and REQUESTS - len(ended) < 2 * CLIENTS:
                await asyncio.wait([disturbing])

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
    await disturbing
    assert len(ended) == REQUESTS
    return ended


def told(name: str, ended: list[Ended]) -> None:
    """Print how the requests ended."""
    ways = Counter(one.how for one in ended)
    seconds = sorted(one.seconds for one in ended)
    print(
        f"{name}: {dict(ways)}; {seconds[len(seconds) // 2]:.2f} s median, {seconds[-1]:.2f} s at "
        "most"
    )


async def retries(session: aiohttp.ClientSession, url: str) -> dict[str, int]:
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = [line for line in lines if line.startswith("kvflow_retries_total{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in found}


async def rolling(service: Service, pause_s: float = 0.0) -> None:
    """Every worker once, one after another."""
    for name in (*service.names("prefill"), *service.names("decode")):
        drained_s = await service.restart(name)
        print(f"  {name} restarted, drained in {drained_s:.2f} s")
        await asyncio.sleep(pause_s)


# tests/e2e/test_fleet.py restarts and kills workers under load, one by one. In a soak it is every
# worker after another, and a router that finds out for itself.
@pytest.mark.soak
async def test_a_rolling_restart_loses_nothing() -> None:
    async with serving() as service, aiohttp.ClientSession() as session:
        url = await service.start_router()
        ended = await under_load(url, lambda: rolling(service))
        told("rolling restart, kvflow router", ended)
        print(f"  retries by why: {await retries(session, url)}")
        assert Counter(one.how for one in ended) == {"done": REQUESTS}
        assert await all_home(session, *map(service.url, service.workers))


# As it comes, a worker that was away is out for its breaker's minute, and the next restart finds no
# pair left. Without the breaker, asking for health every second; five tries, half a second of them,
# may all meet a worker that drains:
SGLANG = {
    "as it comes": (),
    "no breaker": (
        *(
            "--health-check-interval-secs",
            "1",
            "--health-failure-threshold",
            "1",
            "--health-success-threshold",
            "1",
        ),
        *("--disable-circuit-breaker", "--policy", "round_robin", "--retry-max-retries", "10"),
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("options", SGLANG.values(), ids=SGLANG.keys())
async def test_a_rolling_restart_behind_sglang_router(options: tuple[str, ...]) -> None:
    async with serving() as service, aiohttp.ClientSession() as session:
        prefills = [
            (service.url(name), service.bootstrap_port(name)) for name in service.names("prefill")
        ]
        async with router_over(
            prefills, [*map(service.url, service.names("decode"))], *options
        ) as url:
            # It is not told who is back.
            ended = await under_load(url, lambda: rolling(service, pause_s=3.0))
        told(f"rolling restart, sglang_router {' '.join(options)}", ended)
        lost = [one for one in ended if one.how != "done"]
        assert all(one.how.startswith("50") and not one.tokens for one in lost), lost
        assert not (options and lost)
        assert await all_home(session, *map(service.url, service.workers))


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_killed_worker_costs_only_what_had_its_first_token(victim: str) -> None:
    async with serving(transfer_rate_limit=1 << 19) as service, aiohttp.ClientSession() as session:
        url = await service.start_router()

        async def kill() -> None:
            info: dict[str, Any] = {"rooms_ended": {}}
            async with asyncio.timeout(START_S):
                while info["rooms_ended"].get("success", 0) < 20 or not info["rooms"]:
                    await asyncio.sleep(0.002)
                    info = await ask(session, f"{service.url(victim)}/server_info")
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


@pytest.mark.parametrize("pairs", [pytest.param(2, marks=pytest.mark.soak), 1])
async def test_many_at_once_are_all_served(pairs: int) -> None:
    async with (
        serving(pairs, max_running_requests=256) as service,
        aiohttp.ClientSession() as session,
    ):
        await all_served(session, service, FLOOD)


async def all_served(session: aiohttp.ClientSession, service: Service, requests: int) -> None:
    url = await service.start_router()
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as flood:
        asking = (generate(flood, url, number, 24) for number in range(requests))
        ended = await asyncio.gather(*asking)
    told(f"{requests} at once", ended)
    assert Counter(one.how for one in ended) == {"done": requests}
    assert await retries(session, url) == {}
    assert await all_home(session, *map(service.url, service.workers))


async def test_legs_that_arrive_in_opposite_orders_do_not_wait_in_a_circle() -> None:
    """Two places at each side: in order of arrival they would go to rooms whose other leg waits.

    A queue through the router is served, too.
    """
    async with serving(1, max_running_requests=2) as service, aiohttp.ClientSession() as session:
        [prefill], [decode] = service.names("prefill"), service.names("decode")
        meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": service.bootstrap_port(prefill)}
        sampling = {"temperature": 0, "max_new_tokens": 4}

        async def post(name: str, room: int) -> int:
            body = {
                "text": DEMO_PROMPTS[0],
                "sampling_params": sampling,
                "bootstrap_room": room,
                **meeting,
            }
            async with session.post(f"{service.url(name)}/generate", json=body) as answer:
                await answer.read()
                return answer.status

        legs = [post(prefill, room) for room in range(1, 33)] + [
            post(decode, room) for room in range(32, 0, -1)
        ]
        async with asyncio.timeout(60):
            assert set(await asyncio.gather(*legs)) == {200}
        assert await all_home(session, *map(service.url, service.workers))
        await all_served(session, service, 60)


async def test_workers_that_are_stopped_finish_their_transfers() -> None:
    async with (
        serving(1, transfer_rate_limit=1 << 17) as service,
        aiohttp.ClientSession() as session,
    ):
        url = await service.start_router()
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"text": " ".join(DEMO_PROMPTS) * 4, "sampling_params": sampling}
        asking = asyncio.create_task(session.post(f"{url}/generate", json=body))
        async with asyncio.timeout(START_S):
            while (
                "transferring"
                not in (await ask(session, f"{service.url('prefill-0')}/server_info"))["rooms"]
            ):
                await asyncio.sleep(0.01)
        stopping = [
            asyncio.create_task(worker.stop(START_S)) for worker in service.workers.values()
        ]
        async with await asyncio.wait_for(asking, START_S) as answer:
            assert (answer.status, len((await answer.json())["output_ids"])) == (200, 8)
        assert await asyncio.wait_for(asyncio.gather(*stopping), START_S) == [0, 0]
