"""A request's state, which can leave the device and come back: the shell of
`protocols.machines.residency`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator
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
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, Places
from kvflow.protocols.ports import PageStore

P, K, C = ResidencyPhase, ResidencyKind, ResidencyCommand
T = TypeVar("T")
NOTHING = Places(NO_PLACES, NO_PLACES)


class _StoppedError(Exception):
    """`close` has stopped the copy."""


class Resident:
    """Pages and rows of a pool, all of which belong to `owner`, or a snapshot of them.

    Used on one event loop.

    `phase` is RESIDENT, LEAVING (`retract`), AWAY, RETURNING (`resume`), or ENDED (`close`).
    """

    def __init__(
        self,
        owner: Hashable,
        places: Places,
        *,
        pages: PageStore,
        rows: PageStore | None = None,
        store: SnapshotStore | None = None,
    ) -> None:
        """`pages` and `rows` say who owns what of the pool; without a `store` it can be dropped,
        and not retracted.
        """
        self.owner = owner
        self.phase = P.RESIDENT
        self._places, self._sizes = places, (int(places.pages.size), int(places.rows.size))
        self._pages, self._rows, self._store = pages, rows, store
        self._snapshot: Snapshot | None = None
        self._copy: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return (
            f"<Resident {self.owner!r}: {self.phase.name.lower()}, {self._sizes[0]} pages and "
            f"{self._sizes[1]} rows>"
        )

    @property
    def places(self) -> Places:
        """What it owns of the pool. Raises: MisuseError unless it is RESIDENT."""
        self._expect(P.RESIDENT)
        return self._places

    @property
    def sizes(self) -> tuple[int, int]:
        """How many pages and rows it has, or needs to come back."""
        return self._sizes

    def add(self, pages: PageIndices) -> None:
        """More pages, which `owner` has taken. Raises: MisuseError unless it is RESIDENT."""
        self._expect(P.RESIDENT)
        self._places = Places(np.concatenate((self._places.pages, pages)), self._places.rows)
        self._sizes = (int(self._places.pages.size), self._sizes[1])

    def hand_over(self, count: int) -> None:
        """The first `count` pages have another owner now, and stay.

        Raises: MisuseError unless it is RESIDENT.
        """
        self._expect(P.RESIDENT)
        self._places = Places(self._places.pages[count:], self._places.rows)
        self._sizes = (int(self._places.pages.size), self._sizes[1])

    def needs(self, pages: int) -> None:
        """It is to be computed again, in so many pages: what was copied out is of no use any more.

        Raises: MisuseError unless it is AWAY."""
        self._expect(P.AWAY)
        self._free_snapshot()
        self._sizes = (pages, self._sizes[1])

    @property
    def copied(self) -> bool:
        """Its state is in host memory."""
        return self._snapshot is not None

    async def retract(self) -> None:
        """Copy everything out, then give pages and rows back.

        It is AWAY afterwards, or ENDED if it was closed.

        Nothing may write to the pages meanwhile. After an error, or a cancellation, it is RESIDENT
        as before. Raises: HostMemoryError, MisuseError without a store or unless it is RESIDENT.
        """
        if self._store is None:
            raise MisuseError("there is no host memory to retract to")
        self._expect(P.RESIDENT)
        self._feed(K.RETRACT)
        with self._copying():
            self._snapshot = await self._ended(self._store.take(self._places), Snapshot.close)
            self._feed(K.COPIED_OUT)

    def drop(self) -> None:
        """Give pages and rows back without a copy. Raises: MisuseError unless it is RESIDENT."""
        self._expect(P.RESIDENT)
        self._feed(K.DROP)

    async def resume(self) -> bool:
        """Take as many pages and rows as it had, and copy into them what was copied out.

        It is RESIDENT afterwards, or ENDED if it was closed; after an error, or a cancellation,
        AWAY as before. Returns whether its state came back: what was dropped, its owner computes
        again.
        Raises: CapacityError when there are too few pages or rows (none is taken), MisuseError
        unless it is AWAY.
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
        """Free whatever it has, pages and host memory, as soon as no copy or step uses it.

        Idempotent, in any phase.
        """
        self._feed(K.CLOSE)

    def _taken(self) -> Places:
        count, rows = self._sizes
        pages = self._pages.take(count, self.owner)
        if self._rows is None or not rows:
            return Places(pages, NO_PLACES)
        try:
            return Places(pages, self._rows.take(rows, self.owner))
        except CapacityError:
            self._pages.give_back(pages, self.owner)
            raise

    @contextmanager
    def _copying(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._feed(K.COPY_ENDED)
            if not isinstance(error, _StoppedError):
                raise

    async def _ended(self, copying: Coroutine[Any, Any, T], undo: Callable[[T], object]) -> T:
        """What `copying` returns; it has ended when this returns or raises.

        Raises: _StoppedError.
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
        places, self._places = self._places, NOTHING
        self._pages.give_back(places.pages, self.owner)
        if self._rows is not None:
            self._rows.give_back(places.rows, self.owner)

    def _free_snapshot(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.close()


_RUN: dict[ResidencyCommand, Callable[[Resident], None]] = {
    C.STOP_COPY: Resident._stop_copy,
    C.GIVE_BACK: Resident._give_back,
    C.FREE_SNAPSHOT: Resident._free_snapshot,
}
