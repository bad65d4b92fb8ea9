"""A NIXL agent: its registered memory, the agents that it knows, and its open transfers."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.ports import ProcessIdentity
from kvflow.transports.data.locators import is_name_of, unpack_locator
from kvflow.transports.data.nixl.library import environment, nixl_library
from kvflow.transports.data.transfers import Transfer, raised_as
from kvflow.transports.host.tcp_table import rows, sockets

PROBE_BYTES = 8
# NIXL releases a failed transfer without waiting for its blocks, and UCX ends them in later turns.
# A block that ends after its memory was deregistered crashes the process.
_LAST_TURNS = 64
# Metadata begins with this text, the length of the agent's name (u64, little-endian) and the name.
_NAME_AT = b"nixlSerDes|Agent"


def decode_metadata(locator: str, process: ProcessIdentity) -> tuple[str, bytes]:
    """Return the agent's name and metadata from a locator.

    Raises: TransferError for a locator without metadata, or with another process's metadata.
    """
    try:
        metadata = unpack_locator(locator)
        if not metadata.startswith(_NAME_AT):
            raise ValueError("no agent in it")
        at = len(_NAME_AT) + 8
        name = metadata[at : at + int.from_bytes(metadata[at - 8 : at], "little")].decode("ascii")
    except ValueError as error:
        raise TransferError(f"{locator!r:.80} is no metadata of a nixl agent: {error}") from None
    if not is_name_of(name, process):
        raise TransferError(f"nixl agent {name!r:.80} is not one of process {process.pid}")
    return name, metadata


class Agent:
    """A NIXL agent. Without a device it has no thread, and transfers advance only while its owner
    calls it.

    Thread-safe: one call runs at a time. A post takes as long as its copies.
    """

    def __init__(self, name: str, host: str, device: str) -> None:
        """Start the agent.

        Raises: MisuseError when the library cannot be loaded, TransferError when the agent does not
        start.
        """
        library = nixl_library()
        before = descriptors()
        starting = raised_as(TransferError, "the nixl agent does not start")
        with starting, environment(host, device):
            config = library.nixl_agent_config(enable_prog_thread=bool(device), backends=["UCX"])
            self._agent = library.nixl_agent(name, config)
        if "UCX" not in self._agent.backends:
            raise TransferError("the nixl agent does not start: this build of nixl has no UCX")
        self.name = name
        self._descs, self._dram = library.nixlBind.nixlXferDList, library.nixlBind.DRAM_SEG
        self._lock = threading.Lock()
        self._registered: list[Any] = []
        self._open: set[Transfer] = set()
        self._scratch = (ctypes.c_char * PROBE_BYTES)()
        self.register([(ctypes.addressof(self._scratch), PROBE_BYTES)])
        ours = {fd for fd, _ in descriptors() - before}
        held = {inode for inode, fd in sockets().items() if fd in ours}
        self.ports = {row.ends.port for row in rows() if row.is_listening and row.inode in held}
        self.event_fds = [fd for fd in ours if _watches_connections(fd)]

    def register(self, regions: Iterable[tuple[int, int]]) -> None:
        """Register memory regions, each (address, size). Raises: LayoutError when NIXL refuses."""
        with self._lock, raised_as(LayoutError, "nixl cannot register the pool"):
            described = [(address, size, 0, "") for address, size in regions]
            self._registered.append(self._agent.register_memory(described, "DRAM"))

    def metadata(self) -> bytes:
        """Return what another agent needs to write into the memory that was registered last."""
        with self._lock:
            described: bytes = self._agent.get_partial_agent_metadata(
                self._registered[-1], True, ["UCX"]
            )
            return described

    def add(self, metadata: bytes) -> None:
        """Add another agent by its metadata.

        If NIXL refuses the metadata, this agent may never accept another agent of that (random)
        name.

        Raises: TransferError.
        """
        with self._lock, raised_as(TransferError, "nixl refuses the peer's metadata"):
            self._agent.add_remote_agent(metadata)

    def remove(self, peer: str) -> None:
        """Disconnect from a peer. Transfers under way to it end with an error."""
        with self._lock:
            self._agent.remove_remote_agent(peer)

    def prepare(
        self, operation: str, peer: str, ours: list[int], theirs: list[int], sizes: list[int]
    ) -> Transfer:
        """Prepare a transfer. Raises: whatever NIXL raises, for example for unregistered memory."""
        here, there = self._described(ours, sizes), self._described(theirs, sizes)
        with self._lock:
            transfer = Transfer(
                self._agent.initialize_xfer(operation, here, there, peer), sum(sizes)
            )
            self._open.add(transfer)
        return transfer

    def prepare_probe(self, peer: str, address: int) -> Transfer:
        """Prepare to read a few bytes of the peer's pool. The read ends once the peer answers."""
        return self.prepare(
            "READ", peer, [ctypes.addressof(self._scratch)], [address], [PROBE_BYTES]
        )

    def post(self, transfer: Transfer) -> None:
        """Start a transfer. If NIXL raises, some of the transfer may be under way."""
        with self._lock:
            transfer.status = self._agent.transfer(transfer.handle)

    def _described(self, addresses: list[int], sizes: list[int]) -> Any:
        table = np.zeros((len(sizes), 3), dtype=np.uint64)  # columns: address, size, device
        table[:, 0], table[:, 1] = addresses, sizes
        return self._descs(self._dram, table)

    def look(self, transfer: Transfer) -> None:
        """Advance all transfers, and update this one's status. Raises: whatever NIXL raises."""
        with self._lock:
            transfer.status = self._agent.check_xfer_state(transfer.handle)

    def release(self, transfer: Transfer) -> None:
        """Forget a transfer that ended. Raises: whatever NIXL raises if it has not ended."""
        with self._lock:
            transfer.handle.release()
            self._open.discard(transfer)

    @property
    def open_transfers(self) -> int:
        return len(self._open)

    @property
    def kept_notifications(self) -> int:
        """Number of peers' notifications that the agent keeps; 0, because `progress` drops them."""
        agent = self._agent
        return 0 if agent is None else sum(map(len, agent.notifs.values()))

    def progress(self) -> None:
        """Advance the writes of peers, and drop their notifications."""
        with self._lock:
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Disconnect from all peers, and stop listening. Idempotent.

        Transfers under way are abandoned: bytes that the kernel already has may still land.
        """
        with self._lock:
            if self._agent is None:
                return
            for transfer in self._open:
                with suppress(Exception):
                    # A transfer that cannot be released is freed with its agent.
                    transfer.handle.release()
            self._open.clear()
            with suppress(Exception):
                for _ in range(_LAST_TURNS):
                    self._agent.get_new_notifs()
            for registered in self._registered:
                self._agent.deregister_memory(registered)
            self._registered.clear()
            self._agent = None


def _watches_connections(fd: int) -> bool:
    """Return True for an epoll descriptor that is readable when a connection has work.

    Other epoll descriptors of UCX wake its own thread. They watch a pipe or an anonymous inode.
    """
    if _target(fd) != "anon_inode:[eventpoll]":
        return False
    return not any(_target(each).startswith(("pipe:", "anon_inode:")) for each in watched(fd))


def watched(event_fd: int) -> set[int]:
    with suppress(OSError), open(f"/proc/self/fdinfo/{event_fd}", encoding="ascii") as file:
        return {int(line.split()[1]) for line in file if line.startswith("tfd:")}
    return set()


def _target(fd: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def descriptors() -> set[tuple[int, str]]:
    return {(fd, _target(fd)) for fd in map(int, os.listdir("/proc/self/fd"))}
