"""Planted bugs in caches. Each once existed or could exist, and some seed must find it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvflow.handlers.rooms import DecodeRoom
from kvflow.node import DecodeNode, PrefillNode
from kvflow.proof.cached.scheduler import CachingScheduler
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.pages import books_of
from kvflow.proof.sim.swap import swapped
from kvflow.proof.walk.cache_plants import PLANTS as OF_THE_INDEX
from kvflow.proof.walk.plants import PLANTS as WALKED
from kvflow.serve.cache.prefix import Prefix, PrefixCache
from kvflow.serve.cache.storage import file as files

PLANTS: list[Plant] = []
bug = planting(PLANTS)


@bug("torn file accepted", cache=(1, "I10"))
def _torn_file_accepted() -> Installed:
    """A file of the right length is a page."""
    return swapped(files, "flaw_in", lambda *_: "")


@bug("doubtful page cached", cache=(0, "I2"))
def _doubtful_page_cached() -> Installed:
    """Pages of a room that failed are kept."""
    # The cache takes over the pages of a failed room, most of which were written.

    def room_failed(self: Any, node: DecodeNode, job: Any, room: DecodeRoom, prefix: Any) -> None:
        owners = {books_of(node.pages).owners[page] for page in room.pages.tolist()}
        if len(owners) != 1 or None in owners:
            return
        owner, cached = object(), int(prefix.pages.size)
        node.pool.pages.move(room.pages, owners.pop(), owner)
        pages = np.concatenate([prefix.pages, room.pages])
        cache = self._caches[id(node)].cache
        kept = cache.keep(np.array(job.prompt), pages, owner, prefix) - cached
        node.pool.pages.give_back(room.pages[max(kept, 0) :], owner)

    return swapped(CachingScheduler, "room_failed", room_failed)


@bug("failed prompt cached", cache=(4, "I10"))
def _failed_prompt_cached() -> Installed:
    """Pages that were not computed are kept."""
    original = CachingScheduler.engine_failed

    def engine_failed(
        self: Any, node: PrefillNode, job: Any, room: Any, pages: Any, owner: object, prefix: Any
    ) -> int:
        original(self, node, job, room, pages, owner, prefix)
        kept: int = self._caches[id(node)].cache.keep(np.array(job.prompt), pages, owner, prefix)
        return kept

    return swapped(CachingScheduler, "engine_failed", engine_failed)


@bug("loaded pages not held", cache=(1, "I14"))
def _loaded_not_held() -> Installed:
    """What is loaded for a prompt is not locked."""
    original = PrefixCache.load

    async def load(self: PrefixCache, *arguments: Any, **named: Any) -> Prefix:
        prefix = await original(self, *arguments, **named)
        prefix.release()
        return prefix

    return swapped(PrefixCache, "load", load)


OF_THE_WALK = {
    "ack publishes the node of the time": (12, "I5"),
    "child before parent": (4, "I10"),
    "event at enqueue": (0, "I10"),
    "lock not copied at split": (6, "I5"),
    "readers not copied at split": (12, "I5"),
    "failed copy taken for one": (1, "I10"),
    "source of a copy let go": (1, "I13"),
    "eviction not told": (0, "I10"),
    "chunk without pages lands at once": (1, "I4"),
}
"""Plants of the exhaustive walk that seeds must find too, with a seed that finds each and the
invariant that it breaks.
"""
_walked: list[Any] = [*OF_THE_INDEX, *WALKED]
PLANTS += [
    Plant(plant.name, plant.text, plant.install, {"cache": OF_THE_WALK[plant.name]})
    for plant in _walked
    if plant.name in OF_THE_WALK
]
