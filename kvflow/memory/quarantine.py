"""A pool's quarantine: the unproven loans that closed nodes left, and the stores that must not hand
out the pages of these loans.

The quarantine belongs to the pool and not to a store, because the next node over the pool may use
another store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import OwnershipError
from kvflow.protocols.pages.layout import PageIndices, PoolLayout, unit_named
from kvflow.protocols.ports import Heir, LeaseId, PageStore, PlaneAddress, UnprovenLoan

log = logging.getLogger(__name__)


class _Lease:
    """The pages of one room, their unproven loans, and the stores that withhold the pages."""

    __slots__ = ("loans", "pages", "stores")

    def __init__(self, pages: PageIndices) -> None:
        self.pages = pages
        self.loans: list[UnprovenLoan] = []
        self.stores: list[PageStore] = []

    def is_withheld_in(self, store: PageStore) -> bool:
        return any(other is store for other in self.stores)


class PoolQuarantine:
    """The quarantine of one pool. Implements `protocols.ports.Quarantine`.

    A lock guards it, because the nodes over one pool may run in different threads.
    """

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout
        self._lock = threading.RLock()
        self.leases: dict[LeaseId, _Lease] = {}
        # The number of leases that contain each place. None until the first lease.
        self._named: NDArray[np.int32] | None = None
        # Stores of the pool itself, and running nodes with their stores.
        self._own: list[PageStore] = []
        self._heirs: list[tuple[Heir, PageStore]] = []

    def __repr__(self) -> str:
        return f"<PoolQuarantine of {len(self.leases)} leases, {len(self._heirs)} nodes>"

    @property
    def loans(self) -> list[UnprovenLoan]:
        """Unproven loans that earlier nodes left."""
        with self._lock:
            return [loan for lease in self.leases.values() for loan in lease.loans]

    def standing(self, loans: Sequence[UnprovenLoan]) -> list[UnprovenLoan]:
        with self._lock:
            return [
                loan
                for loan in loans
                if (lease := self.leases.get(loan.lease)) and loan in lease.loans
            ]

    def check(self, pages: PageIndices) -> None:
        """Raise OwnershipError, which names a remedy, if a page is in quarantine."""
        # Prefill checks every chunk, so the common case takes no lock.
        if not self.leases:
            return
        with self._lock:
            if self._named is None or not (kept := self._named[pages] > 0).any():
                return
            place = int(np.asarray(pages)[kept][0])
            loan = next(
                lease.loans[0] for lease in self.leases.values() if place in lease.pages.tolist()
            )
        layout = self.layout
        space = max(i for i, base in enumerate(layout.bases) if base <= place)
        place -= layout.bases[space]
        raise OwnershipError(
            f"{unit_named(layout, space)} {place} is in quarantine: an earlier node over this pool "
            f"lent it to prefill {loan.incarnation:016x} at {loan.control}, which may still write "
            "into it; use another one until that process is proven to have ended, or end its loans "
            f"with declare_dead({loan.incarnation:#x}, why)"
        )

    # --- stores

    def keep_out_of(self, store: PageStore, *, always: bool = False) -> None:
        """Make `store` withhold the pages in quarantine.

        Call it before a node takes pages from the store. `always` marks a store of the pool itself,
        which also withholds later leases while no node uses it.
        """
        with self._lock:
            if always:
                self._own.append(store)
            self._withhold(store, self.leases.values())

    def _withhold(self, store: PageStore, leases: Iterable[_Lease]) -> None:
        fresh = [lease for lease in leases if not lease.is_withheld_in(store)]
        if not fresh:
            return
        try:
            store.withhold(np.concatenate([lease.pages for lease in fresh]))
        except Exception as error:  # noqa: BLE001
            # The store has fewer pages than the pool, or it is a custom store with a bug. It
            # withholds the leases that it can. `check` still refuses the pages of the others, so
            # the error is only logged.
            if len(fresh) > 1:
                for lease in fresh:
                    self._withhold(store, (lease,))
            else:
                room = fresh[0].loans[0].room
                log.warning(
                    "%r cannot withhold the pages of room %d of an earlier node: %s",
                    store,
                    room,
                    error,
                )
            return
        for lease in fresh:
            lease.stores.append(store)

    # --- nodes

    def join(self, heir: Heir, store: PageStore) -> list[UnprovenLoan]:
        with self._lock:
            self._heirs.append((heir, store))
            self.keep_out_of(store)
            return self.loans

    def leave(self, heir: Heir) -> None:
        with self._lock:
            self._heirs = [(other, store) for other, store in self._heirs if other is not heir]

    def add(self, loans: Sequence[UnprovenLoan], lender: PageStore) -> None:
        if not loans:
            return
        with self._lock:
            fresh: dict[LeaseId, _Lease] = {}
            for loan in loans:
                lease = fresh.get(loan.lease) or fresh.setdefault(loan.lease, _Lease(loan.pages))
                lease.loans.append(loan)
            every = np.concatenate([lease.pages for lease in fresh.values()])
            if self._named is None:
                self._named = np.zeros(self.layout.num_places, dtype=np.int32)
            np.add.at(self._named, every, 1)
            self.leases |= fresh
            for store in (lender, *self._own, *(store for _, store in self._heirs)):
                self._withhold(store, fresh.values())
            heirs = [heir for heir, _ in self._heirs]
        # The heirs are called without the lock, because their own threads may need it.
        for heir in heirs:
            heir.inherit(self, loans)

    def free(self, lease: LeaseId) -> None:
        with self._lock:
            found = self.leases.pop(lease, None)
            if found is None:
                return
            assert self._named is not None
            np.subtract.at(self._named, found.pages, 1)
            for store in found.stores:
                try:
                    store.unhold(found.pages)
                except Exception:
                    # The other stores must still receive their pages.
                    log.exception("%r could not take pages back from quarantine", store)

    def forget(self, incarnation: int, writer: PlaneAddress | None) -> None:
        with self._lock:
            for name, lease in list(self.leases.items()):
                lease.loans = [
                    o for o in lease.loans if (o.incarnation, o.writer) != (incarnation, writer)
                ]
                # There may be no heir that frees a lease without loans, so free it here. If an heir
                # frees it again, nothing happens.
                if not lease.loans:
                    self.free(name)
            heirs = [heir for heir, _ in self._heirs]
        for heir in heirs:
            heir.writer_ended(incarnation, writer)
