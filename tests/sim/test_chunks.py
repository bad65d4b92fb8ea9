"""Chunks of simulated rooms: every place is in one of them. Windows are sent in several ways."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvflow.proof.bare.run import simulate as simulate_bare
from kvflow.proof.sim.chunks import Way, in_chunks, positions, way_of
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.scenario import draw, with_windows
from kvflow.proof.sim.variety import (
    LAYOUT,
    LAYOUT_WITH_ROWS,
    LAYOUT_WITH_WINDOWS,
    PAGE_SIZE,
    WINDOW,
    host_counts,
)
from kvflow.protocols.pages.layout import PoolLayout


def test_a_pool_of_one_space_sends_its_pages_alone() -> None:
    assert in_chunks(LAYOUT, [2, 1], (3,), Way.ALONE) == ((2,), (1,))


@pytest.mark.parametrize(
    ("way", "chunks"),
    [
        (Way.LAST, ((2, 0, 0), (1, 0, 0), (3, 3, 1))),
        (Way.ALONG, ((2, 1, 0), (1, 1, 0), (3, 1, 1))),
        (Way.ALONE, ((2, 0, 0), (1, 0, 0), (0, 3, 0), (3, 0, 1))),
    ],
)
def test_pages_of_a_window_are_sent_in_several_ways(
    way: Way, chunks: tuple[tuple[int, int, int], ...]
) -> None:
    assert in_chunks(LAYOUT_WITH_WINDOWS, [2, 1, 3], (6, 3, 1), way) == chunks


@pytest.mark.parametrize("layout", [LAYOUT, LAYOUT_WITH_ROWS, LAYOUT_WITH_WINDOWS])
@pytest.mark.parametrize("way", Way)
def test_every_place_is_in_one_chunk_in_the_order_of_its_space(
    layout: PoolLayout, way: Way
) -> None:
    for tokens in range(1, 25):
        whole = layout.wanted(tokens)
        for prefix in {*range(0, tokens, PAGE_SIZE), tokens}:
            wanted = layout.wanted(tokens, prefix)
            pages = [1] * wanted[0] or [0]
            counts = in_chunks(layout, pages, wanted, way)
            assert all(map(any, counts[:-1])), "only the last chunk may be empty"
            places = positions(whole, wanted, counts)
            assert [len(chunk) for chunk in places] == [sum(chunk) for chunk in counts]
            assert all(list(chunk) == sorted(chunk) for chunk in places)
            every = sorted(place for chunk in places for place in chunk)
            ends = [sum(whole[: space + 1]) for space in range(len(whole))]
            assert every == [
                place
                for end, count in zip(ends, wanted, strict=True)
                for place in range(end - count, end)
            ]


def test_a_window_needs_its_last_pages_only() -> None:
    assert LAYOUT_WITH_WINDOWS.wanted(24) == (6, 3, 1) and WINDOW == 5
    assert LAYOUT_WITH_WINDOWS.wanted(24, 24) == (0, 0, 1)
    assert host_counts(LAYOUT_WITH_WINDOWS, (8, 3)) == (8, 8, 3)
    assert host_counts(LAYOUT, (8, 3)) == (8,)


def test_a_fifth_of_the_seeds_has_pools_of_three_spaces() -> None:
    rng = random.Random(1)
    scenarios = [draw(rng, Faults(rng)) for _ in range(20)]
    drawn = Counter(
        with_windows(random.Random(f"windows {seed}"), scenarios[seed % 20]).variety.layout
        is LAYOUT_WITH_WINDOWS
        for seed in range(1000)
    )
    assert 160 < drawn[True] < 240
    assert {way_of(room) for room in range(3)} == set(Way)


def test_rooms_with_windows_succeed() -> None:
    told: list[str] = []
    seed = next(s for s in range(50) if random.Random(f"windows {s}").random() < 0.2)
    outcome = simulate_bare(seed, tell=lambda at_s, who, what: told.append(what))
    assert outcome.violation is None and outcome.endings["decode success"] > 5
    sizes = {line.count(",") for line in told if line.startswith("write [")}
    assert len(sizes) > 3
