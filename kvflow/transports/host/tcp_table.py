"""TCP sockets as the kernel lists them: /proc/net/tcp{,6} for a network namespace, /proc/PID/fd for
a process.

Addresses stay as the tables print them: hexadecimal, four bytes at a time in the machine's byte
order, with IPv4-mapped IPv6 addresses shortened to IPv4. Functions that list sockets or addresses
read files: call them in a thread.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_LISTEN = "0A"
# ESTABLISHED, SYN_RECV, CLOSE_WAIT: the states in which our side may still read.
_READABLE = frozenset({"01", "03", "08"})
_MAPPED_IPV4 = "0" * 16 + f"{int.from_bytes(bytes([0, 0, 255, 255]), sys.byteorder):08X}"
_LOCAL_IPV4 = re.compile(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL")


class Ends(NamedTuple):
    """The two ends of a connection, seen from one of them."""

    address: str
    port: int
    far_address: str
    far_port: int

    def reversed(self) -> Ends:
        return Ends(self.far_address, self.far_port, self.address, self.port)


class Row(NamedTuple):
    """One socket in the kernel's table.

    Its inode is 0 until a process accepts it, and after its last descriptor is closed.
    """

    ends: Ends
    state: str
    inode: int

    @property
    def is_listening(self) -> bool:
        return self.state == _LISTEN

    @property
    def is_readable(self) -> bool:
        return self.state in _READABLE


def rows(process: int | str = "self", ports: Collection[int] | None = None) -> Iterator[Row]:
    """Yield the TCP sockets in a process's network namespace.

    With `ports`, yield only sockets that have one of these ports at either end.
    """
    words = None if ports is None else [f":{port:04X} " for port in ports]
    for table in (f"/proc/{process}/net/tcp", f"/proc/{process}/net/tcp6"):
        try:
            with open(table, encoding="ascii", buffering=1 << 20) as file:
                lines = file.readlines()[1:]
        except (FileNotFoundError, ProcessLookupError):
            # There is no such process, or the kernel has no IPv6.
            continue
        for line in lines:
            if words is not None and not any(word in line for word in words):
                continue
            fields = line.split()
            address, _, port = fields[1].partition(":")
            far_address, _, far_port = fields[2].partition(":")
            ends = Ends(_short(address), int(port, 16), _short(far_address), int(far_port, 16))
            yield Row(ends, fields[3], int(fields[9]))


def sockets(process: int | str = "self") -> dict[int, int]:
    """Map a process's socket inodes to descriptors; empty if it ended or may not be inspected."""
    found: dict[int, int] = {}
    folder = f"/proc/{process}/fd"
    try:
        names = os.listdir(folder)
        for name in names:
            try:
                target = os.readlink(f"{folder}/{name}")
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
        # A process that ends closes its descriptors, so the list may be incomplete.
        ended = not os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    return {} if ended else found


@contextmanager
def borrow(fd: int, inode: int | None = None) -> Iterator[socket.socket | None]:
    """Yield a duplicate of one of our sockets, since the engine may close the original at any time.

    Yield None when the descriptor is not a socket, or not the socket with `inode` any more.

    Raises: OSError when no descriptor is left for the duplicate.
    """
    try:
        duplicate = os.dup(fd)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        yield None
        return
    try:
        ours = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        yield None
        return
    with ours:
        yield ours if inode is None or os.fstat(duplicate).st_ino == inode else None


def listening_ports() -> set[int]:
    ours = sockets()
    return {row.ends.port for row in rows() if row.is_listening and row.inode in ours}


def own_addresses() -> set[str]:
    """Return the addresses of this network namespace; see also `is_loopback`."""
    found: set[str] = set()
    try:
        with open("/proc/self/net/fib_trie", encoding="ascii") as file:
            found.update(map(encode_address, _LOCAL_IPV4.findall(file.read())))
        with open("/proc/self/net/if_inet6", encoding="ascii") as file:
            found.update(_encode(bytes.fromhex(line.split()[0])) for line in file)
    except FileNotFoundError:
        pass
    return found


def is_loopback(address: str) -> bool:
    """Return True for an address in 127.0.0.0/8. `own_addresses` lists only one of them."""
    return len(address) == 8 and int(address, 16).to_bytes(4, sys.byteorder)[0] == 127


def encode_address(text: str) -> str:
    """Return an address as the tables print it. They omit its zone (`%eth0`)."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    return _short(_encode(socket.inet_pton(family, text.partition("%")[0])))


def _encode(raw: bytes) -> str:
    words = (raw[i : i + 4] for i in range(0, len(raw), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def _short(address: str) -> str:
    return address[24:] if len(address) == 32 and address.startswith(_MAPPED_IPV4) else address
