"""The nodes in each tier, and the order of their eviction. Queueing a node costs O(log n)."""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.nodes import PAGED, Node, Root, split, upwards
from kvflow.protocols.cache.policies import policy_key
from kvflow.protocols.cache.recorder import Recorder
from kvflow.protocols.cache.states import States
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.machines.cached_run import TABLE, RunCommand, RunKind, RunPhase
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices


class Freed(NamedTuple):
    """Page numbers and states that the index no longer holds. They return to the caller's pools."""

    device: PageIndices = NO_PLACES
    host: PageIndices = NO_PLACES
    states: tuple[int, ...] = ()


NOTHING = Freed()


class Gathered:
    """Pages and states that one call frees, collected for its `Freed`."""

    __slots__ = ("pages", "states")

    def __init__(self) -> None:
        self.pages: tuple[list[PageIndices], list[PageIndices]] = ([], [])
        self.states: list[int] = []

    def freed(self) -> Freed:
        device, host = self.pages
        return (
            Freed(joined(device), joined(host), tuple(self.states)) if device or host else NOTHING
        )


def check_pages(pages: object) -> None:
    """Check that `pages` are int32 [n]. Raises: MisuseError."""
    if not isinstance(pages, np.ndarray):
        raise MisuseError(f"pages must be a numpy array of int32, not {type(pages).__name__}")
    if pages.dtype != np.int32 or pages.ndim != 1:
        raise MisuseError(
            f"pages must be a numpy array of int32 [n], not {pages.dtype} of shape {pages.shape}"
        )


def joined(parts: list[PageIndices]) -> PageIndices:
    if len(parts) < 2:
        return parts[0] if parts else NO_PLACES
    # Every match joins arrays. Joining them as buffers takes a third of the time of
    # `np.concatenate`, but fails for arrays that are not contiguous.
    try:
        return np.frombuffer(bytearray().join(parts), np.int32)  # type: ignore[arg-type]
    except TypeError:
        return np.concatenate(parts)


