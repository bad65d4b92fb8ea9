"""Spaces of a pool: how many places a prompt fills, and where a chunk lies in a list of places."""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.protocols.arguments import (
    check_chunk,
    own_pages,
    pack_pages,
    pages_wanted,
    unpack_pages,
)
from kvflow.protocols.errors import CapacityError, LayoutError, MisuseError
from kvflow.protocols.pages.components import Component
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import (
    PoolLayout,
    Space,
    build_layout,
    opaque_layout,
    resized,
)
from kvflow.protocols.pages.plan import Pairing
from kvflow.protocols.pages.spaces import (
    MAX_LABEL,
    MAX_PAGE_SIZE,
    MAX_PAGES,
    MAX_PLACES,
    MAX_ROWS,
    MAX_SPACES,
    Counts,
    check_spaces,
    counts_fit,
    counts_less,
    counts_sum,
    spans_at,
    taken,
)
from kvflow.protocols.wire.messages import MAX_PAGES_PER_ROOM
from tests.protocols.alone import THREE, indices

PAGES, WINDOW, ROWS = THREE.spaces

# --- how many places a prompt fills


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, int]:
    """A page size, the tokens of a prompt, and a prefix: whole pages, or all of it."""
    page_size, tokens = draw(st.integers(1, 9)), draw(st.integers(1, 60))
    whole = st.integers(0, tokens // page_size).map(lambda pages: pages * page_size)
    return page_size, tokens, draw(whole | st.just(tokens))


@given(prompts(), st.integers(0, 70))
def test_the_pages_that_hold_a_needed_token_are_wanted(
    prompt: tuple[int, int, int], window: int
) -> None:
    page_size, tokens, prefix = prompt
    needed = range(max(0, tokens - window) if window else 0, tokens)
    pages = {token // page_size for token in needed}
    there = {token // page_size for token in range(prefix)}
    space = Space("s", 99, page_size, window)
    assert space.wanted(tokens, prefix) == len(pages - there)
    assert space.wanted(tokens) == len(pages)


@given(st.integers(1, 60), st.integers(0, 60))
def test_a_row_is_wanted_whatever_is_there_already(tokens: int, prefix: int) -> None:
    assert ROWS.wanted(tokens, min(prefix, tokens)) == 1


def test_a_room_wants_places_of_every_space() -> None:
    # The window has the tokens 6 to 10, in pages of two.
    assert THREE.wanted(11) == pages_wanted(THREE, 11, 0) == (3, 3, 1)
    assert pages_wanted(THREE, 11, 8) == (1, 2, 1) and pages_wanted(THREE, 11, 4) == (2, 3, 1)
    assert pages_wanted(THREE, 11, 11) == (0, 0, 1) and THREE.wanted(1) == (1, 1, 1)


@pytest.mark.parametrize("prefix", [6, 3, 12, -4, 16])
def test_a_prefix_has_whole_pages_of_every_space(prefix: int) -> None:
    text = f"prefix_tokens {prefix} is neither a whole number of 4-token pages"
    with pytest.raises(MisuseError, match=text):
        pages_wanted(THREE, 11, prefix)


def test_a_prefix_has_whole_pages_of_the_second_space_too() -> None:
    larger = msgspec.structs.replace(THREE, spaces=(PAGES, Space("window", 9, 8, 5), ROWS))
    assert pages_wanted(larger, 11, 8) == (1, 1, 1)
    with pytest.raises(MisuseError, match="prefix_tokens 4 is neither a whole number of 8-token"):
        pages_wanted(larger, 11, 4)


def test_places_of_all_spaces_count_towards_the_limit_of_a_room() -> None:
    layout = msgspec.structs.replace(
        THREE, spaces=(Space("pages", MAX_PAGES, 1), Space("index", MAX_PAGES, 1))
    )
    most = MAX_PAGES_PER_ROOM // 2
    assert sum(pages_wanted(layout, most, 0)) == MAX_PAGES_PER_ROOM
    with pytest.raises(CapacityError, match="tokens of one room"):
        pages_wanted(layout, most + 1, 0)
    one = msgspec.structs.replace(THREE, spaces=(Space("pages", MAX_PAGES, 1),))
    assert pages_wanted(one, MAX_PAGES_PER_ROOM, 0) == (MAX_PAGES_PER_ROOM,)
    with pytest.raises(CapacityError, match="tokens of one room"):
        pages_wanted(one, MAX_PAGES_PER_ROOM + 1, 0)


# --- which spaces a pool may have


def named(*names: str) -> tuple[Space, ...]:
    return tuple(Space(name, 1, 1) for name in names)


@pytest.mark.parametrize(
    ("spaces", "text"),
    [
        ((), "0 spaces: a pool has 1 to 16"),
        (named(*map(str, range(MAX_SPACES + 1))), "17 spaces: a pool has 1 to 16"),
        ((ROWS, PAGES), "space 'rows': the first space of a pool has pages"),
        ((PAGES, Space("", 1, 1)), "name of space 1 has 0 characters, not 1..256"),
        ((Space("x" * (MAX_LABEL + 1), 1, 1),), "name of space 0 has 257 characters"),
        ((Space("pages", 0, 1),), f"num_pages 0 is outside 1..{MAX_PAGES}"),
        ((Space("pages", MAX_PAGES + 1, 1),), f"num_pages {MAX_PAGES + 1} is outside"),
        ((Space("pages", 1, -1),), f"page_size -1 is outside 0..{MAX_PAGE_SIZE}"),
        ((Space("pages", 1, MAX_PAGE_SIZE + 1),), f"page_size {MAX_PAGE_SIZE + 1} is outside"),
        ((Space("pages", 1, 1, -1),), "window -1 is outside"),
        ((PAGES, Space("w", 0, 1)), "space 'w': num_pages 0 is outside"),
        ((PAGES, Space("w", 1, -2)), "space 'w': page_size -2 is outside"),
        ((PAGES, Space("w", 1, 1, MAX_PLACES + 1)), "space 'w': window 2147483648 is outside"),
        ((PAGES, Space("rows", MAX_ROWS + 1, 0)), f"num_rows {MAX_ROWS + 1} is outside"),
        ((PAGES, Space("rows", 1, 0, 4)), "space 'rows' has rows, and rows have no window"),
        (named("a", "b", "a"), "two spaces have one name: a, b, a"),
    ],
)
def test_spaces_that_no_pool_has(spaces: tuple[Space, ...], text: str) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}"):
        check_spaces(spaces)


def test_the_largest_pools_are_allowed() -> None:
    check_spaces(tuple(Space(str(i), MAX_PAGES, MAX_PAGE_SIZE) for i in range(MAX_SPACES)))
    check_spaces((Space("x" * MAX_LABEL, 1, 1, MAX_PLACES), Space("r", MAX_ROWS, 0)))
    # The index of every place is an int32, so `check_spaces` need not add them up.
    assert MAX_SPACES * MAX_PAGES < MAX_PLACES


def test_a_stream_is_in_the_space_that_it_names() -> None:
    assert [(c.name, c.space, c.size_bytes) for c in THREE.components] == [
        ("k", 0, 32),
        ("w", 1, 8),
        ("s", 2, 2),
    ]
    assert [(b.name, b.space, b.size_bytes) for b in THREE.buffers] == [
        ("pages", 0, 512),
        ("window", 1, 72),
        ("rows", 2, 6),
    ]
    with pytest.raises(LayoutError, match="'k': space 'wind' is none of 'pages', 'window', 'rows'"):
        build_layout([StateKind("k", "uint8", (1,), space="wind")], spaces=THREE.spaces)
    with pytest.raises(LayoutError, match="'k': its unit is 'row', that of its space 'window' 'p"):
        build_layout([StateKind("k", "uint8", (1,), ROW, space="window")], spaces=THREE.spaces)


def test_a_copy_of_a_layout_with_other_numbers_of_places() -> None:
    other = resized(THREE, (5, 2, 0))
    assert other.counts == (5, 2, 1) and other.bases == (0, 5, 7) and other.num_places == 8
    assert other.place_bytes == THREE.place_bytes == (32, 8, 2)
    assert [space.window for space in other.spaces] == [0, 5, 0]
    assert THREE.room_bytes((3, 2, 1)) == 3 * 32 + 2 * 8 + 2
    assert (THREE.num_rows, THREE.row_bytes, THREE.row_space) == (3, 2, 2)


# --- lists of places


@st.composite
def layouts(draw: st.DrawFn) -> PoolLayout:
    sizes = draw(st.lists(st.integers(0, 3), max_size=3))
    spaces = [Space("0", draw(st.integers(1, 9)), draw(st.integers(1, 3)))]
    spaces += [Space(f"{i}", draw(st.integers(1, 9)), size) for i, size in enumerate(sizes, 1)]
    return PoolLayout(tuple(spaces), (), ())


@st.composite
def lists(draw: st.DrawFn) -> tuple[PoolLayout, list[list[int]]]:
    """A layout, and some places of each of its spaces, in any order."""
    layout = draw(layouts())
    return layout, [
        draw(st.permutations(range(count)))[: draw(st.integers(0, count))]
        for count in layout.counts
    ]


@given(lists())
def test_a_list_says_which_places_of_which_space_it_has(
    case: tuple[PoolLayout, list[list[int]]],
) -> None:
    layout, places = case
    every = list(itertools.chain(*([(i, n) for n in own] for i, own in enumerate(places))))
    numbered = layout.numbered([indices(*own) for own in places])
    assert numbered.dtype == np.int32
    assert numbered.tolist() == [sum(layout.counts[:i]) + n for i, n in every]
    split = layout.split(numbered)
    assert [own.tolist() for own in split] == places and all(x.dtype == np.int32 for x in split)
    assert layout.counted(numbered) == tuple(map(len, places))
    layout.check_order(numbered)
    assert unpack_pages(pack_pages(numbered), layout.num_places).tolist() == numbered.tolist()
    assert own_pages(numbered, layout, 7, layout.counted(numbered)).tolist() == numbered.tolist()


@given(lists(), st.data())
def test_a_list_in_which_spaces_are_mixed_is_refused(
    case: tuple[PoolLayout, list[list[int]]], data: st.DataObject
) -> None:
    layout, places = case
    numbered = layout.numbered([indices(*own) for own in places])
    mixed = indices(*data.draw(st.permutations(numbered.tolist())))
    space = {n: i for i, b in enumerate(layout.bases) for n in range(b, b + layout.counts[i])}
    order = [space[n] for n in mixed.tolist()]
    # Whatever the order, the places of each space are the same ones.
    assert layout.counted(mixed) == layout.counted(numbered)
    assert [set(own.tolist()) for own in layout.split(mixed)] == [set(own) for own in places]
    if order == sorted(order):
        layout.check_order(mixed)
        return
    with pytest.raises(LayoutError, match="a list has the places of all spaces in the order"):
        layout.check_order(mixed)
    with pytest.raises(LayoutError, match="a list has the places of all spaces in the order"):
        own_pages(mixed, layout, 7, layout.counted(mixed))


def test_the_first_place_that_is_out_of_order_is_named() -> None:
    text = (
        "place 3 of space 'pages' follows place 17 of space 'window': a list has the places of all "
        "spaces in the order 'pages', 'window', 'rows'"
    )
    with pytest.raises(LayoutError, match=f"^{text}$"):
        THREE.check_order(indices(1, 17, 3, 25, 18))


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((3, 2, 1), "3 pages, 2 'window' pages and 1 row"),
        ((0, 1, 0), "0 pages, 1 'window' pages and 0 rows"),
        ((1, 0, 2), "1 pages, 0 'window' pages and 2 rows"),
    ],
)
def test_counts_in_words(counts: Counts, text: str) -> None:
    assert THREE.described(counts) == text


