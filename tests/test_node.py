"""The library's two nodes: what they refuse, whom they ask, and what they leave to their user."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import AbortedError, Code, LostError, MisuseError, RefusedError
from kvflow.protocols.limits import Bounds
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import ControlSocket, PlaneAddress
from kvflow.protocols.wire.ranks import RankInfo, rank_from_json, rank_to_json
from kvflow.testing.pair import QUICK, Pair, pair, small_layout, until
from kvflow.transports.control.memory import Network
from kvflow.transports.control.zmq import ZmqSocket, connect_dealer
from kvflow.transports.data.fake import FakeNetwork, FakePlane, FakeRoute, Fault
from kvflow.transports.data.local import LocalPlane

pytest_plugins = ["kvflow.testing.fixtures"]


async def test_a_node_describes_itself(kvflow_pair: Pair) -> None:
    p = kvflow_pair
    info = p.prefill.info
    assert (info.rank, info.world_size, info.backend) == (0, 1, "fake")
    assert info.incarnation == p.prefill.incarnation != p.decode.incarnation
    assert (
        info.pool.page_size,
        info.pool.num_pages,
        info.pool.page_bytes,
        info.pool.components,
    ) == (4, 64, 96, 2)
    assert rank_from_json(rank_to_json(info)) == info


async def test_the_allocator_may_be_the_callers() -> None:
    network, planes = Network(), FakeNetwork()
    pages = PageAllocator(64, reserved=1)
    pools = [PagedPool.allocate(small_layout(), shared=False) for _ in range(2)]
    prefill = PrefillNode(pools[0], FakePlane(planes), bind=network.bind, timing=QUICK)
    decode = DecodeNode(
        pools[1], FakePlane(planes), connect=network.connect, timing=QUICK, pages=pages
    )
    async with prefill, decode:
        source = prefill.room(1, range(8))
        async with await decode.room(1, [prefill.info], range(8)) as target:
            await source.matched()
            mine = prefill.pages.take(2, "engine")
            source.send(mine, last=True)
            assert await target.landed() == b""
            assert 0 not in target.pages and pages.owned() == {("grant", target.grant): 2}
        assert pages.at_rest()
        prefill.pages.give_back(mine, "engine")
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
async def test_prompts_are_ids_of_any_integer_kind(kvflow_pair: Pair, dtype: type) -> None:
    p = kvflow_pair
    source = p.prefill.room(7, list(range(9)))
    target = await p.decode.room(7, "sim", np.arange(9, dtype=dtype))
    assert await source.matched() == 0
    target.close()


async def test_a_word_is_resolved_once_for_all_who_wait_and_again_when_it_no_longer_serves(
    kvflow_pair: Pair,
) -> None:
    p = kvflow_pair
    asked = 0

    async def resolve(word: str) -> Sequence[RankInfo]:
        nonlocal asked
        asked += 1
        assert word == "registry:1"
        await asyncio.sleep(0)
        return p.ranks

    p.decode._resolve = resolve
    rooms = await asyncio.gather(
        *(p.decode.room(room, "registry:1", [1]).opened() for room in range(5))
    )
    rooms.append(await p.decode.room(9, "registry:1", [1]))
    assert asked == 1
    for room in rooms:
        room.close()
    await until(p.decode.pool.pages.at_rest)
    port = int(p.prefill.info.control.rsplit(":", 1)[1])
    await p.crash(p.prefill)
    await p.add_prefill(port)
    await until(lambda: not list(p.decode.shell.endpoint.peers))
    (await p.decode.room(10, "registry:1", [1])).close()
    assert asked == 2


async def test_a_registry_that_fails_is_asked_again(kvflow_pair: Pair) -> None:
    p = kvflow_pair
    answers = iter([LostError("registry down"), LostError("registry down"), None])

    async def resolve(_: str) -> Sequence[RankInfo]:
        if error := next(answers):
            raise error
        return p.ranks

    p.decode._resolve = resolve
    for _ in range(2):
        with pytest.raises(LostError, match="registry down"):
            await p.decode.room(1, "word", [1])
    (await p.decode.room(1, "word", [1])).close()


async def test_a_control_port_that_is_taken(kvflow_pair: Pair) -> None:
    p = kvflow_pair
    port = int(p.prefill.info.control.rsplit(":", 1)[1])
    second = PrefillNode(p.prefill.pool, FakePlane(p.planes), port=port, bind=p.network.bind)
    with pytest.raises(MisuseError, match=str(port)) as caught:
        await second.start()
    assert caught.value.code is Code.BAD_REQUEST
    await second.close()


async def others_rest(p: Pair, closed: str) -> None:
    """A closed prefill keeps what it last sent: no decode asks it any more."""
    if closed == "prefill":
        p.prefills.clear()
    await p.rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_close_drains_first(role: str, times: int) -> None:
    async with pair() as p:
        p.plane(p.prefill).script(Fault.STUCK)
        source = p.prefill.room(7, range(8))
        target = await p.decode.room(7, "sim", range(8))
        await source.matched()
        p.send_all(source)
        node = p.prefill if role == "prefill" else p.decode
        closing = asyncio.create_task(node.close())
        for _ in range(times):
            await asyncio.sleep(0)
            closing.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done() and not p.decode.pool.pages.at_rest()
        p.plane(p.prefill).release()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (
            not node.shell.endpoint.rooms
            and node.pool.pages.at_rest()
            and p.plane(node)._dead.is_set()
        )
        await node.close()
        target.close()
        await others_rest(p, role)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_close_is_cancelled_while_the_two_connect(role: str) -> None:
    async with pair() as p:
        plane, asked, go_on = p.plane(p.prefill), asyncio.Event(), asyncio.Event()
        connect = plane.connect

        async def slow(address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
            asked.set()
            await go_on.wait()
            return await connect(address, layout)

        plane.connect = slow  # type: ignore[method-assign]
        opening = asyncio.create_task(p.decode.room(7, "sim", range(8)).opened())
        await asked.wait()
        node = p.prefill if role == "prefill" else p.decode
        closing = asyncio.create_task(node.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert p.plane(node)._dead.is_set() and not node.shell.endpoint.rooms
        go_on.set()
        if role == "decode":
            with pytest.raises(AbortedError, match="shutting down"):
                await opening
        opening.cancel()
        await asyncio.wait([opening])
        await others_rest(p, role)


async def test_one_network_address_takes_so_many_places_and_no_more(
    kvflow_clean_loop: None,
) -> None:
    """What counts is where the TCP connection comes from, whatever a decode says of itself."""

    def connect_from_elsewhere(control: str, incarnation: int) -> ControlSocket:
        return connect_dealer(control.replace("tcp://", "tcp://127.0.0.2:0;"), incarnation)

    pools = [PagedPool.allocate(small_layout(16)) for _ in range(4)]
    planes = [LocalPlane(pool.segment) for pool in pools]
    async with (
        PrefillNode(pools[0], planes[0], bounds=Bounds(decodes_per_address=1)) as prefill,
        DecodeNode(pools[1], planes[1]) as first,
        DecodeNode(pools[2], planes[2]) as second,
        DecodeNode(pools[3], planes[3], connect=connect_from_elsewhere) as elsewhere,
    ):
        async with prefill.room(1, range(8)), first.room(1, [prefill.info], range(8)):
            pass
        with pytest.raises(
            RefusedError,
            match=r"1 decodes at 127\.0\.0\.1 are registered .*\(--decodes-per-address\)",
        ):
            await second.room(2, [prefill.info], range(8))
        async with prefill.room(3, range(8)), elsewhere.room(3, [prefill.info], range(8)):
            pass
        assert len(prefill.peers()) == 2
    for pool in pools:
        pool.close()


async def test_a_node_for_more_decodes_lets_more_connections_be_open() -> None:
    pool = PagedPool.allocate(small_layout())
    async with PrefillNode(pool, LocalPlane(pool.segment), bounds=Bounds(targets=5000)) as node:
        socket = node.shell.socket
        assert isinstance(socket, ZmqSocket) and socket.connections.expected == 10_000
    pool.close()


async def test_nodes_in_one_process_know_nothing_of_one_that_has_closed() -> None:
    pools = [PagedPool.allocate(small_layout()) for _ in range(3)]

    async def one_room(prefill: PrefillNode, decode: DecodeNode, room: int) -> None:
        source = prefill.room(room, range(8))
        async with await decode.room(room, [prefill.info], range(8)) as target:
            await source.matched()
            source.send([0, 1], last=True)
            await target.landed()

    async with DecodeNode(pools[1], "local") as staying:
        pools[0].pages.take(2, "engine")
        prefill = PrefillNode(pools[0], "local")
        await prefill.start()
        await one_room(prefill, staying, 1)
        async with DecodeNode(pools[2], "local") as leaving:
            await one_room(prefill, leaving, 2)
            assert len(prefill.peers()) == 2
        assert [peer["incarnation"] for peer in prefill.peers()] == [f"{staying.incarnation:016x}"]
        announced = staying.announce(3, [prefill.info], range(8))
        await prefill.close()
        with pytest.raises(AbortedError):
            await announced.landed()
        assert staying.peers() == [] and not staying.quarantined_pages
    for pool in pools:
        pool.close()
