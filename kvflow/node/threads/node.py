"""The base of the two nodes for engines without an event loop: thread, pages, rooms that are not
released, events.

with kvflow.DecodeThread(pool, "local") as node:
    room = node.open(7, prefill=ranks, prompt=ids, pages=mine)     # pages of your own allocator
    while True:
        for event in node.poll(timeout_s=0.001):                   # landed, failed, released ...
            ...

Each method returns at once, unless its name or its timeout shows otherwise. Misuse is raised where
it happens; whatever happens later is an event. The node runs on an event loop in another thread.
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
    """A node of either role in a thread: the thread, the pages, the rooms that are not released,
    and the events.
    """

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
        # Held around start and close, which several threads may call at once.
        self._life = threading.Lock()
        # Guards fields of rooms where a check and a change belong together.
        self._lock = threading.Lock()
        # A value is None until the loop opened the room. The caller's thread adds rooms; all else
        # is written on the loop.
        self._rooms: dict[R, A | None] = {}
        self._tasks: dict[asyncio.Task[None], A] = {}  # awaiting tasks, each with its room
        self._events: deque[RoomEvent[R]] = deque()
        self._news = threading.Condition()
        self._unproven: Sequence[UnprovenLoan] = ()
        self._closing = self._closed = False
        self._over = False  # closed, and no event can follow

    def __repr__(self) -> str:
        state = "closed" if self._closing else "new" if self._thread is None else "running"
        return f"<{type(self).__name__} {state}: {len(self._rooms)} rooms, {self.pages!r}>"

    # --- life

    def start(self) -> Self:
        """Start the thread and the node.

        Raises: what the node raises when it is made or started; on a second call, MisuseError.
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
        """End and drain every room, then the node, then the thread, and wait for all of it.

        Idempotent; any number of threads may call it. Returns the loans whose end could not be
        proven; their pages stay busy. Events of the time until then can still be polled. Raises:
        MisuseError from the node's own thread, which has to do the work.
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

    # --- what the engine asks

    def poll(self, timeout_s: float = 0.0) -> list[RoomEvent[R]]:
        """Return the events since the last call, in order.

        Waits up to `timeout_s` for the first one, unless the node is closed. Raises: MisuseError
        (what is not a time).
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
        """Block until nothing touches `pages` (of any room): no peer may write into them, and no
        write and no checksum reads them.

        Returns False when that took longer than `timeout_s`: ask again, or do not use the pages.
        """
        return self.pages.wait_idle(pages, timeout_s)

    def ask(self, question: Callable[[N], T]) -> T:
        """Block for the answer to `question(node)`, which runs on the node's own thread:
        `ask(lambda node: node.peers())`.
        """

        async def answer() -> tuple[T | None, BaseException | None]:
            assert self._node is not None
            try:
                return question(self._node), None
            except BaseException as problem:  # noqa: BLE001
                # The error is raised on the caller's thread below: on the loop it might end the
                # node's thread.
                return None, problem

        found, error = self._running().call(answer)
        if error is not None:
            raise error
        return cast("T", found)

    def close_room(self, room: R, cause: Cause) -> None:
        """Close a room; rooms call it."""
        if self._thread is not None:
            # A stopped thread ended every room before.
            self._thread.post(partial(self._close_room, room, cause))

    # --- on the caller's thread

    def check_places(self, pages: PageIndices, *, last: bool = True) -> None:
        """Check that `pages` may be lent or sent.

        Raises: LayoutError unless a pool's row, where it has rows, is the last place of a room;
        OwnershipError for pages that a writer of an earlier node over the pool may still write
        into.
        """
        if (layout := self.pool.layout).num_rows:
            layout.check_places(pages, last=last)
        self.pool.quarantine.check(pages)

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise MisuseError(
                f"the {self.role} thread is not started: use it as a context manager, or start()"
            )
        if self._closing:
            raise MisuseError(f"the {self.role} thread is closed")
        # Another thread is in start().
        if self._node is None:
            raise MisuseError(
                f"the {self.role} thread is still starting: wait until start() has returned"
            )
        return self._thread

    def _post_open(self, room: R, opened: Callable[[N], A], pages: PageIndices) -> None:
        """Post the opening of a room. `pages` are busy from here on: the node holds them itself
        once it opened the room.
        """
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
            # The next `due` may only be computed when each of these tasks appended its last event.
            await asyncio.wait(due)
        # The rooms of these tasks have unproven loans: they are never released.
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
            # The node holds the pages of a room that it opened; this hold was for the time until
            # then.
            self.pages.unhold(pages)

    def _act(self, act: Callable[[N], None]) -> None:
        """Call the node, unless it is closed: then its connections are closed too."""
        if not self._closed:
            assert self._node is not None
            act(self._node)

    def _pass_on(self, room: R, pages: PageIndices, use: Callable[[A], None]) -> None:
        """Pass pages on to the node, if it opened their room; it holds them itself from then on."""
        handle = self._rooms.get(room)
        try:
            if handle is not None:
                use(handle)
        except BaseException as error:  # noqa: BLE001 - `_explained` raises what must pass
            # The room's own error arrives as an event. Any other ends the room, such as that of
            # pages which entered quarantine since the engine offered them.
            assert handle is not None
            handle.close(self._explained(error, room).cause())
        finally:
            self.pages.unhold(pages)

    def _follow(self, room: R, handle: A) -> Coroutine[Any, Any, None]:
        """Turn what happens to a room into events, until it succeeds.

        Raises: whatever else ends the room.
        """
        raise NotImplementedError

    def _followed(self, room: R, handle: A, error: BaseException | None) -> None:
        """Add the last events of a room, whatever ended it: that it failed, if it did, and that it
        is released.
        """
        if error is not None:
            failed = self._explained(error, room)
            handle.close(failed.cause())
            self._fail(room, failed)

        def released(problem: BaseException | None) -> None:
            # Any problem here means that this thread closes, and that the room's loans are
            # unproven.
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
        """Turn what ended a room into the error of its event."""
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
