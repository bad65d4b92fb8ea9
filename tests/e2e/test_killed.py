"""Roles killed under load, pools that do not fit, and what `kvflow up` leaves behind: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from kvflow.serve.config.sources import resolve
from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.launch.supervisor import Fleet
from tests.e2e.fleet import LONG, WITHIN_S, all_home, ask, generate, running

pytestmark = pytest.mark.xdist_group("http")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill", "decode", "router"])
@pytest.mark.parametrize(
    ("num_pages", "backend"),
    [(512, "local"), pytest.param(160, "mooncake", marks=pytest.mark.soak)],
    ids=["for some", "for one"],
)
async def test_a_role_killed_under_load(
    victim: str, backend: str, num_pages: int, session: aiohttp.ClientSession
) -> None:
    """Clients get an answer, survivors get their pages back, within ten seconds; those that wait
    for pages too.
    """
    if backend == "mooncake":
        pytest.importorskip("mooncake.engine")
    rate = 2 << 20  # slow enough that some rooms are in mid-transfer
    limits = {"transfer_rate_limit": rate, "num_pages": num_pages, "retry_timeout_s": 0.5}
    async with running(disaggregation_transfer_backend=backend, **limits) as fleet:
        roles = {child.role: child for child in fleet.children}
        long_prompt = " ".join(DEMO_PROMPTS) * 4
        loads = [
            asyncio.create_task(
                generate(
                    session,
                    fleet.url,
                    text=f"{long_prompt} {i}",
                    stream=bool(i % 2),
                    sampling_params=LONG,
                )
            )
            for i in range(8)
        ]
        async with asyncio.timeout(WITHIN_S):
            info = await ask(session, f"{roles['decode'].url}/server_info")
            while not info["running"]:
                await asyncio.sleep(0.01)
                info = await ask(session, f"{roles['decode'].url}/server_info")
        roles[victim].process.kill()
        survivors = [child.url for role, child in roles.items() if role not in (victim, "router")]
        # Who had not landed has an error now; who had landed goes on, until its client leaves.
        if victim == "prefill":
            await until_no_rooms(session, roles["decode"].url)
            done, landed = await asyncio.wait(
                loads, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED
            )
            for load in landed:
                load.cancel()
            await asyncio.wait(loads)
            assert done
        else:
            done, pending = await asyncio.wait(loads, timeout=WITHIN_S)
            assert not pending
        for load in done:
            error = load.exception()
            if error is not None:
                assert victim == "router" and isinstance(error, aiohttp.ClientError)
            else:
                status, answer = load.result()
                has_landed = victim == "prefill" and status == 200  # and has come to its end
                assert has_landed or status in (502, 503) or b'"error"' in answer, (status, answer)
        assert await all_home(session, *survivors)


async def until_no_rooms(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while (await ask(session, f"{url}/server_info"))["rooms"]:  # another process: no event
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_pools_that_do_not_fit_are_a_clear_error(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    config = tmp_path / "kvflow.toml"
    config.write_text("[prefill]\npage_size = 16\n[decode]\npage_size = 24\n")
    given = {"model_path": str(DEMO_MODEL_DIR), "port": 0, "num_pages": 64}
    settings = resolve("up", given, env={})
    async with Fleet(settings, given, str(config), quiet=True) as fleet:
        async with asyncio.timeout(WITHIN_S):
            status, answer = await generate(session, fleet.url)
        assert status == 502
        assert "page_size: prefill 16, decode 24" in answer["error"]["message"]
        assert await all_home(session, fleet.prefills[0].url, fleet.decodes[0].url)


@pytest.mark.slow
async def test_up_ends_together_when_one_role_is_killed() -> None:
    command = (sys.executable, "-m", "kvflow.cli", "up", "--port", "0", "--num-pages", "64")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    async with asyncio.timeout(240):
        lines = [(await process.stdout.readline()).decode() for _ in range(3)]
        pids = {line.split()[0]: int(line.split()[-1]) for line in lines}
        assert set(pids) == {"prefill", "decode", "router"}
        os.kill(pids["decode"], signal.SIGKILL)
        _, stderr = await process.communicate()
    assert process.returncode == 1
    assert b"decode was killed by SIGKILL" in stderr
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


WITH_STORE = ("--prefix-cache", "lru", "--cache-host-bytes", str(1 << 24), "--l3", "mooncake")


@pytest.mark.parametrize(
    ("number", "more"),
    [
        pytest.param(signal.SIGINT, (), marks=(pytest.mark.slow, pytest.mark.soak)),
        pytest.param(signal.SIGTERM, WITH_STORE, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, ("--decode-workers", "2"), marks=pytest.mark.slow),
    ],
)
async def test_up_leaves_no_orphan(number: signal.Signals, more: tuple[str, ...]) -> None:
    if more is WITH_STORE:
        pytest.importorskip("mooncake")
    command = (sys.executable, "-m", "kvflow.cli", "up", "--port", "0", "--num-pages", "64")
    process = await asyncio.create_subprocess_exec(
        *command, *more, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    async with asyncio.timeout(240):
        lines = [(await process.stdout.readline()).decode() for _ in range(4 if more else 3)]
        descriptors = [os.pidfd_open(int(line.split()[-1])) for line in lines]
        process.send_signal(number)
        status = await process.wait()
        assert status == (-number if number is signal.SIGKILL else 0)
        loop = asyncio.get_running_loop()
        for descriptor in descriptors:
            ended = asyncio.Event()
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
            loop.remove_reader(descriptor)
            os.close(descriptor)
