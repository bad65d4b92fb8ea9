"""The control link over ZMQ: a ROUTER at prefill, a DEALER per prefill rank at decode.

All sockets of a process share one context, except a ROUTER that demands a key.

The link does not use zmq.asyncio, because one await per message costs more than everything else
(measured: 28,000 against 74,000 rooms/s). Instead the loop watches the socket's descriptor, and the
reader takes messages without blocking until the queue is empty. The descriptor is edge-triggered:
after a send or an inspection of the connections, it may not become readable even though a message
is waiting. Both therefore check EVENTS and wake the reader.

One room at a time and hundreds at once need opposite habits, and a socket changes its own by what
it saw last. With one room, a turn of the loop sends one frame: it leaves at once, and the reader
looks for the next message only after the tasks that the last one woke. With many rooms, frames of a
turn share a message, and the next message is there already when one was handled.
"""

from __future__ import annotations

import asyncio
from time import monotonic

import zmq

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import MAX_FRAME_BYTES, Incarnation
from kvflow.transports.control.curve import Authentication, ControlKey
from kvflow.transports.control.packing import Incoming, Outgoing
from kvflow.transports.control.tcp_connections import TcpConnections
from kvflow.transports.host.address import bracketed

# Frames, and seconds, after which other tasks get a turn. Most frames take 60 us to handle, but the
# first one of a new decode takes six times as long.
BURST_FRAMES, BURST_S = 16, 0.001
QUEUE_MESSAGES = 100_000
# After a turn that sent several frames, the frames of at least so many turns wait for their ends.
PACKED_TURNS = 16
RECONNECT_MS = 100
BACKLOG = 4_096  # connections that wait until ZMQ accepts them
# After this many failed handshakes in a row, the peer is assumed to have another key, or not to be
# kvflow. A handshake that fails with an authentication or protocol error counts as this many.
FAILED_HANDSHAKES = 4
# A plain int: combining a flag of zmq with an int makes another flag, which is slow.
_READABLE = int(zmq.POLLIN)
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_HANDSHAKES = _REFUSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED


