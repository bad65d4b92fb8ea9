"""What only nixl has: who copies, two agents, and connections that outlive a transfer."""

from __future__ import annotations

import asyncio
import importlib.util
import logging.config
import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from kvflow.protocols.errors import LayoutError, MisuseError, TransferError
from kvflow.protocols.ports import WriteOutcome
from kvflow.testing.conformance.bench import let_write
from kvflow.testing.freezing import freeze
from kvflow.transports.data import locators
from kvflow.transports.data.locators import new_name, pack_locator, unpack_locator
from kvflow.transports.data.nixl import library
from kvflow.transports.data.nixl import plane as nixl
from kvflow.transports.data.nixl.agent import Agent, decode_metadata, watched
from kvflow.transports.host.identity import own_identity
from kvflow.transports.host.tcp_table import borrow, encode_address, rows
from tests.transports.peer_process import (
    EVERYTHING,
    Peer,
    Side,
    check_no_late_byte,
    end_of,
    kill_a_writer,
    pages,
    spawned,
    until,
    write_and_fork,
)

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("nixl_cu12") or importlib.util.find_spec("nixl_cu13")),
    reason="no nixl",
)

PLANE = "nixl"
SCATTERED = EVERYTHING[::2].copy()  # no two pages are one block
RATE = 4_000_000
BY_THE_WRITER, BY_THE_RECEIVER = "tcp,cma,self", "tcp,self"  # who copies


@pytest.fixture(params=[BY_THE_WRITER, BY_THE_RECEIVER], ids=["cma", "tcp"])
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", BY_THE_RECEIVER)


def plane_of(side: Side) -> nixl.NixlPlane:
    assert isinstance(side.plane, nixl.NixlPlane)
    return side.plane


async def landed(side: Side, peer: Peer) -> int:
    route = await side.plane.connect(peer.address, peer.layout)
    assert await end_of(route.write(pages(0), pages(0))) is WriteOutcome.LANDED
    return int(await peer.ask("landed"))


async def test_a_write_to_a_receiver_that_is_killed_is_unproven(transports: str) -> None:
    side = Side("nixl", "page_first", RATE)
    side.fill(1)
    async with spawned("nixl") as peer:
        route = await side.plane.connect(peer.address, peer.layout)
        write = route.write(EVERYTHING, EVERYTHING)
        await until(lambda: write.landed_bytes > 0)
        peer.process.kill()
        assert await end_of(write, 10) is WriteOutcome.UNPROVEN
        assert write.error and 0 < write.landed_bytes < write.total_bytes
        await peer.process.wait()
        again = route.write(pages(0), pages(0))
        assert await end_of(again, 10) is WriteOutcome.UNPROVEN
        assert "has ended" in again.error
        with pytest.raises(TransferError, match="ended"):
            await side.plane.connect(peer.address, peer.layout)
    assert not plane_of(side).agent.open_transfers
    await side.close()


async def test_over_tcp_nothing_is_called_landed_that_a_frozen_receiver_has_not_read(
    over_tcp: None, side: Side
) -> None:
    side.fill(1)
    async with spawned("nixl") as peer, spawned("nixl") as other:
        route = await side.plane.connect(peer.address, peer.layout)
        await freeze(peer.process.pid)
        write = route.write(EVERYTHING, EVERYTHING)
        second = await side.plane.connect(other.address, other.layout)
        other_write = second.write(EVERYTHING, EVERYTHING)
        assert await end_of(other_write, 10) is WriteOutcome.LANDED
        with pytest.raises(TimeoutError):
            await end_of(write, 0.5)
        write.cancel()
        with pytest.raises(TimeoutError):  # what was submitted may land at any time
            await end_of(write, 0.3)
        assert write.landed_bytes == 0
        peer.process.send_signal(signal.SIGCONT)
        assert await end_of(write, 10) in (WriteOutcome.CANCELLED, WriteOutcome.LANDED)
        assert write.landed_bytes == await peer.ask("landed")


async def test_over_tcp_a_write_outlives_its_error(over_tcp: None, side: Side, peer: Peer) -> None:
    side.fill(1)
    first = await landed(side, peer)  # UCX completes a connection with the first write
    route = await side.plane.connect(peer.address, peer.layout)
    await freeze(peer.process.pid)
    write = route.write(pages(0, 2, 4), pages(0, 2, 4))
    await until(lambda: plane_of(side).agent.open_transfers > 0)
    agent = plane_of(side).agent
    for fd in set[int]().union(*(watched(fd) for fd in agent.event_fds)):
        with borrow(fd) as connection:
            if connection is not None and connection.getpeername()[1] not in agent.ports:
                connection.shutdown(2)
    assert await end_of(write, 10) is WriteOutcome.UNPROVEN
    assert write.landed_bytes == 0
    peer.process.send_signal(signal.SIGCONT)
    while await peer.ask("landed") <= first:
        await asyncio.sleep(0.01)


