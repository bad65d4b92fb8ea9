"""Which functions of the package a message passes, from the call that causes it to its effect on
the other side.

    # PYTHONPATH=CHECKOUT for another version of the package
    python tests/house/call_trace.py [--list]

One room on the in-memory link and the fake data plane, timers far away, so that nothing else runs
meanwhile:

    Bootstrap   DecodeNode.room(), linked        ->  matched() returns at prefill
    ChunkDone   the data plane's write lands     ->  landed() returns at decode
    Abort       DecodeRoom.close(), in a write   ->  AbortAck has come, the pages are free at decode

A stop is a call of a function of the package, or a coroutine of it that the event loop wakes.
Properties, constructors and other `__names__`, comprehensions and lambdas are not counted, and
neither is what happens inside the doubles: a frame on the link is two stops (sent, delivered), a
call of the fake plane is one. `stops` counts a function each time it is called, since a reader goes
there again; `functions` counts it once.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import sys
from collections.abc import Awaitable, Callable
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self

import kvflow

try:
    from kvflow.protocols.limits import Timing
    from kvflow.testing.pair import Pair, pair
except ModuleNotFoundError:  # as they were called before the floors
    from kvflow.handlers.settings import Timing  # type: ignore[import-not-found, no-redef]
    from kvflow.sim.pair import Pair, pair  # type: ignore[import-not-found, no-redef]

PACKAGE = str(Path(kvflow.__file__).parent) + "/"
DOUBLES = {"testing/pair.py", "transports/control/memory.py", "transports/data/fake.py"}
DOUBLES |= {"sim/pair.py", "sim/network.py", "transports/fake.py"}
HOUR_S = 3600.0
QUIET = Timing(
    heartbeat_s=HOUR_S,
    lost_after_s=HOUR_S,
    repeat_after_s=HOUR_S,
    rendezvous_s=HOUR_S,
    register_s=HOUR_S,
)
PROMPT = range(40)  # ten pages
TURNS = 1000


class Stop(NamedTuple):
    """One function on the way."""

    file: str
    function: str


class CallTrace:
    """Record the stops of everything that runs in this thread within `with`."""

    def __init__(self) -> None:
        self.stops: list[Stop] = []
        self._properties = property_code()

    def __enter__(self) -> Self:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(stop.file for stop in self.stops))

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or self._is_small(code):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        callers = package_callers(frame)
        if any(caller in DOUBLES for caller in callers):
            return
        if file in DOUBLES and (file.endswith("pair.py") or code.co_name == "receive"):
            return  # a clock; and what is asked for messages, which are counted when they come
        if is_resumed(frame) and callers:
            return  # part of a coroutine that is counted already
        self.stops.append(Stop(file, code.co_qualname))

    def _is_small(self, code: CodeType) -> bool:
        name = code.co_name
        return name.startswith(("<", "__")) or code in self._properties


def package_callers(frame: FrameType) -> list[str]:
    """The files of the package that are on the stack above `frame`."""
    found: list[str] = []
    above = frame.f_back
    while above is not None:
        if above.f_code.co_filename.startswith(PACKAGE):
            found.append(above.f_code.co_filename.removeprefix(PACKAGE))
        above = above.f_back
    return found


def is_resumed(frame: FrameType) -> bool:
    """A coroutine or generator that goes on, rather than begins."""
    if not frame.f_code.co_flags & (
        inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    ):
        return False
    return frame.f_lasti > first_instruction(frame.f_code)


@cache
def first_instruction(code: CodeType) -> int:
    """Where a coroutine stands that has not begun: past what makes its cells and itself."""
    return next(i.offset for i in dis.get_instructions(code) if i.opname == "RESUME")


def property_code() -> set[CodeType]:
    """The code of every property of the package's loaded classes."""
    found: set[CodeType] = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("kvflow"):
            continue
        for kind in vars(module).values():
            if not isinstance(kind, type) or not kind.__module__.startswith("kvflow"):
                continue  # others' classes have properties that are no Python functions
            for member in vars(kind).values():
                getter = (
                    member.fget if isinstance(member, property) else getattr(member, "func", None)
                )
                if isinstance(member, property | cached_property) and getter is not None:
                    found.add(getter.__code__)
    return found


async def trace_bootstrap(p: Pair, room: int = 2) -> CallTrace:
    source = p.prefill.room(room, PROMPT)
    ranks, matched = p.ranks, asyncio.create_task(source.matched())
    await asyncio.sleep(0)
    decode = p.decode
    with CallTrace() as trace:
        await decode.room(room, ranks, PROMPT)
        await matched
    source.close()
    await until(target_ended(p))
    return trace


async def trace_chunk_done(p: Pair, room: int = 3) -> CallTrace:
    source, target = await opened(p, room)
    plane = p.plane(p.prefill)
    plane.hold()
    p.send_all(source)
    landed = asyncio.create_task(target.landed())
    await asyncio.sleep(0)
    with CallTrace() as trace:
        plane.release()
        await landed
    target.close()
    await until(target_ended(p))
    return trace


async def trace_abort(p: Pair, room: int = 4) -> CallTrace:
    source, target = await opened(p, room)
    plane = p.plane(p.prefill)
    plane.hold()
    p.send_all(source)
    await asyncio.sleep(0)
    ended = target_ended(p)
    with CallTrace() as trace:
        target.close()
        await until(ended)
    plane.release()
    return trace


async def opened(p: Pair, room: int) -> tuple[Any, Any]:
    source = p.prefill.room(room, PROMPT)
    target = await p.decode.room(room, p.ranks, PROMPT)
    await source.matched()
    return source, target


def target_ended(p: Pair) -> Callable[[], bool]:
    pages = p.decode.pages
    return lambda: pages.free_pages == p.decode.pool.layout.num_pages


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run. Raises: TimeoutError when it had `TURNS` turns for it."""
    for _ in range(TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    raise TimeoutError(f"not true after {TURNS} turns of the event loop")


TRACES: dict[str, Callable[[Pair], Awaitable[CallTrace]]] = {
    "Bootstrap": trace_bootstrap,
    "ChunkDone": trace_chunk_done,
    "Abort": trace_abort,
}


async def trace_all() -> dict[str, CallTrace]:
    """Each message on a link that has carried one room already."""
    async with pair(timing=QUIET) as p:
        source, target = await opened(p, 1)
        p.send_all(source)
        await target.landed()
        target.close()
        return {name: await trace(p) for name, trace in TRACES.items()}


def main() -> None:
    for name, trace in asyncio.run(trace_all()).items():
        print(
            f"{name}: {len(trace.files)} files, {len(trace.stops)} stops, {len(set(trace.stops))} "
            "functions"
        )
        for stop in trace.stops if "--list" in sys.argv else ():
            print(f"    {stop.file:36} {stop.function}")


if __name__ == "__main__":
    main()
