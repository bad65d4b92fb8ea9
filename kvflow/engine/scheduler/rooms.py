"""The two halves of a room, as the engines use them. `node.py` hands them out; tests and `single.py` have their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from kvflow.protocols.errors import Cause
from kvflow.protocols.pages.layout import PageIndices


class PrefillSession(Protocol):
    """Prefill's half. Every method may raise the room's error once it has ended."""

    async def matched(self) -> int:
        """Decode's half is here; returns how many tokens decode has already."""

    def send(self, pages: PageIndices, *, last: bool = False, handoff: bytes = b"") -> None:
        """Queue one chunk, full pages only before the last; the pages are held until their write has ended."""

    async def done(self) -> None:
        """Every write has landed."""

    def close(self, cause: Cause | None = None) -> None:
        """Idempotent, in any state; before success, decode is told why."""

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the loop, when the room has ended."""


class DecodeSession(Protocol):
    """Decode's half."""

    @property
    def pages(self) -> PageIndices:
        """One per page of the prompt."""

    async def landed(self) -> bytes:
        """All pages are here; returns prefill's hand-over. Raises the room's error."""

    def keep(self, owner: Hashable) -> PageIndices:
        """After `landed`: the pages belong to `owner` from now on."""

    def close(self, cause: Cause | None = None) -> None:
        """Idempotent, in any state; before `landed`, the room is aborted."""
