"""The servers that all tests here share, started once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.engines import start_all, stop_all
from tests.sglang.asking import new_session
from tests.sglang.models import make_model
from tests.sglang.servers import VENV, Server

RENDEZVOUS_S = 5.0
LOST_AFTER_S = 4.5  # with 2 s a loaded machine has been taken for a lost peer
SLOW_BYTES_PER_S = 1e6
_FLEET = pytest.StashKey["Fleet"]()


class Fleet(NamedTuple):
    """`slow` is another prefill, which writes slowly and can be lost. All have one model."""

    single: Server
    prefill: Server
    decode: Server
    slow: Server


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A tiny Llama's folder, by the seed of its weights."""
    if not (VENV / ".setup-done").exists() and not (VENV / "bin/sglang").exists():
        pytest.skip(f"no SGLang in {VENV}: `make sglang` installs it, where it can")
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
    model = model_of(1)
    times: dict[str, Any] = {"rendezvous_s": RENDEZVOUS_S, "lost_after_s": LOST_AFTER_S}
    chunks = ["--chunked-prefill-size", "256"]
    slowly = {**times, "rate_limit_bytes_per_s": SLOW_BYTES_PER_S, "verify_transfers": True}
    found = Fleet(
        single=Server("single", model, logs),
        prefill=Server("prefill", model, logs, *chunks, verify_transfers=True, **times),
        decode=Server("decode", model, logs, verify_transfers=True, **times),
        slow=Server("prefill", model, logs, *chunks, name="slow", **slowly),
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
