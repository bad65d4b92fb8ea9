"""The worker sides of one prefill and one decode, stepped as vLLM steps them."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import numpy as np

import kvflow
from kvflow.connectors.vllm.decode_worker import DecodeWorker
from kvflow.connectors.vllm.groups import Group, Groups
from kvflow.connectors.vllm.messages import Computed, Offer, OpenSource, OpenTarget, StepMeta
from kvflow.connectors.vllm.prefill_worker import PrefillWorker
from kvflow.connectors.vllm.transfers import Transfers
from kvflow.memory.streams import SpaceStreams
from kvflow.protocols.limits import Timing
from kvflow.protocols.pages.layout import Space

PAGES, PAGE_SIZE, PATIENCE_S = 32, 4, 20.0
PROMPT = np.arange(10, dtype=np.uint32)  # 2.5 blocks
NAME, ROOM = "request", 7
BLOCK_BYTES = 64


def one_group(page_size: int) -> Groups:
    return Groups([Group(0, ("k",), Space("pages", PAGES, page_size))])


ONE_GROUP = one_group(PAGE_SIZE)
# In vLLM's order: a window of 6 tokens, whose token computed next is one, states, full attention.
WINDOW = Group(0, ("w",), Space("window", PAGES, PAGE_SIZE, 5), 7)
STATE = Group(1, ("s",), Space("state", PAGES, 0), 1, 1 << 16)
FULL = Group(2, ("k",), Space("pages", PAGES, 2 * PAGE_SIZE))
MANY_GROUPS = Groups([FULL, WINDOW, STATE])


class Gate:
    """While it is shut, no write of a prefill ends, and none can be cancelled."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()
        # Called when bytes have landed, before the write is reported.
        self.landed: Callable[[], object] = lambda: None


class _GatedJob:
    def __init__(self, job: Any, gate: Gate) -> None:
        self._job, self._gate = job, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        self._gate.reached.set()
        self._gate.open.wait(PATIENCE_S)
        left = int(self._job.advance(max_bytes, cancelled))
        self._gate.landed()
        return left


class GatedPlane(kvflow.LocalPlane):
    def __init__(self, gate: Gate) -> None:
        super().__init__(None)
        self._gate = gate

    def _open(self, *args: Any) -> Any:
        route: Any = super()._open(*args)
        begin = route.begin
        route.write_at_once = lambda write: False
        route.begin = lambda write: _GatedJob(begin(write), self._gate)
        return route


