"""One request as one node receives it.

Both legs of a request have the same room, and normally the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvflow.proof.sim.variety import PAGE_SIZE
from kvflow.protocols.errors import Cause, Code

Issue = Callable[[int, Cause], Cause]
"""A function that records the cause given to a room, by the room's id, and returns it."""


class _Job:
    def __init__(
        self,
        room: int,
        tokens: int,
        digest: bytes,
        rows: int,
        deadline_s: float | None,
        refused: bool,
        issue: Issue,
    ) -> None:
        """`rows` is the number of rows of every request, 0 or 1."""
        self.room, self.tokens, self.digest, self.rows = room, tokens, digest, rows
        self.deadline_s, self.refused = deadline_s, refused
        self.succeeded = False
        self.at: Any = None
        self.error: Cause | None = None  # the cause, if no room was opened
        self._issue = issue

    @property
    def num_pages(self) -> int:
        return -(-self.tokens // PAGE_SIZE)

    @property
    def num_places(self) -> int:
        return self.num_pages + self.rows

    def cause(self, code: Code, text: str) -> Cause:
        """Return a cause that names its room, so that the oracle can verify who receives it."""
        return self._issue(self.room, Cause(code, f"{text} #{self.room}"))


class DecodeJob(_Job):
    def __init__(
        self,
        room: int,
        tokens: int,
        digest: bytes,
        group: int,
        issue: Issue,
        *,
        rows: int = 0,
        deadline_s: float | None = None,
        refused: bool = False,
        prefix_pages: int = 0,
        announces: bool = True,
        offers_after_s: float | None = None,
        waits: bool = False,
        kept_s: float = 0.0,
    ) -> None:
        super().__init__(room, tokens, digest, rows, deadline_s, refused, issue)
        self.group = group
        self.prefix_pages = min(prefix_pages, self.num_pages)
        self.announces, self.offers_after_s, self.kept_s = announces, offers_after_s, kept_s
        # Decode holds the pages back until prefill begins the room, or until `offers_after_s`.
        self.waits = waits

    @property
    def tokens_left(self) -> int:
        return max(0, self.tokens - self.prefix_pages * PAGE_SIZE)


class PrefillJob(_Job):
    def __init__(
        self,
        room: int,
        tokens: int,
        digest: bytes,
        chunks: tuple[int, ...],
        issue: Issue,
        *,
        rows: int = 0,
        deadline_s: float | None = None,
        refused: bool = False,
        fails_at: int | None = None,
        rendezvous_s: float | None = None,
        begins_after_s: float | None = None,
    ) -> None:
        super().__init__(room, tokens, digest, rows, deadline_s, refused, issue)
        self.chunks, self.fails_at, self.rendezvous_s = chunks, fails_at, rendezvous_s
        # None: the job takes no turn, and prefill never sends Begun.
        self.begins_after_s = begins_after_s

    def chunks_after(self, prefix_pages: int) -> list[int]:
        """Return the sizes of the chunks to send if decode already has the first `prefix_pages`.

        The last chunk includes the row. If decode has every page, one chunk is left, without pages.
        """
        left = []
        for count in self.chunks:
            skipped = min(count, prefix_pages)
            prefix_pages -= skipped
            if count > skipped:
                left.append(count - skipped)
        left = left or [0]
        left[-1] += self.rows
        return left
