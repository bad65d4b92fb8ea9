"""The TCP connections below one ROUTER or DEALER, and the bytes of unfinished messages on each.

ZMQ bounds a frame and the number of whole messages that wait, but not the frames of one message,
which it keeps until the last one arrives. None of them can be read before, so a stranger who never
sends the last one takes all memory. Therefore the kernel is asked how many bytes each connection
received since it last delivered a whole message, and a connection above the limits is cut: ZMQ then
frees what it kept. A decode whose connection is cut reconnects, and Resync repairs what was lost.

One turn of the loop looks at a few connections, so thousands of idle ones do not hold it up.
Neither a look nor a cut needs a new descriptor: a stranger who takes all that there are disables
neither.
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

LOOK_S = 0.1  # on loopback some 200 MB can arrive in between
# Limit for one connection: the most that a kvflow peer has under way, and a margin.
UNFINISHED_BYTES = MAX_FRAME_BYTES + (1 << 20)
# Limit for all connections together. ZMQ uses up to 32 times as much memory where frames are empty.
ALL_UNFINISHED_BYTES = 64 << 20
# A message of which more than LATE_BYTES arrived must be complete within UNFINISHED_S.
UNFINISHED_S, LATE_BYTES = 5.0, 64 << 10
MAX_CONNECTIONS = 2_048  # or half of the descriptors that the process may have, where that is less
LOOK_WORK = 64  # connections, or events of them, in one turn of the event loop: some 300 us
_OPENED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_EVENTS = _OPENED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_TCP_INFO = struct.Struct("128xQ")  # its field bytes_received (linux/tcp.h, since Linux 4.1)
_names = itertools.count()


class TcpConnection:
    """Counters for one connection.

    `received` and `since_s` are its bytes and the time when it last delivered a message, or was
    opened.
    """

    __slots__ = ("has_delivered", "received", "since_s", "unfinished_bytes")

    def __init__(self, now: float) -> None:
        self.received, self.since_s = 0, now
        self.unfinished_bytes = 0
        self.has_delivered = False


class _Spare:
    """A descriptor opened in advance, which a cut borrows for the connection's socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._descriptor = os.dup(self._nothing)

    @contextmanager
    def borrow(self, descriptor: int) -> Iterator[socket.socket]:
        """Yield the same socket under a number of our own, since ZMQ may close its number at any
        time.

        Raises: OSError.
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
    """One look at every connection.

    `left` are the connections still to be looked at. `reliable` is True while bytes that a
    connection did not deliver are known to be an unfinished message.
    """

    __slots__ = ("all_had_a_turn", "left", "reliable")

    def __init__(self, descriptors: Iterable[int], *, all_had_a_turn: bool) -> None:
        self.left = deque(descriptors)
        self.all_had_a_turn, self.reliable = all_had_a_turn, True


class TcpConnections:
    """The connections of one socket, which are looked at every `LOOK_S` until `close`.

    The socket's monitor reports which connections open and close.
    """

    def __init__(
        self,
        monitored: zmq.Socket[bytes],
        *,
        events: int = 0,
        on_event: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Create it before the socket is bound or connected.

        `on_event` is called with those of `events` that happen.
        """
        self._socket, self._on_event = monitored, on_event
        self._port = 0
        self.open: dict[int, TcpConnection] = {}  # by descriptor, oldest first
        self.cut = 0  # connections that were cut
        address = f"inproc://kvflow-monitor-{next(_names)}"
        monitored.monitor(address, _EVENTS | events)
        self._monitor: zmq.Socket[bytes] = monitored.context.socket(zmq.PAIR)
        # No limit on events: a connection whose event is lost would never be looked at.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(address)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._round: _Round | None = None
        self._turn: asyncio.Handle | None = None
        # Opened here, because at the time of a cut there may be no descriptor left.
        _spare()

    def watch(
        self,
        port: int,
        incoming: Incoming,
        tell_cut: Callable[[], None],
        tell_waits: Callable[[], None],
    ) -> None:
        """Begin to look at connections to `port`, which the socket was bound or connected to.

        `tell_cut` is called after a connection is cut. `tell_waits` is called when a message waits,
        because a look may consume the edge that would otherwise wake the reader.
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
        """Read what happened to connections since the last call.

        Return False when there is more: call again.
        """
        for _ in range(LOOK_WORK):
            if self._socket.closed or not int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
                return True
            found = parse_monitor_message(self._monitor.recv_multipart())
            event, descriptor = int(found["event"]), int(found["value"])
            if event & _OPENED:
                # The monitor did not report the end of the previous connection with this number.
                # The new one is the youngest, and `open` is in order of age.
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
        """Read some events, or look at some connections; the next turn of the loop continues."""
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

        The reader receives whole messages in turn, one per connection. When none waits, or when
        every connection had a turn since the last round, the bytes that a connection did not
        deliver are an unfinished message.
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
                continue  # closed meanwhile
            received = self._received(descriptor)
            if received is None:
                # The connection closed, and ZMQ has not reported it yet.
                del self.open[descriptor]
            elif descriptor in delivered or received < connection.received:
                connection.received, connection.since_s = received, self._loop.time()
                connection.unfinished_bytes, connection.has_delivered = 0, True
            else:
                connection.unfinished_bytes = received - connection.received
            delivered.discard(descriptor)
        delivered.discard(-1)

    def _enforce(self) -> None:
        """Cut the connections that are above the limits.

        First those whose message is too large or too late, then the largest until all together are
        within the limit, then, where there are too many, the oldest that never delivered a message.
        """
        now, left = self._loop.time(), dict(self.open)
        for descriptor, connection in self.open.items():
            late = (
                connection.unfinished_bytes > LATE_BYTES and now - connection.since_s > UNFINISHED_S
            )
            if late or connection.unfinished_bytes > UNFINISHED_BYTES:
                self._cut(left, descriptor, "a message that does not end")
        total = sum(connection.unfinished_bytes for connection in left.values())
        for descriptor in (
            sorted(left, key=lambda d: -left[d].unfinished_bytes)
            if total > ALL_UNFINISHED_BYTES
            else ()
        ):
            if total <= ALL_UNFINISHED_BYTES:
                break
            total -= left[descriptor].unfinished_bytes
            self._cut(
                left,
                descriptor,
                f"more than {ALL_UNFINISHED_BYTES} bytes of unfinished messages in all",
            )
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
            return  # closed meanwhile
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
        """Return the bytes received so far; None when the descriptor is no longer a connection of
        ours.
        """
        try:
            # ZMQ may close the descriptor at any time, and another file may get its number. The
            # socket is therefore only queried, never changed.
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
        """Return True when one end of `tcp` has our port; another file may have its number by now.

        Raises: OSError.
        """
        return any(
            isinstance(end, tuple) and end[1] == self._port
            for end in (tcp.getsockname(), tcp.getpeername())
        )
