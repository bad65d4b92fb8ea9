"""Which TCP connections into this process have lost the process at their other end, read from /proc/net/tcp{,6}.

A killed writer's last bytes may still sit in the kernel, or in the reader that accepted its connection: its death alone
does not end its writes. The connection's end does. So after a death the mooncake plane waits until every connection
accepted on its engine's ports, whose far end is on this host and belongs to no process any more, is gone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_LISTEN = "0A"
_READABLE = frozenset({"01", "03", "08"})  # ESTABLISHED, SYN_RECV, CLOSE_WAIT: states in which we may still read
_MAPPED_IPV4 = "0000000000000000FFFF0000"
_LOCAL_IPV4 = re.compile(r"\|-- (\d+)\.(\d+)\.(\d+)\.(\d+)\n\s+/32 host LOCAL")


class _Entry(NamedTuple):
    """One row: addresses as the kernel prints them (hex, IPv4-mapped ones shortened to IPv4), ports, state, inode."""

    address: str
    port: int
    far_address: str
    far_port: int
    state: str
    inode: int


def listening_ports() -> set[int]:
    """TCP ports this process listens on."""
    inodes = _own_sockets()
    return {e.port for e in _entries() if e.state == _LISTEN and e.inode in inodes}


def orphaned_lanes(ports: Iterable[int]) -> int:
    """How many connections to our `ports` come from this host, from a socket that no process owns any more.

    Does file I/O: call it in a thread.
    """
    wanted = set(ports)
    rows = list(_entries())
    owned = {(e.address, e.port, e.far_address, e.far_port) for e in rows if e.inode}
    here = _own_addresses()
    return sum(
        1
        for e in rows
        if e.port in wanted
        and e.state in _READABLE
        and (e.far_address == e.address or e.far_address in here or e.far_address.endswith("7F"))
        and (e.far_address, e.far_port, e.address, e.port) not in owned
    )


def _entries() -> Iterator[_Entry]:
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = file.readlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for row in rows:
            fields = row.split()
            address, _, port = fields[1].partition(":")
            far_address, _, far_port = fields[2].partition(":")
            yield _Entry(
                address.removeprefix(_MAPPED_IPV4),
                int(port, 16),
                far_address.removeprefix(_MAPPED_IPV4),
                int(far_port, 16),
                fields[3],
                int(fields[9]),
            )


def _own_sockets() -> set[int]:
    found: set[int] = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def _own_addresses() -> set[str]:
    """Addresses of this host, as the tables print them."""
    found: set[str] = set()
    try:
        with open("/proc/self/net/fib_trie", encoding="ascii") as file:
            for a, b, c, d in _LOCAL_IPV4.findall(file.read()):
                found.add(f"{int(d):02X}{int(c):02X}{int(b):02X}{int(a):02X}")
        with open("/proc/self/net/if_inet6", encoding="ascii") as file:
            for row in file:
                raw = bytes.fromhex(row.split()[0])
                found.add("".join(raw[i : i + 4][::-1].hex() for i in range(0, 16, 4)).upper())
    except FileNotFoundError:
        pass
    return found
