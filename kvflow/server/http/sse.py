"""Server-sent events: data lines, comments during silence, one error event when a started stream fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from aiohttp import web

from kvflow.aio import run_to_end
from kvflow.server.http.errors import Failure

T = TypeVar("T")

KEEPALIVE = b": ka\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """One response as an event stream. Any write raises ConnectionError once the client has disconnected."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def start(self) -> None:
        """Send status and headers: from here on an error can only be an event."""
        await self._response.prepare(self._request)

    async def send(self, event: Any) -> None:
        """One JSON event."""
        await self._response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def keepalive(self) -> None:
        """Send a comment: clients skip it, and proxies notice by the write that their client has disconnected."""
        await self._response.write(KEEPALIVE)

    async def fail(self, failure: Failure) -> None:
        """The error as the last event."""
        await self.send(failure.body)
        await self._response.write_eof()

    async def end(self) -> None:
        await self._response.write(DONE)
        await self._response.write_eof()


class Paced(AsyncIterator[T | None]):
    """`source`, with a None after every `silence_s` without an item.

    Use as an async context manager: leaving cancels the item that is awaited, closes `source` and returns only then,
    also when leaving is cancelled, once or repeatedly.
    """

    def __init__(self, source: AsyncGenerator[T, None], silence_s: float) -> None:
        self._source = source
        self._silence_s = silence_s
        self._pending: asyncio.Task[T] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await run_to_end(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()
            await asyncio.wait([pending])
        await self._source.aclose()

    async def _next(self) -> T:
        return await anext(self._source)

    async def __anext__(self) -> T | None:
        if self._pending is None:
            self._pending = asyncio.create_task(self._next())
        done, _ = await asyncio.wait([self._pending], timeout=self._silence_s)
        if not done:
            return None
        task, self._pending = self._pending, None
        try:
            return task.result()
        except StopAsyncIteration:
            raise StopAsyncIteration from None


async def merged(sources: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all `sources` as they come, with the index of their source; the first error closes all sources."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=2 * len(sources))

    async def pump(index: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put((index, item))
        except Exception as error:  # noqa: BLE001 - carried to the reader, who raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(i, source)) for i, source in enumerate(sources)]
    running = len(tasks)
    try:
        while running:
            got = await queue.get()
            if got is None:
                running -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await run_to_end(asyncio.gather(*tasks, return_exceptions=True))
