"""Calls end in time whatever the store does, and hold their buffers until they really end."""

from __future__ import annotations

import asyncio
import errno
import gc
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.serve.cache.storage.file import PAGES_AT_ONCE
from kvflow.serve.cache.storage.guarded import GuardedStorage, Limits, _Side
from kvflow.serve.cache.storage.port import StorageCounts
from kvflow.serve.cache.storage.record import HEADER_BYTES
from tests.serve.cache.storage.files import (
    QUICK,
    VALUE_BYTES,
    FaultyDisk,
    backend,
    empty,
    ended,
    keys,
    pages_in,
    read,
    store,
    value,
    values,
    wrote,
)
from tests.serve.engine.pair import until

PER_SLICE = PAGES_AT_ONCE
ONE_THREAD: dict[str, Any] = {"threads": 1, "waiting": 2}


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


async def test_pages_come_back_and_leading_ones_are_counted(tmp_path: Path) -> None:
    async with store(tmp_path) as pages:
        assert await wrote(pages, 1, 2, 4) == [True] * 3
        assert await read(pages, 4, 3, 2, 1) == [True, False, True, True]
        asked = ((1, 2, 3, 4), (1, 2), (3, 4), ())
        assert [await pages.exists_prefix(keys(*n)) for n in asked] == [2, 2, 0, 0]
        counts = pages.counts
        assert (counts.stored, counts.not_stored, counts.stored_bytes) == (3, 0, 3 * VALUE_BYTES)
        assert (counts.read, counts.not_read, counts.absent) == (3, 1, 1)
        assert counts.read_bytes == 3 * VALUE_BYTES
        assert await wrote(pages) == []
        assert (counts.errors, counts.trips, counts.refused) == (0, 0, 0)
        await wrote(pages, 1, 5)
        await read(pages, 5, 6, 7)
        assert (counts.stored, counts.stored_bytes) == (5, 5 * VALUE_BYTES)
        assert (counts.read, counts.not_read, counts.absent) == (4, 3, 3)
        assert counts.read_bytes == 4 * VALUE_BYTES


async def test_pages_that_are_damaged_are_counted_as_such(tmp_path: Path) -> None:
    async with store(tmp_path) as pages:
        for n in (1, 2):
            await wrote(pages, n)
            pages_in(tmp_path)[0].write_bytes(bytes(VALUE_BYTES + HEADER_BYTES))
            assert await read(pages, n) == [False]
        counts = pages.counts
        assert (counts.damaged, counts.not_read, counts.absent, counts.errors) == (2, 2, 0, 0)


