"""The common part of data planes whose writes go through a `WriteThread`: routes, connecting and
closing.

They all close in the same way. The plane takes no more writes, cancels and drains those that run,
and ends the thread. Then the routes release their peers, and the back end frees its memory,
sessions and threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Generic, TypeVar

from kvflow.aio import Threads, all_ended
from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.arrange import blocks_between
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PlaneAddress
from kvflow.transports.data.route import PlannedRoute, Planner
from kvflow.transports.data.slices import are_tiny, remedy
from kvflow.transports.data.write_thread import WriteThread
from kvflow.transports.host.identity import is_seen_alive, own_identity
from kvflow.transports.host.inbound import InboundConnections, wait_ended
from kvflow.transports.host.peer_process import PeerProcess

_log = logging.getLogger(__name__)
CLOSE_GRACE_S, CLOSE_S = 5.0, 10.0
R = TypeVar("R", bound=PlannedRoute)


class ThreadedPlane(Generic[R]):
    """A base class for data planes. Subclasses add `name`, `export`, `connect` and `fence`."""

    name = ""
    close_grace_s = float("inf")
    """Seconds for which `close` waits for writes under way. Writes that a frozen peer still blocks
    after that end UNPROVEN.
    """

    def __init__(self, rate_limit_bytes_per_s: float | None) -> None:
        """Create the plane. The rate limit applies to all its writes together; None means no limit.

        Raises: MisuseError for a rate that is not positive.
        """
        self._thread = WriteThread(self.name, rate_limit_bytes_per_s)
        self._threads = [self._thread]  # a back end may add more
        self._layout: PoolLayout | None = None  # our own pool's, once it is exported
        self._routes: set[R] = set()

    @property
    def stalled_s(self) -> float:
        return max(thread.stalled_s for thread in self._threads)

    @property
    def under_way(self) -> dict[str, int]:
        """Counts of what writes still hold, by name. All are 0 when no write runs."""
        return {"writes": sum(thread.open_writes for thread in self._threads)}

    def sees_alive(self, writer: PlaneAddress) -> bool:
        return is_seen_alive(writer.process)

    def _own_layout(self) -> PoolLayout:
        if self._layout is None:
            raise LayoutError("export our own pool before connecting to a peer's")
        return self._layout

    def _keep(self, route: R) -> R:
        """Record a route. Raises: TransferError when the plane closed in the meantime."""
        if self._thread.is_closing:
            route.close()
            raise TransferError(f"the {self.name} plane is closed")
        self._routes.add(route)
        return route

    async def close(self) -> None:
        """Cancel all writes, drain for at most `close_grace_s`, release every peer. Idempotent."""
        try:
            more = [
                asyncio.ensure_future(thread.close(self.close_grace_s))
                for thread in self._threads[1:]
            ]
            try:
                await self._thread.close(self.close_grace_s)
            finally:
                await all_ended(more)
                for ended in more:
                    ended.result()
        finally:
            # The threads have ended, even if this close is cancelled.
            for route in list(self._routes):
                route.close()
            await self._release()

    async def _release(self) -> None:
        """Free what the back end holds, after its last write ended. Idempotent."""


class EnginePlane(ThreadedPlane[R]):
    """A base class for planes that write through a vendor's engine.

    The engine's calls may block, so connecting, fencing and closing each have their own threads.
    The waits for connecting and closing have a time limit.
    """

    close_grace_s = CLOSE_GRACE_S
    max_block_bytes = 4 << 20
    connects = 4  # number of peers to which the plane connects at a time
    warns_of_slices = True  # log a warning about slices that are tiny for this plane

    def __init__(self, rate_limit_bytes_per_s: float | None) -> None:
        super().__init__(rate_limit_bytes_per_s)
        self._inbound = InboundConnections()
        self._opening = threading.Lock()  # guards `_layout` and the records of peers
        self._connecting = Threads(f"{self.name}-connect", self.connects)
        self._looking = Threads(f"{self.name}-fence", 1)
        self._closing = Threads(f"{self.name}-close", 1)

    def export(self, layout: PoolLayout) -> tuple[PlaneAddress, PoolLayout]:
        """Register the pool. Raises: LayoutError for a second one, or if the engine refuses it."""
        layout.check()
        if self._layout is not None:
            raise LayoutError("a plane exports one pool")
        locator = self._register_pool(layout)
        self._layout = layout
        return PlaneAddress(self.name, locator, own_identity()), layout

    def _register_pool(self, layout: PoolLayout) -> str:
        """Register the pool, and return its locator. Raises: LayoutError when that fails."""
        raise NotImplementedError

    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> R:
        ours = self._own_layout()
        self._check_address(address)
        layout.check()
        self._thread.start()
        planner = Planner(
            ours, layout, max_block_bytes=min(self.max_block_bytes, self._thread.slice_bytes)
        )
        if self.warns_of_slices and are_tiny(self.name, blocks := blocks_between(ours, layout)):
            _log.warning("%s", remedy(self.name, blocks))
        process = PeerProcess(address.process)
        try:
            route = await self._open(address, layout, planner, process)
        except BaseException:
            process.close()
            raise
        return self._keep(route)

    def _check_address(self, address: PlaneAddress) -> None:
        """Check the form of a peer's address. Raises: TransferError when it is invalid."""

    async def _open(
        self, address: PlaneAddress, layout: PoolLayout, planner: Planner, process: PeerProcess
    ) -> R:
        """Wait for an answer that can only have come from `process`, and return a route to it.

        Raises: TransferError.
        """
        raise NotImplementedError

    def _unprovable(self) -> str:
        """Name the transports in use over which a writer's end cannot be observed, if any."""
        raise NotImplementedError

    async def fence(self, writer: PlaneAddress) -> None:
        """Wait until the writer's process is dead and our engine has closed every connection that
        may be its own.
        """
        if over := self._unprovable():
            raise TransferError(f"over {over} the end of a writer's bytes cannot be observed")
        await wait_ended(self._inbound, self._looking, writer.process)

    async def _release(self) -> None:
        try:
            await self._closing.run(self._stop, within_s=CLOSE_S)
        except TimeoutError:
            _log.warning(
                "the %s plane has not given back the pool's memory within %g s", self.name, CLOSE_S
            )

    def _stop(self) -> None:
        """Block until the engine releases the pool and reaches no peer any more. Idempotent."""
        raise NotImplementedError
