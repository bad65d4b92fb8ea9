"""Nodes of the tree. All pages of a node belong to one run, and share one phase in each tier."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from kvflow.protocols.cache.events import Digests, Tier
from kvflow.protocols.cache.hashes import TOKEN_BYTES, Namespace, chain_root, page_hashes
from kvflow.protocols.machines.cached_run import RunPhase
from kvflow.protocols.pages.layout import PageIndices

PAGED = (Tier.DEVICE, Tier.HOST)
STATE_QUEUED = 1 << len(Tier)
_START = attrgetter("start")


class Run:
    """Pages that were inserted together. `nodes` has the parts of the run, in order. Eviction
    removes pages from the end, so the remaining pages are a prefix of the run.
    """

    __slots__ = ("namespace", "nodes")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.nodes: list[Node] = []

    def between(self, start: int, stop: int) -> list[Node]:
        """Return the nodes of pages [start, stop). `start` and `stop` must be boundaries of nodes.
        A split never removes a boundary.
        """
        first = bisect_left(self.nodes, start, key=_START)
        return self.nodes[first : bisect_left(self.nodes, stop, lo=first, key=_START)]


class Node:
    """A node of the tree. It stands for the prefix up to its last page. A split inserts a new node
    before the old one, so a reference to the old node keeps its meaning.

    `children`: child nodes by the token bytes of their first page. `taken`: the child that a prompt
    most recently matched in full; None after that child is split or removed. `below[tier]`: number
    of children that are not ABSENT in the tier. `readers[tier]`: number of copies that read the
    node from the tier. `pins`: number of uses that keep the node on the device, plus the number of
    its children that have pins (see `Residents.pin`). `depth`: number of pages from the root to the
    end of the node. `queued`: one bit for each tier whose queue contains the node, and one for the
    queue of states. `state`: the state at the end of the last page (see `states`). `state_locks`:
    number of locks on the state. `frayed`: True if `tokens` continues beyond the last page. `told`:
    one bit for each tier in which the node is announced to subscribers. `digests`: page hashes as
    big-endian int64 [num_pages, 4], None until they are needed. The first number in each row is the
    page's event hash.
    """

    __slots__ = (
        "below",
        "children",
        "depth",
        "detached",
        "digests",
        "frayed",
        "hits",
        "locks",
        "num_pages",
        "pages",
        "parent",
        "phase",
        "pins",
        "priority",
        "queued",
        "readers",
        "run",
        "start",
        "state",
        "state_locks",
        "taken",
        "tokens",
        "told",
        "used_s",
    )

    def __init__(
        self, parent: Node | None, run: Run, start: int, tokens: bytes, num_pages: int
    ) -> None:
        self.parent, self.run, self.start = parent, run, start
        self.tokens, self.num_pages = tokens, num_pages
        self.depth: int = num_pages if parent is None else parent.depth + num_pages
        self.children: dict[bytes, Node] = {}
        self.taken: Node | None = None
        self.phase = [RunPhase.ABSENT, RunPhase.ABSENT, RunPhase.ABSENT]
        self.pages: list[PageIndices | None] = [None, None]
        self.readers, self.below = [0, 0], [0, 0]
        self.used_s, self.hits, self.priority = 0.0, 0, 0
        self.locks, self.queued, self.pins, self.told, self.state_locks = 0, 0, 0, 0, 0
        self.detached = self.frayed = False
        self.state: int | None = None
        self.digests: Digests | None = None

    def __repr__(self) -> str:
        where = ", ".join(f"{tier.name.lower()} {self.phase[tier].name.lower()}" for tier in Tier)
        return f"<Node of {self.num_pages} pages up to page {self.depth}: {where}>"

    @property
    def removed(self) -> bool:
        """True after the node left the tree: it was evicted, or flushed and then freed."""
        return self.parent is None

    def evictable(self, tier: Tier) -> bool:
        """Return True if the node may leave `tier` now."""
        if self.phase[tier] is not RunPhase.PRESENT or self.below[tier] or self.readers[tier]:
            return False
        if tier is Tier.DEVICE and self.locks:
            return False
        return not self.children or self.phase[1 - tier] is RunPhase.PRESENT

    @property
    def held(self) -> bool:
        """True while a request or a copy uses the pages."""
        # A copy that writes the node in one tier reads it in another, so `readers` counts it.
        return bool(self.locks or any(self.readers))


class Root(Node):
    """The empty prompt of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, Run(namespace), 0, b"", 0)
        self.namespace = namespace
        # Subscribers learn of a child only after its parent. A root has no pages, so it counts as
        # known from the beginning.
        self.told = (1 << len(Tier)) - 1


