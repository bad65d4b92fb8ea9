"""ZeroMQ's wire protocol (ZMTP 3.0, no security), as much as an emulated DEALER needs.

A ZeroMQ socket costs three descriptors and some 40 KiB, so a process cannot have 5,000 of them. A
TCP connection that speaks the protocol itself costs one.
"""

from __future__ import annotations

import struct

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_MORE, _LONG, _COMMAND = 1, 2, 4
_SIZE = struct.Struct(">Q")


def opening(routing_id: bytes) -> bytes:
    """Return the first bytes of a DEALER with this routing id: its greeting and READY."""
    metadata = b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", routing_id))
    )
    return _GREETING + _frame(b"\x05READY" + metadata, _COMMAND)


def message(*frames: bytes) -> bytes:
    """Return the bytes of one message of one or more frames."""
    last = len(frames) - 1
    return b"".join(
        _frame(frame, _MORE if number < last else 0) for number, frame in enumerate(frames)
    )


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) > 255:
        return bytes([flags | _LONG]) + _SIZE.pack(len(body)) + body
    return bytes([flags, len(body)]) + body


class Frames:
    """Splits the bytes of one connection into frames. Commands are dropped.

    `ready` becomes True with the peer's READY, before which a peer accepts no message.
    """

    __slots__ = ("_bytes", "_greeted", "ready")

    def __init__(self) -> None:
        self._bytes, self._greeted, self.ready = b"", False, False

    def add(self, data: bytes) -> list[bytes]:
        """Return the bodies of the frames that are complete now, in their order."""
        left = self._bytes + data if self._bytes else data
        if not self._greeted:
            if len(left) < len(_GREETING):
                self._bytes = left
                return []
            left, self._greeted = left[len(_GREETING) :], True
        found, at = [], 0
        while len(left) - at >= 2:
            flags, size, body = left[at], left[at + 1], at + 2
            if flags & _LONG:
                if len(left) - at < 9:
                    break
                (size,), body = _SIZE.unpack_from(left, at + 1), at + 9
            if len(left) < body + size:
                break
            if flags & _COMMAND:
                self.ready = True
            else:
                found.append(left[body : body + size])
            at = body + size
        self._bytes = left[at:]
        return found
