"""The network between two network namespaces: IP packets of one come out in the other, late, and
some never.

    python -m tests.chaos.relay

For kernels without netem. Commands as JSON lines (`kvflow.bench.child`): join, set, counts, quit.
It ends with its standard input, and its two interfaces with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import random
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from kvflow.bench.child import serve

DEVICE = "kvflow0"
# On their way in one direction; more are lost, as at a router whose buffer is full.
QUEUE_PACKETS = 20_000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def in_network_of(pid: int) -> Iterator[None]:
    """What this thread opens inside belongs to the network namespace of process `pid`.

    Raises: OSError.
    """
    with (
        open("/proc/thread-self/ns/net", "rb") as ours,
        open(f"/proc/{pid}/ns/net", "rb") as theirs,
    ):
        _enter(theirs.fileno())
        try:
            yield
        finally:
            _enter(ours.fileno())


def socket_in_network_of(pid: int, *of: Any) -> socket.socket:
    """A socket of that namespace, for the arguments of `socket.socket`."""
    with in_network_of(pid):
        return socket.socket(*of)


def open_tun(pid: int) -> int:
    """A new interface `DEVICE` in the network namespace of process `pid`; it goes when the
    descriptor is closed.

    Raises: OSError.
    """
    with in_network_of(pid):
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(
                fd, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
            )
        except OSError:
            os.close(fd)
            raise
    return fd


def _enter(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


class Way:
    """One direction: what is read from `source` is written to `target`, `relay.delay_s` later."""

    def __init__(self, relay: Relay, source: int, target: int) -> None:
        self._relay, self._source, self._target = relay, source, target
        self._queue: deque[tuple[float, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(source, self._read)
        self.passed = self.lost = 0

    def _read(self) -> None:
        due = self._loop.time() + self._relay.delay_s
        try:
            for _ in range(64):
                packet = os.read(self._source, 1 << 16)
                if self._relay.loses() or len(self._queue) >= QUEUE_PACKETS:
                    self.lost += 1
                    continue
                self._queue.append((due, packet))
        except BlockingIOError:
            pass
        self._schedule()

    def _schedule(self) -> None:
        if self._queue and self._timer is None:
            self._timer = self._loop.call_at(self._queue[0][0], self._write)

    def _write(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._queue and self._queue[0][0] <= now:
            _, packet = self._queue.popleft()
            try:
                os.write(self._target, packet)
                self.passed += 1
            except OSError:  # the interface is not up yet, or no longer
                self.lost += 1
        self._schedule()


class Relay:
    """The commands."""

    def __init__(self) -> None:
        self.loss, self.delay_s = 0.0, 0.0
        self._chance = random.Random()
        self._ends: list[int] = []
        self._ways: list[Way] = []

    async def join(self, *, pids: list[int], seed: int) -> dict[str, Any]:
        """Open an interface in the namespaces of two processes, and begin to pass packets on."""
        self._chance.seed(seed)
        self._ends = [open_tun(pid) for pid in pids]
        self._ways = [Way(self, *self._ends), Way(self, *reversed(self._ends))]
        return {}

    async def set(self, *, loss: float, delay_s: float) -> dict[str, Any]:
        """From now on; a loss of 1 is a cable that is cut."""
        self.loss, self.delay_s = loss, delay_s
        return {}

    async def counts(self) -> dict[str, Any]:
        return {
            "passed": [way.passed for way in self._ways],
            "lost": [way.lost for way in self._ways],
        }

    def loses(self) -> bool:
        return self._chance.random() < self.loss

    async def close(self) -> None:
        for end in self._ends:
            asyncio.get_running_loop().remove_reader(end)
            os.close(end)


if __name__ == "__main__":
    uvloop.run(serve(Relay()))
