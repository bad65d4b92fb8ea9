"""Pools: typed views that share bytes, and memory that goes back."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import resource
import signal
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.kinds import PAGE, StateKind
from kvflow.protocols.pages.layout import Order, PoolLayout, build_layout
from tests.memory.kinds import KINDS, layout_of, names_of

STREAMS = [("0.k", "bfloat16", (2, 4)), ("0.v", "float32", (3,)), ("scale", "uint8", (4,))]
ORDERS: list[Order] = ["page_first", "layer_first"]


def layout(order: Order, num_pages: int = 6) -> PoolLayout:
    return build_layout(STREAMS, page_size=4, num_pages=num_pages, order=order)


def numbers(*pages: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(pages, dtype=np.int32)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shared", [True, False])
def test_tensors_and_arrays_are_views_of_the_pages(order: Order, shared: bool) -> None:
    pool = PagedPool.allocate(layout(order), shared=shared)
    assert (pool.segment is not None) == shared
    for i, (name, dtype, shape) in enumerate(STREAMS):
        t, array = pool.tensor(name), pool.array(name)
        assert t.shape == array.shape == (6, 4, *shape) and t.dtype == getattr(torch, dtype)
        assert array.dtype == {"bfloat16": "uint16"}.get(dtype, dtype)
        assert not t.any()  # new memory is zeroed
        t[3] = i + 1
        bits = t[3].contiguous().view(torch.uint8).numpy().tobytes()
        assert array[3].tobytes() == bits and not array[[0, 1, 2, 4, 5]].any()
    page = pool.pages_bytes(numbers(3))[0]
    expected = [
        pool.tensor(name)[3].contiguous().view(torch.uint8).numpy().ravel()
        for name, _, _ in STREAMS
    ]
    assert page.tobytes() == np.concatenate(expected).tobytes()
    assert not pool.pages_bytes(numbers(0, 1, 2, 4, 5)).any()
    for name, _, _ in STREAMS:
        pool.array(name)[3] = 0
        assert not pool.tensor(name).any()
    pool.close()


def test_a_stream_its_dtype_cannot_read_is_refused() -> None:
    odd = build_layout([("a", "uint8", (1,)), ("b", "float32", (1,))], page_size=3, num_pages=2)
    pool = PagedPool.allocate(odd, shared=False)
    with pytest.raises(LayoutError, match="float32 cannot lie"):
        pool.tensor("b")
    assert pool.array("b").shape == (2, 3, 1)  # numpy reads it at any address
    with pytest.raises(LayoutError, match="no component 'c'"):
        pool.tensor("c")
    with pytest.raises(LayoutError, match="no component 'c'"):
        pool.array("c")
    pool.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_memory_of_a_device_is_laid_out_as_a_segment_is(kind: str, order: Order) -> None:
    """The same code as on a GPU, on the device `cpu` of torch."""
    laid_out = layout_of(kind, 4, 6, 3, order)
    segment, pool = (
        PagedPool.allocate(laid_out, shared=False),
        PagedPool.allocate(laid_out, device="cpu"),
    )
    assert pool.layout.components == segment.layout.components
    assert pool.segment is None
    assert pool.on_host
    apart = [
        [b.address - p.layout.buffers[0].address for b in p.layout.buffers] for p in (pool, segment)
    ]
    assert apart[0] == apart[1]
    for n, name in enumerate(names_of(kind)):
        mine, theirs = pool.tensor(name), segment.tensor(name)
        assert (mine.shape, mine.stride(), mine.dtype) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
        )
        for view in (pool.array(name), segment.array(name)):
            view[...] = np.arange(view.size).reshape(view.shape) % 100 + n
    whole = [
        (p.pages_bytes(numbers(*range(6))), p.rows_bytes(numbers(*range(p.layout.num_rows))))
        for p in (pool, segment)
    ]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*whole, strict=True))


def test_closing_frees_every_buffer_of_a_device() -> None:
    pool = PagedPool.allocate(layout_of("hybrid", 4, 6, 3, "layer_first"), device="cpu")
    freed: list[int] = []
    for view in pool.mapped_by:
        weakref.finalize(view, freed.append, 1)
    del view
    pool.close()
    assert len(freed) == len(names_of("hybrid"))
    with pytest.raises(LayoutError, match="closed"):
        pool.tensor("0.k")


def test_what_a_device_cannot_do_is_said() -> None:
    huge = build_layout([("k", "float32", (1 << 20,))], page_size=1024, num_pages=1 << 20)
    with pytest.raises(LayoutError, match="no memory for a pool of 4503599627370496 bytes on cpu"):
        PagedPool.allocate(huge, device="cpu")
    odd = build_layout([("a", "uint8", (1,)), ("b", "float32", (1,))], page_size=3, num_pages=2)
    with pytest.raises(LayoutError, match="float32 cannot lie at 3 in pages of 15"):
        PagedPool.allocate(odd, device="cpu")
    odd_start = build_layout(
        [("a", "uint8", (1,)), ("b", "float32", (1,)), StateKind("c", "uint8", (1,), PAGE)],
        page_size=3,
        num_pages=2,
    )
    with pytest.raises(LayoutError, match="float32 cannot lie at 3 in pages of 16"):
        PagedPool.allocate(odd_start, device="cpu")
    odd_step = build_layout(
        [("b", "float32", (1,)), ("c", "uint8", (1,))], page_size=3, num_pages=2
    )
    with pytest.raises(LayoutError, match="float32 cannot lie at 0 in pages of 15"):
        PagedPool.allocate(odd_step, device="cpu")
    elsewhere = PagedPool.allocate(layout("page_first"), device="meta")
    assert not elsewhere.on_host and "on meta" in repr(elsewhere)
    with pytest.raises(LayoutError, match="is on meta"):
        elsewhere.array("0.v")
    with pytest.raises(LayoutError, match="the CPU cannot read"):
        elsewhere.pages_bytes(numbers(0))


@pytest.mark.parametrize("order", ORDERS)
def test_wrap_finds_the_layout_a_pool_was_made_with(order: Order) -> None:
    made = PagedPool.allocate(layout(order), shared=False)
    pool = PagedPool.wrap({name: made.tensor(name) for name, _, _ in STREAMS}, page_size=4)
    assert pool.layout.components == made.layout.components
    assert [b.address for b in pool.layout.buffers] == [b.address for b in made.layout.buffers]
    assert pool.tensor("0.v") is made.tensor("0.v") and pool.segment is None
    made.tensor("0.v")[2] = 7.0
    assert pool.pages_bytes(numbers(2)).tobytes() == made.pages_bytes(numbers(2)).tobytes()


@pytest.mark.parametrize("view_of", [PagedPool.tensor, PagedPool.array])
def test_closing_gives_the_memory_back_with_the_last_view(
    view_of: Callable[[PagedPool, str], Any],
) -> None:
    pool = PagedPool.allocate(layout("page_first"))
    segment = pool.segment
    assert segment is not None
    fd = os.readlink(f"/proc/self/fd/{segment.fd}")
    inode = os.stat(f"/proc/self/fd/{segment.fd}").st_ino
    view = view_of(pool, "0.v")
    pool.close()
    pool.close()
    assert "kvflow-pool" in fd and segment.fd == -1 and pool.segment is None
    assert f" {inode} " in _maps()  # the view still reads zeros instead of crashing
    assert not view.any()
    del view
    assert f" {inode} " not in _maps()
    with pytest.raises(LayoutError, match="closed"):
        view_of(pool, "0.v")


def test_a_pool_that_nobody_holds_gives_its_memory_back() -> None:
    """A descriptor that stays open keeps all of the memory, without a mapping."""
    pool = PagedPool.allocate(layout("page_first"))
    assert pool.segment is not None
    inode = os.fstat(pool.segment.fd).st_ino
    assert inode in _open_inodes() and f" {inode} " in _maps()
    del pool
    gc.collect()
    assert inode not in _open_inodes() and f" {inode} " not in _maps()


def test_a_descriptor_is_closed_once_though_its_number_is_another_ones_by_then() -> None:
    segment = SharedSegment.create(1 << 16)
    number = segment.fd
    segment.close()
    other = os.open(os.devnull, os.O_RDONLY)
    try:
        assert other == number  # the smallest number that is free
        segment.close()
        del segment
        gc.collect()
        assert os.fstat(other)
    finally:
        os.close(other)


def _open_inodes() -> set[int]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            found.add(os.stat(f"/proc/self/fd/{number}").st_ino)
    return found


def _maps() -> str:
    with open("/proc/self/maps", encoding="utf-8") as file:
        return "\n".join(line for line in file if "kvflow-pool" in line)


def test_a_mapping_is_not_inherited_by_children() -> None:
    segment = SharedSegment.create(1 << 16)
    with open("/proc/self/smaps", encoding="utf-8") as file:
        after = file.read().partition("kvflow-pool")[2]
    flags = next(line for line in after.splitlines() if line.startswith("VmFlags"))
    assert " dc" in flags  # do not copy on fork
    assert os.get_inheritable(segment.fd) is False
    segment.close()


def test_a_segment_cannot_shrink_under_its_readers() -> None:
    segment = SharedSegment.create(1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    descriptor = segment.fd
    segment.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_only_sealed_segments_are_opened(tmp_path: object) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(TransferError, match="not a sealed segment"):
        SharedSegment.open_peer(os.getpid(), fd)
    os.close(fd)
    with pytest.raises(TransferError, match="cannot open"):
        SharedSegment.open_peer(os.getpid(), fd)
    with open(f"{tmp_path}/file", "w+b") as file, pytest.raises(TransferError):
        SharedSegment.open_peer(os.getpid(), file.fileno())


def test_a_file_of_another_kind_is_not_even_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server may not answer, and opening it would then stop the event loop."""
    opened: list[int] = []
    os_open = os.open

    def noted(path: str, flags: int) -> int:
        opened.append(flags)
        return os_open(path, flags)

    os.mkfifo(tmp_path / "memfd:kvflow-pool")
    fifo = os.open(tmp_path / "memfd:kvflow-pool", os.O_RDWR)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    monkeypatch.setattr(os, "open", noted)
    for flags in ([], [os.O_PATH | os.O_CLOEXEC] * 3):
        for fd in (fifo, file, 0):
            with pytest.raises(TransferError, match=f"descriptor {fd} .* is not a sealed segment"):
                SharedSegment.open_peer(os.getpid(), fd)
        assert opened == flags
        # A file at the root of a mount of its own can have this name.
        monkeypatch.setattr(os, "readlink", lambda _: "/memfd:kvflow-pool")
    for fd in (fifo, file):
        os.close(fd)


