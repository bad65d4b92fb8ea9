"""A data plane over a pool that it cannot read: each slice of a write passes through staging, which
is host memory apart from the pool.

What status means landed?       What it means on the inner plane, for every slice; a slice is
                                written only after it has been copied out.
Can a write outlive its error?  As on the inner plane. If a copy out of the pool fails, its write
                                ends cancelled and drained.
What fences a peer?             Whatever fences a peer of the inner plane.

A write does not end before its copies end. While one slice travels, a separate thread copies out
the next one. Every route has its own memory for a few slices, so a peer that takes no writes does
not use up the memory of others. A doubtful block may read that memory later, but what it reads can
only reach target pages that are still on loan, in a room that failed.

If the target would receive tiny blocks, slices of token slots, they are gathered in staging in the
target's order, so that adjacent slices form one block (`slices`, `pages.arrange`).
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor, Future
from contextlib import suppress

import numpy as np

from kvflow.aio import Threads, run_to_end
from kvflow.memory.staging import SLICE_BYTES, Staging
from kvflow.protocols.errors import CapacityError, LayoutError, TransferError
from kvflow.protocols.pages.arrange import as_in, blocks_between
from kvflow.protocols.pages.fine import common_sizes, divided, in_common_pages
from kvflow.protocols.pages.layout import Counts, PageIndices, PoolLayout
from kvflow.protocols.pages.plan import Pairing
from kvflow.protocols.ports import DataPlane, PlaneAddress, WriteOutcome
from kvflow.transports.data.route import PlannedRoute, Planner
from kvflow.transports.data.slices import are_tiny, remedy
from kvflow.transports.data.threaded import EnginePlane
from kvflow.transports.data.write_thread import Assignment, WriteJob

_log = logging.getLogger(__name__)
_SLICES = 3  # slices of one route: one travels, one is copied, and one waits
_ROUTES = 8  # routes that even a small staging has space for
_WAIT_S = 0.01  # longest wait for a copy, whose end wakes the plane's thread


class StagedPlane:
    """Implements `protocols.ports.DataPlane` around a plane whose routes are `PlannedRoute`s."""

    def __init__(self, inner: DataPlane, staging: Staging) -> None:
        """`inner` is a plane for the staging's host pool. No other plane may use this staging."""
        self.inner, self._staging = inner, staging
        if isinstance(inner, EnginePlane):
            inner.warns_of_slices = False
        self._copying = Threads("staging")
        self._routes: set[StagedRoute] = set()

    def __repr__(self) -> str:
        return f"<StagedPlane around {self.inner!r}>"

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def stalled_s(self) -> float:
        return self.inner.stalled_s

    def export(self, layout: PoolLayout) -> tuple[PlaneAddress, PoolLayout]:
        """Export the staging, whose layout takes the place of `layout`."""
        return self.inner.export(self._staging.host.layout.served)

    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> StagedRoute:
        """Open a route, and take staging for it.

        Raises: the errors of the inner plane, LayoutError if that plane cannot write from staging,
        and TransferError if no staging is left.
        """
        inner = await self.inner.connect(address, layout)
        try:
            if not isinstance(inner, PlannedRoute):
                raise LayoutError(f"plane {self.name!r} cannot write from staging")
            ours = self._staging.pool.layout.served
            planner = Planner(ours, layout, max_block_bytes=SLICE_BYTES)
            out = self._gather(inner, layout) or self._out_for(layout)
            route = StagedRoute(
                inner, planner, self._staging, self._copying.executor, self._routes, out
            )
        except BaseException:
            inner.close()
            raise
        self._routes.add(route)
        return route

    def _out_for(self, target: PoolLayout) -> Pairing:
        """Return the plan for copies into the staging, in the pages in which writes are planned."""
        host = self._staging.host.layout.served
        sizes, _ = common_sizes(host, target)
        same = sizes == tuple(space.page_size for space in host.spaces)
        return self._staging.plan_out(() if same else sizes)

    def _gather(self, inner: PlannedRoute, target: PoolLayout) -> Pairing | None:
        """Set up `inner` to write tiny slices in larger blocks.

        Return the `Pairing` that copies slices from the pool in the order of these blocks; None if
        the slices are not tiny, or gathering makes no larger blocks.
        """
        host, _ = in_common_pages(self._staging.host.layout.served, target)
        if not are_tiny(self.name, before := blocks_between(host, target)):
            return None
        gathered = as_in(target, host)
        after = blocks_between(gathered, target)
        if are_tiny(self.name, after):
            _log.warning("%s", remedy(self.name, after))
        if after.mean_bytes <= before.mean_bytes:
            return None
        _log.info(
            "slices of %d bytes are written over %s in blocks of %d, from staging",
            before.mean_bytes,
            self.name,
            after.mean_bytes,
        )
        inner.planner = inner.planner.from_source(gathered)
        own, _ = in_common_pages(self._staging.pool.layout.served, target)
        return Pairing(own, gathered, ("pool", "staging"))

    async def fence(self, writer: PlaneAddress) -> None:
        await self.inner.fence(writer)

    def sees_alive(self, writer: PlaneAddress) -> bool:
        return self.inner.sees_alive(writer)

    async def close(self) -> None:
        """Close the inner plane, then end the copies and close the remaining routes."""
        try:
            await self.inner.close()
        finally:
            try:
                # The thread works in order, so no copy runs once this empty call ends. The
                # wait has no time limit, because a copy that hangs may still use the memory that is
                # freed next. If the thread cannot be started, it has never copied.
                with suppress(RuntimeError):
                    await run_to_end(self._copying.start(lambda _: None).ended)
            finally:
                # No copy runs any more, even if this close is cancelled.
                for route in list(self._routes):
                    route.close()