async def _stranded(side: Side, peer: Peer) -> None:
    """The peer writes, and the kernel keeps the bytes, because our agent cannot look."""
    await peer.ask("fill", 8)
    await let_write(peer, side)
    plane_of(side)._inbound_agent._lock.acquire()
    assert side.landed_bytes() == 0
    await peer.ask("write", EVERYTHING.tolist(), EVERYTHING.tolist())
    ports = plane_of(side)._inbound_agent.ports
    await until(
        lambda: any(row.ends.port in ports and _unread(row.inode) for row in rows(ports=ports))
    )


def _unread(inode: int) -> int:
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table, encoding="ascii") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if int(fields[9]) == inode:
                    return int(fields[4].partition(":")[2], 16)
    return 0


async def test_over_tcp_a_dead_writers_last_bytes_are_waited_for(
    over_tcp: None, side: Side, peer: Peer
) -> None:
    await _stranded(side, peer)
    fence = asyncio.ensure_future(side.plane.fence(peer.address))
    peer.process.kill()
    await peer.process.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(fence), 0.5)
    plane_of(side)._inbound_agent._lock.release()
    await asyncio.wait_for(fence, 10)
    assert side.landed_bytes() > 0  # written by ourselves, after the writer's death
    await check_no_late_byte(side)


async def test_over_tcp_deregistered_memory_is_written_all_the_same(
    over_tcp: None, side: Side, peer: Peer
) -> None:
    await _stranded(side, peer)
    agent = plane_of(side)._inbound_agent
    agent._agent.deregister_memory(agent._registered.pop())
    agent._lock.release()
    await until(lambda: side.landed_bytes() > 0)


async def test_a_dead_writers_child_does_not_keep_its_bytes_coming(
    transports: str, side: Side
) -> None:
    for _ in range(3):
        async with spawned("nixl") as peer:
            await write_and_fork(peer, side, 1)
            await kill_a_writer(peer, side)


async def test_both_ways_at_once_and_each_ones_death_is_seen(transports: str, side: Side) -> None:
    side.fill(3)
    async with spawned("nixl") as peer:
        await let_write(peer, side)
        route = await side.plane.connect(peer.address, peer.layout)
        for _ in range(5):
            await peer.ask("write", EVERYTHING[:200].tolist(), EVERYTHING[:200].tolist())
            write = route.write(EVERYTHING[200:], EVERYTHING[200:])
            assert (await peer.ask("done"))[0] == "landed"
            assert await end_of(write) is WriteOutcome.LANDED
        peer.process.kill()
        await asyncio.wait_for(side.plane.fence(peer.address), 10)
        (dead,) = plane_of(side)._peers
        (await side.plane.connect(side.address, side.layout)).close()
        assert dead in plane_of(side)._peers, "it has a route yet"
    route.close()
    another = Side("nixl", "page_first", None)
    await side.plane.connect(another.address, another.layout)
    assert dead not in plane_of(side)._peers and len(plane_of(side)._peers) == 2
    await another.close()


async def test_over_other_transports_no_fence_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,posix,cma")
    side = Side("nixl", "page_first", None)
    with pytest.raises(TransferError, match="over posix the end of a writer's bytes cannot be"):
        await side.plane.fence(side.address)
    await side.close()


async def test_a_plane_with_a_frozen_peer_closes_all_the_same(
    over_tcp: None, side: Side, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl.NixlPlane, "close_grace_s", 0.3)
    route = await side.plane.connect(peer.address, peer.layout)
    await freeze(peer.process.pid)
    write = route.write(EVERYTHING, EVERYTHING)
    await until(lambda: plane_of(side).agent.open_transfers > 0)
    await asyncio.wait_for(side.plane.close(), 20)
    assert write.done.result() is WriteOutcome.UNPROVEN and "closed" in write.error


async def test_a_frozen_peer_is_not_waited_for_without_end(
    side: Side, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "_ANSWER_S", 0.3)
    await freeze(peer.process.pid)
    with pytest.raises(TransferError, match="no answer"):
        await side.plane.connect(peer.address, peer.layout)
    peer.process.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    assert await landed(side, peer) == 0  # our pages are empty


async def test_addresses_outside_the_receivers_pool_are_refused() -> None:
    side = Side("nixl", "layer_first", None)
    side.fill(1)
    async with spawned("nixl", "layer_first") as peer:
        first, *others = peer.layout.buffers
        lie = msgspec.structs.replace(others[-1], address=others[-1].address + (1 << 40))
        layout = msgspec.structs.replace(peer.layout, buffers=(first, *others[:-1], lie))
        route = await side.plane.connect(peer.address, layout)
        write = route.write(SCATTERED, SCATTERED)
        assert await end_of(write, 10) is WriteOutcome.UNPROVEN
        assert "are refused" in write.error
        good = await side.plane.connect(peer.address, peer.layout)
        assert await end_of(good.write(pages(0), pages(0))) is WriteOutcome.LANDED
    await side.close()


