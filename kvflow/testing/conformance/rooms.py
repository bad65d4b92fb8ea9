"""Checks that run many rooms over a plane, with every kind of ending. Afterwards neither side may
still hold a resource for any of these rooms.

Both nodes run in this process, with an in-memory control link. So rooms end quickly, and leftovers
can be counted exactly.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import numpy as np

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.staging import Staging
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.pages.layout import build_layout
from kvflow.testing.conformance.adapter import NotRunError
from kvflow.testing.conformance.bench import (
    POOLED_THREADS,
    WITHIN_S,
    Bench,
    Check,
    NotConformingError,
    Resources,
    require,
    until,
)
from kvflow.testing.pair import Pair, pair
from kvflow.transports.data.route import PlannedRoute
from kvflow.transports.data.staged import StagedPlane

# A room has up to 96 KiB. Planes copy small rooms at once, and larger ones in their thread.
_LANES, _MOST_PAGES, _PAGE_SIZE = 24, 24, 4
_SOON_S = 0.02
_GROWTH_KIB = 64 << 10
_LAYOUT = build_layout(
    [("0.k", "uint8", (512,)), ("0.v", "uint8", (512,))], page_size=_PAGE_SIZE, num_pages=1024
)
_GIVEN_UP = Cause(Code.ENGINE_ERROR, "given up on purpose")
_FULL = Cause(Code.CAPACITY, "full on purpose")


class _Room:
    """One room, whose prompt fills `num_pages` pages. Each public method is one kind of ending."""

    def __init__(self, p: Pair, number: int, num_pages: int) -> None:
        self._pair, self._number = p, number
        self._prompt = np.arange(num_pages * _PAGE_SIZE, dtype=np.int64)
        self._source: PrefillRoom | None = None
        self._target: DecodeRoom | None = None

    async def succeeds(self) -> None:
        await self._through(chunks=1)

    async def succeeds_in_chunks(self) -> None:
        await self._through(chunks=3)

    async def decode_aborts_at_once(self) -> None:
        source, target = self._open_source(), self._open_target()
        await asyncio.sleep(0)
        target.close()
        await source.done()

    async def decode_aborts_moving(self) -> None:
        source, target = await self._send()
        target.close()
        await source.done()

    async def prefill_aborts_moving(self) -> None:
        source, target = await self._send()
        source.close(_GIVEN_UP)
        await target.landed()

    async def prefill_aborts_between_chunks(self) -> None:
        source, target = await self._matched()
        pages = self._pair.prefill.pages.take(1, self._number)
        try:
            source.send(pages)
            await asyncio.sleep(0)
            source.close(_GIVEN_UP)
            await target.landed()
        finally:
            await source.released()
            self._pair.prefill.pages.give_back(pages, self._number)

    async def prompts_differ(self) -> None:
        # Only prefill's half is opened with this prompt.
        self._prompt += 1
        self._open_source()
        self._prompt -= 1
        await (await self._open_target()).landed()

    async def decode_refuses(self) -> None:
        source = self._open_source()
        self._target = self._pair.decode.announce(self._number, "sim", self._prompt)
        await asyncio.sleep(0)
        self._target.close(_FULL)
        await source.matched()

    async def prefill_refuses(self) -> None:
        self._pair.prefill.refuse(self._number, _FULL)
        await (await self._open_target()).landed()

    async def decode_never_comes(self) -> None:
        self._source = self._pair.prefill.room(self._number, self._prompt, rendezvous_s=_SOON_S)
        await self._source.matched()

    async def deadline_passes(self) -> None:
        self._open_source()
        self._target = self._pair.decode.room(self._number, "sim", self._prompt, deadline_s=_SOON_S)
        await self._target.landed()

    async def _through(self, chunks: int) -> None:
        source, target = await self._matched()
        sent = self._pair.send_all(source, chunks=min(chunks, len(self._prompt) // _PAGE_SIZE))
        there = self._pair.prefill.pool.pages_bytes(sent).copy()
        require(await target.landed() == b"handoff", "another handoff")
        foreign = np.count_nonzero(self._pair.decode.pool.pages_bytes(target.pages) != there)
        require(not foreign, f"room {self._number} succeeded with {foreign} foreign bytes")
        await source.done()

    async def _send(self) -> tuple[PrefillRoom, DecodeRoom]:
        source, target = await self._matched()
        self._pair.send_all(source)
        return source, target

    async def _matched(self) -> tuple[PrefillRoom, DecodeRoom]:
        source, target = self._open_source(), await self._open_target()
        await source.matched()
        return source, target

    def _open_source(self) -> PrefillRoom:
        self._source = self._pair.prefill.room(self._number, self._prompt)
        return self._source

    def _open_target(self) -> DecodeRoom:
        self._target = self._pair.decode.room(self._number, "sim", self._prompt)
        return self._target

    async def _finish(self) -> None:
        """Close both halves, and wait until their pages are released."""
        for side in (self._source, self._target):
            if side is not None:
                side.close()
                await side.released()


ENDINGS: dict[str, Callable[[_Room], Awaitable[None]]] = {
    name: ending for name, ending in vars(_Room).items() if not name.startswith("_")
}


async def rooms(bench: Bench) -> str:
    return await _run(bench, bench.rooms)


async def staged_rooms(bench: Bench) -> str:
    """Run the same rooms through staging on both sides."""
    return await _run(bench, bench.rooms, staging_bytes=_LAYOUT.size_bytes // 2)


async def _run(bench: Bench, count: int, staging_bytes: int | None = None) -> str:
    chance = random.Random(bench.seed)
    plan = [
        (name, chance.randint(2, _MOST_PAGES))
        for name in ENDINGS
        for _ in range(-(-count // len(ENDINGS)))
    ]
    chance.shuffle(plan)
    told: dict[str, Counter[str]] = {name: Counter() for name in ENDINGS}
    stagings: list[Staging] = []
    try:
        async with pair(
            source_layout=_LAYOUT,
            target_layout=_LAYOUT,
            staging_bytes=staging_bytes,
            source_staging_bytes=staging_bytes,
            open_plane=lambda pool: bench.adapter.open(pool, None),
        ) as p:
            p.patience_s = WITHIN_S
            stagings += [node.staging for node in p.nodes if node.staging is not None]
            lanes = Lanes(p, plan, told)
            # The first room opens a route, which shows whether the plane can write from staging.
            await lanes.run(1, ["succeeds"])
            routes = list(p.prefill.shell.routes.values())
            if stagings and not (routes and isinstance(routes[0], PlannedRoute)):
                raise NotRunError("its routes cannot write from staging")
            # These rooms start every thread before resources are counted.
            await lanes.run(_LANES, [*ENDINGS] * _LANES)
            await p.rest()
            before = Resources.now()
            await lanes.run(_LANES)
            counted, now = await _rest(bench, p, before)
        if stagings:
            counted["staging away"] = sum(not staging.host.places.at_rest() for staging in stagings)
    finally:
        for staging in stagings:
            staging.close()
    left = {what: n for what, n in counted.items() if n}
    require(not left, f"left of {lanes.run_rooms} rooms: {left}")
    wrong = {
        name: dict(how)
        for name, how in told.items()
        if name.startswith("succeeds") and set(how) != {"success"}
    }
    require(not wrong, f"rooms that were to succeed: {wrong}")
    endings = "".join(
        f"\n  {name}: {', '.join(f'{n} {how}' for how, n in told[name].items())}"
        for name in ENDINGS
    )
    grown = (now.resident_bytes - before.resident_bytes) / 1024
    require(grown < _GROWTH_KIB, f"{grown:.0f} KiB of memory more after {lanes.run_rooms} rooms")
    return (
        f"{lanes.run_rooms} rooms; afterwards 0 each of {', '.join(counted)}; {now.descriptors} "
        f"descriptors and {now.threads} threads, {before.descriptors} and {before.threads} "
        f"before, {grown:.0f} KiB more{endings}"
    )


async def _rest(bench: Bench, p: Pair, before: Resources) -> tuple[dict[str, int], Resources]:
    """Wait until both nodes are at rest. Return leftovers by kind, and this process's resources."""
    try:
        await p.rest()
    except TimeoutError as error:
        raise NotConformingError(str(error)) from None

    def counted() -> dict[str, int]:
        found = {"decode loans": len(p.decode.shell.endpoint.core.ledger)}
        found["decode quarantined pages"] = p.decode.quarantined_pages
        for node in p.nodes:
            plane = node.plane.inner if isinstance(node.plane, StagedPlane) else node.plane
            for what, n in bench.adapter.under_way(plane).items():
                found[f"{node.role} {what}"] = n
            found[f"{node.role} rooms"] = len(node.shell.endpoint.rooms)
            found[f"{node.role} pages away"] = (
                node.pool.layout.num_pages - node.pool.pages.free_pages
            )
        return found

    await until(lambda: not any(counted().values()), "the planes' rest")
    now = await before.returned(POOLED_THREADS)
    return counted(), now


