"""What `failures.py` does to kvflow's backend and to SGLang's: here kvflow alone, and its row."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.engines import start_all, stop_all
from tests.sglang.failing import Pair
from tests.sglang.failures import CASES, LONGEST, one_case
from tests.sglang.servers import Server
from tests.vllm.models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.sglang, pytest.mark.timeout(480)]

# SGLang's own handlers of its bootstrap port log these: two for each of six bodies, and one for a
# query that has no numbers.
OF_SGLANG = {"malformed-prefill": ["13 tracebacks at prefill"]}


@pytest.fixture(scope="module")
def wide(
    model_of: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:  # `model_of` skips where SGLang is not installed
    return make_model("llama_wide", tmp_path_factory.mktemp("wide") / "model", longest=LONGEST)


@pytest.fixture(scope="module")
def single(wide: Path, logs: Path) -> Iterator[Server]:
    server = Server("single", wide, logs, "--max-total-tokens", "16384", name="single-wide")
    try:
        start_all([server])
        yield server
    finally:
        stop_all([server])


@pytest.mark.parametrize("case", list(CASES))
async def test_nothing_is_wrong_lost_or_left_waiting(
    session: aiohttp.ClientSession, wide: Path, single: Server, logs: Path, seed: int, case: str
) -> None:
    rng = random.Random(seed)
    folder = logs / case
    folder.mkdir()
    pair = Pair("kvflow", CASES[case].shape, wide, folder, single, session, rng)
    try:
        await pair.start()
        row = await one_case(case, pair)
        assert row.is_harmless, row.line()
        assert None not in row.free_s.values(), row.line()
        assert row.after == "12 right", row.line()
        logged = [note for note in row.notes if "traceback" in note]
        assert logged == OF_SGLANG.get(case, []), row.line()
    except AssertionError:
        for server in pair.servers.values():
            print(f"end of {server.log}", server.tail(), sep="\n")
        raise
    finally:
        await pair.stop()
