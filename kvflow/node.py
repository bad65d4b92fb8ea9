"""The library: a prefill or a decode node over your own paged pool: handlers, page owners, data plane, control link.

async with DecodeNode(pool, plane) as decode:
    async with await decode.room(7, prefill=ranks, prompt=ids) as room:    # ranks: each prefill node's `info`
        handoff = await room.landed()                                      # room.pages are filled

async with PrefillNode(pool, plane) as prefill:
    async with prefill.room(7, prompt=ids) as room:
        await room.matched()
        room.send(pages, last=True, handoff=b"...")
        await room.done()
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvflow.aio import drained
from kvflow.handlers.decode import Connect, DecodeHandlers
from kvflow.handlers.decode_room import DecodeSession
from kvflow.handlers.prefill import PrefillHandlers
from kvflow.handlers.prefill_room import PrefillSession
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.checksum import PageSums
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import Cause, MisuseError
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import ControlSocket, DataPlane, Endpoint
from kvflow.protocols.wire.codec import prompt_digest
from kvflow.protocols.wire.ranks import PoolShape, RankInfo
from kvflow.telemetry.counters import Counts
from kvflow.transports.control.zmq import bind_router, connect_dealer

Prompt = Sequence[int] | NDArray[np.integer[Any]]
Resolve = Callable[[str], Awaitable[Sequence[RankInfo]]]
"""From the word a user names a prefill by to its ranks, in rank order. Raises: LostError."""
Bind = Callable[[str, int], tuple[ControlSocket, int]]
"""(host, port or 0) -> prefill's end of the control link and its port. Raises: MisuseError (port taken)."""
H = TypeVar("H", PrefillHandlers, DecodeHandlers)


class _Node(Generic[H]):
    """What both roles share: identity, pool, page owners, data plane, and the way they start and end."""

    role = ""
    _handlers: H | None = None
    _closing: asyncio.Task[None] | None = None

    def __init__(
        self,
        pool: PagedPool,
        plane: DataPlane,
        *,
        pages: PageAllocator | None,
        timing: Timing | None,
        verify_transfers: bool,
        now: Callable[[], float],
    ) -> None:
        self.pool, self.plane, self._now = pool, plane, now
        self._checksums = PageSums(pool) if verify_transfers else None
        self.pages = pages or PageAllocator(pool.layout.num_pages)
        self.timing = timing or Timing()
        self.incarnation = secrets.randbits(63) | 1
        self.exported: tuple[Endpoint, PoolLayout] = plane.export(pool.layout)

    @property
    def shape(self) -> PoolShape:
        layout = self.pool.layout
        return PoolShape(layout.page_size, layout.num_pages, layout.page_bytes, len(layout.components))

    @property
    def handlers(self) -> H:
        if self._handlers is None:
            raise MisuseError(f"the {self.role} node is not started")
        return self._handlers

    @property
    def counts(self) -> Counts:
        return self.handlers.counts

    def rooms_by_phase(self) -> dict[str, int]:
        """Open rooms, by the name of their phase."""
        return dict(Counter(session.state.phase.name.lower() for session in self.handlers.rooms.values()))

    @property
    def control(self) -> str:
        """Where decodes reach this node, "tcp://host:port"; empty for a node that binds nothing."""
        return ""

    @property
    def quarantined_pages(self) -> int:
        """Pages lent by rooms that have ended, without proof yet that nobody writes into them."""
        return 0

    @property
    def quarantine_limit(self) -> int:
        """With more pages in quarantine no room is opened."""
        return 0

    @property
    def trouble(self) -> str:
        """Why this node cannot serve; empty when all is well."""
        return ""

    def peers(self) -> list[dict[str, Any]]:
        """The nodes this one knows, a line each: incarnation, phase, when last heard, what is open with it."""
        raise NotImplementedError

    def peers_by_phase(self) -> dict[str, int]:
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """End and drain every room, then the data plane; idempotent. The pool stays the caller's.

        Cancelling it, once or several times, does not stop it: the cancellation is passed on when all has ended (I12).
        """
        if self._closing is None:
            if self._handlers is not None:
                self._handlers.leave()
            self._closing = asyncio.create_task(self._close(), name=f"kvflow-{self.role}-close")
        await drained(self._closing)

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


def _check_prompt(room: int, prompt: Prompt) -> tuple[int, bytes]:
    """Token count and digest of a prompt. Raises: MisuseError."""
    if not 0 <= room < 1 << 64:
        raise MisuseError(f"room {room} is no u64")
    if not len(prompt):
        raise MisuseError("prompt is empty: at least 1 token")
    return len(prompt), prompt_digest(prompt)


