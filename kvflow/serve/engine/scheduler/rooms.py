"""The two sides of a room as the engines use them.

`kvflow.handlers.rooms` implements these protocols, and so do test doubles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from kvflow.protocols.errors import Cause
from kvflow.protocols.pages.layout import PageIndices


class PrefillRoomPort(Protocol):
    """Prefill's side of a room. Every method may raise the room's error after the room ends."""

    async def matched(self) -> int:
        """Wait for decode's side; returns how many tokens of the prompt decode already has."""

    def send(self, pages: PageIndices, *, last: bool = False, handoff: bytes = b"") -> None:
        """Queue one chunk. The room does not end inside this call.

        A chunk has full pages only. The last one may end with a partial page, followed by the row
        if the pool has rows. The pages are held until their write ends.
        """

    async def done(self) -> None:
        """Wait until every write lands."""

    def close(self, cause: Cause | None = None) -> None:
        """Close the room, in any state. Idempotent.

        Before the room succeeds, this aborts it, and decode receives the cause.
        """

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the event loop, when the room ends."""


class DecodeRoomPort(Protocol):
    """Decode's side of a room."""

    @property
    def pages(self) -> PageIndices:
        """The room's pages, in the order of the prompt, followed by its row if the pool has rows.

        See `layout.Places`.
        """

    async def landed(self) -> bytes:
        """Wait until all pages land; returns prefill's handoff.

        Raises: the room's error.
        """

    def keep(self, owner: Hashable) -> PageIndices:
        """Transfer the pages to `owner`, and return them. Call this after `landed`."""

    def close(self, cause: Cause | None = None) -> None:
        """Close the room, in any state. Idempotent.

        Before all pages land, this aborts the room, and prefill receives the cause.
        """
