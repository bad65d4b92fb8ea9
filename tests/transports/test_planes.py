"""What every data plane that runs between processes has to show, in two real processes."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import WriteOutcome
from tests.freezing import freeze
from tests.ipv6 import needs_ipv6
from tests.transports.peer_process import NUM_PAGES, PAGE_SIZE, Side, pages, spawned, until

ORDERS = ["page_first", "layer_first"]
RATE = 4_000_000  # bytes/s: NUM_PAGES pages take 2.6 s, so there is a middle


def _is_there(*packages: str) -> bool:
    return any(importlib.util.find_spec(package) is not None for package in packages)


@pytest.fixture(
    params=[
        "local",
        pytest.param("mooncake", marks=pytest.mark.skipif(not _is_there("mooncake"), reason="no mooncake")),
        pytest.param("nixl", marks=pytest.mark.skipif(not _is_there("nixl_cu12", "nixl_cu13"), reason="no nixl")),
    ]
)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def side(backend: str) -> AsyncIterator[Side]:
    """This process; sends without a limit."""
    opened = Side(backend, "page_first", None)
    yield opened
    await opened.close()


@pytest.fixture
async def slow_side(backend: str) -> AsyncIterator[Side]:
    opened = Side(backend, "page_first", RATE)
    yield opened
    await opened.close()


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(ORDERS, ORDERS)))
async def test_pages_arrive_whole_and_nothing_else_changes(backend: str, ours: str, theirs: str, seed: int) -> None:
    side = Side(backend, ours, None)
    side.fill(seed)
    rng = np.random.default_rng(seed)
    async with spawned(backend, theirs) as peer:
        route = await side.plane.connect(peer.address, peer.layout)
        for count in (1, 2, 200):
            source = rng.permutation(NUM_PAGES)[:count].astype(np.int32)
            target = rng.permutation(NUM_PAGES)[:count].astype(np.int32)
            before = await peer.bytes_of(np.arange(NUM_PAGES, dtype=np.int32))
            write = route.write(source, target)
            assert await asyncio.shield(write.done) is WriteOutcome.LANDED
            assert write.landed_bytes == write.total_bytes == count * side.pool.layout.page_bytes and not write.error
            assert await peer.bytes_of(target) == side.pool.pages_bytes(source).tobytes()
            others = np.setdiff1d(np.arange(NUM_PAGES, dtype=np.int32), target).astype(np.int32)
            was = np.frombuffer(before, dtype=np.uint8).reshape(NUM_PAGES, -1)[others].tobytes()
            assert await peer.bytes_of(others) == was
        route.close()
    await side.close()


async def test_many_writes_at_once_all_land(side: Side) -> None:
    side.fill(3)
    async with spawned(side.plane.name) as peer:
        route = await side.plane.connect(peer.address, peer.layout)
        writes = [route.write(pages(i), pages(NUM_PAGES - 1 - i)) for i in range(NUM_PAGES)]
        assert {await asyncio.shield(write.done) for write in writes} == {WriteOutcome.LANDED}
        everything = np.arange(NUM_PAGES, dtype=np.int32)
        assert await peer.bytes_of(everything[::-1].copy()) == side.pool.pages_bytes(everything).tobytes()


async def test_a_cancelled_write_says_exactly_what_landed(slow_side: Side) -> None:
    slow_side.fill(4)
    everything = np.arange(NUM_PAGES, dtype=np.int32)
    async with spawned(slow_side.plane.name) as peer:
        route = await slow_side.plane.connect(peer.address, peer.layout)
        write = route.write(everything, everything)
        await until(lambda: write.landed_bytes > 0)
        write.cancel()
        write.cancel()
        assert await asyncio.shield(write.done) is WriteOutcome.CANCELLED
        landed = write.landed_bytes
        assert 0 < landed < write.total_bytes
        after = await peer.bytes_of(everything)
        assert np.count_nonzero(np.frombuffer(after, dtype=np.uint8)) == landed
        slow_side.fill(5)  # the source is ours again: whatever is written from now on would show other bytes
        write = route.write(pages(0), pages(NUM_PAGES - 1))
        assert await asyncio.shield(write.done) is WriteOutcome.LANDED
        assert (await peer.bytes_of(everything[:-1])) == after[: len(after) // NUM_PAGES * (NUM_PAGES - 1)]


async def test_the_rate_limit_holds(slow_side: Side) -> None:
    loop = asyncio.get_running_loop()
    some = np.arange(40, dtype=np.int32)
    async with spawned(slow_side.plane.name) as peer:
        route = await slow_side.plane.connect(peer.address, peer.layout)
        began = loop.time()
        writes = [route.write(some, some), route.write(some + 40, some + 40)]
        assert {await asyncio.shield(write.done) for write in writes} == {WriteOutcome.LANDED}
        a_slice = RATE * 0.005 + 8192
        assert sum(write.total_bytes for write in writes) <= RATE * (loop.time() - began) + a_slice


async def test_the_death_of_a_writer_is_its_fence(side: Side) -> None:
    async with spawned(side.plane.name, rate=RATE) as peer:
        await peer.ask("fill", 6)
        await peer.connect(side)
        everything = list(range(NUM_PAGES))
        await peer.ask("write", everything, everything)
        await until(lambda: side.landed_bytes() > 0)
        fence = asyncio.ensure_future(side.plane.fence(peer.address))
        with pytest.raises(TimeoutError):  # alive, so nothing is proven
            await asyncio.wait_for(asyncio.shield(fence), 0.2)
        peer.process.kill()
        await asyncio.wait_for(fence, 5)
        then = [column.copy() for column in side.memory]
        landed = side.landed_bytes()
        await asyncio.sleep(0.5)  # what could still arrive would arrive now
        assert 0 < landed < side.pool.layout.size_bytes
        assert all((column == was).all() for column, was in zip(side.memory, then, strict=True))
        await asyncio.wait_for(side.plane.fence(peer.address), 5)  # dead stays dead


async def test_a_writer_is_seen_alive_until_it_has_ended(side: Side) -> None:
    async with spawned(side.plane.name) as peer:
        await freeze(peer.process.pid)
        assert side.plane.sees_alive(peer.address)
        elsewhere = msgspec.structs.replace(peer.address.process, boot_id="another boot")
        assert not side.plane.sees_alive(msgspec.structs.replace(peer.address, process=elsewhere))
        peer.process.kill()
        await asyncio.wait_for(side.plane.fence(peer.address), 5)
        assert not side.plane.sees_alive(peer.address)


async def test_a_frozen_writer_is_not_fenced(side: Side) -> None:
    async with spawned(side.plane.name, rate=RATE) as peer:
        await peer.connect(side)
        await freeze(peer.process.pid)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(side.plane.fence(peer.address), 0.3)


async def test_another_hosts_writer_can_never_be_fenced(side: Side) -> None:
    identity = msgspec.structs.replace(side.address.process, boot_id="another boot")
    with pytest.raises(TransferError, match="another host"):
        await side.plane.fence(msgspec.structs.replace(side.address, process=identity))


async def test_wrong_page_lists_start_nothing(side: Side) -> None:
    async with spawned(side.plane.name) as peer:
        route = await side.plane.connect(peer.address, peer.layout)
        for source, target in [((0,), (NUM_PAGES,)), ((-1,), (0,)), ((0, 1), (0,)), ((), ()), ((0, 1), (0, NUM_PAGES))]:
            with pytest.raises(LayoutError):
                route.write(pages(*source), pages(*target))
        assert await peer.ask("landed") == 0


async def test_pools_that_do_not_fit_are_refused(side: Side) -> None:
    async with spawned(side.plane.name) as peer:
        other = build_layout([("0.k", "float16", (4, 64))], page_size=PAGE_SIZE, num_pages=4)
        with pytest.raises(LayoutError):
            await side.plane.connect(peer.address, other)


async def test_a_peer_that_is_gone_cannot_be_reached(side: Side) -> None:
    async with spawned(side.plane.name) as peer:
        pass
    with pytest.raises(TransferError):
        await side.plane.connect(peer.address, peer.layout)


async def test_closing_the_plane_ends_every_write(backend: str) -> None:
    side = Side(backend, "page_first", RATE)
    everything = np.arange(NUM_PAGES, dtype=np.int32)
    fds = len(os.listdir("/proc/self/fd"))
    async with spawned(backend) as peer:
        route = await side.plane.connect(peer.address, peer.layout)
        writes = [route.write(everything, everything) for _ in range(3)]
        await until(lambda: writes[0].landed_bytes > 0)
        await side.plane.close()
        assert {write.done.result() for write in writes} == {WriteOutcome.CANCELLED}
        with pytest.raises(TransferError, match="closed"):
            route.write(everything, everything)
        assert await peer.ask("landed") <= sum(write.landed_bytes for write in writes)
    side.pool.close()
    if backend == "local":
        assert len(os.listdir("/proc/self/fd")) <= fds


@needs_ipv6
async def test_a_room_over_ipv6(backend: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.transports.over_ipv6", backend),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate()
    assert (told, process.returncode) == (b"landed\n", 0)
