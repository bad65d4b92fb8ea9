"""The data plane that uses NVIDIA NIXL over UCX: copies within a machine (CMA), TCP between
machines, RDMA with a device.

What status means landed?       Only DONE, for each transfer: UCX has flushed the blocks to the
                                peer's memory.
Can a write outlive its error?  Yes. Over TCP, bytes that a frozen peer has not read land when it
                                thaws, however the transfer ended, and releasing a transfer stops
                                none of its blocks. So any end but DONE makes the whole write
                                UNPROVEN, once its other transfers end.
What fences a peer?             Its process is known to be dead (pidfd), and our agent has closed
                                every connection that may have been its own. Until then the agent
                                reads bytes that the process sent before it died. Copies within a
                                machine are system calls of the writer, and end with it.
                                Deregistering memory is not a fence: over TCP the receiver writes,
                                and does not check. A process on another host cannot be observed, so
                                its loans can never be proven.

There are two agents. Peers write through one, which has a thread that sleeps until they do
(`progress`). Our own writes go through the other, on the plane's thread. A UCX agent over TCP has
no authentication, and a process that reaches its port can write *anywhere* in our memory, not only
into the pool. It listens on the interface with the address `host`, or on every interface if no
interface of this machine has that address.

A route belongs to one process. Once that process is known to be dead, no more blocks are submitted.
"""

from __future__ import annotations

import time

from kvflow.protocols.errors import TransferError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity
from kvflow.transports.data.locators import new_name, pack_locator, regions_of
from kvflow.transports.data.nixl.agent import Agent, decode_metadata
from kvflow.transports.data.nixl.library import PROVABLE, transports
from kvflow.transports.data.nixl.progress import ProgressThread
from kvflow.transports.data.route import BlockList, Planner
from kvflow.transports.data.threaded import EnginePlane
from kvflow.transports.data.transfers import DONE, RUNNING, Transfer, TransfersRoute
from kvflow.transports.host.identity import is_alive, own_identity
from kvflow.transports.host.peer_process import PeerProcess

MAX_PEERS = 16_384
_ANSWER_S, _CONNECT_S = 10.0, 12.0
_ASK_S = 0.0005  # seconds between two checks for an answer


class Peer:
    """A peer's agent. Implements `transfers.Carrier`."""

    def __init__(
        self, name: str, process: ProcessIdentity, metadata: bytes, plane: NixlPlane
    ) -> None:
        self.name, self.process, self.metadata = name, process, metadata
        self.routes = 0
        # True after a transfer failed. The connection to the peer is then broken too.
        self.is_broken = False
        self._plane = plane
        self.post, self.look, self.release = plane.agent.post, plane.agent.look, plane.agent.release

    def prepare(self, blocks: BlockList) -> Transfer:
        return self._plane.agent.prepare("WRITE", self.name, *blocks)

    def failed(self) -> None:
        self.is_broken = True

    def leave(self) -> None:
        self._plane.leave(self)


