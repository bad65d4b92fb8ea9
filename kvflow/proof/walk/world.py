"""Parts of a walk: bounds, words, acts, and the endpoints with which every world begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from kvflow.proof.sim.chunks import positions
from kvflow.proof.walk.shelf import Shelf, tidy_decode, tidy_prefill
from kvflow.protocols import limits
from kvflow.protocols.arguments import prompt_digest
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeIdentity
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.pages.kinds import StateKind
from kvflow.protocols.pages.layout import Counts, PageIndices, PoolLayout, Space, build_layout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import PrefillIdentity
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import Incarnation, Rank
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.testing.shards import shard_layout

UNLIMITED = -1
S = TypeVar("S")


class Price(IntEnum):
    NOTHING = 0
    DROP = 1
    DUPLICATE = 2
    CRASH = 3
    DECODE_ABORT = 4
    PREFILL_ABORT = 5
    DOUBT = 6  # a data plane that cannot prove what landed
    SILENCE = 7  # heartbeats from a living peer that do not arrive in time
    REFUSAL = 8  # a route that cannot be opened, or a prefill whose data plane stalls
    OTHER = 9  # another decode registers
    LEAVE = 10
    DECLARE = 11
    CHECKSUM = 12  # a checksum differs or cannot be computed


class Bounds(NamedTuple):
    """The bounds of one world: a limit for each kind of fault, and the variants to walk.

    A full queue drops further words, like a ZMQ socket at its high-water mark.
    """

    ranks: int = 1
    # Each chunk has one page, unless `fills` is given. With 0 chunks, decode has the whole prompt.
    chunks: int = 3
    in_flight: int = 4  # words queued in each direction, over all ranks
    drops: int = 2
    duplicates: int = 2
    crashes: int = 1
    aborts: int = 1  # limit for each side
    doubts: int = UNLIMITED
    silences: int = UNLIMITED
    refusals: int = 0
    others: int = 0
    leaves: int = 0
    declares: int = 0
    checksums: int = 0
    rooms: tuple[int, ...] = (1,)  # room ids, opened in this order at decode and at prefill
    announce: bool = False  # decode announces a room long before it offers pages
    registered: bool = True  # links are up from the beginning
    restarts: bool = True  # a dead prefill may start again at its address
    verify: bool = False
    staged: bool = False  # prefill writes into staging, and decode copies each chunk
    own_pages: bool = False  # the caller of a room brings its own pages
    user: bool = False  # the user keeps landed pages, or closes the room
    fences: bool = True  # the data plane can prove a writer's death
    out_of_order: bool = False  # writes of one prefill may end in any order
    # A tick handles only one room or loan, so that messages can arrive in between.
    step_by_step: bool = False
    patient: bool = False  # decode repeats messages only while every queue is empty
    targets: int = 8
    closed_grants: int = 8
    quarantine_share: float = 1.0
    # An earlier decode left a loan to rank 0. A late write may land in the pages of this loan.
    earlier: bool = False
    # For each chunk, its number of places in each space. Without it there is one space.
    fills: tuple[Counts, ...] = ()

    @property
    def last_grant(self) -> int:
        """The highest grant number. An earlier decode's loan, if there is one, has number 1."""
        return len(self.rooms) + self.earlier

    def limit(self, price: Price) -> int:
        if price is Price.NOTHING:
            return UNLIMITED
        return int(getattr(self, _LIMITS.get(price, f"{price.name.lower()}s")))


_LIMITS = {Price.DECODE_ABORT: "aborts", Price.PREFILL_ABORT: "aborts", Price.CRASH: "crashes"}

DECODE, OTHER = Incarnation(77), Incarnation(88)
LIVES = tuple((Incarnation(100 + n), Incarnation(200 + n)) for n in (1, 2, 3))  # by rank
"""Incarnations of the first and the second life of each rank's prefill.

The walk treats every prefill as rank 0, and renames its messages on decode's side.
"""
MAX_RANKS, GRANT_PAGES, PAGE_SIZE = len(LIVES), 8, 4
SPACE_PAGES = 8 * GRANT_PAGES  # pages of each space
SUM, OTHER_SUM = b"sum", b"another"
LATER = Cause(Code.PEER_LOST, "later")
NO_WORD = wire.Heartbeat(source=Incarnation(1), target=Incarnation(1))
"""Stands for the first word of an empty queue."""

