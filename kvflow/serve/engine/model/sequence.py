"""One request's tokens, pages and row, in numpy arrays, so that steps need no Python loops."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, Places, PoolLayout

Prompt = SequenceOf[int] | NDArray[np.integer]


class Sequence:
    """The tokens of one request, and its places in the pool.

    `length` is the number of tokens known so far, `computed` the number whose state is in the pool.
    The first `shared` pages belong to a cache. `rows` holds the request's row, and is empty if the
    pool has no rows.

    One thread at a time changes a sequence: the model thread during a step, otherwise the event
    loop. In an engine, only the event loop changes the pages and the row, and never during a step.
    """

    __slots__ = (
        "_pages",
        "computed",
        "length",
        "owner",
        "page_count",
        "page_size",
        "prompt_length",
        "rows",
        "shared",
        "tokens",
    )

    def __init__(
        self, owner: Hashable, prompt: Prompt, max_new_tokens: int, page_size: int
    ) -> None:
        self.owner, self.page_size = owner, page_size
        self.prompt_length = self.length = len(prompt)
        # Allocated once for the longest completion, so that `append` never copies.
        self.tokens: NDArray[np.int64] = np.empty(self.length + max_new_tokens, dtype=np.int64)
        self.tokens[: self.length] = prompt
        self.computed = self.shared = 0
        self._pages: PageIndices = np.empty(-(-self.tokens.size // page_size), dtype=np.int32)
        self.page_count = 0
        self.rows: PageIndices = NO_PLACES

    @property
    def places(self) -> tuple[PageIndices, PageIndices]:
        """The pages that the sequence owns (a view, like `pages`), and its row, if it has one."""
        return self._pages[self.shared : self.page_count], self.rows

    @property
    def pages(self) -> PageIndices:
        """A view of the sequence's pages, valid until the next `add_pages`."""
        return self._pages[: self.page_count]

    def begin_with(self, pages: PageIndices) -> None:
        """Begin with full, computed pages of a cache, which continues to own them."""
        self.add_pages(pages)
        self.shared, self.computed = self.page_count, self.page_count * self.page_size

    def add_pages(self, pages: PageIndices) -> None:
        self._pages[self.page_count : self.page_count + pages.size] = pages
        self.page_count += pages.size

    def add(self, places: Places) -> None:
        """Add places by space: pages and, if the pool has rows, a row."""
        pages, *rows = places
        self.add_pages(pages)
        self.rows = rows[0] if rows and rows[0].size else self.rows

    def start_again(self) -> tuple[PageIndices, PageIndices]:
        """Forget all that was computed; return the owned places, which the caller must free."""
        pages, rows = self.places
        places = pages.copy(), rows
        self.computed = self.page_count = self.shared = 0
        self.rows = NO_PLACES
        return places

    @property
    def prompt_pages(self) -> int:
        return -(-self.prompt_length // self.page_size)

    def pages_missing(self, tokens: int) -> int:
        return max(0, -(-tokens // self.page_size) - self.page_count)

    def append(self, token_id: int) -> None:
        self.tokens[self.length] = token_id
        self.length += 1


def in_one_list(layout: PoolLayout, pages: PageIndices, rows: PageIndices) -> PageIndices:
    """Return pages and rows in one list. The engine's pools have one space of pages, and at most
    one of rows.
    """
    return layout.numbered((pages, rows) if layout.num_rows else (pages,))
