"""Prefills and decodes of different widths, over each data plane: what lands where, and what an abort leaves."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import numpy as np
import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.pages.layout import NO_PLACES, Order, Places, build_layout
from tests.ranks.shards import PAGE_SIZE, Truth, Whole, check, everything, fill, heads, latents, shard_of, truth_of

PAGES, ROWS = 40, 4
TOKENS = 30  # 8 pages, the last of them in part


class Group(NamedTuple):
    """The ranks of one prefill, and a decode."""

    prefills: list[PrefillNode]
    decode: DecodeNode


def _is_there(*packages: str) -> bool:
    return any(importlib.util.find_spec(package) is not None for package in packages)


NO_MOONCAKE = pytest.mark.skipif(not _is_there("mooncake"), reason="no mooncake")
NO_NIXL = pytest.mark.skipif(not _is_there("nixl_cu12", "nixl_cu13"), reason="no nixl")
PLANES = [
    "local",
    pytest.param("mooncake", marks=[NO_MOONCAKE, pytest.mark.slow]),  # a second each: every rank starts an engine
    pytest.param("nixl", marks=[NO_NIXL, pytest.mark.slow]),
]


def pool_of(kinds: Sequence[object], rows: bool, order: Order, fingerprint: str = "model") -> PagedPool:
    layout = build_layout(
        kinds,  # type: ignore[arg-type]
        page_size=PAGE_SIZE,
        num_pages=PAGES,
        num_rows=ROWS if rows else 0,
        order=order,
        fingerprint=fingerprint,
    )
    return PagedPool.allocate(layout)


@asynccontextmanager
async def group(
    plane: str,
    streams: Sequence[Whole],
    prefill: tuple[int, int],
    decode_shards: int,
    *,
    orders: tuple[Order, Order] = ("page_first", "page_first"),
    verify: bool = False,
) -> AsyncIterator[Group]:
    """`prefill`: stages and shards of each."""
    stages, shards = prefill
    rows = any(s.kind.unit == "row" for s in streams)
    ranks = [(stage, shard) for stage in range(stages) for shard in range(shards)]
    async with AsyncExitStack() as stack:
        prefills = []
        for rank, (stage, shard) in enumerate(ranks):
            pool = pool_of(shard_of(streams, shard, shards, stage, stages), rows, orders[0])
            stack.callback(pool.close)
            node = PrefillNode(pool, plane, rank=rank, world_size=len(ranks), verify_transfers=verify)
            prefills.append(await stack.enter_async_context(node))
        parts = [kind for shard in range(decode_shards) for kind in shard_of(streams, shard, decode_shards)]
        pool = pool_of(parts, rows, orders[1])
        stack.callback(pool.close)
        decode = await stack.enter_async_context(DecodeNode(pool, plane, verify_transfers=verify))
        yield Group(prefills, decode)


def taken(node: PrefillNode, pages: int, rows: bool) -> Places:
    found = Places(node.pool.pages.take(pages, "test"), node.pool.rows.take(1, "test") if rows else NO_PLACES)
    return Places(np.random.default_rng(pages).permutation(found.pages).astype(np.int32), found.rows)


async def opened(g: Group, room: int, prompt: range) -> tuple[list[PrefillRoom], DecodeRoom]:
    sources = [node.room(room, prompt) for node in g.prefills]
    target = await g.decode.room(room, [node.info for node in g.prefills], prompt)
    await asyncio.gather(*(source.matched() for source in sources))
    return sources, target


async def transferred(g: Group, truth: Truth, room: int, tokens: int, chunks: int = 2) -> None:
    rows = bool(g.decode.pool.layout.num_rows)
    sources, target = await opened(g, room, range(tokens))
    count = g.decode.pool.layout.pages_for(tokens)
    for node, source in zip(g.prefills, sources, strict=True):
        places = taken(node, count, rows)
        fill(node.pool, places, truth)
        pieces = np.array_split(places.pages, chunks)
        for i, piece in enumerate(pieces):
            last = i == chunks - 1
            given = Places(piece, places.rows if last else NO_PLACES)
            source.send(node.pool.layout.numbered(given), last=last)
    await target.landed()
    await asyncio.gather(*(source.done() for source in sources))
    check(g.decode.pool, g.decode.pool.layout.split(target.pages), truth)
    target.close()


CASES = [
    pytest.param(heads(2, 8), (1, 2), 1, id="TP 2 to 1"),
    pytest.param(heads(2, 8), (1, 1), 2, id="TP 1 to 2"),
    pytest.param(heads(2, 8), (1, 2), 4, id="TP 2 to 4"),
    pytest.param(heads(2, 6), (1, 3), 2, id="TP 3 to 2"),
    pytest.param(heads(2, 2), (1, 4), 1, id="two heads on four shards"),
    pytest.param(heads(2, 2), (1, 1), 4, id="two heads to four shards"),
    pytest.param(heads(4, 4), (2, 1), 1, id="PP 2"),
    pytest.param(heads(4, 4), (2, 2), 1, id="PP 2 x TP 2"),
    pytest.param(latents(3), (1, 2), 1, id="MLA, TP 2"),
    pytest.param(latents(1), (1, 4), 2, id="MLA, one latent on four shards"),
    pytest.param(everything(2), (1, 2), 1, id="states, TP 2 to 1"),
    pytest.param(everything(2), (1, 2), 4, id="states, TP 2 to 4"),
    pytest.param(everything(2), (2, 2), 2, id="states, PP 2 x TP 2 to 2"),
]


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(("streams", "prefill", "decode"), CASES)
async def test_every_byte_lands_where_it_belongs(
    plane: str, streams: list[Whole], prefill: tuple[int, int], decode: int, seed: int
) -> None:
    truth = truth_of(streams, TOKENS, seed)
    async with group(plane, streams, prefill, decode) as g:
        await transferred(g, truth, 1, TOKENS)