Word = Any
"""A message between decode and rank 0 as a hashable value, with LATER in place of its cause."""
Words = tuple[Word, ...]


class ViolationError(AssertionError):
    """An invariant is broken. The text begins with the name of the invariant."""


class Act(NamedTuple, Generic[S]):
    """One event at one side, and its result."""

    text: str
    price: Price
    fair: bool  # it happens sooner or later, without a new fault
    side: S  # the state of the side afterwards
    words: tuple[Words, ...]  # words that it sends, by rank
    timer: bool = False  # its words are left out while the same ones are queued
    broken: str = ""  # name and text of the broken invariant, if any
    succeeded: int = 0  # the grant whose success decode reports to its user, or 0
    hears: bool = False  # it takes the first word of the queue


class Silent:
    rooms_opened = mismatched = declared_dead = 0

    def __init__(self) -> None:
        self.ended: deque[Any] = deque(maxlen=0)

    def __getattr__(self, name: str) -> Any:
        # pickle probes for special methods, and must not find `_nothing` in their place.
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*_: object, **__: object) -> None:
    return None


class World:
    """One world: its bounds, and every endpoint that the walk met in it."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        # The places of each space in each chunk, and in a room.
        self.fills = bounds.fills or ((int(bounds.chunks > 0),),) * max(1, bounds.chunks)
        self.counts: Counts = tuple(map(sum, zip(*self.fills, strict=True)))
        self.spaces = len(self.counts)
        # For each chunk, a bit for each of its places, by its position in the room's list.
        self.chunk_bits = [
            _bits(chunk) for chunk in positions(self.counts, self.counts, self.fills)
        ]
        self.all_bits = sum(self.chunk_bits)
        self.layout = _layout(self.counts, bounds.ranks)
        self.address = PlaneAddress("fake", "memory", ProcessIdentity("boot", "pid", 1, 1))
        self.timing = limits.Timing()
        self.limits = limits.Bounds(
            targets=bounds.targets,
            closed_grants=bounds.closed_grants,
            quarantine_share=bounds.quarantine_share,
        )
        self.observer: Any = Silent()
        self.tokens = max(1, self.counts[0]) * PAGE_SIZE
        self.prefix_tokens = 0 if bounds.chunks else self.tokens
        self.digest = prompt_digest(range(self.tokens))
        mine = DecodeIdentity(DECODE, self.layout, self.address)
        lives = [PrefillIdentity(life, Rank(0), self.layout, self.address) for life in LIVES[0]]
        self._decode_identity, self._prefill_identities = mine, lives
        shared = [self.layout, self.address, self.timing, self.limits, self.observer]
        self.decodes: Shelf[DecodeEndpoint] = Shelf(tidy_decode, [*shared, mine])
        self.prefills: Shelf[PrefillEndpoint] = Shelf(tidy_prefill, [*shared, *lives])
        self._frames: dict[tuple[Word, int], bytes] = {}

    def new_decode(self) -> DecodeEndpoint:
        return DecodeEndpoint(
            self._decode_identity,
            observer=self.observer,
            timing=self.timing,
            bounds=self.limits,
            verify=self.bounds.verify,
            staged=self.bounds.staged,
        )

    def new_prefill(self, life: int) -> PrefillEndpoint:
        return PrefillEndpoint(
            self._prefill_identities[life - 1],
            observer=self.observer,
            timing=self.timing,
            bounds=self.limits,
        )

    # --- places

    def places_of(self, grant: int) -> PageIndices:
        """Return the places that a grant offers, which are in no other grant."""
        own = (np.arange(count, dtype=np.int32) + GRANT_PAGES * grant for count in self.counts)
        return self.layout.numbered(tuple(own))

    def sources(self, chunk: int) -> PageIndices:
        """Return the places of a chunk at prefill, where every room uses the same ones."""
        first, bits = self.places_of(0), self.chunk_bits[chunk]
        return first[[position for position in range(first.size) if bits >> position & 1]]

    def position(self, place: int) -> int:
        """Return the position of a place in its room's list. Prefill's are those of grant 0."""
        space, number = divmod(place, SPACE_PAGES)
        return sum(self.counts[:space]) + number % GRANT_PAGES

    def reached(self, grant: int, bits: int) -> int:
        """Return a bit for each space of the grant in which `bits` has a place."""
        found = 0
        for space, count in enumerate(self.counts):
            if bits & (1 << count) - 1:
                found |= 1 << grant * self.spaces + space
            bits >>= count
        return found

    def allows(self, price: Price) -> bool:
        return self.bounds.limit(price) != 0

    def info(self, rank: int, life: int) -> RankInfo:
        control = f"tcp://prefill-{rank}:1"
        return RankInfo(rank, self.bounds.ranks, LIVES[rank][life - 1], control, "fake", "")

    def register(self, target: Incarnation) -> wire.Register:
        return wire.Register(
            source=LIVES[0][0],
            target=target,
            wire_version=wire.WIRE_VERSION,
            layout=self.layout,
            address=self.address,
            fresh_from=wire.GrantId(1),
        )

    def frame(self, word: Word, rank: int) -> bytes:
        """Encode `word` as the frame that travels between decode and `rank`."""
        found = self._frames.get((word, rank))
        if found is None:
            changes: dict[str, Any] = {"source": LIVES[rank][life_of(word.source) - 1]}
            if type(word) is wire.Registered:
                changes["asked"] = LIVES[rank][life_of(word.asked) - 1]
                part = shard_layout(self.layout, rank, self.bounds.ranks)
                changes["served"] = served_of(part) if word.served else ()
            if hasattr(word, "rank"):
                changes["rank"] = rank
            found = self._frames[word, rank] = encode(msgspec.structs.replace(word, **changes))
        return found


def word_of(message: Any) -> Word:
    """Convert a message to a word: rank 0 becomes its sender, and fixed texts replace its own."""
    # No step depends on a text, and different texts would make equivalent states differ.
    changes: dict[str, Any] = {"source": LIVES[0][life_of(message.source) - 1]}
    if getattr(message, "cause", None) is not None:
        changes["cause"] = LATER
    if getattr(message, "refusal", ""):
        changes["refusal"] = "no"
    if getattr(message, "asked", 0):
        changes["asked"] = LIVES[0][life_of(message.asked) - 1]
    return msgspec.structs.replace(message, **changes)


def life_of(incarnation: int) -> int:
    """Return the life of a prefill's incarnation, 1 or 2."""
    return incarnation // 100