def new_pool(first: int = 0, page_bytes: int = 64) -> kvflow.PagedPool:
    """Page p holds first + p everywhere, or 0 without `first`."""
    kinds = [("k", "uint8", (page_bytes // PAGE_SIZE,))]
    pool = kvflow.PagedPool.allocate(
        kvflow.build_layout(kinds, page_size=PAGE_SIZE, num_pages=PAGES), shared=True
    )
    if first:
        pool.array("k")[:] = np.arange(first, first + PAGES, dtype=np.uint8)[:, None, None]
    return pool


def pool_of(groups: Groups) -> kvflow.PagedPool:
    """The pool of a cache whose groups share their memory, as vLLM's do. All of it is 0."""
    segment = kvflow.SharedSegment.create(PAGES * BLOCK_BYTES)
    memory = np.frombuffer(segment.memory, np.uint8, PAGES * BLOCK_BYTES)
    memory = memory.reshape(PAGES, BLOCK_BYTES)
    first, *others = groups.groups
    spaces = {
        group.space.name: SpaceStreams({}, size, {group.layers[0]: memory}, group.space.window)
        if (size := group.space.page_size)
        else SpaceStreams({group.layers[0]: memory}, 0)
        for group in others
    }
    return kvflow.PagedPool.wrap(
        {},
        first.space.page_size,
        per_page={first.layers[0]: memory},
        window=first.space.window,
        spaces=spaces,
        segment=segment,
    )


def new_prefill(
    rank: int,
    gate: Gate,
    wake: threading.Event,
    timing: Timing,
    deadline_s: float,
    pool: kvflow.PagedPool | None = None,
    *,
    is_staged: bool = False,
) -> PrefillWorker:
    source = new_pool(1) if pool is None else pool
    staging = kvflow.Staging(source) if is_staged else None
    thread = kvflow.PrefillThread(
        source, GatedPlane(gate), registry_port=0, timing=timing, staging=staging
    )
    stats = Transfers(f"0.{rank}")
    return PrefillWorker(thread, stats, wake.set, source_deadline_s=deadline_s)


def new_decode(
    rank: int,
    wake: threading.Event,
    timing: Timing,
    deadline_s: float | None,
    pool: kvflow.PagedPool | None = None,
    *,
    is_staged: bool = False,
) -> DecodeWorker:
    resolve, target = kvflow.RegistryClient().resolve, pool or new_pool()
    staging = kvflow.Staging(target) if is_staged else None
    thread = kvflow.DecodeThread(target, "local", resolve=resolve, timing=timing, staging=staging)
    stats = Transfers(f"0.{rank}")
    return DecodeWorker(thread, stats, wake.set, rank=rank, load_deadline_s=deadline_s)


class Pair:
    def __init__(
        self, prefill: PrefillWorker, decode: DecodeWorker, wake: threading.Event, gate: Gate
    ) -> None:
        self.prefill, self.decode, self.gate, self._wake = prefill, decode, gate, wake
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()  # of those received
        self.ready: dict[str, set[int]] = {}
        self.failures: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.causes: dict[str, kvflow.Cause] = {}

    def step_prefill(self, **meta: Any) -> None:
        told: StepMeta = pickle.loads(pickle.dumps(StepMeta(**meta)))
        self.prefill.preempt(told)
        self.prefill.begin(told)
        self.prefill.computed(told)
        self.sent.update(self.prefill.finished(told))

    def step_decode(self, **meta: Any) -> None:
        self.decode.begin(pickle.loads(pickle.dumps(StepMeta(**meta))))
        received, failed = self.decode.finished()
        assert failed <= received
        self.received.update(received)
        self.failed.update(failed)
        if (news := self.decode.take_news()) is not None:
            self.ready |= {
                name: self.ready.get(name, set()) | news.ready[name] for name in news.ready
            }
            self.failures.update(news.failures.keys())
            self.released.update(news.released.keys())
            self.causes |= news.failed

    def until(self, condition: Callable[[], object]) -> None:
        """Step both, with nothing to tell them, as events come."""
        deadline = monotonic() + PATIENCE_S
        while not condition():
            assert monotonic() < deadline, (
                f"it did not happen within {PATIENCE_S:g} s: {vars(self)}"
            )
            self._wake.clear()
            self.step_prefill()
            self.step_decode()
            if not condition():
                self._wake.wait(0.05)

    def until_rest(self) -> None:
        self.until(lambda: not (self.prefill.is_busy or self.decode.is_busy))
        self.step_prefill()
        self.step_decode()

    def ends(self, told: str, **others: str) -> None:
        """Both come to rest; the named counters counted each request once, and no other did."""
        self.until_rest()
        words = {name: set(said.split()) for name, said in {NAME: told, **others}.items()}
        for counter in ("sent", "received", "failed", "failures"):
            named = {counter, "failed"} if counter == "failures" else {counter}
            expected = Counter(name for name, said in words.items() if said & named)
            assert getattr(self, counter) == expected, (counter, vars(self))

    def assert_loaded(self) -> None:
        """Blocks 9, 4 and 7 hold what 3, 1 and 2 hold, and no other one holds anything."""
        assert list(self.target_pages[[9, 4, 7]]) == [4, 2, 3] and self.target_pages.sum() == 9

    def match(self) -> None:
        self.step_prefill(sources=[self.source()])
        self.load(9, 4, 7)
        self.until(lambda: self.room().matched)

    def load_halfway(self) -> None:
        self.gate.open.clear()
        self.send_all(3, 1, 2)
        self.load(9, 4, 7)
        assert self.gate.reached.wait(PATIENCE_S)

    @property
    def lent(self) -> list[int]:
        return sorted(self.decode.thread.pages.busy(range(PAGES)))

    def pass_deadline(self) -> None:
        """That of decode's load is over, whatever was set; the next look at the clock sees it."""
        with self.decode._lock:
            self.decode._due_s[NAME] = 0.0

    # --- what the scheduler sides would tell them

    def source(self, room: int = ROOM, name: str = NAME) -> OpenSource:
        return OpenSource(name, room, PROMPT)

    def target(
        self,
        room: int = ROOM,
        name: str = NAME,
        refusal: kvflow.Cause | None = None,
        workers: int = 1,
    ) -> OpenTarget:
        return OpenTarget(name, room, [self.prefill.thread.registry] * workers, PROMPT, refusal)

    def send_all(self, *blocks: int) -> None:
        """A sequential prefill's request is over."""
        computed = {NAME: Computed([blocks], True)}
        self.step_prefill(sources=[self.source()], computed=computed, finished={NAME: False})

    def load(self, *blocks: int) -> None:
        self.offer(Offer([blocks], 0), is_announced=False)

    def offer(self, offer: Offer, *, is_announced: bool, **target: Any) -> None:
        targets, offers = [self.target(**target)], {NAME: offer}
        if is_announced:
            self.step_decode(targets=targets)
            self.step_decode(offers=offers)
        else:
            self.step_decode(targets=targets, offers=offers)

    def hold(self) -> None:
        """Decode fails, and learns that its blocks are held: vLLM hears of the failure."""
        self.until(lambda: self.failures[NAME])
        assert not self.received[NAME], "vLLM was told before anybody held the blocks"
        self.step_decode(held={NAME: {0}})

    @property
    def source_pages(self) -> Any:
        return self.prefill.thread.pool.array("k")[:, 0, 0]

    @property
    def target_pages(self) -> Any:
        return self.decode.thread.pool.array("k")[:, 0, 0]

    def room_phase(self) -> str:
        """Of prefill's half, as its node knows it."""
        rooms = self.prefill.thread.ask(lambda node: node.shell.endpoint.rooms)
        return next((record.phase.name for number, record in rooms.items() if number == ROOM), "")

    def room(self) -> Any:
        return self.prefill._sources[NAME].room


@contextmanager
def pair(
    *,
    source_deadline_s: float = 30.0,
    load_deadline_s: float | None = None,
    lost_after_s: float = 60.0,
    groups: Groups | None = None,
    is_staged: bool = False,
) -> Iterator[Pair]:
    """Prefill's page p holds p + 1. At the end both are at rest.

    Sides that get no CPU for `lost_after_s` take each other for lost: only a test of that has a
    short one.
    """
    wake, gate = threading.Event(), Gate()
    timing = Timing(lost_after_s=lost_after_s, heartbeat_s=min(1.0, lost_after_s / 4))
    pools = [None if groups is None else pool_of(groups) for _ in range(2)]
    prefill = new_prefill(0, gate, wake, timing, source_deadline_s, pools[0], is_staged=is_staged)
    decode = new_decode(0, wake, timing, load_deadline_s, pools[1], is_staged=is_staged)
    prefill.start()
    decode.start()
    found = Pair(prefill, decode, wake, gate)
    try:
        yield found
        gate.open.set()
        found.until_rest()
        for counter in (found.sent, found.received, found.failed, found.failures, found.released):
            assert all(count == 1 for count in counter.values()), vars(found)
        assert found.failures == found.released, "news that do not balance"
        assert prefill.thread.pages.at_rest() and decode.thread.pages.at_rest()
        assert decode.quarantined_blocks == 0
    finally:
        gate.open.set()
        for side in (decode, prefill):
            side.close()
            assert not side._follower.is_alive()
