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
    STORAGE = 2  # without page numbers: a stored page is found by its hash


Digests: TypeAlias = NDArray[np.int64]  # page hashes, 32 bytes each: big-endian [pages, 4]


class Stored(NamedTuple):
    """Consecutive pages of a prompt that became readable in `tier`."""

    tier: Tier
    digests: Digests
    parent: int | None  # event hash of the page before; None for the first page of a prompt
    tokens: bytes  # tokens of these pages, as `hashes.token_bytes` returns them
    namespace: Namespace

    @property
    def hashes(self) -> list[int]:
        return event_hashes(self.digests)


class Removed(NamedTuple):
    """Pages that can no longer be read in `tier`, from the last page of the prompt backwards."""

    tier: Tier
    digests: Digests

    @property
    def hashes(self) -> list[int]:
        return event_hashes(self.digests)


class Cleared(NamedTuple):
    """Event after which no page can be read in any tier: the cache was flushed, or a snapshot of it
    follows.
    """


Event: TypeAlias = Stored | Removed | Cleared
CLEARED = Cleared()


def event_hashes(digests: Digests) -> list[int]:
    """Return the numbers that name pages in events: the first 64 bits of each digest, signed."""
    # The array is big-endian int64, so its first column already is that number.
    hashes: list[int] = digests[:, 0].tolist()
    return hashes
