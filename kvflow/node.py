"""The library: a prefill or a decode node over your own paged pool: endpoint, shell, pages, data plane, control link.

async with DecodeNode(pool, plane="local") as decode:
    async with decode.room(7, prefill=ranks, prompt=ids) as room:    # ranks: each prefill node's `info`
        handoff = await room.landed()                                # room.pages are filled

async with PrefillNode(pool, plane="local") as prefill:
    async with prefill.room(7, prompt=ids) as room:
        await room.matched()
        room.send(pages, last=True, handoff=b"...")
        await room.done()
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, Generic, Self, TypeVar

from kvflow.aio import drained
from kvflow.handlers.decode import Connect, DecodeShell
from kvflow.handlers.inheritance import Inheritance
from kvflow.handlers.prefill import PrefillShell
from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.checksum import PageSums
from kvflow.memory.pool import PagedPool
from kvflow.protocols.arguments import TokenIds, check_prompt, pages_wanted
from kvflow.protocols.decode import DecodeEndpoint
from kvflow.protocols.decode_links import DecodeIdentity
from kvflow.protocols.decode_rooms import Prompt
from kvflow.protocols.errors import CapacityError, Cause, KvflowError, MisuseError
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.ports import ControlSocket, DataPlane, Endpoint, PageStore, UnprovenLoan
from kvflow.protocols.prefill import PrefillEndpoint
from kvflow.protocols.prefill_peers import PrefillIdentity
from kvflow.protocols.wire.messages import Incarnation, Rank, room_id
from kvflow.protocols.wire.ranks import PoolShape, RankInfo
from kvflow.telemetry.counters import Counts
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.data.select import plane_for

log = logging.getLogger(__name__)
Resolve = Callable[[str], Awaitable[Sequence[RankInfo]]]
"""From the word a user names a prefill by to its ranks, in rank order. Raises: LostError."""
Bind = Callable[[str, int], tuple[ControlSocket, int]]
"""(host, port or 0) -> prefill's end of the control link and its port. Raises: MisuseError (port taken)."""
S = TypeVar("S", PrefillShell, DecodeShell)


class _Node(Generic[S]):
    """What both roles share: identity, pool, page owners, data plane, and the way they start and end."""

    role = ""
    _shell: S | None = None
    _closing: asyncio.Task[None] | None = None
    _unproven: Sequence[UnprovenLoan] = ()

    def __init__(
        self,
        pool: PagedPool,
        plane: DataPlane | str,
        *,
        host: str,
        pages: PageStore | None,
        timing: Timing | None,
        bounds: Bounds | None,
        incarnation: int | None,
        verify_transfers: bool,
        now: Callable[[], float],
    ) -> None:
        self.pool, self._now = pool, now
        self.plane: DataPlane = plane_for(pool, plane, receives=self.role == "decode", host=host)
        self._checksums = PageSums(pool) if verify_transfers else None
        self.pages: PageStore = pages or pool.pages
        self.timing, self.bounds = timing or Timing(), bounds or Bounds()
        self.incarnation = Incarnation(secrets.randbits(63) | 1 if incarnation is None else incarnation)
        if not 0 < self.incarnation < 1 << 64:
            raise MisuseError(f"incarnation {self.incarnation} is not a positive unsigned 64-bit integer")
        self.counts = Counts(pool.layout.page_bytes)
        self.exported: tuple[Endpoint, PoolLayout] = self.plane.export(pool.layout)

    def __repr__(self) -> str:
        state = "closed" if self._closing is not None else "new" if self._shell is None else "running"
        return f"<{type(self).__name__} {self.incarnation:016x} over {self.plane.name}: {state}>"

    @property
    def shape(self) -> PoolShape:
        layout = self.pool.layout
        return PoolShape(layout.page_size, layout.num_pages, layout.page_bytes, len(layout.components))

    @property
    def shell(self) -> S:
        if self._shell is None:
            raise MisuseError(f"the {self.role} node is not started: use it as an async context manager, or start()")
        return self._shell

    def rooms_by_phase(self) -> dict[str, int]:
        """Open rooms, by the name of their phase."""
        return dict(Counter(record.phase.name.lower() for record in self.shell.endpoint.rooms.values()))

    @property
    def control(self) -> str:
        """Where decodes reach this node, "tcp://host:port"; empty for a node that binds nothing."""
        return ""

    @property
    def quarantined_pages(self) -> int:
        """Pages lent by rooms that have ended, without proof yet that nothing writes into them."""
        return 0

    @property
    def quarantine_limit(self) -> int:
        """With more pages in quarantine no room is opened."""
        return 0

    @property
    def unavailable_reason(self) -> str:
        """Why this node cannot serve; empty when it can."""
        return ""

    def peers(self) -> list[dict[str, Any]]:
        """The nodes this one knows, a line each: incarnation, phase, when last heard, what is open with it."""
        raise NotImplementedError

    def peers_by_phase(self) -> dict[str, int]:
        return dict(Counter(str(line["phase"]) for line in self.peers()))

    async def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> Sequence[UnprovenLoan]:
        """End and drain every room, then the data plane; idempotent. The pool stays the caller's.

        Returns the loans of a decode whose end could not be proven. Their pages must not be used: they keep their owner
        in the pool's allocator, and the next decode node over this pool waits for their proof (`PagedPool.unproven`).
        Cancelling it, once or several times, does not stop it: the cancellation is passed on when all has ended (I12).
        """
        if self._closing is None:
            if self._shell is not None:
                self._shell.leave()
            self._closing = asyncio.create_task(self._close(), name=f"kvflow-{self.role}-close")
        await drained(self._closing)
        return self._unproven

    async def _close(self) -> None:
        raise NotImplementedError

    async def _close_memory(self) -> None:
        """Nothing of ours touches the pool any more."""
        await self.plane.close()
        if self._checksums is not None:
            await self._checksums.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _deadline_at_s(now: float, deadline_s: float | None) -> float:
    return float("inf") if deadline_s is None else now + deadline_s


