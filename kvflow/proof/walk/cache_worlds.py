"""Bounded worlds for the walk over the prefix index. Each answers one question."""

from __future__ import annotations

from typing import NamedTuple

from kvflow.protocols.cache.events import Tier

SAVE, STORE, LOAD = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.STORAGE), (Tier.HOST, Tier.DEVICE)
Route = tuple[Tier, Tier]
Prompt = tuple[int, ...]
"""A prompt as a tuple of pages, each of which holds one token."""

FIRST: Prompt = (1, 2, 3, 4)
FORKS: tuple[Prompt, ...] = ((1, 2, 5, 6), (1, 7), (1, 2, 3, 8))
"""Prompts that differ from `FIRST` after its second, its first and its third page."""


class CacheBounds(NamedTuple):
    """Limits on the number of events of each kind. Ends of writes and locks are not limited."""

    routes: tuple[Route, ...] = (SAVE,)
    writes: int = 2
    splits: int = 2
    evictions: int = 1
    flushes: int = 1  # after a flush the first prompt may be cached again
    locks: int = 0
    stales: int = 0  # writes whose end may be reported twice
    on_device: bool = True  # if False, the first prompt starts on the host only
    on_host: bool = False


WORLDS: dict[str, tuple[str, CacheBounds]] = {
    "small": ("two writes to the host and two splits", CacheBounds(evictions=0, flushes=0)),
    "evicted": ("the same, and an eviction", CacheBounds(flushes=0)),
    "flushed": ("the same, and a flush", CacheBounds(evictions=0)),
    "writes": ("the same, with an eviction and a flush", CacheBounds()),
    "stale": (
        "an end is told twice, after a flush too",
        CacheBounds(splits=1, evictions=0, stales=1),
    ),
    "stored": ("what is on the host is stored", CacheBounds((STORE,), on_host=True, flushes=0)),
    "through": (
        "to the host, and on to storage",
        CacheBounds((SAVE, STORE), writes=3, splits=1, evictions=0, flushes=0),
    ),
    "loaded": (
        "what is on the host alone is loaded and stored",
        CacheBounds((LOAD, STORE), evictions=0, on_device=False, on_host=True),
    ),
    "locked": (
        "a request reads what is saved, split and evicted",
        CacheBounds(splits=1, flushes=0, locks=1),
    ),
}
