"""Canaries: words in reused pages that reveal late writes.

Prefill fills its whole pool with one word. At decode, the next owner of the pages writes another
word into their marks. Marks are the first and the last word of every component of a page, so a page
of 32 layers has 128 marks. A late write that reaches a page hits at least one mark.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import PageIndices

WRITTEN = np.uint64(0xE7E7E7E7E7E7E7E7)  # every word that prefill sends
CANARY = np.uint64(0x5A5A5A5A5A5A5A5A)  # every word that the next owner writes
# This bounds the memory of a check: its temporary array is as large as the pages that it compares.
_PAGES_AT_ONCE = 16


class CanaryPool:
    """The words of a page-first pool in host memory. Methods take lists of pages, int32 [n]."""

    def __init__(self, pool: PagedPool) -> None:
        """Map the words of `pool`.

        Raises: MisuseError unless one buffer holds all components, and each has only whole words.
        """
        layout = pool.layout
        edges = [
            edge for c in layout.components for edge in (c.offset, c.offset + c.size_bytes - 8)
        ]
        if len(layout.buffers) != 1 or any(edge % 8 for edge in edges):
            raise MisuseError("canaries need a page-first pool of whole words")
        (buffer,) = layout.buffers
        memory = (ctypes.c_uint64 * (buffer.size_bytes // 8)).from_address(buffer.address)
        # `_words` below uses the bare address, so this reference keeps the memory alive.
        self._pool = pool
        self._words: NDArray[np.uint64] = np.ctypeslib.as_array(memory).reshape(
            layout.num_pages, -1
        )
        self._edges: NDArray[Any] = np.array(edges, dtype=np.int64) // 8

    @property
    def marks_per_page(self) -> int:
        return len(self._edges)

    def fill(self) -> None:
        """Fill the whole pool with the word that prefill sends."""
        self._words[:] = WRITTEN

    def moved(self, pages: PageIndices) -> float:
        """Return the fraction of `pages` whose last word is prefill's."""
        return float(np.count_nonzero(self._words[pages, -1] == WRITTEN)) / len(pages)

    def mark(self, pages: PageIndices, word: np.uint64 = CANARY, *, whole: bool = False) -> None:
        """Write `word` into the marks of `pages`, then everywhere if `whole`."""
        self._words[pages[:, None], self._edges] = word
        for few in self._in_turn(pages) if whole else ():
            self._words[few] = word

    def foreign_bytes(
        self, pages: PageIndices, word: np.uint64 = CANARY, *, whole: bool = False
    ) -> NDArray[np.int64]:
        """Return how many bytes of each page's marks, or of each whole page, differ from `word`."""
        if not whole:
            return _differing(self._words[pages[:, None], self._edges], word)
        return np.concatenate([_differing(self._words[few], word) for few in self._in_turn(pages)])

    @staticmethod
    def _in_turn(pages: PageIndices) -> list[PageIndices]:
        return [
            pages[start : start + _PAGES_AT_ONCE] for start in range(0, len(pages), _PAGES_AT_ONCE)
        ]


def _differing(words: NDArray[np.uint64], word: np.uint64) -> NDArray[np.int64]:
    """Return the number of bytes that differ from `word` in each row of `words` [n, m]."""
    found = np.zeros(len(words), dtype=np.int64)
    # Only rows that differ are compared by bytes; in a correct run no row differs.
    for row in np.flatnonzero((words != word).any(axis=1)):
        found[row] = np.count_nonzero((words[row] ^ word).view(np.uint8))
    return found
