"""Recorder of cache events for subscribers (I10): pages that become readable in a tier, and pages
that stop being readable there.

**A page is announced when it is present and its parent is announced in the same tier.** Copies end
in any order, so a page may become present before its parent. It is then announced together with its
parent. When a page leaves a tier, no page below it is announced in that tier, because leaves are
evicted first. So after every event, the announced pages of a tier form a tree without holes.

**The hash of a page is computed when it is first needed**, from the hash of its parent, and is kept
in its node. See `hashes` for the format.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvflow.protocols.cache.events import CLEARED, Event, Removed, Stored, Tier
from kvflow.protocols.cache.hashes import TOKEN_BYTES
from kvflow.protocols.cache.nodes import Node, Root, digests_of
from kvflow.protocols.machines.cached_run import RunPhase

_PRESENT = RunPhase.PRESENT


class Recorder:
    """Turns changes of phase into events, and keeps them until `take`."""

    def __init__(self, page_size: int) -> None:
        self._page_size, self._page_bytes = page_size, page_size * TOKEN_BYTES
        self._events: list[Event] = []

    def moved(self, node: Node, tier: Tier) -> None:
        # The flush that detached the node already announced that every page is gone.
        if node.detached:
            return
        bit = 1 << tier
        if node.phase[tier] is not _PRESENT:
            if node.told & bit:
                assert node.digests is not None
                node.told &= ~bit
                # The last page comes first, because subscribers must never see a page without its
                # parent.
                self._events.append(Removed(tier, node.digests[::-1]))
            return
        assert node.parent is not None
        # The parent is not announced yet. When it is, the loop below also announces this node.
        if not node.parent.told & bit:
            return
        found = [node]
        # The list grows while the loop runs, so every node follows its parent.
        for current in found:
            current.told |= bit
            self._events.append(self._stored(current, tier))
            if current.children:
                found.extend(
                    child for child in current.children.values() if child.phase[tier] is _PRESENT
                )

    def cleared(self) -> None:
        # CLEARED replaces the events that were not taken: it undoes whatever they announced.
        self._events = [CLEARED]

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def snapshot(self, roots: Iterable[Root]) -> list[Event]:
        """Return events that announce all currently announced pages to a new subscriber."""
        nodes: list[Node] = [*roots]
        events: list[Event] = []
        # The list grows while the loop runs, so every node follows its parent.
        for node in nodes:
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
