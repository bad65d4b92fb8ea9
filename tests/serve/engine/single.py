"""Both engines on one pool in one process, and a room that copies no pages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kvflow.aio import Threads, all_ended
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.protocols.arguments import pages_wanted
from kvflow.protocols.errors import Cause, Code, room_error
from kvflow.protocols.pages.layout import Counts, PageIndices
from kvflow.protocols.ports import PageStore
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.sequence import Prompt
from kvflow.serve.engine.scheduler.decode import DecodeEngine
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from tests.serve.engine.pair import Side


class SharedRoom:
    """Both sides of a room, with the same pages and row as source and target."""

    def __init__(self, places: PageStore, counts: Counts, owner: Hashable) -> None:
        self._places, self._owner = places, owner
        self.pages: PageIndices = places.take_room(counts, owner)
        self._owned = True
        self._handoff: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._callbacks: list[Callable[[], None]] = []

    async def matched(self) -> int:
        return 0

    def send(self, pages: PageIndices, *, last: bool = False, handoff: bytes = b"") -> None:
        if last and not self._handoff.done():
            self._handoff.set_result(handoff)

    async def done(self) -> None:
        await asyncio.shield(self._handoff)

    async def landed(self) -> bytes:
        return await asyncio.shield(self._handoff)

    def keep(self, owner: Hashable) -> PageIndices:
        self._places.move(self.pages, self._owner, owner)
        self._owned = False
        return self.pages

    def on_end(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def close(self, cause: Cause | None = None) -> None:
        if not self._handoff.done():
            self._handoff.set_exception(
                room_error(cause or Cause(Code.CLIENT_GONE, "the room was closed"))
            )
            # asyncio logs an exception that is never retrieved.
            self._handoff.exception()
            for callback in self._callbacks:
                callback()

    def free(self) -> None:
        if self._owned:
            self._owned = False
            self._places.give_back(self.pages, self._owner)


class SingleEngine:
    """Both engines over one pool: the reference for prefill and decode in two processes.

    `options` are the prefill engine's; `max_batch_rooms=1` prefills one prompt at a time.
    `decode.pause` and `decode.resume` collect requests for one batch.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: PagedPool,
        pages: PageAllocator,
        executor: Threads,
        *,
        max_batch: int = 256,
        **options: Any,
    ) -> None:
        self.prefill = PrefillEngine(model, pool, pages, executor, **options)
        self.decode = DecodeEngine(model, pool, pages, executor, max_batch=max_batch)
        self._places, self._layout = pool.places_over(pages), pool.layout
        self._numbers = itertools.count()

    async def start(self) -> None:
        await self.prefill.start()
        await self.decode.start()

    async def close(self) -> None:
        await self.prefill.close()
        await self.decode.close()

    async def generate(
        self, prompt: Prompt, params: SamplingParams
    ) -> AsyncGenerator[TokenOut, None]:
        admission = await self.decode.admit(prompt, params)
        try:
            room = SharedRoom(
                self._places,
                pages_wanted(self._layout, len(prompt), 0),
                ("shared", next(self._numbers)),
            )
        except BaseException:
            admission.release()
            raise
        prefill = asyncio.create_task(self.prefill.prefill(room, prompt, params, into=room.pages))
        tokens = self.decode.generate(room, prompt, params, admission)
        # The stack unwinds in reverse, and each step runs even if an earlier one raises.
        async with AsyncExitStack() as ends:
            ends.callback(room.free)
            ends.push_async_callback(_give_up, prefill)
            ends.push_async_callback(tokens.aclose)
            async for out in tokens:
                yield out


async def _give_up(prefill: asyncio.Task[TokenOut]) -> None:
    prefill.cancel()
    try:
        await all_ended([prefill])
    finally:
        if not prefill.cancelled():
            # Decode raises the same error, and asyncio must not log this one.
            prefill.exception()


@asynccontextmanager
async def one_process(
    model: LoadedModel, num_pages: int, *, num_rows: int = 32, starts: bool = True, **options: Any
) -> AsyncIterator[tuple[SingleEngine, Side]]:
    """Both engines over one pool with pages of 16 tokens, which is free again in the end."""
    side = Side(model, num_pages, 16, "page_first", num_rows)
    with Threads("model") as executor:
        engine = SingleEngine(model, side.pool, side.pages, executor, **options)
        if starts:
            await engine.start()
        yield engine, side
        await engine.close()
    assert side.places.at_rest()
