"""One role of a parity pair as a process of its own: JSON lines in, JSON lines out.

    python -m tests.e2e.parity_worker prefill|decode

Commands: load (a model, with pool, data plane, node and engine of the role), serve (requests, all
at once), single (the same requests through one process), close (the model; the process goes on to
the next), quit.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import numpy as np
import uvloop

from kvflow.aio import Threads
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.places import PlaceAllocator
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.pages.layout import PageIndices, build_layout
from kvflow.protocols.wire.ranks import RankInfo, rank_from_json, rank_to_json
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler.decode import DecodeEngine
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from kvflow.serve.launch.process import die_with_parent
from kvflow.testing.pair import until
from kvflow.transports.data.select import open_plane
from tests.serve.engine.single import SingleEngine

HOME_S = 10.0
RETRACT_AFTER = 4
CONTEXT = 512  # where the model has no limit


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request.

    `zero`: before decoding starts, the landed page at this place of the prompt is zeroed, or what
    of it belongs to streams whose names end so, or the row, where these are kept in one."""

    room: int
    prompt: list[int]
    params: SamplingParams
    zero: tuple[int, str] | None = None


class CountedSends:
    """Prefill's half of a room; remembers how many pages, and rows, each chunk had."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.sends: list[int] = []

    def send(self, pages: PageIndices, *, last: bool = False, handoff: bytes = b"") -> None:
        self.sends.append(len(pages))
        self._session.send(pages, last=last, handoff=handoff)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class Spoiled:
    """Decode's half of a room, in which some of what has landed is lost again."""

    def __init__(self, session: Any, pool: PagedPool, index: int, ending: str) -> None:
        self._session, self._pool, self._index, self._ending = session, pool, index, ending

    async def landed(self) -> bytes:
        handoff: bytes = await self._session.landed()
        places = self._pool.layout.split(self._session.pages)
        for component in self._pool.layout.components:
            if component.name.endswith(self._ending) and (self._ending or not component.space):
                place = places[component.space][0 if component.space else self._index]
                self._pool.tensor(component.name)[int(place)] = 0
        return handoff

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


Turn = Callable[[], Awaitable[None]]


class Turns:
    """In lockstep a request joins the batch when the one before it has; then the order of rows is
    known too.

    (One process needs no turns: it prefills prompts in order, and they join as they are done.)
    """

    def __init__(self, count: int, lockstep: bool) -> None:
        self._events = [asyncio.Event() for _ in range(count + 1)]
        for event in self._events[:1] if lockstep else self._events:
            event.set()

    async def mine(self, index: int) -> None:
        await self._events[index].wait()

    def next(self, index: int) -> None:
        self._events[index + 1].set()

    async def all_joined(self) -> None:
        await self._events[-1].wait()


