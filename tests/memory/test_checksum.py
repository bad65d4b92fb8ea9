"""Checksums of pages: equal for equal content in any layout, and drained like any thread (I12)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64

from kvflow.memory import checksum, page_tasks
from kvflow.memory.checksum import PageChecksums
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.pages.layout import Order, build_layout, opaque_layout
from tests.transports.peer_process import until

LAYERS = 12  # so that "10.k" must not be summed before "9.v"
STREAMS: list[tuple[str, str, tuple[int, ...]]] = [
    (f"{i}.{kv}", "uint8", (8,)) for i in range(LAYERS) for kv in ("k", "v", "scale")
]


def pool(
    order: Order = "page_first", streams: list[tuple[str, str, tuple[int, ...]]] = STREAMS
) -> PagedPool:
    """Byte i of a component of page p depends on the component's name, p and i."""
    made = PagedPool.allocate(
        build_layout(streams, page_size=4, num_pages=16, order=order), shared=False
    )
    for component in made.layout.components:
        name = sum(component.name.encode())
        view = made.array(component.name)
        view[:] = ((np.arange(view.size) * 7 + name) % 251).reshape(view.shape)
    return made


def pages(*indices: int) -> Any:
    return np.array(indices, dtype=np.int32)


async def summed(of: PagedPool, *indices: int) -> bytes:
    return await PageChecksums(of).begin(pages(*indices)).done


async def test_equal_pages_have_equal_sums_in_any_layout() -> None:
    pools = [pool("page_first"), pool("layer_first"), pool("page_first", STREAMS[::-1])]
    for indices in ((0,), (15,), (3, 4, 5), (7, 1, 12)):
        sums = {await summed(of, *indices) for of in pools}
        assert len(sums) == 1 and len(sums.pop()) == 8


async def test_a_page_first_page_is_summed_as_one_block() -> None:
    streams = [stream for stream in STREAMS if not stream[0].endswith("scale")]
    assert len(PageChecksums(pool("page_first", streams))._sums._stores[0]) == 1
    assert len(PageChecksums(pool("layer_first", streams))._sums._stores[0]) == len(streams)


async def test_opaque_pages_are_summed_as_the_bytes_they_are() -> None:
    cut = {"z": 5, "a": 3}  # not in the order of names
    whole, parts = (
        PagedPool.allocate(opaque_layout(streams, page_size=4, num_pages=2, tag="t"), shared=False)
        for streams in ({"blob": 8}, cut)
    )
    whole.array("blob")[1] = np.arange(8)
    parts.array("z")[1], parts.array("a")[1] = np.arange(5), np.arange(5, 8)
    assert await summed(whole, 1) == await summed(parts, 1) != await summed(parts, 0)


async def test_order_number_and_every_byte_count() -> None:
    made = pool()
    seen = [await summed(made, *indices) for indices in ((1, 2), (2, 1), (1,), (2,), (1, 1))]
    before = await summed(made, 5)
    view = made.array("11.scale")
    view[5, 3, 7] ^= 1  # the last byte of the page
    seen += [before, await summed(made, 5)]
    assert len(set(seen)) == len(seen)
    view[5, 3, 7] ^= 1
    assert await summed(made, 5) == before


async def test_a_pool_the_cpu_cannot_read_is_refused() -> None:
    on_a_device = PagedPool(pool().layout, device="cuda:0")
    with pytest.raises(LayoutError, match="host memory"):
        PageChecksums(on_a_device)


