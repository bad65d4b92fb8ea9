"""The TCP connections of one ROUTER or DEALER, and the bytes of unfinished messages on each.

ZMQ limits the size of a frame and the number of whole messages in its queue, but not the number of
frames in a message. It keeps the frames of a message until the last one arrives, and returns none
before that. A stranger who never sends the last frame could therefore fill all memory.

So `TcpConnections` asks the kernel how many bytes each connection has received since it last
delivered a whole message, and cuts connections above the limits. ZMQ then frees what it kept. A
decode whose connection is cut reconnects, and Resync repairs what was lost.

Each turn of the event loop inspects only a few connections, so thousands of idle ones do not delay
other work. Inspections and cuts open no descriptor, so they still work after a stranger uses up
all descriptors.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvflow.protocols.wire.messages import MAX_FRAME_BYTES
from kvflow.transports.control.packing import Incoming
from kvflow.transports.host.descriptors import descriptors_for

log = logging.getLogger(__name__)

# Seconds between two inspections. Some 200 MB can arrive on loopback in this time.
LOOK_S = 0.1
# Limit on unfinished bytes per connection: the longest message of a kvflow peer, plus a margin.
UNFINISHED_BYTES = MAX_FRAME_BYTES + (1 << 20)
# Limit on the unfinished bytes of all connections together. If frames are empty, ZMQ uses up to
# 32 times as much memory.
ALL_UNFINISHED_BYTES = 64 << 20
# A connection is cut if it has had more than LATE_BYTES of an unfinished message for UNFINISHED_S.
UNFINISHED_S, LATE_BYTES = 5.0, 64 << 10
MAX_CONNECTIONS = 2_048  # fewer if the process has few descriptors (`descriptors_for`)
# Connections, or monitor events, that one turn of the event loop handles. This takes some 300 us.
LOOK_WORK = 64
_OPENED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_EVENTS = _OPENED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_TCP_INFO = struct.Struct("128xQ")  # tcp_info.tcpi_bytes_received (linux/tcp.h, since Linux 4.1)
_names = itertools.count()


class TcpConnection:
    """Counters for one connection.

    `received` is the number of bytes that had arrived when the connection last delivered a whole
    message; it is 0 before the first one. `since_s` is the last time at which at most `LATE_BYTES`
    of a message were unfinished.
    """

    __slots__ = ("has_delivered", "received", "since_s", "unfinished_bytes")

    def __init__(self, now: float) -> None:
        self.received, self.since_s = 0, now
        self.unfinished_bytes = 0
        self.has_delivered = False


class _Spare:
    """A descriptor opened in advance, so that a cut works when the process has none left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._descriptor = os.dup(self._nothing)

    @contextmanager
    def borrow(self, descriptor: int) -> Iterator[socket.socket]:
        """Yield the socket of `descriptor` under the spare number, because ZMQ may close the
        original at any time.

        Raises: OSError when `descriptor` is closed already, or is not a socket.
        """
        with self._lock:
            os.dup2(descriptor, self._descriptor, inheritable=False)
            tcp = socket.socket(
                socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=self._descriptor
            )
            try:
                yield tcp
            finally:
                tcp.detach()
                os.dup2(self._nothing, self._descriptor, inheritable=False)


_spare = functools.cache(_Spare)


class _Round:
    """One inspection of every connection.

    `left` holds the descriptors that are still to be inspected. While `reliable` is True, bytes
    that a connection has not delivered can only be an unfinished message.
    """

    __slots__ = ("all_had_a_turn", "left", "reliable")

    def __init__(self, descriptors: Iterable[int], *, all_had_a_turn: bool) -> None:
        self.left = deque(descriptors)
        self.all_had_a_turn, self.reliable = all_had_a_turn, True


