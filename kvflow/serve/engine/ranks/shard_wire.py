"""What the first shard of a decode and the others tell each other: every step, just before it
begins, and its end.

A pair of sockets that no other process has joins two of them. Both ends block and belong to the
model threads: what a step needs is sent by the thread that runs it, so there is no step that was
not announced.
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
    """This shard has loaded its part of the model."""

    process: ProcessIdentity


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """This shard reads and writes nothing more for this step, and for those before; 0: it has
    mapped the pool.
    """

    step: _Count


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Sent at intervals, also while a step runs."""


class MapPool(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The pool of all shards: descriptor `descriptor` of process `pid`, whose addresses are in the
    layout.
    """

    pid: _Count
    descriptor: _Count
    layout: PoolLayout


class PlannedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next tokens of one sequence, from `computed` on, and logits of the last `logits` of them.

    `sequence` is a number that the first shard gives it. One that was not in the step before is
    new: `capacity` is how many tokens it may have, `row` its row of the pool. `pages` (int32) are
    those that it has beside the ones of the step before.
    """

    sequence: _Count
    computed: _Count
    tokens: bytes  # int64
    logits: _Count
    pages: bytes
    capacity: _Count = 0
    row: bytes = b""


class Plan(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Step number `step`, from 1 on. Sequences that it does not name are forgotten."""

    step: _Count
    rows: tuple[PlannedRow, ...]


class Rest(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """No step follows soon: forget all sequences."""


ToFirstShard = Hello | Ended | Alive
ToOtherShards = MapPool | Plan | Rest
_encode = msgspec.msgpack.Encoder().encode
_TO_FIRST, _TO_OTHERS = (
    msgspec.msgpack.Decoder(ToFirstShard),
    msgspec.msgpack.Decoder(ToOtherShards),
)


def parse_at_first(frame: bytes) -> ToFirstShard:
    """Raises: WireError."""
    return _parsed(frame, _TO_FIRST)  # type: ignore[no-any-return]


def parse_at_others(frame: bytes) -> ToOtherShards:
    """Raises: WireError."""
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
        """Takes ownership of `end`, a stream socket."""
        self._socket, self._lock = end, threading.Lock()
        self._connection = Connection(end.dup().detach())

    def fileno(self) -> int:
        """To wait for what can be received."""
        return self._connection.fileno()

    def send(self, message: ToFirstShard | ToOtherShards) -> None:
        """Raises: LostError when the other end is closed."""
        try:
            with self._lock:
                self._connection.send_bytes(_encode(message))
        except OSError as error:
            raise LostError(
                f"the connection to another shard is gone: {error.strerror or error}"
            ) from None

    def receive(self) -> bytes:
        """The next message; blocks. Raises: LostError when the other end is closed."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise LostError("the connection to another shard is closed") from None

    def abort(self) -> None:
        """From any thread: what waits here or at the other end raises, and so does every later
        call. Idempotent.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Not while a call waits: abort it first. Idempotent."""
        self.abort()
        with self._lock:
            self._socket.close()
            self._connection.close()
