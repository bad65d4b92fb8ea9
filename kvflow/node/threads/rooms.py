"""Rooms as an engine's threads hold them, and the events they are told by.

What a room knows is written on the loop's thread and read on any: each field changes once, from
"not yet" to its value.
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
    """What both kinds of room share. `context` is the engine's own: its request, say."""

    def __init__(self, room: int, context: Any) -> None:
        self.room, self.context = room, context
        self.error: KvflowError | None = None  # what ended it, other than success
        self.released = False  # nothing touches its pages any more


R = TypeVar("R", bound=ThreadRoom)


class RoomEvent(msgspec.Struct, Generic[R], frozen=True):
    """Something has happened to a room.

    begun     decode, of a room that was only announced: prefill has a place for the whole prompt
    opened    decode: every rank is registered and the pages are lent
    landed    decode: every page is there; `handoff` is prefill's, and the pages may be read
    matched   prefill: decode's half is here, send() may be called; decode has the first
              `prefix_tokens` of the prompt
    done      prefill: every write has landed
    failed    either: it ended, and `error` says why; its pages may still be in use
    released  either: nothing touches its pages any more; the last event of a room
    """

    kind: Literal["begun", "opened", "landed", "matched", "done", "failed", "released"]
    room: R
    prefix_tokens: int = 0
    handoff: bytes = b""
    error: KvflowError | None = None


class DecodeSide(Protocol):
    """What a room asks of the node thread it was opened by."""

    def offer_pages(
        self, room: DecodeThreadRoom, pages: Sequence[int] | PageIndices, prefix_tokens: int | None
    ) -> None: ...

    def close_room(self, room: DecodeThreadRoom, cause: Cause) -> None: ...


class DecodeThreadRoom(ThreadRoom):
    """One room at decode, over pages of the engine's own."""

    def __init__(
        self, side: DecodeSide, room: int, tokens: int, num_pages: int, context: Any
    ) -> None:
        super().__init__(room, context)
        # Of its prompt, and what it needs.
        self._side, self.tokens, self.num_pages = side, tokens, num_pages
        self.pages: PageIndices = NO_PAGES
        self.offered = False  # its pages are lent, or will be
        self.handoff: bytes | None = None  # prefill's, once it has landed

    def __repr__(self) -> str:
        state = (
            "released"
            if self.released
            else "failed"
            if self.error
            else "landed"
            if self.landed
            else "open"
        )
        return f"<DecodeThreadRoom {self.room}: {state}, {len(self.pages)} pages>"

    @property
    def landed(self) -> bool:
        """Every page is there."""
        return self.handoff is not None

    def offer(
        self, pages: Sequence[int] | PageIndices, *, prefix_tokens: int | None = None
    ) -> None:
        """Of a room that was only announced: `num_pages` pages of the engine's own, busy from here
        on; fewer, where the first `prefix_tokens` of the prompt have been found meanwhile. No
        effect on a room that has ended. Raises: MisuseError."""
        self._side.offer_pages(self, pages, prefix_tokens)

    def close(self, cause: Cause | None = None) -> None:
        """Abort it, unless it has ended; any number of times.

        Its pages are the engine's again when it is released.
        """
        self._side.close_room(self, check_cause(cause))


class PrefillSide(Protocol):
    """What a room asks of the node thread it was opened by."""

    num_pages: int

    def begin_room(self, room: PrefillThreadRoom) -> None: ...

    def send_chunk(
        self, room: PrefillThreadRoom, pages: PageIndices, last: bool, handoff: bytes
    ) -> None: ...

    def close_room(self, room: PrefillThreadRoom, cause: Cause) -> None: ...


class PrefillThreadRoom(ThreadRoom):
    """One room at prefill.

    Its engine sends pages of its own, which are busy until the write has ended.
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
        """Decode's half is here: send() may be called."""
        return self.prefix_tokens is not None

    def begin(self) -> None:
        """See `PrefillRoom.begin`."""
        self._side.begin_room(self)

    def send(
        self, pages: Sequence[int] | PageIndices, *, last: bool = False, handoff: bytes = b""
    ) -> None:
        """Queue one chunk; returns at once. See `PrefillRoom.send`.

        Raises: MisuseError (before matched, after the last chunk, other than the pages that are
        left, a page outside the pool, a hand-over before the last chunk): nothing was queued; the
        room's own error once it has ended.
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
        """As `PrefillEndpoint.check_chunk`, which knows nothing yet of chunks that are on their way
        to its thread.
        """
        if self.error is not None:
            raise self.error
        if not self.matched:
            raise MisuseError(f"room {self.room}: send() before the matched event")
        if self.last_sent:
            raise MisuseError(f"room {self.room}: send() after the last chunk")
        check_chunk(self.room, layout, pages, self.left, last, handoff_bytes)

    def close(self, cause: Cause | None = None) -> None:
        """End it, unless it has ended; any number of times.

        Its pages are the engine's again when it is released.
        """
        self._side.close_room(self, check_cause(cause))
