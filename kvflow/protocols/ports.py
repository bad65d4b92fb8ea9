"""What the handlers need from the world, as `typing.Protocol`s: time, links, pages, data planes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from enum import Enum, IntEnum
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from kvflow.protocols.errors import Cause
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.layout import PageIndices, PoolLayout

Word = Annotated[str, msgspec.Meta(max_length=4096)]
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The result of work under way, as far as ports need one: every `asyncio.Future` is such a
    result. Nobody cancels it; a coroutine that awaits it does so through `asyncio.shield`."""

    def done(self) -> bool:
        """True when the result is there."""

    def result(self) -> T_co:
        """The result, once it is there."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` with this object, on the event loop, when the result is there."""

    def __await__(self) -> Generator[Any, None, T_co]: ...


class WriteOutcome(Enum):
    """How a write ended. Only the first two prove where the bytes are."""

    LANDED = "landed"  # every block is in the target's memory
    # And drained: every block that was submitted has landed, nothing else will be.
    CANCELLED = "cancelled"
    UNPROVEN = "unproven"  # some block ended in error or time-out: it may land now, later, or never


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a process so that another one of the same host can observe its death (Linux
    pidfd).

    `pid` means something only under the same `boot_id` and `pid_namespace`; `start_ticks` tells a
    re-used pid apart, and means something only in the same `time_namespace`. `network_namespace`
    says where its connections are listed.
    """

    boot_id: Word
    pid_namespace: Word
    pid: int
    start_ticks: int
    time_namespace: Word = ""
    network_namespace: Word = ""


class PlaneAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a data plane reaches this process.

    What `locator` means is up to the back end: a Mooncake session, a shared segment's file
    descriptor. `owner` is the incarnation that has named it: the endpoint that receives an address
    sets it, whatever was sent, and a back end that can tell whose a pool is refuses another's; 0 is
    not asked for.
    """

    backend: Word
    locator: Word
    process: ProcessIdentity
    owner: int = 0


LeaseId = tuple[int, int]
"""Names one room's pages for every node over a pool: the incarnation of the decode that lent them,
and its grant.
"""


