"""Interfaces that the handlers use, as `typing.Protocol`s: links, page stores, data planes.

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
from kvflow.protocols.pages.spaces import Counts

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
        """Return the result. Call this only when `done` returns True."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` with this object, on the event loop, when the result is available."""

    def __await__(self) -> Generator[Any, None, T_co]: ...


class WriteOutcome(Enum):
    """How a write ended. Only the first two values prove where the bytes are."""

    LANDED = "landed"  # every block is in the target's memory
    # The write is drained: every block that was submitted landed, and no other will arrive.
    CANCELLED = "cancelled"
    # Some block ended in an error or a timeout: it may arrive now, later or never.
    UNPROVEN = "unproven"


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a process, for other processes on the host that wait for its end (pidfd).

    `pid` is valid only under the same `boot_id` and `pid_namespace`. `start_ticks` distinguishes a
    re-used pid, and is valid only in the same `time_namespace`. `network_namespace` names the
    namespace in which the host lists the process's connections.
    """

    boot_id: Word
    pid_namespace: Word
    pid: int
    start_ticks: int
    time_namespace: Word = ""
    network_namespace: Word = ""


class PlaneAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address at which the data planes of peers reach a process.

    Each back end defines what its `locator` is, such as a Mooncake session or the file descriptor
    of a shared segment. `owner` is the incarnation that sent the address. The endpoint that
    receives the address sets `owner`, whatever the peer sent, and a back end that knows the owner
    of a pool refuses any other incarnation. If `owner` is 0, it is not checked.
    """

    backend: Word
    locator: Word
    process: ProcessIdentity
    owner: int = 0


LeaseId = tuple[int, int]
"""The identity of one room's pages among all nodes over a pool: the incarnation of the decode that
lent them, and the grant under which it lent them.
"""


