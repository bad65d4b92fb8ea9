"""Machinery that endpoints share. Every endpoint has an outbox of commands. Endpoints with rooms
also have deadlines, queued tasks, a story per room, and the loans of earlier nodes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.errors import Cause
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.ledger import Ledger
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import Observer, RoomEnding
from kvflow.protocols.wire.codec import UNDECODABLE
from kvflow.protocols.wire.messages import MAX_FRAME_BYTES, GrantId

M = TypeVar("M")
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
GRAIN_S = 0.01
STORY_LINES = 64
# One tick handles at most this many queued items, and as many timers. The bound keeps a tick to a
# millisecond or two, so that the loss of a peer with thousands of rooms does not block the event
# loop (I11).
TICK_WORK = 32
COUNTED_AT_ONCE = 128  # ended rooms that are counted in one batch


def parsed(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T | None:
    """Parse a frame that an endpoint received. Returns None for a malformed one (I7)."""
    if len(frame) > MAX_FRAME_BYTES:
        return None
    try:
        return decoder.decode(frame)
    except UNDECODABLE:
        return None


class Endpoint(Generic[M]):
    """Base class of all endpoints: the queue of commands for the shell.

    After each method call, the shell runs the commands that `commands()` returns. It calls `tick`
    at the time that `next_tick()` returns.
    """

    outbox: list[M]  # the commands that `commands` returns next

    def commands(self) -> list[M]:
        """Return the commands issued since the last call, in the order to run them."""
        found = self.outbox[:]
        self.outbox.clear()
        return found


class RoomsEndpoint(Endpoint[M]):
    """Base class of the two endpoints that have rooms, decode's and prefill's."""

    core: Core  # public so that shells and reports can read it; only the endpoint changes it

    @property
    def earlier(self) -> EarlierLoans:
        return self.core.earlier

    def next_tick(self) -> float:
        """Return the earliest time at which `tick` may have work, or infinity. It is minus infinity
        while tasks are queued.
        """
        # Shells call this after every batch of commands, so the expression of `work_left` is
        # repeated here to save a call.
        core = self.core
        return float("-inf") if core.tasks or core.earlier.tasks else core.deadlines.not_before_s


class Timer(msgspec.Struct, frozen=True, gc=False):
    """The purpose of a deadline, and the grant, room or peer that it belongs to, if any."""

    kind: str
    key: Any


class Task:
    """Work on many items, done one at a time so that no tick takes long. An item may change before
    its turn comes.

    `run` names the function that handles an item. `peer` is the peer to which the items belong, if
    any. `cause` is the cause with which the task ends rooms.
    """

    __slots__ = ("cause", "items", "peer", "run")

    def __init__(
        self, run: str, items: Iterable[Any], peer: Any = None, cause: Cause | None = None
    ) -> None:
        self.run, self.peer = run, peer
        self.cause: Any = cause
        self.items: deque[Any] = deque(items)


class Core:
    """Base class of decode's and prefill's core: deadlines, queued tasks, ledger and outbox."""

    def __init__(
        self, layout: PoolLayout, observer: Observer, timing: Timing, bounds: Bounds
    ) -> None:
        self.observer, self.timing, self.bounds = observer, timing, bounds
        self.outbox: list[Any] = []
        # On both sides, the ledger has the loans of earlier nodes over the same pool. Decode's
        # ledger also has the loans of its own rooms.
        self.ledger: Ledger[Any] = Ledger(
            bounds.quarantine_limit(layout.counts), [space.page_size for space in layout.spaces]
        )
        self.earlier = EarlierLoans(self.ledger, self.outbox, self.take_grant, layout)
        self.next_grant = GrantId(1)
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.tasks: deque[Task] = deque()

    def room_ended(self, ending: RoomEnding, now: float) -> None:
        # Counting is not urgent, and costs the event loop less per room if many are counted at
        # once.
        ended = self.observer.ended
        ended.append((ending, now))
        if len(ended) >= COUNTED_AT_ONCE:
            self.observer.count_ended()

    def take_grant(self) -> GrantId:
        """Return the next unused grant. Leases of earlier nodes use the same sequence."""
        grant = self.next_grant
        self.next_grant = GrantId(grant + 1)
        return grant

    def add_task(self, task: Task) -> None:
        if task.items:
            self.tasks.append(task)

    def work(self, limit: float, now: float) -> None:
        """Run queued tasks for up to `limit` items in all."""
        while self.tasks and limit > 0:
            limit -= 1
            task = self.tasks[0]
            item = task.items.popleft()
            if not task.items:
                self.tasks.popleft()
            self.run_task(task, item, now)
        self.earlier.work(limit)

    def run_task(self, task: Task, item: Any, now: float) -> None:
        """Handle one item of a task."""
        raise NotImplementedError

    @property
    def work_left(self) -> bool:
        """True while `work` has more to do."""
        return bool(self.tasks or self.earlier.tasks)


class _Bucket(Generic[K]):
    """The deadlines within one interval of `GRAIN_S` seconds."""

    __slots__ = ("keys", "order")

    def __init__(self) -> None:
        self.keys: dict[K, float] = {}
        # The entries of `keys`, latest first, or None while they are unsorted. Only the earliest
        # bucket is sorted, because most keys are cancelled before their bucket is the earliest. An
        # entry that differs from `keys` is stale.
        self.order: list[tuple[float, K]] | None = None

    def first(self) -> tuple[float, K]:
        """Return the earliest deadline and its key. Call this only while there is a key."""
        if self.order is None:
            self.order = sorted(((at_s, key) for key, at_s in self.keys.items()), key=_at_s)[::-1]
        while self.keys.get(self.order[-1][1]) != self.order[-1][0]:
            self.order.pop()
        return self.order[-1]


def _at_s(entry: tuple[float, object]) -> float:
    return entry[0]


class Deadlines(Generic[K]):
    """A set of deadlines, at most one per key.

    Setting and cancelling a deadline cost O(1), unless a new bucket has to be added to the heap.
    Only the earliest bucket is sorted.
    """

    def __init__(self) -> None:
        self._where: dict[K, int] = {}
        self._buckets: dict[int, _Bucket[K]] = {}
        # A heap of the numbers of all buckets. An empty bucket stays until it comes first, because
        # a heap cannot drop an inner entry cheaply.
        self._heap: list[int] = []
        # Lower bound on all deadlines. It is cheaper to read than `next_at_s`, and exact after
        # `pop_due` returns None.
        self.not_before_s = float("inf")

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[K]:
        return iter(self._where)

    def __contains__(self, key: K) -> bool:
        return key in self._where

    def set(self, key: K, at_s: float) -> None:
        """Set the deadline of `key` to `at_s`. Infinity removes it."""
        if key in self._where:
            self.cancel(key)
        if at_s == float("inf"):
            return
        if at_s < self.not_before_s:
            self.not_before_s = at_s
        number = int(at_s / GRAIN_S)
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = _Bucket()
            heapq.heappush(self._heap, number)
        bucket.keys[key] = at_s
        bucket.order = None
        self._where[key] = number

    def advance(self, key: K, at_s: float) -> None:
        """Make `key` due at `at_s` if it has a later deadline."""
        number = self._where.get(key)
        if number is not None and self._buckets[number].keys[key] > at_s:
            self.set(key, at_s)

    def cancel(self, key: K) -> None:
        """Drop the deadline of `key`, if it has one."""
        number = self._where.pop(key, None)
        if number is not None:
            del self._buckets[number].keys[key]

    def next_at_s(self) -> float:
        """Return the time of the next deadline, or infinity if there is none."""
        bucket = self._first()
        return float("inf") if bucket is None else bucket.first()[0]

    def pop_due(self, now: float) -> K | None:
        """Remove and return the earliest key that is due at `now`, or None."""
        bucket = self._first()
        if bucket is None:
            self.not_before_s = float("inf")
            return None
        self.not_before_s, key = bucket.first()
        if self.not_before_s > now:
            return None
        self.cancel(key)
        return key

    def _first(self) -> _Bucket[K] | None:
        while self._heap:
            bucket = self._buckets[self._heap[0]]
            if bucket.keys:
                return bucket
            del self._buckets[heapq.heappop(self._heap)]
        return None


class Line(NamedTuple):
    """One line of a story: a time on the node's clock, an event, the next phase, and details."""

    at_s: float
    what: str
    phase: str
    text: str


