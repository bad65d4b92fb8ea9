"""The servers that all tests here share, started once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from tests.engines import start_all, stop_all
from tests.vllm.asking import new_session
from tests.vllm.models import make_model
from tests.vllm.servers import VENV, Server

SOURCE_DEADLINE_S = 5.0
LOST_AFTER_S = 4.5  # with 2 s a loaded machine has been taken for a lost peer
SLOW_BYTES_PER_S = 1e6
_FLEET = pytest.StashKey["Fleet"]()


class Fleet(NamedTuple):
    """The last three are of another model; its prefill writes slowly, and can be lost."""

    single: Server
    prefill: Server
    decode: Server
    large_blocks: Server
    slow_prefill: Server
    failing: Server
    recomputing: Server


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A tiny Llama's folder, by the seed of its weights."""
    if not (VENV / ".setup-done").exists() and not (VENV / "bin/vllm").exists():
        pytest.skip(f"no vLLM in {VENV}: `make vllm` installs it, where it can")
    made: dict[int, Path] = {}

    def model(seed: int) -> Path:
        if seed not in made:
            made[seed] = make_model(
                "llama", tmp_path_factory.mktemp("models") / f"llama-{seed}", seed
            )
        return made[seed]

    return model


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def fleet(
    model_of: Callable[[int], Path], logs: Path, pytestconfig: pytest.Config
) -> Iterator[Fleet]:
    one, two = model_of(1), model_of(2)
    found = Fleet(
        single=Server("single", one, logs),
        prefill=Server("prefill", one, logs, source_deadline_s=SOURCE_DEADLINE_S),
        decode=Server("decode", one, logs),
        large_blocks=Server("prefill", one, logs, name="large_blocks", block_size=64),
        slow_prefill=Server(
            "prefill",
            two,
            logs,
            name="slow_prefill",
            lost_after_s=LOST_AFTER_S,
            rate_limit_bytes_per_s=SLOW_BYTES_PER_S,
        ),
        failing=Server(
            "decode", two, logs, name="failing", policy="fail", lost_after_s=LOST_AFTER_S
        ),
        recomputing=Server(
            "decode", two, logs, name="recomputing", policy="recompute", lost_after_s=LOST_AFTER_S
        ),
    )
    pytestconfig.stash[_FLEET] = found
    try:
        start_all(found)
        yield found
    finally:
        stop_all(found)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with new_session() as found:
        yield found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for server in item.config.stash.get(_FLEET, ()):
            report.sections.append((f"end of {server.log}", server.tail()))
    return report
