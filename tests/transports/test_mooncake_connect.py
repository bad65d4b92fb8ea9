"""Peers that fall silent, lie or come too often cost honest peers nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import MisuseError, TransferError
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity, WriteOutcome
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import WIRE_VERSION, GrantId, Incarnation, Register
from kvflow.testing.pair import small_layout
from kvflow.transports.control.zmq import connect_dealer
from kvflow.transports.data import threaded
from kvflow.transports.data.mooncake import plane as mooncake
from kvflow.transports.host.identity import own_identity
from tests.transports.over_ipv6 import move_one_room
from tests.transports.peer_process import Peer, Side, end_of, pages, spawned, until

pytest.importorskip("mooncake")

PLANE = "mooncake"
SOON_S = 0.5


@contextmanager
def mute_port() -> Iterator[str]:
    """A session whose connections nobody reads, as those of a frozen decode."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@asynccontextmanager
async def half_mute_port() -> AsyncIterator[str]:
    """A session that answers probes, and nothing else."""
    held: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        size_bytes = int.from_bytes(await reader.readexactly(8), "little")
        kind, *_ = await reader.readexactly(size_bytes)
        if kind == 3:
            writer.write((3).to_bytes(8, "little") + b"\x03{}")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in held:
            writer.close()
        server.close()
        await server.wait_closed()


def at(session: str, process: ProcessIdentity | None = None) -> PlaneAddress:
    return PlaneAddress("mooncake", session, process or own_identity())


def elsewhere(number: int) -> ProcessIdentity:
    return msgspec.structs.replace(own_identity(), boot_id="elsewhere", pid=number)


@pytest.fixture
async def plane(side: Side) -> mooncake.MooncakePlane:
    assert isinstance(side.plane, mooncake.MooncakePlane)
    return side.plane


async def lands(plane: mooncake.MooncakePlane, peer: Peer) -> bool:
    route = await asyncio.wait_for(plane.connect(peer.address, peer.layout), 10)
    return await end_of(route.write(pages(0), pages(0)), 10) is WriteOutcome.LANDED


async def test_an_engine_that_does_not_give_memory_back_holds_up_no_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threaded, "CLOSE_S", 0.1)
    side, end = Side("mooncake", "page_first", None), threading.Event()
    give_back = side.plane._stop  # type: ignore[attr-defined]
    monkeypatch.setattr(side.plane, "_stop", lambda: end.wait(20) and give_back())
    async with asyncio.timeout(20):
        await side.plane.close()
    assert "has not given back the pool's memory within 0.1 s" in caplog.text
    end.set()
    closing = side.plane._closing  # type: ignore[attr-defined]
    await until(lambda: not closing.hung)
    side.pool.close()


async def test_mute_ports_cost_no_thread_and_keep_nobody_waiting(
    plane: mooncake.MooncakePlane, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mute_port() as session:
        before = threading.active_count()
        mute = [asyncio.ensure_future(plane.connect(at(session), peer.layout)) for _ in range(40)]
        assert await lands(plane, peer)
        assert threading.active_count() <= before + 2, "the plane's own, and one to connect"
        assert not any(task.done() for task in mute)
        for task in mute:
            task.cancel()
        await asyncio.gather(*mute, return_exceptions=True)
        monkeypatch.setattr(mooncake, "_ANSWER_S", SOON_S)
        with pytest.raises(TransferError, match=f"no .* engine answers at {session} within 0.5 s"):
            await plane.connect(at(session), peer.layout)


async def test_who_falls_silent_after_the_first_answer_is_left_to_the_engine(
    plane: mooncake.MooncakePlane, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "_CONNECT_S", SOON_S)
    async with half_mute_port() as session:
        tried = [
            plane.connect(at(session), peer.layout)
            for _ in range(2 * mooncake.MooncakePlane.connects)
        ]
        told = await asyncio.gather(*tried, return_exceptions=True)
        assert {str(error) for error in told} == {
            f"no mooncake session with {session} within 0.5 s"
        }
        assert 1 <= plane._connecting.hung <= mooncake.MooncakePlane.connects
    await until(lambda: plane._connecting.hung == 0)
    monkeypatch.setattr(mooncake, "_CONNECT_S", 10.0)
    assert await lands(plane, peer)


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", (3).to_bytes(8, "little") + b"\x01{}"]
)
async def test_what_is_no_engine_is_refused_at_once(
    answer: bytes, side: Side, plane: mooncake.MooncakePlane
) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    session = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        with pytest.raises(TransferError, match="no mooncake engine answers at"):
            await asyncio.wait_for(plane.connect(at(session), side.pool.layout), 10)
    with pytest.raises(TransferError, match="no mooncake engine answers at"):
        await asyncio.wait_for(plane.connect(at(session), side.pool.layout), 10)
    # uvloop would take the lower 16 bits.
    for nobody in ("127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:99999"):
        with pytest.raises(TransferError, match="is not a mooncake session"):
            await asyncio.wait_for(plane.connect(at(nobody), side.pool.layout), 10)
    assert not plane._sessions, "an engine that was never met is nothing to remember"


