"""Rooms as an engine's threads hold them, and the events that report on them.

The loop's thread writes the fields of a room, and any thread reads them: each field changes once,
from "not yet" to its value.
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
from kvflow.protocols.pages.layout import PageIndices, PoolLayout


class ThreadRoom:
    """The part that both kinds of room share. `context` belongs to the engine: its request, for
    example.
    """

    def __init__(self, room: int, context: Any) -> None:
        self.room, self.context = room, context
        self.error: KvflowError | None = None  # the error that ended the room; None after success
        self.released = False  # nothing touches its pages any more


R = TypeVar("R", bound=ThreadRoom)


class RoomEvent(msgspec.Struct, Generic[R], frozen=True):
    """One thing that happened to a room.

    begun     decode, for a room that was announced: prefill has a place for the whole prompt
    opened    decode: every rank is registered and the pages are lent
    landed    decode: every page is there; `handoff` is prefill's, and the pages may be read
    matched   prefill: decode's half is here, send() may be called; decode has the first
              `prefix_tokens` of the prompt
    done      prefill: every write landed
    failed    either: the room ended, and `error` is the reason; its pages may still be in use
    released  either: nothing touches the room's pages any more; the last event of a room
    """

    kind: Literal["begun", "opened", "landed", "matched", "done", "failed", "released"]
    room: R
    prefix_tokens: int = 0
    handoff: bytes = b""
    error: KvflowError | None = None


class DecodeSide(Protocol):
    """The node thread as a decode room uses it."""

    def offer_pages(
        self, room: DecodeThreadRoom, pages: Sequence[int] | PageIndices, prefix_tokens: int | None
    ) -> None: ...

    def close_room(self, room: DecodeThreadRoom, cause: Cause) -> None: ...


class DecodeThreadRoom(ThreadRoom):
    """One room at decode, over pages that belong to the engine."""

    def __init__(
        self, side: DecodeSide, room: int, tokens: int, num_pages: int, context: Any
    ) -> None:
        super().__init__(room, context)
        # `tokens` is the length of the prompt, `num_pages` what the room needs for it.
        self._side, self.tokens, self.num_pages = side, tokens, num_pages
        self.pages: PageIndices = NO_PAGES
        self.offered = False  # its pages are lent, or will be
        self.handoff: bytes | None = None  # prefill's, once it landed

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
    def landed(self) -> bool:
        """True when every page is there."""
        return self.handoff is not None

    def offer(
        self, pages: Sequence[int] | PageIndices, *, prefix_tokens: int | None = None
    ) -> None:
        """Bring the pages of a room that was announced.

        `pages` are `num_pages` pages of the engine's own, busy from here on; fewer, if the engine
        found the first `prefix_tokens` of the prompt meanwhile. No effect on a room that ended.
        Raises: MisuseError.
        """
        self._side.offer_pages(self, pages, prefix_tokens)

    def close(self, cause: Cause | None = None) -> None:
        """Abort the room, unless it ended; may be called any number of times.

        Its pages belong to the engine again when the room is released.
        """
        self._side.close_room(self, check_cause(cause))


class PrefillSide(Protocol):
    """The node thread as a prefill room uses it."""

    num_pages: int

    def begin_room(self, room: PrefillThreadRoom) -> None: ...

    def send_chunk(
        self, room: PrefillThreadRoom, pages: PageIndices, last: bool, handoff: bytes
    ) -> None: ...

    def close_room(self, room: PrefillThreadRoom, cause: Cause) -> None: ...


class PrefillThreadRoom(ThreadRoom):
    """One room at prefill.

    Its engine sends its own pages, which are busy until the write ends.
    """

    def __init__(self, side: PrefillSide, room: int, context: Any) -> None:
        super().__init__(room, context)
        self._side = side
        self.prefix_tokens: int | None = None  # how much of the prompt decode has, once matched
        self.left = 0  # pages still to be sent, once matched
        self.last_sent = self.done = False

    def __repr__(self) -> str:
        ended = (
            "released" if self.released else "failed" if self.error else "done" if self.done else ""
        )
        state = ended or ("matched" if self.matched else "open")
        return f"<PrefillThreadRoom {self.room}: {state}, {self.left} pages to send>"

    @property
    def matched(self) -> bool:
        """True when decode's half is here: send() may be called."""
        return self.prefix_tokens is not None

    def begin(self) -> None:
        """Report that the engine has a place for the whole prompt; see `PrefillRoom.begin`."""
        self._side.begin_room(self)

    def send(
        self, pages: Sequence[int] | PageIndices, *, last: bool = False, handoff: bytes = b""
    ) -> None:
        """Queue one chunk, and return at once. See `PrefillRoom.send`.

        Raises: MisuseError (before matched, after the last chunk, more or fewer pages than are
        left, a page outside the pool, a hand-over before the last chunk): nothing was queued; the
        room's own error once it ended.
        """
        self._side.send_chunk(
            self,
            page_indices(pages, self._side.num_pages, f"room {self.room}"),
            bool(last),
            check_handoff(handoff),
        )

    def check_chunk(
        self, layout: PoolLayout, pages: PageIndices, last: bool, handoff_bytes: int
    ) -> None:
        """Check a chunk as `PrefillEndpoint.check_chunk` does.

        The endpoint cannot check it in time: chunks that are on their way to its thread are unknown
        to it.
        """
        if self.error is not None:
            raise self.error
        if not self.matched:
            raise MisuseError(f"room {self.room}: send() before the matched event")
        if self.last_sent:
            raise MisuseError(f"room {self.room}: send() after the last chunk")
        check_chunk(self.room, layout, pages, self.left, last, handoff_bytes)

    def close(self, cause: Cause | None = None) -> None:
        """End the room, unless it ended; may be called any number of times.

        Its pages belong to the engine again when the room is released.
        """
        self._side.close_room(self, check_cause(cause))
