"""An operator's day: keys on both planes, a prefill that freezes with pages in its hands, and how
it is ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvflow.serve.demo_model import DEMO_PROMPTS
from kvflow.serve.launch.child import Child
from kvflow.testing.freezing import freeze
from kvflow.transports.control.curve import write_key
from tests.e2e.fleet import WITHIN_S, all_home, ask, running

KEY = "sesame"
BODY = {
    "text": " ".join(DEMO_PROMPTS) * 4,
    "sampling_params": {"temperature": 0, "max_new_tokens": 4},
}


async def generate(session: aiohttp.ClientSession, url: str, **changes: Any) -> tuple[int, Any]:
    async with session.post(f"{url}/generate", json={**BODY, **changes}) as answer:
        return answer.status, msgspec.json.decode(await answer.read())


async def health(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with session.get(f"{url}/health") as answer:
        return answer.status, await answer.text()


async def declare_dead(url: str, key: str, incarnation: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvflow.cli",
        "declare-dead",
        "--url",
        url,
        "--why",
        "it burnt down",
        incarnation,
        env={**os.environ, "KVFLOW_ADMIN_API_KEY": key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def busy(session: aiohttp.ClientSession, prefills: list[Child]) -> tuple[Child, Child]:
    """The prefill in the middle of a transfer, and the other one."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            for prefill, other in (prefills, reversed(prefills)):
                if "transferring" in (await ask(session, f"{prefill.url}/server_info"))["rooms"]:
                    return prefill, other
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_a_frozen_prefill_of_this_host_is_ended_and_not_declared_dead(tmp_path: Path) -> None:
    write_key(str(tmp_path / "key"))
    limits = {
        "prefill_workers": 2,
        "max_quarantine_share": 0.0,
        "transfer_rate_limit": 1 << 17,
        "num_pages": 512,
    }
    keys = {"api_key": "clients", "admin_api_key": KEY, "control_key_file": str(tmp_path / "key")}
    async with (
        running(**limits, **keys) as fleet,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
    ):
        decode = fleet.decodes[0].url
        asking = asyncio.create_task(generate(session, fleet.url))
        frozen, other = await busy(session, fleet.prefills)
        incarnation = (await ask(session, f"{frozen.url}/server_info"))["incarnation"]
        await freeze(frozen.process.pid)
        try:
            status, answer = await asyncio.wait_for(asking, 40)
            # The prefill is lost before the first token, so the router tries the other one: at the
            # same decode. Unless a check has found that decode in quarantine before its answer was
            # there: then there is none to try.
            error = answer["error"]
            refused = status == 503 and "pages are in quarantine" in error["message"]
            assert refused or (status, error["code"]) == (502, "peer_lost"), answer
            status, text = await health(session, decode)
            assert status == 503 and "pages are in quarantine" in text
            meeting = {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": other.bootstrap_port,
                "bootstrap_room": 5,
            }
            status, answer = await generate(session, decode, **meeting)
            assert status == 503 and "pages are in quarantine" in answer["error"]["message"]
            async with session.get(f"{decode}/metrics") as metrics:
                lines = (await metrics.text()).splitlines()
            assert (
                'kvflow_peers{phase="silent"} 1.0' in lines
                and "kvflow_quarantine_limit_pages 0.0" in lines
            )
            [peer] = [
                p
                for p in (await ask(session, f"{decode}/peers"))["peers"]
                if p["phase"] == "silent"
            ]
            assert (
                peer["incarnation"] == incarnation
                and peer["quarantine_pages"] > 0
                and peer["loans"] == 1
            )
            code, said = await declare_dead(decode, "guessed", incarnation)
            assert code == 2 and "401" in said
            assert (await health(session, decode))[0] == 503
            code, said = await declare_dead(decode, KEY, incarnation)
            assert code == 2 and f"end that process (kill -9 {frozen.process.pid})" in said
            assert (await health(session, decode))[0] == 503
            # What it may still write ends with it: that is proof.
            frozen.process.send_signal(signal.SIGKILL)
            assert await all_home(session, decode)
            assert (await health(session, decode))[0] == 200
        finally:
            if frozen.process.returncode is None:
                frozen.process.send_signal(signal.SIGKILL)
