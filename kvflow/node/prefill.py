"""The prefill node, on asyncio."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from kvflow.handlers.prefill import PrefillShell
from kvflow.handlers.rooms import PrefillRoom
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import StagedChecksums, Staging
from kvflow.node.base import Node
from kvflow.protocols.arguments import CheckedPrompt, TokenIds, check_cause, check_prompt
from kvflow.protocols.errors import Cause
from kvflow.protocols.limits import Bounds, Timing, check_time
from kvflow.protocols.pages.layout import Counts, PoolLayout
from kvflow.protocols.ports import Checksums, ControlSocket, DataPlane, PageStore
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import DecodePeer, PrefillIdentity
from kvflow.protocols.prefill.records import pinned_places
from kvflow.protocols.wire.messages import Rank
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.transports.control.zmq import bind_router
from kvflow.transports.data.staged import StagedPlane
from kvflow.transports.host.address import bracketed

Bind = Callable[[str, int], tuple[ControlSocket, int]]
"""Binds prefill's end of the control link: (host, port) -> (socket, port).

Port 0 binds a free port.

Raises: MisuseError if the port is taken.
"""


class PrefillNode(Node[PrefillShell]):
    """One prefill rank. It binds a ROUTER socket for control, and writes KV into decodes' pools."""

    role = "prefill"

    def __init__(
        self,
        pool: PagedPool,
        plane: DataPlane | str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        rank: int = 0,
        world_size: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        model: str = "",
        pages: PageStore | None = None,
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        incarnation: int | None = None,
        verify_transfers: bool = False,
        staging: Staging | None = None,
        advertise: str = "",
        bind: Bind = bind_router,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """Create a node over `pool`. `start` binds its control socket to `host` and `port`.

        Port 0 binds a free port. Decodes reach the node at `advertise`, by default `host`.

        `plane` is a data plane, or the name of one. `pages` is the store of the pool's pages, by
        default the pool's own allocator. `verify_transfers`: send a checksum with every chunk, for
        decodes that verify. `staging`: host memory through which every write passes; the caller
        closes it.

        `rank` is the number of this rank among the `world_size` ranks that serve each room
        together. A rank sends what only it has, and its share of what several ranks have
        (`PoolLayout.served`). `dp_rank` is the number of this group of ranks among `dp_size`
        groups.
        """
        super().__init__(
            pool,
            plane,
            host=advertise or host,
            pages=pages,
            timing=timing,
            bounds=bounds,
            incarnation=incarnation,
            verify_transfers=verify_transfers,
            staging=staging,
            now=now,
        )
        if staging is not None:
            self.plane = StagedPlane(self.plane, staging)
        self._advertise = advertise or host
        self._host = host
        self._port = port
        self._rank = rank
        self._world_size = world_size
        self._model = model
        self._group = (dp_rank, dp_size)
        self._socket: ControlSocket | None = None
        # A socket for more decodes lets more connections be open.
        decodes = self.bounds.targets
        self._bind = partial(bind_router, decodes=decodes) if bind is bind_router else bind

    @staticmethod
    def _moved(layout: PoolLayout) -> PoolLayout:
        return layout.served

    def _sums(self) -> Checksums | None:
        # The CPU cannot read a pool on a device, so its pages are copied to host memory first.
        return super()._sums() if self.pool.on_host else StagedChecksums(self.pool)

    @property
    def control(self) -> str:
        return f"tcp://{bracketed(self._advertise)}:{self._port}"

    @property
    def info(self) -> RankInfo:
        """Description of this rank for a registry, from which decodes learn of it."""
        me = (self._rank, self._world_size, self.incarnation)
        where = (self.control, self.plane.name)
        return RankInfo(*me, *where, self._model, self.shape, *self._group)

    async def start(self) -> None:
        """Start the node.

        Raises: MisuseError if the control port is taken, or on a second call.
        """
        self._check_start()
        self._socket, self._port = self._bind(self._host, self._port)
        identity = PrefillIdentity(
            self.incarnation, Rank(self._rank), self._moved(self.pool.layout), self.exported[0]
        )
        self._shell = PrefillShell(
            PrefillEndpoint(identity, observer=self.counts, timing=self.timing, bounds=self.bounds),
            pages=self.pages,
            plane=self.plane,
            socket=self._socket,
            counts=self.counts,
            now=self._now,
            stores=self._stores,
            checksums=self._checksums,
        )

    def room(
        self,
        room: int,
        prompt: TokenIds | CheckedPrompt,
        *,
        deadline_s: float | None = None,
        rendezvous_s: float | None = None,
    ) -> PrefillRoom:
        """Open the engine's half of a room.

        The method is synchronous, so that the caller learns of a refusal before it does any work.
        If decode has not announced the room, decode's half must arrive within `rendezvous_s` (by
        default that of the node's timing). An announced room waits for as long as its decode lives.
        Raises: MisuseError (room in use, empty prompt, invalid room id, ...).
        """
        shell, (tokens, digest) = self._open_shell, check_prompt(prompt)
        if deadline_s is None:
            at_s = float("inf")
        else:
            at_s = self._now() + check_time("deadline_s", deadline_s)
        if rendezvous_s is not None:
            check_time("rendezvous_s", rendezvous_s)
        return shell.open(room, tokens, digest, rendezvous_s=rendezvous_s, deadline_at_s=at_s)

    def refuse(self, room: int, cause: Cause) -> None:
        """Refuse a room instead of opening the engine's half.

        Decode receives the cause now, or when its half arrives. Raises: MisuseError if `room` is
        not a room id, or `cause` is not a Cause.
        """
        self._open_shell.refuse(room, check_cause(cause))

    @property
    def pinned(self) -> Counts:
        return self._pinned_by(None)

    def _pinned_by(self, peer: DecodePeer | None) -> Counts:
        writes = self.shell.endpoint.core.writes.values()
        return pinned_places(writes, len(self.pool.layout.spaces), peer)

    @property
    def pinned_limits(self) -> Counts:
        return tuple(map(self.bounds.pinned_limit, self.pool.layout.counts))

    @property
    def unavailable_reason(self) -> str:
        """Reason why this node cannot serve; empty if it can.

        One reason is a quarantine above its limit, because prompts are computed in the remaining
        pages.
        """
        endpoint = self.shell.endpoint
        endpoint.note_stall(self.plane.stalled_s)
        return endpoint.unavailable_reason or endpoint.core.ledger.excess

    def peers(self) -> list[dict[str, Any]]:
        return [
            {
                "incarnation": f"{peer.incarnation:016x}",
                "phase": peer.phase.name.lower(),
                "heard_ago_s": round(self._now() - peer.received_at_s, 3),
                "rooms": len(peer.grants.rooms),
                "pinned_pages": sum(self._pinned_by(peer)),
            }
            for peer in self.shell.endpoint.peers
        ] + self._earlier_writers()

    async def _close(self) -> None:
        shell = self._shell
        try:
            if shell is None:
                await self._close_memory()
                return
            await shell.drain(self.timing.lost_after_s)
            drained = not shell.endpoint.rooms
            if drained:
                # Goodbye names the unproven grants, so every write must have ended before.
                await shell.part()
            # This ends the writes that a frozen peer blocks. They are then unproven.
            await self._close_memory()
            if not drained:
                await shell.part()
        finally:
            if shell is not None:
                await shell.close()
                self._unproven = self._unproven_loans()
            if self._socket is not None:
                self._socket.close()
