"""Eviction policies: the node with the smallest key is evicted first.

A key may only grow while its node lives, because the queues of `Residents` may hold an outdated
key.

lru        least recently used
lfu        least often matched, then least recently used
slru       least recently used, but nodes matched fewer than two times before all others
priority   lowest priority, then least recently used
depth      deepest, then least recently used
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvflow.protocols.cache.choices import EvictionPolicy
from kvflow.protocols.cache.nodes import Node
from kvflow.protocols.errors import MisuseError

PROTECTED_HITS = 2
Key = Callable[[Node], Any]

POLICIES: dict[EvictionPolicy, Key] = {
    "lru": lambda node: node.used_s,
    "lfu": lambda node: (node.hits, node.used_s),
    "slru": lambda node: (node.hits >= PROTECTED_HITS, node.used_s),
    "priority": lambda node: (node.priority, node.used_s),
    "depth": lambda node: (-node.depth, node.used_s),
}


def policy_key(name: str) -> Key:
    """Return the key function of a policy. Raises: MisuseError for an unknown name."""
    try:
        return POLICIES[name]  # type: ignore[index]  # `name` may be any text
    except KeyError:
        raise MisuseError(f"unknown eviction policy {name!r}; use {', '.join(POLICIES)}") from None
