"""SGLang's own router in front of a fleet, in the place of ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import aiohttp

from kvflow.launch.supervisor import Fleet

ONE = {"text": "class", "sampling_params": {"temperature": 0, "max_new_tokens": 1}}


@contextlib.asynccontextmanager
async def sglang_router(fleet: Fleet) -> AsyncIterator[str]:
    with socket.socket() as free, socket.socket() as other:
        for unused in (free, other):
            unused.bind(("127.0.0.1", 0))
        port, metrics_port = free.getsockname()[1], other.getsockname()[1]
    prefill, decode = fleet.prefills[0], fleet.decodes[0]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation",
        "--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url,
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.post(f"{url}/generate", json=ONE) as answer:
                        if answer.status == 200:
                            break
                assert process.returncode is None
                await asyncio.sleep(0.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
