"""Rooms between pools whose pages differ in size, byte for byte, over every plane that is here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.checksum import PageChecksums
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import StagedArrivals
from kvflow.protocols.errors import Code, KvflowError, MisuseError
from kvflow.protocols.pages.kinds import PAGE, ROW, StateKind
from kvflow.protocols.pages.layout import Order, PoolLayout, Space, build_layout
from kvflow.protocols.ports import DataPlane
from kvflow.protocols.wire.messages import ChunkDone
from kvflow.testing.pair import Pair, pair, until
from kvflow.transports.control.memory import Fate, Frame
from kvflow.transports.data.fake import Fault
from kvflow.transports.data.select import check_plane, open_plane
from tests.handlers.scenes import code_of, ledger

WINDOW = 40
KINDS = [
    StateKind("0.k", "uint8", (2, 4)),
    StateKind("0.v", "bfloat16", (2, 3)),
    StateKind("1.k", "uint8", (5,), space="window"),
    StateKind("2.ssm", "float32", (3,), ROW),
]
Truth = dict[str, NDArray[np.uint8]]
"""By stream, what a prompt keeps: uint8 [tokens, or 1 row, bytes]."""


class Sizes(NamedTuple):
    """The page size of either side."""

    prefill: int
    decode: int

    @property
    def small(self) -> int:
        return min(self)

    @property
    def large(self) -> int:
        return max(self)


WAYS = [Sizes(16, 64), Sizes(64, 16)]
SMALL = [Sizes(4, 16), Sizes(16, 4), Sizes(4, 8)]


def layout_of(page_size: int, order: Order, most_tokens: int = 200) -> PoolLayout:
    pages = -(-most_tokens // page_size) + 3
    spaces = (
        Space("pages", pages, page_size),
        Space("window", pages, page_size, WINDOW),
        Space("rows", 6, 0),
    )
    return build_layout(KINDS, spaces=spaces, order=order)


@asynccontextmanager
async def between(
    sizes: Sizes,
    plane: str = "fake",
    *,
    orders: tuple[Order, Order] = ("page_first", "layer_first"),
    verify: bool = False,
    staged: str = "",
) -> AsyncIterator[Pair]:
    """A pair over pools with pages of these sizes. `staged` names the sides that have staging."""
    made = None
    if plane != "fake":
        try:
            check_plane(plane)
        except MisuseError as error:
            pytest.skip(str(error))

        def made(pool: PagedPool) -> DataPlane:
            return open_plane(plane, pool.segment, None, "127.0.0.1")

    async with pair(
        source_layout=layout_of(sizes.prefill, orders[0]),
        target_layout=layout_of(sizes.decode, orders[1]),
        source_staging_bytes=0 if "prefill" in staged else None,
        staging_bytes=0 if "decode" in staged else None,
        open_plane=made,
    ) as p:
        if verify:
            p.prefill.shell.checksums = PageChecksums(p.prefill.pool)
            p.decode.shell.checksums = PageChecksums(p.decode.pool)
            p.decode.shell.endpoint.core.verify = True
            if isinstance(p.decode._arrivals, StagedArrivals):
                p.decode._arrivals._verify = True
        yield p


def truth_of(tokens: int, seed: int) -> Truth:
    rng = np.random.default_rng([tokens, seed])
    layout, found = layout_of(1, "page_first", 1), {}
    for c in layout.components:
        count = 1 if layout.spaces[c.space].in_rows else tokens
        found[c.name] = rng.integers(1, 255, (count, c.size_bytes), dtype=np.uint8)
    return found


def bytes_of(pool: PagedPool, name: str) -> NDArray[np.uint8]:
    """The bytes of a stream, a view: uint8 [places, slots, bytes]."""
    array = pool.array(name).view(np.uint8)
    slots = pool.layout.spaces[_component(pool, name).space].page_size or 1
    return array.reshape(len(array), slots, -1)


def _component(pool: PagedPool, name: str) -> Any:
    return next(c for c in pool.layout.components if c.name == name)


def _first_token(pool: PagedPool, space: Space, tokens: int, prefix: int) -> int:
    return max(prefix, tokens - space.window if space.window else 0)


def fill(pool: PagedPool, places: Sequence[Any], truth: Truth, tokens: int, prefix: int) -> None:
    """What an engine computes: the tokens of the prompt in the places of a room, and junk after."""
    for name, own in truth.items():
        c, array = _component(pool, name), bytes_of(pool, name)
        space, there = pool.layout.spaces[c.space], places[c.space]
        if space.in_rows:
            array[there, 0] = own
            continue
        if not len(there):
            continue
        size = space.page_size
        begin = _first_token(pool, space, tokens, prefix) // size * size
        whole = np.full((len(there) * size, own.shape[1]), 255, np.uint8)
        whole[: tokens - begin] = own[begin:]
        array[there] = whole.reshape(len(there), size, -1)


def check(p: Pair, sizes: Sizes, room: DecodeRoom, truth: Truth, was: Truth, prefix: int) -> None:
    """Every token of the room is there, and nothing outside of its small pages has changed."""
    pool, tokens = p.decode.pool, room.tokens
    places = pool.layout.split(room.pages)
    for name, own in truth.items():
        c, array, before = _component(pool, name), bytes_of(pool, name), was[name].copy()
        space, there = pool.layout.spaces[c.space], places[c.space]
        if space.in_rows:
            before[there, 0] = own
        if space.in_rows or not len(there):
            assert np.array_equal(array, before), name
            continue
        size = space.page_size
        first = _first_token(pool, space, tokens, prefix)
        begin = first // size * size
        flat = np.ascontiguousarray(array[there]).reshape(len(there) * size, -1)
        expected = before[there].reshape(len(there) * size, -1).copy()
        if first < tokens:
            # Whole small pages arrive: what they have before the window, or after the prompt, too.
            low = first // sizes.small * sizes.small - begin
            high = -(-tokens // sizes.small) * sizes.small - begin
            expected[low:high] = flat[low:high]
            expected[first - begin : tokens - begin] = own[first:]
        assert np.array_equal(flat, expected), f"{name} of {tokens} tokens after {prefix}"
        others = np.setdiff1d(np.arange(len(array)), there)
        assert np.array_equal(array[others], before[others]), f"{name}: foreign bytes"


def contents(p: Pair) -> Truth:
    return {c.name: bytes_of(p.decode.pool, c.name).copy() for c in p.decode.pool.layout.components}


def cut_in(layout: PoolLayout, places: Sequence[Any], ends: Sequence[int]) -> Iterator[Any]:
    """Cut the places of a room into chunks, at `ends` among the pages of the first space. Pages of
    the window go along one by one; what is left of them, and the row, with the last chunk.
    """
    at = 0
    for number, end in enumerate((*ends, len(places[0]))):
        last = number == len(ends)
        window = places[1][number:] if last else places[1][number : number + 1]
        yield (
            layout.numbered([places[0][at:end], window, places[2] if last else places[2][:0]]),
            last,
        )
        at = end


async def opened(
    p: Pair, room: int, tokens: int, prefix: int = 0
) -> tuple[PrefillRoom, DecodeRoom, Any]:
    """Open both halves of a room, and take what prefill computes for it."""
    prompt = np.arange(1, tokens + 1)
    source = p.prefill.room(room, prompt)
    target = await p.decode.room(room, "sim", prompt, prefix_tokens=prefix)
    assert await source.matched() == prefix
    pool, owner = p.prefill.pool, ("engine", room)
    layout = pool.layout
    assert source.record.wanted == layout.wanted(tokens, prefix)
    taken = pool.places.take_room(source.record.wanted, owner)
    source.on_end(lambda: pool.places.give_back(taken, owner))
    mixed = [np.random.default_rng(tokens).permutation(own) for own in layout.split(taken)]
    return source, target, mixed


async def transferred(
    p: Pair, sizes: Sizes, room: int, tokens: int, ends: Sequence[int] = (), prefix: int = 0
) -> None:
    source, target, places = await opened(p, room, tokens, prefix)
    truth, was = truth_of(tokens, room), contents(p)
    fill(p.prefill.pool, places, truth, tokens, prefix)
    for chunk, last in cut_in(p.prefill.pool.layout, places, ends):
        if chunk.size or last:
            source.send(chunk, last=last, handoff=b"handoff" if last else b"")
    assert await target.landed() == b"handoff"
    check(p, sizes, target, truth, was, prefix)
    await source.done()
    target.close()


# --- every length


@pytest.mark.parametrize("sizes", WAYS, ids=str)
@pytest.mark.parametrize("orders", [("page_first",) * 2, ("layer_first",) * 2], ids="-".join)
async def test_every_length_up_to_three_large_pages(
    sizes: Sizes, orders: tuple[Order, Order]
) -> None:
    async with between(sizes, "local", orders=orders) as p:
        for tokens in range(1, 3 * sizes.large + 1):
            pages = -(-tokens // sizes.prefill)
            ends = range(1, pages, 1 + tokens % 3)
            await transferred(p, sizes, tokens, tokens, ends)
        await p.rest()


@pytest.mark.parametrize("sizes", WAYS, ids=str)
@pytest.mark.parametrize(
    ("plane", "staged"),
    [
        ("fake", ""),
        ("fake", "decode"),
        ("local", ""),
        ("local", "prefill"),
        ("local", "decode"),
        ("local", "prefill, decode"),
    ],
)
async def test_verified_and_staged(sizes: Sizes, staged: str, plane: str) -> None:
    async with between(sizes, plane, verify=True, staged=staged) as p:
        for tokens in range(1, 3 * sizes.large + 1, 7):
            ends = range(1, -(-tokens // sizes.prefill), 2)
            await transferred(p, sizes, tokens, tokens, ends)
        assert p.decode.counts.mismatched == 0
        await p.rest()


@pytest.mark.parametrize("sizes", WAYS, ids=str)
@pytest.mark.parametrize("plane", ["mooncake", "nixl"])
@pytest.mark.parametrize("staged", ["", "prefill, decode"])
async def test_over_other_planes(sizes: Sizes, plane: str, staged: str) -> None:
    async with between(sizes, plane, verify=True, staged=staged) as p:
        for tokens in (1, 15, 16, 17, 63, 64, 65, 100, 128, 129, 191, 192):
            ends = range(1, -(-tokens // sizes.prefill), 2)
            await transferred(p, sizes, tokens, tokens, ends)
        assert p.decode.counts.mismatched == 0
        await p.rest()


# --- every cut


@pytest.mark.parametrize("sizes", SMALL, ids=str)
@pytest.mark.parametrize("verify", [False, True])
async def test_cut_at_every_page_of_prefill(sizes: Sizes, verify: bool) -> None:
    """A chunk may end inside of a page of decode, or bring several."""
    async with between(sizes, verify=verify, staged="decode" if verify else "") as p:
        room = 0
        for tokens in range(1, 3 * sizes.large + 1):
            pages = -(-tokens // sizes.prefill)
            for ends in [(end,) for end in range(pages)] + [tuple(range(pages))]:
                room += 1
                await transferred(p, sizes, room, tokens, ends)
        assert p.decode.counts.mismatched == 0
        await p.rest()


@pytest.mark.parametrize("sizes", SMALL, ids=str)
async def test_after_every_prefix_of_decode(sizes: Sizes) -> None:
    """A prefix is a whole number of pages of decode, and may end inside of a page of prefill."""
    async with between(sizes, verify=True) as p:
        room = 0
        for tokens in (1, 15, 16, 17, 31, 37, 48):
            for prefix in (*range(0, tokens, sizes.decode), tokens):
                room += 1
                await transferred(p, sizes, room, tokens, (1,), prefix)
        await p.rest()


async def test_many_rooms_at_once() -> None:
    sizes = Sizes(4, 16)
    async with between(sizes, "local", verify=True) as p:
        lengths = (3, 20, 33, 48, 7)
        rooms = [await opened(p, room, tokens) for room, tokens in enumerate(lengths, 1)]
        truths = [truth_of(tokens, 9) for tokens in lengths]
        for (_, _, places), tokens, truth in zip(rooms, lengths, truths, strict=True):
            fill(p.prefill.pool, places, truth, tokens, 0)
        was = contents(p)
        for source, _, places in rooms:
            for chunk, last in cut_in(p.prefill.pool.layout, places, (1, 3)):
                if chunk.size or last:
                    source.send(chunk, last=last)
        # A room that still lands would change pages between a copy of them and a look at them.
        for _, target, _ in rooms:
            await target.landed()
        owned = [p.decode.pool.layout.split(target.pages) for _, target, _ in rooms]
        for (_, target, _), truth, own in zip(rooms, truths, owned, strict=True):
            before = {name: was[name].copy() for name in was}
            for name, array in before.items():
                space = _component(p.decode.pool, name).space
                for other in owned:
                    if other is not own:
                        array[other[space]] = bytes_of(p.decode.pool, name)[other[space]]
            check(p, sizes, target, truth, before, 0)
        for _, target, _ in rooms:
            target.close()
        await p.rest()


# --- what goes wrong


@pytest.mark.parametrize("sizes", SMALL, ids=str)
@pytest.mark.parametrize("by", ["decode", "prefill"])
async def test_an_aborted_room_keeps_its_pages_until_its_writes_are_over(
    sizes: Sizes, by: str
) -> None:
    async with between(sizes) as p:
        plane = p.plane(p.prefill)
        plane.drains_at_once = False
        plane.hold()
        source, target, places = await opened(p, 7, 33)
        wanted = p.decode.pool.layout.wanted(33)
        chunks = cut_in(p.prefill.pool.layout, places, (1,))
        source.send(next(chunks)[0])
        assert plane.step(1), "a part of a page has landed"
        (source if by == "prefill" else target).close()
        await until(lambda: p.decode.quarantined_pages == sum(wanted))
        assert ledger(p.decode).quarantined == wanted
        plane.release()
        await p.rest()
        plane.drains_at_once = True
        await transferred(p, sizes, 8, 33, (1,))
        await p.rest()


@pytest.mark.parametrize("sizes", SMALL, ids=str)
async def test_a_late_part_of_a_page_reaches_no_other_room(sizes: Sizes) -> None:
    async with between(sizes) as p:
        plane = p.plane(p.prefill)
        plane.script(Fault.LATE)
        source, target, places = await opened(p, 7, 33)
        fill(p.prefill.pool, places, truth_of(33, 1), 33, 0)
        for chunk, last in cut_in(p.prefill.pool.layout, places, ()):
            source.send(chunk, last=last)
        with pytest.raises(KvflowError):
            await target.landed()
        wanted = p.decode.pool.layout.wanted(33)
        await until(lambda: ledger(p.decode).quarantined == wanted)
        ledger(p.decode).quarantine_limit = wanted
        await transferred(p, sizes, 8, 20)
        was = contents(p)
        assert plane.land_late() > 0
        lent = p.decode.pool.layout.split(target.pages)
        for name, before in was.items():
            others = np.setdiff1d(
                np.arange(len(before)), lent[_component(p.decode.pool, name).space]
            )
            assert np.array_equal(bytes_of(p.decode.pool, name)[others], before[others])
        await p.crash(p.prefill)
        await until(lambda: not p.decode.quarantined_pages)
        await p.rest()


@pytest.mark.parametrize("sizes", SMALL, ids=str)
@pytest.mark.parametrize("staged", ["", "decode"])
@pytest.mark.parametrize("chunk", [0, 1, 2])
async def test_a_changed_byte_of_any_part_is_found(sizes: Sizes, staged: str, chunk: int) -> None:
    async with between(sizes, verify=True, staged=staged) as p:
        source, target, places = await opened(p, 7, 48)
        truth = truth_of(48, 1)
        fill(p.prefill.pool, places, truth, 48, 0)
        ends = [16 // sizes.prefill, 32 // sizes.prefill]

        spoiled: list[Frame] = []  # a frame that comes again would restore the byte

        def spoil(frame: Frame) -> Fate | None:
            message = frame.message
            if isinstance(message, ChunkDone) and message.seq == chunk and not spoiled:
                spoiled.append(frame)
                pool = p.decode.reached
                lent = pool.layout.split(target.holding.lent)[0]
                token = 16 * chunk + 5
                page = lent[token // sizes.decode]
                bytes_of(pool, "0.v")[page, token % sizes.decode, 0] ^= 1
            return None

        p.network.rules.append(spoil)
        for part, last in cut_in(p.prefill.pool.layout, places, ends):
            source.send(part, last=last)
        assert await code_of(target.landed()) is Code.TRANSFER_ERROR
        assert p.decode.counts.mismatched == 1
        p.network.mend()
        await p.rest()


async def test_a_chunk_that_lacks_pages_is_refused_in_prefills_pages() -> None:
    async with between(Sizes(4, 16)) as p:
        source, target, places = await opened(p, 7, 33)
        first, *rest = (chunk for chunk, _ in cut_in(p.prefill.pool.layout, places, (8,)))
        text = r"chunk of 8 pages, 1 'window' page.*9 pages, 9 'window' pages"
        with pytest.raises(MisuseError, match=text):
            source.send(first, last=True)
        source.send(first)
        source.send(*rest, last=True)
        await target.landed()
        target.close()
        await p.rest()


SCALE = StateKind("0.scale", "uint8", (4,), PAGE)


@pytest.mark.parametrize(
    ("kinds", "sizes", "text"),
    [
        (KINDS[:2], Sizes(6, 4), "page_size: prefill 6, decode 4 (neither size is a multiple"),
        ([*KINDS[:2], SCALE], Sizes(8, 4), "(0.scale is one piece for each page, not one for each"),
    ],
    ids=["no multiple", "per page"],
)
async def test_pools_that_cannot_be_divided_are_refused_by_name(
    kinds: list[StateKind], sizes: Sizes, text: str
) -> None:
    layouts = [build_layout(kinds, page_size=size, num_pages=9) for size in sizes]
    async with pair(source_layout=layouts[0], target_layout=layouts[1]) as p:
        with pytest.raises(KvflowError) as seen:
            await p.decode.room(7, "sim", range(10))
        assert text in str(seen.value) and seen.value.code is Code.REFUSED
        await p.rest()