def test_a_lease_on_a_segment_is_not_awaited() -> None:
    """Its holder may keep whoever opens it waiting, for 45 s by default."""
    theirs = SharedSegment.create(4096)
    leased = os.open(f"/proc/self/fd/{theirs.fd}", os.O_RDWR | os.O_CLOEXEC)
    theirs.close()  # a lease is for the only descriptor of a file
    held = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(TransferError, match="cannot open the pool"):
            SharedSegment.open_peer(os.getpid(), leased)
    finally:
        os.close(leased)
        signal.signal(signal.SIGIO, held)


def test_the_memory_of_a_peer_stays_when_it_is_unmapped() -> None:
    theirs = SharedSegment.create(1 << 16)
    theirs.memory[100:104] = b"kept"
    mine = SharedSegment.open_peer(os.getpid(), theirs.fd)
    mine.prefault()
    assert mine.memory[100:104] == b"kept"
    mine.close_peer()
    mine.close_peer()
    assert theirs.memory[100:104] == b"kept"
    theirs.close()


@pytest.mark.parametrize("owner", [0, 7])
def test_a_sealed_file_without_a_pool_is_refused(owner: int) -> None:
    for size_bytes in (0, 100, mmap.PAGESIZE):
        fd = os.memfd_create("small", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        )
        with pytest.raises(
            TransferError, match=f"descriptor {fd} of process {os.getpid()} has no bytes of a pool"
        ):
            SharedSegment.open_peer(os.getpid(), fd, owner)
        os.close(fd)


