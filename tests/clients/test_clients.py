"""Official clients, unmodified, run to the end, and what they received is checked.

Each of the `programs` is a user of one client: it checks that the client's own types validate an
answer, that the pieces of a stream make the answer, that tokens add up, and that each refusal is
the client's own error.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import aiohttp
import pytest

from kvflow.http.authorization import bearer
from tests.clients.programs import served
from tests.clients.servers import ROOT, VENV, Server
from tests.e2e.fleet import all_home, ask

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(480)]
PROGRAM_S = 240.0
OLDER = VENV / "openai-2"
# Programs, and where they run.
CLIENTS = {
    "openai-3": ("openai", VENV),
    "openai-2": ("openai", OLDER),
    "anthropic": ("anthropic", VENV),
    "pydantic-ai": ("pydantic_ai", VENV),
    "langchain-openai": ("langchain", VENV),
    "litellm": ("litellm", VENV),
    "instructor": ("instructor", OLDER),
    "llama-index": ("llama_index", OLDER),
}
# They tell nobody of themselves, and load no list of prices.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_runs_to_the_end(fleets: list[Server], client: str, tmp_path: Path) -> None:
    program, venv = CLIENTS[client]
    environment = {
        **QUIET,
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "CLIENTS_URLS": " ".join(fleet.url for fleet in fleets),
    }
    ran = subprocess.run(
        [venv / "bin/python", ROOT / f"tests/clients/programs/with_{program}.py"],
        check=False,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert "passed refusals_are_the_errors_of_the_client" in ran.stdout, ran.stdout
    async with aiohttp.ClientSession(headers=bearer(served.KEY)) as session:
        for fleet in fleets:
            workers = (await ask(session, f"{fleet.url}/server_info"))["workers"]
            assert await all_home(session, *(worker["url"] for worker in workers))
