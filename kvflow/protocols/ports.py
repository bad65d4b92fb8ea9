"""Interfaces between the handlers and the world, as `typing.Protocol`s: links, pages, data planes.

These are protocols rather than base classes, so that an engine that embeds kvflow can pass its own
objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from enum import Enum, IntEnum
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from kvflow.protocols.errors import Cause
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.layout import PageIndices, PoolLayout

# A peer chooses these texts and we keep them: the bound keeps a hostile peer from filling memory.
Word = Annotated[str, msgspec.Meta(max_length=4096)]
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The result of work that may still be running. Every `asyncio.Future` is a `Pending`.

    It must not be cancelled: a coroutine awaits it through `asyncio.shield`.
    """

    def done(self) -> bool:
        """Return True when the result is available."""

    def result(self) -> T_co:
        """Return the result; call only when `done` returns True."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` with this object, on the event loop, when the result is available."""

    def __await__(self) -> Generator[Any, None, T_co]: ...


class WriteOutcome(Enum):
    """The end of a write. Only the first two values prove where the bytes are."""

    LANDED = "landed"  # every block is in the target's memory
    # The write is drained: every block that was submitted landed, and no other will arrive.
    CANCELLED = "cancelled"
    # Some block ended in an error or a timeout: it may arrive now, later or never.
    UNPROVEN = "unproven"


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A process, identified so that another one on the same host can observe its death (pidfd).

    `pid` is valid only under the same `boot_id` and `pid_namespace`. `start_ticks` distinguishes a
    re-used pid, and is valid only in the same `time_namespace`. `network_namespace` lists the
    connections of the process.
    """

    boot_id: Word
    pid_namespace: Word
    pid: int
    start_ticks: int
    time_namespace: Word = ""
    network_namespace: Word = ""


class PlaneAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address at which a data plane reaches this process.

    Each back end defines its `locator`: a Mooncake session, the file descriptor of a shared
    segment. `owner` is the incarnation that sent the address. The endpoint that receives it sets
    `owner`, whatever the peer sent, and a back end that knows the owner of a pool refuses any other
    incarnation. With 0 the owner is not checked.
    """

    backend: Word
    locator: Word
    process: ProcessIdentity
    owner: int = 0


LeaseId = tuple[int, int]
"""The identity of one room's pages among all nodes over a pool: the incarnation of the decode that
lent them, and its grant.
"""


