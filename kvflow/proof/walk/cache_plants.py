"""Plausible bugs in prefix caches, some seen in real systems, planted in the shipped index."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

from kvflow.proof.sim.swap import swapped, swapped_cells
from kvflow.proof.walk.cache_worlds import STORE, CacheBounds
from kvflow.protocols.cache import events, residents, writes
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.nodes import Node, Root, digests_of, split
from kvflow.protocols.cache.recorder import Recorder
from kvflow.protocols.cache.residents import NOTHING, Gathered, Residents
from kvflow.protocols.cache.writes import Write, Writes
from kvflow.protocols.machines.cached_run import TABLE, RunKind, RunPhase
from kvflow.protocols.machines.tables import Move

Installed = AbstractContextManager[object]
SMALL = CacheBounds(evictions=0, flushes=0)


class CachePlant(NamedTuple):
    """A bug, and the invariant that it breaks in the world `bounds`."""

    name: str
    text: str
    install: Callable[[], Installed]
    invariant: str
    bounds: CacheBounds = SMALL


def _ack_publishes_the_node_of_the_time() -> Installed:
    """Let a write remember its nodes, although a split moves their first pages to new nodes."""
    begin, end = Writes.begin, Writes.end

    def remembering(self: Any, *arguments: Any) -> Write:
        write = begin(self, *arguments)
        named = vars(self).setdefault("named", {})
        named[write.number] = [
            n for piece in write.pieces for n in piece.run.between(piece.start, piece.stop)
        ]
        return write

    def of_those(self: Any, number: int, kind: RunKind) -> Any:
        write, named = self._open.get(number), vars(self).get("named", {}).pop(number, ())
        if write is not None:
            kept = [
                writes.Piece(n.run, n.start, n.start + n.num_pages)
                for n in named
                if n in n.run.nodes
            ]
            self._open[number] = write._replace(pieces=kept)
        return end(self, number, kind)

    swaps = ExitStack()
    swaps.enter_context(swapped(Writes, "begin", remembering))
    swaps.enter_context(swapped(Writes, "end", of_those))
    return swaps


def _child_before_parent() -> Installed:
    """Publish every page that landed, even without the page before it."""

    def moved(self: Recorder, node: Node, tier: Tier) -> None:
        if node.detached or not _tells(self, node, tier, node.phase[tier] is RunPhase.PRESENT):
            return
        above = node.parent
        if above is not None and not isinstance(above, Root):
            digests_of(above, self._page_size)
        self._events.append(self._stored(node, tier))

    return swapped(Recorder, "moved", moved)


def _event_at_enqueue() -> Installed:
    """Publish a page when its copy begins, as if every copy landed."""
    original = Recorder.moved

    def moved(self: Recorder, node: Node, tier: Tier) -> None:
        phase = node.phase[tier]
        if phase is RunPhase.ARRIVING:
            node.phase[tier] = RunPhase.PRESENT
        if not (phase is RunPhase.PRESENT and node.told & 1 << tier):
            original(self, node, tier)
        node.phase[tier] = phase

    return swapped(Recorder, "moved", moved)


def _tells(recorder: Recorder, node: Node, tier: Tier, there: bool) -> bool:
    """Return True if `node` must be published. If it is gone, publish its removal."""
    bit = 1 << tier
    if there:
        tells = not node.told & bit
        node.told |= bit
        return tells
    if node.told & bit:
        assert node.digests is not None
        node.told &= ~bit
        recorder._events.append(events.Removed(tier, node.digests[::-1]))
    return False


def _lock_not_copied_at_split() -> Installed:
    """Split a node without copying its locks to the upper part, which is a new node."""

    def forgets(node: Node, keep: int, page_bytes: int, *, fray: bool = False) -> Node:
        upper = split(node, keep, page_bytes, fray=fray)
        upper.pins = 0
        return upper

    return swapped(residents, "split", forgets)


def _lock_moves_at_split() -> Installed:
    """Move the locks to the new node at a split, although the request's handle is the old node."""

    def moves(node: Node, keep: int, page_bytes: int, *, fray: bool = False) -> Node:
        upper = split(node, keep, page_bytes, fray=fray)
        upper.locks, node.locks = node.locks, 0
        return upper

    return swapped(residents, "split", moves)


def _readers_not_copied_at_split() -> Installed:
    def forgets(node: Node, keep: int, page_bytes: int, *, fray: bool = False) -> Node:
        upper = split(node, keep, page_bytes, fray=fray)
        upper.readers = [0, 0]
        return upper

    return swapped(residents, "split", forgets)


