"""Copies have ended when they return, in error too; tests/gpu runs the CUDA calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.memory import copies
from kvflow.memory.copies import (
    SMALL_BYTES,
    CudaCopier,
    HostCopier,
    are_small,
    copier_for,
    copy_small,
)
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.pages.plan import Blocks


class Device:
    """Both halves of a CUDA stream: a queued block is copied when it is waited for."""

    cuda_stream = 7

    def __init__(self, *_: Any) -> None:
        self.queued: list[tuple[int, int, int]] = []
        self.registered: dict[int, int] = {}
        self.refuses = self.fails = False

    def queue(self, blocks: Blocks, stream: int) -> None:
        assert stream == self.cuda_stream
        for n, block in enumerate(zip(*(column.tolist() for column in blocks), strict=True)):
            if self.refuses and n:
                raise TransferError("a copy was refused: invalid argument (cudaError 1)")
            self.queued.append(block)

    def synchronize(self) -> None:
        for source, target, size in self.queued:
            ctypes.memmove(target, source, size)
        self.queued.clear()
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def attribute(self, which: int, device: int) -> int:
        return 0

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        if self.refuses:
            return 2
        self.registered[address] = size_bytes
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def explain(self, status: int) -> str:
        return f"out of memory (cudaError {status})"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: found)
    monkeypatch.setattr(copies, "Runtime", lambda path: found)
    monkeypatch.setattr(copies, "_on", lambda device: nullcontext())
    return found


def blocks(*each: tuple[Any, Any]) -> Blocks:
    columns = [
        [a.ctypes.data for a, _ in each],
        [b.ctypes.data for _, b in each],
        [a.nbytes for a, _ in each],
    ]
    return Blocks(*(np.array(column, dtype=np.int64) for column in columns))


def arrays() -> list[Any]:
    return [np.full(1 << 16, n, dtype=np.uint8) for n in (1, 2, 0, 0)]


def test_a_copy_has_ended_when_it_returns(device: Device) -> None:
    a, b, c, d = arrays()
    for copier in (HostCopier(), copier_for(PagedPool(pool_layout(), device="cuda:0"))):
        c[:] = d[:] = 0
        copier.copy(blocks((a, c), (b, d)))
        assert c.tobytes() == a.tobytes() and d.tobytes() == b.tobytes()


def test_what_was_queued_before_a_failure_has_ended_too(device: Device) -> None:
    a, b, c, d = arrays()
    device.refuses = True
    with pytest.raises(TransferError, match="refused"):
        CudaCopier("cuda:0").copy(blocks((a, c), (b, d)))
    assert not device.queued and c.tobytes() == a.tobytes() and not d.any()
    device.refuses, device.fails = False, True
    with pytest.raises(TransferError, match="copies on cuda:0 failed: CUDA error: an illegal"):
        CudaCopier("cuda:0").copy(blocks((a, c)))


async def test_host_memory_is_pinned_while_the_store_is_open(device: Device) -> None:
    pool = PagedPool(PagedPool.allocate(pool_layout(), shared=False).layout, device="cuda:1")
    store = SnapshotStore(pool, 1 << 16)
    [(address, size_bytes)] = device.registered.items()
    [buffer] = store.host.layout.buffers
    assert (address, size_bytes) == (buffer.address, buffer.size_bytes)
    await store.close()
    await store.close()
    assert not device.registered
    device.refuses = True
    with pytest.raises(
        LayoutError, match=r"host memory cannot be pinned for cuda:1: out of memory \(cudaError 2\)"
    ):
        SnapshotStore(pool, 1 << 16)


class Kernel:
    def __init__(self) -> None:
        self.queued: list[Blocks] = []

    def suits(self, blocks: Blocks) -> bool:
        return True

    def queue(self, blocks: Blocks, stream: Any) -> None:
        self.queued.append(blocks)


def test_a_kernel_copies_to_and_from_pinned_memory_alone(device: Device) -> None:
    copier, kernel = CudaCopier("cuda:0"), Kernel()
    copier._kernel = kernel  # type: ignore[assignment]
    pinned = PagedPool.allocate(pool_layout(), shared=False)
    [buffer] = pinned.layout.buffers
    a, b = arrays()[:2]
    copier.pin(pinned)
    copier.copy(blocks((a, b)))
    assert not kernel.queued and a.tobytes() == b.tobytes()
    ours = Blocks(*(np.array([n], dtype=np.int64) for n in (a.ctypes.data, buffer.address, 16)))
    copier.copy(ours)
    assert kernel.queued == [ours]
    copier.close()


def test_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match="memory of meta cannot be copied"):
        copier_for(PagedPool.allocate(pool_layout(), device="meta"))
    # As in a build of torch for CPUs, or for another vendor's devices.
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(LayoutError, match="memory of cuda:0 cannot be copied"):
        copies.CudaCopier("cuda:0")
    monkeypatch.undo()
    with pytest.raises(LayoutError, match="no CUDA runtime"):
        copies.Runtime(
            copies._loaded_library("libcudart.so") if torch.version.cuda is None else None
        )


def test_a_loaded_library_is_found() -> None:
    found = copies._loaded_library("libc.so")
    assert found is not None and hasattr(ctypes.CDLL(found), "memmove")


def pool_layout() -> Any:
    return build_layout([("k", "float32", (8,))], page_size=4, num_pages=6)


@pytest.mark.parametrize("sizes", [(1,), (7,), (64,), (512,), (3, 64, 200), (16, 5000)])
def test_small_blocks_are_copied_as_memmove_does(sizes: tuple[int, ...], seed: int) -> None:
    rng, step = np.random.default_rng(seed), max(sizes) + 3
    source = rng.integers(1, 255, 300 * step, dtype=np.uint8)
    target = np.zeros(200 * step, dtype=np.uint8)
    expected, here, there = target.copy(), source.ctypes.data, target.ctypes.data
    picked, onto = rng.permutation(300)[:150] * step, rng.permutation(200)[:150] * step
    size = rng.choice(sizes, 150)
    for at, to, n in zip(picked.tolist(), onto.tolist(), size.tolist(), strict=True):
        expected[to : to + n] = source[at : at + n]
    blocks = Blocks(picked + here, onto + there, size.astype(np.int64))
    assert are_small(blocks) == (size.mean() <= SMALL_BYTES)
    copy_small(blocks)
    assert (target == expected).all()
    target[:] = 0
    HostCopier.copy(blocks)
    assert (target == expected).all()


def test_blocks_keep_their_sizes_where_one_size_is_the_mean_of_all() -> None:
    """Pages with K, V and indexer keys as DeepSeek V3.2 has them go into a layer-first pool."""
    widths, pages = (384, 128, 256), 64
    source = np.random.default_rng(1).integers(1, 255, (pages, sum(widths)), dtype=np.uint8)
    targets = [np.zeros((pages, width), dtype=np.uint8) for width in widths]
    firsts, nth = np.cumsum((0, *widths))[:-1], np.arange(pages)[:, None]
    sources = source.ctypes.data + nth * sum(widths) + firsts
    onto = np.array([target.ctypes.data for target in targets]) + nth * np.array(widths)
    blocks = Blocks(sources.ravel(), onto.ravel(), np.tile(widths, pages))
    assert are_small(blocks)
    HostCopier.copy(blocks)
    for target, first, width in zip(targets, firsts, widths, strict=True):
        assert (target == source[:, first : first + width]).all(), width


def test_few_blocks_and_large_ones_are_not_small() -> None:
    def of(count: int, size: int) -> Blocks:
        return Blocks(*(np.full(count, n, dtype=np.int64) for n in (0, 0, size)))

    assert are_small(of(64, SMALL_BYTES))
    assert not are_small(of(63, SMALL_BYTES))
    assert not are_small(of(64, 513))
    assert not are_small(of(0, 1))


def test_others_get_the_gil_after_so_many_bytes_and_with_the_last_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = np.arange(7 << 10, dtype=np.uint8), np.zeros(7 << 10, dtype=np.uint8)
    ways: list[str] = []

    def noted(way: str, honest: Callable[[int, int, int], None]) -> Callable[[int, int, int], None]:
        def copy(to: int, at: int, size: int) -> None:
            ways.append(way)
            honest(to, at, size)

        return copy

    for way in ("_copy_holding_gil", "_copy_releasing_gil"):
        monkeypatch.setattr(copies, way, noted(way, getattr(copies, way)))
    monkeypatch.setattr(copies, "_HELD_BYTES", 3 << 10)
    starts = np.arange(0, 7 << 10, 1 << 10)
    HostCopier.copy(
        Blocks(starts + source.ctypes.data, starts + target.ctypes.data, np.full(7, 1 << 10))
    )
    assert [n for n, way in enumerate(ways) if way == "_copy_releasing_gil"] == [2, 5, 6]
    assert (target == source).all()