class Story:
    """The bounded log of a room: its first and its latest lines. No decision depends on it."""

    __slots__ = ("_dropped", "_lines", "follower")

    def __init__(self) -> None:
        self._lines: list[tuple[float, IntEnum | str, IntEnum, object]] = []
        self._dropped = 0
        self.follower: Callable[[Line], None] | None = None  # called with every new line

    def tell(self, at_s: float, what: IntEnum | str, phase: IntEnum, detail: object = None) -> None:
        """Add a line. Without a follower, `detail` becomes text only when the line is read."""
        if len(self._lines) >= STORY_LINES:
            del self._lines[STORY_LINES // 2]
            self._dropped += 1
        self._lines.append((at_s, what, phase, detail))
        if self.follower is not None:
            self.follower(_readable(at_s, what, phase, detail))

    def lines(self) -> Sequence[Line]:
        """Return the kept lines. If some were dropped, a line in the middle states their number."""
        told = [_readable(*line) for line in self._lines]
        if self._dropped:
            middle = told[STORY_LINES // 2]
            told.insert(
                STORY_LINES // 2,
                Line(middle.at_s, f"{self._dropped} lines left out", middle.phase, ""),
            )
        return told


def _readable(at_s: float, what: IntEnum | str, phase: IntEnum, detail: object) -> Line:
    name = what if isinstance(what, str) else what.name.lower()
    return Line(at_s, name, phase.name, "" if detail is None else str(detail))
