"""Events of the prefix cache (I10): which pages a tier has from now on, and which no more."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.cache.hashes import Namespace


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1
    STORAGE = 2  # no page numbers here: what is stored is found by page hash


Digests: TypeAlias = NDArray[np.int64]  # big-endian [pages, 4]: page hashes of 32 bytes


class Stored(NamedTuple):
    """Consecutive pages of a prompt that can be read in `tier` from now on."""

    tier: Tier
    digests: Digests
    parent: int | None  # event hash of the page before them; None: they begin the prompt
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
    """Nothing can be read any more, in any tier."""


Event: TypeAlias = Stored | Removed | Cleared
CLEARED = Cleared()


def event_hashes(digests: Digests) -> list[int]:
    """What events call these pages: the first 64 bits of each digest as a signed number."""
    hashes: list[int] = digests[:, 0].tolist()
    return hashes
