"""Frames to and from ZMQ messages: one message carries the consecutive frames sent to one peer in
one turn.

Each frame is a part of its own, [peer, frame, frame, ...] at the ROUTER and [frame, frame, ...] at
the DEALER, because waking the receiver costs more than a frame does. The first part is sent at
once: whether ZMQ accepts it shows whether the peer can be sent to, so `add` can answer for each
frame. ZMQ delivers the parts together, after the last one.
"""

from __future__ import annotations

from collections import deque

import zmq

from kvflow.protocols.wire.messages import MAX_FRAME_BYTES

# Of a received message, whose size is bounded like one frame's; above either it is malformed.
MAX_PARTS = 1024
# At either limit a message is closed before its turn ends.
PACKED_FRAMES, PACKED_BYTES = 64, 256 << 10
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)  # as enums they are slow to combine
_SRCFD = int(zmq.SRCFD)  # the descriptor of the connection that a part came from


class Outgoing:
    """The message under construction on one ROUTER or DEALER, open until `close`."""

    def __init__(self, socket: zmq.Socket[bytes], *, router: bool) -> None:
        self._socket, self._router = socket, router
        self._last: bytes | None = None  # held back: the last part is sent as such
        self._peer = b""
        self._frames = self._bytes = 0

    def add(self, frame: bytes, peer: bytes) -> bool:
        """False when there is no such peer or its queue is full."""
        if self._last is not None:
            if (
                peer == self._peer
                and self._frames < PACKED_FRAMES
                and self._bytes + len(frame) <= PACKED_BYTES
            ):
                if self._push(self._last, _SNDMORE):
                    self._last = frame
                    self._frames += 1
                    self._bytes += len(frame)
                    return True
                self._last = None  # lost with its connection
            self.close()
        if not self._open(peer):
            return False
        self._last, self._peer, self._frames, self._bytes = frame, peer, 1, len(frame)
        return True

    def send(self, frame: bytes, peer: bytes) -> bool:
        """Send a frame now, with what is open. False as in `add`."""
        if self._last is None:  # nothing to wait for and to send it with: no need to ask first
            return (not self._router or self._push(peer, _SNDMORE)) and self._push(frame, 0)
        accepted = self.add(frame, peer)
        self.close()
        return accepted

    def close(self) -> None:
        """Send what is open. Idempotent."""
        if self._last is not None:
            self._push(self._last, 0)
            self._last = None

    def _open(self, peer: bytes) -> bool:
        """Whether a message can be sent: a ROUTER sends the routing id; a DEALER holds its first
        frame and polls.
        """
        if self._router:
            return self._push(peer, _SNDMORE)
        return not self._socket.closed and bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)

    def _push(self, part: bytes, flags: int) -> bool:
        try:
            self._socket.send(part, flags | _NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


class Incoming:
    """What one ROUTER or DEALER has received, frame by frame."""

    def __init__(self, socket: zmq.Socket[bytes], *, router: bool) -> None:
        self._socket, self._router = socket, router
        self._frames: deque[tuple[bytes, bytes]] = deque()  # (peer, frame)
        # The rest of a message that is too long must be read first: call `take` again.
        self.skipping = False
        self.messages = 0  # whole ones, read so far
        self._part: zmq.Frame | None = None  # the last one of the message that is being taken
        # Descriptors that they came from; emptied by `TcpConnections`.
        self.delivered: set[int] = set()

    def take(self, count: int) -> list[tuple[bytes, bytes]]:
        """At most `count` frames of one message; none when none has arrived, or while `skipping`.

        Not of two: to learn that there is no second one costs as much as a message, which would
        wait meanwhile.
        """
        frames = self._frames
        try:
            if self.skipping:
                self._skip()
            if not frames and not self.skipping:
                self._part = None
                self._read_message()
        except zmq.Again:
            pass
        return [frames.popleft() for _ in range(min(len(frames), count))]

    def _read_message(self) -> None:
        """A message above the limits becomes one empty frame, which cannot be decoded.

        Raises: zmq.Again.
        """
        receive = self._socket.recv
        peer = receive(_NOBLOCK) if self._router else b""
        frames, size_bytes = [], 0
        while True:
            # `part.more` is faster than the socket option RCVMORE.
            part = receive(_NOBLOCK, copy=False)
            frames.append((peer, part.bytes))
            size_bytes, more = size_bytes + len(part), part.more
            if size_bytes > MAX_FRAME_BYTES or (more and len(frames) == MAX_PARTS):
                frames, self.skipping = [(peer, b"")], more
                break
            if not more:
                break
        self._frames += frames
        self.messages += 1
        self.delivered.add(_descriptor(part))
        self._part = part

    def sender_address(self) -> str:
        """The IP address from which the frames taken last have come;
        empty where that is not known.
        """
        try:
            return "" if self._part is None else str(self._part.get("Peer-Address"))
        except zmq.ZMQError:
            return ""

    def add_malformed(self) -> None:
        """An empty frame, which cannot be decoded, for what could not be read."""
        self._frames.append((b"", b""))

    def _skip(self) -> None:
        """Discard up to `MAX_PARTS` parts of a message that is too long; ZMQ holds all of it in
        memory already.
        """
        for _ in range(MAX_PARTS):
            if not self._socket.recv(_NOBLOCK, copy=False).more:
                self.skipping = False
                return


def _descriptor(part: zmq.Frame) -> int:
    """Of the connection it came from.

    Of a peer of ZMTP 1 or 2, which is none of ours, that is not known: -1.
    """
    try:
        return int(part.get(_SRCFD))
    except zmq.ZMQError:
        return -1
