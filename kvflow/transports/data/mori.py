"""The data plane that uses AMD's MORI-IO: RDMA between host memories.

**Never run on hardware.** The calls were checked against ROCm/mori at 624002c (2026-08-21, after
v1.2.2), its `python/mori/io/engine.py` and `src/pybind/pybind_io.cpp`, and are tested against a
stub of them:

    IOEngine(key, IOEngineConfig(host, port))
        port 0: any free port, for its control connections
    .create_backend(BackendType.RDMA, RdmaBackendConfig(...))
        raises RuntimeError without an active RDMA device
    .get_engine_desc() -> EngineDesc(key, host, port, pid)
        .pack() -> bytes, EngineDesc.unpack(bytes)
    .register_memory(ptr, size, device_id, MemoryLocationType.CPU)
        -> MemoryDesc(engine_key, data, size), packed in the same way
    .register_remote_engine(desc), .deregister_remote_engine(desc), .deregister_memory(desc),
    .remove_backend(type)
    .create_session(local_mem, remote_mem)
        connects; holds the GIL, and waits at most 5 s for an answer
    session.allocate_transfer_uid() -> int
    session.read(local_offset, remote_offset, size, uid)
        -> TransferStatus: InProgress, Succeeded, Failed, Message
    session.batch_write(local_offsets, remote_offsets, sizes, uid)
        -> one TransferStatus for all of them

What status means landed?       Only SUCCESS in a batch's TransferStatus: the engine polled a
                                completion for each of its work requests. Over a reliable
                                connection, a completion means that the peer's NIC acknowledged the
                                request. Whether the bytes are in memory by then was not tested.
Can a write outlive its error?  Unknown. A batch fails with its first failed completion. Its other
                                work requests may still be under way in the NIC, and no call stops
                                them. So any end but SUCCESS makes the whole write UNPROVEN, and its
                                pages stay in quarantine.
What fences a peer?             Nothing that can be observed from here: a NIC writes without the
                                host, and its queues are not connections of the host. A lost
                                writer's loans stay in quarantine until the operator declares the
                                writer dead.

The engine writes the result of a transfer into its TransferStatus, which must exist until then. So
the plane keeps the statuses of abandoned transfers for as long as it exists. Notifications to the
receiver are switched off, because kvflow never reads them, and the engine would keep them. The
engine's control port authenticates no peer.
"""

from __future__ import annotations

import bisect
import ctypes
import importlib
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from kvflow.protocols.errors import LayoutError, MisuseError, TransferError, WireError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity
from kvflow.protocols.wire.codec import parser
from kvflow.transports.data.locators import (
    is_name_of,
    new_name,
    pack_locator,
    regions_of,
    unpack_locator,
)
from kvflow.transports.data.route import BlockList, Planner
from kvflow.transports.data.threaded import EnginePlane
from kvflow.transports.data.transfers import (
    DONE,
    FAILED,
    RUNNING,
    Transfer,
    TransfersRoute,
    raised_as,
)
from kvflow.transports.host.identity import own_identity
from kvflow.transports.host.peer_process import PeerProcess

