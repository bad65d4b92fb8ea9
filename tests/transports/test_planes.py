"""Every data plane conforms, in real processes where it has them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kvflow.testing.conformance import CHECKS, Bench, Check, NotRunError
from tests.ipv6 import needs_ipv6
from tests.soak import sized

PLANES = ("local", "mooncake", "nixl", "fake")
STUBS = ("tests.transports.stub_planes:Mori", "tests.transports.stub_planes:Ascend")
ROOMS, MANY_ROOMS = 300, sized(1_200, 3_000)
# Of which thousands run without a soak; `ROOMS` of each run in every test run.
OFTEN = {("local", "rooms"), ("mooncake", "staged rooms")}
BY_NAME = {check.name: check for check in CHECKS}
# Of planes over stubs, what is about their own calls.
OWN = ("questions", "landed", "killed receiver", "at rest")
# Over another transport, what depends on who carries a write out.
CARRIED = {*OWN, "frozen receiver", "fence of the dead", "rooms"}
# Freeing one of mooncake's engines holds the GIL for a second.
SLOW = {("mooncake", "closed in every state"), ("mooncake", "planes come and go")}
CASES = [
    pytest.param(
        plane,
        check,
        id=f"{plane}-{check.name.replace(' ', '-')}",
        marks=[pytest.mark.slow] if (plane, check.name) in SLOW else [],
    )
    for plane in PLANES
    for check in CHECKS
]


def bench_of(plane: str, seed: int, rooms: int = ROOMS) -> Bench:
    bench = Bench(plane, seed, rooms)
    if reason := bench.adapter.unavailable_reason():
        pytest.skip(reason)
    return bench


async def run(check: Check, bench: Bench) -> None:
    try:
        print(f"{bench.plane}, {check.name}: {await check.run(bench)}")
    except NotRunError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("plane", "check"), CASES)
async def test_a_plane_conforms(plane: str, check: Check, seed: int) -> None:
    await run(check, bench_of(plane, seed))


@pytest.mark.parametrize("check", OWN)
@pytest.mark.parametrize("plane", [STUBS[0], pytest.param(STUBS[1], marks=pytest.mark.slow)])
async def test_a_plane_without_its_engine_conforms_over_a_stub_of_it(
    plane: str, check: str, seed: int
) -> None:
    await run(BY_NAME[check], bench_of(plane, seed))


@pytest.mark.slow
@pytest.mark.parametrize("check", [check.name for check in CHECKS if check.name not in OWN])
@pytest.mark.parametrize("plane", [STUBS[0], pytest.param(STUBS[1], marks=pytest.mark.soak)])
async def test_and_in_all_else(plane: str, check: str, seed: int) -> None:
    await run(BY_NAME[check], bench_of(plane, seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plane", "check"),
    [
        pytest.param(plane, check, marks=() if (plane, check) in OFTEN else pytest.mark.soak)
        for plane in PLANES
        for check in ("rooms", "staged rooms")
    ],
)
async def test_nothing_is_left_of_thousands_of_rooms(plane: str, check: str, seed: int) -> None:
    await run(BY_NAME[check], bench_of(plane, seed, MANY_ROOMS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            check,
            id=check.name.replace(" ", "-"),
            marks=() if check.name in CARRIED else pytest.mark.soak,
        )
        for check in CHECKS
    ],
)
async def test_nixl_conforms_over_tcp(
    check: Check, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the receiver carries a write out, as between machines."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    await run(check, bench_of("nixl", seed))


@needs_ipv6
@pytest.mark.parametrize("plane", ["local", "mooncake", "nixl"])
async def test_a_room_over_ipv6(plane: str, seed: int) -> None:
    bench_of(plane, seed)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.transports.over_ipv6", plane),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate()
    assert (told, process.returncode) == (b"landed\n", 0)
