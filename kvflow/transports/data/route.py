"""Planning of blocks from page lists, for one pair of pools.

The event loop checks the lists, and the plane's thread plans the blocks. The event loop also plans
the blocks of a tiny write that it copies itself: see `Planner.few_blocks`.
"""

from __future__ import annotations

import copy
from itertools import islice
from typing import NamedTuple, Self

import numpy as np

from kvflow.memory.copies import are_small
from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.fine import in_common_pages
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.pages.plan import Addresses, Blocks, Pairing
from kvflow.protocols.ports import Write, WriteOutcome
from kvflow.transports.data.write_thread import Assignment, ThreadWrite, WriteJob, WriteThread

FEW_BLOCKS = 64
# One block of place 0 of a space: source, distance to that of place 1, target, distance, size. A
# named tuple takes longer to unpack.
_Step = tuple[int, int, int, int, int]


class BlockList(NamedTuple):
    """Parallel lists of Python ints, the fastest arguments for ctypes and pybind calls."""

    sources: list[int]
    targets: list[int]
    sizes: list[int]


class Planner:
    """Plans blocks with a `Pairing`, at the addresses where this plane reaches the target."""

    def __init__(
        self,
        source: PoolLayout,
        target: PoolLayout,
        *,
        max_block_bytes: int,
    ) -> None:
        """`target` may also have parts of other ranks, which `source` lacks. If the pools have
        pages of different sizes, all lists number fine pages (see `pages.fine`).

        Raises: LayoutError when the pools do not fit.
        """
        ours, theirs = in_common_pages(source, target)
        self._pairing = Pairing(ours, theirs, partly=True)
        self._max_block_bytes = max_block_bytes
        self._moved = 0
        self._target_bases: Addresses | None = None
        self.page_bytes, self.place_bytes = self._pairing.page_bytes, self._pairing.place_bytes
        """Bytes written per page of the first space, and per place of each space."""
        self._whole_target, self._source, self._target = target, ours, theirs
        self._source_pages, self._target_pages = ours.num_pages, theirs.num_pages
        self._one_space = len(source.spaces) == 1
        self._in_fine_pages = ours is not source or theirs is not target
        # For a tiny write, numpy costs more than the write itself, so places with few blocks are
        # planned in plain ints. Fine pages have no steps: their distances differ.
        self._steps = [self._steps_of(space) for space in range(len(source.spaces))]

    def from_source(self, source: PoolLayout) -> Planner:
        """Return a planner like this one for another layout of the source."""
        planner = Planner(source, self._whole_target, max_block_bytes=self._max_block_bytes)
        return planner.moved(self._moved)

    def moved(self, distance: int) -> Planner:
        """Return a planner like this one for a target that lies `distance` bytes further on than
        its layout says. It shares all that is known of the two layouts with this one.
        """
        addresses = [b.address + distance for b in self._target.buffers]
        planner = copy.copy(self)
        planner._moved, planner._target_bases = distance, np.array(addresses, dtype=np.int64)
        return planner

    def check(self, source_pages: PageIndices, target_pages: PageIndices) -> None:
        """Check the two page lists of a write.

        Raises: LayoutError for empty lists, lists of different lengths, an index outside its pool,
        and a place that would be written onto one of another space.
        """
        # For a single page, this shorter check is several times as fast.
        one = source_pages.shape == target_pages.shape == (1,)
        if (
            one
            and 0 <= source_pages[0] < self._source_pages
            and 0 <= target_pages[0] < self._target_pages
        ):
            return
        if source_pages.size == 0:
            raise LayoutError("a write of no pages")
        self._pairing.check(source_pages, target_pages)
        if self._one_space:
            return
        ours = self._source.spaces_at(source_pages)
        theirs = self._target.spaces_at(target_pages)
        if (wrong := ours != theirs).any():
            at = int(np.argmax(wrong))
            here, there = self._source.spaces[ours[at]], self._target.spaces[theirs[at]]
            raise LayoutError(
                f"a {here.unit} of space {here.name!r} is written onto a {there.unit} of space "
                f"{there.name!r}"
            )

    def bytes_of(self, source_pages: PageIndices) -> int:
        if self._one_space:
            return self.page_bytes * source_pages.size
        counts = self._source.counted(source_pages)
        return sum(count * size for count, size in zip(counts, self.place_bytes, strict=True))

    def first_blocks(
        self, source_pages: PageIndices, target_pages: PageIndices
    ) -> BlockList | None:
        """Return the blocks of a write of one place if there are few, otherwise None."""
        return self.few_blocks(source_pages, target_pages) if source_pages.size == 1 else None

    def few_blocks(self, source_pages: PageIndices, target_pages: PageIndices) -> BlockList | None:
        """Return all blocks, without merging adjacent places.

        Returns None for no block, and for more than `FEW_BLOCKS`.
        """
        if self._in_fine_pages:
            return self._few_fine_blocks(source_pages, target_pages)
        if self._one_space:
            count = source_pages.size * len(self._steps[0])
            parts = [(self._steps[0], source_pages, target_pages)]
        else:
            ours, theirs = self._source.split(source_pages), self._target.split(target_pages)
            parts = list(zip(self._steps, ours, theirs, strict=True))
            count = sum(own.size * len(steps) for steps, own, _ in parts)
        if not 0 < count <= FEW_BLOCKS:
            return None
        sources: list[int] = []
        targets: list[int] = []
        sizes: list[int] = []
        moved = self._moved
        for steps, here, there in parts:
            for source_page, target_page in zip(here.tolist(), there.tolist(), strict=True):
                for source, source_step, target, target_step, size in steps:
                    sources.append(source + source_step * source_page)
                    targets.append(moved + target + target_step * target_page)
                    sizes.append(size)
        return BlockList(sources, targets, sizes)

    def _few_fine_blocks(
        self, source_pages: PageIndices, target_pages: PageIndices
    ) -> BlockList | None:
        if not 0 < source_pages.size <= FEW_BLOCKS:
            return None
        found = self.blocks(source_pages, target_pages)
        if not 0 < found[2].size <= FEW_BLOCKS:
            return None
        return BlockList(*(column.tolist() for column in found))

    def blocks(
        self, source_pages: PageIndices, target_pages: PageIndices
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Return sources, targets and sizes, each int64 [n]. No block exceeds the plane's limit."""
        return self._pairing.blocks(
            source_pages,
            target_pages,
            max_block_bytes=self._max_block_bytes,
            target_bases=self._target_bases,
        )

    def _steps_of(self, space: int) -> list[_Step]:
        """Return the blocks of a place of this space, at most `FEW_BLOCKS + 1` of them."""
        at_0, at_1 = (self._place_blocks(space, place) for place in (0, 1))
        steps = zip(at_0.sources, at_1.sources, at_0.targets, at_1.targets, at_0.sizes, strict=True)
        every = ((s, s1 - s, t, t1 - t, size) for s, s1, t, t1, size in steps)
        return list(islice(every, FEW_BLOCKS + 1))

    def _place_blocks(self, space: int, place: int) -> BlockList:
        # A side with only one place in the space uses that one, and never its step.
        first = (
            np.array([layout.bases[space] + min(place, layout.counts[space] - 1)], dtype=np.int32)
            for layout in (self._source, self._target)
        )
        return BlockList(*(column.tolist() for column in self.blocks(*first)))


class PlannedRoute:
    """The event loop's half of a `ports.Route`. A back end adds `begin` and `release`."""

    def __init__(self, thread: WriteThread, planner: Planner, siblings: set[Self]) -> None:
        """`siblings` holds the plane's open routes; the route removes itself when it closes."""
        self.planner = planner
        self.closed = False
        self.thread = thread
        self._siblings = siblings

    def write(self, source_pages: PageIndices, target_pages: PageIndices) -> Write:
        self.check_write(source_pages, target_pages)
        write = self.write_of(self.thread, source_pages, target_pages)
        if not self.write_at_once(write):
            self.thread.submit(write)
        return write

    def check_write(self, source_pages: PageIndices, target_pages: PageIndices) -> None:
        """Check the page lists of a write. Raises: LayoutError; TransferError after `close`."""
        if self.closed:
            raise TransferError("the route is closed; connect again to write to that peer")
        self.planner.check(source_pages, target_pages)

    def write_of(
        self, thread: WriteThread, source_pages: PageIndices, target_pages: PageIndices
    ) -> ThreadWrite:
        """Return a write for `thread`, which is not submitted yet."""
        total_bytes = self.planner.bytes_of(source_pages)
        return ThreadWrite(thread, self, source_pages, target_pages, total_bytes)

    def write_at_once(self, write: ThreadWrite) -> bool:
        """Do a tiny write on the event loop, if the back end can and `WriteThread.admit` allows it.

        Return False when the write has to be submitted to the thread.
        """
        return False

    def begin(self, write: Assignment) -> WriteJob:
        """Return the job for a write; see `write_thread.Work`."""
        raise NotImplementedError

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._siblings.discard(self)
            self.release()

    def release(self) -> None:
        """Release the peer's resources that this route holds. Called once."""
        raise NotImplementedError


def outcome_of(error: str, landed_bytes: int, total_bytes: int) -> WriteOutcome:
    """Return the outcome of a write that has no block under way any more."""
    if error:
        return WriteOutcome.UNPROVEN
    return WriteOutcome.LANDED if landed_bytes == total_bytes else WriteOutcome.CANCELLED


class BlockQueue:
    """The blocks of one write that are still to be submitted, taken in groups of whole blocks."""

    __slots__ = ("_columns", "_few", "_given", "_known_ends", "_next", "are_small", "left_bytes")

    def __init__(
        self, planner: Planner, source_pages: PageIndices, target_pages: PageIndices
    ) -> None:
        self._few = planner.first_blocks(source_pages, target_pages)
        self.left_bytes = planner.bytes_of(source_pages)
        self._next = self._given = 0
        self._known_ends: Addresses | None = None
        # True if `take_small` is faster, for a back end that copies blocks without an engine.
        self.are_small = False
        if self._few is None:
            self._columns = Blocks(*planner.blocks(source_pages, target_pages))
            self.are_small = are_small(self._columns)

    @property
    def _ends(self) -> Addresses:
        """Bytes up to the end of each block."""
        if self._known_ends is None:
            sizes = self._columns.sizes if self._few is None else self._few.sizes
            self._known_ends = np.cumsum(sizes)
        return self._known_ends

    def take(self, max_bytes: int, max_blocks: int) -> BlockList:
        """Return the next blocks, as many as fit.

        The result has at least one block if any is left and both limits are above 0.
        """
        if max_bytes <= 0 or max_blocks <= 0 or not self.left_bytes:
            return _NOTHING
        # A few blocks are mostly taken together, which needs no search for the last one that fits.
        if (
            (few := self._few) is not None
            and not self._next
            and self.left_bytes <= max_bytes
            and len(few.sizes) <= max_blocks
        ):
            self.left_bytes = 0
            return few
        start, stop = self._advance(max_bytes, max_blocks)
        columns = few if few is not None else self._columns
        return BlockList(
            *(c[start:stop] if isinstance(c, list) else c[start:stop].tolist() for c in columns)
        )

    def take_small(self, max_bytes: int) -> Blocks:
        """Return the next blocks of a queue whose blocks are small. `max_bytes` must be above 0."""
        start, stop = self._advance(max_bytes, self._ends.size)
        return Blocks(*(column[start:stop] for column in self._columns))

    def _advance(self, max_bytes: int, max_blocks: int) -> tuple[int, int]:
        start, ends = self._next, self._ends
        stop = int(np.searchsorted(ends, self._given + max_bytes, side="right"))
        stop = min(max(stop, start + 1), start + max_blocks, ends.size)
        self._next = stop
        given = int(ends[stop - 1])
        self.left_bytes -= given - self._given
        self._given = given
        return start, stop


_NOTHING = BlockList([], [], [])


class PlannedJob:
    """The common part of the `write_thread.WriteJob`s that move a write block by block."""

    __slots__ = ("_blocks", "_write", "error", "landed_bytes", "outcome", "pause_s")

    def __init__(self, route: PlannedRoute, write: Assignment) -> None:
        self._write = write
        self._blocks = BlockQueue(route.planner, write.source_pages, write.target_pages)
        self.landed_bytes, self.error = 0, ""
        self.outcome: WriteOutcome | None = None
        self.pause_s = 0.0
