"""Decode's side in a worker. It lends vLLM's blocks to prefill, and reports how each load ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kvflow.connectors.vllm.groups import places_of
from kvflow.connectors.vllm.messages import Offer, OpenTarget, StepMeta, StepNews
from kvflow.connectors.vllm.transfers import Transfers
from kvflow.connectors.vllm.worker_side import WorkerSide
from kvflow.node.threads.decode import DecodeThread
from kvflow.node.threads.rooms import DecodeThreadRoom, RoomEvent
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices

log = logging.getLogger("vllm.kvflow")


class _Target:
    """One request's load, from its announcement until no write can reach its blocks any more."""

    def __init__(self, what: OpenTarget) -> None:
        self.request, self.workers = what.request, len(what.prefill)
        self.room: DecodeThreadRoom | None = None
        self.offer: Offer | None = None
        self.places: PageIndices = NO_PLACES  # those of the offer
        self.cause: Cause | None = None  # first cause of the load's failure
        self.is_told = False  # True once `_news` reports the failure to the scheduler side
        self.is_held = False  # True once that side keeps the blocks, and the failure may go to vLLM
        self.is_abandoned = False  # True once vLLM ends the request and waits for its blocks
        self.is_released = False  # True once no write can reach the blocks
        self.quarantined = 0  # its share of `quarantined_blocks`
        self.opened_at_s = time.monotonic()


