"""A dead writer's connections count until our end is closed, and those of others do not."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from kvflow.aio import Threads
from kvflow.protocols.ports import ProcessIdentity
from kvflow.transports.host import inbound
from kvflow.transports.host.identity import own_identity
from kvflow.transports.host.inbound import InboundConnections, wait_ended
from kvflow.transports.host.tcp_table import (
    encode_address,
    is_loopback,
    listening_ports,
    rows,
    sockets,
)

# Connects when it is told to ("c"), has a child that inherits its sockets ("f"), and writes its
# bytes ("w").
WRITER = """
import msgspec, os, signal, socket, sys
from kvflow.transports.host.identity import own_identity
print(msgspec.json.encode(own_identity()).decode(), flush=True)
sockets = []
for line in sys.stdin:
    if line == "c\\n":
        sockets.append(socket.create_connection((sys.argv[1], int(sys.argv[2]))))
    elif line == "w\\n":
        sockets[-1].sendall(b"x" * 9)
    elif not (child := os.fork()):
        signal.pause()
    print(child if line == "f\\n" else 0, flush=True)
"""


class Writer:
    def __init__(self, address: str, port: int) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", WRITER, address, str(port)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.child = 0
        assert self.process.stdout is not None
        self.identity = msgspec.json.decode(self.process.stdout.readline(), type=ProcessIdentity)

    def do(self, command: str) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        return int(self.process.stdout.readline())

    def fork(self) -> None:
        self.child = self.do("f")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_child(self) -> None:
        child, self.child = self.child, 0
        if child:
            os.kill(child, signal.SIGKILL)


class Engine:
    def __init__(self, family: socket.AddressFamily = socket.AF_INET) -> None:
        address = "0.0.0.0" if family == socket.AF_INET else "::"
        self.server = socket.create_server(
            (address, 0), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
        self.port = self.server.getsockname()[1]
        self.inbound = InboundConnections()
        self.inbound.add_ports({self.port})
        self.writers: list[Writer] = []
        self.accepted: list[socket.socket] = []

    def writer(self, *, watched: bool = True) -> Writer:
        writer = Writer("127.0.0.1", self.port)
        self.writers.append(writer)
        if watched:
            self.inbound.watch(writer.identity)
        return writer

    def connection(self, writer: Writer) -> socket.socket:
        """Accept a new one, with nine bytes to be read."""
        writer.do("c")
        accepted, _ = self.server.accept()
        writer.do("w")
        accepted.recv(1, socket.MSG_PEEK)
        self.accepted.append(accepted)
        return accepted

    def close(self) -> None:
        for writer in self.writers:
            writer.kill()
            writer.kill_child()
            assert writer.process.stdin is not None and writer.process.stdout is not None
            writer.process.stdin.close()
            writer.process.stdout.close()
        for accepted in self.accepted:
            accepted.close()
        self.server.close()


@contextmanager
def running(family: socket.AddressFamily = socket.AF_INET) -> Iterator[Engine]:
    engine = Engine(family)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with running() as opened:
        yield opened


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_dead_writers_connection_counts_until_our_end_is_closed(
    family: socket.AddressFamily,
) -> None:
    with running(family) as engine:
        assert engine.port in listening_ports()
        writer = engine.writer()
        accepted = engine.connection(writer)
        engine.inbound.look()
        writer.kill()
        assert engine.inbound.count_open(writer.identity) == 1  # nine bytes are still to be read
        assert accepted.recv(100) == b"x" * 9
        assert engine.inbound.count_open(writer.identity) == 1
        accepted.close()
        assert engine.inbound.count_open(writer.identity) == 0
    assert engine.port not in listening_ports()


async def test_a_dead_writers_connection_is_looked_at_until_our_end_is_closed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, looks = engine.inbound.count_open, threading.Semaphore(0)

    def count(writer: ProcessIdentity) -> int:
        try:
            return counted(writer)
        finally:
            looks.release()

    monkeypatch.setattr(engine.inbound, "count_open", count)
    writer = engine.writer(watched=False)
    accepted = engine.connection(writer)
    writer.kill()
    ended = asyncio.ensure_future(wait_ended(engine.inbound, Threads("test", 1), writer.identity))
    for _ in range(3):
        assert await asyncio.to_thread(looks.acquire, timeout=20)
    assert not ended.done()
    accepted.close()
    await asyncio.wait_for(ended, 20)


def test_what_our_process_has_connected_to_itself_is_no_writers(engine: Engine) -> None:
    writer = engine.writer()
    with socket.create_connection(("127.0.0.1", engine.port)):
        accepted, _ = engine.server.accept()
        engine.accepted.append(accepted)
        writer.kill()
        assert engine.inbound.count_open(writer.identity) == 0


def test_a_child_that_holds_its_dead_parents_connection_cannot_keep_it_open(engine: Engine) -> None:
    writer = engine.writer()
    accepted = engine.connection(writer)
    writer.fork()
    engine.inbound.look()
    writer.kill()
    assert engine.inbound.count_open(writer.identity) == 1
    assert accepted.recv(100) == b"x" * 9
    assert accepted.recv(100) == b""  # and this is where an engine closes it
    accepted.close()
    assert engine.inbound.count_open(writer.identity) == 0


def test_a_connection_that_only_a_child_was_seen_with_counts_as_long_as_the_child_lives(
    engine: Engine,
) -> None:
    writer = engine.writer()
    accepted = engine.connection(writer)
    writer.fork()
    writer.kill()  # before anything was looked at
    assert engine.inbound.count_open(writer.identity) == 1
    assert accepted.recv(100) == b"x" * 9
    accepted.setblocking(False)
    with pytest.raises(BlockingIOError):
        accepted.recv(100)  # not shut down: it may be another's
    assert engine.inbound.count_open(writer.identity) == 1
    writer.kill_child()
    assert select.select([accepted], [], [], 20)[0] and accepted.recv(100) == b""
    accepted.close()
    assert engine.inbound.count_open(writer.identity) == 0


def test_a_connection_that_was_reset_counts_until_it_was_read(engine: Engine) -> None:
    for looked_at in (True, False):
        writer = engine.writer()
        accepted = engine.connection(writer)
        # So the writer's end resets the connection.
        accepted.sendall(b"an answer that is never read")
        if looked_at:
            engine.inbound.look()
        writer.kill()
        with pytest.raises(OSError):  # the kernel's table does not list it any more
            accepted.getpeername()
        assert not [
            row
            for row in rows(ports={engine.port})
            if row.inode == os.fstat(accepted.fileno()).st_ino
        ]
        assert engine.inbound.count_open(writer.identity) == 1
        assert accepted.recv(100) == b"x" * 9
        accepted.close()
        assert engine.inbound.count_open(writer.identity) == 0


def test_a_connection_not_yet_accepted_counts(engine: Engine) -> None:
    writer = engine.writer()
    engine.inbound.look()
    writer.do("c")
    writer.do("w")
    writer.kill()
    assert engine.inbound.count_open(writer.identity) == 1
    accepted, _ = engine.server.accept()
    assert engine.inbound.count_open(writer.identity) == 1
    accepted.close()
    assert engine.inbound.count_open(writer.identity) == 0


def test_another_writers_connections_do_not_count(engine: Engine) -> None:
    other, writer = engine.writer(), engine.writer()
    before = engine.connection(other)
    engine.connection(writer)
    engine.inbound.look()
    after = engine.connection(other)  # since nobody looked, but the other was there already
    writer.kill()
    assert engine.inbound.count_open(writer.identity) == 1
    for connection in (before, after):
        assert connection.recv(100) == b"x" * 9
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(100)


def test_a_writer_that_may_have_inherited_a_connection_proves_nothing(engine: Engine) -> None:
    writer, other = engine.writer(), engine.writer(watched=False)
    held = engine.connection(other)
    writer.kill()
    # Only now: it could be a child that has had the connection from the beginning.
    engine.inbound.watch(other.identity)
    assert engine.inbound.count_open(writer.identity) == 1
    held.close()
    assert engine.inbound.count_open(writer.identity) == 0


def test_a_strangers_connection_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One from another machine counts only where the writer's network is not ours either."""
    writer, stranger = engine.writer(), engine.writer(watched=False)
    elsewhere = msgspec.structs.replace(writer.identity, network_namespace="net:[1]")
    engine.inbound.watch(elsewhere)
    held = engine.connection(stranger)
    engine.inbound.look()
    monkeypatch.setattr(inbound, "own_addresses", set)
    monkeypatch.setattr(inbound, "is_loopback", lambda address: False)
    engine.connection(stranger)
    writer.kill()
    assert engine.inbound.count_open(writer.identity) == 1
    assert engine.inbound.count_open(elsewhere) == 2
    held.close()
    assert engine.inbound.count_open(writer.identity) == 0


