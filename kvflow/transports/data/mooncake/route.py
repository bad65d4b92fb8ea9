"""Writes to one peer through a mooncake engine. The writes of a route share a window of handles."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvflow.transports.data.mooncake.congestion import unpace_local_connections
from kvflow.transports.data.route import PlannedJob, PlannedRoute, Planner, outcome_of
from kvflow.transports.data.write_thread import Assignment, WriteThread
from kvflow.transports.host.peer_process import PeerProcess

WINDOW_HANDLES = 128
WINDOW_BYTES = 32 << 20
_FIRST_UNPACE_BYTES, _LAST_UNPACE_BYTES = 4 << 20, 256 << 20
# Pauses between two checks of a window. A check takes some 100 us of CPU time, which copying
# threads may need. The pause is shorter if the rest of the write can land sooner at the best known
# speed. It is half as long once the write is stopped, because the pages are then free as soon as
# the blocks in the window land.
_TCP_PAUSE_S, _RDMA_PAUSE_S = 0.001, 0.0002
_BEST_BYTES_PER_S = 8e9


class MooncakeRoute(PlannedRoute):
    """Implements `ports.Route`.

    Each route has its own window, so that a frozen peer does not hold up the others.
    """

    def __init__(
        self,
        thread: WriteThread,
        planner: Planner,
        engine: Any,
        session: str,
        process: PeerProcess,
        siblings: set[MooncakeRoute],
        *,
        over_tcp: bool,
    ) -> None:
        super().__init__(thread, planner, siblings)
        self.submit = engine.transfer_submit_write
        self.check = engine.transfer_check_status
        self.session, self.process = session, process
        # Counts of what is under way. Only the plane's thread changes them.
        self.jobs = self.handles = self.bytes = 0
        self.pause_s = _TCP_PAUSE_S if over_tcp else _RDMA_PAUSE_S
        self._next_unpace = _FIRST_UNPACE_BYTES
        # Bytes to submit before connections are unpaced again. RDMA has no TCP connections.
        self._until_unpace = 0 if over_tcp else float("inf")

    def begin(self, write: Assignment) -> _WindowJob:
        return _WindowJob(self, write)

    def moved(self, submitted_bytes: int) -> None:
        """Count submitted bytes, and from time to time unpace new connections.

        The engine opens connections while it works, most of them at first.
        """
        self._until_unpace -= submitted_bytes
        if self._until_unpace <= 0 and submitted_bytes:
            unpace_local_connections()
            self._until_unpace = self._next_unpace
            self._next_unpace = min(2 * self._next_unpace, _LAST_UNPACE_BYTES)

    def release(self) -> None:
        """Stop watching the process. The engine keeps its session, because no call drops one."""
        self.process.close()


class _WindowJob(PlannedJob):
    """Implements `write_thread.WriteJob` with some handles of the route's window.

    An exception from the engine fails the write like any other error: the job still waits for its
    other handles to end, and returns every handle to the window.
    """

    __slots__ = ("_handles", "_route")

    def __init__(self, route: MooncakeRoute, write: Assignment) -> None:
        super().__init__(route, write)
        self._route = route
        self._handles: deque[tuple[int, int]] = deque()  # (handle, size), oldest first
        route.jobs += 1

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        ended = self._follow()
        goes_on = self._blocks.left_bytes and not (cancelled or self.error)
        submitted = self._submit(max_bytes) if goes_on else 0
        if submitted and not self._blocks.left_bytes:
            # The engine's thread often moves a small block before its submission returns.
            ended += self._follow()
        stopped = cancelled or self.error
        left_s = (self._write.total_bytes - self.landed_bytes) / _BEST_BYTES_PER_S
        pause_s = self._route.pause_s / 2 if stopped else min(left_s, self._route.pause_s)
        self.pause_s = pause_s if submitted < max_bytes else 0.0
        if not self._handles and (stopped or not self._blocks.left_bytes):
            self._route.jobs -= 1
            self.outcome = outcome_of(self.error, self.landed_bytes, self._write.total_bytes)
            return submitted
        return submitted if submitted or ended else -1

    def _follow(self) -> int:
        """Remove ended handles from the front of the window; return how many there were.

        A handle must not be checked again after it ended.
        """
        handles, ended = self._handles, 0
        while handles and (status := self._status(handles[0][0])):
            _, size = handles.popleft()
            self._route.handles -= 1
            self._route.bytes -= size
            ended += 1
            if status == 1:
                self.landed_bytes += size
            elif not self.error:
                self.error = f"a block to {self._route.session} ended with status {status}"
        return ended

    def _status(self, handle: int) -> int:
        try:
            return int(self._route.check(handle))
        except Exception as error:  # noqa: BLE001
            # Other writes share the window, and continue. Only this one ends unproven.
            self.error = (
                self.error
                or f"mooncake cannot tell how a block ended: {type(error).__name__}: {error}"
            )
            return -1

    def _submit(self, max_bytes: int) -> int:
        route, submitted = self._route, 0
        if route.process.is_gone:
            self.error = (
                f"process {route.process.identity.pid}, to which {route.session} belonged, has "
                "ended"
            )
            return 0
        share = max(1, WINDOW_HANDLES // route.jobs) - len(self._handles)
        free_bytes = WINDOW_BYTES - route.bytes
        blocks = self._blocks.take(
            min(max_bytes, free_bytes), min(share, WINDOW_HANDLES - route.handles)
        )
        for source, target, size in zip(*blocks, strict=True):
            # Check before each block: after an abort, at most one window may land.
            if self._write.cancelled:
                break
            try:
                handle = route.submit(route.session, source, target, size)
            except Exception as error:  # noqa: BLE001
                # Other writes share the window, and continue. Only this one ends unproven.
                self.error = f"mooncake failed to take a block: {type(error).__name__}: {error}"
                break
            if not handle:
                self.error = f"mooncake refused a block for {route.session}"
                break
            self._handles.append((handle, size))
            route.handles += 1
            route.bytes += size
            submitted += size
        route.moved(submitted)
        return submitted
