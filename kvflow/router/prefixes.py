"""The prompts that a worker probably has in its cache: those sent to it most recently."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable

from kvflow.router.prompts import Chain, chain_bytes, chunk_bytes

BYTES_PER_TOKEN = 4  # bytes of a token id; also about the length of an English token
# The limit per worker: two million tokens of prompts, whose hashes take some 20 MB in the router.
MAX_BYTES = 1 << 23


class KnownPrefixes:
    """The prompts that were sent to one worker and may still be in its cache.

    They are kept as the hashes of `prompts.py`. The least recently used chunk is dropped first. The
    end of a prompt is dropped before its beginning, so the known chunks of a prompt are always its
    first ones.
    """

    def __init__(self) -> None:
        self.bytes = 0  # bytes of the known prompts; a common beginning counts once
        self.limit_bytes = 0
        # The size of each chunk in bytes, by its hash, least recently used first.
        self._known: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def resize(self, tokens: int) -> None:
        """Limit the known prompts to `MAX_BYTES`, and to what a cache of `tokens` tokens can hold.

        `tokens` is 0 if the worker has no cache.
        """
        self.limit_bytes = min(tokens * BYTES_PER_TOKEN, MAX_BYTES)
        self._shrink()

    def matched(self, chains: Iterable[Chain]) -> int:
        """Return the number of leading chunks that are known, summed over these prompts."""
        return sum(map(self._known_of, chains)) if self._known else 0

    def missing_tokens(self, chains: Iterable[Chain]) -> int:
        """Return about how many tokens of these prompts follow their known chunks.

        The incomplete chunk at the end of each prompt counts as a whole one.
        """
        return sum(
            (chain_bytes(len(chain)) + chunk_bytes(len(chain)) - chain_bytes(self._known_of(chain)))
            // BYTES_PER_TOKEN
            for chain in chains
        )

    def _known_of(self, chain: Chain) -> int:
        known = self._known
        # Bisection is valid because the known chunks of a prompt are always its first ones.
        return bisect.bisect_left(chain, True, key=lambda one: one not in known)

    def note(self, chains: Iterable[Chain]) -> None:
        """Record that these prompts are being sent to the worker."""
        if not self.limit_bytes:
            return
        for chain in chains:
            # The first chunk comes last, so that it counts as the most recently used one.
            for index in range(len(chain) - 1, -1, -1):
                one = chain[index]
                if one in self._known:
                    self._known.move_to_end(one)
                else:
                    self._known[one] = size = chunk_bytes(index)
                    self.bytes += size
            self._shrink()

    def forget(self) -> None:
        """Forget all prompts, because the worker emptied or replaced its cache."""
        self._known.clear()
        self.bytes = 0

    def _shrink(self) -> None:
        while self.bytes > self.limit_bytes:
            self.bytes -= self._known.popitem(last=False)[1]
