"""What only mooncake has: writes that outlive their error, and an engine with a life of its own."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import PlaneAddress, Write, WriteOutcome
from kvflow.testing.conformance.bench import bytes_of, let_write
from kvflow.testing.freezing import freeze
from kvflow.transports.data.mooncake import plane as mooncake
from kvflow.transports.data.mooncake.route import MooncakeRoute
from kvflow.transports.data.write_thread import ThreadWrite
from tests.soak import sized
from tests.transports.peer_process import (
    EVERYTHING,
    Peer,
    Side,
    end_of,
    kill_a_writer,
    pages,
    spawned,
    until,
    write_and_fork,
)

pytest.importorskip("mooncake")

PLANE = "mooncake"
SCATTERED = EVERYTHING[::2].copy()  # no two pages are one block


async def connected(side: Side, peer: Peer) -> MooncakeRoute:
    route = await side.plane.connect(peer.address, peer.layout)
    assert isinstance(route, MooncakeRoute)
    assert await end_of(route.write(pages(0), pages(0))) is WriteOutcome.LANDED
    return route


async def test_a_write_to_a_receiver_that_is_killed_is_unproven() -> None:
    side = Side("mooncake", "page_first", 4_000_000)
    async with spawned("mooncake") as peer:
        route = await side.plane.connect(peer.address, peer.layout)
        write = route.write(EVERYTHING, EVERYTHING)
        await until(lambda: write.landed_bytes > 0)
        peer.process.kill()
        assert await end_of(write, 10) is WriteOutcome.UNPROVEN
        # Which of the two is seen first.
        assert any(cause in write.error for cause in ("status -1", "has ended"))
        assert 0 < write.landed_bytes < write.total_bytes
    await side.close()


async def test_a_block_that_lands_during_its_submission_ends_its_write_at_once(
    side: Side, peer: Peer
) -> None:
    side.fill(1)
    route = await connected(side, peer)
    submit, check = route.submit, route.check

    def land(*block: object) -> int:
        handle: int = submit(*block)
        while not (status := check(handle)):
            pass
        assert status == 1
        return handle

    # The engine forgets a handle that it was asked for once it has ended.
    route.submit, route.check = land, lambda _: 1
    job = route.begin(route.write_of(route.thread, pages(0), pages(0)))
    assert job.advance(1 << 20, False) == job.landed_bytes == side.pool.layout.page_bytes
    assert job.outcome is WriteOutcome.LANDED and not any(under_way(side).values())


async def test_a_cancelled_write_waits_for_a_frozen_receiver_at_little_cost(side: Side) -> None:
    side.fill(1)
    async with spawned("mooncake") as peer, spawned("mooncake") as other:
        route = await connected(side, peer)
        await freeze(peer.process.pid)
        write = route.write(EVERYTHING, EVERYTHING)
        write.cancel()  # before it began, or with blocks under way: both are to be told truly
        stuck = route.write(EVERYTHING, EVERYTHING)
        await until(lambda: _begun(stuck))
        second = await side.plane.connect(other.address, other.layout)
        assert await end_of(second.write(EVERYTHING, EVERYTHING), 10) is WriteOutcome.LANDED
        stuck.cancel()
        # Its pages wait for what is under way.
        await until(lambda: _pause_s(stuck) == route.pause_s / 2)
        # What was submitted may land at any time: nothing is proven.
        with pytest.raises(TimeoutError):
            await end_of(stuck, 0.5)
        assert _pause_s(stuck) == route.pause_s / 2  # it is looked at no more often
        peer.process.send_signal(signal.SIGCONT)
        for each in (stuck, write):
            assert await end_of(each, 10) in (WriteOutcome.CANCELLED, WriteOutcome.LANDED)
        landed = np.frombuffer(await bytes_of(peer, EVERYTHING), dtype=np.uint8)
        assert max(stuck.landed_bytes, side.pool.layout.page_bytes) == np.count_nonzero(landed)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(120)
async def test_a_receiver_that_was_frozen_for_long_proves_its_pages_when_it_goes_on(
    side: Side, peer: Peer
) -> None:
    """By default the engine would give up after 30 s."""
    side.fill(1)
    route = await connected(side, peer)
    await freeze(peer.process.pid)
    write = route.write(EVERYTHING, EVERYTHING)
    with pytest.raises(TimeoutError):
        await end_of(write, 33)
    peer.process.send_signal(signal.SIGCONT)
    assert await end_of(write, 10) is WriteOutcome.LANDED, write.error
    assert await bytes_of(peer, EVERYTHING) == side.pool.pages_bytes(EVERYTHING).tobytes()


def under_way(side: Side) -> dict[str, int]:
    assert isinstance(side.plane, mooncake.MooncakePlane)
    return side.plane.under_way


def _begun(write: Write) -> bool:
    assert isinstance(write, ThreadWrite)
    return write.job is not None


def _pause_s(write: Write) -> float:
    assert isinstance(write, ThreadWrite) and write.job is not None
    return write.job.pause_s


async def test_a_plane_with_a_frozen_peer_closes_all_the_same(
    side: Side, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake.MooncakePlane, "close_grace_s", 0.3)
    route = await connected(side, peer)
    await freeze(peer.process.pid)
    write = route.write(EVERYTHING, EVERYTHING)
    await until(lambda: _begun(write))
    await until(lambda: under_way(side)["handles"] > 0)
    assert under_way(side)["bytes"] > 0
    assert under_way(side)["jobs"] == under_way(side)["writes"] == 1
    await asyncio.wait_for(side.plane.close(), 20)
    assert write.done.result() is WriteOutcome.UNPROVEN and "closed" in write.error


async def test_addresses_outside_the_receivers_pool_are_refused_by_it(
    side: Side, peer: Peer
) -> None:
    (buffer,) = peer.layout.buffers
    lie = msgspec.structs.replace(buffer, address=buffer.address + buffer.size_bytes + (1 << 30))
    route = await side.plane.connect(
        peer.address, msgspec.structs.replace(peer.layout, buffers=(lie,))
    )
    assert await end_of(route.write(pages(0), pages(0)), 10) is WriteOutcome.UNPROVEN
    assert await peer.ask("landed") == 0


async def test_a_session_of_another_process_is_not_used_again(side: Side, peer: Peer) -> None:
    assert isinstance(side.plane, mooncake.MooncakePlane)
    side.fill(2)
    earlier = _elsewhere(peer.address)  # the port's last owner, as we got to know it
    stale = await side.plane.connect(earlier, peer.layout)
    assert await end_of(stale.write(pages(0), pages(0))) is WriteOutcome.LANDED
    for _ in range(2):
        route = await side.plane.connect(peer.address, peer.layout)
        assert await end_of(route.write(pages(3), pages(4))) is WriteOutcome.LANDED
    assert await bytes_of(peer, pages(4)) == side.pool.pages_bytes(pages(3)).tobytes()
    assert len(side.plane._engines) == 2
    landed = await peer.ask("landed")
    write = stale.write(pages(5), pages(6))  # meant for the last owner
    assert await end_of(write) is WriteOutcome.UNPROVEN
    assert "has ended" in write.error
    assert await peer.ask("landed") == landed


def _elsewhere(address: PlaneAddress) -> PlaneAddress:
    identity = msgspec.structs.replace(address.process, boot_id="another boot")
    return msgspec.structs.replace(address, process=identity)


@pytest.mark.parametrize("pid", [1, 2**22 - 1], ids=["another's here", "nobody's here"])
async def test_a_peer_of_another_host_is_reached_whatever_its_pid_means_here(
    pid: int, side: Side, peer: Peer
) -> None:
    side.fill(2)
    there = _elsewhere(peer.address)
    there = msgspec.structs.replace(there, process=msgspec.structs.replace(there.process, pid=pid))
    route = await side.plane.connect(there, peer.layout)
    assert await end_of(route.write(pages(3), pages(4))) is WriteOutcome.LANDED
    assert await bytes_of(peer, pages(4)) == side.pool.pages_bytes(pages(3)).tobytes()
    with pytest.raises(TransferError, match="another host"):
        await side.plane.fence(there)


async def test_a_route_to_a_dead_process_submits_nothing(side: Side) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    async with spawned("mooncake") as peer:
        route = await connected(side, peer)
        submitted = _count_submits(route)
        peer.process.kill()
        await peer.process.wait()
        write = route.write(EVERYTHING, EVERYTHING)
        assert await end_of(write, 10) is WriteOutcome.UNPROVEN
        assert "has ended" in write.error and not submitted and route.jobs == 0
        with pytest.raises(TransferError, match="ended"):
            await side.plane.connect(peer.address, peer.layout)
        route.close()
        route.close()
        with pytest.raises(TransferError, match="closed"):
            route.write(pages(0), pages(0))
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 16  # the engine keeps some


def _count_submits(route: MooncakeRoute, fail_at: int = -1) -> list[int]:
    """Note the sizes that this route submits; the engine raises at call `fail_at`."""
    submitted: list[int] = []
    submit = route.submit

    def counting(session: str, source: int, target: int, size: int) -> int:
        submitted.append(size)
        if len(submitted) == fail_at:
            raise RuntimeError("the engine's own")
        return int(submit(session, source, target, size))

    route.submit = counting
    return submitted


@pytest.mark.parametrize("call", ["submit", "check"])
async def test_an_engine_that_raises_gets_its_window_back(
    call: str, monkeypatch: pytest.MonkeyPatch, side: Side, peer: Peer
) -> None:
    side.fill(9)
    route = await side.plane.connect(peer.address, peer.layout)
    assert isinstance(route, MooncakeRoute)
    with monkeypatch.context() as patched:
        if call == "submit":
            submitted = _count_submits(route, fail_at=3)
        else:
            submitted = _count_submits(route)
            patched.setattr(route, "check", lambda handle: 1 // 0)
        write = route.write(SCATTERED, SCATTERED)
        assert await end_of(write, 10) is WriteOutcome.UNPROVEN
    assert ("RuntimeError" if call == "submit" else "ZeroDivisionError") in write.error
    assert (route.jobs, route.handles, route.bytes) == (0, 0, 0)
    if call == "submit":
        assert len(submitted) == 3
        # Followed to their end.
        assert write.landed_bytes == sum(submitted[:2]) == await peer.ask("landed")
    assert await end_of(route.write(SCATTERED, SCATTERED)) is WriteOutcome.LANDED


async def test_after_a_failed_block_nothing_more_of_a_write_is_submitted() -> None:
    side = Side("mooncake", "layer_first", 4_000_000)
    side.fill(7)
    async with spawned("mooncake", "layer_first") as peer:
        first, *others = peer.layout.buffers
        lie = msgspec.structs.replace(first, address=first.address + (1 << 40))
        route = await side.plane.connect(
            peer.address, msgspec.structs.replace(peer.layout, buffers=(lie, *others))
        )
        assert isinstance(route, MooncakeRoute)
        submitted = _count_submits(route)
        write = route.write(SCATTERED, SCATTERED)
        assert await end_of(write) is WriteOutcome.UNPROVEN
        assert "status -1" in write.error
        # At this rate a write takes a second, and a block that is refused is known to be after some
        # milliseconds.
        assert 0 < sum(submitted) < write.total_bytes / 2
        so_far = len(submitted)
        good = await side.plane.connect(peer.address, peer.layout)
        assert await end_of(good.write(pages(0), pages(0))) is WriteOutcome.LANDED
        assert len(submitted) == so_far
    await side.close()


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_dead_writers_child_does_not_keep_its_bytes_coming(busy: bool) -> None:
    side = Side("mooncake", "page_first", None)
    stop = threading.Event()
    threads = [threading.Thread(target=_burn, args=(stop,)) for _ in range(4 if busy else 0)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            await _kill_a_forked_writer(side)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        await side.close()


def _burn(stop: threading.Event) -> None:
    block = np.ones(1 << 21)
    while not stop.is_set():
        block.sum()


async def _kill_a_forked_writer(side: Side, *prefix: str, host: str = "127.0.0.1") -> None:
    async with spawned("mooncake", prefix=prefix, host=host) as peer:
        await write_and_fork(peer, side, 4)  # then all of its connections are open
        await kill_a_writer(peer, side)


class Apart(NamedTuple):
    """A network namespace, this one's address for it, and its own."""

    name: str
    near: str
    far: str


