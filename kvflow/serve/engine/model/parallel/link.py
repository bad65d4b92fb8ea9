"""Links that pass hidden states from one stage to the next: one ZMQ socket at each end, used by the
model thread there.

The later stage binds. Each frame carries its generation and step, its shape and dtype, and then the
bytes of the tensor, which are sent without a copy. The receiver returns a credit for each frame, so
at most `MAX_IN_FLIGHT` frames are under way: the earlier stage runs ahead by that many calls of the
model, and then waits. Each generation has a connection of its own, and frames of an earlier one are
dropped. If the other end dies, a wait lasts until `abort` is called: this module does not detect
the death of a process.

Frames are not authenticated. The address is a Unix socket in a directory that only its owner can
enter, or a port of a loopback interface, which any user of the machine can reach.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import numpy as np
import torch
import zmq

from kvflow.protocols.errors import LostError, MisuseError, PeerError, WireError
from kvflow.protocols.wire.codec import encode, parser

MAX_IN_FLIGHT = 4
_MAX_DIMS = 8
_MAX_IPC_PATH = 107  # bytes, on Linux


class HiddenLink(Protocol):
    """One end of a link that passes hidden states from a stage to the next one."""

    def begin(self, generation: int) -> None:
        """Begin `generation`, whose steps are counted from 0, and clear an abort.

        `generation` must be larger than every earlier one.
        """

    def next_step(self) -> None:
        """Begin the next step.

        A step may send several tensors, one for each call of the model.
        """

    def abort(self) -> None:
        """Make every send or receive raise until `begin`, including one that is waiting.

        Any thread may call this.
        """

    def close(self) -> None: ...


class HiddenSink(HiddenLink, Protocol):
    """The sending end of a link, at the earlier stage."""

    def send(self, hidden: torch.Tensor) -> None:
        """Queue `hidden` to be sent; block while too many tensors are under way.

        The memory of `hidden` must not change afterwards.

        Raises: LostError after `abort`.
        """

    def discard(self) -> None:
        """Make every send return without sending until `begin`, including one that is waiting.

        Any thread may call this.
        """


class HiddenSource(HiddenLink, Protocol):
    """The receiving end of a link, at the later stage."""

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states, on the device of `like`.

        Raises: LostError after `abort`, or if the other end began a later generation; PeerError
        if the shape or dtype differs from that of `like`, or if the tensor belongs to another step
        or call.
        """