class ZmqSocket:
    """Implements `protocols.ports.ControlSocket` over one ROUTER or DEALER."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        connections: TcpConnections,
        port: int,
        *,
        router: bool,
        handshakes: _Handshakes | None = None,
        authentication: Authentication | None = None,
    ) -> None:
        """Begin to read `socket`; `connections` watches its TCP connections to `port`."""
        self._socket, self.connections = socket, connections
        self._handshakes, self._authentication = handshakes, authentication
        self._outgoing = Outgoing(socket, router=router)
        self._incoming = Incoming(socket, router=router)
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._burst = 0  # frames that `receive` returned since other tasks last ran
        self._burst_ends_s = 0.0
        self._turn_ends = False  # True while `_end_turn` is scheduled
        self._sent = 0  # frames sent in this turn
        self._packed_turns = 0  # turns left whose first frame waits, too
        self._more_likely = False  # True if a message was waiting when the reader last looked again
        self._loop.add_reader(socket.fileno(), self._wake)
        connections.watch(port, self._incoming, self._tell_cut, self._wake)

    @property
    def lockout_reason(self) -> str:
        self.connections.read_events()
        return "" if self._handshakes is None else self._handshakes.lockout_reason

    def send(self, frame: bytes, peer: bytes = b"", at_once: bool = False) -> bool:
        self._look_later()
        waits = self._packed_turns or self._sent
        self._sent += 1
        if waits and not at_once:
            return self._outgoing.add(frame, peer)
        return self._outgoing.send(frame, peer)

    async def receive(self) -> list[tuple[bytes, bytes]]:
        """Wait for a message, and return some or all of its frames.

        Other tasks get a turn after every `BURST_FRAMES` frames, after `BURST_S`, and before a look
        for a message that is unlikely to be there.
        """
        # uvloop's own time stands still within a turn.
        if self._burst and (self._burst >= BURST_FRAMES or monotonic() > self._burst_ends_s):
            self._burst = 0
            await asyncio.sleep(0)
        if self._burst and not self._more_likely and not self._incoming.has_rest:
            self._look_later()
            await self._woken()
        while not (frames := self._incoming.take(BURST_FRAMES - self._burst)):
            if self._incoming.skipping:
                await asyncio.sleep(0)
                continue
            self._more_likely = False
            await self._woken()
        if not self._burst:
            self._burst_ends_s = monotonic() + BURST_S
        self._burst += len(frames)
        return frames

    async def _woken(self) -> None:
        """Wait for `_wake`."""
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None
        self._burst = 0

    def sender_address(self) -> str:
        return self._incoming.sender_address()

    def close(self) -> None:
        if not self._socket.closed:
            self._outgoing.close()
            self._loop.remove_reader(self._socket.fileno())
            self.connections.close()
            if self._authentication is not None:
                self._authentication.close()
            self._socket.close(linger=200)

    def _wake(self) -> None:
        if self._waiting is None:
            # Reading EVENTS resets the descriptor, which would otherwise stay readable.
            self._socket.get(zmq.EVENTS)
        elif not self._waiting.done():
            self._waiting.set_result(None)

    def _tell_cut(self) -> None:
        """Report the bytes of a cut connection to the reader as one malformed message."""
        self._incoming.add_malformed()
        self._wake()

    def _look_later(self) -> None:
        """Send the open message, and look for one to read, when this turn of the loop ends."""
        if not self._turn_ends:
            self._turn_ends = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_ends = False
        if self._sent > 1:
            self._packed_turns = PACKED_TURNS
        elif self._sent and self._packed_turns:
            self._packed_turns -= 1
        self._sent = 0
        if not self._socket.closed:
            self._outgoing.close()
            if int(self._socket.get(zmq.EVENTS)) & _READABLE:
                self._more_likely = True
                self._wake()


class _Handshakes:
    """Count of failed handshakes on one DEALER, and the probable reason."""

    def __init__(self, key: ControlKey | None) -> None:
        if key:
            self._why = "it has another control key, or none"
        else:
            self._why = "it requires a control key (--control-key-file)"
        self._failed = 0

    def note(self, event: int) -> None:
        if event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failed = 0
        else:
            self._failed += FAILED_HANDSHAKES if event & _REFUSED else 1

    @property
    def lockout_reason(self) -> str:
        return (
            f"{self._why}, or is not a kvflow prefill" if self._failed >= FAILED_HANDSHAKES else ""
        )


def bind_router(
    host: str, port: int, key: ControlKey | None = None, *, decodes: int = 0
) -> tuple[ZmqSocket, int]:
    """Bind prefill's end to `port` (0: any free one), and return the socket and its port.

    With a `key`, only decodes that have it can connect. `decodes` is the number of decodes that may
    register, if it is above that of `Bounds`: twice as many connections may be open.

    Raises: MisuseError (port taken).
    """
    socket = _socket(zmq.ROUTER, zmq.Context() if key else zmq.Context.instance(), ipv6=":" in host)
    authentication = key.arm_server(socket) if key else None
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # With ZMQ's 100, the connections of a fleet that starts at once wait for a second or longer.
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    # A decode that reconnects takes over the routing id of its old connection.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    connections = TcpConnections(socket)
    # All decodes may connect anew before the ends of their old connections are noticed.
    connections.expected = 2 * decodes
    named = bracketed(host)
    try:
        socket.bind(f"tcp://{named}:{port or '*'}")
    except zmq.ZMQError as error:
        connections.close()
        if authentication is not None:
            authentication.close()
        socket.close(linger=0)
        raise MisuseError(
            f"control port {named}:{port}: {zmq.strerror(error.errno or 0)}"
        ) from None
    bound = int(str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rsplit(":", 1)[1])
    return ZmqSocket(socket, connections, bound, router=True, authentication=authentication), bound


def connect_dealer(control: str, incarnation: int, key: ControlKey | None = None) -> ZmqSocket:
    """Connect decode's end to the control endpoint "tcp://host:port" of one prefill rank.

    The connection is made in the background.

    Raises: MisuseError for an endpoint that ZMQ rejects.
    """
    socket = _socket(zmq.DEALER, zmq.Context.instance(), ipv6="[" in control)
    if key:
        key.arm_client(socket)
    handshakes = _Handshakes(key)
    connections = TcpConnections(socket, events=_HANDSHAKES, on_event=handshakes.note)
    socket.setsockopt(zmq.ROUTING_ID, routing_id(Incarnation(incarnation)))
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 10 * RECONNECT_MS)
    try:
        socket.connect(control)
    except zmq.ZMQError as error:
        connections.close()
        socket.close(linger=0)
        raise MisuseError(
            f"control endpoint {control!r}: {zmq.strerror(error.errno or 0)}"
        ) from None
    # ZMQ accepted the address, so it ends in a port.
    port = int(control.rpartition(":")[2])
    return ZmqSocket(socket, connections, port, router=False, handshakes=handshakes)


def _socket(kind: int, context: zmq.Context[zmq.Socket[bytes]], *, ipv6: bool) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.IPV6, int(ipv6))
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket
