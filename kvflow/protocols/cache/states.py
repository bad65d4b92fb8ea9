"""States at page boundaries, for models that keep one for each request (see
`protocols.pages.kinds`, rows).

A state belongs to the end of a page: to the node that ends there, and to its lower part when that
is split. It goes with that page, or before it, in the order of the policy: pages stay without it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from kvflow.protocols.cache.nodes import STATE_QUEUED, Node
from kvflow.protocols.errors import MisuseError


class States:
    """The states of one index, each a number of the caller's."""

    def __init__(self, key: Callable[[Node], Any]) -> None:
        self._key = key
        self._queue: list[tuple[Any, int, Node]] = []  # as those of `Residents`
        self._pushed = self.count = self.num_evicted = 0

    def put(self, node: Node, state: int) -> bool:
        """Whether it is taken: not where there is one."""
        if node.state is not None or node.detached:
            return False
        node.state = state
        self.count += 1
        self._offer(node)
        return True

    def take(self, node: Node) -> int | None:
        """Its state, which it has no more."""
        state, node.state = node.state, None
        self.count -= state is not None
        return state

    def lock(self, node: Node) -> None:
        """Raises: MisuseError."""
        if node.state is None or not node.locks:
            raise MisuseError(
                "cannot lock a state that is not there, or whose pages are not locked: match it "
                "again"
            )
        node.state_locks += 1

    def unlock(self, node: Node) -> None:
        """Raises: MisuseError."""
        if not node.state_locks:
            raise MisuseError("cannot unlock a state that is not locked")
        node.state_locks -= 1
        self._offer(node)

    def evict(self, count: int) -> tuple[int, ...]:
        """Take `count` of them out; fewer when the others are locked."""
        gone: list[int] = []
        while len(gone) < count and self._queue:
            key, _, node = heapq.heappop(self._queue)
            node.queued &= ~STATE_QUEUED
            if node.state is None or node.state_locks:
                continue  # its pages have gone; or it is offered again when it is unlocked
            if self._key(node) != key:
                self._offer(node)
                continue
            state = self.take(node)
            assert state is not None
            gone.append(state)
        self.num_evicted += len(gone)
        return tuple(gone)

    def flush(self) -> None:
        """Every node is detached: their states go with their pages."""
        self._queue = []

    def _offer(self, node: Node) -> None:
        if node.state is None or node.state_locks or node.detached or node.queued & STATE_QUEUED:
            return
        node.queued |= STATE_QUEUED
        self._pushed += 1
        heapq.heappush(self._queue, (self._key(node), self._pushed, node))
