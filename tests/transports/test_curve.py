"""The control key: a peer without it is cut off before a frame of its own reaches our code."""

from __future__ import annotations

import asyncio
import functools
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import MisuseError, RefusedError
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import Heartbeat, Incarnation
from kvflow.testing.pair import QUICK, until
from kvflow.transports.control.curve import ControlKey, open_new_key, read_key, write_key
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.data.fake import FakePlane
from tests.transports.test_control import Nodes

pytest_plugins = ["kvflow.testing.fixtures"]
pytestmark = pytest.mark.usefixtures("kvflow_clean_loop")


@pytest.fixture
def key(tmp_path: Path) -> ControlKey:
    write_key(str(tmp_path / "key"))
    made = read_key(str(tmp_path / "key"))
    assert made is not None
    return made


class Keyed(Nodes):
    def __init__(self, prefill: ControlKey | None, decode: ControlKey | None) -> None:
        super().__init__()
        self.prefill = PrefillNode(
            self.pools[0],
            self.plane,
            timing=QUICK,
            bind=functools.partial(bind_router, key=prefill),
        )
        connect = functools.partial(connect_dealer, key=decode)
        self.decode = DecodeNode(
            self.pools[1], FakePlane(self.network), timing=QUICK, connect=connect
        )


def another() -> ControlKey:
    return ControlKey(*zmq.curve_keypair())


async def test_rooms_with_the_key(key: ControlKey) -> None:
    async with Keyed(key, key) as n, Keyed(key, key) as others:  # several in one process
        for nodes in (n, others):
            assert await nodes.one(1) == b"1"
            await until(nodes.at_rest)


@pytest.mark.parametrize("with_key", ["only prefill", "only decode", "two different ones"])
async def test_a_decode_that_is_not_let_in_hears_why(key: ControlKey, with_key: str) -> None:
    prefill = None if with_key == "only decode" else key
    decode = None if with_key == "only prefill" else another()
    text = "it requires a control key" if decode is None else "it has another control key, or none"
    async with Keyed(prefill, decode) as n:
        async with asyncio.timeout(60):
            with pytest.raises(RefusedError, match=f"does not let this decode in: {text}"):
                await n.decode.room(1, [n.prefill.info], range(12))
        assert not list(n.prefill.shell.endpoint.peers)
        await until(lambda: not list(n.decode.shell.endpoint.peers))


async def test_no_frame_of_a_stranger_reaches_us(key: ControlKey) -> None:
    # The last one has our public half only.
    strangers = [None, another(), ControlKey(key.public, another().secret)]
    async with Keyed(key, key) as n:
        control = n.prefill.info.control
        sockets = [raw_dealer(control, stranger) for stranger in strangers]
        frame = encode(Heartbeat(source=n.prefill.incarnation, target=Incarnation(77)))
        for socket in sockets:
            for _ in range(100):
                socket.send(frame, zmq.NOBLOCK)
        # Each has failed its handshake before the room begins, and goes on trying during it.
        refused = [connect_dealer(control, 78 + i, their) for i, their in enumerate(strangers)]
        for dealer in refused:
            dealer.send(frame)
            await until(functools.partial(getattr, dealer, "lockout_reason"), 10)
        assert await n.one(1) == b"1"
        counts = n.prefill.counts
        assert (counts.malformed, counts.foreign, counts.stale) == (0, 0, 0)
        assert [peer.incarnation for peer in n.prefill.shell.endpoint.peers] == [
            n.decode.incarnation
        ]
        for socket in sockets:
            socket.close()
        for dealer in refused:
            dealer.close()


def raw_dealer(control: str, key: ControlKey | None) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if key is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(key.secret))
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    socket.connect(control)
    return socket


async def test_a_port_that_is_taken_with_a_key(key: ControlKey) -> None:
    router, port = bind_router("127.0.0.1", 0, key)
    with pytest.raises(MisuseError, match=f"control port 127.0.0.1:{port}: Address already in use"):
        bind_router("127.0.0.1", port, key)
    router.close()


def test_a_key_file_is_its_owners_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "key"
    write_key(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(MisuseError, match="File exists"):
        write_key(str(path))
    assert path.read_bytes() == before and read_key(str(path)) == read_key(str(path))
    assert not caplog.records
    path.chmod(0o644)
    read_key(str(path))
    assert "is readable by every user" in caplog.text


def test_a_key_without_a_file_is_read_by_whoever_inherits_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    descriptor = open_new_key()
    try:
        read = (
            "from kvflow.transports.control.curve import read_key; import sys; "
            "print(read_key(sys.argv[1]).public)"
        )
        command = [sys.executable, "-c", read, f"/dev/fd/{descriptor}"]
        child = subprocess.run(
            command, pass_fds=(descriptor,), capture_output=True, text=True, check=True
        )
        mine = read_key(f"/dev/fd/{descriptor}")
        assert mine is not None and child.stdout.strip() == repr(mine.public) and not child.stderr
        assert not caplog.records, "it is nobody else's to read"
    finally:
        os.close(descriptor)


def test_a_file_that_holds_no_key(tmp_path: Path) -> None:
    assert read_key("") is None
    with pytest.raises(MisuseError, match="No such file"):
        read_key(str(tmp_path / "nowhere"))
    for text in ("", "too short", '"' * 40):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(MisuseError, match="not a key written by `kvflow keygen`") as caught:
            read_key(str(tmp_path / "bad"))
        assert not text or text not in str(caught.value)
