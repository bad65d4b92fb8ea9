"""SGLang's own router in front of a fleet, in the place of ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence

import aiohttp

from kvflow.serve.launch.supervisor import Fleet
from tests.ports import free_port

ONE = {"text": "class", "sampling_params": {"temperature": 0, "max_new_tokens": 1}}


@contextlib.asynccontextmanager
async def sglang_router(fleet: Fleet) -> AsyncIterator[str]:
    """In front of the first prefill and the first decode; it has served a request."""
    prefill, decode = fleet.prefills[0], fleet.decodes[0]
    assert prefill.bootstrap_port is not None
    async with router_of(prefill.url, prefill.bootstrap_port, decode.url) as url:
        yield url


@contextlib.asynccontextmanager
async def router_of(
    prefill: str, bootstrap_port: int, decode: str, *, served: bool = True
) -> AsyncIterator[str]:
    """In front of one pair.

    Without `served` it is enough that it knows both, whatever they answer.
    """
    async with router_over([(prefill, bootstrap_port)], [decode], served=served) as url:
        yield url


@contextlib.asynccontextmanager
async def router_over(
    prefills: Sequence[tuple[str, int]], decodes: Sequence[str], *options: str, served: bool = True
) -> AsyncIterator[str]:
    """In front of prefills (URL, bootstrap port) and decodes, with more `options` of its own."""
    port, metrics_port = free_port(), free_port()
    workers = [word for url, port in prefills for word in ("--prefill", url, str(port))]
    workers += [word for url in decodes for word in ("--decode", url)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sglang_router.launch_router",
        "--pd-disaggregation",
        *workers,
        *options,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-port",
        str(metrics_port),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    ready = (
                        session.post(f"{url}/generate", json=ONE)
                        if served
                        else session.get(f"{url}/readiness")
                    )
                    async with ready as answer:
                        if answer.status == 200:
                            break
                assert process.returncode is None
                await asyncio.sleep(0.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