def test_counts_in_words_where_there_are_fewer_spaces() -> None:
    one, two = (msgspec.structs.replace(THREE, spaces=THREE.spaces[::2][:n]) for n in (1, 2))
    assert one.described((3,)) == "3 pages" and two.described((3, 1)) == "3 pages and 1 row"


counts = st.integers(0, 4)
triples = st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.tuples(*[counts] * n)] * 2))


@given(triples)
def test_counts_are_compared_and_added_space_by_space(both: tuple[Counts, Counts]) -> None:
    a, b = both
    assert counts_fit(a, b) == all(a[i] <= b[i] for i in range(len(a)))
    assert counts_sum(a, b) == tuple(a[i] + b[i] for i in range(len(a)))
    assert counts_less(counts_sum(a, b), b) == a and counts_fit(a, counts_sum(a, b))


@given(
    st.lists(st.lists(counts, min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 3)
)
def test_chunks_take_the_next_places_of_each_space(parts: list[list[int]], spaces: int) -> None:
    """However a room is cut, each chunk has what a list for each space would give it."""
    chunks = [tuple(part[:spaces]) for part in parts]
    wanted = tuple(map(sum, zip(*chunks, strict=True)))
    numbers = itertools.count(100)
    by_space = [[next(numbers) for _ in range(count)] for count in wanted]
    every = indices(*itertools.chain(*by_space))
    done: Counts = (0,) * spaces
    for chunk in chunks:
        spans = spans_at(wanted, done, chunk)
        expected = [own.pop(0) for own, n in zip(by_space, chunk, strict=True) for _ in range(n)]
        found = taken(every, spans)
        assert found.tolist() == taken(every, tuple(spans)).tolist() == expected
        assert found.dtype == np.int32 and len(spans) == sum(map(bool, chunk))
        done = counts_sum(done, chunk)
    assert done == wanted and not any(by_space)


def test_places_of_one_span_are_not_copied() -> None:
    every = np.arange(9, dtype=np.int32)
    assert np.shares_memory(taken(every, [(2, 5)]), every)
    assert taken(every, []).size == 0 and taken(every, ()).dtype == np.int32


# --- what is given and sent


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        ((1, 2, 3, 16, 17, 18), r"3 pages, 3 'window' pages and 0 rows given, its prompt needs 3 "),
        ((1, 2, 3, 16, 17, 25), r"3 pages, 2 'window' pages and 1 row given"),
        ((1, 2, 16, 17, 18, 19, 25), r"2 pages, 4 'window' pages and 1 row given"),
        ((1, 2, 3, 16, 17, 18, 28), r"page 28 is outside 0\.\.27"),
        ((1, 2, 3, 16, 17, 17, 25), r"a page is given twice"),
        ((1, 2, 3, 16, 17, 25, 26), r".*\(page n of 'window' is given as 16 \+ n; row n of 'rows'"),
    ],
)
def test_own_pages_that_do_not_fit_in_some_space(pages: tuple[int, ...], text: str) -> None:
    with pytest.raises(MisuseError, match=f"^room 7: {text}"):
        own_pages(pages, THREE, 7, (3, 3, 1))


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        ((7, 28), r"index 28 is outside 0\.\.27"),
        ((7, -1, 20), r"index -1 is outside"),
        ((20, 7, 20), "a page is named twice"),
    ],
)
def test_places_from_the_wire_are_checked_against_all_spaces(
    pages: tuple[int, ...], text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        unpack_pages(pack_pages(indices(*pages)), THREE.num_places)
    assert unpack_pages(pack_pages(indices(27)), THREE.num_places).tolist() == [27]


@pytest.mark.parametrize(
    ("counts", "left", "last", "text"),
    [
        ((2, 0, 0), (2, 1, 1), False, ""),
        ((0, 1, 0), (2, 1, 1), False, ""),
        ((2, 1, 1), (2, 1, 1), True, ""),
        ((0, 0, 1), (0, 0, 1), True, ""),
        ((1, 2, 0), (2, 1, 1), False, "chunk of 1 pages, 2 'window' pages and 0 rows, 2 pages, 1 "),
        ((3, 0, 0), (2, 1, 1), False, "chunk of 3 pages, 0 'window' pages"),
        ((2, 0, 1), (2, 1, 1), True, "chunk of 2 pages, 0 'window' pages and 1 row"),
        ((2, 1, 0), (2, 1, 1), True, "chunk of 2 pages, 1 'window' pages and 0 rows"),
        ((2, 1, 1), (2, 1, 1), False, "a row in a chunk that is not the last"),
        ((0, 0, 1), (2, 1, 1), False, "a row in a chunk that is not the last"),
        ((0, 0, 0), (2, 1, 1), False, "a chunk without pages that is not the last"),
    ],
)
def test_a_chunk_fits_in_every_space(counts: Counts, left: Counts, last: bool, text: str) -> None:
    if not text:
        check_chunk(7, THREE, counts, left, last, 0)
        return
    with pytest.raises(MisuseError, match=f"^room 7: {text}"):
        check_chunk(7, THREE, counts, left, last, 0)


# --- two pools


@pytest.mark.parametrize(
    ("spaces", "found"),
    [
        ((PAGES, WINDOW, ROWS), []),
        ((Space("pages", 2, 4), Space("window", 2, 2, 5), Space("rows", 1, 0)), []),
        (
            (PAGES, msgspec.structs.replace(WINDOW, name="index"), ROWS),
            ["spaces: prefill 'pages, window, rows', decode 'pages, index, rows'"],
        ),
        (
            (PAGES, msgspec.structs.replace(WINDOW, window=6), ROWS),
            ["window: window: prefill 5, decode 6"],
        ),
        (
            (msgspec.structs.replace(PAGES, window=6), WINDOW, ROWS),
            ["window: prefill 0, decode 6"],
        ),
        (
            (PAGES, msgspec.structs.replace(WINDOW, page_size=4), ROWS),
            ["window: page_size: prefill 2, decode 4"],
        ),
        (
            (PAGES, WINDOW, Space("rows", 3, 1)),
            ["rows: page_size: prefill 0, decode 1"],
        ),
    ],
)
def test_two_pools_have_the_same_spaces(spaces: tuple[Space, ...], found: list[str]) -> None:
    assert differences(THREE, msgspec.structs.replace(THREE, spaces=spaces)) == found


def test_spaces_in_another_order_do_not_fit() -> None:
    other = build_layout(
        [
            StateKind("k", "uint8", (8,)),
            StateKind("w", "uint8", (4,), space="window"),
            StateKind("s", "uint8", (2,), ROW),
        ],
        spaces=(PAGES, ROWS, WINDOW),
    )
    assert differences(THREE, other) == [
        "spaces: prefill 'pages, window, rows', decode 'pages, rows, window'",
        "w space, by its index: prefill 1, decode 2",
        "s space, by its index: prefill 2, decode 1",
    ]


def test_opaque_pools_are_compared_space_by_space() -> None:
    def opaque(**window: int) -> PoolLayout:
        per_space = {"window": window, "rows": {"state": 5}}
        return opaque_layout({"kv": 9}, spaces=THREE.spaces, tag="t", per_space=per_space)

    ours = opaque(a=3, b=4)
    assert ours.place_bytes == (9, 7, 5) and [c.unit for c in ours.components][-1] == ROW
    assert differences(ours, opaque(whole=7)) == []
    assert differences(ours, opaque(a=8)) == ["bytes per 'window' page: prefill 7, decode 8"]
    assert differences(ours, opaque(b=4, a=3))[0] == (
        "a: bytes 0..3 of a 'window' page at prefill, 4..7 at decode"
    )


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ((1, 17, 25), (2, 18), "page lists differ: (3,) source, (2,) target"),
        ((1, 2, 25), (1, 17, 25), "page lists differ: 2 pages, 0 'window' pages and 1 row source"),
        ((1, 28), (1, 25), "source place is outside 0..27"),
        ((1, 25), (-1, 25), "target place is outside 0..27"),
    ],
)
def test_two_lists_have_as_many_places_of_each_space(
    source: tuple[int, ...], target: tuple[int, ...], text: str
) -> None:
    pairing = Pairing(THREE, THREE)
    assert pairing.place_bytes == (32, 8, 2) and pairing.page_bytes == 32
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}"):
        pairing.check(indices(*source), indices(*target))


