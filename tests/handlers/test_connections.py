"""Sockets that cannot: an address nobody can dial, a queue that is full, a key not let in."""

from __future__ import annotations

import pytest

from kvflow.handlers import connections
from kvflow.node import DecodeNode
from kvflow.protocols.errors import Code, KvflowError, MisuseError
from kvflow.protocols.ports import ControlSocket
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import GrantId, Heartbeat, Incarnation, Register
from kvflow.testing.pair import Pair, until
from kvflow.transports.control.memory import DealerSocket, Frame
from kvflow.transports.control.zmq import connect_dealer
from tests.handlers.scenes import PROMPT, midway

STRANGER = Incarnation(0xBAD)


class Full:
    def __init__(self, socket: DealerSocket) -> None:
        self._socket = socket
        self.full, self.closed, self.lockout_reason = True, False, ""

    def send(self, frame: bytes, peer: bytes = b"", at_once: bool = False) -> bool:
        return not self.full and self._socket.send(frame, peer, at_once)

    async def receive(self) -> list[tuple[bytes, bytes]]:
        return await self._socket.receive()

    def sender_address(self) -> str:
        return self._socket.sender_address()

    def close(self) -> None:
        self.closed = True
        self._socket.close()


class FullSockets:
    def __init__(self, p: Pair) -> None:
        self._connect = p.network.connect
        self.made: list[Full] = []

    def __call__(self, control: str, incarnation: int) -> ControlSocket:
        self.made.append(Full(self._connect(control, incarnation)))
        return self.made[-1]


async def dial_with(p: Pair, connect: connections.Connect) -> DecodeNode:
    network = p.network.connect
    p.network.connect = connect  # type: ignore[method-assign,assignment]
    try:
        return await p.add_decode()
    finally:
        p.network.connect = network  # type: ignore[method-assign]


async def test_an_address_nobody_can_dial_ends_its_rooms_and_no_others(p: Pair) -> None:

    def connect(control: str, incarnation: int) -> ControlSocket:
        return connect_dealer("tcp://no port", incarnation)

    _, target = await midway(p)
    node = await dial_with(p, connect)
    with pytest.raises(KvflowError) as caught:
        await node.room(8, p.ranks, PROMPT)
    with pytest.raises(MisuseError) as dialled:
        connect("", 1)
    assert caught.value.cause().code is Code.REFUSED and str(dialled.value) in str(caught.value)
    assert node.counts.handler_errors == 0
    assert node.counts.undelivered == 2, "Register and Announce"
    p.plane(p.prefill).release()
    await target.landed()
    target.close()
    await p.rest()


async def test_what_a_full_queue_does_not_take_is_counted(p: Pair) -> None:
    node = await dial_with(p, full := FullSockets(p))
    room = node.room(8, p.ranks, PROMPT)
    await until(lambda: node.counts.undelivered >= 3)
    room.close()
    assert node.counts.handler_errors == 0
    full.made[0].full = False
    await p.rest()  # what was lost is said again


async def test_an_answer_to_nobody_is_counted_at_prefill(p: Pair) -> None:
    identity = p.decode.shell.endpoint.core.identity
    asked = Register(
        source=p.prefill.incarnation,
        target=STRANGER,
        wire_version=0,
        layout=identity.layout,
        address=identity.address,
        fresh_from=GrantId(1),
    )
    where = p.prefill.control, routing_id(STRANGER), True
    p.network.inject(Frame(*where, encode(asked)))
    await until(lambda: p.prefill.counts.undelivered)
    p.network.inject(
        Frame(*where, encode(Heartbeat(source=p.prefill.incarnation, target=STRANGER)))
    )
    await until(lambda: p.prefill.counts.stale + p.prefill.counts.foreign)
    assert p.prefill.counts.undelivered == 1, "a stranger's heartbeat has no answer"


async def test_a_socket_that_is_not_let_in_ends_the_rooms_that_wait(p: Pair) -> None:
    node = await dial_with(p, full := FullSockets(p))
    room = node.room(8, p.ranks, PROMPT)
    await until(lambda: full.made)
    full.made[0].lockout_reason = "the key is wrong"
    with pytest.raises(KvflowError, match="the key is wrong"):
        await room.landed()
    assert full.made[0].closed, "and the socket is not left open"
