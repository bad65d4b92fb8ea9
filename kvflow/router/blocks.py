"""Which blocks a worker has in its cache, by the events that it publishes, and those that it is
about to have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvflow.protocols.wire.kv_events import BlockEvent, RemovedBlocks, StoredBlocks

MAX_BLOCKS = 1 << 20  # of one worker: some 150 MB; further ones are as if it had not told of them
# By the names of vLLM and of SGLang, see `wire.kv_events.media_of`.
_BIT_OF_MEDIUM = {"GPU": 1, "CPU": 2, "CPU_PINNED": 2, "STORAGE": 4, "DISK": 4, "EXTERNAL": 8}
_OTHER_MEDIUM = 16

BlockHashes = list[int]  # of a prompt's whole blocks, from its beginning on


class KnownBlocks:
    """A worker's blocks by their hashes, on whatever medium.

    What it is sent counts until its answer is there: by then its events have told."""

    def __init__(self) -> None:
        self._media: dict[int, int] = {}
        self._expected: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._media)

    def apply(self, event: BlockEvent) -> None:
        if isinstance(event, StoredBlocks):
            bit = _BIT_OF_MEDIUM.get(event.medium or "GPU", _OTHER_MEDIUM)
            for one in event.block_hashes[: MAX_BLOCKS - len(self._media)]:
                self._media[one] = self._media.get(one, 0) | bit
        elif isinstance(event, RemovedBlocks):
            bit = _BIT_OF_MEDIUM.get(event.medium or "GPU", _OTHER_MEDIUM)
            for one in event.block_hashes:
                media = self._media.pop(one, 0) & ~bit
                if media:
                    self._media[one] = media
        else:
            self._media.clear()

    def clear(self) -> None:
        self._media.clear()

    def matched(self, hashes: Sequence[int]) -> int:
        """How many blocks a prompt begins with that the worker has, or is about to have."""
        media, expected = self._media, self._expected
        for count, one in enumerate(hashes):
            if one not in media and one not in expected:
                return count
        return len(hashes)

    def expect(self, hashes: Sequence[int]) -> None:
        """A request with this prompt is sent to the worker."""
        self._expected.update(hashes)

    def settle(self, hashes: Sequence[int]) -> None:
        """That request has ended."""
        expected = self._expected
        for one in hashes:
            if expected[one] > 1:
                expected[one] -= 1
            else:
                del expected[one]
