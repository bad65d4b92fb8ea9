"""One stream of cache events: the next batch to send, the batches kept for replay, and the snapshot
that replaces lost batches.

**A gap is announced in terms that every subscriber knows**: AllBlocksCleared, and then the whole
cache as stored blocks. There are three cases. A stream begins with such a snapshot, because an
earlier process may have sent other events from the same address. When the source records events
faster than they are sent, a snapshot replaces the events that wait, in batches with the next
numbers. When a subscriber requests batches that are no longer kept, the replay begins with a
snapshot. This snapshot is one batch. Its number is the requested one or the newest one, whichever
is lower.

Events describe sets. A subscriber may apply a snapshot first and older batches after it. It has the
right set once it applies the newest batch.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple, Protocol

from kvflow.protocols.cache.events import CLEARED, Cleared, Event, Stored
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.wire.kv_events import BatchEncoder

# A batch is full when its tokens and hashes have at least this many bytes. Encoding a batch of this
# size blocks the event loop for about a third of a millisecond.
BATCH_BYTES = 256 * 1024


class EventSource(Protocol):
    """Source of events: one `PrefixIndex` that records them, or several combined."""

    def take_events(self) -> list[Event]: ...

    def snapshot_events(self) -> list[Event]: ...


class Batch(NamedTuple):
    seq: int
    payload: bytes


class StreamLimits(NamedTuple):
    """Limits on the batches kept for replays, and on the events that may wait to be sent before a
    snapshot replaces them.
    """

    kept_batches: int = 10_000
    kept_bytes: int = 64 << 20
    waiting_bytes: int = 256 << 20  # counted in the same way as BATCH_BYTES

    def check(self) -> StreamLimits:
        """Return these limits. Raises: MisuseError for a limit below 1."""
        for name, value in zip(self._fields, self, strict=True):
            if value < 1:
                raise MisuseError(f"{name} {value}: at least 1 is needed")
        return self


class EventStream:
    """A stream of batches, numbered from `first_seq`. It keeps the latest batches for replay."""

    def __init__(
        self,
        source: EventSource,
        encoder: BatchEncoder,
        limits: StreamLimits | None = None,
        *,
        first_seq: int = 0,
    ) -> None:
        """Begin a stream with a snapshot of `source`. Raises: MisuseError for a limit below 1."""
        self._source, self.encoder = source, encoder
        self._limits = (limits or StreamLimits()).check()
        self._kept: deque[Batch] = deque()
        self._kept_bytes = 0
        self._waiting: deque[Event] = deque()
        self._waiting_bytes = self._may_wait = 0
        self.next_seq = first_seq
        self.num_resets = 0  # snapshots that replaced events; the first one does not count
        self._begin_anew()

    def next_batch(self, ts: float) -> Batch | None:
        """Take the events that the source recorded, and return the next batch to send. Returns None
        if no event waits. `ts`: seconds since the epoch.
        """
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
        # Otherwise, a snapshot larger than the limit would be replaced by another one, again and
        # again. So its size is allowed on top of the limit until all of it is sent.
        if not self._waiting:
            self._may_wait = self._limits.waiting_bytes
        return self._numbered(self.encoder.encode(batch, ts))

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def heartbeat(self, ts: float) -> Batch:
        """Return a batch without events. Its number lets a subscriber notice that it missed a
        batch.
        """
        return self._numbered(self.encoder.encode((), ts))

    def kept_from(self, seq: int) -> list[Batch] | None:
        """Return all batches from number `seq` on, or None if some of them are no longer kept."""
        if seq >= self.next_seq:
            return []
        oldest = self._kept[0].seq if self._kept else self.next_seq
        return None if seq < oldest else list(islice(self._kept, seq - oldest, None))

    def snapshot(self) -> list[Event]:
        """Return a snapshot, which replaces all batches. Call this only while no event waits."""
        assert not self._waiting
        return [CLEARED, *self._source.snapshot_events()]

    def _begin_anew(self) -> None:
        # Drop the events that the source recorded: the snapshot already contains their effect.
        self._source.take_events()
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
