"""What only mooncake has: writes that may outlive their error, a window, an engine with a life of its own."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time

import msgspec
import numpy as np
import pytest

from kvflow.protocols.errors import LayoutError, MisuseError, TransferError
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import Flight, Landing
from kvflow.transports.data.mooncake import plane as mooncake
from kvflow.transports.data.write_thread import WriteFlight
from tests.freezing import freeze
from tests.transports.peer_process import NUM_PAGES, Side, pages, spawned, until

pytest.importorskip("mooncake")

EVERYTHING = np.arange(NUM_PAGES, dtype=np.int32)


async def test_a_write_to_a_receiver_that_is_killed_is_unproven() -> None:
    side = Side("mooncake", "page_first", 4_000_000)
    async with spawned("mooncake") as peer:
        route = await side.plane.connect(peer.endpoint, peer.layout)
        flight = route.write(EVERYTHING, EVERYTHING)
        await until(lambda: flight.landed_bytes > 0)
        peer.process.kill()
        assert await asyncio.wait_for(asyncio.shield(flight.done), 10) is Landing.UNPROVEN
        assert "status -1" in flight.error and 0 < flight.landed_bytes < flight.total_bytes
    await side.close()


async def test_a_cancelled_write_waits_for_a_frozen_receiver_at_little_cost() -> None:
    side = Side("mooncake", "page_first", None)
    side.fill(1)
    async with spawned("mooncake") as peer, spawned("mooncake") as other:
        route = await side.plane.connect(peer.endpoint, peer.layout)
        assert await asyncio.shield(route.write(pages(0), pages(0)).done) is Landing.LANDED
        await freeze(peer.process.pid)
        flight = route.write(EVERYTHING, EVERYTHING)
        flight.cancel()  # before it began, or with blocks under way: both are to be told truly
        stuck = route.write(EVERYTHING, EVERYTHING)
        await until(lambda: _begun(stuck))
        second = await side.plane.connect(other.endpoint, other.layout)
        assert await asyncio.wait_for(asyncio.shield(second.write(EVERYTHING, EVERYTHING).done), 10) is Landing.LANDED
        stuck.cancel()
        used, began = _cpu_s(), time.monotonic()
        with pytest.raises(TimeoutError):  # what was submitted may land at any time: nothing is proven
            await asyncio.wait_for(asyncio.shield(stuck.done), 0.5)
        assert _cpu_s() - used < 0.2 * (time.monotonic() - began)
        peer.process.send_signal(signal.SIGCONT)
        assert await asyncio.wait_for(asyncio.shield(stuck.done), 10) in (Landing.DRAINED, Landing.LANDED)
        assert await asyncio.wait_for(asyncio.shield(flight.done), 10) in (Landing.DRAINED, Landing.LANDED)
        landed = np.frombuffer(await peer.bytes_of(EVERYTHING), dtype=np.uint8)
        assert max(stuck.landed_bytes, side.pool.layout.page_bytes) == np.count_nonzero(landed)
    await side.close()


def _begun(flight: Flight) -> bool:
    assert isinstance(flight, WriteFlight)
    return flight.job is not None


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def test_a_plane_with_a_frozen_peer_closes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_CLOSE_GRACE_S", 0.3)
    side = Side("mooncake", "page_first", None)
    async with spawned("mooncake") as peer:
        route = await side.plane.connect(peer.endpoint, peer.layout)
        assert await asyncio.shield(route.write(pages(0), pages(0)).done) is Landing.LANDED
        await freeze(peer.process.pid)
        flight = route.write(EVERYTHING, EVERYTHING)
        await until(lambda: _begun(flight))
        await asyncio.wait_for(side.plane.close(), 5)
        assert flight.done.result() is Landing.UNPROVEN and "closed" in flight.error
    side.pool.close()


async def test_addresses_outside_the_receivers_pool_are_refused_by_it() -> None:
    side = Side("mooncake", "page_first", None)
    async with spawned("mooncake") as peer:
        (buffer,) = peer.layout.buffers
        lie = msgspec.structs.replace(buffer, address=buffer.address + buffer.size_bytes + (1 << 30))
        route = await side.plane.connect(peer.endpoint, msgspec.structs.replace(peer.layout, buffers=(lie,)))
        assert await asyncio.wait_for(asyncio.shield(route.write(pages(0), pages(0)).done), 10) is Landing.UNPROVEN
        assert await peer.ask("landed") == 0
    await side.close()


async def test_a_session_of_another_process_is_not_used_again() -> None:
    side = Side("mooncake", "page_first", None)
    assert isinstance(side.plane, mooncake.MooncakePlane)
    side.fill(2)
    async with spawned("mooncake") as peer:
        earlier = msgspec.structs.replace(peer.endpoint.witness, pid=1)  # the port's last owner, as we got to know it
        await side.plane.connect(msgspec.structs.replace(peer.endpoint, witness=earlier), peer.layout)
        for _ in range(2):
            route = await side.plane.connect(peer.endpoint, peer.layout)
            assert await asyncio.shield(route.write(pages(3), pages(4)).done) is Landing.LANDED
        assert await peer.bytes_of(pages(4)) == side.pool.pages_bytes(pages(3)).tobytes()
        assert len(side.plane._engines) == 2
    await side.close()


@pytest.mark.parametrize("address", ["", "host", "host:", "host:99999999", "a b:1", "127.0.0.1:1"])
async def test_what_is_no_session_is_refused(address: str) -> None:
    side = Side("mooncake", "page_first", None)
    with pytest.raises(TransferError):
        await side.plane.connect(msgspec.structs.replace(side.endpoint, address=address), side.layout)
    await side.close()


def test_more_regions_than_the_engine_can_take_are_refused() -> None:
    plane = mooncake.MooncakePlane()
    streams: list[tuple[str, str, tuple[int, ...]]] = [(f"{i}", "uint8", (1,)) for i in range(mooncake.MAX_REGIONS + 1)]
    with pytest.raises(LayoutError, match="page-first"):
        plane.export(build_layout(streams, page_size=1, num_pages=1, order="layer_first"))


def test_memory_is_registered_once() -> None:
    side = Side("mooncake", "page_first", None)
    with pytest.raises(LayoutError, match="one pool"):
        side.plane.export(side.pool.layout)
    side.pool.close()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(MisuseError, match=r"pip install 'kvflow\[mooncake\]'"):
        mooncake.MooncakePlane()


def test_the_engines_queue_is_never_the_default() -> None:
    assert os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "65535"