class Residents:
    """Changes the phases of all nodes in all tiers, as `cached_run.TABLE` allows. It counts pages,
    and has one queue for each paged tier, with the nodes that may leave that tier.

    A queue holds each node with the key that it had when it was pushed. Keys only grow, so the
    first entry whose key is still current has the smallest key. A node with an outdated key is
    pushed again with its new key, at most once per use.
    """

    def __init__(self, policy: str, page_bytes: int, recorder: Recorder | None = None) -> None:
        """`page_bytes` is the size in bytes of one page's tokens. Raises: MisuseError."""
        self._page_bytes, self._recorder = page_bytes, recorder
        self._key = policy_key(policy)
        self.states = States(self._key)
        self._queues: tuple[list[tuple[Any, int, Node]], ...] = ([], [])
        self._pushed = 0
        self.roots: dict[Any, Root] = {}
        self.num_pages = [0, 0, 0]  # pages per tier, ARRIVING ones included
        # Device pages that cannot be evicted now, not even together with the nodes below them.
        self.num_pinned = 0
        self.num_nodes = 0
        self.num_evicted = [0, 0]

    def offer(self, node: Node) -> None:
        """Queue a node for eviction in every tier that it may leave now. Call this whenever a
        change could make the node evictable.
        """
        if node.detached:
            return
        for tier in PAGED:
            if not node.queued & 1 << tier and node.evictable(tier):
                self._push(node, tier)

    def _push(self, node: Node, tier: Tier) -> None:
        node.queued |= 1 << tier
        self._pushed += 1
        heapq.heappush(self._queues[tier], (self._key(node), self._pushed, node))

    def pin(self, node: Node) -> None:
        """Count a use that keeps `node` and its ancestors on the device: the first lock, the first
        reader, or a copy that writes the node. A node that has pins counts as one pin of its
        parent, so the walk ends at the first ancestor that already had pins.
        """
        for above in upwards(node):
            above.pins += 1
            if above.pins > 1:
                return
            self._count_pinned(above, 1)

    def unpin(self, node: Node) -> None:
        for above in upwards(node):
            above.pins -= 1
            if above.pins:
                return
            self._count_pinned(above, -1)

    def _count_pinned(self, node: Node, change: int) -> None:
        if node.phase[Tier.DEVICE] is not RunPhase.ABSENT:
            self.num_pinned += change * node.num_pages

    def feed(
        self, node: Node, tier: Tier, kind: RunKind, pages: PageIndices | None, gathered: Gathered
    ) -> bool:
        """Feed one event to one node. The event may bring `pages`. Returns True if they are
        duplicates, which the caller keeps.
        """
        move = TABLE.moves[node.phase[tier], kind]
        assert move is not None
        if RunCommand.RETURN_DUPLICATE in move.commands:
            return True
        there = move.phase is not RunPhase.ABSENT
        # The counts include ARRIVING nodes, so they change only when a node enters or leaves
        # ABSENT.
        if there is (node.phase[tier] is RunPhase.ABSENT):
            change = 1 if there else -1
            self.num_pages[tier] += change * node.num_pages
            if tier is not Tier.STORAGE:
                assert node.parent is not None
                node.parent.below[tier] += change
            if tier is Tier.DEVICE and node.pins:
                self.num_pinned += change * node.num_pages
        if tier is not Tier.STORAGE:
            if pages is not None:
                node.pages[tier] = pages
            if RunCommand.FREE in move.commands:
                old, node.pages[tier] = node.pages[tier], None
                assert old is not None
                gathered.pages[tier].append(old)
        before, node.phase[tier] = node.phase[tier], move.phase
        if (
            tier is Tier.DEVICE
            and RunPhase.ARRIVING in (before, move.phase)
            and before is not move.phase
        ):
            (self.unpin if before is RunPhase.ARRIVING else self.pin)(node)
        if self._recorder is not None:
            self._recorder.moved(node, tier)
        return False

    def split(self, node: Node, keep: int, *, fray: bool = False) -> Node:
        self.num_nodes += 1
        return split(node, keep, self._page_bytes, fray=fray)

    def evict(
        self, tier: Tier, wanted: int, gathered: Gathered, uncopied: list[Node] | None = None
    ) -> None:
        """Evict up to `wanted` pages from a tier, starting at the ends of leaves. Pages in use
        stay. With `uncopied` (device only), a node that the host lacks is not evicted but added to
        `uncopied`, and its pages count towards `wanted`.
        """
        queue = self._queues[tier]
        while wanted > 0 and queue:
            key, _, node = heapq.heappop(queue)
            node.queued &= ~(1 << tier)
            # Skip a node that may not leave this tier now, because it is in use or other nodes
            # depend on it. The call that changes this puts the node back into the queue.
            if not node.evictable(tier):
                continue
            if self._key(node) != key:
                self._push(node, tier)
                continue
            if uncopied is not None and node.phase[Tier.HOST] is not RunPhase.PRESENT:
                uncopied.append(node)
                wanted -= node.num_pages
                continue
            if node.num_pages > wanted:
                self.split(node, node.num_pages - wanted, fray=True)
            wanted -= node.num_pages
            self.num_evicted[tier] += node.num_pages
            parent = node.parent
            assert parent is not None
            self.feed(node, tier, RunKind.EVICT, None, gathered)
            self._prune(node, gathered)
            self.offer(parent)
        for node in uncopied or ():
            self.offer(node)

    def lost(self, end: Node, first: int) -> int:
        """Stop counting pages as stored; see PrefixIndex.lost."""
        top: Node | None = None
        above: Node | None = end
        while above is not None and above.depth > first:
            top, above = above, above.parent
        if top is None:
            return 0
        if (kept := first - (top.depth - top.num_pages)) > 0:
            self.split(top, kept)
        nodes = [top]
        # The list grows while the loop runs, so every node follows its parent.
        for node in nodes:
            nodes.extend(node.children.values())
        # Children leave first, because subscribers must never see a page without its parent.
        gone = [node for node in reversed(nodes) if node.phase[Tier.STORAGE] is RunPhase.PRESENT]
        for node in gone:
            self.feed(node, Tier.STORAGE, RunKind.EVICT, None, Gathered())
        return sum(node.num_pages for node in gone)

    def _prune(self, node: Node, gathered: Gathered) -> None:
        if node.phase[Tier.DEVICE] is RunPhase.ABSENT and node.phase[Tier.HOST] is RunPhase.ABSENT:
            self._remove(node, gathered)

    def _remove(self, node: Node, gathered: Gathered) -> None:
        parent = node.parent
        assert parent is not None and not node.children
        if node.phase[Tier.STORAGE] is RunPhase.PRESENT:
            # Only the index forgets these pages. The store keeps them, and a later look-up finds
            # them.
            self.feed(node, Tier.STORAGE, RunKind.EVICT, None, gathered)
        if (state := self.states.take(node)) is not None:
            gathered.states.append(state)
        del parent.children[node.tokens[: self._page_bytes]]
        if parent.taken is node:
            parent.taken = None
        last = node.run.nodes.pop()
        assert last is node, "the nodes of a run go from its end"
        node.parent = None
        self.num_nodes -= 1
        if (
            not parent.children
            and isinstance(parent, Root)
            and self.roots.get(parent.namespace) is parent
        ):
            del self.roots[parent.namespace]

    def released(self, node: Node, gathered: Gathered) -> None:
        """Offer `node` for eviction after a lock or a copy ended. If the node was flushed and is
        not in use any more, free it and the ancestors that only it kept.
        """
        if not node.detached:
            self.offer(node)
            return
        current: Node | None = node
        while (
            current is not None
            and not isinstance(current, Root)
            and not current.children
            and not current.held
        ):
            above = current.parent
            self._discard(current, gathered)
            current = above

    def _discard(self, node: Node, gathered: Gathered) -> None:
        for tier in PAGED:
            if node.phase[tier] is RunPhase.PRESENT:
                self.feed(node, tier, RunKind.EVICT, None, gathered)
        self._remove(node, gathered)

    def flush(self, gathered: Gathered) -> None:
        """Forget everything. Nodes in use are freed when their use ends."""
        nodes: list[Node] = list(self.roots.values())
        # The list grows while the loop runs, so every node follows its parent.
        for node in nodes:
            nodes.extend(node.children.values())
            node.detached, node.queued = True, 0
        self.roots = {}
        self._queues = ([], [])
        self.states.flush()
        if self._recorder is not None:
            self._recorder.cleared()
        for node in reversed(nodes):
            if not isinstance(node, Root) and not node.children and not node.held:
                self._discard(node, gathered)
