"""Planted bugs of caches, each of which once existed or could exist. They are installed from
outside; seeds must find each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.node import DecodeNode, PrefillNode
from kvflow.proof.cached.run import simulate
from kvflow.proof.cached.scheduler import CachingScheduler
from kvflow.proof.sim.pages import books_of
from kvflow.proof.sim.plants import Plant, hunted, installed
from kvflow.proof.sim.swap import swapped
from kvflow.proof.walk.cache_plants import PLANTS as OF_THE_INDEX
from kvflow.proof.walk.plants import PLANTS as OF_THE_WALK
from kvflow.serve.cache.prefix import Prefix, PrefixCache
from kvflow.serve.cache.storage import file as files

Installed = AbstractContextManager[object]


def _torn_file_accepted() -> Installed:
    """Take every file of the right length for a page."""
    return swapped(files, "flaw_in", lambda *_: "")


def _doubtful_page_cached() -> Installed:
    """Keep the pages of a failed room in the cache, most of them written, whoever owns them now."""

    def room_failed(self: Any, node: DecodeNode, job: Any, room: DecodeRoom, prefix: Any) -> None:
        owners = {books_of(node.pages).owners[page] for page in room.pages.tolist()}
        if len(owners) != 1 or None in owners:
            return
        owner, cached = object(), int(prefix.pages.size)
        node.pool.pages.move(room.pages, owners.pop(), owner)
        pages = np.concatenate([prefix.pages, room.pages])
        kept = (
            self._caches[id(node)].cache.keep(np.array(job.prompt), pages, owner, prefix) - cached
        )
        node.pool.pages.give_back(room.pages[max(kept, 0) :], owner)

    return swapped(CachingScheduler, "room_failed", room_failed)


def _failed_prompt_cached() -> Installed:
    """Keep all pages of a prompt at prefill, computed or not."""
    original = CachingScheduler.engine_failed

    def engine_failed(
        self: Any,
        node: PrefillNode,
        job: Any,
        room: PrefillRoom,
        pages: Any,
        owner: object,
        prefix: Any,
    ) -> int:
        original(self, node, job, room, pages, owner, prefix)
        kept: int = self._caches[id(node)].cache.keep(np.array(job.prompt), pages, owner, prefix)
        return kept

    return swapped(CachingScheduler, "engine_failed", engine_failed)


def _loaded_not_held() -> Installed:
    """Let pages that were loaded for a prompt be evicted before the prompt's turn."""
    original = PrefixCache.load

    async def load(self: PrefixCache, *arguments: Any, **named: Any) -> Prefix:
        prefix = await original(self, *arguments, **named)
        prefix.release()
        return prefix

    return swapped(PrefixCache, "load", load)


_BREAKS = {
    "ack publishes the node of the time": "I5",
    "child before parent": "I10",
    "event at enqueue": "I10",
    "lock not copied at split": "I5",
    "readers not copied at split": "I5",
    "failed copy taken for one": "I10",
    "source of a copy let go": "I13",
    "failed write keeps its pages": "I5",
    "eviction not told": "I10",
}
"""Plants of the walk that seeds must find, too, and the invariants that they break here."""

PLANTS = (
    *(Plant(p.name, p.text, p.install, _BREAKS[p.name]) for p in OF_THE_INDEX if p.name in _BREAKS),
    Plant("torn file accepted", "a file of the right length is a page", _torn_file_accepted, "I10"),
    Plant(
        "doubtful page cached", "pages of a room that failed are kept", _doubtful_page_cached, "I2"
    ),
    Plant(
        "loaded pages not held",
        "what is loaded for a prompt is not locked",
        _loaded_not_held,
        "I14",
    ),
    Plant(
        "failed prompt cached",
        "pages that were not computed are kept",
        _failed_prompt_cached,
        "I10",
    ),
    *(
        Plant(p.name, p.text, p.install, p.invariant)
        for p in OF_THE_WALK
        if p.name == "chunk without pages lands at once"
    ),
)


def all_plants() -> tuple[Plant, ...]:
    return PLANTS


def planted(name: str) -> Installed:
    """Return a context that installs the named plant, if any. Raises: MisuseError."""
    return installed(name, PLANTS, "a cache")


def hunt(
    name: str, seeds: Sequence[int], say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Find the first seed that shows a plant, and what it broke; no seed if all pass."""
    with planted(name):
        return hunted(name, seeds, simulate, say)