class PrefillNode(_Node[PrefillHandlers]):
    """One prefill rank: binds the control ROUTER and writes rooms into decodes' pools."""

    role = "prefill"

    def __init__(
        self,
        pool: PagedPool,
        plane: DataPlane,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        rank: int = 0,
        world_size: int = 1,
        model: str = "",
        pages: PageAllocator | None = None,
        timing: Timing | None = None,
        verify_transfers: bool = False,
        advertise: str = "",
        bind: Bind = bind_router,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """Binds the control socket on `host` (`port` 0: a free one); decodes reach it at `advertise`, else `host`.

        `verify_transfers`: a checksum with every chunk, for decodes that ask for it by the same name.
        """
        super().__init__(pool, plane, pages=pages, timing=timing, verify_transfers=verify_transfers, now=now)
        self._advertise = advertise or host
        self._host, self._port, self._rank, self._world_size, self._model = host, port, rank, world_size, model
        self._socket: ControlSocket | None = None
        self._bind = bind

    @property
    def control(self) -> str:
        return f"tcp://{self._advertise}:{self._port}"

    @property
    def info(self) -> RankInfo:
        """What the bootstrap registry is told about this rank."""
        return RankInfo(
            self._rank, self._world_size, self.incarnation, self.control, self.plane.name, self._model, self.shape
        )

    async def start(self) -> None:
        """Raises: MisuseError when the control port is taken."""
        self._socket, self._port = self._bind(self._host, self._port)
        self._handlers = PrefillHandlers(
            incarnation=self.incarnation,
            rank=self._rank,
            pages=self.pages,
            plane=self.plane,
            layout=self.pool.layout,
            endpoint=self.exported[0],
            socket=self._socket,
            now=self._now,
            timing=self.timing,
            checksums=self._checksums,
        )

    def room(self, room: int, prompt: Prompt, *, deadline_s: float | None = None) -> PrefillSession:
        """The engine's half of a room; synchronous, so that a refusal is known before any work.

        Raises: MisuseError (room in use, empty prompt).
        """
        tokens, digest = _check_prompt(room, prompt)
        return self.handlers.open_room(room, tokens, digest, deadline_s)

    def refuse(self, room: int, cause: Cause) -> None:
        """The engine's half of a room will never come: decode is told why, now or when its half comes. Never raises."""
        self.handlers.refuse_room(room, cause)

    @property
    def trouble(self) -> str:
        return self.handlers.trouble

    def peers(self) -> list[dict[str, Any]]:
        return [target.line() for target in self.handlers.targets.values()]

    def peers_by_phase(self) -> dict[str, int]:
        return dict(Counter(target.phase for target in self.handlers.targets.values()))

    async def _close(self) -> None:
        if self._handlers is not None:
            await self._handlers.drain(self.timing.lost_after_s)
        await self._close_memory()  # what a frozen peer still holds up ends here, unproven
        if self._handlers is not None:
            await self._handlers.close()
        if self._socket is not None:
            self._socket.close()


class DecodeNode(_Node[DecodeHandlers]):
    """A decode: lends its pages to prefill ranks, room by room."""

    role = "decode"

    def __init__(
        self,
        pool: PagedPool,
        plane: DataPlane,
        *,
        resolve: Resolve | None = None,
        pages: PageAllocator | None = None,
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        verify_transfers: bool = False,
        connect: Connect = connect_dealer,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`resolve` turns the word a room names its prefill by into ranks (a registry's client, say).

        `verify_transfers`: a chunk has landed when its checksum is that of prefill, which must send one. A room whose
        pages differ fails; prefill hears of it too, unless it was the last chunk: there the room has succeeded by then.
        """
        super().__init__(pool, plane, pages=pages, timing=timing, verify_transfers=verify_transfers, now=now)
        self._resolve, self._connect, self._bounds = resolve, connect, bounds
        self._ranks: dict[str, Sequence[RankInfo]] = {}
        self._asking: dict[str, asyncio.Future[Sequence[RankInfo]]] = {}

    @property
    def quarantined_pages(self) -> int:
        return self.handlers.ledger.quarantined_pages

    @property
    def quarantine_limit(self) -> int:
        return self.handlers.ledger.quarantine_limit

    def peers(self) -> list[dict[str, Any]]:
        return [link.line() for link in self.handlers.links.values()]

    def peers_by_phase(self) -> dict[str, int]:
        return dict(Counter(link.phase.value for link in self.handlers.links.values()))

    def declare_dead(self, incarnation: int, why: str) -> None:
        """An operator's word that a prefill incarnation writes no more: the only end of a loan without proof.

        Its rooms end, its pages leave quarantine, and it is never linked again. If the word is wrong, what that process
        still writes corrupts whoever has the pages then. Raises: MisuseError (not linked here).
        """
        self.handlers.declare_dead(incarnation, why)

    async def start(self) -> None:
        endpoint, layout = self.exported
        self._handlers = DecodeHandlers(
            incarnation=self.incarnation,
            pages=self.pages,
            plane=self.plane,
            layout=layout,
            endpoint=endpoint,
            connect=self._connect,
            now=self._now,
            timing=self.timing,
            bounds=self._bounds,
            checksums=self._checksums,
        )

    async def room(
        self, room: int, prefill: str | Sequence[RankInfo], prompt: Prompt, *, deadline_s: float | None = None
    ) -> DecodeSession:
        """Open a room at `prefill` (what `resolve` understands, or the ranks themselves) for a prompt of token ids.

        Raises: MisuseError; LostError (nobody answers); RefusedError (the pools do not fit); CapacityError.
        """
        tokens, digest = _check_prompt(room, prompt)
        if not isinstance(prefill, str):
            return self.handlers.open_room(room, await self.handlers.link_all(prefill), tokens, digest, deadline_s)
        if self._resolve is None:
            raise MisuseError(f"prefill {prefill!r}: this node was given no resolve()")
        ranks = self._ranks.get(prefill)
        if ranks is None or any(not self._usable(info) for info in ranks):
            ranks = await self._ask(prefill)
        links = await self.handlers.link_all(ranks)
        return self.handlers.open_room(room, links, tokens, digest, deadline_s)

    def _usable(self, info: RankInfo) -> bool:
        link = self.handlers.links.get(info.incarnation)
        return link is not None and link.usable

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
        """Lent pages come back where a living prefill can prove them."""
        if self._handlers is not None:
            await self._handlers.close()
        await self._close_memory()