class StagedRoute(PlannedRoute):
    """Implements `protocols.ports.Route`.

    `places` is the route's free staging, by space. Only the plane's thread uses it.
    """

    def __init__(
        self,
        inner: PlannedRoute,
        planner: Planner,
        staging: Staging,
        copying: Executor,
        siblings: set[StagedRoute],
        out: Pairing,
    ) -> None:
        """`out` plans the copies from the pool into the staging. Both sides of it are described in
        the pages in which writes are planned.
        """
        super().__init__(inner.thread, planner, siblings)
        self.inner, self.staging, self.copying, self._out = inner, staging, copying, out
        layout = self._layout = out.target
        # A room has one row.
        self.slice_counts: Counts = tuple(
            1
            if space.in_rows
            else min(max(1, space.count // (_SLICES * _ROUTES)), max(1, SLICE_BYTES // (size or 1)))
            for space, size in zip(layout.spaces, layout.place_bytes, strict=True)
        )
        """The most places of one slice, by space. A slice has places of one space only."""
        self._owned = self._take(staging.host.layout)
        owned = staging.host.layout.split(self._owned)
        self.places = [
            divided(own, split) for own, split in zip(owned, self._splits(), strict=True)
        ]

    def _splits(self) -> Counts:
        """Return how many of the pages in which writes are planned are in a place of the staging,
        by space.
        """
        both = zip(self._layout.counts, self.staging.host.layout.counts, strict=True)
        return tuple(fine // whole for fine, whole in both)

    def _take(self, layout: PoolLayout) -> PageIndices:
        # Every room needs a row, so a small staging must have rows for several routes.
        counts = tuple(
            min(
                -(-_SLICES * most // split),
                max(1, space.count // _ROUTES) if space.in_rows else space.count,
            )
            for space, most, split in zip(
                layout.spaces, self.slice_counts, self._splits(), strict=True
            )
        )
        try:
            return self.staging.host.places.take_room(counts, self)
        except CapacityError as error:
            raise TransferError(
                f"no staging is left for another decode ({error}; {len(self._siblings)} have "
                "some): a larger staging has room for more"
            ) from error

    def begin(self, write: Assignment) -> StagedJob:
        return StagedJob(self, write)

    def next_slice(self, places: PageIndices) -> tuple[PageIndices, PageIndices] | None:
        """Return the first of `places` that make up a slice, and staging that is reserved for them.

        Returns None if too little staging is free.
        """
        layout = self._out.source
        space = int(layout.spaces_at(places[:1])[0])
        found, free = places[: self.slice_counts[space]], self.places[space]
        # The places of one space need not be the last of the list.
        base = layout.bases[space]
        if (others := np.flatnonzero((found < base) | (found >= base + layout.counts[space]))).size:
            found = found[: int(others[0])]
        if found.size > free.size:
            return None
        self.places[space] = free[found.size :]
        return found, free[: found.size] + np.int32(self._layout.bases[space])

    def copy_out(self, write: Assignment, places: PageIndices, staged: PageIndices) -> Future[bool]:
        """Start to copy places into their staging. The result is False if the write was cancelled.

        Raises: RuntimeError when no thread can be started.
        """
        return self.copying.submit(
            self.staging.copy_out, places, staged, lambda: write.cancelled, self._out
        )

    def give_back(self, staged: PageIndices) -> None:
        more = self._layout.split(staged)
        both = zip(self.places, more, strict=True)
        self.places = [np.concatenate(indices, dtype=np.int32) for indices in both]

    def release(self) -> None:
        self.inner.close()
        self.staging.host.places.give_back(self._owned, self)


class _Slice:
    """A part of a write whose source is in staging. Implements `write_thread.Assignment`."""

    __slots__ = ("copied", "job", "source_pages", "target_pages", "total_bytes", "write")

    def __init__(
        self,
        write: Assignment,
        staged: PageIndices,
        target_pages: PageIndices,
        total_bytes: int,
        copied: Future[bool],
    ) -> None:
        self.write, self.source_pages, self.target_pages = write, staged, target_pages
        self.total_bytes, self.copied = total_bytes, copied
        self.job: WriteJob | None = None

    @property
    def cancelled(self) -> bool:
        return self.write.cancelled


class StagedJob:
    """Implements `write_thread.WriteJob`: it copies out slices and writes them in order."""

    __slots__ = (
        "_at",
        "_ended_bytes",
        "_route",
        "_slices",
        "_worst",
        "_write",
        "error",
        "landed_bytes",
        "outcome",
        "pause_s",
    )

    def __init__(self, route: StagedRoute, write: Assignment) -> None:
        self._route, self._write = route, write
        self._at = 0  # index of the next place to copy
        self._slices: list[_Slice] = []
        self._ended_bytes = self.landed_bytes = 0
        self._worst = WriteOutcome.LANDED  # worst outcome of the slices that ended
        self.error = ""
        self.outcome: WriteOutcome | None = None
        self.pause_s = 0.0

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        changed = not cancelled and not self.error and self._copy_next()
        left, self.pause_s = max_bytes, _WAIT_S
        for part in self._slices[:]:
            if not part.copied.done():
                break
            moved = self._write_on(part, left, cancelled or bool(self.error))
            changed |= moved >= 0
            left -= max(0, moved)
            if part.job is not None and part.job.outcome is None:
                self.pause_s = min(self.pause_s, part.job.pause_s)
        self.landed_bytes = self._ended_bytes + sum(
            part.job.landed_bytes for part in self._slices if part.job
        )
        whole = self._at == len(self._write.source_pages)
        if not self._slices and (whole or cancelled or self.error):
            landed = self._worst is WriteOutcome.LANDED
            self.outcome = WriteOutcome.CANCELLED if landed and not whole else self._worst
        return max_bytes - left if left < max_bytes or changed or self.outcome is not None else -1

    def _copy_next(self) -> bool:
        """Start copying the next slices while staging is free.

        Returns True if a copy was started, or failed to start.
        """
        route, write, begun = self._route, self._write, False
        while self._at < len(write.source_pages) and len(self._slices) < _SLICES:
            reserved = route.next_slice(write.source_pages[self._at :])
            if reserved is None:
                # Slices under way return their staging when they end.
                break
            places, staged = reserved
            targets = write.target_pages[self._at : self._at + places.size]
            try:
                copied = route.copy_out(write, places, staged)
            except RuntimeError as error:
                # The system has no thread left. The write ends, drained.
                route.give_back(staged)
                self.error = f"no thread copies from the pool: {error}"
                self._worst = WriteOutcome.CANCELLED
                return True
            self._slices.append(
                _Slice(write, staged, targets, route.planner.bytes_of(places), copied)
            )
            self._at += places.size
            copied.add_done_callback(lambda _: route.thread.wake())
            begun = True
        return begun

    def _write_on(self, part: _Slice, max_bytes: int, stopped: bool) -> int:
        """Advance a slice that was copied out (see `WriteJob.advance`). Drop it when it ends."""
        if part.job is None and (not self._was_copied(part) or stopped):
            self._end(part, 0, WriteOutcome.CANCELLED)
            return 0
        try:
            part.job = part.job or self._route.inner.begin(part)
            moved = part.job.advance(max_bytes, stopped)
        except Exception as error:  # noqa: BLE001
            # Other slices of this write may still be copied; the write ends after them.
            self._route.thread.surprises += 1
            self.error = self.error or f"{type(error).__name__}: {error}"
            self._end(part, 0, WriteOutcome.UNPROVEN)
            return 0
        if part.job.outcome is not None:
            self.error = self.error or part.job.error
            self._end(part, part.job.landed_bytes, part.job.outcome)
        return moved

    def _was_copied(self, part: _Slice) -> bool:
        try:
            # The result is False after a cancel.
            return part.copied.result()
        except Exception as error:  # noqa: BLE001
            # A failed copy ends only this write, which is drained.
            self.error = (
                self.error or f"a copy from the pool failed: {str(error) or type(error).__name__}"
            )
            return False

    def _end(self, part: _Slice, landed_bytes: int, outcome: WriteOutcome) -> None:
        self._slices.remove(part)
        self._route.give_back(part.source_pages)
        self._ended_bytes += landed_bytes
        self._worst = max(self._worst, outcome, key=_DOUBT.index)


# Outcomes in order of doubt: a write ends with the worst outcome of its slices.
_DOUBT = (WriteOutcome.LANDED, WriteOutcome.CANCELLED, WriteOutcome.UNPROVEN)
