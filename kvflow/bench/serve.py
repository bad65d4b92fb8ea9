"""`kvflow bench serve`: tokens per second of `kvflow up`, compared with stock `generate`.

Stock transformers runs in one process with the same number of threads, and completes the same
prompts as one batch. In each turn, stock completes the batch, and then the same prompts run as
concurrent streams through the router of every server, so both sides of a ratio come from one turn.
Afterwards the bench times short GETs while many streams run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvflow.bench.figures import Say, extremes
from kvflow.bench.pair import Process, checkout_env
from kvflow.protocols.errors import KvflowError
from kvflow.serve.demo_model import DEMO_MODEL_DIR

PROMPT_TOKENS = 32
PING_PAUSE_S = 0.01
START_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 15.0
HERE = "this tree"


@dataclass(frozen=True)
class Server:
    """One `kvflow up`, with the URLs and the process ids of its roles by name."""

    urls: dict[str, str]
    pids: dict[str, int]

    def cpu_s(self) -> dict[str, float]:
        return {role: cpu_of(pid) for role, pid in self.pids.items()}


@dataclass(frozen=True)
class ServePlan:
    """Parameters of `bench_serve`. `trees` are other checkouts to measure in the same turns."""

    model: str = ""
    api: str = "completions"
    clients: tuple[int, ...] = (1, 16)
    new_tokens: int = 256
    turns: int = 5
    threads: int = 1
    streams: int = 256
    stream_tokens: int = 64
    trees: tuple[str, ...] = ()


async def bench_serve(plan: ServePlan, say: Say) -> dict[str, Any]:
    """Measure every server against stock transformers.

    Returns {"clients": {number: {server: figures}}, "beside": {server: latencies of GETs}}.

    Raises: KvflowError if a server does not start, or if its tokens differ from stock's.
    """
    model = plan.model or str(DEMO_MODEL_DIR)
    chosen = {"api": plan.api, "new_tokens": plan.new_tokens, "threads": plan.threads}
    report: dict[str, Any] = {**chosen, "clients": {}}
    async with AsyncExitStack() as stack:
        stock, client = [
            await stack.enter_async_context(await Process.run_module(f"kvflow.bench.{module}"))
            for module in ("stock_worker", "stream_client")
        ]
        await stock.ask("setup", model=model, threads=plan.threads)
        servers: dict[str, Server] = {}
        for tree in ("", *plan.trees):
            servers[tree or HERE] = await stack.enter_async_context(
                serving(model, plan.threads, tree)
            )
        for clients in plan.clients:
            report["clients"][str(clients)] = await _beside_stock(
                plan, clients, servers, stock, client, say
            )
        if plan.streams:
            report["beside"] = {
                name: await _gets_beside_streams(plan, urls, client)
                for name, urls in servers.items()
            }
            say(f"GETs beside {plan.streams} streams: {report['beside']}")
    return report


async def _beside_stock(
    plan: ServePlan,
    clients: int,
    servers: dict[str, Server],
    stock: Process,
    client: Process,
    say: Say,
) -> dict[str, Any]:
    """Measure stock and every server with `clients` streams, and return each server's figures."""
    prompts = [prompt_of(i) for i in range(clients)]
    total = clients * plan.new_tokens
    seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in servers}
    cpu: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    # Turn -1 warms up and does not count.
    for turn in range(-1, plan.turns):
        before_s = cpu_of(stock.pid)
        reference = await stock.ask("generate", prompts=prompts, new_tokens=plan.new_tokens)
        stock_cpu_s = cpu_of(stock.pid) - before_s
        names = list(servers)
        # The order alternates, so that no server always runs first.
        for name in names[:: 1 if turn % 2 else -1]:
            before = servers[name].cpu_s()
            got = await _streamed(
                client, servers[name].urls["router"], plan.api, prompts, plan.new_tokens
            )
            cpu_us = {
                role: (s - before[role]) / total * 1e6 for role, s in servers[name].cpu_s().items()
            }
            cpu_us["stock"] = stock_cpu_s / total * 1e6
            _check(name, got["tokens"], reference["tokens"], plan.new_tokens)
            if turn >= 0:
                rates = (
                    total / got["seconds"],
                    (total - clients) / got["after_first_s"],
                    got["first_s"] * 1e3,
                )
                seen[name].append((total / reference["seconds"], *rates))
                cpu[name].append(cpu_us)
    return _summary(clients, seen, cpu, say)


def _summary(
    clients: int,
    seen: dict[str, list[tuple[float, ...]]],
    cpu: dict[str, list[dict[str, float]]],
    say: Say,
) -> dict[str, Any]:
    """Return the spread of rates, first-token times and CPU times over all turns, by server."""
    found: dict[str, Any] = {}
    for name, turns in seen.items():
        cpu_us = {role: extremes([of[role] for of in cpu[name]]) for role in cpu[name][0]}
        figures = found[name] = {
            "ratio": extremes([rate / stock for stock, rate, _, _ in turns]),
            "ratio_after_first": extremes([later / stock for stock, _, later, _ in turns]),
            "tokens_per_s": extremes([rate for _, rate, _, _ in turns]),
            "stock_tokens_per_s": extremes([stock for stock, _, _, _ in turns]),
            "first_token_ms": extremes([first_ms for _, _, _, first_ms in turns]),
            "cpu_us_per_token": cpu_us,
        }
        rates = f"{figures['ratio']} of stock, {figures['tokens_per_s']} tokens/s"
        say(f"{clients} clients, {name}: {rates}")
        say(f"CPU us per token: { {role: us['median'] for role, us in cpu_us.items()} }")
    return found


