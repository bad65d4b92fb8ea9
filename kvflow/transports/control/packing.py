"""Frames packed into ZMQ messages: one message carries consecutive frames that are sent to one
peer in one turn of the loop.

Waking the receiver costs more than sending a frame, so each frame is only one part of a message:
[peer, frame, frame, ...] at the ROUTER and [frame, frame, ...] at the DEALER. ZMQ delivers the
parts together, after the last one. `Outgoing.add` still reports for each frame whether it can be
sent. To find out, a ROUTER sends the peer's routing id at once, which ZMQ refuses if the peer is
unreachable, and a DEALER polls its socket.
"""

from __future__ import annotations

from collections import deque

import zmq

from kvflow.protocols.wire.messages import MAX_FRAME_BYTES

# A received message with more parts than this, or with more than MAX_FRAME_BYTES, is malformed.
MAX_PARTS = 1024
# An open message is sent early when the next frame would exceed either limit.
PACKED_FRAMES, PACKED_BYTES = 64, 256 << 10
# Plain ints: the flags are combined for every part, and enum members are slow to combine.
_NOBLOCK, _SNDMORE, _WRITABLE = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLOUT)
# Message property: the descriptor of the connection on which a part arrived.
_SRCFD = int(zmq.SRCFD)


class Outgoing:
    """The messages that one ROUTER or DEALER sends, one open at a time.

    A message stays open until it is full, a frame for another peer is added, or `close` is called.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, router: bool) -> None:
        self._socket, self._router = socket, router
        # The newest part is held back: only the last part of a message is sent without SNDMORE.
        self._last: bytes | None = None
        self._peer = b""
        self._frames = self._bytes = 0

    def add(self, frame: bytes, peer: bytes) -> bool:
        """Append a frame to the open message. Return False when the peer cannot take it."""
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
                # The peer's connection closed, and the open message is lost with it.
                self._last = None
            self.close()
        if not self._open(peer):
            return False
        self._last, self._peer, self._frames, self._bytes = frame, peer, 1, len(frame)
        return True

    def send(self, frame: bytes, peer: bytes) -> bool:
        """Send the open message and a frame now. Return False when the peer cannot take it."""
        # With no message open, the send itself shows whether the peer can take the frame.
        if self._last is None:
            return (not self._router or self._push(peer, _SNDMORE)) and self._push(frame, 0)
        accepted = self.add(frame, peer)
        self.close()
        return accepted

    def close(self) -> None:
        if self._last is not None:
            self._push(self._last, 0)
            self._last = None

    def _open(self, peer: bytes) -> bool:
        """Begin a message to `peer`. Return False when the peer cannot take one."""
        if self._router:
            return self._push(peer, _SNDMORE)
        return not self._socket.closed and bool(int(self._socket.get(zmq.EVENTS)) & _WRITABLE)

    def _push(self, part: bytes, flags: int) -> bool:
        try:
            self._socket.send(part, flags | _NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


class Incoming:
    """Frames of the messages that one ROUTER or DEALER receives."""

    def __init__(self, socket: zmq.Socket[bytes], *, router: bool) -> None:
        self._socket, self._router = socket, router
        self._frames: deque[tuple[bytes, bytes]] = deque()  # (peer, frame)
        # True while the rest of an oversized message is being discarded: call `take` again.
        self.skipping = False
        self.messages = 0  # messages read so far, oversized ones included
        self._part: zmq.Frame | None = None  # last part read from the latest message
        # Descriptors of the connections that messages arrived on; `TcpConnections` empties the set.
        self.delivered: set[int] = set()

    def take(self, count: int) -> list[tuple[bytes, bytes]]:
        """Return at most `count` frames. The list is empty when no message waits, or while
        `skipping`.

        One call reads at most one message. Checking for a second one costs as much as reading it,
        and would delay the frames of the first.
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
        """Read one message. A message above the limits becomes one empty frame, which cannot be
        decoded.

        Raises: zmq.Again when no message waits.
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

    @property
    def has_rest(self) -> bool:
        """True while the next `take` needs no other message: frames of the last one are left, or
        it is being discarded.
        """
        return bool(self._frames) or self.skipping

    def sender_address(self) -> str:
        try:
            return "" if self._part is None else str(self._part.get("Peer-Address"))
        except zmq.ZMQError:
            return ""

    def add_malformed(self) -> None:
        """Append an empty frame, which cannot be decoded, in place of bytes that were lost."""
        if not self._frames:
            self._part = None
        self._frames.append((b"", b""))

    def _skip(self) -> None:
        """Discard at most `MAX_PARTS` parts of an oversized message.

        Later calls discard the rest, so that one message does not delay the event loop.
        """
        for _ in range(MAX_PARTS):
            if not self._socket.recv(_NOBLOCK, copy=False).more:
                self.skipping = False
                return


def _descriptor(part: zmq.Frame) -> int:
    """Return the descriptor that `part` arrived on; -1 if the peer speaks ZMTP 1 or 2."""
    try:
        return int(part.get(_SRCFD))
    except zmq.ZMQError:
        return -1
