"""Checks for closing and leaks. A plane can be closed in every state, and frees what it used."""

from __future__ import annotations

import asyncio
import gc

from kvflow.protocols.errors import TransferError
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Route, WriteOutcome
from kvflow.testing.conformance.bench import (
    EVERYTHING,
    POOLED_THREADS,
    RATE,
    WITHIN_S,
    Bench,
    Check,
    NotConformingError,
    Resources,
    end_of,
    require,
    until,
)
from kvflow.testing.conformance.peer import Peer
from kvflow.testing.conformance.station import Side, pages

# Warm-up rounds come first, because a transfer engine keeps some resources after its first writes.
_ROUNDS, _WARM = 40, 6
_STATES = ("new", "exported", "connected", "used")
_GROWTH_BYTES = 8 << 20


async def closed_while_writing(bench: Bench) -> str:
    """`close` ends every write. No later byte arrives, and routes accept no further write."""
    async with bench.peer() as peer:
        side = Side(bench.adapter.open, rate=RATE)
        side.fill(1)
        route = await side.plane.connect(peer.address, peer.layout)
        writes = [route.write(EVERYTHING, EVERYTHING) for _ in range(3)]
        await until(lambda: writes[0].landed_bytes > 0, "the first byte's landing")
        await asyncio.wait_for(side.plane.close(), WITHIN_S)
        require(
            all(write.done.done() for write in writes),
            "a write is under way after the plane was closed",
        )
        ended = {write.done.result() for write in writes}
        require(ended == {WriteOutcome.CANCELLED}, f"writes to a peer that lives ended {ended}")
        _check_closed(route)
        claimed, found = sum(write.landed_bytes for write in writes), await peer.ask("landed")
        require(found <= claimed, f"{claimed} bytes are said to have landed, {found} are there")
        left = {what: count for what, count in bench.adapter.under_way(side.plane).items() if count}
        side.pool.close()
        require(not left, f"left by a closed plane: {left}")
        return f"{len(writes)} writes cancelled, {claimed} bytes claimed, {found} there"


async def closed_in_every_state(bench: Bench) -> str:
    """`close` is idempotent and works in every state.

    A plane may be closed before `export` or `connect`, a second time, and twice concurrently. A
    route may be closed twice, and after its plane.
    """
    async with bench.peer() as peer:
        for state in _STATES:
            side = Side(bench.adapter.open)
            planes = [side.plane]
            route: Route | None = None
            if state == "new":
                # `Side` exports its plane at once, so this state needs a second plane.
                planes.append(bench.adapter.open(side.pool, None))
            if state in ("connected", "used"):
                route = await side.plane.connect(peer.address, peer.layout)
            if route is not None and state == "used":
                await end_of(route.write(pages(0), pages(0)))
                route.close()
                route.close()
                _check_closed(route)
            async with asyncio.timeout(WITHIN_S):
                for plane in planes:
                    await asyncio.gather(plane.close(), plane.close())
                    await plane.close()
            if route is not None:
                route.close()
                _check_closed(route)
            side.pool.close()
    return f"closed thrice each: {', '.join(_STATES)}"


def _check_closed(route: Route) -> None:
    try:
        route.write(pages(0), pages(0))
    except TransferError:
        return
    raise NotConformingError("a closed route, or one of a closed plane, took a write")


async def at_rest(bench: Bench) -> str:
    """Closed routes and ended writes keep no resources, and do not affect an open route."""
    async with bench.side("layer_first") as side, bench.peer() as peer:
        # Adjacent pages could form one block, so each write takes every other page.
        some = EVERYTHING[:18:2].copy()
        kept = await side.plane.connect(peer.address, peer.layout)
        before, theirs = Resources.now(), 0
        for turn in range(_WARM + _ROUNDS):
            if turn == _WARM:
                before, theirs = Resources.now(), await peer.ask("descriptors")
            await _two_routes(side, peer, some)
        last = await end_of(kept.write(some, some))
        require(
            last is WriteOutcome.LANDED,
            f"a write on a route that stayed open, while others were closed: {last}",
        )
        kept.close()
        left = {what: count for what, count in bench.adapter.under_way(side.plane).items() if count}
        require(not left, f"left of {2 * _ROUNDS} writes: {left}")
        now = await before.returned(POOLED_THREADS)
        grown = now.resident_bytes - before.resident_bytes
        require(grown < _GROWTH_BYTES, f"{grown} bytes of memory more after {_ROUNDS} rounds")
        more = await peer.ask("descriptors") - theirs
        require(more <= 0, f"{more} descriptors more at the peer after {_ROUNDS} rounds")
        counted = ", ".join(f"0 {what}" for what in bench.adapter.under_way(side.plane))
        return (
            f"{2 * _ROUNDS} routes, as many writes: {counted}; {now.descriptors} descriptors and "
            f"{now.threads} threads, {grown / 1024:.0f} KiB more"
        )


async def _two_routes(side: Side, peer: Peer, some: PageIndices) -> None:
    routes = [await side.plane.connect(peer.address, peer.layout) for _ in range(2)]
    writes = [route.write(some, some) for route in routes]
    writes[1].cancel()
    for write in writes:
        outcome = await end_of(write)
        require(
            outcome is not WriteOutcome.UNPROVEN, f"a write to a peer that lives: {write.error}"
        )
    for route in routes:
        route.close()


async def planes_come_and_go(bench: Bench) -> str:
    """A closed plane frees its descriptors and threads."""
    async with bench.side():
        # The first plane loads the plane's library, which keeps some resources.
        pass
    gc.collect()
    before = Resources.now()
    for _ in range(3):
        async with bench.side():
            pass
    gc.collect()
    await before.returned()
    return (
        f"{before.descriptors} descriptors and {before.threads} threads, before and after 3 planes"
    )


CHECKS = (
    Check("closed while writing", closed_while_writing),
    Check("closed in every state", closed_in_every_state),
    Check("at rest", at_rest),
    Check("planes come and go", planes_come_and_go),
)
