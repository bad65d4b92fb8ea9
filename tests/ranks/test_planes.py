"""Prefills and decodes of different widths, over each data plane."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import numpy as np
import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.decode import links as decode_links
from kvflow.protocols.errors import (
    AbortedError,
    Cause,
    Code,
    KvflowError,
    MisuseError,
    RefusedError,
    TransferError,
)
from kvflow.protocols.pages import coverage
from kvflow.protocols.pages import layout as layout_module
from kvflow.protocols.pages.components import Component, served
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.kinds import StateKind
from kvflow.protocols.pages.layout import Order, PageIndices, Places, build_layout
from kvflow.protocols.pages.spaces import Counts
from kvflow.protocols.ports import ChecksumTask
from kvflow.protocols.prefill import peers as prefill_peers
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.testing.conformance.bench import SETTLE_S
from kvflow.testing.pair import until
from kvflow.transports.data.select import open_plane
from tests.ranks.shards import (
    PAGE_SIZE,
    Truth,
    Whole,
    check,
    everything,
    fill,
    heads,
    latents,
    shard_of,
    truth_of,
)

PAGES, ROWS = 40, 4
TOKENS = 30  # 8 pages, the last of them in part


class Group(NamedTuple):
    prefills: list[PrefillNode]
    decode: DecodeNode


def _is_there(*packages: str) -> bool:
    return any(importlib.util.find_spec(package) is not None for package in packages)


NO_MOONCAKE = pytest.mark.skipif(not _is_there("mooncake"), reason="no mooncake")
NO_NIXL = pytest.mark.skipif(not _is_there("nixl_cu12", "nixl_cu13"), reason="no nixl")
PLANES = [
    "local",
    # A second each: every rank starts an engine.
    pytest.param("mooncake", marks=[NO_MOONCAKE, pytest.mark.slow]),
    pytest.param("nixl", marks=[NO_NIXL, pytest.mark.slow, pytest.mark.soak]),
]


def pool_of(
    kinds: Sequence[object], rows: bool, order: Order, fingerprint: str = "model"
) -> PagedPool:
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
    rate: float | None = None,
    staged: bool = False,
    gathers: bool = False,
    lands: bool = False,
    changed: Callable[[list[StateKind], int], list[StateKind]] | None = None,
) -> AsyncIterator[Group]:
    """`prefill`: stages, and shards of each. `staged` is on both sides, `gathers` at prefill,
    `lands` at decode. `rate` is in bytes/s of each rank.
    """
    stages, shards = prefill
    rows = any(s.kind.unit == "row" for s in streams)
    ranks = [(stage, shard) for stage in range(stages) for shard in range(shards)]
    async with AsyncExitStack() as stack:
        prefills = []
        for rank, (stage, shard) in enumerate(ranks):
            kinds = shard_of(streams, shard, shards, stage, stages)
            pool = pool_of(kinds if changed is None else changed(kinds, rank), rows, orders[0])
            stack.callback(pool.close)
            staging = _staging(pool, stack) if staged or gathers else None
            segment = (pool if staging is None else staging.host).segment
            sends = open_plane(plane, segment, rate_limit_bytes_per_s=rate)
            node = PrefillNode(
                pool,
                sends,
                rank=rank,
                world_size=len(ranks),
                verify_transfers=verify,
                staging=staging,
            )
            prefills.append(await stack.enter_async_context(node))
        parts = [
            kind
            for shard in range(decode_shards)
            for kind in shard_of(streams, shard, decode_shards)
        ]
        pool = pool_of(parts, rows, orders[1])
        stack.callback(pool.close)
        staging = _staging(pool, stack, shards if lands else 1) if staged or lands else None
        decode = DecodeNode(pool, plane, verify_transfers=verify, staging=staging)
        yield Group(prefills, await stack.enter_async_context(decode))


def _staging(pool: PagedPool, stack: AsyncExitStack, shards: int = 1) -> Staging:
    staging = Staging(pool, shards=shards)
    stack.callback(staging.close)
    return staging


def taken(node: PrefillNode, pages: int, rows: bool) -> Places:
    found = node.pool.pages.take(pages, "test")
    mixed = np.random.default_rng(pages).permutation(found).astype(np.int32)
    return (mixed, node.pool.rows.take(1, "test")) if rows else (mixed,)


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
        *others, last = np.array_split(places[0], chunks)
        for piece in others:
            source.send(piece)
        source.send(node.pool.layout.numbered((last, *places[1:])), last=True)
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


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(
    ("streams", "prefill", "decode", "orders"),
    [
        pytest.param(heads(2, 8), (1, 2), 1, ("page_first", "page_first"), id="TP 2 to 1"),
        pytest.param(heads(2, 8), (1, 1), 2, ("layer_first", "page_first"), id="TP 1 to 2"),
        pytest.param(
            everything(2), (2, 2), 4, ("page_first", "layer_first"), id="states, PP 2 x TP 2 to 4"
        ),
        pytest.param(
            latents(1), (1, 4), 2, ("page_first", "page_first"), id="MLA, two ranks send nothing"
        ),
    ],
)
async def test_checksums_are_of_what_each_rank_has_sent(
    plane: str,
    streams: list[Whole],
    prefill: tuple[int, int],
    decode: int,
    orders: tuple[Order, Order],
    seed: int,
) -> None:
    truth = truth_of(streams, TOKENS, seed)
    async with group(plane, streams, prefill, decode, orders=orders, verify=True) as g:
        await transferred(g, truth, 1, TOKENS)
        assert g.decode.counts.mismatched == 0


@pytest.mark.parametrize("copy", [0, 1])
async def test_a_byte_that_changed_on_its_way_is_found_in_any_part_and_copy(
    copy: int, seed: int
) -> None:
    streams = [*heads(1, 4), *latents(1)]
    truth = truth_of(streams, TOKENS, seed)
    async with group("local", streams, (1, 2), 2, verify=True) as g:
        array = g.decode.pool.array("0.latent", replica=copy)
        begin = g.decode.shell.checksums.begin  # type: ignore[union-attr]

        def spoil(
            pages: PageIndices, served: tuple[Served, ...] | None = None, sizes: Counts = ()
        ) -> ChecksumTask:
            if any(each.name == "0.latent" for each in served or ()):
                array[pages[0], 1] ^= 1
            return begin(pages, served, sizes)

        g.decode.shell.checksums.begin = spoil  # type: ignore[method-assign, union-attr]
        with pytest.raises(TransferError, match=r"rank 0: checksum .* at prefill"):
            await transferred(g, truth, 1, TOKENS)
        assert g.decode.counts.mismatched == 1


@pytest.mark.parametrize("plane", PLANES)
async def test_an_abort_in_mid_transfer_leaves_no_late_byte(plane: str, seed: int) -> None:
    """Both ranks drain; the pages are free when both have, and are the next room's."""
    streams, tokens = heads(4, 8), PAGES * PAGE_SIZE
    truth = truth_of(streams, tokens, seed)
    async with group(plane, streams, (1, 2), 1, rate=400_000) as g:
        sources, target = await opened(g, 1, range(tokens))
        for node, source in zip(g.prefills, sources, strict=True):
            places = taken(node, PAGES, rows=False)
            fill(node.pool, places, truth)
            source.send(places[0], last=True)
        await until(lambda: all(0 < source.bytes_landed < source.bytes_total for source in sources))
        pages = target.pages.copy()
        target.close()
        with pytest.raises(AbortedError):
            await target.landed()
        await target.released()
        assert g.decode.pool.pages.at_rest() and all(source.ended for source in sources)
        for c in g.decode.pool.layout.components:  # what lands from here on would show
            g.decode.pool.array(c.name)[pages] = 0
        for node in g.prefills:
            assert not node.pinned_pages
        await asyncio.sleep(SETTLE_S)
        for c in g.decode.pool.layout.components:
            assert not g.decode.pool.array(c.name).any()


