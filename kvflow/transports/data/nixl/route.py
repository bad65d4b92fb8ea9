"""Writes to one peer through a NIXL agent: transfers of some blocks each, a few of them under way at a time."""

from __future__ import annotations

from collections.abc import Callable

from kvflow.protocols.ports import ProcessIdentity, WriteOutcome
from kvflow.transports.data.nixl.agent import DONE, FAILED, RUNNING, Agent, Transfer
from kvflow.transports.data.route import BlockQueue, PlannedRoute, Planner, outcome_of
from kvflow.transports.data.write_thread import Assignment, WriteThread
from kvflow.transports.host.peer_process import PeerProcess

WINDOW_BYTES = 16 << 20
# Of one transfer, some 1 ms: what a cancel waits for.
TRANSFER_BYTES = 4 << 20
TRANSFER_BLOCKS = 1024
_PAUSE_S = 0.0003  # between looks at what is under way


class Peer:
    """An agent that ours knows."""

    def __init__(self, name: str, process: ProcessIdentity, metadata: bytes) -> None:
        self.name, self.process, self.metadata = name, process, metadata
        self.routes = 0
        self.is_broken = False  # a transfer to it has failed, and with it its connection


class NixlRoute(PlannedRoute):
    """Implements `protocols.ports.Route`. The window is the route's, so a frozen peer holds up no other route."""

    def __init__(
        self,
        thread: WriteThread,
        planner: Planner,
        agent: Agent,
        peer: Peer,
        process: PeerProcess,
        closed: Callable[[NixlRoute], None],
    ) -> None:
        super().__init__(thread, planner)
        self.agent, self.peer, self.process = agent, peer, process
        self.jobs = self.bytes = 0  # under way; the plane's thread only
        self._closed = closed

    def begin(self, write: Assignment) -> _TransfersJob:
        return _TransfersJob(self, write, BlockQueue(self.planner, write.source_pages, write.target_pages))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.process.close()
            self._closed(self)


class _TransfersJob:
    """Implements `write_thread.WriteJob`. A call of NIXL that raises is an error like any other: what was submitted
    before is still followed to its end."""

    __slots__ = ("_blocks", "_route", "_transfers", "_write", "error", "landed_bytes", "outcome", "pause_s")

    def __init__(self, route: NixlRoute, write: Assignment, blocks: BlockQueue) -> None:
        self._route, self._write, self._blocks = route, write, blocks
        self._transfers: list[Transfer] = []  # under way
        self.landed_bytes, self.error = 0, ""
        self.outcome: WriteOutcome | None = None
        self.pause_s = 0.0
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
        while submitted < max_bytes and self._blocks.left_bytes and not self._write.cancelled and not self.error:
            if route.process.is_gone:  # its pid, by which pages are written within a machine, may be another's soon
                self.error = f"process {route.process.identity.pid}, to which {route.peer.name} belonged, has ended"
                break
            share = WINDOW_BYTES // route.jobs - sum(transfer.size_bytes for transfer in self._transfers)
            limit = min(max_bytes - submitted, TRANSFER_BYTES, share, WINDOW_BYTES - route.bytes)
            blocks = self._blocks.take(limit, TRANSFER_BLOCKS)
            if not blocks.sizes:
                break
            try:
                transfer = route.agent.prepare("WRITE", route.peer.name, *blocks)
            except Exception as error:  # noqa: BLE001 - other writes go on; this one ends unproven
                self._fail(f"nixl refuses blocks for {route.peer.name}: {type(error).__name__}: {error}")
                break
            self._transfers.append(transfer)
            route.bytes += transfer.size_bytes
            submitted += transfer.size_bytes
            self._start(transfer)
        return submitted

    def _start(self, transfer: Transfer) -> None:
        route = self._route
        try:
            route.agent.post(transfer)
        except Exception as error:  # noqa: BLE001 - other writes go on; this one ends unproven
            transfer.status = FAILED
            self._fail(f"nixl failed to start a transfer to {route.peer.name}: {type(error).__name__}: {error}")
        if self._has_ended(transfer):
            self._transfers.remove(transfer)

    def _follow(self) -> int:
        """Look at what is under way, whichever of it ends first; returns how many transfers have ended."""
        before = len(self._transfers)
        for transfer in [t for t in self._transfers if t.status == RUNNING]:
            try:
                self._route.agent.look(transfer)
            except Exception as error:  # noqa: BLE001 - other writes go on; this one ends unproven
                transfer.status = FAILED
                self._fail(f"nixl cannot tell how a transfer ended: {type(error).__name__}: {error}")
        self._transfers = [transfer for transfer in self._transfers if not self._has_ended(transfer)]
        return before - len(self._transfers)

    def _has_ended(self, transfer: Transfer) -> bool:
        """Whether a transfer is over and released; one that is not released may still read the source's pages."""
        route = self._route
        if transfer.status == RUNNING:
            return False
        if transfer.status != DONE:
            self._fail(f"a transfer to {route.peer.name} ended with status {transfer.status}")
        try:
            route.agent.release(transfer)
        except Exception as error:  # noqa: BLE001 - asked again
            self._fail(f"nixl does not let go of a transfer: {type(error).__name__}: {error}")
            return False
        route.bytes -= transfer.size_bytes
        if transfer.status == DONE:
            self.landed_bytes += transfer.size_bytes
        return True

    def _fail(self, error: str) -> None:
        self.error = self.error or error
        self._route.peer.is_broken = True
