"""The data plane that uses the Mooncake Transfer Engine, over TCP, or over RDMA with a device.

What status means landed?       Only status 1 from `transfer_check_status`, for each handle.
Can a write outlive its error?  Yes. Over TCP, blocks that ended with -1, or that were under way
                                when the engine's time-out passed, landed later in tests, with
                                whatever the source held by then. So any status but 1 makes the
                                whole write UNPROVEN, once its other handles end; the plane waits
                                for a handle that does not end.
What fences a peer?             Its process is known to be dead (pidfd), and our engine has closed
                                every connection that may have been its own (`inbound`). Until then
                                the engine reads bytes that the process sent before it died. A
                                process on another host cannot be observed, so its loans can never
                                be proven.

Blocks are submitted one by one into a window that is bounded in handles and in bytes: after an
abort, the blocks in the window have to land before the pages are free. The engine has no
authentication: any process that reaches its ports can write into registered memory, and it listens
on every interface. Keep it on a private network.

Before the engine receives a peer's address, a probe checks that the peer answers (`handshake`).
While the engine opens a session it takes no blocks for other peers, and it waits up to a minute for
an answer. A peer that answers the probe but not the engine can still cause that, and kvflow
cannot prevent it.

The engine never closes its connection to a peer that is gone. Each process that was written to
costs the writer one socket in CLOSE_WAIT until the writer ends. (A test with 12 decodes that came
and went left 12 sockets, and none was closed within a minute.) kvflow cannot close it, because the
engine owns the descriptor. So the number of sessions is limited to half of the process's
descriptors, and to 16,384. Beyond that a new decode is refused, and the error names the limit.

A route belongs to one process. Once that process is known to be dead, or another one has answered
at its session, no more blocks are submitted. The engine fails the blocks that it then holds (one
window) within about a second. If in that time a new process takes over both of the dead one's
ports, with memory registered at the same addresses, these blocks reach the new process.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, NamedTuple

from kvflow.protocols.errors import LayoutError, MisuseError, TransferError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity
from kvflow.transports.data.locators import regions_apart
from kvflow.transports.data.mooncake.handshake import check_answers
from kvflow.transports.data.mooncake.route import MooncakeRoute
from kvflow.transports.data.route import Planner
from kvflow.transports.data.threaded import EnginePlane
from kvflow.transports.host.address import bracketed
from kvflow.transports.host.descriptors import descriptors_for
from kvflow.transports.host.identity import check_same_host
from kvflow.transports.host.names import HostNames
from kvflow.transports.host.peer_process import PeerProcess
from kvflow.transports.host.tcp_table import listening_ports, rows, sockets

MAX_BLOCK_BYTES = 2 << 20
MAX_REGIONS = 1024
# An engine has two threads and five descriptors. Freeing one would hold the GIL for a second.
MAX_ENGINES = 8
MAX_SESSIONS = 16_384
# An engine serves one handshake at a time, and waits 5 s for a connection that stays silent.
_ANSWER_S, _CONNECT_S = 12.0, 10.0
_QUESTIONS = 256  # probes at a time, each with a descriptor
_SESSION = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,255}:[0-9]{1,5}\Z", re.ASCII)
# The engine reads these variables when it is imported. If a peer reaches the default limit of
# queued transfers, writes to it hang forever. By default the engine gives up on a peer that reads
# nothing for 30 s, and its lent pages would then stay in quarantine. But a debugger, or a migration
# of the machine, may pause a peer for longer, and its blocks land when it continues. Our source
# pages stay in use until then.
_ENVIRONMENT = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "600",
    "MC_TCP_STATUS_TIMEOUT_SEC": "600",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
}


class _Session(NamedTuple):
    """The latest process at a session, and the engines that have connected to that session, newest
    last.

    An engine keeps what it learned about a session, so each process there needs another engine.
    """

    process: ProcessIdentity
    met: tuple[Any, ...]


class MooncakePlane(EnginePlane[MooncakeRoute]):
    """Implements `protocols.ports.DataPlane`, usually with one engine."""

    name = "mooncake"
    max_block_bytes = MAX_BLOCK_BYTES
    protocol = ""  # the engine's name for its transport; empty: RDMA with a device, else TCP

    def __init__(
        self, host: str = "127.0.0.1", rate_limit_bytes_per_s: float | None = None, device: str = ""
    ) -> None:
        """Start the engine, which holds the GIL for some milliseconds.

        Create the plane before the event loop serves anything. `host` is the address at which peers
        reach us; it must have the IP version that this process's engines use. `device` names an
        RDMA device; without one, TCP is used.

        Raises: MisuseError when the package cannot be loaded, TransferError when the engine does
        not start.
        """
        super().__init__(rate_limit_bytes_per_s)
        self._host, self._device = host, device
        self._engine_class = self._load()
        self._engines: list[Any] = []
        self._sessions: dict[str, _Session] = {}
        self._names = HostNames("mooncake")
        self._asking = asyncio.Semaphore(_QUESTIONS)
        self.engine = self._start_engine()  # peers write to us through this engine
        self._session = f"{bracketed(host)}:{self.engine.get_rpc_port()}"

    def __repr__(self) -> str:
        over = self.protocol or self._device or "TCP"
        return f"<{type(self).__name__} at {self._session} over {over}: {len(self._routes)} routes>"

    def _load(self) -> Callable[[], Any]:
        """Return the function that makes an engine. Raises: MisuseError naming what is missing."""
        engine: Callable[[], Any] = engine_class(self._host, force_tcp=not self._device)
        return engine

    @property
    def under_way(self) -> dict[str, int]:
        counted = {"jobs": 0, "handles": 0, "bytes": 0}
        for route in self._routes:
            for what in counted:
                counted[what] += getattr(route, what)
        return {**super().under_way, **counted}

    def _register_pool(self, layout: PoolLayout) -> str:
        # Registration takes some 20 us per GiB.
        if len(layout.buffers) > MAX_REGIONS:
            raise LayoutError(
                f"{len(layout.buffers)} buffers are more than {MAX_REGIONS} regions; use a "
                "page-first pool"
            )
        self._register(self.engine, layout)
        return self._session

    def _check_address(self, address: PlaneAddress) -> None:
        if (
            not _SESSION.match(address.locator)
            or not 0 < int(address.locator.rpartition(":")[2]) < 1 << 16
        ):
            raise TransferError(f"{address.locator!r:.80} is not a mooncake session (host:port)")
        if (family := _family(address.locator.rpartition(":")[0])) and family != (own := _spoken()):
            raise TransferError(
                f"mooncake speaks {own} in this process, and the peer's session is "
                f"{address.locator}"
            )

    async def _open(
        self, address: PlaneAddress, layout: PoolLayout, planner: Planner, process: PeerProcess
    ) -> MooncakeRoute:
        engine = await self._connect(address, self._own_layout(), layout)
        # Check after the answer: if the process is still alive, no other process can have answered.
        process.check()
        for other in self._routes:
            if other.session == address.locator and other.process.identity != address.process:
                other.process.is_replaced = True
        over_tcp = not self._device and not self.protocol
        return MooncakeRoute(
            self._thread, planner, engine, address.locator, process, self._routes, over_tcp=over_tcp
        )

    async def _connect(self, peer: PlaneAddress, ours: PoolLayout, theirs: PoolLayout) -> Any:
        async with self._asking:
            await check_answers(peer.locator, self._names, _ANSWER_S)
        try:
            return await self._connecting.run(
                lambda: self._reach(peer, ours, theirs), within_s=_CONNECT_S
            )
        except TimeoutError:
            raise TransferError(
                f"no mooncake session with {peer.locator} within {_CONNECT_S:g} s"
            ) from None

    def _reach(self, peer: PlaneAddress, ours: PoolLayout, theirs: PoolLayout) -> Any:
        """Open a session now, so that no later submit has to connect, which may take 5 s."""
        _check_owner(peer)
        with self._opening:
            if self._layout is None:
                raise TransferError("the mooncake plane is closed")
            engine = self._engine_for(peer, ours)
        if not self._probe(
            engine, peer.locator, ours.buffers[0].address, theirs.buffers[0].address
        ):
            raise TransferError(f"cannot open a {self.name} session with {peer.locator}")
        return engine

    def _probe(self, engine: Any, session: str, ours: int, theirs: int) -> bool:
        """Return True if a write of 0 bytes from address `ours` to `theirs` succeeds. Blocks."""
        handle = engine.transfer_submit_write(session, ours, theirs, 0)
        return bool(handle) and engine.transfer_check_status(handle) == 1

    def _engine_for(self, peer: PlaneAddress, ours: PoolLayout) -> Any:
        """Return an engine that has not connected to another process at this session.

        An engine keeps what it learned about a session. If a new process gets the port of an
        earlier one (some 1 in 2,000 do), the engine would write to the earlier process's ports.
        """
        known = self._sessions.get(peer.locator)
        if known is not None and known.process == peer.process:
            return known.met[-1]
        if known is None and len(self._sessions) >= (most := descriptors_for(MAX_SESSIONS)):
            keeps = "each with a descriptor that its engine keeps (ulimit -n)"
            raise TransferError(f"more than {most} sessions, {keeps}: restart this process")
        met = known.met if known is not None else ()
        engine = next((engine for engine in self._engines if engine not in met), None)
        if engine is None:
            if len(self._engines) >= MAX_ENGINES:
                raise TransferError(
                    f"session {peer.locator} was that of {len(met)} other processes; more than "
                    f"{MAX_ENGINES} engines are not started: restart this process"
                )
            engine = self._start_engine()
            self._register(engine, ours)
        self._sessions[peer.locator] = _Session(peer.process, (*met, engine))
        return engine

    def _start_engine(self) -> Any:
        before = listening_ports()
        engine = self._engine_class()
        protocol = self.protocol or ("rdma" if self._device else "tcp")
        if engine.initialize(
            self._host, "P2PHANDSHAKE", protocol, "" if self.protocol else self._device
        ):
            raise TransferError(f"the {self.name} engine does not start on {self._host}")
        self._inbound.add_ports(listening_ports() - before)
        self._engines.append(engine)
        return engine

    def _register(self, engine: Any, layout: PoolLayout) -> None:
        regions = regions_apart(layout)
        for i, (address, size_bytes) in enumerate(regions):
            if status := engine.register_memory(address, size_bytes):
                for done, _ in regions[:i]:
                    engine.unregister_memory(done)
                name = next(b.name for b in layout.buffers if b.address == address)
                raise LayoutError(f"{self.name} cannot register buffer {name!r} (status {status})")

    def _unprovable(self) -> str:
        return "RDMA" if self._device else ""

    def _stop(self) -> None:
        # From here on, `_reach` does not register the pool with another engine.
        with self._opening:
            layout, self._layout = self._layout, None
        for address, _ in regions_apart(layout) if layout is not None else ():
            for engine in self._engines:
                engine.unregister_memory(address)


def _spoken() -> str:
    """Return the IP version that every engine of this process uses."""
    return "IPv6" if "MC_USE_IPV6" in os.environ else "IPv4"


def _family(host: str) -> str:
    """Return the IP version of an address; empty for a host name."""
    try:
        return (
            f"IPv{ip_address(host.removeprefix('[').removesuffix(']').partition('%')[0]).version}"
        )
    except ValueError:
        return ""


def _check_owner(peer: PlaneAddress) -> None:
    """Check that the peer's process listens at its session.

    A process that claims another's session would end the routes to the session's owner. Processes
    on other hosts, or of other users, cannot be checked, and pass.

    Raises: TransferError.
    """
    try:
        check_same_host(peer.process)
    except TransferError:
        return
    pid, port = peer.process.pid, int(peer.locator.rpartition(":")[2])
    try:
        # The kernel returns the table in pieces, and may miss a row, so a refusal takes two reads.
        for _ in range(2):
            held = sockets(pid)
            listening = {
                row.inode for row in rows(pid, {port}) if row.is_listening and row.ends.port == port
            }
            if not held or not listening.isdisjoint(held):
                return
    except OSError as error:
        raise TransferError(f"cannot look at process {pid}: {error.strerror}; try again") from error
    raise TransferError(f"process {pid} does not listen at {peer.locator}")


def engine_class(host: str = "", *, force_tcp: bool) -> Any:
    """Return mooncake.engine.TransferEngine, for peers that reach us at address `host`.

    Raises: MisuseError that explains what to do.
    """
    family = _family(host)
    if "%" in host:
        raise MisuseError(f"host {host}: peers cannot use an address with a zone")
    if family == "IPv6" and "mooncake.engine" not in sys.modules:
        os.environ["MC_USE_IPV6"] = "1"
    if family and family != (spoken := _spoken()):
        raise MisuseError(
            f"host {host}: mooncake speaks {spoken} in this process (MC_USE_IPV6, read when it is "
            "loaded)"
        )
    # Without MC_FORCE_TCP, the engine uses an RDMA device if it finds one. The fence would then
    # prove nothing.
    if force_tcp:
        os.environ.setdefault("MC_FORCE_TCP", "1")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ModuleNotFoundError as error:
        raise MisuseError("mooncake is not installed: pip install 'kvflow[mooncake]'") from error
    except ImportError as error:
        raise MisuseError(
            f"mooncake cannot be loaded ({error}): apt install libibverbs1 libnuma1 libcurl4"
        ) from error
