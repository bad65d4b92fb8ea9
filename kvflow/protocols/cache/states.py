"""States at page boundaries, for models that keep a state per request (see the unit "row" in
`protocols.pages.kinds`).

A state belongs to the end of a page, and to the node that ends there. A split leaves the state with
the part that has this page. The state is evicted with the page or earlier, in the order of the
policy, so pages may be cached without their state.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from kvflow.protocols.cache.nodes import STATE_QUEUED, Node
from kvflow.protocols.errors import MisuseError


class States:
    """The states of one index; a state is a number that the caller chooses."""

    def __init__(self, key: Callable[[Node], Any]) -> None:
        self._key = key
        self._queue: list[tuple[Any, int, Node]] = []  # see the queues of `Residents`
        self._pushed = self.count = self.num_evicted = 0

    def put(self, node: Node, state: int) -> bool:
        """Store `state`. Returns False if the node has a state or was flushed."""
        if node.state is not None or node.detached:
            return False
        node.state = state
        self.count += 1
        self._offer(node)
        return True

    def take(self, node: Node) -> int | None:
        state, node.state = node.state, None
        self.count -= state is not None
        return state

    def lock(self, node: Node) -> None:
        """Protect the state of `node` until `unlock`. Locks are counted. Raises: MisuseError."""
        if node.state is None or not node.locks:
            raise MisuseError(
                "cannot lock a state that is not there, or whose pages are not locked: match it "
                "again"
            )
        node.state_locks += 1

    def unlock(self, node: Node) -> None:
        if not node.state_locks:
            raise MisuseError("cannot unlock a state that is not locked")
        node.state_locks -= 1
        self._offer(node)

    def evict(self, count: int) -> tuple[int, ...]:
        """Remove and return up to `count` unlocked states, in the order of the policy."""
        gone: list[int] = []
        while len(gone) < count and self._queue:
            key, _, node = heapq.heappop(self._queue)
            node.queued &= ~STATE_QUEUED
            # The state left with its pages, or is locked. `unlock` queues a locked state again.
            if node.state is None or node.state_locks:
                continue
            if self._key(node) != key:
                self._offer(node)
                continue
            state = self.take(node)
            assert state is not None
            gone.append(state)
        self.num_evicted += len(gone)
        return tuple(gone)

    def flush(self) -> None:
        """Empty the queue: every node is detached, and its state leaves with its pages."""
        self._queue = []

    def _offer(self, node: Node) -> None:
        if node.state is None or node.state_locks or node.detached or node.queued & STATE_QUEUED:
            return
        node.queued |= STATE_QUEUED
        self._pushed += 1
        heapq.heappush(self._queue, (self._key(node), self._pushed, node))
