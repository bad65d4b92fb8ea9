"""Events of the prefix cache (I10): pages that became readable in a tier, or left it."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.cache.hashes import Namespace


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1
    STORAGE = 2  # has no page numbers, because a store finds a page by its hash


Digests: TypeAlias = NDArray[np.int64]  # page hashes of 32 bytes: big-endian int64 [pages, 4]


class Stored(NamedTuple):
    """Event: consecutive pages of a prompt became readable in `tier`."""

    tier: Tier
    digests: Digests
    parent: int | None  # event hash of the preceding page; None at the beginning of a prompt
    tokens: bytes  # tokens of these pages, as `hashes.token_bytes` returns them
    namespace: Namespace

    @property
    def hashes(self) -> list[int]:
        return event_hashes(self.digests)


class Removed(NamedTuple):
    """Event: pages can no longer be read in `tier`. Later pages of the prompt come first."""

    tier: Tier
    digests: Digests

    @property
    def hashes(self) -> list[int]:
        return event_hashes(self.digests)


class Cleared(NamedTuple):
    """Event: subscribers must forget all pages in all tiers. The cache was flushed, or a snapshot
    of it follows.
    """


Event: TypeAlias = Stored | Removed | Cleared
CLEARED = Cleared()


def event_hashes(digests: Digests) -> list[int]:
    """Return the event hashes of pages: the first 64 bits of each digest, as signed integers."""
    # The array is big-endian int64, so its first column has these integers.
    hashes: list[int] = digests[:, 0].tolist()
    return hashes
