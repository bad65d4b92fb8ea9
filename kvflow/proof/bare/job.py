"""One request as one node receives it.

Both legs of a request have the same room, and normally the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from kvflow.proof.sim.variety import PAGE_SIZE
from kvflow.protocols.errors import Cause, Code

Issue = Callable[[int, Cause], Cause]
"""A function that records a cause under the id of its room, and returns the cause."""


@dataclass(eq=False)
class _Job:
    room: int
    tokens: int
    digest: bytes
    issue: Issue
    _: KW_ONLY
    rows: int = 0  # 0 or 1, the same for every request
    deadline_s: float | None = None
    refused: bool = False
    succeeded: bool = field(default=False, init=False)
    at: Any = field(default=None, init=False)  # the `Room` or `Leg`, once a room is open
    error: Cause | None = field(default=None, init=False)  # the cause, if no room was opened

    @property
    def num_pages(self) -> int:
        return -(-self.tokens // PAGE_SIZE)

    @property
    def num_places(self) -> int:
        return self.num_pages + self.rows

    def cause(self, code: Code, text: str) -> Cause:
        """Return a cause that names its room, so that the oracle can verify who receives it."""
        return self.issue(self.room, Cause(code, f"{text} #{self.room}"))


@dataclass(eq=False)
class DecodeJob(_Job):
    group: int
    _: KW_ONLY
    prefix_pages: int = 0
    announces: bool = True
    offers_after_s: float | None = None
    # True if decode offers no pages until prefill begins the room or `offers_after_s` has passed.
    waits: bool = False
    kept_s: float = 0.0

    def __post_init__(self) -> None:
        self.prefix_pages = min(self.prefix_pages, self.num_pages)

    @property
    def tokens_left(self) -> int:
        return max(0, self.tokens - self.prefix_pages * PAGE_SIZE)


@dataclass(eq=False)
class PrefillJob(_Job):
    chunks: tuple[int, ...]
    _: KW_ONLY
    fails_at: int | None = None
    rendezvous_s: float | None = None
    # If None, the job takes no turn, and prefill never sends Begun.
    begins_after_s: float | None = None

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