def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum small pages in threads, as large ones are."""
    monkeypatch.setattr(checksum, "AT_ONCE_BYTES", 0)


class Gate:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.let_go, self.updates = threading.Event(), threading.Event(), 0
        monkeypatch.setattr(checksum, "xxh3_64", lambda: self)
        in_threads(monkeypatch)

    def update(self, _: object) -> None:
        self.updates += 1
        self.reached.set()
        assert self.let_go.wait(10)

    def digest(self) -> bytes:
        return b"whole"


async def test_small_sums_need_no_thread_up_to_a_limit_per_turn_of_the_loop() -> None:
    made = PagedPool.allocate(
        build_layout([("k", "uint8", (1 << 14,))], page_size=1, num_pages=16), shared=False
    )
    sums = PageChecksums(made)
    at_once = checksum._TURN_BYTES >> 14
    assert not sums.at_once(pages(*range(5))), "80 KiB"
    found = [sums.at_once(pages(n)) for n in range(at_once)]
    assert found == [xxh3_64(made.array("k")[n]).digest() for n in range(at_once)]
    assert not sums.at_once(pages(0)), "the bytes of this turn are used up"
    assert not sums._running
    in_thread = sums.begin(pages(0))
    assert not in_thread.done.done()
    assert await in_thread.done == found[0]
    assert sums.at_once(pages(1)) == found[1], "another turn has begun"
    await sums.close()
    assert not sums.at_once(pages(1)), "the pool may be unmapped"
    made.close()


async def test_small_sums_of_what_one_rank_served_are_those_of_its_pages() -> None:
    made = pool(streams=STREAMS[:4])
    sums = PageChecksums(made)
    whole = served_of(made.layout)
    assert sums.at_once(pages(1, 2), whole) == await sums.begin(pages(1, 2), whole).done
    assert not sums.at_once(pages(1), whole[1:]), "its parts must be gathered first"
    assert len(await sums.begin(pages(1), whole[1:]).done) == 8
    await sums.close()


async def test_many_short_stretches_are_summed_in_a_thread() -> None:
    sums = PageChecksums(pool("layer_first"))
    assert not sums.at_once(pages(1))
    await sums.close()


async def test_cancel_stops_after_the_page_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    task = PageChecksums(pool()).begin(pages(1, 2, 3))
    await asyncio.to_thread(gate.reached.wait, 10)
    task.cancel()
    task.cancel()
    assert not task.done.done()
    gate.let_go.set()
    assert await task.done == b"" and gate.updates <= len(STREAMS)


async def test_close_drains_however_often_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    sums = PageChecksums(pool())
    task = sums.begin(pages(1, 2, 3))
    await asyncio.to_thread(gate.reached.wait, 10)
    closing = asyncio.ensure_future(sums.close())
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
    await asyncio.sleep(0)
    assert not closing.done() and not task.done.done()
    gate.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert task.done.done() and gate.updates <= len(STREAMS)
    await sums.close()


async def test_a_sum_that_fails_is_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "xxh3_64", lambda: 1 / 0)
    in_threads(monkeypatch)
    assert await PageChecksums(pool()).begin(pages(1)).done == b""


async def test_a_sum_that_hangs_is_none_in_time_and_its_pages_are_released_when_its_thread_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    sums = PageChecksums(pool(), within_s=60)
    task = sums.begin(pages(1, 2, 3))
    assert await asyncio.to_thread(gate.reached.wait, 20)
    task._expire()  # as its timer does
    assert await asyncio.wait_for(task.done, 10) == b""
    assert task.error == "the checksum took longer than 60 s"
    assert not task.released.done() and "0 under way, 1 hung" in repr(sums)
    gate.let_go.set()
    await asyncio.wait_for(task.released, 10)
    assert gate.updates <= len(STREAMS) and "0 hung" in repr(sums)
    await sums.close()


async def test_a_sum_whose_turn_does_not_come_in_time_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(page_tasks, "THREADS", 1)
    sums = PageChecksums(pool(), within_s=60)
    hangs = sums.begin(pages(1))
    assert await asyncio.to_thread(gate.reached.wait, 20)
    sums._within_s = 0.2
    waits = sums.begin(pages(2))
    sums._within_s = 60
    await asyncio.wait_for(waits.released, 10)
    assert waits.done.result() == b""
    assert "longer than 0.2 s" in waits.error
    assert not hangs.released.done()
    gate.let_go.set()
    await asyncio.wait_for(hangs.released, 10)
    updates = gate.updates
    assert await asyncio.wait_for(sums.begin(pages(1)).done, 10) == b"whole"
    assert gate.updates == updates + len(sums._sums._stores[0]), (
        "the one that was given up was never read"
    )
    await sums.close()


async def test_where_no_thread_is_to_be_had_there_is_no_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    in_threads(monkeypatch)
    sums = PageChecksums(pool())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        task = sums.begin(pages(1))
        assert await task.done == b"" and "no thread" in task.error and task.released.done()
    assert len(await sums.begin(pages(1)).done) == 8
    await sums.close()
    monkeypatch.undo()
    assert await sums.begin(pages(1)).done == b"", "nothing is read past the end"


async def test_close_leaves_a_hung_sum_alone_whose_memory_stays_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(page_tasks, "CLOSE_S", 0.05)
    made = pool()
    (buffer,) = made.layout.buffers
    sums = PageChecksums(made)
    task = sums.begin(pages(1, 2, 3))
    await asyncio.to_thread(gate.reached.wait, 10)
    await asyncio.wait_for(sums.close(), 10)
    made.close()
    del made
    start = f"{buffer.address:x}-"
    assert start in mappings() and not task.released.done()
    gate.let_go.set()
    await asyncio.wait_for(task.released, 10)
    del task, sums
    await until(lambda: start not in mappings())


def mappings() -> str:
    return "\n" + Path("/proc/self/maps").read_text()