class UnprovenLoan(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Pages that a writer, lost or frozen, may still write into: a loan that outlived the node that
    lent them.

    Only proof that the writer has ended makes them usable again, or an operator's word for it.
    Every rank of a room has a loan of its own, over the same pages.
    """

    # None where it has named none: then only an operator's word ends the loan.
    writer: PlaneAddress | None
    incarnation: int  # of the writer, as its control endpoint and its rank are
    control: str
    rank: int
    room: int
    lease: LeaseId
    pages: PageIndices


class RoomEnding(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How one half of a room ended, and when it got how far, by the node's clock; None for what it
    never reached.
    """

    phase: IntEnum  # the terminal one
    cause: Cause | None  # None for a success
    num_pages: int
    offers_pages: bool  # decode's half
    opened_at_s: float
    ready_at_s: float | None  # decode: linked to every rank; prefill: both halves were here
    moving_at_s: float | None  # decode: its pages were offered; prefill: the first chunk was queued


class Observer(Protocol):
    """Counts what happens at one node."""

    def room_opened(self) -> None: ...

    def room_ended(self, ending: RoomEnding, now: float) -> None: ...

    def message_dropped(self, why: str) -> None:
        """A message changed nothing.

        `why`: "malformed", "foreign" (another peer's), "stale" (too late).
        """

    def pages_moved(self, count: int) -> None:
        """Pages of a room that has succeeded."""

    def chunk_mismatched(self) -> None:
        """The checksum of a chunk differs from prefill's."""

    def peer_declared_dead(self) -> None: ...


class Write(Protocol):
    """One write under way."""

    @property
    def landed_bytes(self) -> int:
        """Bytes proven to be in the target's memory so far."""

    @property
    def total_bytes(self) -> int: ...

    @property
    def error(self) -> str:
        """What went wrong: what the data plane said, or why there is no checksum.

        Empty after LANDED, and after a cancellation."""

    @property
    def done(self) -> Pending[WriteOutcome]:
        """Resolves, on the event loop, when nothing of this write runs any more.

        Never an exception.
        """

    def cancel(self) -> None:
        """Submit nothing more; `done` resolves when what was submitted has ended.

        Idempotent, returns at once.
        """


class Route(Protocol):
    """A checked pairing of our pool with one peer's pool, over one data plane.

    Validity ends with `close`; a route belongs to one incarnation of the peer.
    """

    def write(self, source_pages: PageIndices, target_pages: PageIndices) -> Write:
        """Start copying our `source_pages` onto the peer's `target_pages` (same length, int32 [n],
        indices in range; of a pool with rows, row r is `num_pages + r`).

        Returns at once; planning and copying happen on the plane's own thread, but for a tiny
        write, which may have ended already: then `done` is resolved. The caller keeps both page
        lists allocated until `done`, and the target's on loan until proof if the outcome is
        UNPROVEN. Raises: LayoutError for lists of different length or indices outside either pool.
        Whatever it raises, nothing was started.
        """

    def close(self) -> None:
        """Drop mappings and sessions. Call only when no write of this route is under way."""


class DataPlane(Protocol):
    """One way of moving pages between processes.

    Every back end answers three questions in its module docstring: what status means landed,
    whether a write can outlive its error, and what fences a peer."""

    @property
    def name(self) -> str: ...

    @property
    def stalled_s(self) -> float:
        """For how long its own worker has moved nothing on though it had work; endless when the
        worker has died.

        About us, never about peers: a write that waits for a frozen one has its turns, and is no
        stall.
        """

    def export(self, layout: PoolLayout) -> tuple[PlaneAddress, PoolLayout]:
        """Make our pool (whose `layout.buffers` carry this process's addresses) known to the plane;
        called once, before `connect`. Returns what a peer needs to reach it: the address, and the
        layout with addresses as the peer must use them (plain addresses for mooncake, offsets in
        the shared segment for local).

        Raises: LayoutError when the memory cannot be reached that way.
        """

    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> Route:
        """Open the way from our pool into the peer's, as it exported them; slow work runs in a
        thread.

        Raises: LayoutError (the pools do not fit), TransferError (the peer cannot be reached).
        Where something of ours is short that another peer's route holds, a CapacityError or the
        system's OSError (EMFILE ...) is its cause.
        """

    async def fence(self, writer: PlaneAddress) -> None:
        """Return once no write of `writer` can reach our pool any more, however long that takes
        (the caller cancels).

        Raises: TransferError when this back end can never prove it for that writer (another host,
        say).
        """

    def sees_alive(self, writer: PlaneAddress) -> bool:
        """Whether that writer's process is seen to run;
        False where that cannot be told from here.
        """

    async def close(self) -> None:
        """Cancel and drain every write, end the threads, unregister the memory."""


class ChecksumTask(Protocol):
    """One checksum under way."""

    @property
    def done(self) -> Pending[bytes]:
        """Resolves, on the event loop, to the checksum, or to nothing when it was cancelled,
        failed, or took too long. Never an exception."""

    @property
    def error(self) -> str:
        """Why there is no checksum, once `done`; empty when there is one, and when it was
        cancelled.
        """

    @property
    def released(self) -> Pending[None]:
        """Resolves when nothing reads the pages any more: with `done`, or later where a thread
        hangs.
        """

    def cancel(self) -> None:
        """Stop soon. Idempotent, returns at once."""


class Checksums(Protocol):
    """Checksums over the pages of one pool; equal for equal content, however either pool is laid
    out and divided.
    """

    def begin(self, pages: PageIndices, served: tuple[Served, ...] | None = None) -> ChecksumTask:
        """Sum `pages` in their order, in a thread: at decode, what a rank has `served` of them, as
        that rank has it; at prefill, what it sends. The caller keeps them allocated until
        `released`. Never raises."""

    async def close(self) -> None:
        """Cancel and drain: nothing reads the pool any more, but for threads that hang, whose
        memory stays mapped.
        """


class Arrivals(Protocol):
    """Pages of host memory that a decode lends in the place of its own, which no peer can write;
    what has landed there is brought to where it is used."""

    @property
    def lent(self) -> PageStore:
        """Who owns what can be lent."""

    @property
    def layout(self) -> PoolLayout:
        """Of the pool with the decode's own pages."""

    def begin(
        self, lent: PageIndices, pages: PageIndices, served: tuple[Served, ...]
    ) -> ChecksumTask:
        """Bring what a rank has `served` of `lent` to `pages`, in a thread.

        Its answer is the checksum of that where transfers are verified, else any word. The caller
        keeps both allocated until `released`. Never raises."""

    async def close(self) -> None:
        """As `Checksums.close`."""


class ControlSocket(Protocol):
    """One end of the control link; a peer is a routing id,
    empty on the side that knows only one.
    """

    @property
    def lockout_reason(self) -> str:
        """Why the other end rejects us, as far as is known; empty while no handshake has failed."""

    def send(self, frame: bytes, peer: bytes = b"", at_once: bool = False) -> bool:
        """Queue a frame; False when it cannot be delivered (no such peer, queue full).

        Resync repairs what is lost.

        `at_once`: do not wait for what else is sent in this turn of the event loop.
        """

    async def receive(self) -> list[tuple[bytes, bytes]]:
        """The next burst of (peer, frame); at least one, at most a few hundred so that the loop
        stays free.
        """

    def sender_address(self) -> str:
        """The network address from which the burst received last has come; empty where that is not
        known.
        """

    def close(self) -> None: ...


class PageStore(Protocol):
    """The owners of every page of one pool (I1). Owners are hashable values; indices int32 [n]."""

    @property
    def free_pages(self) -> int: ...

    def take(self, count: int, owner: Hashable) -> PageIndices:
        """`count` free pages, now owned by `owner`. Raises: CapacityError (nothing is taken)."""

    def take_room(self, count: int, owner: Hashable) -> PageIndices:
        """`count` places for a room: as `take`;
        of a pool with rows one of them is a row, the last.
        """

    def move(self, pages: PageIndices, owner: Hashable, new_owner: Hashable) -> None:
        """Change the owner.

        Raises: OwnershipError when a page is not `owner`'s (nothing is moved).
        """

    def give_back(self, pages: PageIndices, owner: Hashable) -> None:
        """Return pages to the free list, or, for pages that are held, as soon as the last hold ends
        (I13).

        Raises: OwnershipError for pages that are free already or somebody else's (nothing is given
        back).
        """

    def hold(self, pages: PageIndices) -> None:
        """A reader or writer that cannot be stopped uses these pages: a model step, a running
        write. Counted.
        """

    def unhold(self, pages: PageIndices) -> None:
        """That use has ended. Raises: OwnershipError when it was not held."""

    def withhold(self, pages: PageIndices) -> None:
        """Keep these pages from every new owner until they are unheld, whoever has them now.

        Counted, as `hold`.

        Another node over the pool calls it, and then `unhold`, possibly from a thread of its own.
        Raises: OwnershipError for a page outside the pool (nothing is withheld).
        """


class Heir(Protocol):
    """A node that runs over a pool, as the other nodes over it see one. Called from any thread."""

    def inherit(self, quarantine: Quarantine, loans: Sequence[UnprovenLoan]) -> None:
        """Another node has closed, and left these loans."""

    def writer_ended(self, incarnation: int, writer: PlaneAddress | None) -> None:
        """Another node has the proof, or an operator's word, that this writer writes no more."""


class Quarantine(Protocol):
    """The loans that outlived the nodes over one pool.

    Every method may be called from any thread.
    """

    @property
    def leases(self) -> Collection[LeaseId]:
        """The names of the pages whose loans have not all ended."""

    def standing(self, loans: Sequence[UnprovenLoan]) -> list[UnprovenLoan]:
        """Those of `loans` that have not ended meanwhile."""

    def check(self, pages: PageIndices) -> None:
        """Raises: OwnershipError for pages that a writer
        of an earlier node may still write into.
        """

    def join(self, heir: Heir, store: PageStore) -> list[UnprovenLoan]:
        """A node runs over the pool, and hands out pages of `store`.

        Returns the loans that it is to watch.
        """

    def leave(self, heir: Heir) -> None:
        """The node runs no more. Idempotent."""

    def add(self, loans: Sequence[UnprovenLoan], lender: PageStore) -> None:
        """A node closes with these loans, whose pages `lender` has not given back: no store hands
        them out from here on, and every node that runs watches their writers."""

    def free(self, lease: LeaseId) -> None:
        """Every loan of these pages has ended: stores may hand them out again.

        No effect the second time.
        """

    def forget(self, incarnation: int, writer: PlaneAddress | None) -> None:
        """All loans of this writer have ended: what they alone kept is free.

        Other nodes are told.
        """