def _failed_copy_taken_for_one() -> Installed:
    arriving = RunPhase.ARRIVING, RunKind.FAIL
    return swapped_cells(TABLE, {arriving: Move(RunPhase.PRESENT)})


def _source_let_go() -> Installed:
    """Let the sources of a copy be evicted while it runs."""
    original = Node.evictable

    def evictable(self: Node, tier: Tier) -> bool:
        readers, self.readers = self.readers, [0, 0]
        try:
            return original(self, tier)
        finally:
            self.readers = readers

    return swapped(Node, "evictable", evictable)


def _ends_twice() -> Installed:
    """Remember every write for ever, so that a second end counts too."""
    original = Writes.end

    def end(self: Any, number: int, kind: RunKind) -> Any:
        known = vars(self).setdefault("known", {})
        if (write := self._open.get(number)) is not None:
            known[number] = write
            return original(self, number, kind)
        if (write := known.get(number)) is None:
            return NOTHING
        gathered = Gathered()
        for piece in write.pieces:
            for node in piece.run.between(piece.start, piece.stop):
                if node.phase[write.target] is RunPhase.PRESENT and kind is RunKind.FAIL:
                    self._residents.feed(node, write.target, RunKind.EVICT, None, gathered)
        return gathered.freed()

    return swapped(Writes, "end", end)


def _flush_frees_what_is_copied() -> Installed:
    original = Residents.flush

    def flush(self: Residents, gathered: Gathered) -> None:
        nodes: list[Node] = list(self.roots.values())
        for node in nodes:
            nodes.extend(node.children.values())
        original(self, gathered)
        for node in reversed(nodes):
            if (
                node.parent is not None
                and not node.locks
                and not node.children
                and any(node.readers)
            ):
                for tier in (Tier.DEVICE, Tier.HOST):
                    if node.phase[tier] is RunPhase.PRESENT:
                        self.feed(node, tier, RunKind.EVICT, None, gathered)

    return swapped(Residents, "flush", flush)


def _evicted_pages_are_not_told() -> Installed:
    original = Recorder.moved

    def moved(self: Recorder, node: Node, tier: Tier) -> None:
        if node.phase[tier] is RunPhase.PRESENT:
            original(self, node, tier)

    return swapped(Recorder, "moved", moved)


_STORED = CacheBounds((STORE,), on_host=True, flushes=0, evictions=0)
_LOCKED = CacheBounds(splits=1, evictions=1, flushes=0, locks=1, writes=0)
PLANTS = (
    CachePlant(
        "ack publishes the node of the time",
        "a write names nodes, and a split leaves the new ones out",
        _ack_publishes_the_node_of_the_time,
        "I10",
    ),
    CachePlant(
        "child before parent", "what has landed is told of at once", _child_before_parent, "I10"
    ),
    CachePlant(
        "event at enqueue", "a page is told of when its copy begins", _event_at_enqueue, "I10"
    ),
    CachePlant(
        "event at enqueue of a store", "the same of storage", _event_at_enqueue, "I10", _STORED
    ),
    CachePlant(
        "lock not copied at split",
        "the part before the cut is locked by nobody",
        _lock_not_copied_at_split,
        "I5",
        _LOCKED,
    ),
    CachePlant(
        "lock moves at split",
        "the part behind the cut is not locked",
        _lock_moves_at_split,
        "I5",
        _LOCKED,
    ),
    CachePlant(
        "readers not copied at split",
        "the part before the cut is read by nobody",
        _readers_not_copied_at_split,
        "I5",
    ),
    CachePlant(
        "failed copy taken for one",
        "a copy that failed counts as landed",
        _failed_copy_taken_for_one,
        "I14",
    ),
    CachePlant(
        "source of a copy let go",
        "what is copied may be evicted",
        _source_let_go,
        "I13",
        SMALL._replace(evictions=1, splits=0),
    ),
    CachePlant(
        "a write ends twice",
        "a stale end changes the tree",
        _ends_twice,
        "I6",
        SMALL._replace(stales=1),
    ),
    CachePlant(
        "flush frees what is copied",
        "what a copy reads is given away",
        _flush_frees_what_is_copied,
        "I13",
        SMALL._replace(flushes=1),
    ),
    CachePlant(
        "eviction not told",
        "subscribers hear what comes, and not what goes",
        _evicted_pages_are_not_told,
        "I10",
        SMALL._replace(evictions=1, splits=0),
    ),
)
