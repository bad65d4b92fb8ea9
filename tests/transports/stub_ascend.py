"""The calls of Mooncake's engine that the ascend plane makes (kvcache-ai/Mooncake 3b5a594).

Threads of the engine carry out a submit, on host memory, as with the Ascend transport.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import socket
import struct
import threading
from contextlib import suppress

from tests.transports import host_memory

_context = threading.local()
_WORKERS = 2
_PROBE = 3  # the kind of mooncake's own question
_ASK = 9  # no kind of mooncake's: how the stubs find each other's process and memory


def set_device(number: int) -> None:
    _context.npu = number


def _has_context() -> bool:
    return getattr(_context, "npu", None) is not None


class _State:
    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.status: dict[int, int] = {}
        self.peers: dict[str, tuple[int, dict[int, int]]] = {}
        self.work: queue.SimpleQueue[tuple[int, str, int, int, int] | None] = queue.SimpleQueue()

    def carry_out(self) -> None:
        while (item := self.work.get()) is not None:
            handle, peer, ours, theirs, size = item
            try:
                host_memory.write(self.reach(peer, theirs, size), ours, theirs, size)
            except OSError:
                self.status[handle] = -1
            else:
                self.status[handle] = 1

    def reach(self, peer: str, address: int, size: int) -> int:
        """Return the process behind a session. Raises: OSError, also for unregistered memory."""
        known = self.peers.get(peer)
        if known is None or not _inside(known[1], address, size):
            host, _, port = peer.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=3) as asking:
                asking.sendall(struct.pack("<QB", 1, _ASK))
                answer = _receive(asking)
            found = json.loads(answer[1:])
            known = self.peers[peer] = (
                found["pid"],
                {int(start): n for start, n in found["memory"].items()},
            )
        if not _inside(known[1], address, size):
            raise OSError("not registered there")
        return known[0]

    def serve(self, listening: socket.socket) -> None:
        while True:
            try:
                asking, _ = listening.accept()
            except OSError:  # closed
                return
            with asking, suppress(OSError, IndexError):
                kind = _receive(asking)[0]
                told = {} if kind == _PROBE else {"pid": os.getpid(), "memory": self.memory}
                answer = bytes([kind]) + json.dumps(told).encode()
                asking.sendall(struct.pack("<Q", len(answer)) + answer)


class TransferEngine:
    def __init__(self) -> None:
        self._state, self._ids = _State(), itertools.count(1)
        self._threads: list[threading.Thread] = []
        self._listening: socket.socket | None = None

    def __del__(self) -> None:
        if self._listening is not None:
            self._listening.shutdown(socket.SHUT_RDWR)
            for _ in range(_WORKERS):
                self._state.work.put(None)
            for thread in self._threads:
                thread.join()
            self._listening.close()

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        asked = metadata_server, protocol, device_name
        if asked != ("P2PHANDSHAKE", "ascend", "") or not _has_context():
            return -1
        self._listening = socket.create_server((local_hostname, 0))
        self._threads = [
            threading.Thread(target=self._state.serve, args=(self._listening,), daemon=True)
        ]
        self._threads += [
            threading.Thread(target=self._state.carry_out, daemon=True) for _ in range(_WORKERS)
        ]
        for thread in self._threads:
            thread.start()
        return 0

    def get_rpc_port(self) -> int:
        assert self._listening is not None
        port: int = self._listening.getsockname()[1]
        return port

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        if not _has_context() or buffer_addr in self._state.memory:
            return -1
        self._state.memory[buffer_addr] = capacity
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        return -1 if not _has_context() or self._state.memory.pop(buffer_addr, None) is None else 0

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        handle = next(self._ids)
        self._state.status[handle] = 0
        self._state.work.put((handle, target_hostname, buffer, peer_buffer_address, length))
        return handle

    def transfer_check_status(self, batch_id: int) -> int:
        status = self._state.status[batch_id]
        if status:
            del self._state.status[batch_id]  # freed: it must not be asked for again
        return status

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        try:
            pid = self._state.reach(target_hostname, peer_buffer_address, length)
            host_memory.read(pid, buffer, peer_buffer_address, length)
        except OSError:
            return -1
        return 0

    @property
    def open_handles(self) -> int:
        return len(self._state.status)

    @property
    def registered(self) -> dict[int, int]:
        return self._state.memory


def _inside(memory: dict[int, int], address: int, size: int) -> bool:
    return any(
        start <= address and address + size <= start + capacity
        for start, capacity in memory.items()
    )


def _receive(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        received = stream.read(size)
    if not size or len(received) < size:
        raise OSError("hung up")
    return received
