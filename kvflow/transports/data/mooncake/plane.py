"""Pages through the Mooncake Transfer Engine: TCP, or RDMA where the machine has it, through the same calls.

What status means landed?       Only 1 of `transfer_check_status`, handle by handle.
Can a write outlive its error?  Yes. Over TCP blocks that ended -1, or had not ended when the engine's time-out passed,
                                were seen to land later, with whatever the source held by then. So any other end makes
                                the whole write UNPROVEN, once its other handles have ended; a handle that does not end
                                is waited for.
What fences a peer?             Its process is known to be dead (pidfd) and every connection it had into our engine is
                                gone (`lanes`): bytes it sent before it died are read until then. Another host's process
                                cannot be observed, so its writes can never be proven over.

Blocks are submitted one by one into a window that is bounded in handles and in bytes: after an abort what is in the
window has to land before the pages are free. The engine has no authentication: whoever reaches its ports can write into
registered memory, and it listens on every interface. Keep it on a private network.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import threading
from collections import deque
from typing import Any

from kvflow.aio import in_thread
from kvflow.protocols.errors import LayoutError, MisuseError, TransferError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import Endpoint, Landing, Witness
from kvflow.transports.data.mooncake.congestion import unpace_local_connections
from kvflow.transports.data.mooncake.tcp_table import listening_ports, orphaned_lanes
from kvflow.transports.data.route import BlockQueue, PlannedRoute, Planner
from kvflow.transports.data.write_thread import WriteFlight, WriteThread
from kvflow.transports.host.identity import own_witness, wait_dead

WINDOW_HANDLES = 128
WINDOW_BYTES = 32 << 20
MAX_BLOCK_BYTES = 2 << 20
MAX_REGIONS = 1024
_FIRST_UNPACE_BYTES, _LAST_UNPACE_BYTES = 4 << 20, 256 << 20
# A look at a window takes some 100 us of CPU, which the copying threads lack where cores are few: it is taken a few
# times while the window empties, and not before the last of a write can have landed at the best speed seen.
_TCP_PAUSE_S, _RDMA_PAUSE_S = 0.001, 0.0002
_BEST_BYTES_PER_S = 8e9
_CLOSE_GRACE_S = 5.0
_LANES_POLL_S = 0.02
_SESSION = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,255}:[0-9]{1,5}\Z", re.ASCII)
# Read by the engine when it is imported. Its own limit of queued transfers wedges a peer for good once it is reached.
_ENVIRONMENT = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
}


class MooncakePlane:
    """Implements `protocols.ports.DataPlane`. One engine, as a rule."""

    name = "mooncake"

    def __init__(self, host: str = "127.0.0.1", rate_limit_bytes_per_s: float | None = None, device: str = "") -> None:
        """Starts the engine, which holds the GIL for some milliseconds: before the event loop serves anybody.

        `host` is the address peers reach us at; `device` an RDMA device, TCP without one.
        Raises: MisuseError when the package cannot be loaded, TransferError when the engine does not start.
        """
        self._thread = WriteThread(self.name, rate_limit_bytes_per_s)
        self._host, self._device = host, device
        self._engine_class = engine_class(force_tcp=not device)
        self._engines: list[Any] = []
        self._ports: set[int] = set()
        self._layout: PoolLayout | None = None
        self._sessions: dict[str, tuple[Witness, Any]] = {}  # who was reached at a session, through which engine
        self._opening = threading.Lock()
        self.engine = self._start_engine()  # the one peers write through
        self._session = f"{host}:{self.engine.get_rpc_port()}"

    @property
    def stalled_s(self) -> float:
        return self._thread.stalled_s

    def export(self, layout: PoolLayout) -> tuple[Endpoint, PoolLayout]:
        """Register every buffer (some 20 us per GiB). Raises: LayoutError when the engine refuses one."""
        layout.check()
        if self._layout is not None:
            raise LayoutError("a plane exports one pool")
        if len(layout.buffers) > MAX_REGIONS:
            raise LayoutError(
                f"{len(layout.buffers)} buffers are more than {MAX_REGIONS} regions; use a page-first pool"
            )
        self._register(self.engine, layout)
        self._layout = layout
        return Endpoint(self.name, self._session, own_witness()), layout

    async def connect(self, endpoint: Endpoint, layout: PoolLayout) -> MooncakeRoute:
        """Reach the peer's engine once. Raises: LayoutError (the pools do not fit), TransferError (no answer)."""
        ours = self._layout
        if ours is None:
            raise LayoutError("export our own pool before connecting to a peer's")
        if not _SESSION.match(endpoint.address):
            raise TransferError(f"{endpoint.address!r:.80} is no mooncake session")
        layout.check()
        self._thread.start()
        planner = Planner(ours, layout, max_block_bytes=min(MAX_BLOCK_BYTES, self._thread.slice_bytes))
        engine = await in_thread(lambda: self._reach(endpoint, ours, layout))
        return MooncakeRoute(self._thread, planner, engine, endpoint.address, over_tcp=not self._device)

    def _reach(self, peer: Endpoint, ours: PoolLayout, theirs: PoolLayout) -> Any:
        """Open the session with a write of no bytes, so that no later submit has to connect (up to 5 s)."""
        session = peer.address
        with self._opening:
            engine = self._engine_for(peer, ours)
        if status := engine.send_probe(session):
            raise TransferError(f"no mooncake engine answers at {session} (status {status})")
        handle = engine.transfer_submit_write(session, ours.buffers[0].address, theirs.buffers[0].address, 0)
        if not handle or engine.transfer_check_status(handle) != 1:
            raise TransferError(f"cannot open a mooncake session with {session}")
        return engine

    def _engine_for(self, peer: Endpoint, ours: PoolLayout) -> Any:
        """An engine that has never met another process at this session. It keeps what it learned of a session for good,
        so a new process behind a re-used port (one in some 2,000) would be written to at its predecessor's ports."""
        known = self._sessions.get(peer.address)
        if known is not None and known[0] == peer.witness:
            return known[1]
        engine = self.engine
        if known is not None:
            engine = self._start_engine()
            self._register(engine, ours)
        self._sessions[peer.address] = (peer.witness, engine)
        return engine

    def _start_engine(self) -> Any:
        before = listening_ports()
        engine = self._engine_class()
        if engine.initialize(self._host, "P2PHANDSHAKE", "rdma" if self._device else "tcp", self._device):
            raise TransferError(f"the mooncake engine does not start on {self._host}")
        self._ports |= listening_ports() - before
        self._engines.append(engine)
        return engine

    def _register(self, engine: Any, layout: PoolLayout) -> None:
        for i, b in enumerate(layout.buffers):
            if status := engine.register_memory(b.address, b.size_bytes):
                for done in layout.buffers[:i]:
                    engine.unregister_memory(done.address)
                raise LayoutError(f"mooncake cannot register buffer {b.name!r} (status {status})")

    async def fence(self, writer: Endpoint) -> None:
        """Return once the writer's process is dead and its lanes are closed.

        Raises: TransferError for a writer of another host, and over RDMA, whose queues nothing here can see into.
        """
        if self._device:
            raise TransferError("over RDMA the end of a writer's bytes cannot be observed")
        await wait_dead(writer.witness)
        while await asyncio.to_thread(orphaned_lanes, self._ports):  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(_LANES_POLL_S)

    async def close(self) -> None:
        """Cancel, drain for at most 5 s (a frozen peer's blocks then end UNPROVEN), unregister the pool."""
        try:
            await self._thread.close(_CLOSE_GRACE_S)
        finally:  # the thread has ended, cancelled or not
            await in_thread(self._unregister)

    def _unregister(self) -> None:
        layout, self._layout = self._layout, None
        for b in layout.buffers if layout is not None else ():
            for engine in self._engines:
                engine.unregister_memory(b.address)


