"""Removal of TCP pacing from connections within this machine, where it only costs time.

If the system's congestion control is BBR, each 64 KiB that a sender hands to the kernel arms a
pacing timer. For connections within a machine, that cost mooncake two thirds of its throughput (1.5
against 4 GB/s, two cores). Over a real link the algorithm is the operator's choice, and is kept.
"""

from __future__ import annotations

import os
import socket

from kvflow.transports.host.tcp_table import borrow

_PACED = b"bbr"
_UNPACED = b"reno"  # every kernel has it, and every user may choose it


def unpace_local_connections() -> int:
    """Remove pacing from this process's TCP connections whose two ends have the same address.

    Return how many were changed. The system calls take some 100 us, so do not call this on the
    event loop.
    """
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        # No descriptor is left to list the others with.
        return 0
    return sum(_unpaced(int(name)) for name in names)


def _unpaced(fd: int) -> bool:
    try:
        with borrow(fd) as connection:
            return connection is not None and _unpace(connection)
    except OSError:
        # No descriptor is left, or the socket is not connected.
        return False


def _unpace(connection: socket.socket) -> bool:
    if (
        connection.family not in (socket.AF_INET, socket.AF_INET6)
        or connection.type != socket.SOCK_STREAM
    ):
        return False
    if connection.getpeername()[0] != connection.getsockname()[0]:
        return False
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") != _PACED:
        return False
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
    return True
