"""One stream of cache events: which batch comes next, which are kept for replay, and what is sent
where they are not.

**A gap is announced, in words that every subscriber knows**: AllBlocksCleared, and then all that is
cached as stored blocks. So a stream begins, whatever an earlier process has sent from its address;
so it goes on where events have been recorded faster than they are sent, in batches with the numbers
that follow; and so a replay begins that asks for batches which are not kept any more, all of it in
one batch with the number that was asked for.

Events are about sets: who applies those up to the newest batch after a snapshot that is newer than
they, has what the newest says.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple, Protocol

from kvflow.protocols.cache.events import CLEARED, Cleared, Event, Stored
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.wire.kv_events import BatchEncoder

BATCH_BYTES = 256 * 1024  # of tokens and hashes, in memory: about a third of a millisecond of work


class EventSource(Protocol):
    """A `PrefixIndex` that records events, or several of them as one."""

    def take_events(self) -> list[Event]: ...

    def snapshot_events(self) -> list[Event]: ...


class Batch(NamedTuple):
    seq: int
    payload: bytes


class StreamLimits(NamedTuple):
    """How much is kept for replays, and how much may wait to be sent before it is replaced by a
    snapshot.
    """

    kept_batches: int = 10_000
    kept_bytes: int = 64 << 20
    waiting_bytes: int = 256 << 20  # as BATCH_BYTES counts

    def check(self) -> StreamLimits:
        """Raises: MisuseError."""
        for name, value in zip(self._fields, self, strict=True):
            if value < 1:
                raise MisuseError(f"{name} {value}: at least 1 is needed")
        return self


class EventStream:
    """Numbers batches from `first_seq` and keeps the last ones. No socket, no clock."""

    def __init__(
        self,
        source: EventSource,
        encoder: BatchEncoder,
        limits: StreamLimits | None = None,
        *,
        first_seq: int = 0,
    ) -> None:
        """Raises: MisuseError."""
        self._source, self.encoder, self._limits = (
            source,
            encoder,
            (limits or StreamLimits()).check(),
        )
        self._kept: deque[Batch] = deque()
        self._kept_bytes = 0
        self._waiting: deque[Event] = deque()
        self._waiting_bytes = self._may_wait = 0
        self.next_seq = first_seq
        # Times that events were replaced by a snapshot, the beginning not counted.
        self.num_resets = 0
        self._begin_anew()

    def next_batch(self, ts: float) -> Batch | None:
        """Take what the source has recorded; the next batch to send, if there is anything to say.

        `ts`: seconds since the epoch."""
        events = self._source.take_events()
        self._waiting.extend(events)
        self._waiting_bytes += sum(map(_num_bytes, events))
        if self._waiting_bytes > self._may_wait:
            self.num_resets += 1
            self._begin_anew()
        if not self._waiting:
            return None
        batch: list[Event] = []
        size = 0
        while self._waiting and size < BATCH_BYTES:
            batch.append(self._waiting.popleft())
            size += _num_bytes(batch[-1])
        self._waiting_bytes -= size
        if not self._waiting:
            self._may_wait = self._limits.waiting_bytes
        return self._numbered(self.encoder.encode(batch, ts))

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def heartbeat(self, ts: float) -> Batch:
        """A batch of no events: who has missed the last one before it sees that by its number."""
        return self._numbered(self.encoder.encode((), ts))

    def kept_from(self, seq: int) -> list[Batch] | None:
        """All batches from number `seq` on; None if not all of them are kept."""
        if seq >= self.next_seq:
            return []
        oldest = self._kept[0].seq if self._kept else self.next_seq
        return None if seq < oldest else list(islice(self._kept, seq - oldest, None))

    def snapshot(self) -> list[Event]:
        """What a subscriber should know that has applied all batches up to the newest.

        Only while nothing waits.
        """
        assert not self._waiting
        return [CLEARED, *self._source.snapshot_events()]

    def _begin_anew(self) -> None:
        self._source.take_events()  # they are in the snapshot
        self._waiting = deque([CLEARED, *self._source.snapshot_events()])
        self._waiting_bytes = sum(map(_num_bytes, self._waiting))
        self._may_wait = self._waiting_bytes + self._limits.waiting_bytes

    def _numbered(self, payload: bytes) -> Batch:
        batch = Batch(self.next_seq, payload)
        self.next_seq += 1
        self._kept.append(batch)
        self._kept_bytes += len(payload)
        while len(self._kept) > self._limits.kept_batches or (
            self._kept_bytes > self._limits.kept_bytes and len(self._kept) > 1
        ):
            self._kept_bytes -= len(self._kept.popleft().payload)
        return batch


def _num_bytes(event: Event) -> int:
    if isinstance(event, Cleared):
        return 1
    return event.digests.nbytes + (len(event.tokens) if isinstance(event, Stored) else 0)