async def test_addresses_of_another_family_are_refused_in_one_line(
    side: Side, plane: mooncake.MooncakePlane
) -> None:
    with pytest.raises(MisuseError, match="host ::1: mooncake speaks IPv4 in this process"):
        mooncake.MooncakePlane("::1")
    with pytest.raises(MisuseError, match="fe80::1%eth0: peers cannot use an address with a zone"):
        mooncake.MooncakePlane("fe80::1%eth0")
    with pytest.raises(TransferError, match=r"speaks IPv4 .*, and the peer's session is \[::1\]:9"):
        await plane.connect(at("[::1]:9"), side.pool.layout)


async def test_a_session_is_the_process_that_listens_there(
    plane: mooncake.MooncakePlane, peer: Peer
) -> None:
    route = await plane.connect(peer.address, peer.layout)
    session = peer.address.locator
    with pytest.raises(TransferError, match=f"{os.getpid()} does not listen at {session}"):
        await plane.connect(at(session), peer.layout)
    assert await end_of(route.write(pages(0), pages(0))) is WriteOutcome.LANDED, "it is its owner's"
    assert len(plane._engines) == 1 and await lands(plane, peer)


async def test_engines_and_sessions_are_bounded(
    plane: mooncake.MooncakePlane, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "MAX_ENGINES", 2)
    for number in range(5):
        address = at(peer.address.locator, elsewhere(number))
        if number < 2:
            await plane.connect(address, peer.layout)
        else:
            with pytest.raises(TransferError, match="more than 2 engines are not started: restart"):
                await plane.connect(address, peer.layout)
    async with spawned("mooncake") as other:
        for number in range(2):  # another session that is used again: both engines are new to it
            await plane.connect(at(other.address.locator, elsewhere(number)), other.layout)
    assert len(plane._engines) == 2
    monkeypatch.setattr(mooncake, "MAX_SESSIONS", 2)
    async with spawned("mooncake") as third:
        with pytest.raises(TransferError, match="more than 2 sessions"):
            await plane.connect(third.address, third.layout)
        monkeypatch.setattr(mooncake, "MAX_SESSIONS", 3)
        assert await lands(plane, third)


@pytest.mark.slow
async def test_a_silent_connection_at_a_decodes_port_keeps_prefill_waiting_and_no_more(
    plane: mooncake.MooncakePlane, peer: Peer
) -> None:
    host, port = peer.address.locator.split(":")
    with socket.create_connection((host, int(port))):  # its engine serves nobody else for 5 s
        await asyncio.wait_for(plane.connect(peer.address, peer.layout), 15)


async def test_a_closed_plane_opens_nothing(plane: mooncake.MooncakePlane, peer: Peer) -> None:
    await plane.connect(peer.address, peer.layout)
    ours = plane._layout
    assert ours is not None
    await plane.close()
    # As a connect that had come this far when it was closed.
    with pytest.raises(TransferError, match="closed"):
        plane._reach(peer.address, ours, peer.layout)


async def test_what_cannot_be_looked_at_just_now_is_no_lie(
    plane: mooncake.MooncakePlane, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptors(_: int) -> dict[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(mooncake, "sockets", no_descriptors)
        with pytest.raises(
            TransferError, match=r"look at process .*: Too many open files; try again"
        ):
            await plane.connect(peer.address, peer.layout)
    assert await lands(plane, peer)


async def test_strangers_that_name_mute_ports_keep_no_decode_out() -> None:
    layout, dealers = small_layout(), []
    pools = [PagedPool.allocate(layout) for _ in range(2)]
    async with (
        PrefillNode(pools[0], plane="mooncake") as prefill,
        DecodeNode(pools[1], plane="mooncake") as decode,
    ):
        address, placed = decode.exported
        with mute_port() as session:
            for number in range(1, 41):
                mute = msgspec.structs.replace(address, locator=session)
                register = Register(
                    source=prefill.incarnation,
                    target=Incarnation(number),
                    wire_version=WIRE_VERSION,
                    layout=placed,
                    address=mute,
                    fresh_from=GrantId(1),
                )
                dealers.append(connect_dealer(prefill.control, number))
                assert dealers[-1].send(encode(register))
            await until(lambda: len(prefill.shell.endpoint.core.peers) == 40)
            async with asyncio.timeout(60):
                await move_one_room(prefill, decode)
            for dealer in dealers:
                dealer.close()
    for pool in pools:
        pool.close()