def _bits(positions_of_chunk: Iterable[int]) -> int:
    return sum(1 << position for position in positions_of_chunk)


def _layout(counts: Counts, ranks: int) -> PoolLayout:
    """Return the layout of every pool. Its second space, if any, is the window of a room's last
    pages, as many as `counts` says.
    """
    spaces, kinds = [Space("pages", SPACE_PAGES, PAGE_SIZE)], [StateKind("k", "uint8", (ranks,))]
    if len(counts) > 1:
        spaces.append(Space("window", SPACE_PAGES, PAGE_SIZE, counts[1] * PAGE_SIZE))
        kinds.append(StateKind("w", "uint8", (ranks,), space="window"))
    return build_layout(kinds, spaces=spaces)


def described(word: Word) -> str:
    name = type(word).__name__
    parts = [f"grant {word.grant}"] if hasattr(word, "grant") else []
    if name == "ChunkDone":
        parts.append(f"chunk {word.seq}")
    elif name == "AbortAck":
        parts.append("drained" if word.drained else "unproven")
    elif name == "Resync":
        parts += [f"grant {belief.grant} from chunk {belief.next_seq}" for belief in word.rooms]
    elif name == "Registered":
        parts += ["refused"] if word.refusal else []
    elif name == "Heartbeat":
        parts.append(f"settled below {word.settled_below}")
        parts += [f"from {start} to below {end}" for start, end in word.settled]
    elif name == "Goodbye":
        parts += [f"nothing proven of grant {grant}" for grant in word.unproven]
    life = "" if life_of(word.source) == 1 else " of the second life"
    return f"{name}{life} ({', '.join(parts)})" if parts else name + life
