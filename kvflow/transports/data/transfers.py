"""Writes to one peer through an engine that takes a list of blocks at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from kvflow.protocols.errors import KvflowError
from kvflow.transports.data.route import BlockList, PlannedJob, PlannedRoute, Planner, outcome_of
from kvflow.transports.data.write_thread import Assignment, WriteThread
from kvflow.transports.host.peer_process import PeerProcess

DONE, RUNNING, FAILED = "DONE", "PROC", "ERR"  # statuses of a transfer, as NIXL names them
WINDOW_BYTES = 16 << 20
# Limits of one transfer, which takes about 1 ms at this size. A cancel waits for its end.
TRANSFER_BYTES = 4 << 20
TRANSFER_BLOCKS = 1024
_PAUSE_S = 0.0003  # seconds between checks of what is under way


@contextmanager
def raised_as(error_class: type[KvflowError], what: str) -> Iterator[None]:
    """Raise any exception from the engine's library as `error_class`, with `what` as context."""
    try:
        yield
    except Exception as error:
        raise error_class(f"{what}: {type(error).__name__}: {error}") from error


class Transfer:
    """A list of blocks that the engine writes to one peer, or a probe that it reads from one."""

    __slots__ = ("handle", "size_bytes", "status", "why")

    def __init__(self, handle: Any, size_bytes: int) -> None:
        self.handle, self.size_bytes, self.status = handle, size_bytes, ""
        self.why = ""  # reason for its failure, if the engine reports one


class Carrier(Protocol):
    """An engine's connection to one peer. All methods but `leave` are called on the plane's thread.

    If a method raises, the write that it was called for fails.
    """

    @property
    def name(self) -> str:
        """The peer's name, for error texts."""

    def prepare(self, blocks: BlockList) -> Transfer:
        """Return a transfer of `blocks`, without starting it."""

    def post(self, transfer: Transfer) -> None:
        """Start a transfer. If it raises, some of the transfer may be under way."""

    def look(self, transfer: Transfer) -> None:
        """Update the status of a transfer."""

    def release(self, transfer: Transfer) -> None:
        """Forget a transfer that ended. If it has not ended, this raises, and is called again."""

    def failed(self) -> None:
        """Note that a transfer failed, after which sessions with this peer may be unusable."""

    def leave(self) -> None:
        """Note that the route is closed."""


class TransfersRoute(PlannedRoute):
    """Implements `ports.Route`.

    Each route has its own window, so that a frozen peer does not hold up the others.
    """

    def __init__(
        self,
        thread: WriteThread,
        planner: Planner,
        carrier: Carrier,
        process: PeerProcess,
        siblings: set[TransfersRoute],
    ) -> None:
        super().__init__(thread, planner, siblings)
        self.carrier, self.process = carrier, process
        self.jobs = self.bytes = 0  # counts under way; only the plane's thread changes them

    def begin(self, write: Assignment) -> _TransfersJob:
        return _TransfersJob(self, write)

    def release(self) -> None:
        self.process.close()
        self.carrier.leave()


class _TransfersJob(PlannedJob):
    """Implements `write_thread.WriteJob`.

    An exception from the engine fails the write like any other error: the job still waits until
    every transfer that it submitted is released.
    """

    __slots__ = ("_route", "_transfers")

    def __init__(self, route: TransfersRoute, write: Assignment) -> None:
        super().__init__(route, write)
        self._route = route
        self._transfers: list[Transfer] = []  # under way
        route.jobs += 1

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        ended = self._follow()
        submitted = 0 if cancelled or self.error else self._submit(max_bytes)
        stopped = bool(cancelled or self.error)
        self.pause_s = 0.0 if submitted and self._blocks.left_bytes else _PAUSE_S
        if not self._transfers and (stopped or not self._blocks.left_bytes):
            self._route.jobs -= 1
            self.outcome = outcome_of(self.error, self.landed_bytes, self._write.total_bytes)
            return submitted
        return submitted if submitted or ended else -1

    def _submit(self, max_bytes: int) -> int:
        route, submitted = self._route, 0
        while (
            submitted < max_bytes
            and self._blocks.left_bytes
            and not self._write.cancelled
            and not self.error
        ):
            # Within a machine, the engine writes by pid, which another process may soon have.
            if route.process.is_gone:
                self.error = (
                    f"process {route.process.identity.pid}, to which {route.carrier.name} "
                    "belonged, has ended"
                )
                break
            share = WINDOW_BYTES // route.jobs - sum(
                transfer.size_bytes for transfer in self._transfers
            )
            limit = min(max_bytes - submitted, TRANSFER_BYTES, share, WINDOW_BYTES - route.bytes)
            blocks = self._blocks.take(limit, TRANSFER_BLOCKS)
            if not blocks.sizes:
                break
            try:
                transfer = route.carrier.prepare(blocks)
            except Exception as error:  # noqa: BLE001 - other writes go on; this one ends unproven
                self._fail(
                    f"blocks for {route.carrier.name} are refused: {type(error).__name__}: {error}"
                )
                break
            self._transfers.append(transfer)
            route.bytes += transfer.size_bytes
            submitted += transfer.size_bytes
            self._start(transfer)
        return submitted

    def _start(self, transfer: Transfer) -> None:
        route = self._route
        try:
            route.carrier.post(transfer)
        except Exception as error:  # noqa: BLE001 - other writes go on; this one ends unproven
            transfer.status = FAILED
            self._fail(
                f"failed to start a transfer to {route.carrier.name}: {type(error).__name__}: "
                f"{error}"
            )
        if self._has_ended(transfer):
            self._transfers.remove(transfer)

    def _follow(self) -> int:
        """Check the transfers under way, which may end in any order; return how many ended."""
        before = len(self._transfers)
        for transfer in [t for t in self._transfers if t.status == RUNNING]:
            try:
                self._route.carrier.look(transfer)
            except Exception as error:  # noqa: BLE001 - other writes go on; this one ends unproven
                transfer.status = FAILED
                self._fail(
                    f"it cannot be told how a transfer ended: {type(error).__name__}: {error}"
                )
        self._transfers = [
            transfer for transfer in self._transfers if not self._has_ended(transfer)
        ]
        return before - len(self._transfers)

    def _has_ended(self, transfer: Transfer) -> bool:
        """Return True when a transfer has ended and is released.

        A transfer that is not released may still read the source's pages.
        """
        route = self._route
        if transfer.status == RUNNING:
            return False
        if transfer.status != DONE:
            self._fail(
                f"a transfer to {route.carrier.name} ended with status "
                f"{transfer.why or transfer.status}"
            )
        try:
            route.carrier.release(transfer)
        except Exception as error:  # noqa: BLE001 - asked again
            self._fail(f"a transfer is not let go of: {type(error).__name__}: {error}")
            return False
        route.bytes -= transfer.size_bytes
        if transfer.status == DONE:
            self.landed_bytes += transfer.size_bytes
        return True

    def _fail(self, error: str) -> None:
        self.error = self.error or error
        self._route.carrier.failed()