async def test_staging_on_both_sides_brings_each_rank_by_itself(seed: int) -> None:
    """Decode brings a rank's chunk when it landed, whatever became of the other's."""
    streams = everything(2)
    truth = truth_of(streams, TOKENS, seed)
    for verify in (False, True):
        async with group("local", streams, (1, 2), 2, verify=verify, staged=True) as g:
            await transferred(g, truth, 1, TOKENS, chunks=3)


REFUSED = [
    pytest.param(
        lambda kinds, rank: kinds if rank == 0 else [k for k in kinds if k.name != "1.v"],
        "1.v: no rank sends entries 4..8",
        id="a part is missing",
    ),
    pytest.param(
        lambda kinds, rank: [k for k in kinds if k.name != "0.k"],
        "0.k: no rank sends it",
        id="a component is missing",
    ),
    pytest.param(
        lambda kinds, rank: [k._replace(start=0) if k.name == "0.v" else k for k in kinds],
        "0.v: entries 0..4 come from rank 0 and from rank 1; 0.v: no rank sends entries 4..8",
        id="a part comes twice",
    ),
]


@pytest.mark.parametrize(("changed", "text"), REFUSED)
async def test_ranks_that_do_not_make_up_the_pool_are_refused_before_anything_is_lent(
    changed: Callable[[list[StateKind], int], list[StateKind]], text: str
) -> None:
    streams = heads(2, 8)
    async with group("local", streams, (1, 2), 1, changed=changed) as g:
        for room in (1, 2):  # the second is refused when it is opened: all are linked by then
            sources = [node.room(room, range(9)) for node in g.prefills]
            with pytest.raises(RefusedError, match=re.escape(text)):
                await g.decode.room(room, [node.info for node in g.prefills], range(9))
            for source in sources:
                with pytest.raises(RefusedError, match="is not decode's pool, each byte once"):
                    await source.matched()
        assert g.decode.pool.pages.at_rest() and g.decode.counts.rooms_opened == 1
        await until(lambda: not len(g.decode.shell.endpoint.core.ledger))