class NixlPlane(EnginePlane[TransfersRoute]):
    """Implements `protocols.ports.DataPlane`."""

    name = "nixl"

    def __init__(
        self, host: str = "127.0.0.1", rate_limit_bytes_per_s: float | None = None, device: str = ""
    ) -> None:
        """Start both agents, which takes half a second for the first one in a process.

        Create the plane before the event loop serves anything. `host` is the address at which peers
        reach us. `device` names an RDMA device; without one, TCP and copies within a machine are
        used.

        Raises: MisuseError when the package cannot be loaded, TransferError when an agent does not
        start.
        """
        super().__init__(rate_limit_bytes_per_s)
        self._host, self._device = host, device
        self._inbound_agent = Agent(new_name(own_identity()), host, device)
        # Our own writes go through this agent.
        self.agent = Agent(new_name(own_identity()), host, device)
        self._inbound.add_ports(self._inbound_agent.ports)
        self._progress: ProgressThread | None = None
        self._peers: dict[str, Peer] = {}

    def __repr__(self) -> str:
        over = self._device or ",".join(sorted(transports()))
        return f"<NixlPlane at {self._host} over {over}: {len(self._routes)} routes>"

    @property
    def stalled_s(self) -> float:
        if self._progress is not None and not self._progress.is_alive:
            return float("inf")
        return super().stalled_s

    @property
    def under_way(self) -> dict[str, int]:
        both = (self.agent, self._inbound_agent)
        return {
            **super().under_way,
            "jobs": sum(route.jobs for route in self._routes),
            "handles": sum(agent.open_transfers for agent in both),
            "notifications": sum(agent.kept_notifications for agent in both),
        }

    def _register_pool(self, layout: PoolLayout) -> str:
        regions = regions_of(layout)
        self._inbound_agent.register(regions)
        locator = pack_locator(self._inbound_agent.metadata())
        self.agent.register(regions)
        self._progress = ProgressThread(self._inbound_agent)
        return locator

    async def _open(
        self, address: PlaneAddress, layout: PoolLayout, planner: Planner, process: PeerProcess
    ) -> TransfersRoute:
        name, metadata = decode_metadata(address.locator, address.process)
        try:
            peer = await self._connecting.run(
                lambda: self.reach(name, address.process, metadata, layout.buffers[0].address),
                self.leave,
                within_s=_CONNECT_S,
            )
        except TimeoutError:
            raise TransferError(f"no connection with {name} within {_CONNECT_S:g} s") from None
        if process.is_gone:
            # Another process may have answered in its place.
            self.leave(peer)
            process.check()
        return TransfersRoute(self._thread, planner, peer, process, self._routes)

    def reach(self, name: str, process: ProcessIdentity, metadata: bytes, address: int) -> Peer:
        """Connect and wait for an answer, so that no later write has to connect. Blocks."""
        with self._opening:
            if self._layout is None:
                raise TransferError("the nixl plane is closed")
            peer = self._peers.get(name)
            if peer is None:
                self._forget_dead()
                peer = Peer(name, process, metadata, self)
                self.agent.add(metadata)
                self._peers[name] = peer
            elif peer.metadata != metadata and peer.routes:
                raise TransferError(f"nixl agent {name} is another one: its metadata differs")
            elif peer.metadata != metadata or peer.is_broken:
                # The peer counts as broken until `add` succeeds, so that the next call tries again.
                peer.is_broken = True
                self.agent.remove(name)
                self.agent.add(metadata)
                peer.metadata, peer.is_broken = metadata, False
            peer.routes += 1
        try:
            self._ask(peer, address)
        except BaseException:
            self.leave(peer)
            raise
        return peer

    def _forget_dead(self) -> None:
        """Forget peers that are dead and have no route.

        Living peers are kept, because their side keeps a connection open after NIXL disconnects.

        Raises: TransferError when too many are kept.
        """
        for peer in [
            peer for peer in self._peers.values() if not peer.routes and has_died(peer.process)
        ]:
            del self._peers[peer.name]
            self.agent.remove(peer.name)
        if len(self._peers) >= MAX_PEERS:
            raise TransferError(
                f"more than {MAX_PEERS} peers, which are never forgotten: restart this process"
            )

    def _ask(self, peer: Peer, address: int) -> None:
        give_up_at_s = time.monotonic() + _ANSWER_S
        try:
            probe = self.agent.prepare_probe(peer.name, address)
            try:
                self.agent.post(probe)
                while probe.status == RUNNING and time.monotonic() < give_up_at_s:
                    time.sleep(_ASK_S)
                    self.agent.look(probe)
            finally:
                self.agent.release(probe)
        except Exception as error:
            peer.is_broken = True
            raise TransferError(
                f"nixl cannot reach {peer.name}: {type(error).__name__}: {error}"
            ) from error
        if probe.status == RUNNING:
            raise TransferError(f"no answer from {peer.name} within {_ANSWER_S:g} s")
        if probe.status != DONE:
            peer.is_broken = True
            raise TransferError(f"nixl cannot reach {peer.name}: status {probe.status}")

    def leave(self, peer: Peer) -> None:
        with self._opening:
            peer.routes -= 1

    def _unprovable(self) -> str:
        return self._device or ", ".join(sorted(transports() - set(PROVABLE)))

    def _stop(self) -> None:
        with self._opening:
            self._layout = None
        if self._progress is not None:
            self._progress.close()
        self._inbound_agent.close()
        self.agent.close()


def has_died(process: ProcessIdentity) -> bool:
    """Return True if a process is known to be dead; a process on another host never is."""
    try:
        return not is_alive(process)
    except TransferError:
        return False
