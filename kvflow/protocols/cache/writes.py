"""Copies of cached pages between tiers. They name runs and offsets, which splits do not change."""

from __future__ import annotations

from typing import NamedTuple

from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.nodes import PAGED, Node, Run, upwards
from kvflow.protocols.cache.residents import (
    NOTHING,
    Freed,
    Gathered,
    Residents,
    check_pages,
    joined,
)
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.machines.cached_run import RunKind, RunPhase
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices


class Piece(NamedTuple):
    """Pages [start, stop) of a run."""

    run: Run
    start: int
    stop: int


class Write(NamedTuple):
    """One copy between tiers, from page source_pages[i] of `source` to page target_pages[i] of
    `target`. A copy to storage has no `target_pages`. For each piece, `offsets` has the positions
    of its pages in the prompt. Pages between two pieces are not copied.
    """

    number: int
    source: Tier
    target: Tier
    source_pages: PageIndices
    target_pages: PageIndices
    offsets: list[range]
    pieces: list[Piece]


class Writes:
    """The writes in progress. The number of a write is never reused."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._open: dict[int, Write] = {}
        self._begun = 0
        self.num_stale = 0  # ends reported for writes that already ended

    def __len__(self) -> int:
        return len(self._open)

    def missing(self, end: Node, source: Tier, target: Tier) -> int:
        return sum(node.num_pages for node in self._path(end, source, target))

    def begin(self, end: Node, source: Tier, target: Tier, pages: PageIndices, count: int) -> Write:
        check_pages(pages)
        path = self._path(end, source, target)
        left = sum(node.num_pages for node in path)
        if not 0 < count <= left:
            raise MisuseError(
                f"a write of {count} pages: {target.name.lower()} lacks {left} of this prefix"
            )
        if target is not Tier.STORAGE and len(pages) != count:
            raise MisuseError(f"{len(pages)} pages given for a write of {count}")
        gathered = Gathered()  # stays empty: the beginning of a copy frees no page
        sources, offsets, pieces, at = [], [], [], 0
        for node in path:
            if at == count:
                break
            if node.num_pages > count - at:
                node = self._residents.split(node, count - at)  # noqa: PLW2901
            own = node.pages[source]
            assert own is not None
            sources.append(own)
            offsets.append(range(node.depth - node.num_pages, node.depth))
            pieces.append(Piece(node.run, node.start, node.start + node.num_pages))
            given = None if target is Tier.STORAGE else pages[at : at + node.num_pages]
            self._residents.feed(node, target, RunKind.BEGIN, given, gathered)
            node.readers[source] += 1
            if source is Tier.DEVICE and node.readers[source] == 1:
                self._residents.pin(node)
            at += node.num_pages
        self._begun += 1
        targets = NO_PLACES if target is Tier.STORAGE else pages
        write = Write(self._begun, source, target, joined(sources), targets, offsets, pieces)
        self._open[write.number] = write
        return write

    def end(self, number: int, kind: RunKind) -> Freed:
        write = self._open.pop(number, None)
        if write is None:
            self.num_stale += 1
            return NOTHING
        gathered = Gathered()
        for piece in reversed(write.pieces):
            for node in reversed(piece.run.between(piece.start, piece.stop)):
                above = node.parent
                node.readers[write.source] -= 1
                if write.source is Tier.DEVICE and not node.readers[write.source]:
                    self._residents.unpin(node)
                self._residents.feed(node, write.target, kind, None, gathered)
                self._residents.released(node, gathered)
                if above is not None and not above.removed and kind is RunKind.FAIL:
                    # This node may have been its parent's last child in the target tier. A node
                    # cannot leave a tier while one of its children is there.
                    self._residents.offer(above)
        return gathered.freed()

    def _path(self, end: Node, source: Tier, target: Tier) -> list[Node]:
        """Return the nodes up to `end` that `source` has and `target` lacks, in prompt order."""
        if source not in PAGED or source is target:
            raise MisuseError(
                f"no copy from {source.name.lower()} to {target.name.lower()}: a source is device "
                "or host"
            )
        if end.removed or end.detached:
            raise MisuseError(
                "this prefix is no longer in the cache: match it again, and lock it while it is "
                "used"
            )
        there, lacking = RunPhase.PRESENT, RunPhase.ABSENT
        return [n for n in upwards(end) if n.phase[target] is lacking and n.phase[source] is there][
            ::-1
        ]