MAX_REGIONS = 8  # each pair of regions needs a session
_PROBE_BYTES = 8
_ANSWER_S, _CONNECT_S = 10.0, 30.0
_ASK_S = 0.0005  # seconds between two checks for an answer
_OPERATORS_CHOICE = "MORI_RDMA_DEVICES"
_choosing = threading.Lock()


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The packed descriptions of an engine and its memory, which a peer needs to reach a pool."""

    engine: bytes
    memory: tuple[bytes, ...]


_parse: Callable[[bytes], Description] = parser(Description)


class Peer:
    """A peer's engine. Implements `transfers.Carrier`."""

    def __init__(
        self, plane: MoriPlane, description: Description, process: ProcessIdentity
    ) -> None:
        """Unpack a description.

        Raises: TransferError for bytes that do not describe an engine of `process`.
        """
        self._plane, self.description = plane, description
        with raised_as(TransferError, "this is no description of a mori engine"):
            self.engine = plane.library.EngineDesc.unpack(description.engine)
            self.memory = [plane.library.MemoryDesc.unpack(packed) for packed in description.memory]
            self.name = str(self.engine.key)
            ends = sorted((memory.data, index) for index, memory in enumerate(self.memory))
        if not is_name_of(self.name, process) or not self.memory:
            raise TransferError(
                f"mori engine {self.name!r:.80} is not one of process {process.pid}"
            )
        if any(memory.engine_key != self.engine.key for memory in self.memory):
            raise TransferError(f"mori engine {self.name!r:.80} describes memory of another engine")
        self._starts, self._order = [start for start, _ in ends], [index for _, index in ends]
        self.sessions: dict[tuple[int, int], Any] = {}  # by the indices of our region and theirs
        self.routes = 0
        self.is_broken = False

    def prepare(self, blocks: BlockList) -> Transfer:
        """Group the blocks by the pair of regions that they lie in.

        Raises: LayoutError for blocks outside registered memory.
        """
        lists: defaultdict[tuple[int, int], BlockList] = defaultdict(lambda: BlockList([], [], []))
        for source, target, size in zip(*blocks, strict=True):
            ours, our_offset = self._plane.region_of(source, size)
            theirs, their_offset = self._region_of(target, size)
            found = lists[ours, theirs]
            found.sources.append(our_offset)
            found.targets.append(their_offset)
            found.sizes.append(size)
        return Transfer((dict(lists), []), sum(blocks.sizes))

    def _region_of(self, address: int, size: int) -> tuple[int, int]:
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            memory = self.memory[self._order[at]]
            if address + size <= memory.data + memory.size:
                return self._order[at], address - memory.data
        raise LayoutError(
            f"{size} bytes at {address:#x} are not in memory that {self.name} has registered"
        )

    def post(self, transfer: Transfer) -> None:
        lists, statuses = transfer.handle
        self._plane.open.add(transfer)
        for pair, columns in lists.items():
            session = self.sessions[pair]
            statuses.append(session.batch_write(*columns, session.allocate_transfer_uid()))
        self.look(transfer)

    def look(self, transfer: Transfer) -> None:
        _, statuses = transfer.handle
        if any(_is_under_way(status) for status in statuses):
            transfer.status = RUNNING
        elif all(status.Succeeded() for status in statuses):
            transfer.status = DONE
        else:
            transfer.status = FAILED
            failed = next(status for status in statuses if not status.Succeeded())
            transfer.why = f"{failed.Code()}: {failed.Message()}"

    def release(self, transfer: Transfer) -> None:
        """Forget a transfer that ended.

        Raises: TransferError while any of it is under way, because the engine will write the result
        into memory that the transfer holds.
        """
        if any(_is_under_way(status) for status in transfer.handle[1]):
            raise TransferError(f"a transfer to {self.name} is under way")
        self._plane.open.discard(transfer)

    def failed(self) -> None:
        self.is_broken = True

    def leave(self) -> None:
        self._plane.leave(self)


def _is_under_way(status: Any) -> bool:
    return not status.Succeeded() and not status.Failed()


