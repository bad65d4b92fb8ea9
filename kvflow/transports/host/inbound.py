"""Writers' connections to our engine, and the proof that a dead writer's last bytes are in memory.

Bytes from a killed writer may still be in the kernel, or in the engine's thread that reads the
connection. A child that the writer forked has the same sockets, and keeps them open. The death of
the writer is therefore no proof. The end of our own socket is: once our engine closes its
descriptor, nothing reads that connection. (The engine closes it only after it has put into memory
what it read.)

So after a writer's death, every open connection of our engine counts as that writer's, unless it is
known to belong to another process:

- Another watched writer has the connection. In addition, either the dead writer was inspected while
  the connection existed and did not have it, or the other writer was inspected before the
  connection appeared, so it cannot have inherited it.
- The connection comes from another machine: the writer is in our network namespace, and the far
  address is not.

Connections that were seen with this writer, and with no other, are shut down from our side, because
a child may hold them forever. The fence waits without a limit until the remaining ones are closed,
because some connections cannot be attributed. Examples are a connection behind an address
translation, and one that the writer opened in its last moments and that a child holds.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from kvflow.aio import Threads
from kvflow.protocols.ports import ProcessIdentity
from kvflow.transports.host.identity import is_alive, own_identity, watch
from kvflow.transports.host.tcp_table import (
    Ends,
    borrow,
    encode_address,
    is_loopback,
    own_addresses,
    rows,
    sockets,
)

_LOOK_S = 1.0  # seconds between looks at the connections of living writers
# Seconds between looks at the connections of a dead writer.
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.005, 1.0


@dataclass(slots=True)
class _Connection:
    fd: int
    ends: Ends | None  # None after a reset, when the far end is unknown
    is_local: bool  # the far end is in our own network namespace
    first_look: int  # number of the look that found it
    # Writers seen with this connection, each with the number of the first look at that writer.
    holders: dict[ProcessIdentity, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Writer:
    """A writer whose death at least one fence awaits."""

    fences: int = 0  # fences that await its death
    first_look: int = 0  # looks are counted from 1; 0 means that no look has succeeded yet
    last_look: int = 0
    # Descriptors, by inode, of connections that may be the writer's. None until `count_open` has
    # determined them after its death.
    suspects: dict[int, int] | None = None


class InboundConnections:
    """The connections that one plane's engines accepted.

    `look` and `count_open` read /proc, so call them in a thread.
    """

    def __init__(self) -> None:
        self._ports: set[int] = set()
        self._lock = threading.Lock()
        self._looks = 0
        self._writers: dict[ProcessIdentity, _Writer] = {}
        self._connections: dict[int, _Connection] = {}  # by inode
        # Inodes of connections that our engine closed. A child of ours may still have them open.
        self._closed: set[int] = set()
        # Inodes of this process's other sockets, and of its connections to itself.
        self._others: set[int] = set()

    def add_ports(self, ports: set[int]) -> None:
        with self._lock:
            self._ports |= ports
            self._others.clear()

    def watch(self, writer: ProcessIdentity) -> None:
        """Record this writer's connections at each look. Each call needs one call of `forget`."""
        with self._lock:
            self._writers.setdefault(writer, _Writer()).fences += 1

    def forget(self, writer: ProcessIdentity) -> None:
        with self._lock:
            self._writers[writer].fences -= 1
            if not self._writers[writer].fences:
                del self._writers[writer]

    def look(self) -> None:
        """Record open connections and their writers. Raises: OSError if no descriptor is left."""
        with self._lock:
            self._look()

    def count_open(self, dead_writer: ProcessIdentity) -> int:
        """Return a number above 0 while a connection that may be the dead writer's can still be
        read.

        Connections that our engine has not accepted yet count too. The writer must be watched.
        """
        with self._lock:
            writer = self._writers[dead_writer]
            if writer.suspects is None:
                readable = {
                    row.inode
                    for row in rows(ports=self._ports)
                    if row.ends.port in self._ports and row.is_readable
                }
                self._look()
                self._closed &= readable
                # `_look` read our descriptors after the table, so it knows what was accepted since.
                if pending := readable - self._connections.keys() - self._closed - self._others:
                    return len(pending)
                writer.suspects = self._suspects(dead_writer)
            if any(_is_open(fd, inode) for inode, fd in writer.suspects.items()):
                return len(writer.suspects)
            # The connections may still be open under other descriptors of ours.
            ours = self._own_sockets()
            writer.suspects = {inode: ours[inode] for inode in writer.suspects if inode in ours}
            return len(writer.suspects)

    def _suspects(self, dead_writer: ProcessIdentity) -> dict[int, int]:
        here = own_identity().network_namespace
        found = {}
        for inode, connection in self._connections.items():
            if self._is_anothers(connection, dead_writer, here):
                continue
            found[inode] = connection.fd
            if connection.holders.keys() == {dead_writer}:
                with borrow(connection.fd, inode) as ours, suppress(OSError):  # already reset
                    if ours is not None:
                        ours.shutdown(socket.SHUT_RDWR)
        return found

    def _is_anothers(
        self, connection: _Connection, dead_writer: ProcessIdentity, here: str
    ) -> bool:
        if dead_writer in connection.holders:
            return False
        if not connection.is_local and dead_writer.network_namespace == here:
            return True
        looked_at = self._writers[dead_writer].last_look
        found = connection.first_look
        return any(found <= looked_at or since < found for since in connection.holders.values())

    def _look(self) -> None:
        self._looks += 1
        self._find_accepted()
        here = own_identity().network_namespace
        far_ends: dict[str, dict[Ends, int]] = {}  # by network namespace
        for identity, writer in self._writers.items():
            if not is_alive(identity):
                continue
            namespace = identity.network_namespace
            if namespace not in far_ends:
                far_ends[namespace] = self._far_ends(identity, here)
            held = sockets(identity.pid)
            # Check again, because the pid may belong to another process by now.
            if not held or not is_alive(identity):
                continue
            writer.first_look = writer.first_look or self._looks
            writer.last_look = self._looks
            for connection in self._connections.values():
                ends = connection.ends
                if ends is not None and far_ends[namespace].get(ends.reversed()) in held:
                    connection.holders.setdefault(identity, writer.first_look)

    def _far_ends(self, identity: ProcessIdentity, here: str) -> dict[Ends, int]:
        """Return the far ends of our connections to a writer's namespace, with their inodes."""
        is_here = identity.network_namespace == here
        # In another namespace, an address that equals one of ours (loopback, for example) belongs
        # to another machine.
        wanted = {
            c.ends.reversed()
            for c in self._connections.values()
            if c.ends and c.is_local == is_here
        }
        if not wanted:
            return {}
        table = rows("self" if is_here else identity.pid, self._ports)
        return {row.ends: row.inode for row in table if row.ends in wanted}

    def _find_accepted(self) -> None:
        ours = self._own_sockets()
        self._others &= ours.keys()
        for inode in self._connections.keys() - ours.keys():
            del self._connections[inode]
            self._closed.add(inode)
        for inode, connection in self._connections.items():
            connection.fd = ours[inode]
        known = self._others | self._connections.keys()
        new = [(inode, fd) for inode, fd in ours.items() if inode not in known]
        if not new:
            return
        addresses = own_addresses()
        far_ends = {row.ends.reversed() for row in rows(ports=self._ports) if row.inode in ours}
        for inode, fd in new:
            found = self._inspect(inode, fd, addresses)
            if found is None or found.ends in far_ends:
                self._others.add(inode)
            else:
                self._connections[inode] = found

    @staticmethod
    def _own_sockets() -> dict[int, int]:
        if found := sockets():
            return found
        raise OSError("cannot list the descriptors of this process")

    def _inspect(self, inode: int, fd: int, own: set[str]) -> _Connection | None:
        with borrow(fd, inode) as ours:
            if ours is None or ours.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if ours.type != socket.SOCK_STREAM or ours.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                return None
            address, port = ours.getsockname()[:2]
            if port not in self._ports:
                return None
            try:
                far_address, far_port = ours.getpeername()[:2]
            except OSError:
                # After a reset our engine still has to read what arrived before it, and to close
                # the socket.
                return _Connection(fd, None, True, self._looks)
            ends = Ends(encode_address(address), port, encode_address(far_address), far_port)
            is_local = ends.far_address in own or is_loopback(ends.far_address)
            return _Connection(fd, ends, is_local, self._looks)


def _is_open(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return False


async def wait_ended(
    inbound: InboundConnections, looking: Threads, writer: ProcessIdentity
) -> None:
    """Wait until the writer's process is dead and every connection that may be its own is closed.

    Raises: TransferError for a writer that can never be observed, OSError when it cannot be
    observed right now.
    """
    async with watch(writer) as death:
        inbound.watch(writer)
        try:
            while not death.dead:
                # A look fails when no descriptor is left. That can only make the fence wait longer.
                with suppress(OSError):
                    await looking.run(inbound.look)
                await asyncio.wait([death.died], timeout=_LOOK_S)
            await _wait_closed(inbound, looking, writer)
        finally:
            inbound.forget(writer)


async def _wait_closed(
    inbound: InboundConnections, looking: Threads, dead_writer: ProcessIdentity
) -> None:
    pause_s = _SHORTEST_POLL_S
    while True:
        with suppress(OSError):
            # A count fails when no descriptor is left, and is then repeated.
            if not await looking.run(lambda: inbound.count_open(dead_writer)):
                return
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.2, _LONGEST_POLL_S)
