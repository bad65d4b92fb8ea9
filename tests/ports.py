"""Ports for servers of tests that are named before they are bound."""

from __future__ import annotations

import random
import socket

# The kernel gives ports from 32768 on to outgoing connections and to servers that bind port 0, so
# one of those would soon belong to another test.
_RANGE = range(20_000, 32_768)
_CHANCE = random.SystemRandom()  # tests seed the others, and processes would take the same ports


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses."""
    for _ in range(1_000):
        port = _CHANCE.choice(_RANGE)
        with socket.socket() as unused:
            try:
                unused.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {_RANGE} is free")
