"""The two sides of a room as the engines use them; `node.py` provides them, `single.py` and tests
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from kvflow.protocols.errors import Cause
from kvflow.protocols.pages.layout import PageIndices


class PrefillRoomPort(Protocol):
    """Prefill's side. Every method may raise the room's error once the room has ended."""

    async def matched(self) -> int:
        """Wait for decode's side; returns how many tokens of the prompt decode has already."""

    def send(self, pages: PageIndices, *, last: bool = False, handoff: bytes = b"") -> None:
        """Queue one chunk, whole pages only except for the last, which ends with the row where the
        pool has rows; they are held until their write has ended. The room does not end inside of
        this call."""

    async def done(self) -> None:
        """Return when every write has landed."""

    def close(self, cause: Cause | None = None) -> None:
        """Idempotent, in any state; before success the room is aborted,
        and decode gets the cause.
        """

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the loop, when the room has ended."""


class DecodeRoomPort(Protocol):
    """Decode's side."""

    @property
    def pages(self) -> PageIndices:
        """The room's pages, in the order of the prompt; then its row, where the pool has rows
        (`layout.Places`).
        """

    async def landed(self) -> bytes:
        """Wait until all pages have landed; returns prefill's hand-over.

        Raises: the room's error.
        """

    def keep(self, owner: Hashable) -> PageIndices:
        """After `landed`: make `owner` the owner of the pages."""

    def close(self, cause: Cause | None = None) -> None:
        """Idempotent, in any state; before `landed` the room is aborted, and prefill gets the
        cause.
        """
