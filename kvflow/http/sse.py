"""Server-sent events. A silent stream sends empty lines. An error becomes the last event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from aiohttp import web

from kvflow.aio import run_to_end
from kvflow.http.errors import Failure
from kvflow.http.growing import encode, write
from kvflow.http.paths import MESSAGES_PATH, RESPONSES_PATH

T = TypeVar("T")

# An empty event. A comment would break clients that parse every line (sglang.bench_serving).
KEEPALIVE = b"\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class NamedEvent(NamedTuple):
    """An event with a name, as the clients of some routes expect it."""

    name: str
    data: Any


class Dialect(NamedTuple):
    """How the streams of a route end, and how they report a failure."""

    end: bytes
    failed: Callable[[Failure], Any]


def _of_messages(failure: Failure) -> Any:
    return NamedEvent("error", failure.body_at(MESSAGES_PATH))


def _of_responses(failure: Failure) -> Any:
    error = failure.body["error"]
    return NamedEvent("error", {**error, "type": "error", "error": error})


_OPENAI = Dialect(DONE, lambda failure: failure.body)
_DIALECTS = {
    MESSAGES_PATH: Dialect(b"", _of_messages),
    RESPONSES_PATH: Dialect(b"", _of_responses),
}


def dialect_of(path: str) -> Dialect:
    """Return how the streams of the route with this path end."""
    return _DIALECTS.get(path, _OPENAI)


def encode_event(event: Any) -> list[bytes]:
    """Return the bytes of an event, in pieces. `event` is a JSON value or a `NamedEvent`."""
    if isinstance(event, NamedEvent):
        return [b"event: %b\n" % event.name.encode(), *encode_event(event.data)]
    return [b"data: ", *encode(event), b"\n\n"]


class EventStream:
    """A response that streams events. Once the client disconnects, writes raise ConnectionError."""

    def __init__(self, request: web.Request) -> None:
        self._request, self._dialect = request, dialect_of(request.path)
        self.response = web.StreamResponse(headers=_HEADERS)

    async def start(self) -> None:
        """Prepare the response. Its status and headers are fixed from now on."""
        await self.response.prepare(self._request)

    async def send(self, *events: Any) -> None:
        """Send `events`, in one write unless they are large."""
        pieces: list[bytes] = []
        for event in events:
            pieces += encode_event(event)
        await write(self.response, pieces)

    async def keepalive(self) -> None:
        """Send an empty event. A proxy must write to notice that its client disconnected."""
        await self.response.write(KEEPALIVE)

    async def fail(self, failure: Failure) -> None:
        """Send the error as the last event."""
        await self.send(self._dialect.failed(failure))
        await self.response.write_eof()

    async def end(self) -> None:
        if self._dialect.end:
            await self.response.write(self._dialect.end)
        await self.response.write_eof()


class Arrivals(AsyncIterator[list[tuple[int, T]]], Generic[T]):
    """Merges `sources` into one iterator of batches.

    A batch contains all items that arrived since the previous batch, each with the index of its
    source.

    If the reader waits for `silence_s` without an item, it receives an empty batch. The first
    error that a source raises reaches the reader after the items before it. A slow reader receives
    larger batches. An item needs no task or timer of its own: each source has one task, and all
    sources share one timer.

    Use it as an async context manager. The exit closes all sources, and waits until they are closed
    even if it is cancelled repeatedly.
    """

    def __init__(
        self, sources: Sequence[AsyncGenerator[T, None]], silence_s: float | None = None
    ) -> None:
        self._sources, self._silence_s = sources, silence_s
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(sources)
        self._begun: set[int] = set()
        self._stopped: set[int] = set()
        self._items: list[tuple[int, T]] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._silent = False
        self._asked_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._pump(i, source)) for i, source in enumerate(self._sources)
        ]
        # `_pump` cannot call `_ended`, because a task cancelled before its first step runs no code.
        for task in self._tasks:
            task.add_done_callback(self._ended)
        if self._silence_s is not None:
            self._asked_at_s = asyncio.get_running_loop().time()
            self._look_in(self._silence_s, self._silence_s)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await run_to_end(asyncio.gather(*self._tasks, return_exceptions=True))

    async def __anext__(self) -> list[tuple[int, T]]:
        loop = asyncio.get_running_loop()
        self._asked_at_s, self._silent = loop.time(), False
        while not self._items:
            if self._error is not None:
                raise self._error
            if not self._running:
                raise StopAsyncIteration
            if self._silent:
                return []
            self._reader = loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        batch, self._items = self._items, []
        return batch

    def has_begun(self, index: int) -> bool:
        """Return True once a source begins to run. A source stopped before that never runs."""
        return index in self._begun

    def stop(self, index: int, last: T) -> None:
        """Close one source with `last` as its last item, and drop its later items and errors."""
        if index in self._stopped or self._tasks[index].done():
            return
        self._stopped.add(index)
        self._items.append((index, last))
        self._tasks[index].cancel()
        self._wake()

    async def _pump(self, index: int, source: AsyncGenerator[T, None]) -> None:
        self._begun.add(index)
        try:
            async with aclosing(source) as items:
                async for item in items:
                    if self._error is not None or index in self._stopped:
                        return
                    self._items.append((index, item))
                    self._wake()
        except Exception as error:  # noqa: BLE001 - the reader raises it
            if index not in self._stopped:
                self._error = self._error or error

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._running -= 1
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _look_in(self, after_s: float, silence_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._look, silence_s)

    def _look(self, silence_s: float) -> None:
        """Wake the reader with an empty batch after `silence_s` without an item."""
        left_s = self._asked_at_s + silence_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            self._silent = True
            self._wake()
        # Restarting the timer for each item would cost more than the item itself.
        self._look_in(left_s if left_s > 0 else silence_s, silence_s)
