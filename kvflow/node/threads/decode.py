"""A decode node for engines without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvflow.handlers.rooms import DecodeRoom
from kvflow.memory.external import ExternalPages
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode
from kvflow.node.threads.loop import LoopThread
from kvflow.node.threads.node import LoopFactory, MakeThread, NodeThread
from kvflow.node.threads.rooms import DecodeThreadRoom, RoomEvent
from kvflow.protocols.arguments import (
    NO_PAGES,
    TokenIds,
    check_cause,
    check_prompt,
    own_pages,
    pages_wanted,
    room_id,
)
from kvflow.protocols.errors import Cause, MisuseError
from kvflow.protocols.limits import check_time
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import DataPlane
from kvflow.protocols.wire.ranks import RankInfo, check_dp_rank, check_infos


class DecodeThread(NodeThread[DecodeNode, DecodeRoom, DecodeThreadRoom]):
    """A decode node in a thread, for an engine that owns its pages."""

    role = "decode"

    def __init__(
        self,
        pool: PagedPool,
        plane: DataPlane | str,
        *,
        pages: ExternalPages | None = None,
        loop_factory: LoopFactory | None = None,
        make_thread: MakeThread = LoopThread,
        **options: Any,
    ) -> None:
        """Create a node over `pool`; `start` runs it in a thread.

        `options` are arguments of `DecodeNode`: host, resolve, timing, bounds, verify_transfers ...

        `loop_factory` creates the event loop, for example `uvloop.new_event_loop`. `make_thread`
        creates the loop's thread; the simulator passes a thread with virtual time.
        """
        super().__init__(pool, pages, loop_factory, make_thread)
        self._resolves = options.get("resolve") is not None
        self._make = partial(DecodeNode, pool, plane, pages=self.pages, **options)

    def open(
        self,
        room: int,
        *,
        prefill: str | Sequence[RankInfo],
        prompt: TokenIds,
        pages: Sequence[int] | PageIndices = NO_PAGES,
        prefix_tokens: int = 0,
        deadline_s: float | None = None,
        dp_rank: int | None = None,
        context: Any = None,
    ) -> DecodeThreadRoom:
        """Open a room at `prefill`, and lend `pages` for the prompt after its first `prefix_tokens`
        tokens.

        See `DecodeNode.room`. Raises: MisuseError. Any other refusal is reported by a "failed"
        event.
        """
        handle, opened = self._prepare(
            room, prefill, prompt, prefix_tokens, deadline_s, dp_rank, context
        )
        mine = own_pages(pages, self.pool.layout, handle.room, handle.counts)
        self.pool.quarantine.check(mine)
        handle.pages, handle.offered = mine, True
        self._post_open(handle, lambda node: opened(node.room, pages=mine), mine)
        return handle

    def announce(
        self,
        room: int,
        *,
        prefill: str | Sequence[RankInfo],
        prompt: TokenIds,
        prefix_tokens: int = 0,
        deadline_s: float | None = None,
        dp_rank: int | None = None,
        context: Any = None,
    ) -> DecodeThreadRoom:
        """Announce a room before its pages are available.

        Prefill's half waits until the room's `offer` lends pages, or its `close` sends prefill the
        cause. For arguments see `open`. Raises: MisuseError.
        """
        handle, opened = self._prepare(
            room, prefill, prompt, prefix_tokens, deadline_s, dp_rank, context
        )
        self._post_open(handle, lambda node: opened(node.announce), NO_PAGES)
        return handle

    def offer_pages(
        self, room: DecodeThreadRoom, pages: Sequence[int] | PageIndices, prefix_tokens: int | None
    ) -> None:
        """Lend pages for an announced room. `DecodeThreadRoom.offer` calls it.

        The pages are busy when it returns, unless the room ended.
        """
        layout = self.pool.layout
        if prefix_tokens is None:
            wanted = room.counts
        else:
            wanted = pages_wanted(layout, room.tokens, prefix_tokens)
        mine = own_pages(pages, layout, room.room, wanted)
        self.pool.quarantine.check(mine)

        def offer(handle: DecodeRoom) -> None:
            handle.offer(mine, prefix_tokens=prefix_tokens)

        with self._lock:
            if room.offered:
                raise MisuseError(f"room {room.room}: its pages have been offered already")
            if room.error is not None:
                return
            thread = self._running()
            room.pages, room.counts, room.offered = mine, wanted, True
            self.pages.hold(mine)
            if not thread.post(partial(self._pass_on, room, mine, offer)):
                self.pages.unhold(mine)

    def refuse(
        self,
        room: int,
        *,
        prefill: str | Sequence[RankInfo],
        cause: Cause,
        dp_rank: int | None = None,
    ) -> None:
        """Refuse a request without a room: its prefill ranks receive the cause.

        See `DecodeNode.refuse`. Raises: MisuseError.
        """
        number, ranks = room_id(room), self._prefill(prefill, dp_rank)
        thread, why = self._running(), check_cause(cause)

        def refuse(node: DecodeNode) -> None:
            node.refuse(number, ranks, why, dp_rank=dp_rank)

        thread.post(partial(self._act, refuse))

    def _prepare(
        self,
        room: int,
        prefill: str | Sequence[RankInfo],
        prompt: TokenIds,
        prefix_tokens: int,
        deadline_s: float | None,
        dp_rank: int | None,
        context: Any,
    ) -> tuple[DecodeThreadRoom, Callable[..., DecodeRoom]]:
        """Check the arguments of a room in the caller's thread.

        Returns the room, and a function that calls a method of the node with these arguments.
        """
        self._running()
        number, checked = room_id(room), check_prompt(prompt)
        wanted = pages_wanted(self.pool.layout, checked.tokens, prefix_tokens)
        handle = DecodeThreadRoom(self, number, checked.tokens, wanted, context)
        ranks = self._prefill(prefill, dp_rank)
        if deadline_s is not None:
            check_time("deadline_s", deadline_s)

        def opened(method: Callable[..., DecodeRoom], **more: Any) -> DecodeRoom:
            return method(
                number,
                ranks,
                checked,
                deadline_s=deadline_s,
                prefix_tokens=prefix_tokens,
                dp_rank=dp_rank,
                **more,
            )

        return handle, opened

    def _prefill(
        self, prefill: str | Sequence[RankInfo], dp_rank: int | None
    ) -> str | Sequence[RankInfo]:
        """Check `prefill` and `dp_rank`, so that an error is raised in the caller's thread."""
        check_dp_rank(dp_rank)
        if not isinstance(prefill, str):
            return list(check_infos(prefill, "prefill"))
        if not self._resolves:
            raise MisuseError(f"prefill {prefill!r}: this node was given no resolve()")
        return prefill

    # --- on the loop

    async def _follow(self, room: DecodeThreadRoom, handle: DecodeRoom) -> None:
        if await handle.begun():
            self._tell(RoomEvent("begun", room))
        await handle.opened()
        self._tell(RoomEvent("opened", room))
        # `keep` is not needed, because the pages belong to the engine.
        room.handoff = await handle.landed()
        self._tell(RoomEvent("landed", room, handoff=room.handoff))
