"""A fleet is upgraded under load, and rolled back: old and new workers stand side by side, the
router pairs what fits, and no request fails.

There are no two releases yet. In the first test the new workers are today's, but for the version
of the control link, which is the next one. In the second the old workers are of an earlier commit,
where the repository has its history: `TEST_OLD=COMMIT`, or the newest tag.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvflow.http.authorization import bearer
from kvflow.protocols.wire.messages import WIRE_VERSION
from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.launch import child
from kvflow.serve.launch.child import Child
from tests.e2e.fleet import ask
from tests.shells import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]
KEY = "simsim"
NEXT = WIRE_VERSION + 1  # as tests.e2e.next_version has it, which no other process may import
WITHIN_S = 60.0
MORE = 8  # requests that must be answered after each step of an upgrade
LANES = 3
WORKER = (
    *("--model-path", str(DEMO_MODEL_DIR), "--served-model-name", "demo", "--dtype", "float32"),
    *("--num-pages", "256", "--drain-timeout-s", "20", "--port", "0"),
)


class Load:
    """Requests that never stop. Each has one right answer, the first that its prompt got."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self._expected: dict[int, str] = {}
        self.answered, self.wrong = 0, list[str]()

    async def lane(self, number: int) -> None:
        turn = number
        while True:
            turn += LANES
            prompt = turn % 6
            body = {"text": DEMO_PROMPTS[prompt] * 2, "sampling_params": SAMPLING}
            async with self._session.post(f"{self._url}/generate", json=body) as answer:
                raw = await answer.read()
            text = msgspec.json.decode(raw).get("text") if answer.status == 200 else None
            if text is None or text != self._expected.setdefault(prompt, text):
                self.wrong.append(f"{answer.status} {raw[:300].decode()}")
            self.answered += 1

    async def more(self) -> None:
        """Return when further requests, begun from now on, are answered."""
        wanted = self.answered + LANES + MORE
        async with asyncio.timeout(WITHIN_S):
            while self.answered < wanted:
                await asyncio.sleep(0.02)
        assert self.wrong == []


SAMPLING = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


