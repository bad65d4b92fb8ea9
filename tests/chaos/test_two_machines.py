"""Prefill on one machine, decode on another, and a bad line between: 5 % of the packets lost, 20 ms
each way.

The machines are namespaces (`machines`), so neither can observe the other's processes, as between
two hosts.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.machines import Line, Machine, two_machines, unavailable_reason
from tests.chaos.pair import Station, begin, in_the_middle, quarantined, station, until
from tests.soak import sized

pytest.importorskip("mooncake.engine")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason()),
]

# Over this line to connect and to meet may take seconds: TCP repeats a lost SYN after 1 s, and then
# after 2 s more.
MEETING = {"rendezvous_s": 10.0, "register_s": 20.0}
PATIENT = {**MEETING, "lost_after_s": 10.0}
# A packet that is lost three times in a row makes TCP wait for 2 s.
IMPATIENT = {**MEETING, "lost_after_s": 4.0}
ROOMS, LANES, PAGES = sized(40, 120), 8, 8


@asynccontextmanager
async def stations(seed: int, **both: Any) -> AsyncIterator[tuple[Station, Station, Line, Machine]]:
    async with AsyncExitStack() as stack:
        here, there, line = await stack.enter_async_context(two_machines(seed))
        prefill = await stack.enter_async_context(
            station("prefill", "mooncake", [], machine=here, **both)
        )
        decode = await stack.enter_async_context(
            station("decode", "mooncake", prefill.ranks, machine=there, **both)
        )
        yield prefill, decode, line, here


async def test_an_abort_storm(seed: int) -> None:
    """Every abort is answered in the end, so everything comes home without a fence."""
    async with stations(seed, timing=PATIENT) as (prefill, decode, line, _):
        plan = {"first": 1, "count": ROOMS, "pages": PAGES, "lanes": LANES}
        sent, got = await asyncio.gather(
            prefill.ask("storm", seed=seed, quit_part=0.2, **plan),
            decode.ask("storm", seed=seed + 1, quit_part=0.4, **plan),
        )
        print(f"seed {seed}: {sent}, {got}, {await line.counts()}")
        assert sum(sent["outcomes"].values()) == sum(got["outcomes"].values()) == ROOMS
        assert set(got["outcomes"]) <= {"success", "client_gone"}
        assert 0 < got["outcomes"]["success"] < ROOMS
        assert got["foreign_bytes"] == 0
        await asyncio.gather(prefill.settled(), decode.settled())


async def test_a_line_that_is_cut_and_comes_back(seed: int) -> None:
    """Longer than patience: both sides lose the link in mid-transfer, and nothing is proven.

    The same processes meet again when the line is back, decode asks about its loans, and what was
    in doubt is settled: nobody is restarted, or declared dead."""
    async with stations(seed, rate_bytes_per_s=2e6, timing=IMPATIENT) as (prefill, decode, line, _):
        await begin(1, 64, prefill, decode)
        await in_the_middle(decode, 1)
        await line.cut()
        assert (await decode.ask("outcome", room=1))["outcome"] == "peer_lost"
        assert await quarantined(decode) == 64, "the fence cannot see a process of another machine"
        await decode.ask("reuse")
        await line.set()
        await asyncio.gather(
            prefill.settled(within_s=60), until(partial(has_settled_loans, decode), within_s=60)
        )
        assert (await decode.ask("foreign"))["bytes"] == 0
        await decode.ask("let_go")
        await decode.settled()
        await begin(2, PAGES, prefill, decode)
        assert await decode.ask("outcome", room=2) == {"outcome": "success", "foreign_bytes": 0}


async def has_settled_loans(decode: Station) -> bool:
    left = await decode.ask("left")
    return not (left["loans"] or left["quarantined"] or left["rooms"])


async def test_a_sender_that_dies_on_another_machine(seed: int) -> None:
    """Its death cannot be observed from here, so the pages it may write stay out of use, until an
    operator says so.
    """
    async with stations(seed, rate_bytes_per_s=2e6, timing=IMPATIENT) as (prefill, decode, _, here):
        await begin(1, 64, prefill, decode)
        await in_the_middle(decode, 1)
        prefill.signal(signal.SIGKILL)
        assert (await decode.ask("outcome", room=1))["outcome"] == "peer_lost"
        async with station("prefill", "mooncake", [], machine=here, timing=IMPATIENT) as successor:
            await decode.ask("meet", ranks=successor.ranks)
            await begin(2, PAGES, successor, decode)
            assert await decode.ask("outcome", room=2) == {"outcome": "success", "foreign_bytes": 0}
            assert await quarantined(decode) == 64, "a successor at the same host proves nothing"
            await decode.ask("declare_dead", incarnation=prefill.ranks[0]["incarnation"])
            await decode.ask("end", room=2)
            await asyncio.gather(decode.settled(), successor.settled())


async def test_nothing_is_left_of_two_machines_whose_test_was_killed(seed: int) -> None:
    """Their processes, and with them the namespaces and interfaces, end with whoever made them."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos.machines",
        str(seed),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in (await owner.stdout.readline()).split()]
    assert len(pids) == 4
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    owner.kill()
    await owner.wait()

    async def all_gone() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    await until(all_gone)
