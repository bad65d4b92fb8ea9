"""Parts and copies: plans between any two widths write every byte once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.components import MAX_REPLICAS, MAX_WHOLE, Component, Part, served
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.kinds import PAGE, ROW, SLOT, StateKind
from kvflow.protocols.pages.layout import Order, Places, PoolLayout, build_layout, opaque_layout
from kvflow.protocols.pages.plan import Pairing

Memory = NDArray[np.uint8]
PLACES = 5
ORDERS: tuple[Order, ...] = ("page_first", "layer_first")


class Stream(NamedTuple):
    """A stream of the whole model, divided along `axis`, or held by every shard without one."""

    stage: int
    kind: StateKind
    axis: int | None


def cut(total: int, shards: int) -> list[tuple[int, int]]:
    """First entry and count of each shard, as even as can be. Some are equal if entries are few."""
    if total < shards:
        return [(shard * total // shards, 1) for shard in range(shards)]
    edges = [shard * total // shards for shard in range(shards + 1)]
    return [(low, high - low) for low, high in pairwise(edges)]


def part(s: Stream, shard: int, shards: int) -> StateKind:
    shape = [int(n) for n in s.kind.shape]
    if s.axis is None:
        return s.kind._replace(replica=shard, replicas=shards)
    spans = cut(shape[s.axis], shards)
    twins = [i for i, span in enumerate(spans) if span == spans[shard]]
    whole, (start, shape[s.axis]) = shape[s.axis], spans[shard]
    return s.kind._replace(
        shape=tuple(shape),
        start=start,
        whole=whole,
        replica=twins.index(shard),
        replicas=len(twins),
        axis=s.axis,
    )


def parts(
    streams: Sequence[Stream], shard: int, shards: int, stage: int | None = None
) -> list[StateKind]:
    return [part(s, shard, shards) for s in streams if stage in (None, s.stage)]


@st.composite
def models(draw: st.DrawFn) -> list[Stream]:
    found = []
    for i in range(draw(st.integers(1, 4))):
        unit = draw(st.sampled_from([SLOT, SLOT, PAGE, ROW]))
        dtype = draw(st.sampled_from(["uint8", "bfloat16"]))
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        axis = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
        kind = StateKind(f"{i}", dtype, shape, unit, axis=axis or 0)
        found.append(Stream(draw(st.integers(0, 1)), kind, axis))
    return found


class Plan(NamedTuple):
    streams: list[Stream]
    widths: tuple[int, int]
    page_size: int
    orders: tuple[Order, Order]
    stages: int
    places: tuple[Places, Places]
    max_block_bytes: int


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    orders: st.SearchStrategy[Order] = st.sampled_from(["page_first", "layer_first"])
    width = st.integers(1, 8)
    lists = []
    count = [draw(st.integers(0, PLACES)) for _ in range(2)]
    for _ in range(2):
        picked = [np.array(draw(st.permutations(range(PLACES))), dtype=np.int32)[:n] for n in count]
        lists.append((picked[0], picked[1]))
    return Plan(
        draw(models()),
        (draw(width), draw(width)),
        draw(st.integers(1, 3)),
        (draw(orders), draw(orders)),
        draw(st.integers(1, 2)),
        (lists[0], lists[1]),
        draw(st.sampled_from([1, 7, 1 << 20])),
    )


def laid_out(kinds: Sequence[StateKind], plan: Plan, side: int) -> PoolLayout | None:
    if not kinds:
        return None
    layout = build_layout(
        kinds, page_size=plan.page_size, num_pages=PLACES, num_rows=PLACES, order=plan.orders[side]
    )
    at, buffers = 3, []
    for b in layout.buffers:
        buffers.append(msgspec.structs.replace(b, address=at))
        at += b.size_bytes + 13  # nothing may spill from one into the next
    return msgspec.structs.replace(layout, buffers=tuple(buffers))


def memory(layout: PoolLayout, value: int) -> Memory:
    return np.full(layout.size_bytes + 3 + 13 * len(layout.buffers), value, dtype=np.uint8)


def view(layout: PoolLayout, c: Component, flat: Memory) -> NDArray[np.uint8]:
    """[pages, slots, *shape, bytes of an element] of one component, slots 1 where it has none."""
    b = layout.buffers[c.buffer]
    repeats = layout.page_size if c.unit == SLOT else 1
    element_bytes = c.size_bytes // repeats // int(np.prod(c.shape))
    shape = (layout.count_of(c), repeats, *c.shape, element_bytes)
    inner = np.lib.stride_tricks.as_strided(
        flat[b.address + c.offset :], (shape[0], c.size_bytes), (b.page_bytes, 1), writeable=True
    )
    strides = [1]
    for length in reversed(shape[2:]):
        strides.append(strides[-1] * length)
    return np.lib.stride_tricks.as_strided(inner, shape, (b.page_bytes, *reversed(strides)))


def entries(c: Component) -> tuple[slice, ...]:
    return (*[slice(None)] * (2 + c.axis), slice(c.start, c.end))


@given(plans())
@settings(max_examples=300)
def test_between_any_widths_every_byte_is_written_once_from_the_right_byte(plan: Plan) -> None:
    """Prefill of any width, in one or two stages: what a rank serves lands in every copy."""
    target = laid_out(parts_of_all(plan.streams, plan.widths[1]), plan, 1)
    assert target is not None
    rng = np.random.default_rng(0)
    truth = {
        s.kind.name: rng.integers(
            1,
            255,
            (
                plan.places[1][s.kind.unit == ROW].size,
                plan.page_size if s.kind.unit == SLOT else 1,
                *s.kind.shape,
                2 if s.kind.dtype == "bfloat16" else 1,
            ),
            dtype=np.uint8,
        )
        for s in plan.streams
    }
    there, written = memory(target, 0), memory(target, 0).astype(np.int64)
    for stage in range(plan.stages):
        for shard in range(plan.widths[0]):
            own = stage if plan.stages > 1 else None
            layout = laid_out(parts(plan.streams, shard, plan.widths[0], own), plan, 0)
            if layout is not None:
                here = memory(layout, 255)
                for c in layout.components:
                    view(layout, c, here)[plan.places[0][c.space]] = truth[c.name][entries(c)]
                copy(Pairing(layout.served, target, partly=True), plan, here, there, written)
    expected, once = memory(target, 0), memory(target, 0)
    for c in target.components:
        view(target, c, expected)[plan.places[1][c.space]] = truth[c.name][entries(c)]
        view(target, c, once)[plan.places[1][c.space]] = 1
    assert (written == once).all()
    assert (there == expected).all()


def parts_of_all(streams: Sequence[Stream], shards: int) -> list[StateKind]:
    return [kind for shard in range(shards) for kind in parts(streams, shard, shards)]


def copy(
    pairing: Pairing, plan: Plan, here: Memory, there: Memory, written: NDArray[np.int64]
) -> None:
    source, target = plan.places
    lists = (pairing.source.numbered(source), pairing.target.numbered(target))
    pairing.check(*lists)
    blocks = pairing.blocks(*lists, max_block_bytes=plan.max_block_bytes)
    moved = zip(pairing.place_bytes, source, strict=True)
    assert blocks.total_bytes == sum(size * own.size for size, own in moved)
    assert (
        not blocks.sizes.size
        or 0 < int(blocks.sizes.min()) <= int(blocks.sizes.max()) <= plan.max_block_bytes
    )
    for s, t, n in zip(*(column.tolist() for column in blocks), strict=True):
        there[t : t + n] = here[s : s + n]
        written[t : t + n] += 1


def layout_of(
    *kinds: StateKind, fingerprint: str = "", order: Order = "page_first", num_pages: int = 4
) -> PoolLayout:
    return build_layout(
        kinds, page_size=4, num_pages=num_pages, fingerprint=fingerprint, order=order
    )


HEADS = StateKind("k", "bfloat16", (4, 16), start=4, whole=8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"start": 5}, "component 'k': entries 5..9 are not within its whole of 8"),
        ({"start": -1}, "entries -1..3 are not within its whole of 8"),
        ({"whole": 0}, "component 'k': start 4 without whole"),
        ({"whole": MAX_WHOLE + 1}, "component 'k': whole 1048577 is outside 0..1048576"),
        ({"whole": -1}, "whole -1 is outside"),
        ({"replica": 1}, "component 'k': replica 1 is outside 0..0"),
        ({"replica": -1, "replicas": 2}, "replica -1 is outside 0..1"),
        ({"replicas": MAX_REPLICAS + 1}, "replicas 1025 is outside 1..1024"),
        ({"replicas": 0}, "replicas 0 is outside 1..1024"),
        ({"axis": 2}, "component 'k': axis 2 is outside 0..1"),
        ({"axis": -1}, "axis -1 is outside 0..1"),
        ({"start": 1.5}, "component 'k': start 1.5 is not an integer"),
    ],
)
def test_a_part_that_does_not_hold_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout_of(HEADS._replace(**changes))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (HEADS, r"component 'k' is named twice: k\[4:8 of 8\]"),
        (
            HEADS._replace(start=2),
            r"component 'k': k\[2:6 of 8\] and k\[4:8 of 8\] overlap, and are not copies",
        ),
        (HEADS._replace(start=0, whole=9), r"parts differ in whole_shape: \(8, 16\) and \(9, 16\)"),
        (HEADS._replace(start=0, dtype="float16"), "parts differ in dtype: bfloat16 and float16"),
        (HEADS._replace(start=0, format="x"), "parts differ in format"),
        (HEADS._replace(start=0, shape=(4, 8)), "parts differ in whole_shape"),
        (HEADS._replace(shape=(3, 16), replica=1, replicas=2), "overlap, and are not copies"),
    ],
)
def test_parts_of_one_name_are_parts_of_one_thing(other: StateKind, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout_of(HEADS, other)


def test_a_pool_holds_several_parts_and_copies() -> None:
    first, again = HEADS._replace(start=0), HEADS._replace(start=0, replica=1, replicas=2)
    layout = layout_of(HEADS, first, again)
    assert [c.label for c in layout.components] == [
        "k[4:8 of 8]",
        "k[0:4 of 8]",
        "k[0:4 of 8] (copy 1 of 2)",
    ]
    assert [c.part for c in layout.components] == [Part(4, 8), Part(0, 8), Part(0, 8, 1, 2)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=PoolLayout) == layout


def test_an_opaque_pool_has_no_parts() -> None:
    layout = opaque_layout({"blob": 64}, page_size=4, num_pages=4, tag="t")
    for change in ({"whole": 64}, {"replicas": 2}, {"axis": 1}):
        changed = tuple(msgspec.structs.replace(c, **change) for c in layout.components)
        with pytest.raises(
            LayoutError, match="component 'blob': an opaque pool has no parts and no copies"
        ):
            msgspec.structs.replace(layout, components=changed).check()


@pytest.mark.parametrize(
    ("source", "target", "partly", "found"),
    [
        ([HEADS], [HEADS._replace(start=0, shape=(8, 16))], True, []),
        ([HEADS], [StateKind("k", "bfloat16", (8, 16))], True, []),
        (
            [HEADS],
            [StateKind("k", "bfloat16", (8, 16))],
            False,
            ["k: only decode has entries 0..4"],
        ),
        ([HEADS], [HEADS._replace(start=3)], True, ["k: only prefill has entries 7..8"]),
        (
            [HEADS],
            [HEADS._replace(start=3)],
            False,
            ["k: only prefill has entries 7..8", "k: only decode has entries 3..4"],
        ),
        (
            [HEADS],
            [StateKind("k", "bfloat16", (4, 16))],
            True,
            ["k shape (heads, dim): prefill (8, 16), decode (4, 16)"],
        ),
        (
            [HEADS._replace(axis=1, start=0, whole=0)],
            [HEADS._replace(start=0, whole=0)],
            True,
            ["k axis along which it is split: prefill 1, decode 0"],
        ),
        ([HEADS], [HEADS, StateKind("v", "uint8", (1,))], True, []),
        ([HEADS], [HEADS, StateKind("v", "uint8", (1,))], False, ["v: only decode has it"]),
        ([HEADS, StateKind("v", "uint8", (1,))], [HEADS], True, ["v: only prefill has it"]),
    ],
)
def test_what_differs_is_named(
    source: list[StateKind], target: list[StateKind], partly: bool, found: list[str]
) -> None:
    assert differences(layout_of(*source), layout_of(*target), partly=partly) == found


def test_ranks_of_one_model_have_one_fingerprint() -> None:
    ours, theirs = layout_of(HEADS, fingerprint="a"), layout_of(HEADS, fingerprint="b")
    assert differences(ours, theirs, partly=True) == ["model fingerprint: prefill 'a', decode 'b'"]


def test_copies_are_sent_by_one_rank_each_whatever_order_they_are_listed_in() -> None:
    kinds = [StateKind(f"{i}.latent", "uint8", (4,)) for i in range(5)] + [
        StateKind("k", "uint8", (2,))
    ]
    sent: list[str] = []
    for rank in range(3):
        own = [kind._replace(replica=rank, replicas=3) for kind in kinds[:5]]
        mine = layout_of(*(own[::-1] if rank == 1 else own), kinds[5])
        found = [c.name for c in served(mine.components)]
        assert found == [c.name for c in mine.served.components] and 2 <= len(found) <= 3
        sent += [name for name in found if name != "k"]
    assert sorted(sent) == [f"{i}.latent" for i in range(5)]
    assert [c.name for c in layout_of(*kinds).served.components] == [kind.name for kind in kinds]


def test_a_rank_may_have_nothing_to_send() -> None:
    pool = layout_of(StateKind("latent", "uint8", (4,), replica=1, replicas=2))
    assert pool.served.components == () and pool.served.page_bytes == 0
    pool.served.check()
    assert (
        Pairing(pool.served, layout_of(StateKind("latent", "uint8", (4,))), partly=True).page_bytes
        == 0
    )


@pytest.mark.parametrize("order", ORDERS)
def test_parts_that_agree_are_planned_as_if_they_were_all(order: Order) -> None:
    """No block more than without parts: pages that lie together are one block."""
    whole = [StateKind(f"{i}.{x}", "bfloat16", (4, 16)) for i in range(3) for x in "kv"]
    mine = [kind._replace(start=4, whole=8) for kind in whole]
    pages = np.array([0, 1, 2, 7], dtype=np.int32)
    plain, parted = (
        Pairing(pool, pool).blocks(pages, pages, max_block_bytes=1 << 20)
        for pool in (layout_of(*kinds, order=order, num_pages=8) for kinds in (whole, mine))
    )
    assert all((a == b).all() for a, b in zip(plain, parted, strict=True))
    assert len(plain.sizes) == (2 if order == "page_first" else 12)
