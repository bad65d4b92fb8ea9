"""Connections whose other process is gone are told from those that live."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from kvflow.transports.data.mooncake.tcp_table import listening_ports, orphaned_lanes

CONNECT = (
    "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); s.sendall(b'x' * 9); input()"
)


@pytest.mark.parametrize(
    ("family", "bind", "reach"), [(socket.AF_INET, "0.0.0.0", "127.0.0.1"), (socket.AF_INET6, "::", "127.0.0.1")]
)
def test_a_lane_is_an_orphan_from_its_writers_death_to_our_close(
    family: socket.AddressFamily, bind: str, reach: str
) -> None:
    with socket.create_server((bind, 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert port in listening_ports()
        with subprocess.Popen([sys.executable, "-c", CONNECT, reach, str(port)], stdin=subprocess.PIPE) as process:
            accepted, _ = server.accept()
            with accepted:
                accepted.recv(1, socket.MSG_PEEK)  # it has written
                assert orphaned_lanes({port}) == 0  # its writer lives
                process.kill()
                process.wait()
                assert orphaned_lanes({port}) == 1  # nine bytes are still to be read
                assert orphaned_lanes({port + 1}) == 0
                assert accepted.recv(100) == b"x" * 9
                assert orphaned_lanes({port}) == 1
            assert orphaned_lanes({port}) == 0
    assert port not in listening_ports()


def test_a_lane_nobody_accepted_yet_counts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-c", CONNECT, "127.0.0.1", str(port)], stdin=subprocess.PIPE
        ) as process:
            accepted, _ = server.accept()  # the first is through, so the second's process is the one that waits
            with subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    CONNECT.replace("input()", "print(1, flush=True); input()"),
                    "127.0.0.1",
                    str(port),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            ) as second:
                assert second.stdout is not None and second.stdout.readline()
                second.kill()
                second.wait()
                assert orphaned_lanes({port}) == 1
            accepted.close()
            process.kill()