def new_pool(
    model: LoadedModel, *, page_size: int, order: Any, shared: bool
) -> tuple[PagedPool, PageAllocator]:
    """Enough for 16 full contexts.

    Every byte is poison, so that who reads what nobody wrote gets NaN; pages come out in no
    order."""
    num_pages, num_rows = (
        16 * -(-min(model.context_length, CONTEXT) // page_size),
        16 if model.has_rows else 0,
    )
    layout = build_layout(
        model.streams, page_size=page_size, num_pages=num_pages, num_rows=num_rows, order=order
    )
    pool = PagedPool.allocate(layout, shared=shared)
    for component in layout.components:
        pool.tensor(component.name).fill_(float("nan"))
    pages = PageAllocator(num_pages)
    taken = pages.take(num_pages, "scatter")
    for page in np.random.default_rng(3 if shared else 4).permutation(taken):
        pages.give_back(np.array([page], dtype=np.int32), "scatter")
    return pool, pages


async def home(pages: PageAllocator | PlaceAllocator) -> bool:
    """Whether all pages and rows come back: those of a burst of steps do when it has ended, after
    its last token.
    """
    try:
        await until(pages.at_rest, HOME_S)
    except TimeoutError:
        return False
    return True


def retract_after(engine: DecodeEngine, steps: int) -> None:
    """Retract every request once, with the step of this number: it ends the burst that it is in."""
    runner, numbers = engine._runner, itertools.count(1)
    forward = runner.forward

    def counted(rows: list[Row]) -> Any:
        if next(numbers) == steps:
            engine.retract_all()
            runner.forward = forward  # type: ignore[method-assign]
        return forward(rows)

    runner.forward = counted  # type: ignore[method-assign]


class Worker:
    """The commands; at most one model is loaded at a time."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.executor = Threads("model")
        self.model: LoadedModel
        self.pool: PagedPool
        self.node: PrefillNode | DecodeNode
        self.engine: PrefillEngine | DecodeEngine
        self.ranks: list[RankInfo] = []
        self.chunks: dict[str, Any] = {}
        self.pool_shape: dict[str, Any] = {}

    async def load(
        self,
        *,
        path: str,
        dtype: str,
        page_size: int,
        order: str,
        plane: str,
        chunks: dict[str, Any],
        ranks: list[Any],
        sliding_window_rows: str = "auto",
    ) -> dict[str, Any]:
        """`chunks`: the prefill engine's limits. `ranks`: where decode finds prefill."""
        load = partial(load_model, path, dtype, sliding_window_rows=sliding_window_rows)
        self.model = await self.executor.run(load)
        self.chunks, self.pool_shape = chunks, {"page_size": page_size, "order": order}
        self.pool, self.pages = new_pool(self.model, **self.pool_shape, shared=True)
        data_plane = await asyncio.to_thread(open_plane, plane, self.pool.segment)
        self.places = self.pool.places_over(self.pages)
        if self.role == "prefill":
            self.node = PrefillNode(self.pool, data_plane, pages=self.places)
            self.engine = PrefillEngine(self.model, self.pool, self.pages, self.executor, **chunks)
        else:
            self.ranks = [rank_from_json(rank) for rank in ranks]
            self.node = DecodeNode(self.pool, data_plane, pages=self.places)
            layout = self.pool.layout
            limit = layout.num_pages * layout.page_bytes + layout.num_rows * layout.row_bytes
            self.snapshots = await asyncio.to_thread(
                SnapshotStore, self.pool, limit, allocators=self.places.allocators
            )
            self.engine = DecodeEngine(
                self.model, self.pool, self.pages, self.executor, snapshots=self.snapshots
            )
        await self.node.start()
        await self.engine.start()
        told = {
            "pid": os.getpid(),
            "page_bytes": self.pool.layout.page_bytes,
            "row_bytes": self.pool.layout.row_bytes,
        }
        return {
            **told,
            "ranks": [rank_to_json(self.node.info)] if isinstance(self.node, PrefillNode) else [],
        }

    async def serve(self, *, requests: list[Any], lockstep: bool, retract: bool) -> dict[str, Any]:
        """Run all requests at once; `outs` by request.

        `lockstep`: decode steps have all of them, in this order. `retract`: all of them are
        retracted once, after some steps together."""
        asks = msgspec.convert(requests, list[Ask])
        if isinstance(self.engine, PrefillEngine):
            reply = await self._prefill(asks)
        else:
            engine = self.engine
            if retract:
                retract_after(engine, RETRACT_AFTER)
            reply = await self._decode(
                asks, engine, lambda ask, turn: self._decode_one(ask, engine, turn), lockstep
            )
            reply["retracts"] = engine.retraction.retracts
            assert not self.snapshots.used_bytes
        return {**reply, "at_rest": await home(self.places)}

    async def single(self, *, requests: list[Any], lockstep: bool) -> dict[str, Any]:
        """The same in one process, on a pool of its own, without a room,
        a socket or a data plane.
        """
        asks = msgspec.convert(requests, list[Ask])
        pool, pages = new_pool(self.model, **self.pool_shape, shared=False)
        engine = SingleEngine(self.model, pool, pages, self.executor, **self.chunks)
        await engine.start()
        try:
            reply = await self._decode(
                asks, engine.decode, lambda a, _: engine.generate(a.prompt, a.params), lockstep
            )
            reply["at_rest"] = await home(pool.places_over(pages))
        finally:
            await engine.close()
            pool.close()
        return reply

    async def close(self) -> dict[str, Any]:
        """End the node, and tell what is left of it."""
        await self.engine.close()
        await self.node.close()
        counts, pages = self.node.counts, self.places
        if isinstance(self.node, DecodeNode):
            await self.snapshots.close()
        self.pool.close()
        return {
            "at_rest": pages.at_rest(),
            "owned": {str(owner): count for owner, count in pages.owned().items()},
            "endings": counts.endings,
            "bytes_moved": counts.bytes_moved,
            "troubles": {
                name: count
                for name, count in (
                    ("failed steps", self.engine.failed_steps),
                    ("handler errors", counts.handler_errors),
                    ("malformed", counts.malformed),
                    ("undelivered", counts.undelivered),
                )
                if count
            },
        }

    async def _prefill(self, asks: list[Ask]) -> dict[str, Any]:
        assert isinstance(self.node, PrefillNode) and isinstance(self.engine, PrefillEngine)
        rooms = [CountedSends(self.node.room(ask.room, ask.prompt)) for ask in asks]
        legs = zip(rooms, asks, strict=True)
        await asyncio.gather(
            *(self.engine.prefill(room, ask.prompt, ask.params) for room, ask in legs)
        )
        return {"sends": [room.sends for room in rooms]}

    async def _decode_one(
        self, ask: Ask, engine: DecodeEngine, turn: Turn
    ) -> AsyncGenerator[TokenOut, None]:
        assert isinstance(self.node, DecodeNode)
        admission = await engine.admit(ask.prompt, ask.params)
        session: Any = await self.node.room(ask.room, self.ranks, ask.prompt)
        if ask.zero is not None:
            session = Spoiled(session, self.pool, *ask.zero)
        await turn()
        async with aclosing(engine.generate(session, ask.prompt, ask.params, admission)) as tokens:
            async for out in tokens:
                yield out

    async def _decode(
        self,
        asks: list[Ask],
        engine: DecodeEngine,
        start: Callable[[Ask, Turn], AsyncGenerator[TokenOut, None]],
        lockstep: bool,
    ) -> dict[str, Any]:
        turns, steps = Turns(len(asks), lockstep), engine.steps

        async def read(index: int, ask: Ask) -> list[TokenOut]:
            found: list[TokenOut] = []
            try:
                async with aclosing(start(ask, partial(turns.mine, index))) as tokens:
                    async for out in tokens:
                        turns.next(index)
                        found.append(out)
                return found
            finally:
                turns.next(index)

        if lockstep:
            engine.pause()
        running = asyncio.gather(*(read(i, ask) for i, ask in enumerate(asks)))
        if lockstep:
            await turns.all_joined()
            engine.resume()
        return {"outs": msgspec.to_builtins(await running), "steps": engine.steps - steps}


async def serve(role: str, replies: Any) -> None:
    worker = Worker(role)
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        command = json.loads(line)
        name = command.pop("do")
        if name == "quit":
            break
        try:
            reply = await getattr(worker, name)(**command)
        except Exception as error:  # noqa: BLE001  # the driver is told, and decides
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    die_with_parent()
    # What libraries print must not stand between the replies.
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        uvloop.run(serve(sys.argv[1], replies))
