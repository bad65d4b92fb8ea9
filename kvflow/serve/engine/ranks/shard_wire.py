"""Messages between the first shard of a decode and the others: every step, just before it begins,
and its end.

A pair of sockets that no other process has joins two shards. Both ends block and belong to the
model threads: the thread that runs a step announces it, so no step runs unannounced.
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
    """Reports that this shard reads and writes no more for this step and earlier ones.

    Step 0 reports that it mapped the pool.
    """

    step: _Count


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Reports that this shard lives; sent at intervals, also while a step runs."""


class MapPool(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Names the pool of all shards: descriptor `descriptor` of process `pid`.

    Its addresses are in the layout.
    """

    pid: _Count
    descriptor: _Count
    layout: PoolLayout


class PlannedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next tokens of one sequence, from `computed` on; logits of the last `logits` are wanted.

    `sequence` is a number that the first shard chooses. One that was not in the step before is new:
    `capacity` is how many tokens it may have, `row` its row of the pool. `pages` (int32) are those
    added since the step before.
    """

    sequence: _Count
    computed: _Count
    tokens: bytes  # int64
    logits: _Count
    pages: bytes
    capacity: _Count = 0
    row: bytes = b""


class Plan(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Announces step number `step`, from 1 on. Sequences that it does not name are forgotten."""

    step: _Count
    rows: tuple[PlannedRow, ...]


class Rest(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Announces that no step follows soon: forget all sequences."""


ToFirstShard = Hello | Ended | Alive
ToOtherShards = MapPool | Plan | Rest
_encode = msgspec.msgpack.Encoder().encode
_TO_FIRST = msgspec.msgpack.Decoder(ToFirstShard)
_TO_OTHERS = msgspec.msgpack.Decoder(ToOtherShards)


def parse_at_first(frame: bytes) -> ToFirstShard:
    """Decode a message to the first shard. Raises: WireError."""
    return _parsed(frame, _TO_FIRST)  # type: ignore[no-any-return]


def parse_at_others(frame: bytes) -> ToOtherShards:
    """Decode a message to another shard. Raises: WireError."""
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

    Any thread may send; one receives.
    """

    def __init__(self, end: socket.socket) -> None:
        """Take ownership of `end`, a stream socket."""
        self._socket, self._lock = end, threading.Lock()
        # The socket is kept beside the connection, which has no `shutdown`.
        self._connection = Connection(end.dup().detach())

    def fileno(self) -> int:
        """Return the descriptor to poll for messages."""
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
        """Make every wait at both ends raise, and every later call too. Idempotent.

        Callable from any thread.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Abort a call that waits first. Idempotent."""
        self.abort()
        with self._lock:
            self._socket.close()
            self._connection.close()
