"""Rooms of pools of three spaces: pages, a window and rows. Bytes are compared in all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.checksum import PageChecksums
from kvflow.memory.external import ExternalPages
from kvflow.memory.places import PlaceAllocator
from kvflow.memory.staging import StagedArrivals, Staging
from kvflow.node.report import node_report
from kvflow.protocols.errors import (
    CapacityError,
    Code,
    KvflowError,
    LayoutError,
    MisuseError,
    OwnershipError,
)
from kvflow.protocols.pages.layout import PageIndices, Places, resized
from kvflow.protocols.pages.spaces import Counts
from kvflow.protocols.waiting import Waits
from kvflow.protocols.wire.messages import ChunkDone
from kvflow.testing.pair import Pair, pair, until
from kvflow.transports.control.memory import Fate, Frame
from kvflow.transports.data.fake import Fault
from tests.handlers.scenes import code_of, ledger
from tests.handlers.test_checks import slow_sums
from tests.memory.kinds import (
    Bytes,
    check_restored,
    contents,
    give_back,
    layout_of,
    overwrite,
    space_of,
)

KIND = "windows"
# 33 tokens: nine pages of four. The last twelve are in three pages of eight.
PROMPT = range(1, 34)
WANTED = (9, 3, 1)
LAYOUTS: dict[str, Any] = {
    "source_layout": layout_of(KIND, 4, 20, 4, "page_first"),
    "target_layout": layout_of(KIND, 4, 16, 3, "layer_first"),
}
# Each chunk of a room, as a number of places of each space.
CUTS: list[list[Counts]] = [
    [WANTED],
    [(0, 2, 0), (9, 1, 1)],
    [(9, 0, 0), (0, 3, 0), (0, 0, 1)],
    [(4, 1, 0), (4, 0, 0), (1, 2, 1)],
    [(1, 1, 0), (0, 1, 0), (8, 1, 0), (0, 0, 1)],
]


@asynccontextmanager
async def three(*, staged: bool) -> AsyncIterator[Pair]:
    async with pair(**LAYOUTS, staging_bytes=0 if staged else None) as made:
        for seed, node in enumerate(made.nodes):
            overwrite(node.pool, seed)
        yield made


@pytest.fixture
async def p() -> AsyncIterator[Pair]:
    async with three(staged=False) as made:
        yield made


@pytest.fixture
async def staged() -> AsyncIterator[Pair]:
    async with three(staged=True) as made:
        yield made


def verify(p: Pair) -> None:
    p.prefill.shell.checksums = PageChecksums(p.prefill.pool)
    p.decode.shell.checksums = PageChecksums(p.decode.pool)
    p.decode.shell.endpoint.core.verify = True
    if isinstance(p.decode._arrivals, StagedArrivals):
        p.decode._arrivals._verify = True


class Memory(NamedTuple):
    """What both pools hold before a room."""

    source: dict[str, Bytes]
    target: dict[str, Bytes]

    def check(self, p: Pair, mine: Places, theirs: Places) -> None:
        """Each place of a room has the bytes sent, and no other place changed."""
        check_restored(KIND, self.source, mine, self.target, theirs, p.decode.pool)


def now(p: Pair) -> Memory:
    return Memory(contents(KIND, p.prefill.pool), contents(KIND, p.decode.pool))


async def opened(p: Pair, room: int = 7, prefix: int = 0) -> tuple[PrefillRoom, DecodeRoom]:
    source = p.prefill.room(room, PROMPT)
    target = await p.decode.room(room, "sim", PROMPT, prefix_tokens=prefix)
    assert await source.matched() == prefix
    return source, target


def computed(p: Pair, room: PrefillRoom) -> Places:
    """Take what an engine computed for a room; it is given back when the room ends."""
    pool, owner = p.prefill.pool, ("engine", room.room)
    mine = pool.layout.split(pool.places.take_room(room.record.wanted, owner))
    room.on_end(lambda: give_back(pool, mine, owner))
    return mine


def send(p: Pair, room: PrefillRoom, mine: Places, cut: list[Counts]) -> None:
    done = [0] * len(mine)
    for i, counts in enumerate(cut):
        part = [own[first : first + n] for own, first, n in zip(mine, done, counts, strict=True)]
        done = [first + n for first, n in zip(done, counts, strict=True)]
        last = i == len(cut) - 1
        places = p.prefill.pool.layout.numbered(part)
        room.send(places, last=last, handoff=b"handoff" if last else b"")


async def landed(p: Pair, room: int, cut: list[Counts]) -> DecodeRoom:
    source, target = await opened(p, room)
    before, mine = now(p), computed(p, source)
    send(p, source, mine, cut)
    assert await target.landed() == b"handoff"
    before.check(p, mine, p.decode.pool.layout.split(target.pages))
    return target


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("staged", [False, True])
async def test_every_byte_of_every_space_lands(
    cut: list[Counts], verified: bool, staged: bool
) -> None:
    async with three(staged=staged) as p:
        if verified:
            verify(p)
        source, target = await opened(p)
        assert target.counts == source.record.wanted == WANTED
        before, mine = now(p), computed(p, source)
        send(p, source, mine, cut)
        assert await target.landed() == b"handoff"
        assert source.bytes_landed == source.bytes_total == p.decode.counts.bytes_moved
        assert source.bytes_total == p.prefill.pool.layout.room_bytes(WANTED)
        kept = target.keep("sequence")
        places = p.decode.pool.layout.split(kept)
        assert tuple(own.size for own in places) == WANTED
        before.check(p, mine, places)
        owned = [allocator.owned() for allocator in p.decode.pool.allocators]
        assert owned == [{"sequence": n} for n in WANTED]
        p.decode.pages.give_back(kept, "sequence")
        assert p.decode.counts.mismatched == 0
        await p.rest()


@pytest.mark.parametrize(
    ("prefix", "wanted"), [(8, (7, 3, 1)), (24, (3, 2, 1)), (33, (0, 0, 1))], ids=str
)
async def test_only_what_decode_lacks_travels(p: Pair, prefix: int, wanted: Counts) -> None:
    source, target = await opened(p, prefix=prefix)
    assert target.counts == source.record.wanted == wanted
    before, mine = now(p), computed(p, source)
    send(p, source, mine, [wanted])
    await target.landed()
    before.check(p, mine, p.decode.pool.layout.split(target.pages))
    target.close()
    await p.rest()


async def test_a_prefix_of_half_a_page_of_the_window_is_refused(p: Pair) -> None:
    with pytest.raises(MisuseError, match="prefix_tokens 4 is neither a whole number of 8-token"):
        p.decode.room(7, "sim", PROMPT, prefix_tokens=4)


@pytest.mark.parametrize("by", ["decode", "prefill"])
@pytest.mark.parametrize("cut", CUTS[1:], ids=str)
async def test_an_aborted_room_keeps_its_places_until_its_writes_are_over(
    p: Pair, cut: list[Counts], by: str
) -> None:
    plane = p.plane(p.prefill)
    plane.drains_at_once = False
    plane.hold()
    source, target = await opened(p)
    send(p, source, computed(p, source), cut)
    assert plane.step(1)  # one place of the first chunk has landed
    free = p.decode.pool.places.free
    assert free == tuple(np.subtract(p.decode.pool.layout.counts, WANTED))
    (target if by == "decode" else source).close()
    await until(lambda: p.decode.quarantined_pages == sum(WANTED))
    assert ledger(p.decode).quarantined == WANTED and p.decode.pool.places.free == free
    plane.release()
    await p.rest()
    assert ledger(p.decode).quarantined == (0, 0, 0)
    (await landed(p, 8, cut)).close()
    await p.rest()


@pytest.mark.parametrize("staged", [False, True])
async def test_a_late_write_reaches_no_other_room(staged: bool) -> None:
    """It lands in all spaces after its room has ended, and another room has landed."""
    async with three(staged=staged) as p:
        plane = p.plane(p.prefill)
        plane.script(Fault.LATE)
        source, target = await opened(p)
        send(p, source, computed(p, source), [WANTED])
        with pytest.raises(KvflowError):
            await target.landed()
        await until(lambda: ledger(p.decode).quarantined == WANTED)
        ledger(p.decode).quarantine_limit = WANTED
        before = now(p)
        other, theirs = await opened(p, 8, prefix=24)
        mine = computed(p, other)
        send(p, other, mine, [(1, 1, 0), (2, 1, 1)])
        await theirs.landed()
        places = p.decode.pool.layout.split(theirs.pages)
        before.check(p, mine, places)
        assert plane.land_late() > 0
        after = contents(KIND, p.decode.pool)
        for name, own in after.items():
            there = places[space_of(KIND, name)]
            sent = before.source[name][mine[space_of(KIND, name)]]
            assert (own[there] == sent).all(), name
        theirs.close()
        await p.crash(p.prefill)
        await until(lambda: not p.decode.quarantined_pages)
        await p.rest()


@pytest.mark.parametrize("space", [0, 1, 2])
@pytest.mark.parametrize("cut", [CUTS[0], CUTS[3]], ids=str)
async def test_a_changed_byte_is_found_in_every_space(
    p: Pair, space: int, cut: list[Counts]
) -> None:
    verify(p)
    source, target = await opened(p)

    spoiled: list[Frame] = []  # a frame that comes again would restore the byte

    def spoil(frame: Frame) -> Fate | None:
        if isinstance(frame.message, ChunkDone) and frame.message.last and not spoiled:
            spoiled.append(frame)
            place = p.decode.pool.layout.split(target.pages)[space][-1]
            name = ("0.v", "1.scale", "2.ssm")[space]
            p.decode.pool.array(name)[place].view(np.uint8)[..., 0] ^= 1
        return None

    p.network.rules.append(spoil)
    send(p, source, computed(p, source), cut)
    assert await code_of(target.landed()) is Code.TRANSFER_ERROR
    assert p.decode.counts.mismatched == 1
    p.network.mend()
    await p.rest()


# --- whose places they are


async def test_a_late_checksum_holds_places_of_every_space(p: Pair) -> None:
    sums, allocators = slow_sums(p.prefill), p.prefill.pool.allocators
    source, target = await opened(p)
    send(p, source, computed(p, source), [WANTED])
    await until(lambda: source.bytes_landed == source.bytes_total)
    (slow,) = sums.begun
    sums.give_up(slow)
    with pytest.raises(KvflowError, match="longer than 120 s"):
        await target.landed()
    await until(lambda: tuple(own.returning_pages for own in allocators) == WANTED)
    assert tuple(own.held_pages for own in allocators) == WANTED, "a thread may read them"
    sums.release(slow)
    await source.released()
    await target.released()
    await p.rest()


async def test_the_figures_of_a_node_are_those_of_every_space(p: Pair) -> None:
    p.plane(p.prefill).script(Fault.STUCK)
    source, target = await opened(p)
    send(p, source, computed(p, source), [WANTED])
    target.close()
    await until(lambda: p.prefill.pinned == ledger(p.decode).quarantined == WANTED)
    assert p.prefill.pinned_pages == p.decode.quarantined_pages == sum(WANTED)
    assert p.prefill.pinned_limits == p.prefill.pool.layout.counts, "the whole pool"
    assert p.decode.quarantine_limit == sum(ledger(p.decode).quarantine_limit)
    for node in p.nodes:
        layout, spaces = (
            node.pool.layout,
            node_report(node, pages_free=0, pages_by_kind={}, at_rest=False).spaces,
        )
        assert [(space.name, space.places) for space in spaces] == [
            (space.name, space.count) for space in layout.spaces
        ]
        assert tuple(space.place_bytes for space in spaces) == layout.place_bytes
        figure = "quarantine" if node is p.decode else "pinned"
        assert tuple(getattr(space, figure) for space in spaces) == WANTED
    p.plane(p.prefill).release()
    await p.rest()


async def test_own_places_are_given_for_every_space(p: Pair) -> None:
    own = ExternalPages(p.decode.pool.layout.num_places)
    p.decode.shell.stores.pages = p.decode.pages = own
    wrong = r"room 7: 9 pages, 2 'window' pages and 1 row given, its prompt needs 9 pages, 3 "
    places = p.decode.pool.layout.numbered(
        [np.array(n, np.int32) for n in ([15, *range(8)], [17, 0, 5], [2])]
    )
    with pytest.raises(MisuseError, match=wrong):
        p.decode.room(7, p.ranks, PROMPT, pages=np.delete(places, 10))
    with pytest.raises(LayoutError, match="of space 'window' follows place"):
        p.decode.room(7, p.ranks, PROMPT, pages=places[::-1])
    source = p.prefill.room(7, PROMPT)
    target = await p.decode.room(7, p.ranks, PROMPT, pages=places)
    await source.matched()
    before, mine = now(p), computed(p, source)
    send(p, source, mine, CUTS[3])
    await target.landed()
    assert target.pages.tolist() == places.tolist()
    before.check(p, mine, p.decode.pool.layout.split(places))
    target.close()
    await target.released()
    assert own.at_rest()


async def test_own_places_are_given_for_every_space_after_a_longer_prefix(p: Pair) -> None:
    """The prefix has grown since the room was announced, so fewer places are needed in each."""
    own = ExternalPages(p.decode.pool.layout.num_places)
    p.decode.shell.stores.pages = p.decode.pages = own
    source, target = p.prefill.room(7, PROMPT), p.decode.announce(7, p.ranks, PROMPT)
    assert target.counts == WANTED
    places = p.decode.pool.layout.numbered(
        [np.array(n, np.int32) for n in ([15, 2, 4], [17, 0], [2])]
    )
    await target.offer(places, prefix_tokens=24)
    assert target.counts == p.decode.pool.layout.wanted(33, 24) == (3, 2, 1)
    assert await source.matched() == 24
    before, mine = now(p), computed(p, source)
    send(p, source, mine, [(2, 1, 0), (1, 1, 1)])
    await target.landed()
    before.check(p, mine, p.decode.pool.layout.split(places))
    target.close()
    await target.released()
    assert own.at_rest()


async def test_an_own_place_of_any_space_is_of_one_room(p: Pair) -> None:
    layout = p.decode.pool.layout
    own = ExternalPages(layout.num_places)
    p.decode.shell.stores.pages = p.decode.pages = own
    first = p.decode.room(
        7, p.ranks, PROMPT, pages=layout.numbered([np.arange(n, dtype=np.int32) for n in WANTED])
    )
    taken = np.array(layout.bases, dtype=np.int32)
    for space, base in enumerate(layout.bases):
        places = taken + np.array((15, 17, 2), dtype=np.int32)
        places[space] = base
        with pytest.raises(OwnershipError, match=f"page {base} is lent to prefill for another"):
            p.decode.room(8, p.ranks, range(1, 5), pages=places)
    assert own.busy_pages == sum(WANTED), "nothing of the refused ones is held"
    first.close()
    await first.released()
    again = p.decode.room(9, p.ranks, range(1, 5), pages=taken)
    again.close()
    await again.released()
    assert own.at_rest()


class Muddled:
    """A store that takes what it should, and returns it otherwise."""

    def __init__(self, store: PlaceAllocator, how: str) -> None:
        self.store, self.how = store, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def take_room(self, counts: Counts, owner: Hashable) -> PageIndices:
        if self.how == "fewer":
            counts = (*counts[:1], counts[1] - 1, *counts[2:])
        elif self.how == "others":
            counts = (counts[0] - 1, counts[1] + 1, *counts[2:])
        elif self.how == "no row":
            counts = (*counts[:2], 0)
        places = self.store.take_room(counts, owner)
        return places[::-1].copy() if self.how == "order" else places


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("how", ["order", "fewer", "others", "no row"])
async def test_a_store_that_muddles_spaces_ends_the_room(staged: bool, how: str) -> None:
    """With staging, places of another space would be overwritten by what is brought to them."""
    text = {
        "order": "of space 'window' follows place",
        "fewer": "9 pages, 2 'window' pages and 1 row for a room of 9 pages, 3",
        "others": "8 pages, 4 'window' pages and 1 row for a room of 9 pages, 3",
        "no row": "9 pages, 3 'window' pages and 0 rows for a room of 9 pages, 3",
    }
    async with three(staged=staged) as p:
        places: Any = p.decode.pool.places
        store: Any = Muddled(places, how)
        p.decode.shell.stores.pages = store
        source = p.prefill.room(7, PROMPT)
        with pytest.raises(KvflowError, match=text[how]):
            await p.decode.room(7, "sim", PROMPT)
        with pytest.raises(KvflowError):
            await source.matched()
        await p.rest()


# --- staging


@pytest.mark.parametrize("lacks", [0, 1, 2])
async def test_a_room_waits_for_the_space_of_the_staging_that_lacks(
    staged: Pair, lacks: int
) -> None:
    p = staged
    reached, shell = p.decode.reached, p.decode.shell
    most = tuple(reached.layout.counts)
    lacking = reached.allocators[lacks]
    others = lacking.take(most[lacks] - WANTED[lacks] + 1, "others")
    free = reached.places.free
    source = p.prefill.room(7, PROMPT)
    target = p.decode.room(7, "sim", PROMPT)
    await until(lambda: shell.waiting)
    waits = p.decode.staging_waits
    assert waits is not None and waits == Waits(1, sum(WANTED), 0, waits.oldest_s)
    assert reached.places.free == free and p.decode.pool.places.at_rest(), "nothing is taken of any"
    shell.lend_returned()
    assert len(shell.waiting) == 1
    if lacks != 2:
        # A shorter prompt passes it.
        short = await p.decode.room(8, "sim", range(8 if lacks == 0 else 4))
        short.close()
    lacking.give_back(others[:1], "others")
    shell.lend_returned()
    await target.opened()
    await source.matched()
    before, mine = now(p), computed(p, source)
    send(p, source, mine, CUTS[4])
    await target.landed()
    before.check(p, mine, p.decode.pool.layout.split(target.pages))
    target.close()
    lacking.give_back(others[1:], "others")
    await p.rest()


@pytest.mark.parametrize("lacks", range(3))
async def test_places_that_others_return_to_any_space_of_the_staging_are_lent(
    staged: Pair, lacks: int
) -> None:
    p = staged
    lacking = p.decode.reached.allocators[lacks]
    others = lacking.take(lacking.free_pages - WANTED[lacks] + 1, "others")
    target = p.decode.room(7, "sim", PROMPT)
    await until(lambda: p.decode.shell.waiting)
    lacking.give_back(others, "others")
    await until(lambda: not p.decode.shell.waiting)
    await target
    target.close()
    await p.rest()


async def test_a_room_that_a_space_of_the_staging_cannot_hold_is_refused_with_its_numbers() -> None:
    async with pair(**LAYOUTS, staging_bytes=600) as p:
        counts = p.decode.reached.layout.counts
        assert counts[1] < 3
        with pytest.raises(KvflowError, match=r"tokens of room 7 in staging") as seen:
            await p.decode.room(7, "sim", PROMPT)
        assert seen.value.code is Code.BAD_REQUEST
        await p.rest()


async def test_a_room_does_not_wait_for_a_space_that_will_never_have_its_places() -> None:
    """The staging has enough pages and rows. Its window is two pages of eight tokens."""
    layouts = LAYOUTS | {"target_layout": resized(LAYOUTS["target_layout"], (40, 4, 3))}
    async with pair(**layouts, staging_bytes=2600) as p:
        assert p.decode.reached.layout.counts == (13, 2, 3)
        target = p.decode.room(7, "sim", PROMPT)
        await until(lambda: target.ended or p.decode.shell.waiting)
        assert not p.decode.shell.waiting
        with pytest.raises(CapacityError, match=r"asked for 24, limit 16") as seen:
            await target
        assert seen.value.code is Code.BAD_REQUEST
        await p.rest()


async def test_what_quarantine_keeps_of_the_staging_cannot_come_back(staged: Pair) -> None:
    p = staged
    p.plane(p.prefill).script(Fault.LATE)
    source, target = await opened(p)
    send(p, source, computed(p, source), [WANTED])
    with pytest.raises(KvflowError):
        await target.landed()
    await until(lambda: ledger(p.decode).quarantined == WANTED)
    counts = p.decode.reached.layout.counts
    assert p.decode.shell.staging_can_come_back == tuple(np.subtract(counts, WANTED))
    p.plane(p.prefill).release()
    await p.crash(p.prefill)
    await until(lambda: p.decode.shell.staging_can_come_back == counts)


async def test_what_an_earlier_node_left_in_the_pool_is_beside_the_staging(p: Pair) -> None:
    p.plane(p.prefill).script(Fault.LATE)
    source, target = await opened(p)
    send(p, source, computed(p, source), [WANTED])
    with pytest.raises(KvflowError):
        await target.landed()
    await until(lambda: ledger(p.decode).quarantined == WANTED)
    first = p.decode
    assert await first.close()
    p.decodes.remove(first)
    staging = Staging(first.pool, 0)
    try:
        second = await p.add_decode(over=staging)
        assert ledger(second).quarantined == second.shell.earlier.beside == WANTED
        assert second.shell.staging_can_come_back == second.reached.layout.counts
        await p.crash(p.prefill)
        await until(lambda: not second.quarantined_pages)
        assert second.shell.earlier.beside == (0, 0, 0)
        assert second.shell.staging_can_come_back == second.reached.layout.counts
        await p.rest()
        await second.close()
        p.decodes.remove(second)
    finally:
        staging.close()
