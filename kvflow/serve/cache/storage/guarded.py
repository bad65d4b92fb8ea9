"""A guard around a store: calls in separate threads, with time limits and a pause after failures.

Puts, gets and lookups have separate threads, so that writes that hang do not delay reads. There are
two breakers, one for writing and one for reading and lookups, because a full disk can still be
read. An open breaker ends every call of its side at once, with the results so far, and refuses new
ones. Only probes continue, in a separate thread, and a successful one closes the breaker. Thus if a
store hangs, the calls under way end after `stall_s`, and later calls do not wait at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from kvflow.aio import Threads, run_to_end
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.limits import check_time
from kvflow.serve.cache.storage.breaker import Breaker
from kvflow.serve.cache.storage.call import Call, Slice, Work
from kvflow.serve.cache.storage.port import KEY_BYTES, Backend, Result, StorageCounts

# Largest slice of a put or get, unless one page is larger. Calls are cancelled between slices.
SLICE_BYTES = 8 << 20
SLICE_KEYS = 4096  # keys in a slice of a lookup
log = logging.getLogger("kvflow.storage")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the calls to a store, and on the time that a caller waits."""

    threads: int = 2  # threads for puts, and as many for gets; lookups have one
    waiting: int = 64  # calls of one kind that may wait for a thread; more are refused
    # A slice (8 MiB, or one page) that takes longer is a failure, although its pages are good.
    slow_s: float = 0.5
    stall_s: float = 0.8  # if a slice takes longer, its call is abandoned and the breaker opens
    failures: int = 3  # failures in a row that open a breaker
    pause_s: float = 1.0  # until the first probe; doubled by each failed probe
    max_pause_s: float = 30.0
    close_s: float = 10.0  # after `close`, calls that take longer are abandoned

    def __post_init__(self) -> None:
        for name in ("threads", "waiting", "failures"):
            if (value := getattr(self, name)) < 1:
                raise MisuseError(f"{name} {value} is below 1")
        for name in ("slow_s", "stall_s", "pause_s", "max_pause_s"):
            check_time(name, getattr(self, name), 0.001)
        check_time("close_s", self.close_s)