class MoriPlane(EnginePlane[TransfersRoute]):
    """Implements `protocols.ports.DataPlane`."""

    name = "mori"

    def __init__(
        self,
        host: str = "127.0.0.1",
        rate_limit_bytes_per_s: float | None = None,
        device: str = "",
        *,
        library: Any = None,
    ) -> None:
        """Start the engine. Create the plane before the event loop serves anything.

        `host` is the address at which peers reach its control port. `device` names an RDMA device;
        without one, mori chooses. `library` replaces the module `mori.io`.

        Raises: MisuseError when the package cannot be loaded, TransferError when the engine does
        not start.
        """
        super().__init__(rate_limit_bytes_per_s)
        self.library = mori_library() if library is None else library
        self._host, self._device = host, device
        self.open: set[Transfer] = set()  # transfers whose statuses the engine may still write
        self._peers: dict[str, Peer] = {}
        self._memory: list[Any] = []  # registered regions of our pool
        self._registered: list[Any] = []  # all registered regions: the pool's and the scratch
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)  # memory into which probes read
        with raised_as(TransferError, "the mori engine does not start"):
            config = self.library.IOEngineConfig(host=host, port=0)
            self._engine = self.library.IOEngine(new_name(own_identity()), config)
            with _device_chosen(device):
                backend = self.library.RdmaBackendConfig(enable_notification=False)
                self._engine.create_backend(self.library.BackendType.RDMA, backend)
            self._scratch_memory = self._register(
                ctypes.addressof(ctypes.c_char.from_buffer(self._scratch)), 4096
            )

    def __repr__(self) -> str:
        return (
            f"<MoriPlane at {self._host} over {self._device or 'RDMA'}: {len(self._routes)} routes>"
        )

    @property
    def under_way(self) -> dict[str, int]:
        counted = {"jobs": sum(route.jobs for route in self._routes), "handles": len(self.open)}
        return {**super().under_way, **counted}

    def _register_pool(self, layout: PoolLayout) -> str:
        regions = regions_of(layout)
        if len(regions) > MAX_REGIONS:
            raise LayoutError(
                f"the pool lies in {len(regions)} pieces, the limit is {MAX_REGIONS}; use a "
                "page-first one"
            )
        with raised_as(LayoutError, "mori cannot register the pool"):
            self._memory = [self._register(address, size) for address, size in regions]
            packed = tuple(memory.pack() for memory in self._memory)
            described = msgspec.msgpack.encode(
                Description(self._engine.get_engine_desc().pack(), packed)
            )
        return pack_locator(described)

    def _register(self, address: int, size: int) -> Any:
        memory = self._engine.register_memory(
            address, size, -1, self.library.MemoryLocationType.CPU
        )
        self._registered.append(memory)
        return memory

    def region_of(self, address: int, size: int) -> tuple[int, int]:
        """Return a block's region, by index, and its offset in that region. Raises: LayoutError."""
        for index, memory in enumerate(self._memory):
            if memory.data <= address and address + size <= memory.data + memory.size:
                return index, address - memory.data
        raise LayoutError(f"{size} bytes at {address:#x} are not in our pool")

    def _check_address(self, address: PlaneAddress) -> None:
        decode_description(address.locator)

    async def _open(
        self, address: PlaneAddress, layout: PoolLayout, planner: Planner, process: PeerProcess
    ) -> TransfersRoute:
        description = decode_description(address.locator)
        try:
            peer = await self._connecting.run(
                lambda: self._reach(description, address.process), self.leave, within_s=_CONNECT_S
            )
        except TimeoutError:
            pid = address.process.pid
            raise TransferError(
                f"no mori session with process {pid} within {_CONNECT_S:g} s"
            ) from None
        if process.is_gone:
            # Another process may have answered in its place.
            self.leave(peer)
            process.check()
        return TransfersRoute(self._thread, planner, peer, process, self._routes)

    def _reach(self, description: Description, process: ProcessIdentity) -> Peer:
        """Connect and wait for an answer, so that no later write has to connect. Blocks."""
        with self._opening:
            if self._layout is None:
                raise TransferError("the mori plane is closed")
            found = Peer(self, description, process)
            peer = self._peers.get(found.name)
            if peer is not None and peer.description != description:
                raise TransferError(
                    f"mori engine {found.name} is another one: its description differs"
                )
            if peer is None or peer.is_broken:
                # Routes to the broken peer keep its sessions for as long as those work.
                if peer is not None:
                    self._forget(peer)
                self._peers[found.name] = peer = found
                self._connect_to(peer)
            peer.routes += 1
        try:
            self._ask(peer)
        except BaseException:
            self.leave(peer)
            raise
        return peer

    def _connect_to(self, peer: Peer) -> None:
        try:
            self._engine.register_remote_engine(peer.engine)
            for ours, mine in enumerate(self._memory):
                for theirs, memory in enumerate(peer.memory):
                    peer.sessions[ours, theirs] = self._session(mine, memory)
        except Exception as error:
            self._forget(peer)
            raise TransferError(
                f"mori cannot reach {peer.name}: {type(error).__name__}: {error}"
            ) from error

    def _session(self, mine: Any, theirs: Any) -> Any:
        session = self._engine.create_session(mine, theirs)
        if session is None:
            raise TransferError("no backend of the engine can reach that memory")
        return session

    def _ask(self, peer: Peer) -> None:
        give_up_at_s = time.monotonic() + _ANSWER_S
        probe = Transfer(({}, []), _PROBE_BYTES)
        try:
            session = self._session(self._scratch_memory, peer.memory[0])
            self.open.add(probe)
            probe.handle[1].append(
                session.read(0, 0, _PROBE_BYTES, session.allocate_transfer_uid())
            )
            peer.look(probe)
            while probe.status == RUNNING and time.monotonic() < give_up_at_s:
                time.sleep(_ASK_S)
                peer.look(probe)
            if probe.status != DONE:
                raise TransferError(probe.why or f"no answer within {_ANSWER_S:g} s")
        except Exception as error:
            peer.is_broken = True
            raise TransferError(
                f"mori cannot reach {peer.name}: {type(error).__name__}: {error}"
            ) from error
        finally:
            with suppress(TransferError):
                # A probe that is still under way cannot be released, and is kept.
                peer.release(probe)

    def leave(self, peer: Peer) -> None:
        """Forget the peer if this was its last route."""
        with self._opening:
            peer.routes -= 1
            if not peer.routes and self._peers.get(peer.name) is peer:
                self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.name]
        with suppress(Exception):
            # Our side no longer uses the peer. At worst the engine keeps its record of it.
            self._engine.deregister_remote_engine(peer.engine)

    def _unprovable(self) -> str:
        return "RDMA"

    def _stop(self) -> None:
        with self._opening:
            self._layout = None
            while self._registered:
                self._engine.deregister_memory(self._registered.pop())
            self._engine.remove_backend(self.library.BackendType.RDMA)