def forgetful(components: Iterable[Component]) -> tuple[Component, ...]:
    """A mutant of `served`: a rank does not send the last of its parts."""
    return tuple(c for c in served(components) if c.label != "1.v[4:8 of 8]")


async def test_a_rank_that_forgets_a_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    streams = heads(2, 8)
    monkeypatch.setattr(layout_module, "served", forgetful)
    async with group("local", streams, (1, 2), 1) as g:
        with pytest.raises(RefusedError, match=r"1.v: no rank sends entries 4..8"):
            await g.decode.room(1, [node.info for node in g.prefills], range(9))
    # And where decode does not look, bytes are missing.
    monkeypatch.setattr(decode_links, "uncovered", lambda *_: "")
    async with group("local", streams, (1, 2), 1) as g:
        with pytest.raises(AssertionError, match=r"1.v"):
            await transferred(g, truth_of(streams, TOKENS, seed), 1, TOKENS)


async def test_a_rank_that_says_more_than_it_sends_is_found_by_the_checksum(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    streams = heads(2, 8)
    whole = build_layout(shard_of(streams, 1, 2), page_size=PAGE_SIZE, num_pages=1)
    monkeypatch.setattr(layout_module, "served", forgetful)
    right = coverage.served_of
    monkeypatch.setattr(
        prefill_peers,
        "served_of",
        lambda layout: right(whole if layout.components[0].start else layout),
    )
    async with group("local", streams, (1, 2), 1, verify=True) as g:
        with pytest.raises(TransferError, match="of rank 1: checksum"):
            await transferred(g, truth_of(streams, TOKENS, seed), 1, TOKENS)


async def test_a_room_is_served_by_its_group_or_by_the_one_it_names() -> None:
    streams = heads(1, 2)
    asked: list[str] = []
    async with AsyncExitStack() as stack:
        prefills = []
        for group_number in range(2):
            pool = pool_of(shard_of(streams, 0, 1), False, "page_first")
            stack.callback(pool.close)
            node = PrefillNode(pool, "local", dp_rank=group_number, dp_size=2)
            prefills.append(await stack.enter_async_context(node))
        every = [node.info for node in prefills]

        async def resolve(word: str) -> list[RankInfo]:
            asked.append(word)
            return every

        pool = pool_of(shard_of(streams, 0, 1), False, "page_first")
        stack.callback(pool.close)
        decode = await stack.enter_async_context(DecodeNode(pool, "local", resolve=resolve))
        cases = ((4, None, 0), (5, None, 1), (6, 1, 1), (7, 0, 0), (9, None, 1))
        for room, dp_rank, served_by in cases:
            source = prefills[served_by].room(room, range(5))
            target = decode.room(room, "dp" if room != 9 else every, range(5), dp_rank=dp_rank)
            await target
            await source.matched()
            target.close()
            await target.released()
        assert asked == ["dp", "dp"], "once for each group that was not linked"
        decode.refuse(10, "dp", Cause(Code.CAPACITY, "not now"), dp_rank=1)
        with pytest.raises(KvflowError, match="not now"):
            await prefills[1].room(10, range(5)).matched()
        with pytest.raises(MisuseError, match=r"dp_rank 2 is outside 0..1"):
            decode.room(11, every, range(5), dp_rank=2)