class UnprovenLoan(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A loan that outlived the node that lent it: a lost or frozen writer may still write into its
    pages. They become usable again only when proof arrives that the writer ended, or when an
    operator declares it dead. Every rank of a room has a separate loan of the same pages.
    """

    # None if the writer sent no address. Only an operator can then end the loan.
    writer: PlaneAddress | None
    # The incarnation, the control endpoint and the rank of the writer.
    incarnation: int
    control: str
    rank: int
    room: int
    lease: LeaseId
    pages: PageIndices


class RoomEnding(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of one half of a room, with the times at which it reached its stages, on the node's
    clock. A time is None for a stage that it did not reach.
    """

    phase: IntEnum  # a terminal phase
    cause: Cause | None  # None for a success
    num_pages: int
    offers_pages: bool  # True for decode's half
    opened_at_s: float
    ready_at_s: float | None  # decode: linked to every rank; prefill: both halves arrived
    moving_at_s: float | None  # decode: its pages were offered; prefill: the first chunk was queued


class Observer(Protocol):
    """Counters for the events of one node, which its endpoint increments."""

    rooms_opened: int
    mismatched: int  # chunks whose checksum differs from prefill's
    declared_dead: int  # peers that an operator declared dead
    ended: list[tuple[RoomEnding, float]]  # ended rooms and their times, not counted yet

    def count_ended(self) -> None:
        """Count the rooms in `ended`, and clear the list."""

    def message_dropped(self, why: str) -> None:
        """Count a message without effect: "malformed", "foreign" (of another peer) or "stale"."""


class Write(Protocol):
    """One running write."""

    @property
    def landed_bytes(self) -> int:
        """Bytes proven to be in the target's memory so far."""

    @property
    def total_bytes(self) -> int: ...

    @property
    def error(self) -> str:
        """The error text of the data plane, or the reason why there is no checksum.

        Empty after LANDED, and after a cancellation.
        """

    @property
    def done(self) -> Pending[WriteOutcome]:
        """The outcome. It resolves on the event loop, when this write no longer reads or writes
        memory, and never holds an exception.
        """

    def cancel(self) -> None:
        """Submit no more blocks; `done` resolves when the others end. Idempotent."""


class Route(Protocol):
    """A checked pairing of our pool with the pool of one incarnation of a peer."""

    def write(self, source_pages: PageIndices, target_pages: PageIndices) -> Write:
        """Start copying our `source_pages` onto the peer's `target_pages` (same length, int32 [n],
        indices in range; row r of a pool with rows is `num_pages + r`).

        Returns at once; the plane's thread plans and copies. A tiny write may be made before this
        returns: then `done` is already resolved. The caller keeps both page lists allocated until
        `done`. If the outcome is UNPROVEN, the target's pages stay on loan until there is proof.
        Raises: LayoutError for lists of different length or indices outside either pool. After any
        exception, no copy was started.
        """

    def close(self) -> None:
        """Drop mappings and sessions. Call only when no write of this route runs."""


class DataPlane(Protocol):
    """One way of moving pages between processes.

    The module docstring of every back end answers three questions: which status means landed,
    whether a write can outlive its error, and what fences a peer.
    """

    @property
    def name(self) -> str: ...

    @property
    def stalled_s(self) -> float:
        """Seconds for which the plane's worker thread made no progress although it had work;
        infinite when the thread died.

        It measures our own thread, never a peer: a thread that keeps polling a write to a frozen
        peer makes progress, and is not stalled.
        """

    def export(self, layout: PoolLayout) -> tuple[PlaneAddress, PoolLayout]:
        """Make our pool (whose `layout.buffers` carry this process's addresses) known to the plane;
        called once, before `connect`. Returns what a peer needs to reach it: the address, and the
        layout with addresses as the peer must use them (plain addresses for mooncake, offsets in
        the shared segment for local). Raises: LayoutError when the plane cannot reach the memory.
        """

    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> Route:
        """Open the route from our pool to the pool that the peer exported as `address` and
        `layout`; slow work runs in a thread.

        Raises: LayoutError (the pools do not fit), TransferError (the peer cannot be reached). If
        we ran out of a resource that the route of another peer holds, the cause of the
        TransferError is a CapacityError or the system's OSError (EMFILE ...).
        """

    async def fence(self, writer: PlaneAddress) -> None:
        """Return once no write of `writer` can reach our pool any more, however long that takes
        (the caller cancels).

        Raises: TransferError when this back end can never prove it for that writer (on another
        host, for example).
        """

    def sees_alive(self, writer: PlaneAddress) -> bool:
        """Return True if this host can observe that the writer's process runs. False means that the
        process does not run, or that this host cannot tell.
        """

    async def close(self) -> None:
        """Cancel and drain every write, end the threads, unregister the memory."""


class ChecksumTask(Protocol):
    """One checksum that is being computed."""

    @property
    def done(self) -> Pending[bytes]:
        """The checksum. It resolves on the event loop, is empty after a cancellation, an error or a
        timeout, and never holds an exception.
        """

    @property
    def error(self) -> str:
        """The reason why there is no checksum, once `done` resolved; empty if it was cancelled."""

    @property
    def released(self) -> Pending[None]:
        """Resolves when the task no longer reads the pages, which may be later than `done`."""

    def cancel(self) -> None:
        """Request an early stop. Idempotent, returns at once."""


class Checksums(Protocol):
    """Checksums over the pages of one pool. Equal content has an equal checksum in any two pools,
    however they are laid out and divided.
    """

    def begin(self, pages: PageIndices, served: tuple[Served, ...] | None = None) -> ChecksumTask:
        """Sum `pages` in their order, in a thread.

        Prefill sums the parts that it sends. Decode passes the parts that one rank sends as
        `served`, and sums them in that rank's order of bytes. The caller keeps the pages allocated
        until `released`. Never raises.
        """

    async def close(self) -> None:
        """Cancel and drain. Afterwards only threads that hang may read the pool, whose memory stays
        mapped for them.
        """


class Arrivals(Protocol):
    """Pages of host memory that a decode lends instead of pages of its pool, so that no peer can
    write into the pool. A copy brings the chunks that land there to the pages that the engine
    reads.
    """

    @property
    def lent(self) -> PageStore:
        """The store of the pages that can be lent."""

    @property
    def layout(self) -> PoolLayout:
        """The layout of the pool whose pages the engine reads."""

    def begin(
        self, lent: PageIndices, pages: PageIndices, served: tuple[Served, ...]
    ) -> ChecksumTask:
        """Copy the parts that a rank sends (`served`) from `lent` to `pages`, in a thread.

        The task resolves to the checksum of those parts if transfers are verified, and otherwise to
        any non-empty bytes. The caller keeps both page lists allocated until `released`. Never
        raises.
        """

    async def close(self) -> None:
        """Cancel and drain, as `Checksums.close` does."""


class ControlSocket(Protocol):
    """One end of the control link. A peer is named by its routing id, which is empty on the side
    that has only one peer.
    """

    @property
    def lockout_reason(self) -> str:
        """The reason why the other end rejects us, as far as it is known; empty if it does not."""

    def send(self, frame: bytes, peer: bytes = b"", at_once: bool = False) -> bool:
        """Queue a frame. Returns False when it cannot be delivered (no such peer, queue full);
        Resync repairs the loss.

        `at_once`: do not wait for the other frames of this turn of the event loop.
        """

    async def receive(self) -> list[tuple[bytes, bytes]]:
        """Return the next burst of (peer, frame): at least one, and at most a few hundred."""

    def sender_address(self) -> str:
        """Return the network address of the sender of the latest burst; empty if unknown."""

    def close(self) -> None: ...


class PageStore(Protocol):
    """The owners of every page of one pool (I1). Owners are hashable, page lists int32 [n]."""

    @property
    def free_pages(self) -> int: ...

    def take(self, count: int, owner: Hashable) -> PageIndices:
        """Take `count` free pages for `owner`. Raises: CapacityError (no page is taken)."""

    def take_room(self, count: int, owner: Hashable) -> PageIndices:
        """Take `count` places for a room, as `take` does; in a pool with rows the last is a row."""

    def move(self, pages: PageIndices, owner: Hashable, new_owner: Hashable) -> None:
        """Change the owner of `pages`. Raises: OwnershipError when a page is not `owner`'s (no page
        is moved).
        """

    def give_back(self, pages: PageIndices, owner: Hashable) -> None:
        """Return pages to the free list; pages that are held follow when their last hold ends
        (I13). Raises: OwnershipError for pages that are free or another owner's (no page is given
        back).
        """

    def hold(self, pages: PageIndices) -> None:
        """Keep pages from new owners while a reader or writer that cannot be stopped uses them: a
        model step, a running write. Holds are counted.
        """

    def unhold(self, pages: PageIndices) -> None:
        """Release one hold. Raises: OwnershipError when a page is not held."""

    def withhold(self, pages: PageIndices) -> None:
        """Keep these pages, owned or free, from every new owner until `unhold`. Calls are counted,
        as for `hold`, and may come from the thread of another node over the pool.
        Raises: OwnershipError for a page outside the pool (no page is withheld).
        """


class Heir(Protocol):
    """A running node, as other nodes over the same pool see it. Any thread may call its methods."""

    def inherit(self, quarantine: Quarantine, loans: Sequence[UnprovenLoan]) -> None:
        """Take over the loans that another node left when it closed."""

    def writer_ended(self, incarnation: int, writer: PlaneAddress | None) -> None:
        """End the loans of a writer: another node has proof that it writes no more, or an operator
        declared it dead.
        """


class Quarantine(Protocol):
    """The loans that outlived the nodes over one pool. Any thread may call its methods."""

    @property
    def leases(self) -> Collection[LeaseId]:
        """The leases whose pages still have a loan."""

    def standing(self, loans: Sequence[UnprovenLoan]) -> list[UnprovenLoan]:
        """Return the loans among `loans` that are still open."""

    def check(self, pages: PageIndices) -> None:
        """Check that no earlier writer may still write into `pages`. Raises: OwnershipError."""

    def join(self, heir: Heir, store: PageStore) -> list[UnprovenLoan]:
        """Register a node that runs over the pool and hands out pages of `store`. Returns the loans
        whose writers it has to watch.
        """

    def leave(self, heir: Heir) -> None:
        """Remove a node that closes. Idempotent."""

    def add(self, loans: Sequence[UnprovenLoan], lender: PageStore) -> None:
        """Keep the loans of a node that closes; `lender` still counts their pages as owned. From
        then on, no store hands out these pages, and every running node watches their writers.
        """

    def free(self, lease: LeaseId) -> None:
        """Let stores hand out these pages again, after the last loan of them ended. Idempotent."""

    def forget(self, incarnation: int, writer: PlaneAddress | None) -> None:
        """End all loans of this writer, free pages without another loan, and notify the nodes."""
