"""The processes of a worker's other ranks: what happens when one does not become ready."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from kvflow.protocols.errors import KvflowError
from kvflow.serve.config.settings import Settings
from kvflow.serve.launch import child, ranks

SPEC = ranks.DecodeRankSpec(
    rank=0, stages=1, shards=2, attempt=0, meeting="", settings=Settings(), links={}
)
SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.mark.parametrize(
    ("command", "says"),
    [(SLEEPS, "rank 1: not ready within 0.3 s"), (("/no/such/program",), "rank 1: cannot start: ")],
)
async def test_a_rank_that_never_becomes_ready_is_fatal_and_says_why(
    command: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(role: str, arguments: Any, **how: Any) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(*command, **how)

    monkeypatch.setattr(child, "start_role", start)
    monkeypatch.setattr(ranks, "START_S", 0.3)
    lost: list[tuple[int, str]] = []
    fatal: asyncio.Future[KvflowError] = asyncio.get_running_loop().create_future()
    processes = ranks.RankProcesses(
        SPEC,
        "decode-rank",
        on_lost=lambda rank, why: lost.append((rank, why)),
        on_fatal=fatal.set_result,
    )
    processes.start()
    try:
        async with asyncio.timeout(20):
            error = await fatal
    finally:
        await processes.close()
    assert str(error).startswith(says)
    assert lost == [(1, str(error))]
