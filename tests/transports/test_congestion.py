"""Pacing is taken off this machine's way to itself, and nothing else of the process is touched."""

from __future__ import annotations

import os
import socket

import pytest

from kvflow.transports.data.mooncake import congestion


def algorithm(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_local_connections_lose_a_paced_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            monkeypatch.setattr(congestion, "_PACED", algorithm(near))  # whatever this machine's default is
            monkeypatch.setattr(congestion, "_UNPACED", b"reno")
            descriptors = len(os.listdir("/proc/self/fd"))
            changed = congestion.unpace_local_connections()
            assert algorithm(near) == algorithm(far) == b"reno"
            assert changed >= 2
            near.sendall(b"still open")
            assert far.recv(64) == b"still open"
            assert len(os.listdir("/proc/self/fd")) <= descriptors  # what earlier tests have left may be closed


def test_other_algorithms_are_the_operators_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        before = algorithm(near)
        monkeypatch.setattr(congestion, "_PACED", b"another")
        monkeypatch.setattr(congestion, "_UNPACED", b"reno")
        assert congestion.unpace_local_connections() == 0
        assert algorithm(near) == before