@pytest.fixture
def apart() -> Iterator[Apart]:
    name, near, far = (f"kv{kind}{os.getpid()}" for kind in ("n", "a", "b"))
    # Runs of the tests side by side, and after one that was killed, have subnets of their own.
    first = ipaddress.ip_address("10.213.0.0") + os.getpid() % (1 << 14) * 4
    ours, theirs = str(first + 1), str(first + 2)
    added = shutil.which("ip") and subprocess.run(
        ["ip", "netns", "add", name], check=False, capture_output=True
    )
    if not added or added.returncode:
        pytest.skip("no right to make a network namespace")
    try:
        for command in (
            f"ip link add {near} type veth peer name {far} netns {name}",
            f"ip addr add {ours}/30 dev {near}",
            f"ip link set {near} up",
            f"ip -n {name} addr add {theirs}/30 dev {far}",
            f"ip -n {name} link set {far} up",
            f"ip -n {name} link set lo up",
        ):
            subprocess.run(command.split(), check=True, capture_output=True)
        yield Apart(name, ours, theirs)
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.slow
async def test_a_dead_writer_of_another_network_namespace_is_fenced(apart: Apart) -> None:
    side = Side("mooncake", "page_first", None, apart.near)
    try:
        for _ in range(sized(2, 5)):
            await _kill_a_forked_writer(side, "ip", "netns", "exec", apart.name, host=apart.far)
    finally:
        await side.close()