class _Header(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    step: int
    call: int  # number of the model's call within the step
    dtype: str
    shape: list[int]


class _Credit(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    received: int  # frames in this generation


_parse_header: Callable[[bytes], _Header] = parser(_Header)
_parse_credit: Callable[[bytes], _Credit] = parser(_Credit)


class _End:
    """A DEALER socket for one thread. Other threads can abort a wait on it."""

    def __init__(self, address: str, *, bind: bool) -> None:
        check_address(address)
        self.dropped = 0  # invalid or outdated messages
        self.generation, self.step, self.call = 0, -1, 0
        self._address, self._aborted, self._lock = address, False, threading.Lock()
        self._context = zmq.Context(1)
        self._socket = self._new_socket()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            (self._socket.bind if bind else self._socket.connect)(address)
        except zmq.ZMQError as error:
            self.close()
            raise MisuseError(
                f"hidden states cannot be passed at {address}: {error.strerror}"
            ) from None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)

    def _new_socket(self) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, 20)
        return made

    @property
    def address(self) -> str:
        """The socket's address, with the port that the system chose."""
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def begin(self, generation: int) -> None:
        if generation < self.generation:
            raise MisuseError(
                f"generation {generation} of hidden states is older than the present one, "
                f"{self.generation}"
            )
        self.generation, self.step, self.call = generation, -1, 0
        self._aborted = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def next_step(self) -> None:
        self.step, self.call = self.step + 1, 0

    def abort(self) -> None:
        self._aborted = True
        self._wake_up()

    def _wake_up(self) -> None:
        """End a wait in `_take`."""
        with self._lock:
            if not self._socket.closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the socket, and drop unsent frames. A waiting call must already be aborted."""
        with self._lock:
            if not self._socket.closed:
                self._socket.close(linger=0)
                os.close(self._wake)
        self._context.term()

    def _take(self, *, wait: bool) -> list[zmq.Frame] | None:
        """Return the next message, or None if there is none.

        With `wait`, this waits for a message or an abort before it returns None. The caller must
        then try again.

        Raises: LostError after `abort`.
        """
        if self._aborted:
            raise LostError(
                f"passing hidden states at {self._address} was aborted in step {self.step}"
            )
        try:
            frames: list[zmq.Frame] = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if wait:
                self._poller.poll()
            return None
        return frames


class HiddenSender(_End):
    """Implements `HiddenSink`."""

    def __init__(self, address: str, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        super().__init__(address, bind=False)
        self._most, self._sent, self._received = max_in_flight, 0, 0
        self._discarding = False
        self._is_stale = False  # the socket was used in an earlier generation

    def begin(self, generation: int) -> None:
        super().begin(generation)
        self._is_stale = self._is_stale or self._sent > 0
        self._sent = self._received = 0
        self._discarding = False

    def _connect_again(self) -> None:
        # If the later stage was started again, ZMQ may not know yet that the old connection has
        # ended, and would lose a frame that is sent there. Only the model thread may do this,
        # because it uses the socket.
        self._is_stale = False
        with self._lock:
            self._poller.unregister(self._socket)
            self._socket.close(linger=0)
            self._socket = self._new_socket()
            self._socket.connect(self._address)
            self._poller.register(self._socket, zmq.POLLIN)

    def discard(self) -> None:
        self._discarding = True
        self._wake_up()

    @property
    def in_flight(self) -> int:
        """The number of sent tensors for which no credit has arrived yet."""
        return self._sent - self._received

    def send(self, hidden: torch.Tensor) -> None:
        if self._is_stale:
            self._connect_again()
        self._take_credits(wait=False)
        while self.in_flight >= self._most and not self._discarding:
            self._take_credits(wait=True)
        if self._discarding:
            return
        tensor = hidden.detach().to("cpu").contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        header = _Header(self.generation, self.step, self.call, dtype, list(tensor.shape))
        # ZMQ may read the tensor's memory after this call returns, so that memory must not change.
        self._socket.send_multipart(
            [encode(header), tensor.view(torch.uint8).numpy().data], copy=False
        )
        self._sent += 1
        self.call += 1

    def _take_credits(self, *, wait: bool) -> None:
        while (frames := self._take(wait=wait)) is not None:
            credit = _credit(frames)
            if (
                credit is None
                or credit.generation != self.generation
                or not 0 <= credit.received <= self._sent
            ):
                self.dropped += 1
            else:
                self._received = max(self._received, credit.received)
            wait = False


class HiddenReceiver(_End):
    """Implements `HiddenSource`."""

    def __init__(self, address: str) -> None:
        super().__init__(address, bind=True)
        self._received = 0
        self._early: tuple[_Header, zmq.Frame] | None = None  # first frame of a later generation

    def begin(self, generation: int) -> None:
        super().begin(generation)
        self._received = 0

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        header, data = self._next()
        found = f"{header.dtype} {header.shape} of step {header.step}, call {header.call}"
        dtype = str(like.dtype).removeprefix("torch.")
        if header != _Header(self.generation, self.step, self.call, dtype, list(like.shape)):
            wanted = f"{dtype} {list(like.shape)} of step {self.step}, call {self.call}"
            raise PeerError(f"hidden states are {found}, not {wanted}")
        self.call += 1
        hidden = torch.empty(like.shape, dtype=like.dtype)
        into = hidden.view(torch.uint8).reshape(-1).numpy()
        if len(data.buffer) != into.size:
            raise PeerError(f"hidden states {found} have {len(data.buffer)} bytes, not {into.size}")
        # Copy into aligned memory: kernels may compute different bits on unaligned memory.
        into[:] = np.frombuffer(data.buffer, np.uint8)
        self._received += 1
        # Sending fails if the other end is gone, which this module need not report.
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(_Credit(self.generation, self._received)), zmq.NOBLOCK)
        return hidden.to(like.device)

    def _next(self) -> tuple[_Header, zmq.Frame]:
        while True:
            found, self._early = self._early, None
            if found is None and (frames := self._take(wait=True)) is not None:
                found = _hidden(frames)
                self.dropped += found is None
            if found is None:
                continue
            generation = found[0].generation
            if generation == self.generation:
                return found
            if generation > self.generation:
                self._early = found
                raise LostError(
                    f"generation {self.generation} has ended: the stage before is in {generation} "
                    "already"
                )
            self.dropped += 1


def _hidden(frames: list[zmq.Frame]) -> tuple[_Header, zmq.Frame] | None:
    try:
        header = _parse_header(frames[0].bytes)
    except WireError:
        return None
    fits = len(frames) == 2 and len(header.shape) <= _MAX_DIMS
    return (header, frames[1]) if fits else None


def _credit(frames: list[zmq.Frame]) -> _Credit | None:
    try:
        return _parse_credit(frames[0].bytes)
    except WireError:
        return None


def check_address(address: str) -> None:
    """Check an address for hidden states.

    Raises: MisuseError if other machines can reach it, or if the path of a Unix socket is too long.
    """
    if address.startswith("ipc://") and not address.startswith("ipc://@"):
        if len(os.fsencode(address.removeprefix("ipc://"))) > _MAX_IPC_PATH:
            raise MisuseError(
                f"address {address!r}: the path of a Unix socket has at most {_MAX_IPC_PATH} bytes"
            )
        return
    host = urlsplit(address).hostname or ""
    try:
        if address.startswith("tcp://") and ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass
    raise MisuseError(
        f"address {address!r} for hidden states is neither ipc://PATH nor tcp:// of a loopback "
        "address: nothing is authenticated there"
    )