class Lanes:
    def __init__(self, p: Pair, plan: list[tuple[str, int]], told: dict[str, Counter[str]]) -> None:
        self._pair, self._plan, self._told = p, plan, told
        self.run_rooms = 0

    async def run(self, at_once: int, only: list[str] | None = None) -> None:
        """Run the plan, or one room for each ending in `only`, with `at_once` rooms at a time.

        Raises: NotConformingError if a room does not end within `WITHIN_S`.
        """
        plan = iter([(name, _MOST_PAGES) for name in only] if only else self._plan)
        await asyncio.gather(*(self._lane(plan) for _ in range(at_once)))

    async def _lane(self, plan: Iterator[tuple[str, int]]) -> None:
        for name, num_pages in plan:
            self.run_rooms += 1
            room = _Room(self._pair, self.run_rooms, num_pages)
            try:
                async with asyncio.timeout(WITHIN_S):
                    self._told[name][await _ended(name, room)] += 1
            except TimeoutError:
                raise NotConformingError(
                    f"a room has not ended within {WITHIN_S:g} s: {name}"
                ) from None


async def _ended(name: str, room: _Room) -> str:
    """Run a room to its end, and return "success" or the code of its error."""
    try:
        await ENDINGS[name](room)
    except KvflowError as error:
        return str(error.code)
    finally:
        await room._finish()
    return "success"


CHECKS = (Check("rooms", rooms), Check("staged rooms", staged_rooms))