class PrefillNode(_Node[PrefillShell]):
    """One prefill rank: binds the control ROUTER and writes rooms into decodes' pools."""

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
        model: str = "",
        pages: PageStore | None = None,
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        incarnation: int | None = None,
        verify_transfers: bool = False,
        advertise: str = "",
        bind: Bind = bind_router,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """Binds the control socket on `host` (`port` 0: a free one); decodes reach it at `advertise`, else `host`.

        `plane` is a data plane, or the name of one; `pages` knows who owns which page of the pool (by default the
        pool's own allocator). `verify_transfers`: a checksum with every chunk, for decodes that verify.
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
            now=now,
        )
        self._advertise = advertise or host
        self._host, self._port, self._rank, self._world_size, self._model = host, port, rank, world_size, model
        self._socket: ControlSocket | None = None
        self._bind = bind

    @property
    def control(self) -> str:
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        return f"tcp://{host}:{self._port}"

    @property
    def info(self) -> RankInfo:
        """What the bootstrap registry is told about this rank."""
        return RankInfo(
            self._rank, self._world_size, self.incarnation, self.control, self.plane.name, self._model, self.shape
        )

    async def start(self) -> None:
        """Raises: MisuseError when the control port is taken."""
        self._socket, self._port = self._bind(self._host, self._port)
        identity = PrefillIdentity(self.incarnation, Rank(self._rank), self.pool.layout, self.exported[0])
        self._shell = PrefillShell(
            PrefillEndpoint(identity, observer=self.counts, timing=self.timing, bounds=self.bounds),
            pages=self.pages,
            plane=self.plane,
            socket=self._socket,
            counts=self.counts,
            now=self._now,
            checksums=self._checksums,
        )

    def room(
        self, room: int, prompt: TokenIds, *, deadline_s: float | None = None, rendezvous_s: float | None = None
    ) -> PrefillRoom:
        """The engine's half of a room; synchronous, so that a refusal is known before any work.

        It waits `rendezvous_s` (the node's timing by default) for a decode that has not announced itself; one that has
        is waited for as long as it lives. Raises: MisuseError (room in use, empty prompt, not a room id).
        """
        tokens, digest = check_prompt(prompt)
        at_s = _deadline_at_s(self._now(), deadline_s)
        return self.shell.open(room, tokens, digest, rendezvous_s=rendezvous_s, deadline_at_s=at_s)

    def refuse(self, room: int, cause: Cause) -> None:
        """The engine's half of a room will never come: decode is told why, now or when its half comes.

        Raises: MisuseError for what is not a room id.
        """
        self.shell.refuse(room, cause)

    @property
    def unavailable_reason(self) -> str:
        shell = self.shell
        shell.endpoint.note_stall(self.plane.stalled_s)
        return shell.endpoint.unavailable_reason

    def peers(self) -> list[dict[str, Any]]:
        return [
            {
                "incarnation": f"{peer.incarnation:016x}",
                "phase": peer.phase.name.lower(),
                "heard_ago_s": round(self._now() - peer.heard_at_s, 3),
                "rooms": len(peer.grants.rooms),
            }
            for peer in self.shell.endpoint.peers
        ]

    async def _close(self) -> None:
        if self._shell is not None:
            await self._shell.drain(self.timing.lost_after_s)
        await self._close_memory()  # what a frozen peer still holds up ends here, unproven
        if self._shell is not None:
            await self._shell.close()
        if self._socket is not None:
            self._socket.close()


class DecodeNode(_Node[DecodeShell]):
    """A decode: lends its pages to prefill ranks, room by room."""

    role = "decode"

    def __init__(
        self,
        pool: PagedPool,
        plane: DataPlane | str,
        *,
        host: str = "127.0.0.1",
        resolve: Resolve | None = None,
        pages: PageStore | None = None,
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        incarnation: int | None = None,
        verify_transfers: bool = False,
        connect: Connect = connect_dealer,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`plane` is a data plane, or the name of one that prefills reach at `host`. `resolve` turns the word a room
        names its prefill by into ranks (a registry's client, say); `pages` knows who owns which page of the pool (by
        default the pool's own allocator).

        `verify_transfers`: a chunk has landed when its checksum is that of prefill, which must send one. A room whose
        pages differ fails; prefill is told too, unless it was the last chunk: there the room has succeeded by then.
        """
        super().__init__(
            pool,
            plane,
            host=host,
            pages=pages,
            timing=timing,
            bounds=bounds,
            incarnation=incarnation,
            verify_transfers=verify_transfers,
            now=now,
        )
        self._resolve, self._connect = resolve, connect
        self._ranks: dict[str, Sequence[RankInfo]] = {}
        self._asking: dict[str, asyncio.Future[Sequence[RankInfo]]] = {}
        self._inheritance: Inheritance | None = None

    @property
    def quarantined_pages(self) -> int:
        return self.shell.endpoint.core.ledger.quarantined_pages

    @property
    def quarantine_limit(self) -> int:
        return self.shell.endpoint.core.ledger.quarantine_limit

    @property
    def unavailable_reason(self) -> str:
        """Above the limit of its quarantine a decode opens no room."""
        try:
            self.shell.endpoint.core.ledger.check_quarantine()
        except CapacityError as error:
            return str(error)
        return ""

    def peers(self) -> list[dict[str, Any]]:
        return [
            {
                "incarnation": f"{peer.key.incarnation:016x}",
                "control": peer.key.control,
                "rank": peer.info.rank,
                "phase": peer.phase.name.lower(),
                "heard_ago_s": round(self._now() - peer.heard_at_s, 3),
                "loans": (owed := self.shell.endpoint.core.ledger.owed_by(peer))[0],
                "quarantine_pages": owed[1],
            }
            for peer in self.shell.endpoint.peers
        ]

    def declare_dead(self, incarnation: int, why: str) -> None:
        """An operator's word that a prefill incarnation writes no more: the only end of a loan without proof.

        Its rooms end, its pages leave quarantine, and it is never linked again. If the word is wrong, what that process
        still writes corrupts the pages' next owner. Raises: MisuseError (not linked here).
        """
        self.shell.declare_dead(incarnation, why)

    async def start(self) -> None:
        endpoint, layout = self.exported
        self._shell = DecodeShell(
            DecodeEndpoint(
                DecodeIdentity(self.incarnation, layout, endpoint),
                observer=self.counts,
                timing=self.timing,
                bounds=self.bounds,
                verify=self._checksums is not None,
            ),
            pages=self.pages,
            plane=self.plane,
            connect=self._connect,
            counts=self.counts,
            now=self._now,
            checksums=self._checksums,
        )
        self._inheritance = Inheritance(self._shell, self.pool.unproven)

    def room(
        self,
        room: int,
        prefill: str | Sequence[RankInfo],
        prompt: TokenIds,
        *,
        deadline_s: float | None = None,
        prefix_tokens: int = 0,
        pages: Sequence[int] | PageIndices | None = None,
    ) -> DecodeRoom:
        """A room at `prefill` (what `resolve` understands, or the ranks themselves) for a prompt of token ids.

        Await it, or enter it, and it is open. The deadline covers everything, linking included. Decode has the first
        `prefix_tokens` of the prompt already: a whole number of pages, or all of them. `pages`: those of your own
        allocator for the rest of the prompt; they are yours again after `released()`.

        Raises: MisuseError. Awaiting it raises LostError (no answer), RefusedError (the pools do not fit),
        CapacityError, AbortedError while shutting down.
        """
        return self._open(room, prefill, prompt, deadline_s, prefix_tokens, pages, held_back=False)

    def announce(
        self,
        room: int,
        prefill: str | Sequence[RankInfo],
        prompt: TokenIds,
        *,
        deadline_s: float | None = None,
        prefix_tokens: int = 0,
        pages: Sequence[int] | PageIndices | None = None,
    ) -> DecodeRoom:
        """As `room`, for a request whose pages are not there yet: prefill's half waits, and no page is taken until
        `offer()`. Closing it instead tells prefill why. Raises: as `room`."""
        return self._open(room, prefill, prompt, deadline_s, prefix_tokens, pages, held_back=True)

    def refuse(self, room: int, prefill: str | Sequence[RankInfo], cause: Cause) -> None:
        """A request that is refused here: its prefill legs are told why, at once. Raises: MisuseError."""
        shell, number = self.shell, room_id(room)
        ranks = self._known(prefill) if isinstance(prefill, str) else prefill
        if ranks is not None:
            shell.refuse(number, ranks, cause)
        elif isinstance(prefill, str):
            shell.spawn(self._refuse_at(number, prefill, cause), f"kvflow-refuse-{number}")

    async def _refuse_at(self, room: int, prefill: str, cause: Cause) -> None:
        try:
            ranks = await self._ask(prefill)
        except KvflowError as error:
            log.info("cannot tell prefill %s that room %d is refused: %s", prefill, room, error)
        else:
            self.shell.refuse(room, ranks, cause)

    def _open(
        self,
        room: int,
        prefill: str | Sequence[RankInfo],
        prompt: TokenIds,
        deadline_s: float | None,
        prefix_tokens: int,
        pages: Sequence[int] | PageIndices | None,
        *,
        held_back: bool,
    ) -> DecodeRoom:
        shell, number = self.shell, room_id(room)
        tokens, digest = check_prompt(prompt)
        wanted = pages_wanted(self.pool.layout, tokens, prefix_tokens)
        at_s = _deadline_at_s(self._now(), deadline_s)
        if not isinstance(prefill, str):
            ranks: Sequence[RankInfo] | None = prefill
        elif self._resolve is None:
            raise MisuseError(f"prefill {prefill!r}: this node was given no resolve()")
        else:
            ranks = self._known(prefill)
        source = functools.partial(self._ask, prefill) if ranks is None and isinstance(prefill, str) else ranks or ()
        handle = DecodeRoom(shell, number, wanted)
        if pages is not None:
            handle.give(pages)
        handle.held_back = held_back
        try:
            shell.open(handle, source, Prompt(tokens, digest, prefix_tokens), at_s, announce=held_back)
        except BaseException:
            handle.pages_freed()
            raise
        return handle

    def _known(self, prefill: str) -> Sequence[RankInfo] | None:
        """The ranks of a prefill that is linked, None when its registry must be asked."""
        ranks = self._ranks.get(prefill)
        links = self.shell.endpoint.core.links
        if ranks is None or any(links.find(info) is None for info in ranks):
            return None
        return ranks

    async def _ask(self, prefill: str) -> Sequence[RankInfo]:
        """Resolve once for all rooms that wait for the same word."""
        task = self._asking.get(prefill)
        if task is None:
            assert self._resolve is not None
            task = self._asking[prefill] = asyncio.ensure_future(self._resolve(prefill))
            task.add_done_callback(lambda _: self._asking.pop(prefill, None))
        ranks = self._ranks[prefill] = await asyncio.shield(task)
        return ranks

    async def _close(self) -> None:
        """Lent pages come back where a living prefill can prove them; the rest stays with the pool, unproven."""
        if self._shell is not None:
            left = await self._shell.close()
            self._unproven = left + (self._inheritance.left() if self._inheritance is not None else [])
            self.pool.unproven.extend(self._unproven)
        for asking in (questions := list(self._asking.values())):
            asking.cancel()
        await asyncio.gather(*questions, return_exceptions=True)
        await self._close_memory()