def test_a_child_of_ours_that_holds_a_closed_connection_is_no_reader(engine: Engine) -> None:
    writer, next_writer = engine.writer(), engine.writer()
    accepted = engine.connection(writer)
    engine.inbound.look()
    with subprocess.Popen(["sleep", "60"], pass_fds=[accepted.fileno()]) as child:
        writer.kill()
        assert engine.inbound.count_open(writer.identity) == 1
        accepted.recv(100)
        accepted.close()
        assert engine.inbound.count_open(writer.identity) == 0
        engine.inbound.look()
        next_writer.kill()
        assert engine.inbound.count_open(next_writer.identity) == 0
        child.kill()


def test_what_was_forgotten_is_not_looked_at(engine: Engine) -> None:
    writer = engine.writer()
    engine.inbound.watch(writer.identity)
    engine.inbound.forget(writer.identity)
    engine.connection(writer)
    engine.inbound.look()
    writer.kill()
    assert engine.inbound.count_open(writer.identity) == 1
    engine.inbound.forget(writer.identity)
    with pytest.raises(KeyError):
        engine.inbound.count_open(writer.identity)


def test_addresses_are_written_as_the_tables_write_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (row,) = [row for row in rows(ports={port}) if row.ends.port == port]
        assert row.ends.address == encode_address("127.0.0.1") == encode_address("::ffff:127.0.0.1")
        assert row.inode in sockets() and row.inode in sockets(os.getpid())
    assert is_loopback(encode_address("127.3.2.1"))
    assert not is_loopback(encode_address("126.0.0.127"))
    assert sockets(own_identity().pid + (1 << 22)) == {}
