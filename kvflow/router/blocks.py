"""The blocks that a worker's events report as cached, and those that it will cache soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvflow.protocols.wire.kv_events import BlockEvent, RemovedBlocks, StoredBlocks

MAX_BLOCKS = 1 << 20  # limit per worker (some 150 MB); further blocks are ignored
# vLLM and SGLang name media differently (see `wire.kv_events.media_of`).
_BIT_OF_MEDIUM = {"GPU": 1, "CPU": 2, "CPU_PINNED": 2, "STORAGE": 4, "DISK": 4, "EXTERNAL": 8}
_OTHER_MEDIUM = 16

BlockHashes = list[int]  # one hash for each whole block of a prompt, in order


class KnownBlocks:
    """The blocks of one worker by their hashes, on any medium.

    While a request is under way, its blocks count as cached too. By its end, the worker's events
    have reported them.
    """

    def __init__(self) -> None:
        self._media: dict[int, int] = {}
        self._expected: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._media)

    def apply(self, event: BlockEvent) -> None:
        if isinstance(event, StoredBlocks):
            bit = _BIT_OF_MEDIUM.get(event.medium or "GPU", _OTHER_MEDIUM)
            for one in event.block_hashes:
                media = self._media.get(one, 0)
                # A full index takes no new block, but still records further media of a known one.
                if media or len(self._media) < MAX_BLOCKS:
                    self._media[one] = media | bit
        elif isinstance(event, RemovedBlocks):
            bit = _BIT_OF_MEDIUM.get(event.medium or "GPU", _OTHER_MEDIUM)
            for one in event.block_hashes:
                # A block stays known until it is removed from its last medium.
                media = self._media.pop(one, 0) & ~bit
                if media:
                    self._media[one] = media
        else:
            self._media.clear()

    def clear(self) -> None:
        self._media.clear()

    def matched(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt the worker has, or will have soon."""
        media, expected = self._media, self._expected
        for count, one in enumerate(hashes):
            if one not in media and one not in expected:
                return count
        return len(hashes)

    def expect(self, hashes: Sequence[int]) -> None:
        """Count the blocks of a request to this worker as cached from now on."""
        self._expected.update(hashes)

    def settle(self, hashes: Sequence[int]) -> None:
        """Undo `expect` for a request that ended."""
        expected = self._expected
        for one in hashes:
            if expected[one] > 1:
                expected[one] -= 1
            else:
                del expected[one]
