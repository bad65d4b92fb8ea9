"""Both fleets that all clients ask, started once, and an environment for the clients."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.clients.servers import VENV, Server, agent, writer
from tests.e2e.agent_model import save_agent
from tests.engines import start_all, stop_all

_FLEETS = pytest.StashKey[list[Server]]()


@pytest.fixture(scope="session")
def fleets(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[list[Server]]:
    """The agent's and the writer's."""
    if not (VENV / ".setup-done").exists():
        pytest.skip(f"no clients in {VENV}: `make clients` installs them, where it can")
    folder, logs = tmp_path_factory.mktemp("agent"), tmp_path_factory.mktemp("logs")
    found = [agent(save_agent(folder), logs), writer(logs)]
    pytestconfig.stash[_FLEETS] = found
    try:
        start_all(found)
        yield found
    finally:
        stop_all(found)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for server in item.config.stash.get(_FLEETS, []):
            report.sections.append((f"end of {server.log}", server.tail()))
    return report