def test_a_segment_that_the_kernel_refuses_leaves_no_descriptor() -> None:
    before, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            LayoutError, match=r"no memory for a pool of 65536 bytes: .*File too large"
        ):
            SharedSegment.create(1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_a_segment_has_at_least_one_byte(size_bytes: int) -> None:
    for make in (SharedSegment.create, SharedSegment.private):
        with pytest.raises(LayoutError, match=f"{size_bytes} bytes"):
            make(size_bytes)


@pytest.mark.parametrize("order", ORDERS)
def test_a_pool_of_another_process_is_seen_where_its_segment_is_mapped(order: Order) -> None:
    theirs = PagedPool.allocate(layout(order))
    assert theirs.segment is not None
    mine = PagedPool.mapped(theirs.layout, SharedSegment.open_peer(os.getpid(), theirs.segment.fd))
    assert not {b.address for b in mine.layout.buffers} & {b.address for b in theirs.layout.buffers}
    for name, _, _ in STREAMS:
        theirs.array(name)[2:] = 7
    assert (
        mine.pages_bytes(numbers(*range(6))).tobytes()
        == theirs.pages_bytes(numbers(*range(6))).tobytes()
    )
    larger = PagedPool.allocate(layout(order, num_pages=600), shared=False)
    with pytest.raises(LayoutError, match="do not lie in <SharedSegment"):
        PagedPool.mapped(larger.layout, SharedSegment.open_peer(os.getpid(), theirs.segment.fd))
    for pool in (larger, mine, theirs):
        pool.close()


def test_the_first_descriptor_of_a_process_without_a_standard_input_is_one() -> None:
    segment = SharedSegment(mmap.mmap(-1, mmap.PAGESIZE), -1)
    segment.fd = 0  # of which the segment is not to close ours
    made = layout("page_first", num_pages=2)
    assert PagedPool(made, segment=segment).segment is segment and "descriptor 0" in repr(segment)


def test_segments_say_what_they_are() -> None:
    shared, private = SharedSegment.create(1), SharedSegment.private(8192)
    assert f"4096 bytes at {shared.address:#x}, descriptor {shared.fd}" in repr(shared)
    assert "8192 bytes" in repr(private) and "private" in repr(private)
    shared.close()
    assert "closed" in repr(shared)
    with pytest.raises(LayoutError, match="4096 bytes is closed"):
        _ = shared.memory
