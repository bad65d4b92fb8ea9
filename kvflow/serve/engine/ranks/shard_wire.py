"""Messages between the first shard of a decode and the other shards: announcements of steps, and
reports of their end.

A socket pair, which no other process can use, connects the first shard to each other shard. Calls
at both ends block. The thread that runs a step announces it, so no step runs unannounced.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from multiprocessing.connection import Connection
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvflow.protocols.errors import LostError, WireError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import ProcessIdentity

_Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Reports that this shard loaded its part of the model."""

    process: ProcessIdentity


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Reports that this shard no longer reads or writes for this step or an earlier one.

    Step 0 reports that the shard mapped the pool.
    """

    step: _Count


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A heartbeat of this shard, sent at intervals, even while a step runs."""


class MapPool(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Names the shared pool: its layout, and file descriptor `descriptor` of process `pid`."""

    pid: _Count
    descriptor: _Count
    layout: PoolLayout


class PlannedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next tokens of one sequence, from `computed` on, with logits for the last `logits` of
    them.

    `sequence` is a number that the first shard chooses. A sequence that was not in the previous
    step is new: `capacity` is the largest number of tokens that it may have, and `row` is its row
    of the pool. `pages` (int32) are the pages added since the previous step.
    """

    sequence: _Count
    computed: _Count
    tokens: bytes  # int64
    logits: _Count
    pages: bytes
    capacity: _Count = 0
    row: bytes = b""


class Plan(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Announces step number `step`, counted from 1. Sequences not named in it are forgotten."""

    step: _Count
    rows: tuple[PlannedRow, ...]


class Rest(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Announces that no step follows soon, so the shards forget all sequences."""


ToFirstShard = Hello | Ended | Alive
ToOtherShards = MapPool | Plan | Rest
_encode = msgspec.msgpack.Encoder().encode
_TO_FIRST = msgspec.msgpack.Decoder(ToFirstShard)
_TO_OTHERS = msgspec.msgpack.Decoder(ToOtherShards)


def parse_at_first(frame: bytes) -> ToFirstShard:
    return _parsed(frame, _TO_FIRST)  # type: ignore[no-any-return]


def parse_at_others(frame: bytes) -> ToOtherShards:
    return _parsed(frame, _TO_OTHERS)  # type: ignore[no-any-return]


def _parsed(frame: bytes, decoder: Any) -> Any:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            f"cannot decode a {len(frame)}-byte frame of another shard: {error}"
        ) from None


class ShardLink:
    """One end of the connection between the first shard and another one.

    Any thread may send; only one receives.
    """

    def __init__(self, end: socket.socket) -> None:
        """Take ownership of `end`, a stream socket."""
        self._socket, self._lock = end, threading.Lock()
        # The socket is kept too, because a Connection has no `shutdown`.
        self._connection = Connection(end.dup().detach())

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: ToFirstShard | ToOtherShards) -> None:
        """Send a message. Raises: LostError when the other end is closed."""
        try:
            with self._lock:
                self._connection.send_bytes(_encode(message))
        except OSError as error:
            raise LostError(
                f"the connection to another shard is gone: {error.strerror or error}"
            ) from None

    def receive(self) -> bytes:
        """Return the next message; blocks. Raises: LostError when the other end is closed."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise LostError("the connection to another shard is closed") from None

    def abort(self) -> None:
        """Make every wait at both ends raise, now and later. Any thread may call it. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. A waiting call must already be aborted. Idempotent."""
        self.abort()
        with self._lock:
            self._socket.close()
            self._connection.close()
