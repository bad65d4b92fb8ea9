"""A real Prometheus scrapes a real fleet as examples/monitoring says, and every panel has data."""

from __future__ import annotations

import asyncio
import math
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from kvflow.serve.demo_model import DEMO_PROMPTS
from kvflow.serve.launch.supervisor import Fleet
from tests.e2e.fleet import generate, running
from tests.monitoring import DASHBOARD, FOLDER, binary, expressions
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]
WITHIN_S = 60.0
# Long enough for several scrapes, also on a busy machine.
INTERVAL = "20s"
# Several pages, which the second request finds in the cache.
CACHED = " ".join(DEMO_PROMPTS)


def _configured(folder: Path, target: str) -> Path:
    """The example's configuration for this router, with a scrape every three seconds."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "3s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    for job in config["scrape_configs"]:
        (static,) = job["static_configs"]
        assert static["targets"] == ["localhost:8000"]
        static["targets"] = [target]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@asynccontextmanager
async def _prometheus(folder: Path, router: str) -> AsyncIterator[str]:
    """The address of a Prometheus that scrapes this router, once it is ready."""
    program = binary("prometheus")
    address = f"127.0.0.1:{free_port()}"
    config = _configured(folder, router.removeprefix("http://"))
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, *arguments, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
        try:
            yield f"http://{address}"
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
        finally:
            process.terminate()
            process.wait(20)


async def _asked(session: aiohttp.ClientSession, url: str, **params: str) -> Any:
    async with session.get(url, params=params) as answer:
        found = await answer.json()
        assert answer.status == 200 and found["status"] == "success", found
        return found["data"]


async def _traffic(session: aiohttp.ClientSession, fleet: Fleet) -> None:
    """Requests of every kind that a panel shows, until this is cancelled."""
    meeting = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": fleet.prefills[0].bootstrap_port,
        "bootstrap_room": 5,
    }
    while True:
        found = await asyncio.gather(
            generate(session, fleet.url, stream=True, text=CACHED),
            generate(session, fleet.url, text=CACHED),
            generate(session, fleet.url, sampling_params={"temperature": -1}),
            # No prefill comes to this room, so decode counts a failed one.
            generate(session, fleet.decodes[0].url, **meeting),
        )
        assert [status for status, _ in found] == [200, 200, 400, 504]


async def _until_data(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until every query of the dashboard has a number."""
    left = set(expressions(INTERVAL))
    try:
        async with asyncio.timeout(WITHIN_S):
            while left:
                await asyncio.sleep(1)
                for query in sorted(left):
                    found = await _asked(session, f"{url}/api/v1/query", query=query)
                    values = [float(one["value"][1]) for one in found["result"]]
                    if values and not all(map(math.isnan, values)):
                        left.discard(query)
                        print(f"{len(values)} series, {values[0]:.4g}: {query}")
    except TimeoutError:
        raise AssertionError(f"no data: {sorted(left)}") from None


async def test_every_panel_has_data_and_no_alert_of_a_healthy_fleet_fires(tmp_path: Path) -> None:
    async with (
        aiohttp.ClientSession() as session,
        running(rendezvous_s=1.0) as fleet,
        _prometheus(tmp_path, fleet.url) as url,
    ):
        traffic = asyncio.create_task(_traffic(session, fleet))
        try:
            await _ready(session, url)
            await _until_data(session, url)
            targets = await _asked(session, f"{url}/api/v1/targets")
            found = {one["labels"]["job"]: one["health"] for one in targets["activeTargets"]}
            assert found == {"kvflow-router": "up", "kvflow-workers": "up"}
            rules = await _asked(session, f"{url}/api/v1/rules")
            every = [rule for group in rules["groups"] for rule in group["rules"]]
            assert {rule["health"] for rule in every} == {"ok"}, every
            # Failed rooms are part of the traffic above, and latency is the machine's. Of the
            # others none may even be pending.
            pending = {rule["name"] for rule in every if rule["state"] != "inactive"}
            assert pending <= {"KvflowRoomsFail", "KvflowSlowFirstToken", "KvflowSlowTokens"}
            await _variables(session, url, fleet)
            assert not traffic.done()
        finally:
            traffic.cancel()
            await asyncio.gather(traffic, return_exceptions=True)


async def _ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                async with session.get(f"{url}/-/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


async def _variables(session: aiohttp.ClientSession, url: str, fleet: Fleet) -> None:
    """The list of workers above the dashboard is that of the fleet."""
    (worker,) = (one for one in DASHBOARD["templating"]["list"] if one["name"] == "worker")
    assert worker["definition"] == "label_values(kvflow_router_worker_up, worker)"
    found = await _asked(
        session, f"{url}/api/v1/label/worker/values", **{"match[]": "kvflow_router_worker_up"}
    )
    assert set(found) == {one.url for one in (*fleet.prefills, *fleet.decodes)}