class Fleet:
    """A router that workers join, and requests at it."""

    def __init__(self, session: aiohttp.ClientSession, router: Child) -> None:
        self.session, self.router = session, router
        self.load = Load(session, router.url)
        self._workers: list[Child] = []

    async def start(self, role: str, environment: Mapping[str, str]) -> Child:
        worker = Child(role, role, [*WORKER, "--join", self.router.url, *_PORTS[role]], quiet=True)
        self._workers.append(worker)
        await worker.start({**environment, "KVFLOW_ADMIN_API_KEY": KEY}, WITHIN_S)
        await self.until(lambda found: worker.url in found)
        return worker

    async def end(self, worker: Child) -> None:
        assert await worker.stop(WITHIN_S) == 0
        await self.until(lambda found: worker.url not in found)

    async def until(self, holds: Any) -> dict[str, str]:
        """Wait until this holds for the workers' URLs and why each gets no requests."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                workers = (await ask(self.session, f"{self.router.url}/workers"))["workers"]
                found = {one["url"]: one["reason"] for one in workers}
                if holds(found):
                    return found
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        for worker in (*self._workers, self.router):
            with contextlib.suppress(RuntimeError):
                worker.kill()
            await worker.stop(1)


_PORTS = {
    "prefill": ("--disaggregation-bootstrap-port", "0", "--control-port", "0"),
    "decode": (),
}


@contextlib.asynccontextmanager
async def router_under_load() -> AsyncIterator[Fleet]:
    router = Child("router", "router", ["--port", "0", "--poll-s", "0.2"], quiet=True)
    await router.start({**os.environ, "KVFLOW_ADMIN_API_KEY": KEY}, WITHIN_S)
    async with aiohttp.ClientSession(headers=bearer(KEY)) as session:
        fleet = Fleet(session, router)
        try:
            yield fleet
        finally:
            await fleet.close()


async def upgraded_and_rolled_back(
    fleet: Fleet, old: Mapping[str, str], new: Mapping[str, str], reason: str = ""
) -> None:
    """Replace an old pair by a new one, and that by an old one, while requests are answered.

    The environments `old` and `new` make a worker one or the other. `reason` is why the router
    gives a new prefill no requests while the only decode is old; "" where they may fit each other.
    """
    load = fleet.load
    first = [await fleet.start(role, old) for role in ("prefill", "decode")]
    lanes = [asyncio.create_task(load.lane(number)) for number in range(LANES)]
    try:
        await load.more()
        second = [await fleet.start("prefill", new)]
        if reason:
            await fleet.until(lambda found: found[second[0].url] == reason)
            await _refuses(fleet, second[0], first[1])
        await load.more()
        second.append(await fleet.start("decode", new))
        await fleet.until(lambda found: not any(found.values()))
        await _all_serve(fleet, [*first, *second])
        await _replaced(fleet, first)
        third = [await fleet.start(role, old) for role in ("prefill", "decode")]
        await fleet.until(lambda found: not any(found.values()))
        await _all_serve(fleet, [*second, *third])
        await _replaced(fleet, second)
        await _all_serve(fleet, third)
    finally:
        for lane in lanes:
            lane.cancel()
        ended = await asyncio.gather(*lanes, return_exceptions=True)
    assert load.wrong == []
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def _replaced(fleet: Fleet, workers: list[Child]) -> None:
    for worker in workers:
        await fleet.end(worker)
        await fleet.load.more()


async def _all_serve(fleet: Fleet, workers: list[Child]) -> None:
    """Wait until each of these workers has had a request from now on."""
    before = await _tries(fleet)
    async with asyncio.timeout(WITHIN_S):
        while True:
            now = await _tries(fleet)
            if all(now.get(one.url, 0) > before.get(one.url, 0) for one in workers):
                break
            await asyncio.sleep(0.05)
    assert fleet.load.wrong == []


async def _tries(fleet: Fleet) -> dict[str, float]:
    async with fleet.session.get(f"{fleet.router.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {
        line.split('worker="')[1].partition('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("kvflow_router_worker_tries_total{")
    }


async def _refuses(fleet: Fleet, prefill: Child, decode: Child) -> None:
    """A new prefill refuses an old decode by itself, whoever pairs them."""
    room = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": 7,
    }
    body = {"text": DEMO_PROMPTS[0], "sampling_params": SAMPLING, **room}
    async with fleet.session.post(f"{decode.url}/generate", json=body) as answer:
        said = await answer.text()
    assert answer.status == 502
    assert f"wire version {WIRE_VERSION}, this prefill speaks {NEXT}" in said


async def test_workers_of_another_wire_version_are_paired_with_their_own() -> None:
    reason = f"no decode here fits it: it has wire version {NEXT} and not {WIRE_VERSION}"
    new = {**os.environ, "PYTEST_PLANTED": "tests.e2e.next_version"}
    async with router_under_load() as fleet:
        await upgraded_and_rolled_back(fleet, os.environ, new, reason)


def old_commit() -> str:
    given = os.environ.get("TEST_OLD", "")
    tags = _git("tag", "--sort=-creatordate", "--merged", "HEAD^").split()
    return given or (tags[0] if tags else "")


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout if done.returncode == 0 else ""


@pytest.mark.soak
@pytest.mark.timeout(400)  # nothing forks the old workers, whose tree is another
async def test_workers_of_an_earlier_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (commit := old_commit()):
        pytest.skip("no earlier release is in this clone (TEST_OLD=COMMIT names a commit)")
    archive = subprocess.run(
        ["git", "archive", commit, "kvflow"], cwd=ROOT, capture_output=True, timeout=60, check=True
    )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(tmp_path, filter="data")
    start = child.start_role

    async def of_its_tree(role: str, arguments: Any, **how: Any) -> asyncio.subprocess.Process:
        if "TEST_OLD_TREE" not in how["env"]:
            return await start(role, arguments, **how)
        # Without -P, the working directory comes first on the path.
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvflow.cli", role, *arguments, cwd=tmp_path, **how
        )

    monkeypatch.setattr(child, "start_role", of_its_tree)
    async with router_under_load() as fleet:
        old = {**os.environ, "TEST_OLD_TREE": "1"}
        await upgraded_and_rolled_back(fleet, old, os.environ)