class GuardedStorage:
    """A `port.Storage` over a backend. `open` creates it, on the event loop that uses it."""

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self._backend, self._limits = backend, limits
        self.name = backend.name
        self.value_bytes = backend.value_bytes
        self.counts = StorageCounts()
        self._closed = False
        self._reads = _Side(backend.name, "reading", backend.probe_reads, self.counts, limits)
        self._writes = _Side(backend.name, "writing", backend.probe_writes, self.counts, limits)
        per_slice = max(1, min(backend.pages_at_once, SLICE_BYTES // self.value_bytes))
        name, threads = backend.name, limits.threads
        self._puts = _Lane(
            f"{name}-put", threads, self._writes, backend.put, per_slice, self._count_put
        )
        self._gets = _Lane(
            f"{name}-get", threads, self._reads, backend.get, per_slice, self._count_get
        )
        lookup: Work = lambda keys, _: backend.exists(keys)  # noqa: E731
        self._lookups = _Lane(f"{name}-lookup", 1, self._reads, lookup, SLICE_KEYS, lambda _: None)

    @classmethod
    async def open(cls, backend: Backend, limits: Limits | None = None) -> GuardedStorage:
        """Open `backend` in a thread, and return the store over it."""
        store = cls(backend, limits or Limits())
        try:
            await store._reads.threads.run(backend.open)
        except asyncio.CancelledError:
            await store.close()
            raise
        except BaseException:
            store._shut()
            raise
        return store

    def __repr__(self) -> str:
        sides = ", ".join(
            f"{side.what} left alone"
            for side in (self._reads, self._writes)
            if side.breaker.is_open
        )
        return f"<GuardedStorage over {self._backend!r}{', ' if sides else ''}{sides}>"

    @property
    def readable(self) -> bool:
        return not self._closed and self._gets.admits

    @property
    def writable(self) -> bool:
        return not self._closed and self._puts.admits

    @property
    def hung(self) -> int:
        """Number of abandoned calls that are still running. Each keeps a thread and its buffers."""
        return sum(lane.hung for lane in (self._puts, self._gets, self._lookups))

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Call:
        self._check_buffers(keys, buffers, writable=False)
        return self._puts.start(keys, buffers)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Call:
        self._check_buffers(keys, buffers, writable=True)
        return self._gets.start(keys, buffers)

    async def exists_prefix(self, keys: Sequence[bytes]) -> int:
        self._check(keys)
        call = self._lookups.start(keys, [memoryview(b"")] * len(keys))
        try:
            found = await asyncio.shield(call.done)
        except asyncio.CancelledError:
            # A lookup has no buffers, so there is no need to wait for its end.
            call.cancel()
            raise
        return found.index(False) if False in found else len(found)

    async def close(self) -> None:
        """Cancel every call, then close the backend. Each step may take `close_s`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        calls = [call for lane in (self._puts, self._gets, self._lookups) for call in lane.cancel()]
        probes = [probe for side in (self._reads, self._writes) if (probe := side.close())]
        try:
            ends = asyncio.gather(
                *(call.released for call in calls), *probes, return_exceptions=True
            )
            await run_to_end(ends, self._limits.close_s)
            await self._reads.threads.run(self._backend.close, within_s=self._limits.close_s)
        except TimeoutError:
            log.warning(
                "storage %s has not ended within %g s, and is left alone",
                self._backend,
                self._limits.close_s,
            )
        finally:
            self._shut()

    def _shut(self) -> None:
        for each in (self._puts, self._gets, self._lookups, self._reads, self._writes):
            each.threads.close()

    def _check(self, keys: Sequence[bytes]) -> None:
        if self._closed:
            raise MisuseError("the store is closed")
        for key in keys:
            if len(key) != KEY_BYTES:
                raise MisuseError(
                    f"a key of {len(key)} bytes is no digest of a page, which has {KEY_BYTES}"
                )

    def _check_buffers(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], *, writable: bool
    ) -> None:
        self._check(keys)
        if len(keys) != len(buffers):
            raise MisuseError(f"{len(keys)} keys and {len(buffers)} buffers")
        for buffer in buffers:
            if buffer.nbytes != self.value_bytes:
                raise MisuseError(
                    f"a buffer of {buffer.nbytes} bytes: this store's pages have {self.value_bytes}"
                )
            if buffer.itemsize != 1 or not buffer.c_contiguous:
                raise MisuseError("a buffer is not a memoryview of bytes in one piece")
            if writable and buffer.readonly:
                raise MisuseError("a buffer to read into is read-only")

    def _count_put(self, results: list[Result]) -> None:
        done = results.count(Result.DONE)
        self.counts.stored += done
        self.counts.stored_bytes += done * self.value_bytes
        self.counts.not_stored += len(results) - done

    def _count_get(self, results: list[Result]) -> None:
        done = results.count(Result.DONE)
        self.counts.read += done
        self.counts.read_bytes += done * self.value_bytes
        self.counts.not_read += len(results) - done
        self.counts.absent += results.count(Result.ABSENT)
        self.counts.damaged += results.count(Result.DAMAGED)


class _Side:
    """One side of a store, reading or writing, with its breaker and the probe that closes it."""

    def __init__(
        self, name: str, what: str, probe: Callable[[], None], counts: StorageCounts, limits: Limits
    ) -> None:
        self.what, self.counts, self.limits = what, counts, limits
        self.threads = Threads(f"{name}-probe-{what}")
        self.breaker = Breaker(limits.failures, limits.pause_s, limits.max_pause_s)
        self.lanes: list[_Lane] = []
        self._name, self._probe, self._asked_s = name, probe, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Future[None] | None = None
        self._closed = False

    def opened(self) -> None:
        """End all calls of this side, because its breaker opened, and schedule a probe."""
        self.counts.trips += 1
        log.warning(
            "storage %s: %s is left alone for %g s", self._name, self.what, self.breaker.pause_s
        )
        for lane in self.lanes:
            lane.cancel()
        self._later()

    def close(self) -> asyncio.Future[None] | None:
        """Stop scheduling probes. Return the probe under way, or None."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        probing, self._probing = self._probing, None
        return probing

    def _later(self) -> None:
        if self._closed:
            return
        self._timer = asyncio.get_running_loop().call_later(self.breaker.pause_s, self._ask)

    def _ask(self) -> None:
        self._asked_s = asyncio.get_running_loop().time()
        self._probing = self.threads.start(lambda _: self._probe()).ended
        self._probing.add_done_callback(self._answered)

    def _answered(self, probing: asyncio.Future[None]) -> None:
        error = None if probing.cancelled() else probing.exception()
        # The side was closed during the probe.
        if self._probing is not probing:
            return
        self._probing = None
        took_s = asyncio.get_running_loop().time() - self._asked_s
        # A call that takes longer than `stall_s` is abandoned, so such a probe is a failure.
        self.breaker.probed(error is None and took_s <= self.limits.stall_s)
        if self.breaker.is_open:
            why = error or f"a probe took {took_s:.1f} s"
            log.info(
                "storage %s: %s stays left alone for %g s: %s",
                self._name,
                self.what,
                self.breaker.pause_s,
                why,
            )
            self._later()
        else:
            log.warning("storage %s: %s again", self._name, self.what)


class _Lane:
    def __init__(
        self,
        name: str,
        limit: int,
        side: _Side,
        work: Work,
        per_slice: int,
        count: Callable[[list[Result]], None],
    ) -> None:
        self.threads = Threads(name, limit)
        self._limit = limit
        self._side = side
        self._work = work
        self._per_slice = per_slice
        self._count = count
        self._calls: set[Call] = set()
        side.lanes.append(self)

    @property
    def hung(self) -> int:
        return sum(call.is_stalled for call in self._calls)

    @property
    def admits(self) -> bool:
        """True while the breaker is closed and at least one thread is not hung."""
        return not self._side.breaker.is_open and self.hung < self._limit

    def start(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Call:
        stall_s = self._side.limits.stall_s
        call = Call(
            self._work, keys, buffers, self._per_slice, self._sliced, self._stalled, stall_s
        )
        call.done.add_done_callback(lambda _: self._count(call.results))
        if (
            not keys
            or not self.admits
            or len(self._calls) >= self._limit + self._side.limits.waiting
        ):
            self._side.counts.refused += bool(keys)
            call.cancel()
            return call
        self._calls.add(call)
        call.released.add_done_callback(lambda _: self._calls.discard(call))
        try:
            call.begin(self.threads)
        except RuntimeError:
            log.exception("storage: no thread is to be had")
            call.cancel()
        return call

    def cancel(self) -> list[Call]:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        return calls

    def _sliced(self, call: Call, part: Slice) -> None:
        # The result is final after a stall or a cancellation. A stall was counted already.
        if call.done.done():
            return
        call.results[part.start : part.start + len(part.results)] = part.results
        counts, breaker, limits = self._side.counts, self._side.breaker, self._side.limits
        failed, slow = Result.FAILED in part.results, part.took_s > limits.slow_s
        counts.errors += failed
        counts.slow += slow
        if not failed and not slow:
            breaker.succeed()
        elif breaker.fail():
            self._side.opened()

    def _stalled(self, call: Call) -> None:
        self._side.counts.stalls += 1
        call.cancel()
        if self._side.breaker.open():
            self._side.opened()
