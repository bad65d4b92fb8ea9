"""The prompts that a worker probably has in its cache: those that it was sent last."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable

from kvflow.router.prompts import Chain, chunk_bytes

BYTES_PER_TOKEN = 4  # of token ids; English text has about as many
# A limit per worker: two million tokens of prompts, for which the router keeps some 20 MB of
# hashes.
MAX_BYTES = 1 << 23


class KnownPrefixes:
    """The prompts that one worker was sent and may still have in its cache, by the hashes of
    `prompts.py`.

    The least recently used chunk is dropped first, and the end of a prompt before its beginning, so
    that the known part of a prompt is always its beginning.
    """

    def __init__(self) -> None:
        self.bytes = 0  # size of the prompts; a common beginning counts once
        self.limit_bytes = 0
        # The bytes of a chunk by its hash, in the order of last use.
        self._known: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def resize(self, tokens: int) -> None:
        """Limit the known prompts to what a cache of `tokens` tokens can hold; 0 where the worker
        has no prefix cache.
        """
        self.limit_bytes = min(tokens * BYTES_PER_TOKEN, MAX_BYTES)
        self._shrink()

    def matched(self, chains: Iterable[Chain]) -> int:
        """Return how many leading chunks of these prompts, all together, are known."""
        if not self._known:
            return 0
        known = self._known
        # Bisection is valid because the known chunks of a prompt are always its first ones.
        return sum(
            bisect.bisect_left(chain, True, key=lambda one: one not in known) for chain in chains
        )

    def note(self, chains: Iterable[Chain]) -> None:
        """Note that the worker is being sent these prompts."""
        if not self.limit_bytes:
            return
        for chain in chains:
            # The last chunk first: the first one is then the most recently used, and is dropped
            # last.
            for index in range(len(chain) - 1, -1, -1):
                one = chain[index]
                if one in self._known:
                    self._known.move_to_end(one)
                else:
                    self._known[one] = size = chunk_bytes(index)
                    self.bytes += size
            self._shrink()

    def forget(self) -> None:
        """Forget all prompts, because the worker's cache is empty or another one."""
        self._known.clear()
        self.bytes = 0

    def _shrink(self) -> None:
        while self.bytes > self.limit_bytes:
            self.bytes -= self._known.popitem(last=False)[1]
