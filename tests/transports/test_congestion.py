"""Pacing is taken off this machine's way to itself, and nothing else of the process is touched."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.transports.data.mooncake import congestion, route
from kvflow.transports.data.write_thread import WriteThread
from tests.ipv6 import needs_ipv6


def algorithm(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@contextmanager
def connection(address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as near,
        server.accept()[0] as far,
    ):
        yield near, far


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_local_connections_lose_a_paced_algorithm(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connection(address) as (near, far):
        # Whatever this machine's default is.
        monkeypatch.setattr(congestion, "_PACED", algorithm(near))
        monkeypatch.setattr(congestion, "_UNPACED", b"reno")
        descriptors = len(os.listdir("/proc/self/fd"))
        changed = congestion.unpace_local_connections()
        assert algorithm(near) == algorithm(far) == b"reno"
        assert changed >= 2
        near.sendall(b"still open")
        assert far.recv(64) == b"still open"
        # What earlier tests have left may be closed.
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_sockets_that_are_no_tcp_connections_are_let_be() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there, socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
        congestion.unpace_local_connections()
        here.sendall(b"still open")
        assert there.recv(64) == b"still open"


def test_other_algorithms_are_the_operators_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    with connection("127.0.0.1") as (near, _):
        before = algorithm(near)
        monkeypatch.setattr(congestion, "_PACED", b"another")
        monkeypatch.setattr(congestion, "_UNPACED", b"reno")
        assert congestion.unpace_local_connections() == 0
        assert algorithm(near) == before


@pytest.mark.parametrize("over_tcp", [True, False])
def test_connections_are_looked_for_often_at_first_then_seldom(
    monkeypatch: pytest.MonkeyPatch, over_tcp: bool
) -> None:
    n, looked = 0, list[int]()
    monkeypatch.setattr(route, "unpace_local_connections", lambda: looked.append(n))
    calls: Any = SimpleNamespace(transfer_submit_write=None, transfer_check_status=None)
    nothing: Any = None
    mine = route.MooncakeRoute(
        WriteThread("test"), nothing, calls, "", nothing, set(), over_tcp=over_tcp
    )
    mine.moved(0)
    assert not looked, "nothing was submitted that could have opened one"
    for n in range(1, 17):  # noqa: B007 - a look reads it
        mine.moved(4 << 20)
    assert looked == ([1, 2, 4, 8, 16] if over_tcp else [])
