"""Roles as processes: what they say, how they end, and a supervisor in a hurry. Routers stand for all: the quickest."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvflow.config import Settings
from kvflow.launch.child import Child, ChildEndedError
from kvflow.launch.supervisor import Fleet
from tests.freezing import freeze

NOBODY = "http://127.0.0.1:1"
ROUTER = ["--port", "0", "--prefill", NOBODY, "--decode", NOBODY]


async def test_a_second_signal_kills_what_does_not_end() -> None:
    fleet = Fleet(Settings(drain_timeout_s=3000), {}, quiet=True)
    fleet.router = Child("router", "router", ROUTER, quiet=True)
    await fleet.router.start(os.environ, 30)
    forced = asyncio.Event()
    await freeze(fleet.router.process.pid)
    stopping = asyncio.create_task(fleet.stop(forced))
    await asyncio.sleep(0)
    forced.set()
    async with asyncio.timeout(10):
        await stopping
    assert fleet.router.process.returncode == -signal.SIGKILL


async def test_a_line_longer_than_the_reader_holds_does_not_end_it() -> None:
    word = "x" * 100_000
    child = Child("router", "router", ["--port", "0", "--decode", NOBODY, "--prefill", word], quiet=True)
    with pytest.raises(ChildEndedError) as caught:
        await child.start(os.environ, 30)
    assert caught.value.status == 2
    assert sum(map(len, child.last_lines)) > len(word)
    assert await child.stop(1) == 2


async def test_what_the_user_can_mend_is_told_without_ceremony(capfd: pytest.CaptureFixture[str]) -> None:
    child = Child("router", "router", ["--port", "0"], quiet=False)
    with pytest.raises(
        ChildEndedError, match=r"^router: router needs at least one --prefill URL and one --decode URL$"
    ):
        await child.start(os.environ, 30)
    assert capfd.readouterr().err == ""


def test_a_setting_of_several_values_is_several_flags() -> None:
    origins = ["https://a.example", "*"]
    fleet = Fleet(Settings(), {"allowed_origins": tuple(origins)}, quiet=True)
    assert fleet._arguments("router") == ["--allowed-origins", origins[0], "--allowed-origins", origins[1]]
