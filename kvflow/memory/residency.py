"""The state of a request, which can be copied out to host memory and back: the shell of the machine
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
    """`close` stopped the copy."""


class Resident:
    """The pages and rows that `owner` has in a pool, or a snapshot of them in host memory.

    Belongs to one event loop. `phase` is RESIDENT, LEAVING (during `retract`), AWAY, RETURNING
    (during `resume`), or ENDED (after `close`).
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
        """`pages` and `rows` are the stores of the pool.

        Without a `store` the state can be dropped, but not retracted.
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
        """Pages and rows of the state. Raises: MisuseError unless the phase is RESIDENT."""
        self._expect(P.RESIDENT)
        return self._places

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of pages and rows that the state has, or that `resume` will take."""
        return self._sizes

    def add(self, pages: PageIndices) -> None:
        """Add pages that `owner` took. Raises: MisuseError unless the phase is RESIDENT."""
        self._expect(P.RESIDENT)
        self._places = Places(np.concatenate((self._places.pages, pages)), self._places.rows)
        self._sizes = (int(self._places.pages.size), self._sizes[1])

    def hand_over(self, count: int) -> None:
        """Remove the first `count` pages, which now belong to another owner.

        Raises: MisuseError unless the phase is RESIDENT.
        """
        self._expect(P.RESIDENT)
        self._places = Places(self._places.pages[count:], self._places.rows)
        self._sizes = (int(self._places.pages.size), self._sizes[1])

    def needs(self, pages: int) -> None:
        """Free the snapshot, because the owner will compute the state again, in `pages` pages.

        Raises: MisuseError unless the phase is AWAY.
        """
        self._expect(P.AWAY)
        self._free_snapshot()
        self._sizes = (pages, self._sizes[1])

    @property
    def copied(self) -> bool:
        """True while there is a snapshot of the state in host memory."""
        return self._snapshot is not None

    async def retract(self) -> None:
        """Copy all pages and rows out, then give them back.

        The phase is AWAY afterwards, or ENDED if `close` was called during the copy. After an error
        or a cancellation it is RESIDENT again. The pages must not be written during the copy.
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
        """Give pages and rows back without a copy. Raises: MisuseError unless the phase is
        RESIDENT.
        """
        self._expect(P.RESIDENT)
        self._feed(K.DROP)

    async def resume(self) -> bool:
        """Take pages and rows (see `sizes`), and copy the snapshot into them.

        Returns False if there was no snapshot: the owner must then compute the state again. The
        phase is RESIDENT afterwards, or ENDED if `close` was called during the copy. After an error
        or a cancellation it is AWAY again. Raises: CapacityError if too few pages or rows are free
        (nothing is taken), MisuseError unless the phase is AWAY.
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
        """Free pages and host memory, once no copy or model step uses them.

        Idempotent, and valid in every phase.
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
            # A request needs both, so it must not keep pages while it waits for a row.
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
