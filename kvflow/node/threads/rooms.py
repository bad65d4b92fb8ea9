"""The room handles of nodes in threads, and the events of these rooms.

Any thread may read the fields of a room. Fields that report on a room, such as `error`, are written
in the loop's thread, and change only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from kvflow.protocols.arguments import (
    NO_PAGES,
    check_cause,
    check_chunk,
    check_handoff,
    page_indices,
)
from kvflow.protocols.errors import Cause, KvflowError, MisuseError
from kvflow.protocols.pages.layout import Counts, PageIndices, PoolLayout


class ThreadRoom:
    """The base class of both kinds of rooms. `context` is any object that the engine attaches, for
    example its request.
    """

    def __init__(self, room: int, context: Any) -> None:
        self.room, self.context = room, context
        self.error: KvflowError | None = None  # why the room failed; None while open or successful
        self.released = False  # True once the room's pages are no longer in use


R = TypeVar("R", bound=ThreadRoom)


class RoomEvent(msgspec.Struct, Generic[R], frozen=True):
    """An event of a room.

    begun     decode, announced rooms only: prefill has a place for the whole prompt
    opened    decode: every rank is registered, and the pages are lent
    landed    decode: every page landed and may be read; `handoff` is prefill's handoff
    matched   prefill: decode's half arrived, and send() may be called; decode already has the first
              `prefix_tokens` tokens of the prompt
    done      prefill: every write landed
    failed    either: the room failed with `error`; its pages may still be in use
    released  either: the room's pages are no longer in use; always the last event
    """

    kind: Literal["begun", "opened", "landed", "matched", "done", "failed", "released"]
    room: R
    prefix_tokens: int = 0
    handoff: bytes = b""
    error: KvflowError | None = None


class DecodeSide(Protocol):
    """The methods of a node thread that a decode room uses."""

    def offer_pages(
        self, room: DecodeThreadRoom, pages: Sequence[int] | PageIndices, prefix_tokens: int | None
    ) -> None: ...

    def close_room(self, room: DecodeThreadRoom, cause: Cause) -> None: ...


class DecodeThreadRoom(ThreadRoom):
    """One room at decode, over pages that belong to the engine."""

    def __init__(
        self, side: DecodeSide, room: int, tokens: int, counts: Counts, context: Any
    ) -> None:
        super().__init__(room, context)
        # `tokens` is the length of the prompt; `counts` says how many places of each space to offer
        # for it.
        self._side, self.tokens, self.counts = side, tokens, counts
        self.pages: PageIndices = NO_PAGES
        self.offered = False  # True once the engine gives the room its pages
        self.handoff: bytes | None = None  # prefill's handoff, once every page landed

    def __repr__(self) -> str:
        if self.released:
            state = "released"
        elif self.error:
            state = "failed"
        elif self.landed:
            state = "landed"
        else:
            state = "open"
        return f"<DecodeThreadRoom {self.room}: {state}, {len(self.pages)} pages>"

    @property
    def num_pages(self) -> int:
        """Number of places to offer, of all spaces together."""
        return sum(self.counts)

    @property
    def landed(self) -> bool:
        """True once every page landed."""
        return self.handoff is not None

    def offer(
        self, pages: Sequence[int] | PageIndices, *, prefix_tokens: int | None = None
    ) -> None:
        """Lend pages for an announced room.

        `pages` are `num_pages` of the engine's own pages, or fewer if the engine has since obtained
        the first `prefix_tokens` tokens of the prompt. In a pool of several spaces they are places
        of every space, as many as `counts` says, in the order of the spaces. The pages are busy
        from now on. The call has no effect on a room that ended. Raises: MisuseError.
        """
        self._side.offer_pages(self, pages, prefix_tokens)

    def close(self, cause: Cause | None = None) -> None:
        """Abort the room, unless it ended or was aborted before.

        The engine may use the pages again once the room is released.
        """
        self._side.close_room(self, check_cause(cause))


class PrefillSide(Protocol):
    """The methods of a node thread that a prefill room uses."""

    num_pages: int

    def begin_room(self, room: PrefillThreadRoom) -> None: ...

    def send_chunk(
        self, room: PrefillThreadRoom, pages: PageIndices, last: bool, handoff: bytes
    ) -> None: ...

    def close_room(self, room: PrefillThreadRoom, cause: Cause) -> None: ...


class PrefillThreadRoom(ThreadRoom):
    """One room at prefill.

    The engine sends its own pages. A page is busy until its write ends.
    """

    def __init__(self, side: PrefillSide, room: int, context: Any) -> None:
        super().__init__(room, context)
        self._side = side
        # Tokens of the prompt that decode already has; None before the room is matched.
        self.prefix_tokens: int | None = None
        # Places of each space that the engine must still send; empty before the room is matched.
        self.counts_left: Counts = ()
        self.last_sent = self.done = False

    def __repr__(self) -> str:
        ended = (
            "released" if self.released else "failed" if self.error else "done" if self.done else ""
        )
        state = ended or ("matched" if self.matched else "open")
        return f"<PrefillThreadRoom {self.room}: {state}, {self.left} pages to send>"

    @property
    def left(self) -> int:
        """Number of places that the engine must still send, of all spaces together."""
        return sum(self.counts_left)

    @property
    def matched(self) -> bool:
        """True once decode's half arrived, so that send() may be called."""
        return self.prefix_tokens is not None

    def begin(self) -> None:
        """Report that the engine has a place for the whole prompt; see `PrefillRoom.begin`."""
        self._side.begin_room(self)

    def send(
        self, pages: Sequence[int] | PageIndices, *, last: bool = False, handoff: bytes = b""
    ) -> None:
        """Queue one chunk, and return at once. See `PrefillRoom.send`.

        Raises: MisuseError, and queues no chunk, if the room is not matched, its last chunk is
        already queued, the chunk has more pages than decode still expects (or fewer, if it is the
        last), a page is outside the pool, or `handoff` comes before the last chunk. If the room
        failed, its error is raised.
        """
        self._side.send_chunk(
            self,
            page_indices(pages, self._side.num_pages, f"room {self.room}"),
            bool(last),
            check_handoff(handoff),
        )

    def check_chunk(
        self, layout: PoolLayout, pages: PageIndices, last: bool, handoff_bytes: int
    ) -> Counts:
        """Perform the checks of `PrefillEndpoint.check_chunk` in the caller's thread, and return
        how many places of each space the chunk has. Raises: MisuseError, LayoutError.

        The endpoint cannot perform them, because it does not yet know the chunks that are posted to
        its thread.
        """
        if self.error is not None:
            raise self.error
        if not self.matched:
            raise MisuseError(f"room {self.room}: send() before the matched event")
        if self.last_sent:
            raise MisuseError(f"room {self.room}: send() after the last chunk")
        counts = layout.counted(pages)
        check_chunk(self.room, layout, counts, self.counts_left, last, handoff_bytes)
        layout.check_order(pages)
        return counts

    def close(self, cause: Cause | None = None) -> None:
        """End the room, unless it has already ended.

        The engine may use the pages again once the room is released.
        """
        self._side.close_room(self, check_cause(cause))
