"""Plausible bugs in prefix caches, some seen in real systems, planted in the shipped index."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import getdoc
from typing import Any, NamedTuple

from kvflow.proof.sim.swap import swapped, swapped_cells, swaps
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
Install = Callable[[], Installed]
SMALL = CacheBounds(evictions=0, flushes=0)
_STORED = CacheBounds((STORE,), on_host=True, flushes=0, evictions=0)
_LOCKED = CacheBounds(splits=1, evictions=1, flushes=0, locks=1, writes=0)


class CachePlant(NamedTuple):
    """A bug, and the invariant that it breaks in the world `bounds`."""

    name: str
    text: str
    install: Install
    invariant: str
    bounds: CacheBounds = SMALL


PLANTS: list[CachePlant] = []


def bug(
    name: str, invariant: str, bounds: CacheBounds = SMALL, text: str = ""
) -> Callable[[Install], Install]:
    """Add a bug to `PLANTS`. Its text is the docstring of the function, unless `text` is given."""

    def add(install: Install) -> Install:
        PLANTS.append(CachePlant(name, text or getdoc(install) or "", install, invariant, bounds))
        return install

    return add


@bug("ack publishes the node of the time", "I10")
def _ack_publishes_the_node_of_the_time() -> Installed:
    """A write remembers its nodes, although a split moves their first pages to new nodes."""
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

    return swaps([(Writes, "begin", remembering), (Writes, "end", of_those)])


@bug("child before parent", "I10")
def _child_before_parent() -> Installed:
    """Every page that landed is published, even without the page before it."""

    def moved(self: Recorder, node: Node, tier: Tier) -> None:
        if node.detached or not _tells(self, node, tier, node.phase[tier] is RunPhase.PRESENT):
            return
        above = node.parent
        if above is not None and not isinstance(above, Root):
            digests_of(above, self._page_size)
        self._events.append(self._stored(node, tier))

    return swapped(Recorder, "moved", moved)


@bug("event at enqueue", "I10")
@bug("event at enqueue of a store", "I10", _STORED, "A page is published when its storing begins.")
def _event_at_enqueue() -> Installed:
    """A page is published when its copy begins, as if every copy landed."""
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


@bug("lock not copied at split", "I5", _LOCKED)
def _lock_not_copied_at_split() -> Installed:
    """A split copies no lock to the upper part, which is a new node."""

    def forgets(node: Node, keep: int, page_bytes: int, *, fray: bool = False) -> Node:
        upper = split(node, keep, page_bytes, fray=fray)
        upper.pins = 0
        return upper

    return swapped(residents, "split", forgets)


@bug("lock moves at split", "I5", _LOCKED)
def _lock_moves_at_split() -> Installed:
    """A split moves the locks to the new node, although the request's handle is the old node."""

    def moves(node: Node, keep: int, page_bytes: int, *, fray: bool = False) -> Node:
        upper = split(node, keep, page_bytes, fray=fray)
        upper.locks, node.locks = node.locks, 0
        return upper

    return swapped(residents, "split", moves)


@bug("readers not copied at split", "I5")
def _readers_not_copied_at_split() -> Installed:
    """A split copies no reader to the upper part."""

    def forgets(node: Node, keep: int, page_bytes: int, *, fray: bool = False) -> Node:
        upper = split(node, keep, page_bytes, fray=fray)
        upper.readers = [0, 0]
        return upper

    return swapped(residents, "split", forgets)


@bug("failed copy taken for one", "I14")
def _failed_copy_taken_for_one() -> Installed:
    """A copy that failed counts as landed."""
    arriving = RunPhase.ARRIVING, RunKind.FAIL
    return swapped_cells(TABLE, {arriving: Move(RunPhase.PRESENT)})


@bug("source of a copy let go", "I13", SMALL._replace(evictions=1, splits=0))
def _source_let_go() -> Installed:
    """The sources of a copy may be evicted while it runs."""
    original = Node.evictable

    def evictable(self: Node, tier: Tier) -> bool:
        readers, self.readers = self.readers, [0, 0]
        try:
            return original(self, tier)
        finally:
            self.readers = readers

    return swapped(Node, "evictable", evictable)


@bug("a write ends twice", "I6", SMALL._replace(stales=1))
def _ends_twice() -> Installed:
    """A write is remembered for ever, so that a second end changes the tree."""
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


@bug("flush frees what is copied", "I13", SMALL._replace(flushes=1))
def _flush_frees_what_is_copied() -> Installed:
    """A flush gives away pages that a copy still reads."""
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


@bug("eviction not told", "I10", SMALL._replace(evictions=1, splits=0))
def _evicted_pages_are_not_told() -> Installed:
    """Subscribers learn of the pages that come, but not of those that go."""
    original = Recorder.moved

    def moved(self: Recorder, node: Node, tier: Tier) -> None:
        if node.phase[tier] is RunPhase.PRESENT:
            original(self, node, tier)

    return swapped(Recorder, "moved", moved)
