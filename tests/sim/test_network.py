"""The network in memory: FIFO by default, and exactly the faults one asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import Abort, GrantId, Heartbeat, Incarnation
from kvflow.transports.control.memory import (
    BURST_FRAMES,
    DELIVERED,
    LOST,
    DealerSocket,
    Fate,
    Frame,
    Network,
    RouterSocket,
)

pytest_plugins = ["kvflow.testing.fixtures"]
pytestmark = pytest.mark.usefixtures("kvflow_clean_loop")

DEALER = Incarnation(5)
Link = tuple[Network, RouterSocket, DealerSocket]


@pytest_asyncio.fixture
async def link() -> AsyncIterator[Link]:
    network = Network()
    router, port = network.bind("host", 0)
    yield network, router, network.connect(f"tcp://host:{port}", DEALER)


def beat(n: int) -> bytes:
    return encode(Heartbeat(source=Incarnation(1), target=DEALER, settled_below=GrantId(n)))


async def got(socket: RouterSocket | DealerSocket, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            for _, data in await socket.receive():
                message = Frame("", b"", True, data).message
                assert isinstance(message, Heartbeat)
                found.append(message.settled_below)
    return found


async def nothing(socket: RouterSocket | DealerSocket) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(socket.receive(), 0.01)


async def test_both_ways_in_order(link: Link) -> None:
    _, router, dealer = link
    for n in range(3 * BURST_FRAMES):
        assert dealer.send(beat(n)) and router.send(beat(n), routing_id(DEALER))
    assert (
        await got(router, 3 * BURST_FRAMES)
        == await got(dealer, 3 * BURST_FRAMES)
        == list(range(3 * BURST_FRAMES))
    )


async def test_nothing_arrives_within_the_call_that_sends(link: Link) -> None:
    _, router, dealer = link
    dealer.send(beat(1))
    assert not router._inbox
    await asyncio.sleep(0)
    assert len(router._inbox) == 1


async def test_drop_duplicate_hold_release(link: Link) -> None:
    network, router, dealer = link
    network.drop(Heartbeat, times=2)
    network.duplicate(Heartbeat)
    network.hold(Heartbeat)
    for n in range(6):
        dealer.send(beat(n))
    assert await got(router, 2) == [2, 2]
    assert network.release(list.reverse) == 3
    assert await got(router, 3) == [5, 4, 3]
    dealer.send(beat(9))
    assert await got(router, 1) == [9]
    assert network.seen["Heartbeat"] == 7


async def test_a_release_ends_what_holds_and_no_other_rule(link: Link) -> None:
    network, router, dealer = link
    network.hold(Heartbeat, times=2)
    for n in range(2):
        dealer.send(beat(n))
    network.drop(Heartbeat)
    network.hold(Heartbeat)
    assert network.release() == 2
    assert await got(router, 2) == [0, 1]
    for n in range(2, 4):
        dealer.send(beat(n))
    assert await got(router, 1) == [3]


async def test_rules_are_for_their_class_only(link: Link) -> None:
    network, router, dealer = link
    network.drop(Abort)
    dealer.send(beat(1))
    assert await got(router, 1) == [1]


async def test_delays_reorder(link: Link) -> None:
    network, router, dealer = link
    fates: list[Fate] = [(0.02,), DELIVERED, (0.01, 0.03)]
    network.rules.append(lambda _: fates.pop(0) if fates else None)
    for n in range(3):
        dealer.send(beat(n))
    assert await got(router, 4) == [1, 2, 0, 2]


async def test_a_cut_loses_and_a_mended_link_works(link: Link) -> None:
    network, router, dealer = link
    other, port = network.bind("other", 0)
    spoke = network.connect(f"tcp://other:{port}", DEALER)
    network.cut(router.control)
    dealer.send(beat(1))
    router.send(beat(1), routing_id(DEALER))
    spoke.send(beat(2))
    assert await got(other, 1) == [2]
    await nothing(router)
    await nothing(dealer)
    network.mend()
    dealer.send(beat(3))
    assert await got(router, 1) == [3]


async def test_ends_that_are_not_there(link: Link) -> None:
    network, router, dealer = link
    assert not router.send(b"", routing_id(Incarnation(6)))
    with pytest.raises(MisuseError, match="in use"):
        network.bind("host", int(router.control.rsplit(":", 1)[1]))
    early = network.connect("tcp://nobody:1", DEALER)
    assert early.send(beat(1))
    dealer.close()
    assert not router.send(b"", routing_id(DEALER)) and not dealer.send(b"")
    router.close()
    again, _ = network.bind("host", int(router.control.rsplit(":", 1)[1]))
    router.close()
    successor = network.connect(again.control, DEALER)
    dealer.close()
    assert successor.send(beat(4)) and await got(again, 1) == [4]
    assert not router.send(beat(6), routing_id(DEALER)), "it is closed"
    assert again.send(beat(5), routing_id(DEALER)) and await got(successor, 1) == [5]


async def test_garbage_is_counted_as_such(link: Link) -> None:
    network, router, dealer = link
    dealer.send(b"\xc1")
    network.inject(Frame(router.control, b"", True, b"injected"))
    network.inject(Frame(router.control, b"", True, b"lost"), LOST)
    assert [data for _, data in await router.receive()] == [b"\xc1", b"injected"]
    assert network.seen == {"garbage": 1}
