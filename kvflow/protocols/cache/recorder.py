"""What subscribers are told of the cache (I10): pages that can be read in a tier from now on, and
pages that cannot.

**A page is told of when it is there, and its parent is told of in the same tier.** Copies end in
any order, and a hole may be filled late: pages below one that is missing are held back until it
comes, with no list of them, since the tree knows its children. A page that leaves takes nothing
with it: in every tier leaves go first. So what has been told is, per tier, a tree that hangs
together from the first page of its prompts, after each single event.

**Hashes are computed when a page is first told of**, from its parent's, and stay with its node:
page hashes of `hashes.py`, 32 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvflow.protocols.cache.events import CLEARED, Event, Removed, Stored, Tier
from kvflow.protocols.cache.hashes import TOKEN_BYTES
from kvflow.protocols.cache.nodes import Node, Root, digests_of
from kvflow.protocols.machines.cached_run import RunPhase

_PRESENT = RunPhase.PRESENT


class Recorder:
    """Hears of every change of a phase, after it, and keeps the events until they are taken."""

    def __init__(self, page_size: int) -> None:
        self._page_size, self._page_bytes = page_size, page_size * TOKEN_BYTES
        self._events: list[Event] = []

    def moved(self, node: Node, tier: Tier) -> None:
        """`node` has another phase in `tier` than before.

        What a flush has forgotten is not spoken of again.
        """
        if node.detached:
            return
        bit = 1 << tier
        if node.phase[tier] is not _PRESENT:
            if node.told & bit:
                assert node.digests is not None
                node.told &= ~bit
                self._events.append(Removed(tier, node.digests[::-1]))
            return
        assert node.parent is not None
        if not node.parent.told & bit:
            return  # held back until its parent is told of
        found = [node]
        for current in found:  # it grows meanwhile: each stands after its parent
            current.told |= bit
            self._events.append(self._stored(current, tier))
            if current.children:
                found.extend(
                    child for child in current.children.values() if child.phase[tier] is _PRESENT
                )

    def cleared(self) -> None:
        self._events = [CLEARED]  # what was not taken yet does not matter any more

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def snapshot(self, roots: Iterable[Root]) -> list[Event]:
        """All that has been told and not removed, in events that need none before them."""
        nodes: list[Node] = [*roots]
        events: list[Event] = []
        for node in nodes:  # it grows meanwhile: each stands after its parent
            nodes.extend(child for child in node.children.values() if child.told)
            if node.parent is not None:
                events.extend(self._stored(node, tier) for tier in Tier if node.told & 1 << tier)
        return events

    def _stored(self, node: Node, tier: Tier) -> Stored:
        parent = node.parent
        assert parent is not None
        digests = digests_of(node, self._page_size)
        above = None if parent.digests is None else int(parent.digests[-1, 0])
        tokens = node.tokens[: node.num_pages * self._page_bytes] if node.frayed else node.tokens
        return Stored(tier, digests, above, tokens, node.run.namespace)
