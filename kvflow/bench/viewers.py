"""`kvflow bench viewers`: requests per second with viewers of the live page, and without.

In each turn, the same requests run once beside viewers and once without, in alternating order, so
both sides of a ratio come from one turn. The viewers read the stream of the page and discard it:
what a browser draws costs its own machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvflow.bench.figures import Say, extremes
from kvflow.bench.serve import prompt_of, serving
from kvflow.protocols.errors import KvflowError
from kvflow.serve.demo_model import DEMO_MODEL_DIR


async def bench_viewers(
    viewers: int, clients: int, requests: int, turns: int, threads: int, say: Say
) -> dict[str, Any]:
    """Return requests per second and CPU time of the roles, beside `viewers` and without.

    Raises: KvflowError if the server does not start, or if a request fails.
    """
    seen: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    async with (
        serving(str(DEMO_MODEL_DIR), threads) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        url = server.urls["router"]
        # Turn -1 warms up and does not count.
        for turn in range(-1, turns):
            for watched in (False, True) if turn % 2 else (True, False):
                async with watching(url, viewers if watched else 0) as looks:
                    before_s = sum(server.cpu_s().values())
                    rate = await _rate(session, url, clients, requests)
                    cpu_s = sum(server.cpu_s().values()) - before_s
                if watched and not min(looks):
                    raise KvflowError("a viewer got no snapshot")
                if turn >= 0:
                    seen[watched].append(rate)
                    cpu[watched].append(cpu_s / requests * 1e3)
            if turn >= 0:
                say(f"turn {turn}: {seen[True][-1]:.1f} of {seen[False][-1]:.1f} requests/s")
    ratios = [a / b for a, b in zip(seen[True], seen[False], strict=True)]
    return {
        "viewers": viewers,
        "clients": clients,
        "ratio": extremes(ratios),
        "ratio_of_means": round(statistics.mean(seen[True]) / statistics.mean(seen[False]), 4),
        "requests_per_s": {"watched": extremes(seen[True]), "alone": extremes(seen[False])},
        "cpu_ms_per_request": {"watched": extremes(cpu[True]), "alone": extremes(cpu[False])},
    }


async def _rate(session: aiohttp.ClientSession, url: str, clients: int, requests: int) -> float:
    """Return the requests per second of `clients` that share `requests` completions."""
    left = iter(range(requests))

    async def ask() -> None:
        for index in left:
            sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            body = {"input_ids": prompt_of(index), "sampling_params": sampling}
            async with session.post(f"{url}/generate", json=body) as answer:
                if answer.status != 200:
                    raise KvflowError(f"a request failed: {(await answer.text())[:300]}")
                await answer.read()

    begun = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(clients)))
    return requests / (time.perf_counter() - begun)


@asynccontextmanager
async def watching(url: str, viewers: int) -> AsyncIterator[list[int]]:
    """Let so many viewers look. Yields how many snapshots each has got, which grows."""
    looks = [0] * viewers
    begun = [asyncio.Event() for _ in looks]
    tasks = [asyncio.create_task(_view(url, i, looks, begun[i])) for i in range(viewers)]
    try:
        await asyncio.gather(*(event.wait() for event in begun))
        yield looks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _view(url: str, number: int, looks: list[int], begun: asyncio.Event) -> None:
    # The sockets are bare, because an HTTP client's own CPU time would count as the page's.
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=4 << 20)
    try:
        writer.write(f"GET /overview/events HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
        while piece := await reader.read(1 << 16):
            looks[number] += piece.count(b"event: snapshot")
            if looks[number]:
                begun.set()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
