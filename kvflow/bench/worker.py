"""The process of one role in a benchmark pair. `child.py` describes how it takes commands.

    python -m kvflow.bench.worker prefill|decode

Commands: setup, verify, rooms, raw_setup and raw (prefill only), bare_setup, bare_rooms, exported,
idle, state, quit. The driver (`pair.py`) sends the same `rooms` command to both sides.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from functools import partial
from typing import Any

import msgspec
import numpy as np
import uvloop

from kvflow.bench.bare import BareDecode, BarePrefill
from kvflow.bench.child import StallTicker, cpu_s, serve
from kvflow.bench.raw import TUNE_PAGES, RawWriter, open_raw
from kvflow.memory.checksum import PageChecksums
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.pages.arrange import by_shard
from kvflow.protocols.pages.layout import PageIndices, PoolLayout, build_layout
from kvflow.protocols.ports import DataPlane, PlaneAddress
from kvflow.protocols.wire.ranks import RankInfo, rank_from_json, rank_to_json
from kvflow.transports.control.curve import read_key
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.data.local import LocalPlane
from kvflow.transports.data.select import open_plane

SEND_STAGING_BYTES = 64 << 20
__all__ = ["Worker", "serve", "source_slice"]


def _layout(
    layers: int, heads: int, dim: int, page_size: int, pages: int, order: str
) -> PoolLayout:
    streams = [(f"layer.{i}.{x}", "bfloat16", (heads, dim)) for i in range(layers) for x in "kv"]
    return build_layout(
        streams,
        page_size=page_size,
        num_pages=pages,
        order=order,  # type: ignore[arg-type]
    )


class Worker:
    """The commands of a worker. Both sides use the same prompt for a room."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.pool: PagedPool
        self.node: PrefillNode | DecodeNode
        self.ranks: list[RankInfo] = []
        self._small_pages = 1  # pages of the size in which commands count, in one of ours
        self.source_pages: PageIndices
        self.raw_writer: RawWriter
        self.bare_end: BareDecode | BarePrefill | None = None

    async def setup(
        self,
        *,
        plane: str,
        layers: int,
        heads: int,
        dim: int,
        page_size: int,
        pages: int,
        order: str,
        ranks: list[Any],
        rate_bytes_per_s: float | None = None,
        control_key_file: str = "",
        verify_transfers: bool = False,
        host: str = "127.0.0.1",
        widths: tuple[int, int] = (1, 1),
        page_sizes: tuple[int, int] | None = None,
        staged: bool = False,
        copy_threads: int = 0,
    ) -> dict[str, Any]:
        """Allocate the pool and start the node of this role.

        `page_sizes` is (page size at prefill, page size at decode), multiples of `page_size`. Here
        and in `rooms`, pages are counted in `page_size`.
        `widths` is (shards at prefill, shards at decode). The heads of each page are divided among
        the shards. If `staged`, slices pass through staging: prefill gathers them in staging, or
        decode receives them in staging. `copy_threads` is that of `LocalPlane`; 0 is its default.
        """
        own_size = page_size if page_sizes is None else page_sizes[self.role == "decode"]
        self._small_pages = own_size // page_size
        layout = _layout(layers, heads, dim, own_size, pages // self._small_pages, order)
        # kvflow warns about tiny slices, which this benchmark measures on purpose.
        if widths != (1, 1):
            logging.disable(logging.WARNING)
        if (width := widths[self.role == "decode"]) > 1:
            layout = by_shard(layout, width)
        self.pool = await asyncio.to_thread(PagedPool.allocate, layout)
        staging = await asyncio.to_thread(self._staging, widths) if staged else None
        segment = (self.pool if staging is None else staging.host).segment
        data_plane: DataPlane
        if plane == LocalPlane.name and copy_threads:
            data_plane = LocalPlane(segment, rate_bytes_per_s, copy_threads)
        else:
            data_plane = await asyncio.to_thread(open_plane, plane, segment, rate_bytes_per_s, host)
        key = read_key(control_key_file)
        options: dict[str, Any] = {"verify_transfers": verify_transfers, "staging": staging}
        if self.role == "prefill":
            bind = partial(bind_router, key=key)
            self.node = PrefillNode(self.pool, data_plane, host=host, bind=bind, **options)
            await self.node.start()
            pages_of_all = self.node.pages.take(self.node.pages.free_pages, "bench")
            self.source_pages = np.random.default_rng(5).permutation(pages_of_all)
            return {"ranks": [rank_to_json(self.node.info)], "page_bytes": layout.page_bytes}
        self.ranks = [rank_from_json(rank) for rank in ranks]
        connect = partial(connect_dealer, key=key)
        self.node = DecodeNode(self.pool, data_plane, connect=connect, **options)
        await self.node.start()
        self._scatter()
        return {"page_bytes": layout.page_bytes}

    def _staging(self, widths: tuple[int, int]) -> Staging | None:
        prefill, decode = widths
        if self.role == "prefill":
            return Staging(self.pool, SEND_STAGING_BYTES) if prefill % decode else None
        return Staging(self.pool, shards=prefill) if decode % prefill else None

    async def verify(self, *, on: bool) -> dict[str, Any]:
        """Switch checksums on or off for rooms that open from now on."""
        before = self.node.shell.checksums
        self.node.shell.checksums = PageChecksums(self.pool) if on else None
        if isinstance(before, PageChecksums):
            await before.close()
        if isinstance(self.node, DecodeNode):
            self.node.shell.endpoint.core.verify = on
        return {}

    def _scatter(self) -> None:
        """Shuffle the free list, so that the pages of a room are scattered."""
        pages = self.node.pages.take(self.node.pages.free_pages, "scatter")
        order = np.random.default_rng(7).permutation(len(pages))
        for one in pages[order][:, None]:
            self.node.pages.give_back(one, "scatter")

    async def rooms(
        self,
        *,
        first: int,
        count: int,
        concurrency: int,
        pages: int,
        start_at: float,
        ticking: bool,
    ) -> dict[str, Any]:
        """Run `count` rooms from number `first`, `concurrency` at a time, each of `pages` pages.

        With `ticking`, also measure the lateness of the loop. Goodput is measured without a ticker,
        because its thousand wake-ups a second take the GIL from copying threads.
        """
        pages //= self._small_pages
        prompt = np.arange(pages * self.pool.layout.page_size, dtype=np.int64)
        numbers = iter(range(first, first + count))
        out: dict[str, dict[int, float]] = {"opened": {}, "done": {}}
        one = self._prefill_room if self.role == "prefill" else self._decode_room
        await asyncio.sleep(max(0.0, start_at - time.monotonic()))
        ticker, cpu_before = StallTicker() if ticking else None, cpu_s()

        async def lane() -> None:
            for number in numbers:
                await one(number, prompt, pages, out)

        await asyncio.gather(*(lane() for _ in range(concurrency)))
        cpu = cpu_s() - cpu_before
        return {"cpu_s": cpu, "late_p99_ms": ticker.stop() if ticker is not None else None, **out}

    async def _prefill_room(
        self, number: int, prompt: Any, pages: int, out: dict[str, dict[int, float]]
    ) -> None:
        assert isinstance(self.node, PrefillNode)
        out["opened"][number] = time.monotonic()
        room = self.node.room(number, prompt)
        await room.matched()
        room.send(source_slice(self.source_pages, number, pages), last=True, handoff=b"bench")
        await room.done()
        out["done"][number] = time.monotonic()

    async def _decode_room(
        self, number: int, prompt: Any, pages: int, out: dict[str, dict[int, float]]
    ) -> None:
        assert isinstance(self.node, DecodeNode)
        out["opened"][number] = time.monotonic()
        room = await self.node.room(number, self.ranks, prompt)
        await room.landed()
        out["done"][number] = time.monotonic()
        room.close()

    async def raw_setup(self, *, address: Any, layout: Any, tuned: bool = True) -> dict[str, Any]:
        """Open a raw writer into decode's pool, and return its way of writing: if `tuned`, the
        fastest for many pages, otherwise one that spins.
        """
        peer, theirs = msgspec.convert(address, PlaneAddress), msgspec.convert(layout, PoolLayout)
        self.raw_writer = await asyncio.to_thread(
            open_raw, self.node.plane, self.pool.layout, peer, theirs
        )
        if not tuned:
            return self.raw_writer.way._asdict()
        sample = source_slice(self.source_pages, 0, min(TUNE_PAGES, len(self.source_pages) - 1))
        return (await asyncio.to_thread(self.raw_writer.tune, sample))._asdict()

    async def raw(self, *, first: int, count: int, pages: int) -> dict[str, Any]:
        """Write the pages of `count` rooms with the data plane's bare calls alone."""
        lists = [
            source_slice(self.source_pages, number, pages) for number in range(first, first + count)
        ]
        return {"seconds": await asyncio.to_thread(self.raw_writer.write, np.concatenate(lists))}

    async def bare_setup(self, *, control: str = "") -> dict[str, Any]:
        """Open this side's end of the bare exchanges, prefill's first, after `raw_setup`.

        Prefill returns its `control` endpoint, which decode needs.
        """
        if isinstance(self.node, PrefillNode):
            prefill = self.bare_end = BarePrefill(self.raw_writer)
            return {"control": prefill.control}
        self.bare_end = BareDecode(control)
        return {}

    async def bare_rooms(self, *, first: int, count: int, apart: bool = False) -> dict[str, Any]:
        """Run `count` bare exchanges of one page; decode returns the seconds of each. For `apart`
        see `BarePrefill.rooms`.
        """
        if isinstance(self.bare_end, BarePrefill):
            lists = [source_slice(self.source_pages, first + at, 1) for at in range(count)]
            await asyncio.to_thread(self.bare_end.rooms, lists, apart=apart)
            return {}
        assert self.bare_end is not None
        return {"seconds": await asyncio.to_thread(self.bare_end.rooms, count)}

    async def exported(self) -> dict[str, Any]:
        """Return the address and the layout by which a raw writer reaches this pool."""
        address, layout = self.node.exported
        return {"address": msgspec.to_builtins(address), "layout": msgspec.to_builtins(layout)}

    async def idle(self, *, seconds: float) -> dict[str, Any]:
        ticker, cpu_before = StallTicker(), cpu_s()
        await asyncio.sleep(seconds)
        return {"late_p99_ms": ticker.stop(), "cpu_percent": (cpu_s() - cpu_before) / seconds * 100}

    async def state(self) -> dict[str, Any]:
        """Return how many rooms are open, how many pages are free, and how rooms ended so far."""
        left = {"rooms": len(self.node.shell.endpoint.rooms), "endings": self.node.counts.endings}
        total = self.pool.layout.num_pages
        free = total if self.role == "prefill" else self.node.pages.free_pages
        return {**left, "free_pages": free, "num_pages": total}

    async def close(self) -> None:
        if self.bare_end is not None:
            self.bare_end.close()
        await self.node.close()


def source_slice(pages: PageIndices, number: int, count: int) -> PageIndices:
    """Return `count` of the shuffled `pages`. Rooms with the same number get the same pages."""
    start = number * count % (len(pages) - count + 1)
    return pages[start : start + count]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    uvloop.run(serve(Worker(sys.argv[1])))
