"""The control link in memory: the event loop delivers frames in the order they were sent, unless a
rule decides otherwise.

    network = Network()
    PrefillNode(..., bind=network.bind); DecodeNode(..., connect=network.connect)
    network.drop(ChunkDone)                  # the next ChunkDone is lost
    network.duplicate(Abort, times=3)        # the next three arrive twice
    network.hold(Bootstrap); ...; network.release()
    network.cut(); ...; network.mend()       # a partition: until `mend`, frames are lost both ways

A custom rule, a function from a frame to its fate, can do anything else, such as seeded drops,
delays and reordering.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from kvflow.protocols.errors import MisuseError, WireError
from kvflow.protocols.wire.codec import parse_at_decode, parse_at_prefill, routing_id
from kvflow.protocols.wire.messages import Incarnation, Message

BURST_FRAMES = 32

Fate = tuple[float, ...]
"""Delays in seconds, one per delivered copy. An empty tuple loses the frame, two entries duplicate
it, and unequal delays reorder frames.
"""
LOST: Fate = ()
DELIVERED: Fate = (0.0,)
TWICE: Fate = (0.0, 0.0)
HELD: Fate = (math.inf,)  # kept until `release`


class Frame(NamedTuple):
    """One frame in transit.

    `control` is the prefill's control address, `peer` the decode's routing id.
    """

    control: str
    peer: bytes
    to_prefill: bool
    data: bytes

    @property
    def message(self) -> Message | None:
        """The message in the frame; None for bytes that cannot be decoded."""
        try:
            return parse_at_prefill(self.data) if self.to_prefill else parse_at_decode(self.data)
        except WireError:
            return None


Rule = Callable[[Frame], Fate | None]
"""A function that returns a frame's fate, or None to leave it to the next rule."""


class Network:
    """All links between the nodes of one test. Use it on one event loop only."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.held: list[Frame] = []
        self.seen: Counter[str] = Counter()  # frames sent, by the name of their message
        self._routers: dict[str, RouterSocket] = {}
        # Open dealers, by control address and routing id. The newest one receives.
        self._dealers: dict[tuple[str, bytes], list[DealerSocket]] = {}
        self._ports = itertools.count(40_000)

    # --- the nodes' side

    def bind(self, host: str, port: int) -> tuple[RouterSocket, int]:
        """Bind prefill's end. Raises: MisuseError (port taken)."""
        port = port or next(self._ports)
        control = f"tcp://{host}:{port}"
        if control in self._routers:
            raise MisuseError(f"control port {host}:{port}: Address already in use")
        self._routers[control] = RouterSocket(self, control)
        return self._routers[control], port

    def connect(self, control: str, incarnation: int) -> DealerSocket:
        """Connect decode's end.

        The router may be bound later. If several dealers have the same routing id, the newest
        receives.
        """
        dealer = DealerSocket(self, control, routing_id(Incarnation(incarnation)))
        self._dealers.setdefault((control, dealer.peer), []).append(dealer)
        return dealer

    # --- the test's side

    def drop(self, kind: type, times: int = 1) -> None:
        """Lose the next `times` messages of class `kind`."""
        self.rules.append(_Counted(kind, LOST, times))

    def duplicate(self, kind: type, times: int = 1) -> None:
        """Deliver the next `times` messages of class `kind` twice."""
        self.rules.append(_Counted(kind, TWICE, times))

    def hold(self, kind: type, times: int = 1 << 30) -> None:
        """Keep the next `times` messages of class `kind` until `release`."""
        self.rules.append(_Counted(kind, HELD, times))

    def release(self, order: Callable[[list[Frame]], None] | None = None) -> int:
        """Deliver the held frames, remove the rules that `hold` added, and return how many frames
        were held.

        `order` reorders them in place (list.reverse, a shuffle).
        """
        self.rules = [
            rule for rule in self.rules if not (isinstance(rule, _Counted) and rule.fate == HELD)
        ]
        held, self.held = self.held, []
        if order is not None:
            order(held)
        for frame in held:
            self._deliver(frame)
        return len(held)

    def cut(self, control: str | None = None) -> None:
        """Lose every frame, in both directions, until `mend`.

        `control` names the prefill whose links are cut; None cuts all links.
        """
        self.rules.insert(0, _Cut(control))

    def mend(self) -> None:
        """Remove every rule, cuts included, so that frames are delivered again."""
        self.rules.clear()

    def inject(self, frame: Frame, fate: Fate = DELIVERED) -> None:
        """Put a frame with arbitrary bytes on a link.

        It is not counted in `seen`, and no rule applies to it.
        """
        self._give(frame, fate)

    # --- delivery

    def carry(self, frame: Frame) -> None:
        message = frame.message
        self.seen[type(message).__name__ if message is not None else "garbage"] += 1
        for rule in list(self.rules):
            if (fate := rule(frame)) is not None:
                return self._give(frame, fate)
        return self._give(frame, DELIVERED)

    def knows(self, control: str, peer: bytes) -> bool:
        return bool(self._dealers.get((control, peer)))

    def leave(self, socket: _Socket) -> None:
        """Remove a closed socket.

        Frames in transit are lost, unless a new socket takes its address.
        """
        if isinstance(socket, RouterSocket):
            if self._routers.get(socket.control) is socket:
                del self._routers[socket.control]
        elif isinstance(socket, DealerSocket):
            named = self._dealers.get((socket.control, socket.peer), [])
            named[:] = [dealer for dealer in named if dealer is not socket]

    def _give(self, frame: Frame, fate: Fate) -> None:
        loop = asyncio.get_running_loop()
        for delay_s in fate:
            if delay_s == math.inf:
                self.held.append(frame)
            elif delay_s:
                loop.call_later(delay_s, self._deliver, frame)
            else:
                loop.call_soon(self._deliver, frame)

    def _deliver(self, frame: Frame) -> None:
        # The socket is looked up on arrival: a restarted node may have the address by now.
        socket: _Socket | None
        if frame.to_prefill:
            socket = self._routers.get(frame.control)
        else:
            socket = next(reversed(self._dealers.get((frame.control, frame.peer), ())), None)
        if socket is not None:
            socket.arrive((frame.peer if frame.to_prefill else b"", frame.data))


