"""Ports for servers of tests that are named before they are bound."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# The kernel gives ports from 32768 on to outgoing connections and to servers that bind port 0, so
# one of those would soon belong to another test. Tests seed other random numbers, and processes
# would take the same ports.
_ports = random.SystemRandom().sample(range(20_000, 32_768), 1000)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses, and that was not returned before."""
    while True:
        port = _ports.pop()
        with socket.socket() as unused, suppress(OSError):
            unused.bind(("127.0.0.1", port))
            return port


def free_neighbours() -> tuple[int, int]:
    """Return two ports of 127.0.0.1 that follow each other, and that nobody uses."""
    while True:
        port = free_port()
        with socket.socket() as unused, suppress(OSError):
            unused.bind(("127.0.0.1", port + 1))
            return port, port + 1
