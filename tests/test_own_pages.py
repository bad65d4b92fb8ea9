"""Rooms over pages of the engine's own allocator, held until nothing can touch them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.external import ExternalPages
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import (
    CapacityError,
    KvflowError,
    LostError,
    MisuseError,
    OwnershipError,
)
from kvflow.protocols.limits import Timing
from kvflow.testing.pair import Clock, Pair, pair, until
from kvflow.transports.data.fake import FakePlane, Fault

PROMPT = range(10)  # 2.5 pages of 4
MINE = [9, 4, 7]
pytest_plugins = ["kvflow.testing.fixtures"]


@asynccontextmanager
async def external_pair(
    *, verify: bool = False
) -> AsyncIterator[tuple[Pair, ExternalPages, ExternalPages]]:
    async with pair() as p:
        stores = ExternalPages(64), ExternalPages(64)
        for node in p.nodes:
            await node.close()
        timing = Timing(heartbeat_s=0.1, lost_after_s=1.0)
        common: dict[str, Any] = {"timing": timing, "verify_transfers": verify}
        clocks = Clock(), Clock()
        first, second = (
            common | {"pages": store, "now": clock.now}
            for store, clock in zip(stores, clocks, strict=True)
        )
        p.prefills[:] = [
            PrefillNode(p.prefill.pool, FakePlane(p.planes), bind=p.network.bind, **first)
        ]
        p.decodes[:] = [
            DecodeNode(p.decode.pool, FakePlane(p.planes), connect=p.network.connect, **second)
        ]
        for node, clock in zip(p.nodes[::-1], clocks, strict=True):
            await node.start()
            clock.watch(node.shell.wake)
            p.clocks[node.incarnation] = clock
        yield p, *stores


async def written(p: Pair) -> tuple[PrefillRoom, DecodeRoom]:
    """Room 7, whose pages prefill writes and does not finish until its plane is released."""
    p.plane(p.prefill).script(Fault.STUCK)
    sending = p.prefill.room(7, PROMPT)
    room = await p.decode.room(7, p.ranks, PROMPT, pages=MINE)
    await sending.matched()
    sending.send([1, 2, 3], last=True)
    return sending, room


@pytest.mark.parametrize("verify", [False, True])
async def test_pages_of_the_engines_own_are_filled_and_let_go(verify: bool) -> None:
    async with external_pair(verify=verify) as (p, sources, targets):
        sending = p.prefill.room(7, PROMPT)
        async with p.decode.room(7, p.ranks, PROMPT, pages=MINE) as room:
            assert sorted(targets.busy(range(64))) == sorted(MINE)
            await sending.matched()
            sending.send([1, 2])
            assert list(sources.busy([1, 2, 3])) == [1, 2]
            sending.send([3], last=True, handoff=b"first token")
            assert await room.landed() == b"first token"
            await room.released()
            assert targets.at_rest() and list(room.keep("sequence 1")) == MINE
            await sending.released()
            assert sources.at_rest()
            filled = p.decode.pool.pages_bytes(np.array(MINE))
            assert (
                filled == p.prefill.pool.pages_bytes(np.array([1, 2, 3]))
            ).all() and filled.any()


async def test_an_aborted_room_keeps_its_pages_until_the_proof() -> None:
    async with external_pair() as (p, _, targets):
        sending, room = await written(p)
        room.close()
        with pytest.raises(KvflowError):
            await room.landed()
        released = asyncio.create_task(room.released())
        await until(lambda: sending.ended)
        assert len(targets.busy(MINE)) == 3 and not released.done()
        p.plane(p.prefill).release()
        await released
        assert targets.at_rest()


async def test_a_room_that_never_opens_lets_its_pages_go() -> None:
    async with external_pair() as (p, _, targets):

        async def resolve(_: str) -> list[object]:
            raise LostError("registry down")

        p.decode._resolve = resolve  # type: ignore[assignment]
        room = p.decode.room(7, "somewhere", PROMPT, pages=MINE)
        assert len(targets.busy(MINE)) == 3
        with pytest.raises(LostError, match="registry down"):
            await room
        await room.released()
        assert targets.at_rest()
        with pytest.raises(LostError, match="no rank"):
            await p.decode.room(8, [], PROMPT, pages=MINE)
        assert targets.at_rest()


async def test_pages_without_proof_stay_busy_until_the_next_node_has_it() -> None:
    async with external_pair() as (p, _, targets):
        await written(p)
        (loan,) = await p.decode.close()
        assert list(loan.pages) == MINE and loan.incarnation == p.prefill.incarnation
        assert len(targets.busy(MINE)) == 3
        heir = DecodeNode(
            p.decode.pool,
            FakePlane(p.planes),
            connect=p.network.connect,
            pages=targets,
            timing=p.decode.timing,
        )
        await heir.start()
        p.decodes[:] = [heir]
        assert heir.quarantined_pages == 3
        await p.crash(p.prefill)
        await until(targets.at_rest)
        assert heir.quarantined_pages == 0


async def test_pages_that_the_nodes_own_allocator_could_give_to_another_room(
    kvflow_pair: Pair,
) -> None:
    """Before, they were lent all the same, and the allocator handed them out a second time."""
    p = kvflow_pair
    with pytest.raises(
        OwnershipError, match=r"room 7: hold: page 9 has no owner; take them from node\.pages"
    ):
        p.decode.room(7, p.ranks, PROMPT, pages=MINE)
    taken = p.decode.pages.take(3, "engine")
    room = await p.decode.room(7, p.ranks, PROMPT, pages=taken)
    room.close()
    await room.released()
    p.decode.pages.give_back(taken, "engine")
    await p.rest()


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        ([1, 2], "2 pages given, its prompt needs 3"),
        ([1, 2, 2], "a page is given twice"),
        ([1, 2, 64], r"page 64 is outside 0\.\.63"),
        ([1, -2, 3], r"page -2 is outside 0\.\.63"),
        ([[1, 2, 3]], r"shape \(1, 3\)"),
        ([1.0, 2.0, 3.0], "not shape .* of float64"),
    ],
)
async def test_wrong_pages_are_refused_where_they_are_given(pages: list[int], text: str) -> None:
    async with external_pair() as (p, _, targets):
        with pytest.raises(MisuseError, match=f"room 7: .*{text}"):
            p.decode.room(7, p.ranks, PROMPT, pages=pages)
        assert targets.at_rest()


async def test_a_page_is_of_one_room_until_nothing_can_write_into_it() -> None:
    async with external_pair() as (p, _, store):
        ranks = [p.prefill.info]
        first = p.decode.room(1, prefill=ranks, prompt=PROMPT, pages=MINE)
        others = [9, 1, 2], [3, 2, 7]
        for pages in others:
            with pytest.raises(OwnershipError, match=r"page [97] is lent to prefill for another"):
                p.decode.room(2, prefill=ranks, prompt=PROMPT, pages=pages)
        assert store.busy_pages == len(MINE), "nothing of the refused ones is held"
        announced = p.decode.announce(3, prefill=ranks, prompt=PROMPT)
        with pytest.raises(OwnershipError, match="another room"):
            announced.offer(MINE)
        first.close()
        await first.released()
        announced.offer(MINE)
        announced.close()
        await announced.released()
        assert store.at_rest()


async def test_a_room_without_pages_at_a_node_that_has_none() -> None:
    async with external_pair() as (p, sources, _):
        with pytest.raises(CapacityError, match="open the room with pages=, 3 of them"):
            await p.decode.room(7, p.ranks, PROMPT)
        sending = p.prefill.room(8, PROMPT)
        # decode has it all: no page is needed.
        async with p.decode.room(8, p.ranks, PROMPT, prefix_tokens=10) as room:
            assert await sending.matched() == 10
            sending.send([], last=True, handoff=b"42")
            assert await room.landed() == b"42" and len(room.keep("x")) == 0
        assert sources.at_rest()


async def test_a_list_that_its_owner_changes_is_not_changed_here() -> None:
    async with external_pair() as (p, sources, _):
        p.plane(p.prefill).script(Fault.STUCK)
        sending = p.prefill.room(7, PROMPT)
        async with p.decode.room(7, p.ranks, PROMPT, pages=np.array(MINE, np.int32)) as room:
            await sending.matched()
            mine = np.array([1, 2, 3], np.int32)
            sending.send(mine, last=True)
            mine[:] = 0
            p.plane(p.prefill).release()
            await room.landed()
            await sending.released()
        assert sources.at_rest()


async def test_a_room_that_was_announced_is_given_its_pages_later() -> None:
    async with external_pair() as (p, _, targets):
        sending = p.prefill.room(7, PROMPT)
        room = p.decode.announce(7, p.ranks, PROMPT)
        assert targets.at_rest() and room.num_pages == 3
        with pytest.raises(MisuseError, match="room 7: 2 pages given, its prompt needs 3"):
            room.offer([1, 2])
        await room.offer(MINE)
        assert len(targets.busy(MINE)) == 3 and list(room.pages) == MINE
        with pytest.raises(MisuseError, match="room 7: its pages have been offered already"):
            room.offer(MINE)
        await sending.matched()
        sending.send([1, 2, 3], last=True, handoff=b"42")
        assert await room.landed() == b"42"
        await room.released()
        assert targets.at_rest()


async def test_pages_for_a_room_that_has_ended_are_not_taken() -> None:
    async with external_pair() as (p, _, targets):
        room = p.decode.announce(7, p.ranks, PROMPT)
        room.close()
        room.offer(MINE)
        with pytest.raises(KvflowError):
            await room
        await room.released()
        assert targets.at_rest()


async def test_pages_of_the_nodes_own_are_offered_once(kvflow_pair: Pair) -> None:
    """Before, a second offer took pages a second time, and those of the first were lost."""
    p = kvflow_pair
    room = await p.decode.announce(7, p.ranks, PROMPT).offer()
    with pytest.raises(MisuseError, match="room 7: its pages have been offered already"):
        room.offer()
    room.close()
    await room.released()
    await p.rest()


async def test_pages_of_a_writer_that_is_declared_dead_are_let_go_and_it_is_told_to_stop() -> None:
    async with external_pair() as (p, _, targets):
        sending, room = await written(p)
        p.decode.declare_dead(p.prefill.incarnation, "a drill")
        with pytest.raises(LostError, match="was declared dead: a drill"):
            await room.landed()
        await room.released()
        assert targets.at_rest()
        await until(lambda: sending.ended)
        assert sending.cause is not None and "declared dead" in sending.cause.text