class UnprovenLoan(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A loan that outlived the node that granted it: a lost or frozen writer may still write into
    its pages. They become usable again only when proof arrives that the writer ended, or when an
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
    """The end of one half of a room, with the times at which the half reached its stages, on the
    node's clock. A time is None for a stage that the half did not reach.
    """

    phase: IntEnum  # a terminal phase
    cause: Cause | None  # None for a success
    # Places of each space; empty if the room ended before they were known.
    counts: Counts
    offers_pages: bool  # True for decode's half
    opened_at_s: float
    ready_at_s: float | None  # decode: linked to every rank; prefill: both halves arrived
    moving_at_s: float | None  # decode: its pages were offered; prefill: the first chunk was queued


class Observer(Protocol):
    """Counters for the events of one node, which its endpoint increments."""

    rooms_opened: int
    mismatched: int  # chunks whose checksum differs from prefill's
    declared_dead: int  # peers that an operator declared dead
    ended: list[tuple[RoomEnding, float]]  # rooms not counted yet, each with the time of its end

    def count_ended(self) -> None:
        """Count the rooms in `ended`, and clear the list."""

    def message_dropped(self, why: str) -> None:
        """Count a message without effect. `why` is "malformed", "foreign" (forged) or "stale"."""


class Write(Protocol):
    """One running write."""

    @property
    def landed_bytes(self) -> int:
        """Bytes proven to be in the target's memory so far."""

    @property
    def total_bytes(self) -> int: ...

    @property
    def error(self) -> str:
        """The error text from the data plane, or the reason why there is no checksum.

        Empty if the write landed, or was cancelled without an error.
        """

    @property
    def done(self) -> Pending[WriteOutcome]:
        """Resolves to the outcome, on the event loop, when this write no longer reads its source
        pages. Never holds an exception.
        """

    def cancel(self) -> None:
        """Submit no more blocks. `done` resolves when the submitted blocks end. Idempotent."""


class Route(Protocol):
    """A connection from our pool to the pool of one peer incarnation. The two pools fit."""

    def write(self, source_pages: PageIndices, target_pages: PageIndices) -> Write:
        """Start copying our `source_pages` onto the peer's `target_pages` (same length, int32 [n],
        indices in range, both with the places of all spaces in the same order).

        Returns at once. The plane's thread plans and copies. A tiny write may complete before this
        method returns, and `done` is then already resolved. The caller keeps both page lists
        allocated until `done`. If the outcome is UNPROVEN, the target's pages stay on loan until
        there is proof. Raises: LayoutError for lists of different length or indices outside either
        pool. If this raises, no copy was started.
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
        """Seconds for which the plane's worker thread has made no progress although it has work;
        infinite if the thread died.

        It measures our own thread, never a peer: a thread that keeps polling a write to a frozen
        peer makes progress, and is not stalled.
        """

    def export(self, layout: PoolLayout) -> tuple[PlaneAddress, PoolLayout]:
        """Register our pool with the plane, once, before `connect`. The buffers of `layout` carry
        this process's addresses. Returns what a peer needs to reach the pool: the address, and the
        layout with addresses as the peer must use them (plain addresses for mooncake, offsets in
        the shared segment for local). Raises: LayoutError when the plane cannot reach the memory.
        """

    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> Route:
        """Open the route from our pool to the pool that the peer exported as `address` and
        `layout`. Slow work runs in a thread.

        Raises: LayoutError (the pools do not fit), TransferError (the peer cannot be reached). If
        we ran out of a resource that a route to another peer holds, the cause of the TransferError
        is a CapacityError or the system's OSError (EMFILE ...).
        """

    async def fence(self, writer: PlaneAddress) -> None:
        """Wait until no write of `writer` can reach our pool any more. The wait has no timeout: the
        caller cancels it.

        Raises: TransferError if this back end can never prove that, for example because the writer
        is on another host.
        """

    def sees_alive(self, writer: PlaneAddress) -> bool:
        """Return True if this host can observe that the writer's process runs. False means that the
        process does not run, or that this host cannot tell.
        """

    async def close(self) -> None:
        """Cancel and drain every write, end the threads, and unregister the memory."""


class ChecksumTask(Protocol):
    """One checksum that is being computed."""

    @property
    def done(self) -> Pending[bytes]:
        """Resolves, on the event loop, to the checksum, or to empty bytes after a cancellation, an
        error or a timeout. Never holds an exception.
        """

    @property
    def error(self) -> str:
        """The reason why there is no checksum, known once `done` resolves. Empty if there is a
        checksum, or if the task was cancelled.
        """

    @property
    def released(self) -> Pending[None]:
        """Resolves when the task no longer uses the pages. That may be later than `done`."""

    def cancel(self) -> None:
        """Request an early stop. Idempotent, returns at once."""


class Checksums(Protocol):
    """Checksums over the pages of one pool. Equal content has the same checksum in any two pools,
    however the pools are laid out and divided.
    """

    def at_once(
        self,
        pages: PageIndices,
        served: tuple[Served, ...] | None = None,
        page_sizes: Counts = (),
    ) -> bytes:
        """Return the checksum of a few bytes that take some 10 us, or empty bytes if `begin` must
        compute it in a thread. The arguments are those of `begin`.
        """

    def begin(
        self,
        pages: PageIndices,
        served: tuple[Served, ...] | None = None,
        page_sizes: Counts = (),
    ) -> ChecksumTask:
        """Compute the checksum of `pages` in their order, in a thread.

        Prefill passes no `served`: the checksum covers the parts that this rank sends. Decode lists
        in `served` the parts that one rank sends: the checksum covers these, in the order in which
        that rank's pool stores them. If `page_sizes` are given, `pages` numbers fine pages of these
        sizes (see `pages.fine`), and the checksum covers no other bytes of their pages. The caller
        keeps the pages allocated until `released`. Never raises.
        """

    async def close(self) -> None:
        """Cancel and drain. Afterwards only hung threads may still read the pool, and its memory
        stays mapped for them.
        """


class Arrivals(Protocol):
    """Pages of host memory that a decode lends instead of pages of its pool, so that no peer can
    write into the pool. Chunks land in host memory, and a copy brings them to the pages that the
    engine reads.
    """

    @property
    def lent(self) -> PageStore:
        """The store of the pages that can be lent."""

    @property
    def layout(self) -> PoolLayout:
        """The layout of the pool whose pages the engine reads."""

    def begin(
        self,
        lent: PageIndices,
        pages: PageIndices,
        served: tuple[Served, ...],
        page_sizes: Counts = (),
    ) -> ChecksumTask:
        """Copy the parts that a rank sends (`served`) from `lent` to `pages`, in a thread. With
        `page_sizes`, both lists number fine pages: see `Checksums.begin`.

        The task resolves to the checksum of those parts if transfers are verified, and otherwise to
        any non-empty bytes. The caller keeps both page lists allocated until `released`. Never
        raises.
        """

    async def close(self) -> None:
        """Cancel and drain; see `Checksums.close`."""


class ControlSocket(Protocol):
    """A socket for control messages. Peers are named by routing ids; the id is empty on a socket
    that has only one peer.
    """

    @property
    def lockout_reason(self) -> str:
        """The reason why the other end rejects us, or an empty string if the socket knows of no
        rejection.
        """

    def send(self, frame: bytes, peer: bytes = b"", at_once: bool = False) -> bool:
        """Queue a frame. Returns False when it cannot be delivered (no such peer, queue full).
        Resync repairs the loss.

        With `at_once`, the frame does not wait for the other frames of this turn of the event loop.
        """

    async def receive(self) -> list[tuple[bytes, bytes]]:
        """Wait for the next burst of (peer, frame) pairs: at least one, at most a few hundred."""

    def sender_address(self) -> str:
        """Return the network address that the latest burst came from, or "" if it is unknown."""

    def close(self) -> None: ...


class PageStore(Protocol):
    """The owners of one pool's pages (I1). Owners are hashable, and page lists are int32 [n]."""

    @property
    def free_pages(self) -> int:
        """Free pages of the first space."""

    @property
    def free(self) -> Counts:
        """Free places of each space. Empty if only the engine knows them."""

    def take(self, count: int, owner: Hashable) -> PageIndices:
        """Take `count` free pages of the first space for `owner`. Raises: CapacityError (no page is
        taken).
        """

    def take_room(self, counts: Counts, owner: Hashable) -> PageIndices:
        """Take `counts` free places for a room, in the order of the spaces. Raises: CapacityError
        (no place is taken).
        """

    def move(self, pages: PageIndices, owner: Hashable, new_owner: Hashable) -> None:
        """Change the owner of `pages`. Raises: OwnershipError if `owner` does not own a page (no
        page is moved).
        """

    def give_back(self, pages: PageIndices, owner: Hashable) -> None:
        """Return pages to the free list. A held page follows when its last hold ends (I13). Raises:
        OwnershipError if `owner` does not own a page (no page is given back).
        """

    def hold(self, pages: PageIndices) -> None:
        """Keep pages from new owners while a reader or writer that cannot be stopped uses them,
        such as a model step or a running write. Holds are counted.
        """

    def unhold(self, pages: PageIndices) -> None:
        """Release one hold. Raises: OwnershipError when a page is not held."""

    def withhold(self, pages: PageIndices) -> None:
        """Keep these pages, owned or free, from every new owner until `unhold`. Calls are counted
        like holds. A call may come from the thread of another node over the pool. Raises:
        OwnershipError for a page outside the pool (no page is withheld).
        """


class Heir(Protocol):
    """A running node that takes over loans from closed nodes over its pool. Its methods may be
    called in any thread.
    """

    def inherit(self, quarantine: Quarantine, loans: Sequence[UnprovenLoan]) -> None:
        """Take over the loans that another node left when it closed."""

    def writer_ended(self, incarnation: int, writer: PlaneAddress | None) -> None:
        """End the loans of a writer: another node has proof that the writer ended, or an operator
        declared it dead.
        """


class Quarantine(Protocol):
    """The loans that closed nodes over one pool left behind. Any thread may call these methods."""

    @property
    def layout(self) -> PoolLayout:
        """The layout of the pool."""

    @property
    def leases(self) -> Collection[LeaseId]:
        """The leases whose pages still have a loan."""

    def standing(self, loans: Sequence[UnprovenLoan]) -> list[UnprovenLoan]:
        """Return the loans among `loans` that are still open."""

    def check(self, pages: PageIndices) -> None:
        """Check that no earlier writer may still write into `pages`. Raises: OwnershipError."""

    def join(self, heir: Heir, store: PageStore) -> list[UnprovenLoan]:
        """Register a node that runs over the pool and hands out pages of `store`. Returns the loans
        whose writers that node has to watch.
        """

    def leave(self, heir: Heir) -> None:
        """Remove a node that closes. Idempotent."""

    def add(self, loans: Sequence[UnprovenLoan], lender: PageStore) -> None:
        """Keep the loans of a node that closes. `lender` still counts their pages as owned. From
        then on, no store hands out these pages, and every running node watches their writers.
        """

    def free(self, lease: LeaseId) -> None:
        """Let stores hand out the lease's pages again, once its last loan ends. Idempotent."""

    def forget(self, incarnation: int, writer: PlaneAddress | None) -> None:
        """End all loans of this writer, free pages that no other loan covers, and notify the
        nodes.
        """
