"""Nodes of the tree: each is a part of one run, the same in every tier from its first page to its
last.
"""

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
    """Pages that were inserted together.

    Those that are left are a prefix of it, cut into nodes, in order.
    """

    __slots__ = ("namespace", "nodes")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.nodes: list[Node] = []

    def between(self, start: int, stop: int) -> list[Node]:
        """The nodes of pages [start, stop), both of which were ends of nodes once."""
        first = bisect_left(self.nodes, start, key=_START)
        return self.nodes[first : bisect_left(self.nodes, stop, lo=first, key=_START)]


class Node:
    """A handle to one place in the tree, the end of its last page: a split puts another node before
    it.

    `children` by the bytes of their first page; `taken`: the one that a prompt was last found in,
    whole, if it still is as it was then; `below[tier]`: how many of them are not ABSENT there;
    `readers[tier]`: copies that read it; `pins`: what keeps it on the device, itself or as a parent
    (see `Residents.pin`); `depth`: pages from the root to its end; `queued`: a bit per tier whose
    queue it is in, and one for that of states; `state`: what a request keeps beside its pages, at
    the end of the last one (see `states`); `state_locks`: who reads that; `frayed`: `tokens` go on
    after its last page; `told`: a bit per tier in which subscribers know of it; `digests`: its page
    hashes, once they are needed (big-endian int64 [num_pages, 4]: the first number of each is its
    event hash).
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
        self.parent, self.run, self.start, self.tokens, self.num_pages = (
            parent,
            run,
            start,
            tokens,
            num_pages,
        )
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
        """It is no node of the tree any more: evicted, or flushed and freed."""
        return self.parent is None

    def evictable(self, tier: Tier) -> bool:
        """It may leave `tier` now."""
        if self.phase[tier] is not RunPhase.PRESENT or self.below[tier] or self.readers[tier]:
            return False
        if tier is Tier.DEVICE and self.locks:
            return False
        return not self.children or self.phase[1 - tier] is RunPhase.PRESENT

    @property
    def held(self) -> bool:
        """A request or a copy still uses its pages; what a copy writes to, it reads in another
        tier.
        """
        return bool(self.locks or any(self.readers))


class Root(Node):
    """The empty prompt of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, Run(namespace), 0, b"", 0)
        self.namespace = namespace
        # There is nothing to tell: it is the parent of every first page.
        self.told = (1 << len(Tier)) - 1


def upwards(end: Node) -> Iterator[Node]:
    """The nodes of the prefix that ends with `end`, the last one first, without the root."""
    node = end
    while node.parent is not None:
        yield node
        node = node.parent


def split(node: Node, keep: int, page_bytes: int, *, fray: bool = False) -> Node:
    """Cut the first `keep` pages off `node`, into a new node before it, and return that.

    Locks and state belong to the last page and stay; the copies that are under way name offsets of
    the run and are not touched.

    With `fray` the new node keeps bytes of tokens that are not its own, until `mend`: cutting a
    long node short bit by bit does not copy all that is left each time.
    """
    parent = node.parent
    assert parent is not None
    cut, own = keep * page_bytes, node.num_pages * page_bytes
    shared = fray and 2 * cut >= len(node.tokens)
    upper = Node(parent, node.run, node.start, node.tokens if shared else node.tokens[:cut], keep)
    upper.frayed = shared
    upper.phase, upper.readers = node.phase.copy(), node.readers.copy()
    upper.used_s, upper.hits, upper.priority, upper.detached = (
        node.used_s,
        node.hits,
        node.priority,
        node.detached,
    )
    upper.told = node.told
    # Copied when the tokens are, so that a short rest does not keep a long array.
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
    """Its page hashes, worked out where they are not known yet; those of its parent are, unless
    that is a root.
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
    """Let go of the tokens that are not its own."""
    node.tokens, node.frayed = node.tokens[: node.num_pages * page_bytes], False


def common_pages(node: Node, tokens: bytes, at: int, page_bytes: int) -> int:
    """How many pages of `node` stand in `tokens` from byte `at`; less than all of them, and at
    least the first.
    """
    own = node.tokens
    low, high = 1, node.num_pages  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if tokens.startswith(own[low * page_bytes : middle * page_bytes], at + low * page_bytes):
            low = middle
        else:
            high = middle
    return low