@pytest.mark.parametrize("locator", ["", "host:1", "a b", "0" * 40, "~" * 4096, "c-qU$"])
async def test_what_is_no_metadata_is_refused(locator: str, side: Side) -> None:
    with pytest.raises(TransferError):
        await side.plane.connect(
            msgspec.structs.replace(side.address, locator=locator), side.layout
        )


def test_metadata_of_another_process_is_refused() -> None:
    me = own_identity()
    metadata = b"nixlSerDes|Agent" + len(new_name(me)).to_bytes(8, "little") + new_name(me).encode()
    assert decode_metadata(pack_locator(metadata), me)[0].startswith(f"kvflow-{me.pid}-")
    with pytest.raises(TransferError, match="is not one of process 1"):
        decode_metadata(pack_locator(metadata), msgspec.structs.replace(me, pid=1))
    with pytest.raises(TransferError, match="more than 65536 bytes"):
        decode_metadata(pack_locator(metadata + bytes(1 << 20)), me)
    with pytest.raises(TransferError, match="no agent in it"):
        decode_metadata(pack_locator(b"nobody"), me)
    with pytest.raises(TransferError, match="not base 85"):
        decode_metadata("0" * 4097, me)


async def test_other_metadata_under_a_peers_name_is_refused_while_it_is_connected(
    side: Side, peer: Peer
) -> None:
    side.fill(1)
    assert await landed(side, peer) == side.pool.layout.page_bytes
    _, metadata = decode_metadata(peer.address.locator, peer.address.process)
    other = msgspec.structs.replace(peer.address, locator=pack_locator(metadata + b"|"))
    with pytest.raises(TransferError, match="metadata differs"):
        await side.plane.connect(other, peer.layout)
    assert await landed(side, peer) == side.pool.layout.page_bytes
    for route in list(plane_of(side)._routes):
        route.close()
    (await side.plane.connect(other, peer.layout)).close()
    [known] = plane_of(side)._peers.values()
    assert known.metadata == metadata + b"|" and not known.is_broken
    assert await landed(side, peer) == side.pool.layout.page_bytes


def test_more_buffers_than_a_locator_describes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match="page-first"):
        pack_locator(os.urandom(4000))
    described = os.urandom(100)
    length = len(pack_locator(described))
    monkeypatch.setattr(locators, "MAX_LOCATOR", length)
    assert unpack_locator(pack_locator(described)) == described
    monkeypatch.setattr(locators, "MAX_LOCATOR", length - 1)
    with pytest.raises(LayoutError, match=f"take {length} characters to describe"):
        pack_locator(described)


def test_an_agent_listens_at_its_hosts_interface_only() -> None:
    agent = Agent(new_name(own_identity()), "127.0.0.1", "")
    listening = [row for row in rows() if row.is_listening and row.ends.port in agent.ports]
    assert {row.ends.address for row in listening} == {encode_address("127.0.0.1")}
    assert agent.event_fds and watched(agent.event_fds[0]) and watched(1 << 20) == set()
    agent.close()
    agent.close()


async def test_an_idle_plane_does_not_look(side: Side, peer: Peer) -> None:
    await let_write(peer, side)
    await peer.ask("write", [1], [2])
    assert (await peer.ask("done"))[0] == "landed"
    progress = plane_of(side)._progress
    assert progress is not None
    turns = -1
    while turns != progress.turns:
        turns = progress.turns
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    assert progress.turns == turns and not progress.errors


async def test_the_ports_of_an_agent_are_its_own() -> None:
    """A fence waits for connections to them: for those to others it might wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as another:
        side = Side("nixl", "page_first", None)
        ports = plane_of(side)._inbound_agent.ports
        assert ports and another.getsockname()[1] not in ports
        await side.close()


async def test_what_nixl_cannot_ask_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(peer: str, address: int) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    side, other = (Side("nixl", "page_first", None) for _ in range(2))
    monkeypatch.setattr(plane_of(side).agent, "prepare_probe", refuse)
    with pytest.raises(TransferError, match=r"cannot reach .*: RuntimeError: NIXL_ERR_BACKEND"):
        await side.plane.connect(other.address, other.layout)
    monkeypatch.undo()
    unknown = msgspec.structs.replace(own_identity(), boot_id="another host's")
    assert not nixl.has_died(own_identity()) and not nixl.has_died(unknown)
    for each in (side, other):
        await each.close()


def test_what_the_library_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lame_nixl.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "MODULES", ("lame_nixl",))
    with pytest.raises(MisuseError, match=r"nixl cannot be loaded .*no_such_dependency"):
        library.nixl_library()


def test_loading_the_library_leaves_logging_alone() -> None:
    handlers, configure = list(logging.root.handlers), logging.config.dictConfig
    library.nixl_library()
    assert (logging.root.handlers, logging.config.dictConfig) == (handlers, configure)
