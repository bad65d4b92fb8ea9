"""`kvflow bench rooms --open N`: the cost of rooms that stay open, matched and waiting for input.

Two processes share N rooms of one page each. The bench measures them while they open, at rest, and
at rest with more links. Then each peer in turn is killed, or falls silent and is killed later, and
the bench measures how the other side ends all rooms. A stall is the part of a 1 ms ticker's
lateness in which the event loop's thread ran. `late_*` is the whole lateness, to which other
processes on the machine contribute.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from kvflow.bench.elsewhere import worker_command
from kvflow.bench.figures import Say
from kvflow.bench.pair import Process

WORKER = "kvflow.bench.growth_worker"
BATCH = 500  # rooms that open before the driver waits for all of them to match
LINKS_AT_ONCE = 10
SPARE_PAGES = 64
SETTLE_S = 1.0
WATCH_S = 0.3  # seconds for which the ticker runs before the peer is lost
END_S = 120.0
MUST_STALL_MS = 5.0
MUST_ROOMS = 10_000  # the limit is a "must" up to this many rooms, and an "aim" above
LOSSES = ("killed prefill", "silent prefill", "killed decode", "silent decode")

Figures = dict[str, Any]


class Growth(NamedTuple):
    """Parameters of `bench_growth`."""

    plane: str = "local"
    rest_s: float = 5.0
    links: int = 300  # links, each to a prefill of its own; with 1, links are not measured
    losses: tuple[str, ...] = LOSSES
    frozen: bool = True  # call gc.freeze while rooms open and afterwards, as the roles do
    tree: str = ""  # another checkout of the library, if given


class OpenRooms:
    """A prefill and a decode process, and `count` rooms between them."""

    def __init__(self, prefill: Process, decode: Process, plan: Growth, count: int) -> None:
        self._plan, self._count = plan, count
        self.sides = {"prefill": prefill, "decode": decode}

    async def both(self, do: str, **arguments: Any) -> Figures:
        seen = await asyncio.gather(*(side.ask(do, **arguments) for side in self.sides.values()))
        return dict(zip(self.sides, seen, strict=True))

    async def setup(self) -> None:
        pages = self._count + self._plan.links + SPARE_PAGES
        prefill, decode = self.sides.values()
        plane = self._plan.plane
        ready = await prefill.ask("setup", plane=plane, pages=SPARE_PAGES, ranks=[])
        await decode.ask("setup", plane=plane, pages=pages, ranks=ready["ranks"])

    async def open(self) -> Figures:
        """Open the rooms in batches. Return rates, and each side's stalls and memory per room."""
        await self.both("opening", on=True)
        seconds = []
        for first in range(1, self._count + 1, BATCH):
            count = min(BATCH, self._count + 1 - first)
            begun = time.monotonic()
            await self.both("open", first=first, count=count)
            seconds.append((time.monotonic() - begun) / count)
            # As in a role, garbage collections must not visit all open rooms.
            if self._plan.frozen:
                await self.both("freeze")
        tenth = max(1, len(seconds) // 10)
        per_s = {
            "rooms_per_s": round(len(seconds) / sum(seconds), 1),
            "rooms_per_s_first": round(tenth / sum(seconds[:tenth]), 1),
            "rooms_per_s_last": round(tenth / sum(seconds[-tenth:]), 1),
        }
        return {**per_s, **await self.both("opening", on=False)}

    async def more_links(self) -> None:
        """Open one room over each further link."""
        # Registering is slow on a busy machine, and the halves that wait for it have a deadline. So
        # only `LINKS_AT_ONCE` links register at a time.
        size = {"plane": self._plan.plane, "links": self._plan.links}
        ready = await self.sides["prefill"].ask("link", ranks=[], **size)
        await self.sides["decode"].ask("link", ranks=ready["ranks"], **size)
        for link in range(1, self._plan.links, LINKS_AT_ONCE):
            count = min(LINKS_AT_ONCE, self._plan.links - link)
            await self.both(
                "open", first=self._count + link, count=count, first_link=link, links=count
            )
        if self._plan.frozen:
            await self.both("freeze")

    async def lose(self, loss: str) -> Figures:
        """Lose one peer as `loss` states, and return the other side's figures."""
        how, lost = loss.split()
        victim, other = self.sides[lost], self.sides["decode" if lost == "prefill" else "prefill"]
        # Only an observed death of prefill proves that its writes ended, and frees decode's pages.
        pages_return = how == "killed" and lost == "prefill"
        watching = asyncio.create_task(
            other.ask("ending", within_s=END_S, pages_return=pages_return)
        )
        await asyncio.sleep(WATCH_S)
        fell_at_s = time.monotonic()
        if how == "killed":
            await victim.kill()
        else:
            victim.freeze()
        seen = await watching
        # A frozen process would not answer `quit`.
        if how == "silent":
            await victim.kill()
        times = {name: seen.pop(f"{name}_at_s") for name in ("first", "last", "pages")}
        seen["noticed_ms"] = round((times["first"] - fell_at_s) * 1e3, 1)
        seen["ended_ms"] = round((times["last"] - fell_at_s) * 1e3, 1)
        if pages_return:
            seen["pages_free_ms"] = round((times["pages"] - fell_at_s) * 1e3, 1)
        return seen


@asynccontextmanager
async def open_rooms(plan: Growth, count: int) -> AsyncIterator[OpenRooms]:
    command, env = [sys.executable, "-P", "-m", WORKER], dict[str, str]()
    if plan.tree:
        command, env = worker_command(plan.tree, WORKER)
    prefill, decode = [
        await Process.spawn(*command, role, name=role, env=env) for role in ("prefill", "decode")
    ]
    async with prefill, decode:
        rooms = OpenRooms(prefill, decode, plan, count)
        await rooms.setup()
        yield rooms


async def bench_growth(counts: tuple[int, ...], plan: Growth, say: Say) -> Figures:
    """Measure with each number of open rooms in `counts`, in turn.

    Returns {"plan", str(count): figures, "must": [...]}.
    """
    report: Figures = {"plan": plan._asdict(), "must": []}
    for count in counts:
        figures = report[str(count)] = await grow(count, plan, say)
        report["must"] += judge(count, figures)
    for line in report["must"]:
        say(
            f"{'ok  ' if line['ok'] else 'MISS'} {line['what']}: {line['ms']} ms ({line['kind']} "
            f"{MUST_STALL_MS:g} ms)"
        )
    return report


async def grow(count: int, plan: Growth, say: Say) -> Figures:
    """Measure with `count` open rooms. For each loss of a peer, new processes are started."""
    figures: Figures = {}
    async with open_rooms(plan, count) as rooms:
        figures["opening"] = await rooms.open()
        say(f"{count} rooms are open: {figures['opening']['rooms_per_s']:.0f} a second")
        await asyncio.sleep(SETTLE_S)
        figures["collection"] = await rooms.both("collect", frozen=plan.frozen)
        figures["rest"] = await rooms.both("rest", seconds=plan.rest_s)
        if plan.links > 1:
            await rooms.more_links()
            await asyncio.sleep(SETTLE_S)
            figures[f"rest over {plan.links} links"] = await rooms.both("rest", seconds=plan.rest_s)
    for loss in plan.losses:
        async with open_rooms(plan, count) as rooms:
            await rooms.open()
            await asyncio.sleep(SETTLE_S)
            figures[loss] = await rooms.lose(loss)
            say(
                f"{count} rooms, {loss}: the other side's loop stalls "
                f"{figures[loss]['stall_max_ms']} ms"
            )
    return figures


def judge(count: int, figures: Figures) -> list[Figures]:
    """Return the stalls with their limit: a "must" up to `MUST_ROOMS` rooms, else an "aim"."""
    stalls: dict[str, float] = {}
    for phase, seen in figures.items():
        if phase == "collection":
            stalls |= {
                f"collection after gc.freeze, {side}": seen[side]["frozen_ms"] for side in seen
            }
        elif "stall_max_ms" in seen:
            stalls[phase] = seen["stall_max_ms"]
        else:
            # In a cluster, the prefills of all links would not share one event loop.
            sides = ("decode",) if "links" in phase else ("prefill", "decode")
            stalls |= {f"{phase}, {side}": seen[side]["stall_max_ms"] for side in sides}
    kind = "must" if count <= MUST_ROOMS else "aim"
    return [
        {
            "what": f"{count} rooms, {what}",
            "ms": ms,
            "limit_ms": MUST_STALL_MS,
            "kind": kind,
            "ok": ms <= MUST_STALL_MS,
        }
        for what, ms in stalls.items()
    ]