def _buffer(**fields: Any) -> PoolLayout:
    first, second, third = THREE.buffers
    second = msgspec.structs.replace(second, **fields)
    return msgspec.structs.replace(THREE, buffers=(first, second, third))


def _component(**fields: Any) -> PoolLayout:
    first, second, third = THREE.components
    changed: Component = msgspec.structs.replace(second, **fields)
    return msgspec.structs.replace(THREE, components=(first, changed, third))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (_buffer(space=3), r"buffer 'window': space 3 is outside 0\.\.2"),
        (_buffer(space=-1), r"buffer 'window': space -1 is outside 0\.\.2"),
        (_buffer(size_bytes=71), "buffer 'window': 71 bytes do not hold 9 pages of 8"),
        (_component(space=0), "component 'w' is in space 0, its buffer 'window' in 1"),
        (_component(space=-1), "component 'w' is in space -1, its buffer 'window' in 1"),
        (_component(unit=ROW), "'w': its unit is 'row', that of its space 'window' 'page'"),
        (_component(shape=(2,), size_bytes=8), r"'w': shape \(2,\) does not make 8 bytes"),
        (_component(offset=1), "'w': bytes 1..9 leave its buffer's page"),
    ],
)
def test_what_a_peer_says_of_a_second_space_is_checked(layout: PoolLayout, text: str) -> None:
    THREE.check()
    with pytest.raises(LayoutError, match=text):
        layout.check()


def test_a_layout_of_three_spaces_survives_the_wire() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(THREE), type=PoolLayout) == THREE