class MooncakeRoute(PlannedRoute):
    """Implements `protocols.ports.Route`. The window is the route's, so a frozen peer holds up nobody else's writes."""

    def __init__(self, thread: WriteThread, planner: Planner, engine: Any, session: str, *, over_tcp: bool) -> None:
        super().__init__(thread, planner)
        self.submit = engine.transfer_submit_write
        self.check = engine.transfer_check_status
        self.session = session
        self.jobs = self.handles = self.bytes = 0  # under way; the plane's thread only
        self._next_unpace = _FIRST_UNPACE_BYTES
        self.pause_s = _TCP_PAUSE_S if over_tcp else _RDMA_PAUSE_S
        self._until_unpace = 0 if over_tcp else float("inf")  # bytes; RDMA has no connections to look at

    def begin(self, flight: WriteFlight) -> _WindowJob:
        return _WindowJob(self, flight, BlockQueue(self.planner, flight.source_pages, flight.target_pages))

    def moved(self, submitted_bytes: int) -> None:
        """The engine opens its connections while it has work, so they are looked for often at first, then seldom."""
        self._until_unpace -= submitted_bytes
        if self._until_unpace <= 0 and submitted_bytes:
            unpace_local_connections()
            self._until_unpace = self._next_unpace
            self._next_unpace = min(2 * self._next_unpace, _LAST_UNPACE_BYTES)

    def close(self) -> None:
        """Nothing to give back: an engine has no call to drop a session (see `_engine_for`)."""


