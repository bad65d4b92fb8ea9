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
# The families with one group of full attention, with windows and with states, and the rate of the
# slow prefill: a prompt takes as long in each.
SLOW_BYTES_PER_S = {"llama": 1e6, "gemma3": 0.25e6, "qwen3_next": 0.25e6}
_FLEET = pytest.StashKey["Fleet"]()


class Fleet(NamedTuple):
    """Servers of one family. The last three are of another model; its prefill writes slowly, and
    can be lost.
    """

    single: Server
    prefill: Server
    decode: Server
    large_blocks: Server
    slow_prefill: Server
    failing: Server
    recomputing: Server

    @property
    def slow_bytes_per_s(self) -> float:
        return next(
            rate for family, rate in SLOW_BYTES_PER_S.items() if family in self.slow_prefill.name
        )


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny model's folder, by the seed of its weights and its family."""
    if not (VENV / ".setup-done").exists() and not (VENV / "bin/vllm").exists():
        pytest.skip(f"no vLLM in {VENV}: `make vllm` installs it, where it can")
    made: dict[tuple[int, str], Path] = {}

    def model(seed: int, family: str = "llama") -> Path:
        if (seed, family) not in made:
            folder = tmp_path_factory.mktemp("models") / f"{family}-{seed}"
            made[seed, family] = make_model(family, folder, seed)
        return made[seed, family]

    return model


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session", params=SLOW_BYTES_PER_S)
def fleet(
    request: pytest.FixtureRequest,
    model_of: Callable[..., Path],
    logs: Path,
    pytestconfig: pytest.Config,
) -> Iterator[Fleet]:
    family = request.param
    one, two = model_of(1, family), model_of(2, family)
    found = Fleet(
        single=Server("single", one, logs),
        prefill=Server("prefill", one, logs, source_deadline_s=SOURCE_DEADLINE_S),
        decode=Server("decode", one, logs),
        large_blocks=Server("prefill", one, logs, name="large_blocks", block_size=64),
        slow_prefill=Server(
            "prefill",
            two,
            logs,
            name=f"slow_prefill_{family}",
            lost_after_s=LOST_AFTER_S,
            rate_limit_bytes_per_s=SLOW_BYTES_PER_S[family],
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
