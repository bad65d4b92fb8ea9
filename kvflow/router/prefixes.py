"""Which prompts a worker is likely to have in its cache: those that it was sent last."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable

from kvflow.router.prompts import Chain, chunk_bytes

BYTES_PER_TOKEN = 4  # of token ids; of English text about as many
# Of the prompts of one worker: two million tokens, for which some 20 MB of hashes are kept.
MAX_BYTES = 1 << 23


class KnownPrefixes:
    """The prompts that one worker was sent, as far as they may still be in its cache, by the hashes
    of `prompts.py`.

    The least recently used goes first, and of a prompt its end before its beginning: what is known
    of a prompt is always its beginning.
    """

    def __init__(self) -> None:
        self.bytes = 0  # of prompts; what several have in common once
        self.limit_bytes = 0
        # bytes of a chunk, by hash; the last one was used last.
        self._known: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def resize(self, tokens: int) -> None:
        """Know no more than a cache of so many tokens can hold; 0: the worker caches nothing."""
        self.limit_bytes = min(tokens * BYTES_PER_TOKEN, MAX_BYTES)
        self._shrink()

    def matched(self, chains: Iterable[Chain]) -> int:
        """How many chunks these prompts begin with that are known, over all of them."""
        if not self._known:
            return 0
        known = self._known
        return sum(
            bisect.bisect_left(chain, True, key=lambda one: one not in known) for chain in chains
        )

    def note(self, chains: Iterable[Chain]) -> None:
        """The worker is sent these prompts."""
        if not self.limit_bytes:
            return
        for chain in chains:
            for index in range(len(chain) - 1, -1, -1):
                one = chain[index]
                if one in self._known:
                    self._known.move_to_end(one)
                else:
                    self._known[one] = size = chunk_bytes(index)
                    self.bytes += size
            self._shrink()

    def forget(self) -> None:
        """Its cache is empty, or not the one that it was."""
        self._known.clear()
        self.bytes = 0

    def _shrink(self) -> None:
        while self.bytes > self.limit_bytes:
            self.bytes -= self._known.popitem(last=False)[1]