class _WindowJob:
    """Implements `writer.Job`: some handles of the route's window."""

    __slots__ = ("_blocks", "_flight", "_handles", "_route", "error", "landed_bytes", "landing", "pause_s")

    def __init__(self, route: MooncakeRoute, flight: WriteFlight, blocks: BlockQueue) -> None:
        self._route, self._flight, self._blocks = route, flight, blocks
        self._handles: deque[tuple[int, int]] = deque()  # (handle, size), oldest first
        self.landed_bytes, self.error = 0, ""
        self.landing: Landing | None = None
        self.pause_s = 0.0
        route.jobs += 1

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        ended = self._follow()
        submitted = 0 if cancelled or self.error else self._submit(max_bytes)
        left_s = (self._flight.total_bytes - self.landed_bytes) / _BEST_BYTES_PER_S
        self.pause_s = min(left_s, self._route.pause_s) if submitted < max_bytes else 0.0
        if not self._handles and (cancelled or self.error or not self._blocks.left_bytes):
            self._route.jobs -= 1
            if self.error:
                self.landing = Landing.UNPROVEN
            else:
                whole = self.landed_bytes == self._flight.total_bytes
                self.landing = Landing.LANDED if whole else Landing.DRAINED
            return submitted
        return submitted if submitted or ended else -1

    def _follow(self) -> int:
        """Take what has ended off the front of the window; each handle is asked until it has ended, and never again."""
        route, handles, ended = self._route, self._handles, 0
        while handles and (status := route.check(handles[0][0])):
            _, size = handles.popleft()
            route.handles -= 1
            route.bytes -= size
            ended += 1
            if status == 1:
                self.landed_bytes += size
            elif not self.error:
                self.error = f"a block to {route.session} ended with status {status}"
        return ended

    def _submit(self, max_bytes: int) -> int:
        route, submitted = self._route, 0
        share = max(1, WINDOW_HANDLES // route.jobs) - len(self._handles)
        free_bytes = WINDOW_BYTES - route.bytes
        blocks = self._blocks.take(min(max_bytes, free_bytes), min(share, WINDOW_HANDLES - route.handles))
        for source, target, size in zip(*blocks, strict=True):
            if self._flight.cancelled:  # looked at once more per block: after an abort, one window at most may land
                break
            handle = route.submit(route.session, source, target, size)
            if not handle:
                self.error = f"mooncake took no block for {route.session}"
                break
            self._handles.append((handle, size))
            route.handles += 1
            route.bytes += size
            submitted += size
        route.moved(submitted)
        return submitted


def engine_class(*, force_tcp: bool) -> Any:
    """mooncake.engine.TransferEngine. Raises: MisuseError with the one thing to do."""
    if force_tcp:  # else the engine takes RDMA by itself wherever it finds a device, and the fence would prove nothing
        os.environ.setdefault("MC_FORCE_TCP", "1")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ModuleNotFoundError as error:
        raise MisuseError("mooncake is not installed: pip install 'kvflow[mooncake]'") from error
    except ImportError as error:
        raise MisuseError(f"mooncake cannot be loaded ({error}): apt install libibverbs1 libnuma1 libcurl4") from error