async def _gets_beside_streams(plan: ServePlan, server: Server, client: Process) -> dict[str, Any]:
    """Return latencies of GET /health at router and decode, when idle and during streams."""
    found: dict[str, Any] = {}
    for beside in (0, plan.streams):
        streams: asyncio.Future[Any] | None = None
        if beside:
            prompts = [prompt_of(i) for i in range(beside)]
            streams = asyncio.ensure_future(
                _streamed(client, server.urls["router"], plan.api, prompts, plan.stream_tokens)
            )
        for name, latencies in (await _pings(server.urls, streams)).items():
            p50, p99, largest = np.percentile(latencies, (50, 99, 100)) * 1e3
            found[f"{name} {'beside' if beside else 'idle'}"] = {
                "gets": len(latencies),
                "p50_ms": round(float(p50), 2),
                "p99_ms": round(float(p99), 2),
                "max_ms": round(float(largest), 2),
            }
        if streams is not None:
            got = await streams
            found["tokens_per_s"] = round(beside * plan.stream_tokens / got["seconds"], 1)
    return found


async def _pings(urls: dict[str, str], until: asyncio.Future[Any] | None) -> dict[str, list[float]]:
    """Send GETs to router and decode, and return the seconds that each took, by role.

    The GETs end when `until` is done. If `until` is None, each role receives 100.
    """
    # The sockets are bare, because an HTTP client's own CPU time would count as latency.
    seen: dict[str, list[float]] = {"router": [], "decode": []}
    connections = {role: await _connected(urls[role]) for role in seen}
    try:
        while len(seen["router"]) < 100 if until is None else not until.done():
            for role, (reader, writer) in connections.items():
                begun = time.perf_counter()
                writer.write(
                    f"GET /health HTTP/1.1\r\nHost: {urlsplit(urls[role]).netloc}\r\n\r\n".encode()
                )
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line[15:])
                    for line in head.split(b"\r\n")
                    if line.startswith(b"Content-Length:")
                )
                await reader.readexactly(length)
                seen[role].append(time.perf_counter() - begun)
            await asyncio.sleep(PING_PAUSE_S)
    finally:
        for _, writer in connections.values():
            writer.close()
    return seen


async def _connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def _streamed(
    client: Process, url: str, api: str, prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    return await client.ask("stream", url=url, api=api, prompts=prompts, new_tokens=new_tokens)


def _check(name: str, tokens: list[Any], expected: list[list[int]], new_tokens: int) -> None:
    """Raise KvflowError unless every stream has stock's tokens.

    If the API sends no token ids, only the number of tokens is compared.
    """
    for i, found in enumerate(tokens):
        if found != (expected[i] if isinstance(found, list) else new_tokens):
            raise KvflowError(f"{name}: stream {i} has {found}, stock generate {expected[i]}")


def prompt_of(index: int) -> list[int]:
    """Return token ids in the demo model's vocabulary, different ones for each index."""
    return [(j * 7 + index * 13) % 4000 + 3 for j in range(PROMPT_TOKENS)]


@asynccontextmanager
async def serving(
    model: str, threads: int, tree: str = "", arguments: tuple[str, ...] = ()
) -> AsyncIterator[Server]:
    """Run `kvflow up` from this checkout, or from `tree`.

    Raises: KvflowError if it ends before it is ready, TimeoutError if it takes too long to start.
    """
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    given = ("--port=0", f"--model-path={model}", "--log-level=warning", "--prefix-cache=off")
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "kvflow.cli", "up", *given, *arguments),
        stdout=asyncio.subprocess.PIPE,
        env=env | checkout_env(tree),
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            server = await _announced(child)
        yield server
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await child.wait()
        if child.returncode is None:
            child.kill()
            await child.wait()


async def _announced(child: asyncio.subprocess.Process) -> Server:
    """Read the roles that `kvflow up` prints once all are healthy.

    Each line has a name, a URL, the word "pid" and a process id.
    """
    server = Server({}, {})
    assert child.stdout is not None
    while "router" not in server.urls:
        line = (await child.stdout.readline()).decode().split()
        if not line:
            raise KvflowError(
                f"kvflow up ended with status {await child.wait()} before it was ready"
            )
        server.urls[line[0]], server.pids[line[0]] = line[1], int(line[3])
    return server


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of all threads of a process. Raises: OSError if it has ended."""
    # /proc counts ticks of 10 ms, in which a short answer may take no time. This is the clock of
    # `clock_getcpuclockid(3)`, which Python does not have for other processes.
    return time.clock_gettime((~pid << 3) | 2)
