"""Every wait of the control plane is cancelled: as it begins, late, twice, and all through the
clean-up (I5, I12).

Afterwards everything is at rest: no room, no page, no task; and what is still being written is
written to lent pages. `pytest tests/handlers/test_every_wait.py -rP | grep waits` prints how many
waits that were.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import KvflowError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PlaneAddress
from kvflow.testing.cancellation import Steps, stepping
from kvflow.testing.pair import Pair, fill, pair, until
from kvflow.transports.data.fake import FakePlane, FakeRoute, Fault
from tests.handlers.scenes import PROMPT, links, matched, midway, success

Work = Coroutine[Any, Any, object]
EndOf = Callable[[Pair], Work]
Scene = Callable[[Pair], Awaitable[Work]]
CANARY = 0xEE
LATE_S = 0.01


# --- who uses the nodes


async def decode_user(p: Pair) -> None:
    async with await p.decode.room(7, "sim", PROMPT) as room:
        await room.landed()


async def prefill_user(p: Pair) -> None:
    async with p.prefill.room(7, PROMPT) as room:
        await room.matched()
        p.send_all(room, chunks=2)
        await room.done()


def beside(work: Work) -> None:
    """The other leg, until `audited` ends it; what happens to it does not matter here."""
    asyncio.create_task(work, name="beside").add_done_callback(
        lambda task: task.cancelled() or task.exception()
    )


def slow(p: Pair) -> None:
    plane = p.plane(p.prefill)
    connect = plane.connect

    async def connected(address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
        await asyncio.sleep(0)
        route = await connect(address, layout)
        await asyncio.sleep(0)
        return route

    plane.connect = connected  # type: ignore[method-assign]


def stick(p: Pair) -> None:
    """The next write cannot be stopped: it lands some time after its room has been given up."""
    plane = p.plane(p.prefill)
    plane.script(Fault.STUCK)

    async def let_go() -> None:
        await until(lambda: plane.writes)
        await asyncio.sleep(2 * LATE_S)
        plane.release()

    beside(let_go())


async def leave() -> None:
    others = [task for task in asyncio.all_tasks() if task.get_name() == "beside"]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


# --- what is cancelled, and what goes on meanwhile


async def opening(p: Pair) -> Work:
    beside(prefill_user(p))
    return decode_user(p)


async def opening_known(p: Pair) -> Work:
    await success(p, 1)
    return await opening(p)


async def serving(p: Pair) -> Work:
    beside(decode_user(p))
    return prefill_user(p)


async def opening_while_stuck(p: Pair) -> Work:
    stick(p)
    return await opening(p)


async def midway_and_stuck(p: Pair) -> None:
    stick(p)
    source, _ = await matched(p)
    p.send_all(source)


async def serving_while_stuck(p: Pair) -> Work:
    stick(p)
    return await serving(p)


async def decode_opens(p: Pair) -> None:
    beside(decode_user(p))
    await until(lambda: links(p.decode))


def ending(name: str, before: Callable[[Pair], Awaitable[object]], end: EndOf) -> Scene:
    async def scene(p: Pair) -> Work:
        await before(p)
        return end(p)

    scene.__name__ = name
    return scene


async def living(p: Pair) -> Work:
    async def life() -> None:
        node = PrefillNode(
            p.prefill.pool, FakePlane(p.planes), bind=p.network.bind, timing=p.timing
        )
        async with (
            node,
            node.room(9, PROMPT) as source,
            await p.decode.room(9, [node.info], PROMPT) as target,
        ):
            await source.matched()
            p.send_all(source, node=node)
            await target.landed()

    return life()


DECODES: list[Scene] = [
    opening,
    opening_known,
    opening_while_stuck,
    living,
    ending("closing_decode", midway, lambda p: p.decode.close()),
    ending("closing_decode_while_opening", decode_opens, lambda p: p.decode.close()),
    ending("closing_decode_while_stuck", midway_and_stuck, lambda p: p.decode.close()),
]
PREFILLS: list[Scene] = [
    serving,
    serving_while_stuck,
    ending("closing_prefill", midway, lambda p: p.prefill.close()),
    ending("closing_prefill_while_stuck", midway_and_stuck, lambda p: p.prefill.close()),
    ending("draining_prefill", midway_and_stuck, lambda p: p.prefill.shell.drain(1.0)),
]
TASKS = [
    ("Shell.consume", 0),  # prefill's
    ("Shell.consume", 1),  # that of decode's link
    ("PrefillShell._connect", 0),
    ("PrefillShell._watch", 0),
    ("Connections._watch", 0),
]


# --- what must hold afterwards


@asynccontextmanager
async def audited() -> AsyncIterator[Pair]:
    """Close the nodes at the end: nothing is left of them, and no write found a free page."""
    async with pair() as p:
        nodes, store = p.nodes, p.decode.pages
        yield p
        pages = store.take(store.free_pages, "canary")  # as the next request would
        fill(p.decode.pool, pages, CANARY)
        for node in nodes:
            p.plane(node).release()
        await leave()
        for node in nodes:
            await _close(p, node)
            assert not node.shell.endpoint.rooms, "a closed node has rooms"
        left = {task.get_name() for task in asyncio.all_tasks()}
        assert not any(name.startswith("kvflow") for name in left), left
        assert not len(pages) or (p.decode.pool.pages_bytes(pages) == CANARY).all(), "a late write"
        store.give_back(pages, "canary")
        for node in nodes:
            withheld = {int(page) for loan in node.pool.unproven for page in loan.pages}
            assert node.pool.pages.held_pages == len(withheld)


async def _close(p: Pair, node: PrefillNode | DecodeNode) -> None:
    closing = asyncio.create_task(node.close())
    while not closing.done():
        p.clock(node).advance(p.timing.lost_after_s)  # it may have no peer left to wait for
        await asyncio.sleep(0.001)
    await closing


async def rest(p: Pair) -> None:
    await leave()
    for node in p.nodes:
        p.plane(node).release()
    await p.rest()


async def cancel(work: Work, first: int, how: str) -> Steps[object]:
    steps = Steps(work, *plan(first, how), after_s=LATE_S if how == "late" else 0.0)
    (result,) = await asyncio.gather(steps.task(), return_exceptions=True)
    if isinstance(result, BaseException) and not isinstance(
        result, KvflowError | asyncio.CancelledError
    ):
        raise result
    return steps


def plan(first: int, how: str) -> range:
    return range(first, first + {"once": 1, "late": 1, "twice": 2, "throughout": 6}[how])


HOW = ["once", "late", "twice", "throughout"]
ENOUGH = 60  # a close that polls has as many waits as it takes


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("scene", [*DECODES, *PREFILLS])
async def test_every_wait(kvflow_clean_loop: None, scene: Scene, how: str) -> None:
    for first in itertools.count():
        async with audited() as p:
            steps = await cancel(await scene(p), first, how)
            node = p.prefill if scene in PREFILLS else p.decode
            assert all(
                room.ended or room.phase.name == "DRAINING" for room in node.shell.rooms.values()
            )
            if scene.__name__.startswith("closing"):
                assert not node.shell.endpoint.rooms, "it said it had stopped"
            elif how == "twice":  # else: straight into closing
                await rest(p)
        if steps.waits <= first or first == ENOUGH:
            break
    print(f"{scene.__name__}, {how}: {first} waits")
    assert first


@pytest.mark.parametrize("how", ["once", "twice", "throughout"])
@pytest.mark.parametrize(("name", "nth"), TASKS)
async def test_every_wait_of_a_task(kvflow_clean_loop: None, name: str, nth: int, how: str) -> None:
    """A task of the node ends too early: closing must still bring everything to rest."""
    for first in itertools.count():
        with stepping(name, *plan(first, how), nth=nth) as found:
            async with audited() as p:
                slow(p)
                users = [asyncio.create_task(user(p)) for user in (decode_user, prefill_user)]
                await asyncio.wait(users, timeout=0.05)
                for user in users:
                    user.cancel()
                await asyncio.gather(*users, return_exceptions=True)
        (steps,) = found
        if steps.waits <= first or first == ENOUGH:
            break
    print(f"{name}, {how}: {first} waits")
    assert first
