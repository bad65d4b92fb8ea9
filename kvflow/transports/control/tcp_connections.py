"""The TCP connections of one ROUTER or DEALER, and the bytes of unfinished messages on each.

ZMQ limits the size of a frame and the number of whole messages in its queue, but not the number of
frames in a message. It keeps the frames of a message until the last one arrives, and returns none
before that. A stranger who never sends the last frame could therefore fill all memory.

So `TcpConnections` asks the kernel how many bytes each connection has received since it last
delivered a whole message, and cuts connections above the limits. ZMQ then frees what it kept. A
decode whose connection is cut reconnects, and Resync repairs what was lost.

Each turn of the event loop inspects only a few connections, so thousands of idle ones do not delay
other work. To inspect thousands in each round would take a fifth of a core. Of a crowd, a round
therefore inspects the connections with a long unfinished message and the next few of the others,
and it inspects all when the memory of this process grows. Inspections and cuts open no descriptor,
so they still work after a stranger uses up all descriptors.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import resource
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import zmq

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
# Up to so many connections are all inspected in each round. Above, a round inspects those with a
# long unfinished message, and so many of the others in turn, while this process does not grow by
# more than GROWN_BYTES: unfinished messages take memory.
LOOK_AT_ALL, LOOK_AT_SOME, GROWN_BYTES = 256, 16, 16 << 20
# Connections, or monitor events, that one turn of the event loop handles. This takes some 300 us.
LOOK_WORK = 64
# Plain ints: an expression of an int and a flag of zmq makes another flag, which is slow.
_OPENED = int(zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED)
_EVENTS = _OPENED | int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
_READABLE, _NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)
# First part of a monitor's message: the event, and the descriptor it is about. pyzmq's parser makes
# an enum member of both, which takes longer than all else, and keeps one per descriptor.
_EVENT = struct.Struct("=Hi")
_TCP_INFO = struct.Struct("128xQ")  # tcp_info.tcpi_bytes_received (linux/tcp.h, since Linux 4.1)
_names = itertools.count()


class TcpConnection:
    """Counters for one connection.

    `received` is the number of bytes that had arrived when the connection last delivered a whole
    message; it is 0 before the first one. `since_s` is the time of the inspection that first found
    more than `LATE_BYTES` of a message unfinished, or of the last one before that.
    """

    __slots__ = ("received", "since_s", "unfinished_bytes")

    def __init__(self, now: float) -> None:
        self.received, self.since_s = 0, now
        self.unfinished_bytes = 0


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


@functools.cache
def _statm() -> int:
    """Return a descriptor of this process's memory statistics, which stays open."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _resident_bytes() -> int:
    return int(os.pread(_statm(), 128, 0).split()[1]) * resource.getpagesize()


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
        # The connections that have delivered nothing yet, oldest first.
        self._silent: dict[int, None] = {}
        self._unfinished: set[int] = set()  # those with bytes of an unfinished message
        # The connections of a crowd that wait for their turn to be inspected.
        self._waiting: deque[int] = deque()
        self._grown_from_bytes = 0  # resident memory when all connections were last inspected
        self._looks_at_all = True  # whether the last round inspected all
        self._must_look_at_all = False  # whether the next one does
        self.expected = 0  # above MAX_CONNECTIONS, the number of connections that may be open
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
        _statm()

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
        if self._socket.closed:
            return True
        receive = self._monitor.recv
        for _ in range(LOOK_WORK):
            try:
                event, descriptor = _EVENT.unpack(receive(_NOBLOCK))
            except zmq.Again:
                return True
            receive()  # the address of the socket
            if event & _OPENED:
                # First remove an earlier connection with this descriptor, so that `open` stays in
                # order of age.
                self._drop(descriptor)
                self.open[descriptor] = TcpConnection(self._loop.time())
                self._silent[descriptor] = None
            elif event & _EVENTS:
                self._drop(descriptor)
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
        chosen = self._chosen()
        self._looks_at_all = chosen is self.open
        return _Round(chosen, all_had_a_turn=all_had_a_turn)

    def _chosen(self) -> Iterable[int]:
        """Return the connections that the next round inspects."""
        if len(self.open) <= LOOK_AT_ALL or self._must_look_at_all:
            self._must_look_at_all = False
            return self.open
        resident_bytes = _resident_bytes()
        if resident_bytes > self._grown_from_bytes + GROWN_BYTES:
            self._grown_from_bytes = resident_bytes
            return self.open
        # Memory that was returned in the meantime must not hide the next growth.
        self._grown_from_bytes = min(self._grown_from_bytes, resident_bytes)
        waiting = self._waiting
        if not waiting:
            waiting.extend(self.open)
        some = (waiting.popleft() for _ in range(min(LOOK_AT_SOME, len(waiting))))
        long = (d for d in self._unfinished if self.open[d].unfinished_bytes > LATE_BYTES)
        return dict.fromkeys(itertools.chain(long, some))

    def _drop(self, descriptor: int) -> None:
        self.open.pop(descriptor, None)
        self._silent.pop(descriptor, None)
        self._unfinished.discard(descriptor)

    def _look_at(self, found: _Round) -> None:
        if int(self._socket.get(zmq.EVENTS)) & _READABLE:
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
                self._drop(descriptor)
            elif descriptor in delivered or received < connection.received:
                connection.received, connection.since_s = received, self._loop.time()
                connection.unfinished_bytes = 0
                self._silent.pop(descriptor, None)
                self._unfinished.discard(descriptor)
            else:
                was_short = connection.unfinished_bytes <= LATE_BYTES
                connection.unfinished_bytes = received - connection.received
                if connection.unfinished_bytes:
                    self._unfinished.add(descriptor)
                # The time limit of a message starts when it exceeds LATE_BYTES, and not before. In
                # a crowd, the inspection before this one may be many seconds ago.
                if was_short or connection.unfinished_bytes <= LATE_BYTES:
                    connection.since_s = self._loop.time()
            delivered.discard(descriptor)
        delivered.discard(-1)

    def _enforce(self) -> None:
        """Cut the connections that are above the limits.

        First, cut those whose message is too large or too late. Then cut those with the most
        unfinished bytes, until the sum is within its limit. If too many connections remain, cut the
        oldest of those that have never delivered a message.
        """
        now = self._loop.time()
        for descriptor in list(self._unfinished):
            connection = self.open[descriptor]
            late = (
                connection.unfinished_bytes > LATE_BYTES and now - connection.since_s > UNFINISHED_S
            )
            if late or connection.unfinished_bytes > UNFINISHED_BYTES:
                self._cut(descriptor, "a message that does not end")
        left = {each: self.open[each].unfinished_bytes for each in self._unfinished}
        total = sum(left.values())
        if total > ALL_UNFINISHED_BYTES and not self._looks_at_all:
            # Some of these connections were inspected seconds ago, and may owe nothing by now.
            self._must_look_at_all, total = True, 0
        if total > ALL_UNFINISHED_BYTES:
            why = f"more than {ALL_UNFINISHED_BYTES} bytes of unfinished messages in all"
            # Sort once: searching for the largest at each cut would stall the event loop.
            for largest in sorted(left, key=left.__getitem__, reverse=True):
                if total <= ALL_UNFINISHED_BYTES:
                    break
                total -= left[largest]
                self._cut(largest, why)
        most = descriptors_for(max(MAX_CONNECTIONS, self.expected))
        if (beyond := len(self.open) - most) > 0:
            # A connection that delivered since its last inspection is not silent.
            silent = (d for d in self._silent if d not in self._incoming.delivered)
            for descriptor in list(itertools.islice(silent, beyond)):
                self._cut(descriptor, f"more than {most} connections")

    def _cut(self, descriptor: int, why: str) -> None:
        connection = self.open[descriptor]
        self._drop(descriptor)
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
            # Only query the socket: ZMQ may close it, and another file may get its number. The base
            # class of sockets is enough for that, and a crowd has hundreds of queries a second.
            tcp = socket.SocketType(
                socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, descriptor
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

    def _is_ours(self, tcp: socket.SocketType) -> bool:
        """Return True if one end has our port. The descriptor may belong to another file by now."""
        return self._has_port(tcp.getsockname()) or self._has_port(tcp.getpeername())

    def _has_port(self, end: object) -> bool:
        return isinstance(end, tuple) and end[1] == self._port
