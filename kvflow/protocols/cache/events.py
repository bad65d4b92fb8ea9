"""Events of the prefix cache (I10): pages that a tier has from now on, and pages that it lost."""

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


Digests: TypeAlias = NDArray[np.int64]  # big-endian [pages, 4]: page hashes of 32 bytes


class Stored(NamedTuple):
    """Consecutive pages of a prompt that can be read in `tier` from now on."""

    tier: Tier
    digests: Digests
    parent: int | None  # event hash of the page before; None for the first page of a prompt
    tokens: bytes  # of these pages, see `hashes.token_bytes`
    namespace: Namespace

    @property
    def hashes(self) -> list[int]:
        return event_hashes(self.digests)


class Removed(NamedTuple):
    """Pages that can no longer be read in `tier`, the last of a prompt first."""

    tier: Tier
    digests: Digests

    @property
    def hashes(self) -> list[int]:
        return event_hashes(self.digests)


class Cleared(NamedTuple):
    """No page can be read any more, in any tier."""


Event: TypeAlias = Stored | Removed | Cleared
CLEARED = Cleared()


def event_hashes(digests: Digests) -> list[int]:
    """Return the names of pages in events: the first 64 bits of each digest as a signed number."""
    # The array is big-endian int64, so its first column already is that number.
    hashes: list[int] = digests[:, 0].tolist()
    return hashes
