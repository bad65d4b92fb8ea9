"""What is said of another and is not so: a stranger's memory that is not its own, an operator's
dead that live.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.wire.codec import encode, parse_at_decode, routing_id
from kvflow.protocols.wire.messages import Incarnation, Registered
from tests.hostile.nodes import Nodes, nodes, register


async def registered(
    n: Nodes, me: Incarnation, address: PlaneAddress, layout: PoolLayout
) -> Registered:
    """What a decode that calls itself `me` is answered."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.ROUTING_ID, routing_id(me))
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(n.prefill.control)
        await dealer.send(encode(register(n.prefill.incarnation, me, address, layout)))
        async with asyncio.timeout(60):
            answer = parse_at_decode(await dealer.recv())
    assert isinstance(answer, Registered)
    return answer


@pytest.mark.parametrize("says_owner", [False, True])
async def test_a_stranger_cannot_have_prefill_write_into_anothers_pool(says_owner: bool) -> None:
    async with nodes() as n:
        address, layout = n.decode.exported
        buffer = n.decode.pool.layout.buffers[0]
        ctypes.memset(buffer.address, 0xAA, buffer.size_bytes)
        if says_owner:  # it may know whose it is
            address = msgspec.structs.replace(address, owner=n.decode.incarnation)
        answer = await registered(n, Incarnation(secrets.randbits(62) | 1), address, layout)
        assert "is not the pool of" in answer.refusal
        assert set(ctypes.string_at(buffer.address, buffer.size_bytes)) == {0xAA}
        await n.room(1)


async def test_its_owner_is_let_in() -> None:
    async with nodes() as n:
        answer = await registered(n, n.decode.incarnation, *n.decode.exported)
        assert not answer.refusal


async def test_a_node_that_has_closed_owns_nothing() -> None:
    async with nodes() as n:
        me, (address, layout) = n.decode.incarnation, n.decode.exported
        await n.decode.close()
        answer = await registered(n, me, address, layout)
        assert "is not the pool of" in answer.refusal


async def test_a_prefill_that_is_seen_to_run_cannot_be_declared_dead() -> None:
    async with nodes() as n:
        await n.room(1)
        with pytest.raises(MisuseError, match=rf"runs: it is process {os.getpid()} of this host"):
            n.decode.declare_dead(n.prefill.incarnation, "a slip")
        assert n.decode.counts.declared_dead == 0
        await n.room(2)