async def test_a_read_that_hangs_is_given_up_and_holds_its_buffers_until_it_returns(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    # Nothing but the read that hangs may take as long, on a busy machine either.
    async with store(tmp_path, disk=disk, stall_s=1) as pages:
        assert await wrote(pages, 1) == [True]
        disk.hold("read")
        memory = bytearray(VALUE_BYTES)
        call = pages.get(keys(1), [memoryview(memory)])
        assert await asyncio.shield(call.done) == [False]  # though the disk hangs on
        assert not call.released.done()
        assert not pages.readable
        for _ in range(3):  # nobody waits for it again
            assert await read(pages, 1) == [False]
            assert await pages.exists_prefix(keys(1)) == 0
            assert pages.counts.stalls == 1
        assert await wrote(pages, 2) == [True]  # writing is another matter
        with pytest.raises(BufferError):
            memory.clear()
        assert pages.hung == 1
        disk.go_on()
        await ended(call)
        assert await asyncio.shield(call.done) == [False]  # what was said stays said
        gc.collect()
        memory.clear()
        await until(lambda: pages.readable)
        assert pages.hung == 0
        assert await read(pages, 1, 2) == [True, True]
        assert (pages.counts.stalls, pages.counts.trips, pages.counts.refused) == (1, 1, 6)


async def test_a_probe_that_answers_too_late_proves_nothing() -> None:
    """As a call of that length would not."""
    go = threading.Event()

    def probe() -> None:
        assert go.wait(20)

    side = _Side("slow", "reading", probe, StorageCounts(), QUICK)
    side.breaker.open()
    side.opened()
    await until(lambda: side._probing is not None)
    side._asked_s -= QUICK.stall_s + 1
    late = side._probing
    go.set()
    await until(lambda: side._probing is not late)
    assert side.breaker.is_open
    await until(lambda: not side.breaker.is_open)
    side.close()


async def test_a_store_is_left_alone_while_its_threads_hang_even_if_a_probe_works(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    async with store(tmp_path, disk=disk, stall_s=1, **ONE_THREAD) as pages:
        go = disk.hold("rename")  # a probe renames nothing
        first, second = (pages.put(keys(n), values(n)) for n in (1, 2))
        assert await ended(second) == [False]  # it waited for the first, and never began
        assert not first.released.done()
        await until(lambda: not pages._writes.breaker.is_open)
        assert not pages.writable
        assert await wrote(pages, 3) == [False]
        disk.fails["rename"] = errno.EIO  # late news of the call that was given up
        go.set()
        await ended(first)
        await until(lambda: pages.writable)
        disk.fails.clear()
        assert (pages.counts.trips, pages.counts.errors) == (1, 0)
        assert await wrote(pages, 3) == [True]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
async def test_a_disk_that_cannot_be_written_is_read_on_and_written_again_when_it_can(
    tmp_path: Path, disk: FaultyDisk, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with store(tmp_path, disk=disk) as pages:
        assert await wrote(pages, 0) == [True]
        disk.fails["write"] = number
        for n in range(QUICK.failures):
            assert pages.writable
            assert await wrote(pages, n, 8) == [n == 0, False]
        assert not pages.writable
        assert pages.counts.errors == QUICK.failures
        before = disk.counted["write"]
        assert await wrote(pages, 5) == [False]
        assert await read(pages, 0, 8) == [True, False]
        assert await pages.exists_prefix(keys(0, 8)) == 1
        await until(lambda: disk.counted["write"] >= before + 2)  # probes fail
        told = f"storage file: writing stays left alone for .*{errno.errorcode[number]}$"
        await until(lambda: any(re.match(told, record.getMessage()) for record in caplog.records))
        assert not pages.writable
        disk.fails.clear()
        await until(lambda: pages.writable)
        assert await wrote(pages, 5, 8) == [True, True]
        assert await read(pages, 5, 8) == [True, True]
        assert pages.counts.trips == 1


async def test_a_disk_that_cannot_be_read_is_written_on(tmp_path: Path, disk: FaultyDisk) -> None:
    async with store(tmp_path, disk=disk) as pages:
        await wrote(pages, 1)
        disk.fails["read"] = errno.EIO
        for _ in range(QUICK.failures):
            assert await read(pages, 1) == [False]
        assert not pages.readable
        assert "reading left alone" in repr(pages)
        assert await wrote(pages, 2) == [True]
        disk.fails.clear()
        await until(lambda: pages.readable)
        assert await read(pages, 1, 2) == [True, True]
        assert "left alone" not in repr(pages)


async def test_a_slow_disk_is_left_alone_and_what_it_has_read_is_used(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    async with store(tmp_path, disk=disk, slow_s=0.05, failures=2) as pages:
        await wrote(pages, 1)
        slow = pages.counts.slow
        for left in (1, 0):
            go = disk.hold("read")
            call = pages.get(keys(1), into := empty(1))
            await disk.waited()
            await asyncio.sleep(0.06)  # as long as the disk takes
            disk.hold("read")  # so that no probe ends before the breaker was looked at
            go.set()
            assert await ended(call) == [True]
            assert into == values(1)
            assert pages.readable == bool(left)
        disk.go_on()
        await until(lambda: pages.readable)
        counts = pages.counts
        assert (counts.slow - slow, counts.errors, counts.stalls) == (2, 0, 0)


async def test_what_is_cancelled_begins_no_further_slice_and_is_awaited(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    async with store(tmp_path, pages=3 * PER_SLICE, disk=disk, **ONE_THREAD) as pages:
        count = 2 * PER_SLICE
        go = disk.hold("write")
        one = value(1)
        running = pages.put(keys(*range(count)), [one] * count)
        waiting = pages.put(keys(count), values(1))
        await disk.waited()
        waiting.cancel()
        assert waiting.released.done()
        running.cancel()
        running.cancel()
        assert await asyncio.shield(running.done) == [False] * count
        assert not running.released.done()
        go.set()
        await ended(running)
        assert disk.counted["write"] == PER_SLICE  # the slice that was under way, and no other
        assert await pages.exists_prefix(keys(*range(count + 1))) == PER_SLICE
        assert pages.writable
        assert pages.counts.not_stored == count + 1


async def test_who_cancels_the_answer_cancels_the_call(tmp_path: Path, disk: FaultyDisk) -> None:
    async with store(tmp_path, disk=disk) as pages:
        go = disk.hold("write")
        count = 3 * PER_SLICE
        call = pages.put(keys(*range(count)), [value(1)] * count)
        await disk.waited()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.done, 0.01)
        assert not call.released.done()
        go.set()
        async with asyncio.timeout(20):
            await call.released
        assert await pages.exists_prefix(keys(*range(count))) == PER_SLICE


async def test_a_cancelled_call_that_then_hangs_opens_the_breaker_too(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    async with store(tmp_path, disk=disk, stall_s=0.1, **ONE_THREAD) as pages:
        go = disk.hold("write")
        call = pages.put(keys(1), values(1))
        await disk.waited()
        call.cancel()
        behind = pages.put(keys(2), values(2))
        assert await ended(behind) == [False]
        assert not pages.writable
        go.set()
        await ended(call)


async def test_too_many_calls_are_refused(tmp_path: Path, disk: FaultyDisk) -> None:
    async with store(tmp_path, disk=disk, **ONE_THREAD) as pages:
        go = disk.hold("write")
        calls = [pages.put(keys(n), values(n)) for n in range(5)]
        assert [call.released.done() for call in calls] == [False, False, False, True, True]
        assert pages.counts.refused == 2
        go.set()
        assert [await ended(call) for call in calls] == [[True]] * 3 + [[False]] * 2


async def test_a_call_without_a_thread_fails_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with store(tmp_path) as pages:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert await wrote(pages, 1) == [False]
        assert await wrote(pages, 1) == [True]


async def test_a_cancelled_lookup_keeps_no_other_waiting(tmp_path: Path) -> None:
    async with store(tmp_path) as pages:
        await wrote(pages, 1)
        asked = [asyncio.ensure_future(pages.exists_prefix(keys(1))) for _ in range(3)]
        await asyncio.sleep(0)
        for lookup in asked[:2]:
            lookup.cancel()
        assert await asked[2] == 1
        assert all(lookup.cancelled() for lookup in asked[:2])


async def test_close_drains_what_runs(tmp_path: Path, disk: FaultyDisk) -> None:
    pages = await GuardedStorage.open(backend(tmp_path, disk=disk), QUICK)
    go = disk.hold("write")
    call = pages.put(keys(1), values(1))
    await disk.waited()
    closing = asyncio.ensure_future(pages.close())
    await until(call.done.done)
    closing.cancel()  # a cancel skips no drain
    assert not closing.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert call.released.done()
    for ask in (pages.put, pages.get):
        with pytest.raises(MisuseError, match="the store is closed"):
            ask(keys(1), empty(1))
    with pytest.raises(MisuseError, match="the store is closed"):
        await pages.exists_prefix(keys(1))
    await pages.close()


async def test_close_waits_for_a_probe_that_fails_and_asks_no_more(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    limits = msgspec.structs.replace(QUICK, failures=1)
    pages = await GuardedStorage.open(backend(tmp_path, disk=disk), limits)
    disk.fails["write"] = errno.EIO
    assert await wrote(pages, 1) == [False]
    go = disk.hold("write")
    await disk.waited()
    closing = asyncio.ensure_future(pages.close())
    await asyncio.sleep(0)
    go.set()
    await closing
    again = backend(tmp_path)
    again.open()  # nothing holds the directory
    again.close()


async def test_close_ends_a_pause_without_a_probe(tmp_path: Path, disk: FaultyDisk) -> None:
    async with store(tmp_path, disk=disk, failures=1) as pages:
        disk.fails["write"] = errno.EIO
        assert await wrote(pages, 1) == [False]
        timer = pages._writes._timer
        assert timer is not None and not timer.cancelled()
        await pages.close()
        assert timer.cancelled(), "its threads are gone"


async def test_close_leaves_what_hangs_alone(tmp_path: Path, disk: FaultyDisk) -> None:
    limits = msgspec.structs.replace(QUICK, close_s=0.1)
    pages = await GuardedStorage.open(backend(tmp_path, disk=disk), limits)
    go = disk.hold("write")
    call = pages.put(keys(1), values(1))
    await disk.waited()
    await pages.close()
    assert not call.released.done()
    with pytest.raises(MisuseError, match="in use by process"):  # its thread may still write
        backend(tmp_path).open()
    go.set()
    await ended(call)
    pages._backend.close()


async def test_a_store_that_does_not_open_says_why(tmp_path: Path) -> None:
    async with store(tmp_path):
        with pytest.raises(MisuseError, match="in use by process"):
            await GuardedStorage.open(backend(tmp_path), QUICK)


async def test_nothing_holds_the_buffers_of_a_call_that_has_ended(tmp_path: Path) -> None:
    class Memory(bytearray):
        """One that can be watched."""

    async with store(tmp_path) as pages:
        memory = Memory(VALUE_BYTES)
        watched = weakref.ref(memory)
        call = pages.put(keys(1), [memoryview(memory)])
        del memory
        assert await ended(call) == [True]
        await until(lambda: watched() is None)


NO_BYTES = "a buffer is not a memoryview of bytes in one piece"


@pytest.mark.parametrize(
    ("given", "buffers", "text"),
    [
        ([b"short"], empty(1), "a key of 5 bytes is no digest of a page, which has 32"),
        (keys(1), [], "1 keys and 0 buffers"),
        (keys(1), empty(1, 10), f"a buffer of 10 bytes: this store's pages have {VALUE_BYTES}"),
        (keys(1), [memoryview(bytes(VALUE_BYTES))], "a buffer to read into is read-only"),
        (keys(1), [np.zeros(VALUE_BYTES // 5, "V5").data], NO_BYTES),
        (keys(1), [memoryview(bytearray(2 * VALUE_BYTES))[::2]], NO_BYTES),
    ],
)
async def test_misuse_is_named(
    tmp_path: Path, given: list[bytes], buffers: list[memoryview], text: str
) -> None:
    async with store(tmp_path) as pages:
        with pytest.raises(MisuseError, match=text):
            pages.get(given, buffers)
        if "read-only" in text:
            assert await ended(pages.put(given, buffers)) == [True]
        else:
            with pytest.raises(MisuseError, match=text):
                pages.put(given, buffers)


@pytest.mark.parametrize(
    ("field", "wrong", "text"),
    [
        ("threads", 0, "threads 0 is below 1"),
        ("stall_s", 0.0, "stall_s 0.0 is not a number of seconds between 0.001"),
        ("close_s", -1.0, "close_s -1.0 is not a number of seconds between 0"),
    ],
)
def test_limits_are_checked(field: str, wrong: float, text: str) -> None:
    with pytest.raises(MisuseError, match=text):
        Limits(**{field: wrong})  # type: ignore[arg-type]


async def test_a_closed_store_is_asked_no_more(tmp_path: Path, disk: FaultyDisk) -> None:
    """A call that hangs is found to do so after the store was closed."""
    async with store(tmp_path, disk=disk) as pages:
        assert await wrote(pages, 1) == [True]
    async with store(tmp_path, disk=disk, close_s=0.01) as pages:
        go = disk.hold("read")
        call = pages.get(keys(1), empty(1))
        await disk.waited()
        await pages.close()
        call._stall_s = 0.0
        call._look()
        assert call.is_stalled
        assert pages._reads._timer is None, "it would be probed, with its threads gone"
        go.set()
        await asyncio.shield(call.released)
