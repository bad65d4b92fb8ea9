"""One request as one node receives it.

Both legs of a request have the same room, and normally the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from kvflow.proof.sim.chunks import in_chunks, regrouped, way_of
from kvflow.proof.sim.variety import LAYOUT, PAGE_SIZE
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.pages.layout import Counts, PoolLayout

Issue = Callable[[int, Cause], Cause]
"""A function that records a cause under the id of its room, and returns the cause."""


@dataclass(eq=False)
class _Job:
    room: int
    tokens: int
    digest: bytes
    issue: Issue
    _: KW_ONLY
    layout: PoolLayout = LAYOUT  # that of every pool on the side of this job
    deadline_s: float | None = None
    refused: bool = False
    succeeded: bool = field(default=False, init=False)
    at: Any = field(default=None, init=False)  # the `Room` or `Leg`, once a room is open
    error: Cause | None = field(default=None, init=False)  # the cause, if no room was opened
    # Number of places of each space that the whole prompt fills.
    wanted: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.wanted = self.layout.wanted(self.tokens)

    @property
    def num_pages(self) -> int:
        return -(-self.tokens // self.layout.page_size)

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
        super().__post_init__()
        self.prefix_pages = min(self.prefix_pages, self.num_pages)

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens that decode already has: whole pages, or the whole prompt."""
        return min(self.tokens, self.prefix_pages * self.layout.page_size)


@dataclass(eq=False)
class PrefillJob(_Job):
    chunks: tuple[int, ...]
    _: KW_ONLY
    fails_at: int | None = None
    rendezvous_s: float | None = None
    # If None, the job takes no turn, and prefill never sends Begun.
    begins_after_s: float | None = None

    def chunks_after(self, prefix_pages: int, wanted: Counts) -> tuple[Counts, ...]:
        """Return the sizes of the chunks that fill `wanted` places, if decode already has the first
        `prefix_pages` of the first space.

        If decode has every page, one chunk is left, with the row if there is one.
        """
        left = []
        for count in regrouped(self.chunks, self.layout.page_size // PAGE_SIZE):
            skipped = min(count, prefix_pages)
            prefix_pages -= skipped
            if count > skipped:
                left.append(count - skipped)
        return in_chunks(self.layout, left or [0], wanted, way_of(self.room))