def decode_description(locator: str) -> Description:
    """Return the description in a locator. Raises: TransferError if there is none."""
    try:
        found = _parse(unpack_locator(locator))
        if not 0 < len(found.memory) <= MAX_REGIONS:
            raise ValueError(
                f"{len(found.memory)} pieces of memory, 1 to {MAX_REGIONS} are expected"
            )
    except (ValueError, WireError) as error:
        raise TransferError(
            f"{locator!r:.80} is no description of a mori engine: {error}"
        ) from None
    return found


@contextmanager
def _device_chosen(device: str) -> Iterator[None]:
    """While a backend is made, make mori use `device`, unless the operator has chosen one."""
    with _choosing:
        added = bool(device) and _OPERATORS_CHOICE not in os.environ
        if added:
            os.environ[_OPERATORS_CHOICE] = device
        try:
            yield
        finally:
            if added:
                del os.environ[_OPERATORS_CHOICE]


def mori_library() -> Any:
    """Return the module `mori.io`. Raises: MisuseError that explains what to do."""
    try:
        return importlib.import_module("mori.io")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "mori":
            raise MisuseError(
                "mori is not installed: pip install amd_mori, on a machine with ROCm"
            ) from error
        raise MisuseError(f"mori cannot be loaded ({error})") from error
    except ImportError as error:
        raise MisuseError(
            f"mori cannot be loaded ({error}); it needs ROCm and rdma-core"
        ) from error
