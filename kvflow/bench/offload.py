"""`kvflow bench offload`: speed of copies between a pool and host memory, compared with memcpy.

The memcpy moves the same number of bytes between the same two memories, and alternates with the
copies. The report also has the event loop's stalls during the copies, and how much the copies slow
down a model's decode steps (`offload_steps`).
"""

from __future__ import annotations

import asyncio
import ctypes
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.bench.child import StallTicker
from kvflow.bench.figures import Say
from kvflow.memory.copies import copier_for
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import Order, PageIndices, PoolLayout, build_layout
from kvflow.protocols.pages.plan import Blocks

if TYPE_CHECKING:
    from kvflow.bench.offload_steps import DecodeBatch

PAGE_SIZE, LAYERS, HEADS, DIM = 16, 32, 8, 128  # 2 MiB per page
ROW_ELEMENTS = 1 << 16
_FILL_WORDS = 1 << 20
SPREAD = 2  # pool pages for each copied page
MUST_RATIO = 0.8


class OffloadPlan(NamedTuple):
    """Parameters of `bench_offload`.

    In each of `rounds` rounds, `pages` pages of 2 MiB, scattered over a pool, are copied out and
    restored. Each kind of copy then also runs for at least `steps_s` during decode steps of `batch`
    sequences (0: no steps).
    """

    pages: int = 512
    rounds: int = 10
    orders: tuple[str, ...] = ("page_first",)
    batch: int = 8
    steps_s: float = 0.5
    device: str | None = None  # device of the pool and the model; None: the CPU


async def bench_offload(plan: OffloadPlan, say: Say) -> dict[str, Any]:
    """Measure every order of the pool in turn.

    Raises: LayoutError if there is not enough memory, MisuseError if restored bytes differ.
    """
    if not plan.batch:
        return {order: await _one_order(plan, order, None, say) for order in plan.orders}
    # `offload_steps` imports torch, which a run without steps does not need.
    from kvflow.bench.offload_steps import make_batch

    steps = await make_batch(plan.batch, plan.device or "cpu")
    try:
        return {order: await _one_order(plan, order, steps, say) for order in plan.orders}
    finally:
        steps.pool.close()


async def _one_order(
    plan: OffloadPlan, order: str, steps: DecodeBatch | None, say: Say
) -> dict[str, Any]:
    layout = _layout(plan.pages * SPREAD, order)
    pool = await asyncio.to_thread(PagedPool.allocate, layout, shared=False, device=plan.device)
    limit_bytes = plan.pages * pool.layout.page_bytes + pool.layout.row_bytes
    store = await asyncio.to_thread(SnapshotStore, pool, limit_bytes, num_rows=1)
    try:
        await asyncio.to_thread(_fill, pool)
        report = await _rounds(plan, order, pool, store, say)
        if steps is None:
            return report
        return report | {"beside_steps": await _beside_steps(plan, pool, store, steps)}
    finally:
        await store.close()
        pool.close()


def _layout(num_pages: int, order: str) -> PoolLayout:
    streams = [
        StateKind(f"layer.{i}.{x}", "bfloat16", (HEADS, DIM)) for i in range(LAYERS) for x in "kv"
    ]
    rows = [StateKind("state", "float32", (ROW_ELEMENTS,), ROW)]
    chosen: Order = order  # type: ignore[assignment]
    return build_layout(
        [*streams, *rows], page_size=PAGE_SIZE, num_pages=num_pages, num_rows=2, order=chosen
    )