def upwards(end: Node) -> Iterator[Node]:
    """Yield the nodes of the prefix that ends with `end`, the last one first, without the root."""
    node = end
    while node.parent is not None:
        yield node
        node = node.parent


def split(node: Node, keep: int, page_bytes: int, *, fray: bool = False) -> Node:
    """Move the first `keep` pages of `node` into a new node before it, and return the new node.

    Locks and state belong to the last page and stay with `node`. Copies in progress name offsets of
    the run, so they do not change.

    With `fray`, the new node may keep token bytes beyond its last page until `mend`. Otherwise an
    eviction that shortens a long node bit by bit would copy the remaining tokens each time.
    """
    parent = node.parent
    assert parent is not None
    cut, own = keep * page_bytes, node.num_pages * page_bytes
    shared = fray and 2 * cut >= len(node.tokens)
    upper = Node(parent, node.run, node.start, node.tokens if shared else node.tokens[:cut], keep)
    upper.frayed = shared
    upper.phase, upper.readers = node.phase.copy(), node.readers.copy()
    upper.used_s, upper.hits, upper.priority = node.used_s, node.hits, node.priority
    upper.detached = node.detached
    upper.told = node.told
    # A numpy slice keeps the whole array alive. A short remainder copies its digests, so that it
    # does not keep a long array alive.
    if node.digests is not None:
        upper.digests = node.digests[:keep].copy() if fray and not shared else node.digests[:keep]
        node.digests = node.digests[keep:]
    upper.below = [int(node.phase[tier] is not RunPhase.ABSENT) for tier in PAGED]
    reads, arrives = bool(node.readers[Tier.DEVICE]), node.phase[Tier.DEVICE] is RunPhase.ARRIVING
    upper.pins = bool(node.pins) + reads + arrives
    for tier in PAGED:
        if (pages := node.pages[tier]) is not None:
            upper.pages[tier], node.pages[tier] = pages[:keep], pages[keep:]
    parent.children[node.tokens[:page_bytes]] = upper
    if parent.taken is node:
        parent.taken = None
    node.run.nodes.insert(bisect_left(node.run.nodes, node.start, key=_START), upper)
    node.parent, node.start, node.num_pages = upper, node.start + keep, node.num_pages - keep
    node.tokens, node.frayed = node.tokens[cut:own], False
    upper.children[node.tokens[:page_bytes]] = node
    return upper


def digests_of(node: Node, page_size: int) -> Digests:
    """Return the page hashes of a node. The first call computes them. Unless the parent is a root,
    its hashes must be computed first.
    """
    if node.digests is None:
        above = None if node.parent is None else node.parent.digests
        previous = chain_root(node.run.namespace) if above is None else above[-1].tobytes()
        own = node.tokens[: node.num_pages * page_size * TOKEN_BYTES]
        node.digests = np.frombuffer(
            b"".join(page_hashes(own, page_size, previous)), ">i8"
        ).reshape(-1, 4)
    return node.digests


def mend(node: Node, page_bytes: int) -> None:
    """Drop the tokens after the last page of a frayed node."""
    node.tokens, node.frayed = node.tokens[: node.num_pages * page_bytes], False


def common_pages(node: Node, tokens: bytes, at: int, page_bytes: int) -> int:
    """Return how many leading pages of `node` are equal to `tokens` from byte `at` on. The first
    page must be equal, and some later page must differ.
    """
    own = node.tokens
    # The first `low` pages are equal, and the first `high` are not all equal.
    low, high = 1, node.num_pages
    while high - low > 1:
        middle = (low + high) // 2
        if tokens.startswith(own[low * page_bytes : middle * page_bytes], at + low * page_bytes):
            low = middle
        else:
            high = middle
    return low
