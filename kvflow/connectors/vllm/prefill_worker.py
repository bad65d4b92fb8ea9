"""Prefill's side in a worker. It sends computed blocks, and reports when no write reads them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kvflow.connectors.vllm.groups import Blocks, first_place, places_of
from kvflow.connectors.vllm.messages import OpenSource, StepMeta
from kvflow.connectors.vllm.transfers import Transfers
from kvflow.connectors.vllm.worker_side import WorkerSide
from kvflow.node.threads.prefill import PrefillThread
from kvflow.node.threads.rooms import PrefillThreadRoom, RoomEvent
from kvflow.protocols.errors import Cause, Code, KvflowError

log = logging.getLogger("vllm.kvflow")
# Seconds for which a step that will overwrite blocks waits for the writes that still read them.
_PREEMPTION_S = 0.2


class _Source:
    """One request's blocks, from the opening of its room until no write reads them."""

    def __init__(self, what: OpenSource, spaces: int) -> None:
        self.request, self.tokens = what.request, len(what.prompt)
        self.room: PrefillThreadRoom | None = None
        self.blocks: Blocks = [()] * spaces
        self.is_all = False
        # Number of blocks of each space that decode already had or that were sent.
        self.sent = [0] * spaces
        self.is_over = False  # True once the request ends and vLLM waits for its blocks
        self.opened_at_s = time.monotonic()


class PrefillWorker(WorkerSide[PrefillThread]):
    """The requests at one worker."""

    def __init__(
        self,
        thread: PrefillThread,
        stats: Transfers,
        wake: Callable[[], None],
        *,
        source_deadline_s: float,
    ) -> None:
        super().__init__(thread, stats, wake)
        self._deadline_s, self._layout = source_deadline_s, thread.pool.layout
        self._sources: dict[str, _Source] = {}
        self._done: set[str] = set()  # ended requests whose blocks vLLM may use again

    @property
    def is_busy(self) -> bool:
        return bool(self._sources)

    def begin(self, meta: StepMeta) -> None:
        """Open the rooms of new requests, and begin the rooms of requests in `meta.begun`."""
        with self._lock:
            for what in meta.sources:
                self._open(what)
            for name in meta.begun:
                source = self._sources.get(name)
                if source is not None and source.room is not None:
                    source.room.begin()

    def preempt(self, meta: StepMeta) -> None:
        """Wait until no write reads the blocks of preempted requests, before a step overwrites
        them.

        If a write takes longer than `_PREEMPTION_S`, its room is closed. Whatever the write still
        reads then reaches only pages that decode does not use.
        """
        for name in meta.preempted:
            with self._lock:
                source = self._sources.get(name)
                if source is None or source.room is None:
                    continue
                # Drop the blocks first, so that they are not sent if decode's half arrives during
                # the wait.
                blocks = [own[:end] for own, end in zip(source.blocks, source.sent, strict=True)]
                source.blocks, source.is_all = [()] * len(blocks), False
            if not self.thread.wait_released(places_of(self._layout, blocks), _PREEMPTION_S):
                source.room.close(
                    Cause(Code.CAPACITY, "prefill preempted the request while its blocks were sent")
                )
                # Wait until the node processes the close. From then on the room cannot succeed.
                self.thread.ask(lambda _: None)

    def computed(self, meta: StepMeta) -> None:
        """Send the blocks that a step computed, if decode is ready for them."""
        with self._lock:
            for name, computed in meta.computed.items():
                if (source := self._sources.get(name)) is not None:
                    source.blocks, source.is_all = computed.blocks, computed.is_all
                    self._send(source)

    def finished(self, meta: StepMeta) -> set[str]:
        """Return the ended requests whose blocks vLLM may use again."""
        with self._lock:
            for name, was_aborted in meta.finished.items():
                source = self._sources.get(name)
                # The room ended before the request did.
                if source is None:
                    self._done.add(name)
                    continue
                source.is_over = True
                if was_aborted and source.room is not None:
                    source.room.close()
            done, self._done = self._done, set()
        return done

    def _open(self, what: OpenSource) -> None:
        source = self._sources[what.request] = _Source(what, len(self._layout.spaces))
        try:
            source.room = self.thread.open(
                what.room, prompt=what.prompt, rendezvous_s=self._deadline_s, context=source
            )
        except KvflowError as error:
            log.warning("request %s: room %d cannot be opened: %s", what.request, what.room, error)
            self._end(source)

    def _send(self, source: _Source) -> None:
        room = source.room
        if room is None or not room.matched or room.last_sent or room.error is not None:
            return
        first = self._first(source, room)
        chunk = [own[begin:] for own, begin in zip(source.blocks, first, strict=True)]
        if not any(chunk) and not source.is_all:
            return
        try:
            room.send(places_of(self._layout, chunk), last=source.is_all)
        except KvflowError as error:
            log.warning("request %s: %s", source.request, error)
            room.close(error.cause())
            return
        source.sent = [
            max(begin, len(own)) for own, begin in zip(source.blocks, first, strict=True)
        ]

    def _first(self, source: _Source, room: PrefillThreadRoom) -> list[int]:
        """Return the number of the next block to send, for each space."""
        assert room.prefix_tokens is not None
        return [
            max(done, first_place(space, source.tokens, room.prefix_tokens))
            for done, space in zip(source.sent, self._layout.spaces, strict=True)
        ]

    def _handle(self, event: RoomEvent[Any]) -> None:
        source: _Source = event.room.context
        if event.kind == "matched":
            self._send(source)
        elif event.kind == "done":
            wanted = self._layout.wanted(source.tokens, event.room.prefix_tokens or 0)
            self.stats.sent(self._layout.room_bytes(wanted), time.monotonic() - source.opened_at_s)
        elif event.kind == "failed":
            assert event.error is not None
            # A request that ended here or at decode is not a failed transfer.
            if event.error.code is Code.CLIENT_GONE:
                return
            self.stats.failed(event.error.code)
            log.warning("request %s: its blocks were not sent: %s", source.request, event.error)
        elif event.kind == "released":
            self._end(source)

    def _end(self, source: _Source) -> None:
        if self._sources.get(source.request) is source:
            del self._sources[source.request]
        if source.is_over:
            self._done.add(source.request)
