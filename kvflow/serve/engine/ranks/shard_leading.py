"""The first shard's side of decode steps that all shards run."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Protocol

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import KvflowError, LostError, MisuseError
from kvflow.protocols.limits import Timing
from kvflow.serve.engine.model.sequence import Sequence as TokenSequence
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.ranks import shard_wire as wire
from kvflow.transports.host.identity import open_process

log = logging.getLogger("kvflow.serve.engine")
TIMING = Timing()
_REASON_S = 0.1


class ShardGroupPort(Protocol):
    """The connections that the shards use within a step."""

    def abort(self) -> None:
        """Make a step that waits for another shard raise, and every later step too.

        Any thread may call this.
        """


class _Shard:
    def __init__(self, number: int, link: wire.ShardLink) -> None:
        self.number, self.link = number, link
        # The last step that ended at this shard; 0 after it mapped the pool, -1 before.
        self.ended = -1
        self.pid, self.process = 0, -1  # `process` is a pidfd, -1 if there is none
        self.silent_s = 0.0
        self.is_up = False


class _Told:
    """A sequence that the other shards know, and how many of its pages they know.

    This keeps the sequence alive as long as the shards know it, so that no other object gets its
    `id`.
    """

    __slots__ = ("number", "pages", "sequence")

    def __init__(self, number: int, sequence: TokenSequence) -> None:
        self.number, self.sequence, self.pages = number, sequence, 0


class ShardLeader:
    """Implements `Followers` over the links to the other shards, which are numbered from 1.

    A step ends when every shard reports its end. If a shard is lost, closes its connection or falls
    silent, or if a step fails anywhere, no further step can run, and the first shard kills the
    processes of all others. A wait for the end of a step then returns only when they are dead,
    since until then they may write into the pool.
    """

    def __init__(
        self,
        links: Sequence[wire.ShardLink],
        group: ShardGroupPort,
        on_lost: Callable[[LostError], None],
        timing: Timing = TIMING,
    ) -> None:
        """`on_lost` is called at most once, in any thread."""
        self.shards = [_Shard(number, link) for number, link in enumerate(links, 1)]
        self._group, self._on_lost, self._timing = group, on_lost, timing
        self._changed = threading.Condition()
        self._broken: LostError | None = None
        self._closing = False
        self._step = 0
        self._numbers = 0
        self._told: dict[int, _Told] = {}  # by `id` of the sequence
        self._reader = threading.Thread(target=self._read, name="kvflow-shards", daemon=True)

    def __repr__(self) -> str:
        return (
            f"<ShardLeader of {len(self.shards)} others, step "
            f"{self._step}{', broken' if self._broken else ''}>"
        )

    def start(self) -> None:
        self._reader.start()

    def share(self, pool: PagedPool) -> None:
        """Let the other shards map `pool`; block until all of them have.

        Raises: LostError if a shard is lost, MisuseError if the pool's memory cannot be shared.
        """
        segment = pool.segment
        if segment is None:
            raise MisuseError("the pool of several shards has to be in memory that they can open")
        self._wait_until(lambda: all(shard.is_up for shard in self.shards))
        message = wire.MapPool(os.getpid(), segment.fd, pool.layout)
        self._send(message)
        self._wait_until(lambda: all(shard.ended >= 0 for shard in self.shards))
        self.check()

    def close(self) -> None:
        """Close the links, which ends the other shards. No step may run. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for shard in self.shards:
            shard.link.abort()
        if self._reader.is_alive():
            self._reader.join()
        for shard in self.shards:
            shard.link.close()
            if shard.process >= 0:
                os.close(shard.process)
                shard.process = -1

    @property
    def sequences(self) -> int:
        return len(self._told)

    def lost(self, number: int, why: str) -> None:
        """Report that a shard is lost, and why. Any thread may call this."""
        self._lose(LostError(f"shard {number} of the model is gone: {why}"))

    # --- Followers

    def check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def announce(self, rows: list[Row]) -> None:
        self.check()
        plan = wire.Plan(self._step + 1, self._planned(rows))
        # The step counts even if sending fails, because some shard may have received the plan.
        self._step += 1
        self._send(plan)

    def rest(self) -> None:
        if self._told and self._broken is None:
            self._told = {}
            with suppress(LostError):
                self._send(wire.Rest())

    def failed(self, error: Exception) -> LostError:
        if isinstance(error, LostError):
            self._wait_for_reason()
        what = error if isinstance(error, LostError) else type(error).__name__
        self._lose(LostError(f"a decode step failed at the first shard: {what}"))
        return self._broken or LostError(str(error))

    def wait(self) -> None:
        step = self._step
        self._wait_until(lambda: all(shard.ended >= step for shard in self.shards))
        if self._broken is not None:
            self._wait_dead()

    # --- plans

    def _planned(self, rows: list[Row]) -> tuple[wire.PlannedRow, ...]:
        before, self._told = self._told, {}
        return tuple(self._planned_row(row, before) for row in rows)

    def _planned_row(self, row: Row, before: dict[int, _Told]) -> wire.PlannedRow:
        s = row.sequence
        told, capacity = before.get(id(s)), 0
        if told is None:
            self._numbers += 1
            told, capacity = _Told(self._numbers, s), s.tokens.size
        self._told[id(s)] = told
        pages = s.pages[told.pages :].tobytes()
        told.pages = s.page_count
        return wire.PlannedRow(
            told.number,
            s.computed,
            s.tokens[s.computed : row.end].tobytes(),
            row.logits,
            pages,
            capacity,
            s.rows.tobytes() if capacity else b"",
        )

    def _send(self, message: wire.ToOtherShards) -> None:
        for shard in self.shards:
            try:
                shard.link.send(message)
            except LostError as error:
                self.lost(shard.number, str(error))
                raise

    # --- ends

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`, a lost shard or `close`; the caller checks which it was."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or self._closing or condition())

    def _wait_for_reason(self) -> None:
        """Wait briefly for a call of `lost`, which states why a link broke."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or self._closing, _REASON_S)

    def _wait_dead(self) -> None:
        for shard in self.shards:
            if shard.process >= 0:
                poll = select.poll()
                poll.register(shard.process, select.POLLIN)
                poll.poll()

    def _lose(self, error: LostError) -> None:
        with self._changed:
            if self._broken is not None or self._closing:
                return
            self._broken = error
            for shard in self.shards:
                shard.is_up = False
                if shard.process >= 0:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(shard.process, signal.SIGKILL)
            self._changed.notify_all()
        log.error("%s", error)
        self._group.abort()
        for shard in self.shards:
            shard.link.abort()
        self._on_lost(error)

    # --- what the others say

    def _read(self) -> None:
        """Receive the reports in a separate thread, because the model thread waits for them."""
        now_s = time.monotonic()
        while not self._closing and self._broken is None:
            ready = wait([shard.link.fileno() for shard in self.shards], self._timing.heartbeat_s)
            before_s, now_s = now_s, time.monotonic()
            # This process may pause, so a round adds at most a heartbeat interval to a silence.
            passed_s = min(now_s - before_s, self._timing.heartbeat_s)
            for shard in self.shards:
                if shard.link.fileno() in ready:
                    shard.silent_s = 0.0
                    self._hear(shard)
                elif shard.is_up:
                    shard.silent_s += passed_s
                    if shard.silent_s > self._timing.lost_after_s:
                        self.lost(
                            shard.number, f"it was silent for {self._timing.lost_after_s:g} s"
                        )

    def _hear(self, shard: _Shard) -> None:
        try:
            message = wire.parse_at_first(shard.link.receive())
            if isinstance(message, wire.Hello):
                shard.pid, shard.process = message.process.pid, open_process(message.process)
        except LostError:
            self._wait_for_reason()
            self.lost(shard.number, "it has ended")
            return
        except (KvflowError, OSError) as error:
            self.lost(shard.number, str(error))
            return
        with self._changed:
            if isinstance(message, wire.Hello):
                shard.is_up = self._broken is None
            elif isinstance(message, wire.Ended):
                shard.ended = max(shard.ended, message.step)
            self._changed.notify_all()
