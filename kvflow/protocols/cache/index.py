"""The interface of the prefix index: match prompts, insert pages, copy and evict them.

It has neither a clock nor a pool: the caller passes times and page numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from kvflow.protocols.cache.events import Event, Tier
from kvflow.protocols.cache.hashes import ANY, DIGEST_BYTES, TOKEN_BYTES, Namespace
from kvflow.protocols.cache.nodes import (
    PAGED,
    Node,
    Root,
    Run,
    common_pages,
    digests_of,
    mend,
    upwards,
)
from kvflow.protocols.cache.recorder import Recorder
from kvflow.protocols.cache.residents import (
    NOTHING,
    Freed,
    Gathered,
    Residents,
    check_pages,
    joined,
)
from kvflow.protocols.cache.writes import Write, Writes
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.machines.cached_run import RunKind, RunPhase
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices


class Match(NamedTuple):
    """The longest cached prefix of a prompt.

    A node stands for the prefix that ends with it, and None stands for the empty prefix. In an
    index that needs states, `end` and `device_end` have a state. `branch_pages` is the number of
    leading pages whose tokens are cached, with or without a state. If it exceeds `num_pages`, a
    state stored after that many pages would allow a longer match.
    """

    num_pages: int = 0  # pages of the prefix, each on the device or the host
    end: Node | None = None
    # The device pages (int32 [n]) that hold the first n pages of the prefix.
    device_pages: PageIndices = NO_PLACES
    device_end: Node | None = None
    state: int | None = None  # the state at `device_end`
    branch_pages: int = 0


class Inserted(NamedTuple):
    end: Node | None
    # Pages that the cache did not take, because it already has other pages for the same tokens, or
    # a copy is bringing them. The caller frees the duplicates.
    duplicates: PageIndices


class Stats(NamedTuple):
    """Counters of an index. `num_pages` is per tier (device, host, storage), and includes pages
    that a copy is writing and pages that a flush could not free yet. `num_evicted` is per tier
    (device, host).
    """

    num_pages: tuple[int, ...]
    num_evicted: tuple[int, ...]
    num_nodes: int
    num_namespaces: int
    writes_open: int
    stale_ends: int
    num_states: int = 0
    num_states_evicted: int = 0


class PrefixIndex:
    """One prefix cache.

    The caller numbers the pages. Every page given to the index comes back exactly once, as a
    duplicate or in `Freed`. The caller passes the time in seconds, which must never go back.
    """

    def __init__(
        self,
        page_size: int,
        policy: str = "lru",
        *,
        needs_state: bool = False,
        events: bool = False,
    ) -> None:
        """`page_size`: tokens per page. `needs_state`: match only prefixes that end with a state.
        `events`: record events for `take_events`. Raises: MisuseError.
        """
        if page_size < 1:
            raise MisuseError(f"page_size {page_size}: at least 1 token is needed")
        self.page_size, self._page_bytes = page_size, page_size * TOKEN_BYTES
        self._needs_state = needs_state
        self._recorder = Recorder(page_size) if events else None
        self._residents = Residents(policy, self._page_bytes, self._recorder)
        self._writes = Writes(self._residents)
        self._now_s = float("-inf")
        self.epoch = 0
        """Number of flushes so far. A match from an earlier epoch is no longer in the index."""

    def match(
        self, tokens: bytes, now_s: float, namespace: Namespace = ANY, *, hit: bool = True
    ) -> Match:
        """Return the longest cached prefix of `tokens` (see `hashes.token_bytes`) in whole pages,
        and mark its pages as used now. With `hit`, also count one more use of them. A caller that
        matches the same prompt repeatedly passes `hit=True` only once. Raises: MisuseError.
        """
        self._check(tokens, now_s)
        root = self._residents.roots.get(namespace)
        if root is None:
            return _MISS
        path = self._walk(root, tokens)
        branch_pages = path[-1].depth if path else 0
        if self._needs_state:
            while path and path[-1].state is None:
                path.pop()
        if not path:
            return Match(branch_pages=branch_pages) if branch_pages else _MISS
        device: list[PageIndices] = []
        device_end: Node | None = None
        present = RunPhase.PRESENT
        contiguous = True
        for node in path:
            node.used_s = now_s
            node.hits += hit
            if contiguous:
                if node.phase[0] is present:
                    device.append(node.pages[0])  # type: ignore[arg-type]  # PRESENT has pages
                    device_end = node
                else:
                    contiguous = False
        # A state may be evicted before its pages, so the last node on the device may lack a state.
        # Go back to the last node that has a state.
        if self._needs_state:
            while device_end is not None and device_end.state is None:
                device.pop()
                device_end = device_end.parent if device else None
        state = None if device_end is None else device_end.state
        end = path[-1]
        return Match(end.depth, end, joined(device), device_end, state, branch_pages)

    def insert(
        self,
        tokens: bytes,
        pages: PageIndices,
        now_s: float,
        namespace: Namespace = ANY,
        *,
        shared: int = 0,
        priority: int = 0,
    ) -> Inserted:
        """Insert device pages that a request computed. `pages` is int32, with one entry for each
        whole page of `tokens` after the first `shared` pages. The cache already has those: the
        request matched and locked them. The index keeps the array, so the caller must not change
        it. Raises: MisuseError; the index then takes no page.
        """
        root, path, total = self._given(tokens, pages, now_s, namespace, shared)
        self._check_shared(path, shared)
        duplicates: list[PageIndices] = []
        gathered = Gathered()  # stays empty: an insertion frees no page
        for node in path:
            node.used_s = now_s
            if priority > node.priority:
                node.priority = priority
            start, stop = node.depth - node.num_pages - shared, node.depth - shared
            if stop <= 0:
                continue
            given = pages[max(start, 0) : stop]
            if self._residents.feed(node, Tier.DEVICE, RunKind.GIVEN, given, gathered):
                duplicates.append(given)
            else:
                self._residents.offer(node)
        end = path[-1] if path else root
        if end.depth < total:
            end = self._append(
                end, tokens, pages[end.depth - shared :], now_s, priority, Tier.DEVICE
            )
            self._residents.roots[namespace] = root
        if end is root:
            return Inserted(None, NO_PLACES)
        return Inserted(end, joined(duplicates))

    def put_state(self, tokens: bytes, state: int, namespace: Namespace = ANY) -> bool:
        """Store `state`, a number that the caller chooses, at the end of the last page of `tokens`.
        Returns False and stores nothing if that page has a state already, or if the pages are not
        cached.
        """
        root = self._residents.roots.get(namespace)
        path = [] if root is None else self._walk(root, tokens)
        if not path or path[-1].depth * self._page_bytes != len(tokens):
            return False
        return self._residents.states.put(path[-1], state)

    def lock_state(self, node: Node) -> None:
        """Protect the state at the end of `node` from eviction. The node's pages must be locked.
        Locks are counted. Raises: MisuseError.
        """
        self._residents.states.lock(node)

    def unlock_state(self, node: Node) -> None:
        """Release one lock on a state. Must precede `unlock` on its pages. Raises: MisuseError."""
        self._residents.states.unlock(node)

    def evict_states(self, count: int) -> Freed:
        """Free up to `count` unlocked states, in the order of the policy."""
        return Freed(states=self._residents.states.evict(count))

    def insert_stored(
        self,
        tokens: bytes,
        pages: PageIndices,
        now_s: float,
        namespace: Namespace = ANY,
        *,
        start: int,
    ) -> PageIndices:
        """Insert host pages that were read from storage. `pages` is int32, with one entry for each
        whole page of `tokens` from page `start` on. Returns the pages that the index does not take,
        because the host has others, a copy is bringing others, the pages before `start` were
        evicted, or the node of these tokens begins before `start`.

        Raises: MisuseError; the index then takes no page.
        """
        root, path, total = self._given(tokens, pages, now_s, namespace, start)
        end = path[-1] if path else root
        if end.depth < start or not total - start:
            return pages
        duplicates: list[PageIndices] = []
        for node in path:
            first, stop = node.depth - node.num_pages - start, node.depth - start
            given = pages[max(first, 0) : max(stop, 0)]
            if given.size and (
                first < 0 or self._residents.feed(node, Tier.HOST, RunKind.GIVEN, given, Gathered())
            ):
                duplicates.append(given)
            elif given.size:
                self._from_storage(node)
        if end.depth < total:
            end = self._append(end, tokens, pages[end.depth - start :], now_s, 0, Tier.HOST)
            self._residents.roots[namespace] = root
            self._from_storage(end)
        return joined(duplicates)

    def _from_storage(self, node: Node) -> None:
        if node.phase[Tier.STORAGE] is RunPhase.ABSENT:
            self._residents.feed(node, Tier.STORAGE, RunKind.GIVEN, None, Gathered())
        self._residents.offer(node)

    def hit(self, end: Node) -> None:
        """Count one more use of every page of the prefix that ends with `end`."""
        for node in upwards(end):
            node.hits += 1

    def arrives(self, end: Node) -> bool:
        """Return True while a copy writes device pages of the prefix that ends with `end`."""
        return any(node.phase[Tier.DEVICE] is RunPhase.ARRIVING for node in upwards(end))

    def stored_pages(self, end: Node) -> list[int]:
        """Return the positions of stored pages in the prefix that ends with `end`, ascending."""
        stored = (node for node in upwards(end) if node.phase[Tier.STORAGE] is RunPhase.PRESENT)
        found = [range(node.depth - node.num_pages, node.depth) for node in stored]
        return [page for pages in reversed(found) for page in pages]

    def page_hashes(self, end: Node) -> list[bytes]:
        """Return the digests of the pages in the prefix that ends with `end`. Storage finds the
        pages by these digests.
        """
        path = [*upwards(end)][::-1]
        found = b"".join(digests_of(node, self.page_size).tobytes() for node in path)
        return [found[at : at + DIGEST_BYTES] for at in range(0, len(found), DIGEST_BYTES)]

    def lock(self, node: Node) -> None:
        """Lock the prefix that ends with `node`: its device pages cannot be evicted until `unlock`.
        Locks are counted. Raises: MisuseError.
        """
        above: Node = node
        while above.parent is not None and above.phase[Tier.DEVICE] is RunPhase.PRESENT:
            above = above.parent
        if above is node or not isinstance(above, Root) or node.detached:
            raise MisuseError("cannot lock a prefix that is not all on the device: match it again")
        node.locks += 1
        if node.locks == 1:
            self._residents.pin(node)

    def unlock(self, node: Node) -> Freed:
        """Release one lock. Returns flushed pages that only this lock kept. Raises: MisuseError."""
        if not node.locks or node.locks == node.state_locks:
            raise MisuseError("cannot unlock a prefix that is not locked, or whose state is")
        node.locks -= 1
        if node.locks:
            return NOTHING
        self._residents.unpin(node)
        gathered = Gathered()
        self._residents.released(node, gathered)
        return gathered.freed()

    def missing(self, end: Node, source: Tier, target: Tier) -> int:
        """Return the number of pages that `source` has and `target` lacks, in the prefix that ends
        with `end`. A write can copy this many pages. Raises: MisuseError.
        """
        return self._writes.missing(end, source, target)

    def begin_write(
        self,
        end: Node,
        source: Tier,
        target: Tier,
        pages: PageIndices = NO_PLACES,
        *,
        count: int | None = None,
    ) -> Write:
        """Begin a copy of pages that `source` has and `target` lacks, in the prefix that ends with
        `end`. The first len(pages) of them are copied to `pages` (int32), which the index owns from
        now on. A copy to storage takes the first `count` instead. The caller reports the end of the
        copy with `ack` or `fail`, once none of its pages is read or written any more. Raises:
        MisuseError; the index then takes no page.
        """
        return self._writes.begin(
            end, source, target, pages, len(pages) if count is None else count
        )

    def ack(self, number: int) -> Freed:
        """End a write that landed. Ending a write twice only increments `Stats.stale_ends`."""
        return self._writes.end(number, RunKind.ACK)

    def fail(self, number: int) -> Freed:
        """End a write that failed. Its target pages may contain anything, so they are freed."""
        return self._writes.end(number, RunKind.FAIL)

    def evict(self, tier: Tier, count: int) -> Freed:
        """Evict up to `count` pages from the device or the host, in the order of the policy. Pages
        in use stay. A state is freed when neither of the two has its page any more. Raises:
        MisuseError.
        """
        if tier not in PAGED:
            raise MisuseError("only device and host have pages that can be evicted")
        gathered = Gathered()
        self._residents.evict(tier, count, gathered)
        return gathered.freed()

    def evict_copied(self, count: int) -> tuple[Freed, list[Node]]:
        """Evict up to `count` device pages that the host has too; see `evict`.

        Pages that the host lacks count towards `count`, but stay. Their nodes are returned too, so
        that the caller can copy the prefixes of these nodes to the host.
        """
        gathered, uncopied = Gathered(), list[Node]()
        self._residents.evict(Tier.DEVICE, count, gathered, uncopied)
        return gathered.freed(), uncopied

    def lost(self, end: Node, first: int) -> int:
        """Record that storage lacks page `first` of the prefix that ends with `end`. Neither this
        page nor any page that follows it, in any prompt, counts as stored any more. Returns the
        number of pages that stop counting as stored.
        """
        return self._residents.lost(end, first)

    def flush(self) -> Freed:
        """Forget every cached prompt. Pages in use are returned when their last use ends."""
        self.epoch += 1
        gathered = Gathered()
        self._residents.flush(gathered)
        return gathered.freed()

    @property
    def evictable_pages(self) -> int:
        """Number of device pages that are not in use.

        Without a host tier, `evict` can free all of them. With a host tier, it may free fewer: a
        node without a copy on the host stays while nodes below it are on the host.
        """
        return self._residents.num_pages[Tier.DEVICE] - self._residents.num_pinned

    def stats(self) -> Stats:
        own = self._residents
        return Stats(
            tuple(own.num_pages),
            tuple(own.num_evicted),
            own.num_nodes,
            len(own.roots),
            len(self._writes),
            self._writes.num_stale,
            own.states.count,
            own.states.num_evicted,
        )

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order. Events are kept until they are taken."""
        return [] if self._recorder is None else self._recorder.take()

    def snapshot_events(self) -> list[Event]:
        """Return all announced pages as events for a new subscriber, parents first.

        The snapshot already includes events that were not taken yet, so take those first.
        """
        if self._recorder is None:
            return []
        return self._recorder.snapshot(self._residents.roots.values())

    def _walk(self, node: Node, tokens: bytes) -> list[Node]:
        """Return the nodes of the longest cached prefix. If the prefix ends within a node, that
        node is split.
        """
        size, at, last = self._page_bytes, 0, len(tokens) - self._page_bytes
        same_at = tokens.startswith
        path: list[Node] = []
        while at <= last:
            # Most prompts continue with the child that the previous prompt took. One comparison
            # finds this child without a look-up, which would need a slice and a hash.
            child = node.taken
            if child is None or not same_at(child.tokens, at):
                child = node.children.get(tokens[at : at + size])
                if child is None:
                    break
                if child.frayed:
                    mend(child, size)
                if not same_at(child.tokens, at):
                    path.append(self._residents.split(child, common_pages(child, tokens, at, size)))
                    break
                node.taken = child
            at += len(child.tokens)
            path.append(child)
            node = child
        return path

    def _given(
        self, tokens: bytes, pages: PageIndices, now_s: float, namespace: Namespace, start: int
    ) -> tuple[Root, list[Node], int]:
        """Check the pages to insert from page `start` on. Returns the root (which may be new), the
        nodes of the cached prefix, and the number of whole pages in `tokens`.
        """
        self._check(tokens, now_s)
        check_pages(pages)
        total = len(tokens) // self._page_bytes
        if start < 0 or len(pages) != total - start:
            raise MisuseError(
                f"{len(pages)} pages given for pages {start} to {total} of the tokens"
            )
        root = self._residents.roots.get(namespace) or Root(namespace)
        return root, self._walk(root, tokens), total

    def _append(
        self,
        parent: Node,
        tokens: bytes,
        pages: PageIndices,
        now_s: float,
        priority: int,
        tier: Tier,
    ) -> Node:
        at, run = parent.depth * self._page_bytes, Run(parent.run.namespace)
        own = tokens[at : at + len(pages) * self._page_bytes]
        node = Node(parent, run, 0, own, len(pages))
        run.nodes.append(node)
        node.used_s, node.priority = now_s, priority
        parent.children[own[: self._page_bytes]] = node
        self._residents.num_nodes += 1
        self._residents.feed(node, tier, RunKind.GIVEN, pages, Gathered())
        self._residents.offer(node)
        return node

    def _check(self, tokens: bytes, now_s: float) -> None:
        if type(tokens) is not bytes or len(tokens) % TOKEN_BYTES:
            raise MisuseError(
                "tokens must be bytes, 4 for each token id: see "
                "kvflow.protocols.cache.hashes.token_bytes"
            )
        if not now_s >= self._now_s:
            raise MisuseError(f"time went back from {self._now_s} s to {now_s} s")
        self._now_s = now_s

    def _check_shared(self, path: list[Node], shared: int) -> None:
        have = 0
        for node in path:
            if have >= shared or node.phase[Tier.DEVICE] is not RunPhase.PRESENT:
                break
            have = node.depth
        if have < shared:
            raise MisuseError(
                f"{shared} pages are said to be shared, and the device has {have} of them: lock "
                "what you use"
            )


_MISS = Match()