class TcpConnections:
    """The connections of one socket, inspected every `LOOK_S` seconds until `close`.

    The socket's monitor reports which connections open and close.
    """

    def __init__(
        self,
        monitored: zmq.Socket[bytes],
        *,
        events: int = 0,
        on_event: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Start monitoring the socket. Create this object before the socket is bound or connected.

        `events` selects further monitor events. `on_event` is called with each of them.
        """
        self._socket, self._on_event = monitored, on_event
        self._port = 0
        self.open: dict[int, TcpConnection] = {}  # by descriptor, oldest first
        self.cut = 0  # number of connections that were cut
        address = f"inproc://kvflow-monitor-{next(_names)}"
        monitored.monitor(address, _EVENTS | events)
        self._monitor: zmq.Socket[bytes] = monitored.context.socket(zmq.PAIR)
        # The event queue has no limit: a connection whose event is lost would never be inspected.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(address)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._round: _Round | None = None
        self._turn: asyncio.Handle | None = None
        # Open the spare descriptor now: at the time of a cut there may be none left.
        _spare()

    def watch(
        self,
        port: int,
        incoming: Incoming,
        tell_cut: Callable[[], None],
        tell_waits: Callable[[], None],
    ) -> None:
        """Start inspecting connections to `port`, to which the socket was bound or connected.

        `tell_cut` is called after a connection is cut. `tell_waits` is called when an inspection
        finds a waiting message: the inspection has read ZMQ's EVENTS, so the socket's descriptor
        may no longer wake the reader.
        """
        self._port = port
        self._incoming = incoming
        self._tell_cut = tell_cut
        self._tell_waits = tell_waits
        self._messages = 0
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def read_events(self) -> bool:
        """Process at most `LOOK_WORK` monitor events. Return False if more may be waiting."""
        for _ in range(LOOK_WORK):
            if self._socket.closed or not int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
                return True
            found = parse_monitor_message(self._monitor.recv_multipart())
            event, descriptor = int(found["event"]), int(found["value"])
            if event & _OPENED:
                # First remove an earlier connection with this descriptor, so that `open` stays in
                # order of age.
                self.open.pop(descriptor, None)
                self.open[descriptor] = TcpConnection(self._loop.time())
            elif event & _EVENTS:
                self.open.pop(descriptor, None)
            else:
                self._on_event(event)
        return False

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        if self._turn is None:
            self._go_on()

    def _go_on(self) -> None:
        self._turn = None
        if self.read_events():
            if (found := self._round) is None:
                if not self.open:
                    return
                self._round = found = self._begin()
            self._look_at(found)
            if not found.left:
                self._round = None
                if found.reliable:
                    self._enforce()
                return
        self._turn = self._loop.call_soon(self._go_on)

    def _begin(self) -> _Round:
        """Return a new round over all connections.

        ZMQ returns whole messages in turn, one per connection. If none waits, or if every
        connection has had its turn since the last round, then bytes that a connection has not
        delivered are an unfinished message.
        """
        incoming = self._incoming
        all_had_a_turn = incoming.messages - self._messages >= len(self.open)
        self._messages = incoming.messages
        return _Round(self.open, all_had_a_turn=all_had_a_turn)

    def _look_at(self, found: _Round) -> None:
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._tell_waits()
            found.reliable &= found.all_had_a_turn
        delivered = self._incoming.delivered
        for _ in range(min(LOOK_WORK, len(found.left))):
            descriptor = found.left.popleft()
            if (connection := self.open.get(descriptor)) is None:
                continue  # closed since the round began
            received = self._received(descriptor)
            if received is None:
                # The connection is closed, but the monitor has not reported it yet.
                del self.open[descriptor]
            elif descriptor in delivered or received < connection.received:
                connection.received, connection.since_s = received, self._loop.time()
                connection.unfinished_bytes, connection.has_delivered = 0, True
            else:
                connection.unfinished_bytes = received - connection.received
                # The time limit of a message starts when it exceeds LATE_BYTES, and not before.
                if connection.unfinished_bytes <= LATE_BYTES:
                    connection.since_s = self._loop.time()
            delivered.discard(descriptor)
        delivered.discard(-1)

    def _enforce(self) -> None:
        """Cut the connections that are above the limits.

        First, cut those whose message is too large or too late. Then cut those with the most
        unfinished bytes, until the sum is within its limit. If too many connections remain, cut the
        oldest of those that have never delivered a message.
        """
        now, left = self._loop.time(), dict(self.open)
        for descriptor, connection in self.open.items():
            late = (
                connection.unfinished_bytes > LATE_BYTES and now - connection.since_s > UNFINISHED_S
            )
            if late or connection.unfinished_bytes > UNFINISHED_BYTES:
                self._cut(left, descriptor, "a message that does not end")
        total = sum(connection.unfinished_bytes for connection in left.values())
        if total > ALL_UNFINISHED_BYTES:
            why = f"more than {ALL_UNFINISHED_BYTES} bytes of unfinished messages in all"
            # Sort once: searching for the largest at each cut would stall the event loop.
            for largest in sorted(left, key=lambda d: left[d].unfinished_bytes, reverse=True):
                if total <= ALL_UNFINISHED_BYTES:
                    break
                total -= left[largest].unfinished_bytes
                self._cut(left, largest, why)
        silent = [
            descriptor for descriptor, connection in left.items() if not connection.has_delivered
        ]
        for descriptor in silent[: max(0, len(left) - (most := descriptors_for(MAX_CONNECTIONS)))]:
            self._cut(left, descriptor, f"more than {most} connections")
        self.open = left

    def _cut(self, left: dict[int, TcpConnection], descriptor: int, why: str) -> None:
        connection = left.pop(descriptor)
        try:
            with _spare().borrow(descriptor) as tcp:
                peer, port = tcp.getpeername()[:2]
                if self._is_ours(tcp):
                    tcp.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed
        self.cut += 1
        log.warning(
            "connection from %s:%d is cut, with %d bytes: %s",
            peer,
            port,
            connection.unfinished_bytes,
            why,
        )
        self._tell_cut()

    def _received(self, descriptor: int) -> int | None:
        """Return the bytes received so far; None if the descriptor is no longer one of ours."""
        try:
            # Only query the socket: ZMQ may close it, and another file may get its number.
            tcp = socket.socket(
                socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor
            )
        except OSError:
            return None
        try:
            if not self._is_ours(tcp):
                return None
            info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return None
        finally:
            tcp.detach()
        return int(_TCP_INFO.unpack(info)[0])

    def _is_ours(self, tcp: socket.socket) -> bool:
        """Return True if one end has our port. The descriptor may belong to another file by now."""
        return any(
            isinstance(end, tuple) and end[1] == self._port
            for end in (tcp.getsockname(), tcp.getpeername())
        )