class _Counted:
    def __init__(self, kind: type, fate: Fate, times: int) -> None:
        self.kind, self.fate, self.times = kind, fate, times

    def __call__(self, frame: Frame) -> Fate | None:
        if not self.times or not isinstance(frame.message, self.kind):
            return None
        self.times -= 1
        return self.fate


class _Cut:
    def __init__(self, control: str | None) -> None:
        self._control = control

    def __call__(self, frame: Frame) -> Fate | None:
        return LOST if self._control in (None, frame.control) else None


class _Socket:
    lockout_reason = ""

    def __init__(self, network: Network, control: str) -> None:
        self.control = control
        self.closed = False
        self._network = network
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def arrive(self, item: tuple[bytes, bytes]) -> None:
        self._inbox.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def receive(self) -> list[tuple[bytes, bytes]]:
        while not self._inbox:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return [self._inbox.popleft() for _ in range(min(len(self._inbox), BURST_FRAMES))]

    def sender_address(self) -> str:
        return ""

    def close(self) -> None:
        self.closed = True
        self._network.leave(self)


class RouterSocket(_Socket):
    """Implements `protocols.ports.ControlSocket` for prefill."""

    def send(self, frame: bytes, peer: bytes = b"", at_once: bool = False) -> bool:
        if self.closed or not self._network.knows(self.control, peer):
            return False
        self._network.carry(Frame(self.control, peer, False, frame))
        return True


class DealerSocket(_Socket):
    """Implements `protocols.ports.ControlSocket` for decode."""

    def __init__(self, network: Network, control: str, peer: bytes) -> None:
        super().__init__(network, control)
        self.peer = peer

    def send(self, frame: bytes, peer: bytes = b"", at_once: bool = False) -> bool:
        if self.closed:
            return False
        self._network.carry(Frame(self.control, self.peer, True, frame))
        return True
