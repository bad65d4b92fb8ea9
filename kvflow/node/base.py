"""The base class of prefill and decode nodes."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

from kvflow.aio import run_to_end
from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.prefill import PrefillShell
from kvflow.memory.checksum import PageChecksums
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.pages.layout import Counts as PlaceCounts
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import (
    Arrivals,
    Checksums,
    DataPlane,
    PageStore,
    PlaneAddress,
    Quarantine,
    UnprovenLoan,
)
from kvflow.protocols.waiting import Waits
from kvflow.protocols.wire.messages import Incarnation
from kvflow.protocols.wire.ranks import PoolShape
from kvflow.telemetry.counters import Counts
from kvflow.transports.data.select import plane_for

S = TypeVar("S", PrefillShell, DecodeShell)


class Node(Generic[S]):
    """A node of either role: its identity, pool, page store and data plane, and its life from
    `start` to `close`.
    """

    role = ""
    _shell: S | None = None
    _closing: asyncio.Task[None] | None = None
    _unproven: Sequence[UnprovenLoan] = ()
    _arrivals: Arrivals | None = None

    def __init__(
        self,
        pool: PagedPool,
        plane: DataPlane | str,
        *,
        host: str,
        pages: PageStore | None,
        timing: Timing | None,
        bounds: Bounds | None,
        incarnation: int | None,
        verify_transfers: bool,
        staging: Staging | None,
        now: Callable[[], float],
    ) -> None:
        if staging is not None and staging.pool is not pool:
            raise MisuseError(f"{staging!r} is not for {pool!r}")
        self.pool, self.staging, self._now = pool, staging, now
        self.reached = pool if staging is None else staging.host
        """The pool that the data plane reads and writes: `pool` or, with staging, its host pool."""
        self.plane: DataPlane = plane_for(
            self.reached, plane, receives=self.role == "decode", host=host
        )
        self._checksums: Checksums | None = self._sums() if verify_transfers else None
        self.pages: PageStore = pages or pool.places
        pool.quarantine.keep_out_of(self.pages)
        self.timing, self.bounds = timing or Timing(), bounds or Bounds()
        # With incarnation 0, a peer would skip the check of our claim, so 0 is not allowed.
        self.incarnation = Incarnation(
            secrets.randbits(63) | 1 if incarnation is None else incarnation
        )
        if not 0 < self.incarnation < 1 << 64:
            raise MisuseError(
                f"incarnation {self.incarnation} is not a positive unsigned 64-bit integer"
            )
        moved = self._moved(pool.layout)
        self.counts = Counts(moved.place_bytes)
        self.exported: tuple[PlaneAddress, PoolLayout] = self.plane.export(
            self._moved(self.reached.layout)
        )

    @staticmethod
    def _moved(layout: PoolLayout) -> PoolLayout:
        """Return the part of `layout` that this node transfers."""
        return layout

    def _sums(self) -> Checksums | None:
        return PageChecksums(self.pool, self._moved(self.pool.layout))

    @property
    def _stores(self) -> list[tuple[Quarantine, PageStore]]:
        """Pairs of a pool's quarantine and the pool's store. The pair of the staging is last."""
        found: list[tuple[Quarantine, PageStore]] = [(self.pool.quarantine, self.pages)]
        if self.staging is not None:
            found.append((self.reached.quarantine, self.reached.places))
        return found

    def _unproven_loans(self) -> list[UnprovenLoan]:
        pools = [self.pool] if self.staging is None else [self.pool, self.reached]
        return [loan for pool in pools for loan in pool.unproven]

    def __repr__(self) -> str:
        state = (
            "closed" if self._closing is not None else "new" if self._shell is None else "running"
        )
        return f"<{type(self).__name__} {self.incarnation:016x} over {self.plane.name}: {state}>"

    @property
    def shape(self) -> PoolShape:
        layout = self.pool.layout
        return PoolShape(
            layout.page_size, layout.num_pages, layout.page_bytes, len(layout.components)
        )

    @property
    def shell(self) -> S:
        if self._shell is None:
            raise MisuseError(
                f"the {self.role} node is not started: use it as an async context manager, or "
                "start()"
            )
        return self._shell

    @property
    def _open_shell(self) -> S:
        """The shell, for new work. Raises: MisuseError once the node is closed."""
        if self._closing is not None and self._closing.done():
            raise MisuseError(f"the {self.role} node is closed")
        return self.shell

    def _check_start(self) -> None:
        if self._shell is not None or self._closing is not None:
            raise MisuseError(f"the {self.role} node was started before: make a new one")

    def rooms_by_phase(self) -> dict[str, int]:
        """Return the number of open rooms in each phase, by the phase's name in lower case."""
        return dict(
            Counter(record.phase.name.lower() for record in self.shell.endpoint.rooms.values())
        )

    @property
    def control(self) -> str:
        """Address at which decodes reach this node, "tcp://host:port"; empty if it binds no
        port.
        """
        return ""

    @property
    def quarantined_pages(self) -> int:
        """Number of pages in quarantine, places of all spaces together. Their room, or the node
        that lent them, has ended, but a peer may still write into them.
        """
        return self.shell.endpoint.core.ledger.quarantined_pages

    @property
    def overdue_pages(self) -> int:
        """Number of pages in quarantine whose writer is in doubt, or has left an Abort unanswered
        for too long.
        """
        return self.shell.endpoint.core.ledger.overdue_pages

    @property
    def quarantine_limit(self) -> int:
        """Limit on `overdue_pages`. Above it, a decode opens no room, and a node of either role is
        unavailable. In a pool of several spaces, each has a limit of its own, and this is the sum.
        """
        return sum(self.shell.endpoint.core.ledger.quarantine_limit)

    @property
    def staging_at_rest(self) -> bool:
        """True while no staging page is lent or used by a copy."""
        return True

    @property
    def staging_waits(self) -> Waits | None:
        """Figures about rooms that wait for staging pages; None if the node lends no staging."""
        return None

    @property
    def pinned(self) -> PlaceCounts:
        """Numbers of places, by space, that writes of ended rooms still read."""
        return (0,) * len(self.pool.layout.spaces)

    @property
    def pinned_limits(self) -> PlaceCounts:
        """Limits on `pinned` for each decode. New rooms of a decode above one are refused."""
        return (0,) * len(self.pool.layout.spaces)

    @property
    def pinned_pages(self) -> int:
        """Number of pages that writes of ended rooms still read, places of all spaces together."""
        return sum(self.pinned)

    @property
    def unavailable_reason(self) -> str:
        """Reason why this node cannot serve; empty if it can."""
        return ""

    def peers(self) -> list[dict[str, Any]]:
        """Return a record for each node that this one knows, with its incarnation, its phase, the
        time since its last message, and its open rooms or loans.

        A prefill that may still write into pages lent by an earlier node over this pool has the
        phase "earlier", and no link.
        """
        raise NotImplementedError

    def _earlier_writers(self) -> list[dict[str, Any]]:
        earlier, lines = self.shell.endpoint.earlier, []
        for writer in earlier.writers.values():
            loans, pages = earlier.owed_by(writer)
            lines.append(
                {
                    "incarnation": f"{writer.incarnation:016x}",
                    "control": writer.control,
                    "rank": writer.rank,
                    "phase": "earlier",
                    "heard_ago_s": None,
                    "loans": loans,
                    "quarantine_pages": pages,
                }
            )
        return lines

    def declare_dead(self, incarnation: int, why: str) -> None:
        """Declare, on an operator's word, that a prefill process can write no more. No other call
        ends a loan without proof.

        The rooms of this incarnation end, its loans leave quarantine, and it is never linked again.
        If the process still writes, it corrupts the pages of their next owner. Raises: MisuseError
        if the incarnation has neither a link nor a loan here, or runs on this host.
        """
        self.shell.declare_dead(incarnation, why)

    def peers_by_phase(self) -> dict[str, int]:
        return dict(Counter(str(line["phase"]) for line in self.peers()))

    async def start(self) -> None:
        """Start the node. Raises: MisuseError on a second call."""
        raise NotImplementedError

    def leave(self) -> None:
        """Refuse new rooms, and end every open one with `Code.SHUTDOWN`. Idempotent.

        `close` then waits for running writes and for the proofs of loans.
        """
        if self._shell is not None:
            self._shell.leave()

    async def close(self) -> Sequence[UnprovenLoan]:
        """End and drain every room, then close the data plane. Idempotent. The caller closes the
        pool.

        Returns the unproven loans of this node, and of earlier nodes over its pool. Their pages
        must not be used. Every node over this pool withholds them, and watches their writers until
        there is proof (`PagedPool.unproven`).

        A cancellation does not stop the work. It is raised only when the node is closed (I12).
        """
        if self._closing is None:
            self.leave()
            self._closing = asyncio.create_task(self._close(), name=f"kvflow-{self.role}-close")
        await run_to_end(self._closing)
        return self._unproven

    async def _close(self) -> None:
        raise NotImplementedError

    async def _close_memory(self) -> None:
        """Close everything that accesses the pool.

        An error from the data plane is raised at the end.
        """
        try:
            await self.plane.close()
        finally:
            for work in (self._checksums, self._arrivals):
                if work is not None:
                    await work.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
