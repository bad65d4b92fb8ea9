"""The state of a request, which can be copied out to host memory and back: the shell of the machine
`protocols.machines.residency`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from kvflow.aio import wait_or_cancel
from kvflow.memory.snapshot import Snapshot, SnapshotStore
from kvflow.protocols.errors import CapacityError, MisuseError
from kvflow.protocols.machines.residency import (
    TABLE,
    ResidencyCommand,
    ResidencyKind,
    ResidencyPhase,
)
from kvflow.protocols.pages.layout import NO_PLACES, Counts, PageIndices, Places
from kvflow.protocols.ports import PageStore

P, K, C = ResidencyPhase, ResidencyKind, ResidencyCommand
T = TypeVar("T")


class _StoppedError(Exception):
    """`close` stopped the copy."""


class Resident:
    """The places that `owner` has in a pool, or a snapshot of them in host memory.

    Belongs to one event loop. `phase` is RESIDENT, LEAVING (during `retract`), AWAY, RETURNING
    (during `resume`), or ENDED (after `close`).
    """

    def __init__(
        self,
        owner: Hashable,
        places: Places,
        *,
        allocators: Sequence[PageStore],
        store: SnapshotStore | None = None,
    ) -> None:
        """`allocators` are those of the pool, one for each space (`PagedPool.allocators`).

        Without a `store` the state can be dropped, but not retracted. Raises: MisuseError if there
        are not as many arrays of places as allocators.
        """
        if len(places) != len(allocators):
            raise MisuseError(
                f"places of {len(places)} spaces are given with {len(allocators)} allocators: both "
                "are given for every space of the pool"
            )
        self.owner = owner
        self.phase = P.RESIDENT
        self._places, self._sizes = places, _sizes(places)
        self._allocators, self._store = allocators, store
        self._snapshot: Snapshot | None = None
        self._copy: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return (
            f"<Resident {self.owner!r}: {self.phase.name.lower()}, places by space: "
            f"{', '.join(map(str, self._sizes))}>"
        )

    @property
    def places(self) -> Places:
        """Places of the state, by space. Raises: MisuseError unless the phase is RESIDENT."""
        self._expect(P.RESIDENT)
        return self._places

    @property
    def sizes(self) -> Counts:
        """Numbers of places by space that the state has, or that `resume` will take."""
        return self._sizes

    def add(self, pages: PageIndices, space: int = 0) -> None:
        """Add pages of a space that `owner` took.

        Raises: MisuseError unless the phase is RESIDENT.
        """
        self._expect(P.RESIDENT)
        self._change(space, np.concatenate((self._places[space], pages)))

    def hand_over(self, count: int, space: int = 0) -> None:
        """Remove the first `count` pages of a space, which now belong to another owner.

        Raises: MisuseError unless the phase is RESIDENT.
        """
        self._expect(P.RESIDENT)
        self._change(space, self._places[space][count:])

    def needs(self, pages: int, space: int = 0) -> None:
        """Free the snapshot, because the owner will compute the state again, in `pages` pages of
        this space, and in as many places of the others as before.

        Raises: MisuseError unless the phase is AWAY.
        """
        self._expect(P.AWAY)
        self._free_snapshot()
        self._sizes = (*self._sizes[:space], pages, *self._sizes[space + 1 :])

    @property
    def copied(self) -> bool:
        """True while there is a snapshot of the state in host memory."""
        return self._snapshot is not None

    async def retract(self) -> None:
        """Copy the places of all spaces out, then give them back.

        The phase is AWAY afterwards, or ENDED if `close` was called during the copy. After an error
        or a cancellation it is RESIDENT again. The places must not be written during the copy.
        Raises: HostMemoryError if host memory is full; MisuseError without a store, or unless the
        phase is RESIDENT.
        """
        if self._store is None:
            raise MisuseError("there is no host memory to retract to")
        self._expect(P.RESIDENT)
        self._feed(K.RETRACT)
        with self._copying():
            self._snapshot = await self._ended(self._store.take(self._places), Snapshot.close)
            self._feed(K.COPIED_OUT)

    def drop(self) -> None:
        """Give all places back without a copy. Raises: MisuseError unless the phase is RESIDENT."""
        self._expect(P.RESIDENT)
        self._feed(K.DROP)

    async def resume(self) -> bool:
        """Take places of all spaces (see `sizes`), and copy the snapshot into them.

        Returns False if there was no snapshot: the owner must then compute the state again. The
        phase is RESIDENT afterwards, or ENDED if `close` was called during the copy. After an error
        or a cancellation it is AWAY again. Raises: CapacityError if too few places of a space are
        free (nothing is taken), MisuseError unless the phase is AWAY.
        """
        self._expect(P.AWAY)
        self._places = self._taken()
        self._feed(K.RESUME)
        if self._snapshot is None:
            self._feed(K.COPIED_IN)
            return False
        store = self._store or self._snapshot.store
        with self._copying():
            await self._ended(store.restore(self._snapshot, self._places), lambda _: None)
            self._feed(K.COPIED_IN)
        return True

    def close(self) -> None:
        """Free places and host memory, once no copy or model step uses them.

        Idempotent, and valid in every phase.
        """
        self._feed(K.CLOSE)

    def _taken(self) -> Places:
        found: list[PageIndices] = []
        try:
            for allocator, count in zip(self._allocators, self._sizes, strict=True):
                found.append(allocator.take(count, self.owner))
        except CapacityError:
            # A request needs places of every space, so it must not keep some while it waits.
            for allocator, own in zip(self._allocators, found, strict=False):
                allocator.give_back(own, self.owner)
            raise
        return tuple(found)

    def _change(self, space: int, own: PageIndices) -> None:
        self._places = (*self._places[:space], own, *self._places[space + 1 :])
        self._sizes = _sizes(self._places)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._feed(K.COPY_ENDED)
            if not isinstance(error, _StoppedError):
                raise

    async def _ended(self, copying: Coroutine[Any, Any, T], undo: Callable[[T], object]) -> T:
        """Run a copy, and return its result. The copy is over when this call returns or raises.

        Raises: _StoppedError if `close` stopped the copy.
        """
        self._copy = copy = asyncio.ensure_future(copying)
        try:
            await wait_or_cancel(copy, undo)
        finally:
            self._copy = None
        if copy.cancelled():
            raise _StoppedError
        return copy.result()

    def _expect(self, phase: ResidencyPhase) -> None:
        if self.phase is not phase:
            raise MisuseError(f"{self!r} is not {phase.name.lower()}")

    def _feed(self, kind: ResidencyKind) -> None:
        move = TABLE.moves[self.phase, kind]
        if move is None:
            return
        self.phase = move.phase
        for command in move.commands:
            _RUN[command](self)

    def _stop_copy(self) -> None:
        if self._copy is not None:
            self._copy.cancel()

    def _give_back(self) -> None:
        places, self._places = self._places, tuple(NO_PLACES for _ in self._places)
        for allocator, own in zip(self._allocators, places, strict=True):
            allocator.give_back(own, self.owner)

    def _free_snapshot(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.close()


def _sizes(places: Places) -> Counts:
    return tuple(len(own) for own in places)


_RUN: dict[ResidencyCommand, Callable[[Resident], None]] = {
    C.STOP_COPY: Resident._stop_copy,
    C.GIVE_BACK: Resident._give_back,
    C.FREE_SNAPSHOT: Resident._free_snapshot,
}