class DecodeWorker(WorkerSide[DecodeThread]):
    """The loads at one worker."""

    def __init__(
        self,
        thread: DecodeThread,
        stats: Transfers,
        wake: Callable[[], None],
        *,
        rank: int,
        load_deadline_s: float | None,
    ) -> None:
        """`rank` is this worker's number. It loads from prefill's worker with the same number.

        `load_deadline_s` is the longest time for which the worker lends blocks to a prefill that
        does not fill them. None sets no limit.
        """
        super().__init__(thread, stats, wake)
        self._rank, self._deadline_s = rank, load_deadline_s
        self._due_s: dict[str, float] = {}  # deadlines of running loads, earliest first
        self._targets: dict[str, _Target] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._news = StepNews()
        self.quarantined_blocks = 0
        """Blocks of failed or abandoned loads that prefill may still write."""

    @property
    def is_busy(self) -> bool:
        return bool(self._targets or self._received)

    def begin(self, meta: StepMeta) -> None:
        """Open the rooms of new loads, lend their blocks, and end the loads of ended requests."""
        with self._lock:
            for what in meta.targets:
                self._open(what, meta.offers.pop(what.request, None))
            for name, offer in meta.offers.items():
                if (target := self._targets.get(name)) is not None:
                    self._offer(target, offer)
            for name, workers in meta.held.items():
                target = self._targets.get(name) if self._rank in workers else None
                if target is not None and not (target.is_held or target.is_abandoned):
                    target.is_held = True
                    self._report(target)
            for name in meta.abandoned:
                if (target := self._targets.get(name)) is not None:
                    self._abandon(target)

    def finished(self) -> tuple[set[str], set[str]]:
        """Return the requests for which vLLM need no longer wait, and those of them that failed."""
        with self._lock:
            found = self._received, self._failed
            self._received, self._failed = set(), set()
        return found

    def take_news(self) -> StepNews | None:
        with self._lock:
            news, self._news = self._news, StepNews()
        # An empty message is not sent, because vLLM would pickle and merge it in every step.
        return news if news.ready or news.failures or news.released else None

    # --- all below holds the lock

    def _open(self, what: OpenTarget, offer: Offer | None) -> None:
        target = self._targets[what.request] = _Target(what)
        if offer is not None:
            self._lend(target, offer)
        prefill = what.prefill[self._rank]
        try:
            if what.refusal is not None:
                self.thread.refuse(what.room, prefill=prefill, cause=what.refusal)
                self._never(target, what.refusal)
                return
            if offer is None:
                target.room = self.thread.announce(
                    what.room, prefill=prefill, prompt=what.prompt, context=target
                )
                return
            if (cause := self._unloaded(offer)) is not None:
                self.thread.refuse(what.room, prefill=prefill, cause=cause)
                self._never(target, cause)
                return
            target.room = self.thread.open(
                what.room,
                prefill=prefill,
                prompt=what.prompt,
                pages=target.places,
                prefix_tokens=offer.prefix_tokens,
                context=target,
            )
        except KvflowError as error:
            self._never(target, error.cause())

    def _lend(self, target: _Target, offer: Offer) -> None:
        target.offer = offer
        if any(offer.blocks):
            target.places = places_of(self.thread.pool.layout, offer.blocks)
        if self._deadline_s is not None:
            self._due_s[target.request] = time.monotonic() + self._deadline_s

    def _offer(self, target: _Target, offer: Offer) -> None:
        self._lend(target, offer)
        # The load may have failed before it had blocks.
        if target.cause is not None:
            self._tell(target)
            return
        assert target.room is not None
        if (cause := self._unloaded(offer)) is not None:
            target.room.close(cause)
            return
        try:
            target.room.offer(target.places, prefix_tokens=offer.prefix_tokens)
        except KvflowError as error:
            target.room.close(error.cause())

    def _unloaded(self, offer: Offer) -> Cause | None:
        """Return why a room cannot take the offer; None if it can."""
        # A room without pages ends at once, but a row travels in any case.
        if not offer.blocks and self.thread.pool.layout.row_space is not None:
            return Cause(Code.CLIENT_GONE, "decode computes the prompt itself")
        return offer.refusal

    def _never(self, target: _Target, cause: Cause) -> None:
        """Record the failure of a load that never had a room. No write can reach its blocks."""
        target.is_released = True
        self._fail(target, cause)

    def _fail(self, target: _Target, cause: Cause) -> None:
        if target.cause is None:
            target.cause = cause
            if not target.is_abandoned and (target.offer is None or target.offer.is_waited_for):
                self.stats.failed(cause.code)
                log.warning(
                    "request %s: its blocks do not come from prefill: %s", target.request, cause
                )
        # Let the request take blocks: vLLM can fail a load only after the request has blocks.
        if target.offer is None:
            self._ready(target, set(range(target.workers)))
        self._count(target)
        self._tell(target)

    def _ready(self, target: _Target, workers: set[int]) -> None:
        """Report that the request need not wait for these workers before it takes blocks."""
        self._news.ready[target.request] = self._news.ready.get(target.request, set()) | workers

    def _tell(self, target: _Target) -> None:
        if target.is_abandoned or target.offer is None or target.is_told or target.cause is None:
            return
        if not target.offer.is_waited_for:
            self._drop(target)
            return
        target.is_told = True
        self._news.failed[target.request] = target.cause
        self._news.failures[target.request] = {self._rank}
        if target.is_released:
            self._news.released[target.request] = {self._rank}

    def _report(self, target: _Target) -> None:
        self._received.add(target.request)
        self._failed.add(target.request)
        if target.is_released:
            self._drop(target)

    def _abandon(self, target: _Target) -> None:
        # The failure has already been reported to vLLM, so vLLM no longer waits for this load.
        if target.is_held:
            return
        target.is_abandoned = True
        self._count(target)
        if target.room is not None:
            target.room.close(Cause(Code.CLIENT_GONE, "the request is over at decode"))
        if target.is_released:
            self._end(target)

    def _handle(self, event: RoomEvent[Any]) -> None:
        target: _Target = event.room.context
        if event.kind == "begun":
            self._ready(target, {self._rank})
        elif event.kind == "landed":
            assert target.room is not None
            self._due_s.pop(target.request, None)
            layout = self.thread.pool.layout
            size_bytes = layout.room_bytes(layout.counted(target.room.pages))
            self.stats.received(size_bytes, time.monotonic() - target.opened_at_s)
        elif event.kind == "failed":
            assert event.error is not None
            self._fail(target, event.error.cause())
        elif event.kind == "released":
            target.is_released = True
            self._released(target)

    def _released(self, target: _Target) -> None:
        if target.is_told:
            self._news.released[target.request] = {self._rank}
        if target.is_held:
            self._drop(target)
        elif target.cause is None or target.is_abandoned:
            self._end(target)

    def _end(self, target: _Target) -> None:
        """Finish a load that landed or was abandoned, and tell vLLM if it waits for the blocks."""
        if target.offer is not None and target.offer.is_waited_for:
            self._received.add(target.request)
        self._drop(target)

    def _drop(self, target: _Target) -> None:
        self._targets.pop(target.request, None)
        self._due_s.pop(target.request, None)
        self._count(target)

    def _count(self, target: _Target) -> None:
        """Update the number of blocks in quarantine. Call this after each change of a target."""
        is_over = target.cause is not None or target.is_abandoned
        is_held = (
            is_over and target.offer is not None and self._targets.get(target.request) is target
        )
        found = len(target.places) if is_held else 0
        self.quarantined_blocks += found - target.quarantined
        target.quarantined = found

    def _expire(self) -> float:
        now = time.monotonic()
        # All loads get the same time limit, so the first one in the dictionary expires first.
        while (name := next(iter(self._due_s), None)) is not None:
            if (left_s := self._due_s[name] - now) > 0:
                return min(left_s, super()._expire())
            del self._due_s[name]
            if (room := self._targets[name].room) is not None:
                text = f"its blocks have not come within {self._deadline_s:g} s (load_deadline_s)"
                room.close(Cause(Code.DEADLINE, text))
        return super()._expire()