async def test_pages_go_both_ways_between_two_hosts(apart: Apart) -> None:
    host = ("ip", "netns", "exec", apart.name, "unshare", "--pid", "--fork", "--mount-proc")
    side = Side("mooncake", "page_first", None, apart.near)
    side.fill(2)
    async with spawned("mooncake", prefix=host, host=apart.far) as peer:
        route = await side.plane.connect(peer.address, peer.layout)
        assert await end_of(route.write(pages(3), pages(4))) is WriteOutcome.LANDED
        assert await bytes_of(peer, pages(4)) == side.pool.pages_bytes(pages(3)).tobytes()
        await peer.ask("fill", 8)
        await let_write(peer, side)
        await peer.ask("write", [5], [6])
        assert (await peer.ask("done"))[0] == "landed"
        assert side.pool.pages_bytes(pages(6)).tobytes() == await bytes_of(peer, pages(5))
        with pytest.raises(TransferError, match="another host"):
            await side.plane.fence(peer.address)
    await side.close()


@pytest.mark.parametrize("address", ["", "host", "host:", "host:99999999", "a b:1", "127.0.0.1:1"])
async def test_what_is_no_session_is_refused(address: str, side: Side) -> None:
    with pytest.raises(TransferError):
        await side.plane.connect(
            msgspec.structs.replace(side.address, locator=address), side.layout
        )


def test_more_regions_than_the_engine_can_take_are_refused() -> None:
    plane = mooncake.MooncakePlane()
    streams: list[tuple[str, str, tuple[int, ...]]] = [
        (f"{i}", "uint8", (1,)) for i in range(mooncake.MAX_REGIONS + 1)
    ]
    with pytest.raises(LayoutError, match="page-first"):
        plane.export(build_layout(streams, page_size=1, num_pages=1, order="layer_first"))


def test_the_engine_finds_its_settings_and_the_operators_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in mooncake._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    mooncake.engine_class("127.0.0.1", force_tcp=True)
    assert mooncake._ENVIRONMENT["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "65535"
    assert {name: os.environ[name] for name in mooncake._ENVIRONMENT} == {
        **mooncake._ENVIRONMENT,
        "MC_LOG_LEVEL": "INFO",
    }
