"""The pair a user's tests get: it works out of the box, and it says what a test left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from kvflow.protocols.errors import LostError
from kvflow.testing.pair import Clock, Pair, pair, until

USERS_TEST = """
import asyncio
import pytest

pytest_plugins = ["kvflow.testing.fixtures"]
pytestmark = pytest.mark.asyncio


async def test_good(kvflow_pair):
    source, target = await kvflow_pair.open(7, range(40))
    await source.matched()
    kvflow_pair.send_all(source, chunks=3)
    assert await target.landed() == b"handoff"
    target.close()


async def test_leaves_pages(kvflow_pair):
    kvflow_pair.patience_s = 0.1
    kvflow_pair.decode.pages.take(3, "forgotten")


async def test_leaves_a_task(kvflow_pair):
    test_leaves_a_task.kept = asyncio.ensure_future(asyncio.Event().wait())


async def test_raises_into_the_loop(kvflow_pair):
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
"""


def test_the_fixtures_find_what_a_test_leaves_behind(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(USERS_TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(tmp_path),
    ]
    out = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    ).stdout
    assert "4 passed, 3 errors" in out, out
    for said in ("pages of {'forgotten': 3}", "tasks left behind", "raised into the event loop"):
        assert said in out, out


async def test_a_pair_says_what_is_not_at_rest() -> None:
    async with pair() as p:
        assert p.left() == []
        source, target = await p.open(7, range(40))
        await source.matched()
        left = "; ".join(p.left())
        assert "prefill 0: 1 rooms" in left and "decode: 1 rooms; decode: 1 loans" in left
        with pytest.raises(TimeoutError, match="not at rest: prefill 0: 1 rooms"):
            await impatient(p)
        target.close()
        await p.rest()


async def impatient(p: Pair) -> None:
    p.patience_s = 0.01
    try:
        await p.rest()
    finally:
        p.patience_s = 5.0


async def test_a_crash_is_silent_and_a_second_life_has_the_same_address() -> None:
    async with pair() as p:
        source, target = await p.open(7, range(40))
        await source.matched()
        control = p.prefill.info.control
        await p.crash(p.prefill)
        with pytest.raises(LostError, match="died"):
            await target.landed()
        assert p.decode.counts.endings == {"lost:peer_lost": 1}, (
            "no farewell of prefill's has reached decode"
        )
        again = await p.add_prefill(int(control.rsplit(":", 1)[1]))
        assert again.info.control == control


async def test_until_gives_up() -> None:
    with pytest.raises(TimeoutError, match="not true within"):
        await until(lambda: False, timeout_s=0.01)
    flag = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, flag.set)
    await until(flag.is_set)


def test_a_clock_moves_on_by_itself_and_when_told() -> None:
    clock = Clock()
    before = clock.now()
    clock.advance(100)
    assert before + 100 <= clock.now() < before + 110
