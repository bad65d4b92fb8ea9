"""A prefill node for engines without an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from kvflow.handlers.rooms import PrefillRoom
from kvflow.memory.external import ExternalPages
from kvflow.memory.pool import PagedPool
from kvflow.node import PrefillNode
from kvflow.node.threads.loop import LoopThread
from kvflow.node.threads.node import LoopFactory, MakeThread, NodeThread
from kvflow.node.threads.rooms import PrefillThreadRoom, RoomEvent
from kvflow.protocols.arguments import NO_PAGES, TokenIds, check_cause, check_prompt, room_id
from kvflow.protocols.errors import Cause, RoomInUseError
from kvflow.protocols.limits import check_time
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.pages.spaces import counts_less
from kvflow.protocols.ports import DataPlane, UnprovenLoan
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.transports.control.rank_server import serve_ranks
from kvflow.transports.control.registry import RankTable
from kvflow.transports.host.address import bracketed


class PrefillThread(NodeThread[PrefillNode, PrefillRoom, PrefillThreadRoom]):
    """A prefill node in a thread, for an engine that owns its pages."""

    role = "prefill"

    def __init__(
        self,
        pool: PagedPool,
        plane: DataPlane | str,
        *,
        pages: ExternalPages | None = None,
        registry_port: int | None = None,
        loop_factory: LoopFactory | None = None,
        make_thread: MakeThread = LoopThread,
        **options: Any,
    ) -> None:
        """Create a node over `pool`; `start` runs it in a thread.

        `options` are arguments of `PrefillNode`: host, port, rank, timing, bounds, verify_transfers
        ...

        With `registry_port` (0: a free port) the node serves a registry of this rank only, so that
        decodes can find it. `registry` is then the address, "host:port". `loop_factory` creates the
        event loop, for example `uvloop.new_event_loop`. `make_thread` creates the loop's thread;
        the simulator passes a thread with virtual time.
        """
        super().__init__(pool, pages, loop_factory, make_thread)
        self._make = partial(PrefillNode, pool, plane, pages=self.pages, **options)
        self._host, self._registry_port = options.get("host", "127.0.0.1"), registry_port
        self._numbers: set[int] = set()  # ids of rooms that have not been released
        self._stack = AsyncExitStack()
        self.registry = ""

    @property
    def info(self) -> RankInfo:
        """Description of this rank for a registry; available once the node is started."""
        return self.ask(lambda node: node.info)

    def open(
        self,
        room: int,
        *,
        prompt: TokenIds,
        deadline_s: float | None = None,
        rendezvous_s: float | None = None,
        context: Any = None,
    ) -> PrefillThreadRoom:
        """Open the engine's half of a room; see `PrefillNode.room`.

        Raises: MisuseError (room in use, empty prompt, ...).
        """
        thread = self._running()
        number, checked = room_id(room), check_prompt(prompt)
        for name, value_s in (("deadline_s", deadline_s), ("rendezvous_s", rendezvous_s)):
            if value_s is not None:
                check_time(name, value_s)
        handle = PrefillThreadRoom(self, number, context)
        with self._lock:
            in_use = number in self._numbers
            self._numbers.add(number)
        if in_use:
            # Decode's half of this second room may arrive after the first one ended: refuse it too.
            error = RoomInUseError(f"room {number} is in use")
            why = error.cause()
            thread.post(partial(self._act, lambda node: node.refuse(number, why)))
            raise error

        def opened(node: PrefillNode) -> PrefillRoom:
            return node.room(number, checked, deadline_s=deadline_s, rendezvous_s=rendezvous_s)

        try:
            self._post_open(handle, opened, NO_PAGES)
        except BaseException:
            self._numbers.discard(number)
            raise
        return handle

    def refuse(self, room: int, cause: Cause) -> None:
        """Refuse a room instead of opening the engine's half: decode receives the cause.

        See `PrefillNode.refuse`. Raises: MisuseError.
        """
        number, thread, why = room_id(room), self._running(), check_cause(cause)
        thread.post(partial(self._act, lambda node: node.refuse(number, why)))

    def begin_room(self, room: PrefillThreadRoom) -> None:
        """Report that the engine has a place for a room. `PrefillThreadRoom.begin` calls it."""
        self._running().post(partial(self._begin, room))

    def send_chunk(
        self, room: PrefillThreadRoom, pages: PageIndices, last: bool, handoff: bytes
    ) -> None:
        """Queue a chunk. `PrefillThreadRoom.send` calls it. The pages are busy when it returns."""

        def send(handle: PrefillRoom) -> None:
            if not handle.ended:
                handle.send(pages, last=last, handoff=handoff)

        # Several threads may send chunks of the same room.
        with self._lock:
            counts = room.check_chunk(self.pool.layout, pages, last, len(handoff))
            self.pool.quarantine.check(pages)
            thread = self._running()
            self.pages.hold(pages)
            room.counts_left = counts_less(room.counts_left, counts)
            room.last_sent = last
            thread.post(partial(self._pass_on, room, pages, send))

    # --- on the loop

    async def _start(self) -> None:
        await super()._start()
        assert self._node is not None
        if self._registry_port is None:
            return
        table = RankTable()
        table.put(self._node.info)
        try:
            port = await self._stack.enter_async_context(
                serve_ranks(table, self._host, self._registry_port)
            )
        except BaseException:
            await self._node.close()
            self._closed = True
            raise
        self.registry = f"{bracketed(self._host)}:{port}"

    async def _close(self) -> Sequence[UnprovenLoan]:
        await self._stack.aclose()
        return await super()._close()

    def _begin(self, room: PrefillThreadRoom) -> None:
        if (handle := self._rooms.get(room)) is not None:
            handle.begin()

    async def _follow(self, room: PrefillThreadRoom, handle: PrefillRoom) -> None:
        prefix_tokens = await handle.matched()
        with self._lock:
            room.counts_left = handle.record.wanted
            room.prefix_tokens = prefix_tokens
        self._tell(RoomEvent("matched", room, prefix_tokens=prefix_tokens))
        await handle.done()
        room.done = True
        self._tell(RoomEvent("done", room))

    def _release(self, room: PrefillThreadRoom) -> None:
        with self._lock:
            self._numbers.discard(room.room)
        super()._release(room)
