"""The servers that all tests here share, started once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.engines import start_all, stop_all
from tests.vllm.asking import new_session
from tests.vllm.models import make_model
from tests.vllm.servers import BLOCK, VENV, Server

SOURCE_DEADLINE_S = 5.0
LOST_AFTER_S = 4.5  # with 2 s a loaded machine has been taken for a lost peer
SLOW_BYTES_PER_S = 5e5  # a prompt travels for 11 s, so that a loaded machine sees it on its way
_FLEET = pytest.StashKey["Fleet"]()


class Family(NamedTuple):
    """What the tests must know of a family: how many layers keep all tokens, of 1,024 bytes each,
    options of its servers, and the tokens in a block. With states, vLLM chooses them.
    """

    layers: int
    words: tuple[str, ...] = ()
    block: int = BLOCK


# Full attention; sliding windows beside it; states beside it. On CPUs, vLLM 0.32 computes Mamba 2
# without its prefix cache only.
FAMILIES = {
    "llama": Family(4),
    "gemma3": Family(1),
    "granite_hybrid": Family(1, ("--no-enable-prefix-caching",), 96),
}
# A prompt that was loaded is found again in the prefix cache where all of its blocks came. Of a
# window came too few: the next request reads more tokens before the last block.
finds_loaded_prompts = pytest.mark.parametrize("fleet", ["llama"], indirect=True)


class Fleet(NamedTuple):
    """Servers of one family. The last three are of another model; its prefill writes slowly, and
    can be lost.
    """

    family: Family
    single: Server
    prefill: Server
    decode: Server
    large_blocks: Server
    slow_prefill: Server
    failing: Server
    recomputing: Server

    @property
    def servers(self) -> tuple[Server, ...]:
        return self[1:]

    @property
    def least_tokens(self) -> int:
        """Of a prompt that travels."""
        return 1 if self.family is FAMILIES["llama"] else 2

    @property
    def token_bytes(self) -> int:
        """Of the KV cache of full attention."""
        return 1024 * self.family.layers


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


# A fleet takes minutes to start, so `make vllm` starts one: `-m vllm` takes the others as well.
@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=() if name == "llama" else pytest.mark.soak) for name in FAMILIES
    ],
)
def fleet(
    request: pytest.FixtureRequest,
    model_of: Callable[..., Path],
    logs: Path,
    pytestconfig: pytest.Config,
) -> Iterator[Fleet]:
    name, family = request.param, FAMILIES[request.param]
    one, two = model_of(1, name), model_of(2, name)

    def server(role: str, model: Path, called: str = "", **options: Any) -> Server:
        return Server(role, model, logs, *family.words, name=f"{called or role}-{name}", **options)

    rate = SLOW_BYTES_PER_S * family.layers / FAMILIES["llama"].layers
    slow: dict[str, Any] = {"lost_after_s": LOST_AFTER_S}
    found = Fleet(
        family,
        single=server("single", one),
        prefill=server("prefill", one, source_deadline_s=SOURCE_DEADLINE_S),
        decode=server("decode", one),
        large_blocks=server("prefill", one, "large_blocks", block_size=64),
        slow_prefill=server("prefill", two, "slow", rate_limit_bytes_per_s=rate, **slow),
        failing=server("decode", two, "failing", policy="fail", **slow),
        recomputing=server("decode", two, "recomputing", policy="recompute", **slow),
    )
    pytestconfig.stash[_FLEET] = found
    try:
        start_all(found.servers)
        yield found
    finally:
        stop_all(found.servers)


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
        fleet = item.config.stash.get(_FLEET, None)
        for server in fleet.servers if fleet is not None else ():
            report.sections.append((f"end of {server.log}", server.tail()))
    return report
