"""The base class of nodes for engines without an event loop.

with kvflow.DecodeThread(pool, "local") as node:
    room = node.open(7, prefill=ranks, prompt=ids, pages=mine)     # pages of your own allocator
    while True:
        for event in node.poll(timeout_s=0.001):                   # landed, failed, released ...
            ...

The node runs on an event loop in another thread. Methods return at once, except `start`, `close`,
`ask`, and those with a timeout. They raise MisuseError for misuse. Everything that happens later is
reported by events.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.external import ExternalPages
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.node.threads.loop import LoopThread
from kvflow.node.threads.rooms import RoomEvent, ThreadRoom
from kvflow.protocols.errors import Cause, Code, KvflowError, MisuseError, room_error
from kvflow.protocols.limits import check_time
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import UnprovenLoan

N = TypeVar("N", PrefillNode, DecodeNode)
A = TypeVar("A", PrefillRoom, DecodeRoom)
R = TypeVar("R", bound=ThreadRoom)
T = TypeVar("T")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
MakeThread = Callable[[str, LoopFactory | None], LoopThread]


class NodeThread(Generic[N, A, R]):
    """A node of either role in a thread, with its page store, unreleased rooms, and events."""

    role = ""
    _make: Callable[[], N]

    def __init__(
        self,
        pool: PagedPool,
        pages: ExternalPages | None,
        loop_factory: LoopFactory | None,
        make_thread: MakeThread,
    ) -> None:
        self.pool, self.num_pages = pool, pool.layout.num_places
        self.pages = pages or ExternalPages(self.num_pages)
        pool.quarantine.keep_out_of(self.pages)
        self._loop_factory, self._make_thread = loop_factory, make_thread
        self._thread: LoopThread | None = None
        self._node: N | None = None
        # `start` and `close` hold this lock, because several threads may call them at once.
        self._life = threading.Lock()
        # Guards those fields of rooms that must be checked and changed in one step.
        self._lock = threading.Lock()
        # The value is None until the loop opens the room. While the loop runs, nothing else changes
        # or removes entries.
        self._rooms: dict[R, A | None] = {}
        self._tasks: dict[asyncio.Task[None], A] = {}  # tasks that wait for events of a room
        self._events: deque[RoomEvent[R]] = deque()
        self._news = threading.Condition()
        self._unproven: Sequence[UnprovenLoan] = ()
        self._closing = self._closed = False
        self._over = False  # the node is closed, and no event can follow

    def __repr__(self) -> str:
        state = "closed" if self._closing else "new" if self._thread is None else "running"
        return f"<{type(self).__name__} {state}: {self.open_rooms} rooms, {self.pages!r}>"

    @property
    def open_rooms(self) -> int:
        """The number of rooms that are not released. Any thread may read it."""
        return len(self._rooms)

    # --- life

    def start(self) -> Self:
        """Start the thread and the node.

        Raises: any error while the node is created or started; MisuseError on a second call.
        """
        with self._life:
            if self._thread is not None or self._closing:
                raise MisuseError(f"the {self.role} thread was started before: make a new one")
            self._thread = self._make_thread(f"kvflow-{self.role}", self._loop_factory)
            try:
                self._thread.call(self._start)
            except BaseException:
                self._closing = True
                self._thread.stop()
                raise
        return self

    def close(self) -> Sequence[UnprovenLoan]:
        """End and drain every room, close the node, and end the thread. Blocks until all is done.

        Idempotent. Any other thread may call it. Returns the unproven loans, whose pages stay busy.
        Earlier events can still be polled. Raises: MisuseError in the node's own thread, which must
        do the work.
        """
        if self._thread is not None:
            self._thread.check_not_within()
        self._closing = True
        with self._life:
            if self._thread is not None:
                if self._node is not None and not self._closed:
                    self._unproven = self._thread.call(self._close)
                self._thread.stop()
        with self._news:
            self._over = True
            self._news.notify_all()
        return self._unproven

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- called by the engine

    def poll(self, timeout_s: float = 0.0) -> list[RoomEvent[R]]:
        """Return the events since the last call, in order.

        Waits up to `timeout_s` for the first one, unless the node is closed. Raises: MisuseError
        for an invalid `timeout_s`.
        """
        check_time("timeout_s", timeout_s)
        with self._news:
            if timeout_s > 0:
                self._news.wait_for(lambda: self._events or self._over, timeout_s)
            found = list(self._events)
            self._events.clear()
        return found

    def wait_released(
        self, pages: Sequence[int] | PageIndices, timeout_s: float | None = None
    ) -> bool:
        """Block until none of `pages` is busy. They may belong to different rooms.

        A page is busy while a peer may write into it, or a write or a checksum reads it.

        Returns False after `timeout_s`. The pages must then not be used yet.
        """
        return self.pages.wait_idle(pages, timeout_s)

    def ask(self, question: Callable[[N], T]) -> T:
        """Call `question(node)` in the node's thread, and wait for its result. Example:
        `ask(lambda node: node.peers())`.
        """

        async def answer() -> tuple[T | None, BaseException | None]:
            assert self._node is not None
            try:
                return question(self._node), None
            except BaseException as problem:  # noqa: BLE001
                # On the loop, an error such as SystemExit would end the node's thread.
                return None, problem

        found, error = self._running().call(answer)
        if error is not None:
            raise error
        return cast("T", found)

    def close_room(self, room: R, cause: Cause) -> None:
        """Close a room. The room's `close` calls it."""
        if self._thread is not None:
            # The result is ignored: if the thread is stopped, every room has already ended.
            self._thread.post(partial(self._close_room, room, cause))

    # --- on the caller's thread

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise MisuseError(
                f"the {self.role} thread is not started: use it as a context manager, or start()"
            )
        if self._closing:
            raise MisuseError(f"the {self.role} thread is closed")
        # Another thread is still in `start`.
        if self._node is None:
            raise MisuseError(
                f"the {self.role} thread is still starting: wait until start() has returned"
            )
        return self._thread

    def _post_open(self, room: R, opened: Callable[[N], A], pages: PageIndices) -> None:
        """Post a call that opens a room. Its `pages` are busy from now on."""
        thread = self._running()
        self.pages.hold(pages)
        self._rooms[room] = None
        if not thread.post(partial(self._open, room, opened, pages)):
            del self._rooms[room]
            self.pages.unhold(pages)
            raise MisuseError(f"the {self.role} thread is closed")

    # --- on the loop

    async def _start(self) -> None:
        node = self._make()
        try:
            await node.start()
        except BaseException:
            await node.close()
            raise
        self._node = node

    async def _close(self) -> Sequence[UnprovenLoan]:
        assert self._node is not None
        unproven = await self._node.close()
        self._closed = True
        while due := [task for task, handle in self._tasks.items() if handle.when_released.given]:
            # When one of these tasks ends, another one starts and reports the room's release.
            await asyncio.wait(due)
        # The rooms of the remaining tasks have unproven loans, so they are never released.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return unproven

    def _open(self, room: R, opened: Callable[[N], A], pages: PageIndices) -> None:
        assert self._node is not None
        try:
            if self._closed:
                raise room_error(Cause(Code.SHUTDOWN, f"the {self.role} thread is closed"))
            handle = self._rooms[room] = opened(self._node)
        except BaseException as error:  # noqa: BLE001 - `_explained` raises what must pass
            self._fail(room, self._explained(error, room))
            self._release(room)
        else:
            self._spawn(handle, self._follow(room, handle), partial(self._followed, room, handle))
        finally:
            # This ends the hold of `_post_open`. A node that opened the room has its own hold.
            self.pages.unhold(pages)

    def _act(self, act: Callable[[N], None]) -> None:
        if not self._closed:
            assert self._node is not None
            act(self._node)

    def _pass_on(self, room: R, pages: PageIndices, use: Callable[[A], None]) -> None:
        """Call `use` with the node's room, if it is open, then end the hold on `pages`."""
        handle = self._rooms.get(room)
        try:
            if handle is not None:
                use(handle)
        except BaseException as error:  # noqa: BLE001 - `_explained` raises what must pass
            # If the room failed, an event reports its error. Any other error ends the room.
            assert handle is not None
            handle.close(self._explained(error, room).cause())
        finally:
            self.pages.unhold(pages)

    def _follow(self, room: R, handle: A) -> Coroutine[Any, Any, None]:
        """Report a room by events until it succeeds. Raises: any error that ends the room."""
        raise NotImplementedError

    def _followed(self, room: R, handle: A, error: BaseException | None) -> None:
        """Add the last events of a room that ended: "failed", if it failed, and "released"."""
        if error is not None:
            failed = self._explained(error, room)
            handle.close(failed.cause())
            self._fail(room, failed)

        def released(problem: BaseException | None) -> None:
            # `handle.released` fails only if the node closes while the room has unproven loans.
            if problem is None:
                self._release(room)

        self._spawn(handle, handle.released(), released)

    def _spawn(
        self,
        handle: A,
        work: Coroutine[Any, Any, None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = handle

        def report(done: asyncio.Task[None]) -> None:
            del self._tasks[done]
            ended(asyncio.CancelledError() if done.cancelled() else done.exception())

        task.add_done_callback(report)

    def _explained(self, error: BaseException, room: R) -> KvflowError:
        assert self._node is not None
        return self._node.shell.explained(error, f"room {room.room} of the {self.role} thread")

    def _close_room(self, room: R, cause: Cause) -> None:
        handle = self._rooms.get(room)
        if handle is not None:
            handle.close(cause)

    def _fail(self, room: R, error: KvflowError) -> None:
        with self._lock:
            room.error = error
        self._tell(RoomEvent("failed", room, error=error))

    def _release(self, room: R) -> None:
        del self._rooms[room]
        room.released = True
        self._tell(RoomEvent("released", room))

    def _tell(self, event: RoomEvent[R]) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()
