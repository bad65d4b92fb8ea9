"""The part of a shell that handles the loans of earlier nodes over the same pool.

It watches the writers of these loans, and returns the pages of a lease when its last loan ends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvflow.handlers.shell import Shell, fenced
from kvflow.protocols import commands as c
from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.spaces import Counts, counts_less, counts_sum
from kvflow.protocols.ports import (
    DataPlane,
    LeaseId,
    PageStore,
    PlaneAddress,
    Quarantine,
    UnprovenLoan,
)
from kvflow.protocols.wire.messages import GrantId

log = logging.getLogger(__name__)
# A node takes over at most this many leases in one turn of the event loop, so that its rooms make
# progress.
INHERIT_WORK = 64


class EarlierShell:
    """Runs the commands of `endpoint.earlier`. Implements `protocols.ports.Heir`."""

    def __init__(
        self,
        shell: Shell,
        loans: EarlierLoans,
        plane: DataPlane,
        stores: Sequence[tuple[Quarantine, PageStore]],
    ) -> None:
        """`stores` pairs each store with the quarantine of its pool. With staging, the staging
        store is last.
        """
        self._shell, self._loans, self._plane = shell, loans, plane
        self._quarantines = [quarantine for quarantine, _ in stores]
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        # For each grant: the quarantine, the lease, and the places of each space in the lease.
        self._leases: dict[GrantId, tuple[Quarantine, LeaseId, Counts]] = {}
        # With staging, leases of the pool's pages withhold no page that this node lends, so they
        # are counted separately.
        self.beside: Counts = (0,) * len(stores[-1][0].layout.spaces)
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._left = False
        shell.runners |= {
            c.WatchEarlierWriter: self._watch_writer,
            c.StopEarlierWatch: self._stop_watch,
        }
        for quarantine, store in stores:
            self._take_over(quarantine, quarantine.join(self, store))

    def leave(self) -> None:
        """Leave the quarantines, which keep the pages whose loans are unproven. Idempotent."""
        self._left = True
        for quarantine in self._quarantines:
            quarantine.leave(self)

    def free(self, command: c.FreePages) -> None:
        """Return the pages that an earlier node lent for a room."""
        quarantine, lease, counts = self._leases.pop(command.grant)
        if quarantine is not self._quarantines[-1]:
            self.beside = counts_less(self.beside, counts)
        quarantine.free(lease)

    def check_unseen(self, incarnation: int) -> None:
        """Raise MisuseError if a writer of this incarnation runs on this host."""
        for writer in self._loans.of(incarnation):
            if writer.address is not None:
                check_unseen(self._plane, incarnation, writer.address)

    # --- called by quarantines, from any thread

    def inherit(self, quarantine: Quarantine, loans: Sequence[UnprovenLoan]) -> None:
        leases: dict[LeaseId, list[UnprovenLoan]] = {}
        for loan in loans:
            leases.setdefault(loan.lease, []).append(loan)
        self._on_loop(functools.partial(self._inherit, quarantine, list(leases.values())))

    def writer_ended(self, incarnation: int, writer: PlaneAddress | None) -> None:
        self._on_loop(functools.partial(self._writer_ended, incarnation, writer))

    def _on_loop(self, call: Callable[[], None]) -> None:
        if threading.get_ident() == self._thread:
            call()
            return
        # A closed loop raises RuntimeError. The node is then closed too.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    # --- on the loop

    def _inherit(self, quarantine: Quarantine, leases: Sequence[Sequence[UnprovenLoan]]) -> None:
        """Take over up to `INHERIT_WORK` leases, and the others in later turns of the event loop.

        The wait is safe, because the node's stores already withhold the pages of all leases.
        """
        self._take_over(quarantine, [loan for lease in leases[:INHERIT_WORK] for loan in lease])
        if (later := leases[INHERIT_WORK:]) and not self._left:
            self._loop.call_soon(self._inherit, quarantine, later)

    def _take_over(self, quarantine: Quarantine, loans: Sequence[UnprovenLoan]) -> None:
        # Another node may have received the proof while this call waited for its turn.
        loans = quarantine.standing(loans)
        if loans and not self._left:
            layout = quarantine.layout
            counts = {loan.lease: layout.counted(loan.pages) for loan in loans}
            for grant, lease in self._loans.inherit(loans, layout).items():
                self._leases[grant] = (quarantine, lease, counts[lease])
                if quarantine is not self._quarantines[-1]:
                    self.beside = counts_sum(self.beside, counts[lease])
            self._shell.run()

    def _writer_ended(self, incarnation: int, address: PlaneAddress | None) -> None:
        if not self._left and (writer := self._loans.find(incarnation, address)) is not None:
            self._loans.writer_died(writer.number)
            self._shell.run()

    def _watch_writer(self, command: c.WatchEarlierWriter) -> None:
        writer = self._loans.writers[command.writer]
        self._watches[command.writer] = self._shell.spawn(
            self._watch(command), f"kvflow-fence-{writer.control}"
        )

    async def _watch(self, command: c.WatchEarlierWriter) -> None:
        shell = self._shell
        if command.address.backend != self._plane.name:
            # Only the back end that made the writes knows how long they can outlive their process.
            return
        if await fenced(self._plane, command.address, shell.timing, shell.counts):
            self._loans.writer_died(command.writer)
            shell.run()

    def _stop_watch(self, command: c.StopEarlierWatch) -> None:
        self._shell.cancel(self._watches.pop(command.writer, None))
        for quarantine in self._quarantines:
            quarantine.forget(command.incarnation, command.address)


def check_unseen(plane: DataPlane, incarnation: int, address: PlaneAddress) -> None:
    """Raise MisuseError if the writer at `address` runs on this host.

    An operator must not declare a process dead while it may still write.
    """
    if plane.sees_alive(address):
        pid = address.process.pid
        raise MisuseError(
            f"prefill {incarnation:016x} runs: it is process {pid} of this host, and may still "
            f"write; end that process (kill -9 {pid}), and its loans end by proof"
        )


def log_declared(incarnation: int, why: str, ended: tuple[int, int]) -> None:
    """Log a declaration of death. `ended` has the number of loans that end, and the number of pages
    that leave quarantine.
    """
    log.warning(
        "prefill %016x is declared dead (%s): %d loans end without proof, %d pages leave "
        "quarantine",
        incarnation,
        why,
        *ended,
    )