def _fill(pool: PagedPool) -> None:
    """Fill the pool with numbers that grow with the address, or with random bytes on a device."""
    if not pool.on_host:
        import torch

        random = torch.Generator(device=pool.device).manual_seed(1)
        for c in pool.layout.components:
            view = pool.tensor(c.name).view(torch.uint8)
            view.copy_(
                torch.randint(
                    0, 256, view.shape, dtype=torch.uint8, device=pool.device, generator=random
                )
            )
        return torch.cuda.synchronize(pool.device)
    for b in pool.layout.buffers:
        words = np.ctypeslib.as_array(
            (ctypes.c_uint64 * (b.size_bytes // 8)).from_address(b.address)
        )
        for start in range(0, words.size, _FILL_WORDS):
            part = words[start : start + _FILL_WORDS]
            part[:] = np.arange(b.address + start, b.address + start + part.size, dtype=np.uint64)
    return None


async def _rounds(
    plan: OffloadPlan, order: str, pool: PagedPool, store: SnapshotStore, say: Say
) -> dict[str, Any]:
    taken = pool.pages.take(pool.layout.num_pages, "bench")
    scattered = np.random.default_rng(1).permutation(taken)[: plan.pages].astype(np.int32)
    places = (scattered, pool.rows.take(1, "bench"))
    total_bytes = plan.pages * pool.layout.page_bytes
    before = await asyncio.to_thread(_content, pool, scattered[:8])
    seconds: dict[str, list[float]] = {"memcpy": [], "copy_out": [], "restore": []}
    ticker = StallTicker()
    # Turn 0 warms up. Its times are left out, but the ticker's stalls include it.
    for turn in range(plan.rounds + 1):
        took = {"memcpy": await asyncio.to_thread(_memcpy, pool, store, total_bytes)}
        began_s = time.perf_counter()
        held = await store.take(places)
        took["copy_out"] = time.perf_counter() - began_s
        await asyncio.to_thread(_overwrite, pool, scattered[:8])
        began_s = time.perf_counter()
        await store.restore(held, places)
        took["restore"] = time.perf_counter() - began_s
        held.close()
        if not await asyncio.to_thread(
            lambda: np.array_equal(_content(pool, scattered[:8]), before)
        ):
            raise MisuseError("restored pages differ from what was copied out")
        if turn:
            for way, time_s in took.items():
                seconds[way].append(time_s)
        line = f"{order} {turn}: " + ", ".join(
            f"{way} {total_bytes / s / 1e9:.2f} GB/s" for way, s in took.items()
        )
        # The ticker would count a slow terminal as a stall, so a thread prints.
        await asyncio.to_thread(say, line)
    return _report(plan, total_bytes, seconds) | ticker.stalls()


async def _beside_steps(
    plan: OffloadPlan, pool: PagedPool, store: SnapshotStore, steps: DecodeBatch
) -> dict[str, Any]:
    from kvflow.bench.offload_steps import BesideSteps, keep_busy

    pages = (
        np.random.default_rng(2).permutation(pool.layout.num_pages)[: plan.pages].astype(np.int32)
    )
    # `_rounds` took every page and one row, and still owns them.
    places = (pages, np.zeros(1, dtype=np.int32))
    total_bytes = plan.pages * pool.layout.page_bytes

    async def copy_out() -> float:
        began_s = time.perf_counter()
        held = await store.take(places)
        took_s = time.perf_counter() - began_s
        held.close()
        return took_s

    async def restore() -> float:
        began_s = time.perf_counter()
        await store.restore(kept, places)
        return time.perf_counter() - began_s

    beside = BesideSteps(steps, plan.steps_s)
    for _ in range(plan.rounds):
        await beside.quiet()
        await beside.work("busy_core", lambda: asyncio.to_thread(keep_busy))
        await beside.work("memcpy", lambda: asyncio.to_thread(_memcpy, pool, store, total_bytes))
        await beside.work("copy_out", copy_out)
        kept = await store.take(places)
        await beside.work("restore", restore)
        kept.close()
    return beside.report()


def _memcpy(pool: PagedPool, store: SnapshotStore, total_bytes: int) -> float:
    """Copy `total_bytes` in as few copies as possible, and return the seconds."""
    source = max(pool.layout.buffers, key=lambda b: b.size_bytes)
    target = max(store.host.layout.buffers, key=lambda b: b.size_bytes)
    size_bytes = min(total_bytes, source.size_bytes)
    copier = copier_for(pool)
    whole = Blocks(
        *(np.array([n], dtype=np.int64) for n in (source.address, target.address, size_bytes))
    )
    began_s = time.perf_counter()
    for _ in range(-(-total_bytes // size_bytes)):
        copier.copy(whole)
    return time.perf_counter() - began_s


def _content(pool: PagedPool, pages: PageIndices) -> NDArray[np.uint8]:
    if pool.on_host:
        return pool.pages_bytes(pages)
    import torch

    streams = [pool.tensor(c.name) for c in pool.layout.components if not c.space]
    parts = [
        stream[pages.tolist()].reshape(len(pages), -1).view(torch.uint8).cpu().numpy()
        for stream in streams
    ]
    return np.concatenate(parts, axis=1)


def _overwrite(pool: PagedPool, pages: PageIndices) -> None:
    for c in pool.layout.components:
        if not c.space:
            stream = pool.array(c.name) if pool.on_host else pool.tensor(c.name)
            stream[pages.tolist()] = 0


def _report(plan: OffloadPlan, total_bytes: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        way: [base / s for base, s in zip(seconds["memcpy"], seconds[way], strict=True)]
        for way in ("copy_out", "restore")
    }
    medians = {way: statistics.median(ratio) for way, ratio in ratios.items()}
    return {
        "pages": plan.pages,
        "bytes": total_bytes,
        "rounds": plan.rounds,
        **{
            f"{way}_gb_s": total_bytes / statistics.median(taken) / 1e9
            for way, taken in seconds.items()
        },
        **{f"{way}_over_memcpy": median for way, median in medians.items()},
        **{f"{way}_worst": min(ratio) for way, ratio in ratios.items()},
        "must": MUST_RATIO,
        "holds": min(medians.values()) >= MUST_RATIO,
    }
