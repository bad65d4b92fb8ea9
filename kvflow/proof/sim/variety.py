"""Parameters of a run other than its faults, drawn from the seed."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec

from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.pages.kinds import PAGE, ROW, StateKind
from kvflow.protocols.pages.layout import Counts, PoolLayout, Space, build_layout

PAGE_SIZE, NUM_PAGES = 4, 48
# Enough rows for the probe rooms at the end, even when the quarantine is full.
NUM_ROWS = NUM_PAGES // 2
# A short prompt may fill more pages of the window than of the first space. There are enough of them
# for the probe rooms.
WINDOW, WINDOW_PAGE_SIZE, NUM_WINDOW_PAGES = 5, 2, 2 * NUM_PAGES
_KINDS = (
    StateKind("0.k", "uint8", (8,)),
    StateKind("0.v", "uint8", (8,)),
    StateKind("0.index_k", "uint8", (3,)),
    StateKind("0.scale", "uint8", (5,), PAGE),
    StateKind("1.conv", "uint8", (3, 4), ROW),
    StateKind("1.ssm", "uint8", (2, 4, 4), ROW),
)
_WINDOW_KINDS = (
    StateKind("2.k", "uint8", (6,), space="window"),
    StateKind("2.v", "uint8", (6,), space="window"),
    StateKind("2.scale", "uint8", (3,), PAGE, space="window"),
)
LAYOUT = build_layout(_KINDS[:2], page_size=PAGE_SIZE, num_pages=NUM_PAGES)
LAYOUT_WITH_ROWS = build_layout(_KINDS, page_size=PAGE_SIZE, num_pages=NUM_PAGES, num_rows=NUM_ROWS)
LAYOUT_WITH_WINDOWS = build_layout(
    (*_KINDS, *_WINDOW_KINDS),
    spaces=(
        Space("pages", NUM_PAGES, PAGE_SIZE),
        Space("window", NUM_WINDOW_PAGES, WINDOW_PAGE_SIZE, WINDOW),
        Space("rows", NUM_ROWS, 0),
    ),
)

TIMING = Timing(heartbeat_s=0.5, lost_after_s=1.5, rendezvous_s=2.0, register_s=1.5)
"""Timeouts are shorter than in production. `repeat_after_s` is the same."""
SHIPPED_RATIO = msgspec.structs.replace(TIMING, register_s=2 * TIMING.lost_after_s)

PROMPT, LATE, NEVER = "prompt", "late", "never"
# A late fence answers within this time after a death, so silence may be noticed before the proof.
LATE_FENCE_S = 2.5


class Variety(NamedTuple):
    bounds: Bounds
    timing: Timing
    # When data planes prove a death: PROMPT, LATE, or NEVER. If never, an operator declares it.
    fences: str
    verify: bool
    layout: PoolLayout
    # Number of pages, in each space with pages, and of rows in a decode's host memory.
    host: tuple[int, int]
    staging_bytes: int = 0  # size at each decode, or 0 if prefill writes into the pool
    # The layout of decodes, if their pages have another size than those of `layout`. Only bare
    # endpoints have such runs.
    at_decode: PoolLayout | None = None

    @property
    def decode_layout(self) -> PoolLayout:
        return self.layout if self.at_decode is None else self.at_decode

    @property
    def page_sizes(self) -> Counts:
        """The smaller page size of each space, or an empty tuple if no sizes differ."""
        if self.at_decode is None:
            return ()
        both = zip(self.layout.spaces, self.at_decode.spaces, strict=True)
        return tuple(min(ours.page_size, theirs.page_size) for ours, theirs in both)


def draw_variety(rng: random.Random, decodes: int) -> Variety:
    bounds = Bounds(closed_grants=rng.choice((2, 8, 65_536)))
    fences = rng.choices((PROMPT, LATE, NEVER), (6, 2, 1))[0]
    if rng.random() < 0.25:
        bounds = msgspec.structs.replace(
            bounds, rooms=12, ended_halves=rng.choice((1, 3)), quarantine_share=0.25
        )
    # A dead decode in doubt stays registered at prefill until its death is proven.
    if rng.random() < (0.6 if fences is LATE else 0.2) and fences is not NEVER:
        bounds = msgspec.structs.replace(bounds, targets=decodes + rng.randint(0, 1))
    timing = SHIPPED_RATIO if rng.random() < 0.25 else TIMING
    verify = rng.random() < 0.15
    layout = LAYOUT_WITH_ROWS if rng.random() < 0.4 else LAYOUT
    return Variety(
        bounds, timing, fences, verify, layout, (rng.choice((8, 12, 24)), rng.choice((3, 6)))
    )


def draw_two_layouts(rng: random.Random) -> tuple[PoolLayout, PoolLayout]:
    """Draw the layouts of prefills and decodes whose pages differ in size: in the first space, and
    in that of the window too, if there is one.
    """
    kinds, has_window = [*_KINDS[:3]], rng.random() < 0.4
    sizes = _drawn_sizes(rng, PAGE_SIZE), _drawn_sizes(rng, WINDOW_PAGE_SIZE)
    has_rows = rng.random() < 0.3
    kinds += [*_WINDOW_KINDS[:2]] if has_window else []
    kinds += [*_KINDS[4:]] if has_rows else []
    layouts = [
        build_layout(
            kinds,
            spaces=(
                Space("pages", NUM_PAGES, pages),
                *([Space("window", NUM_WINDOW_PAGES, window, WINDOW)] if has_window else []),
                *([Space("rows", NUM_ROWS, 0)] if has_rows else []),
            ),
        )
        for pages, window in zip(*sizes, strict=True)
    ]
    return layouts[0], layouts[1]


def _drawn_sizes(rng: random.Random, page_size: int) -> tuple[int, int]:
    large = page_size * rng.choice((2, 4) if page_size == PAGE_SIZE else (1, 2))
    return (page_size, large) if rng.random() < 0.5 else (large, page_size)


def host_counts(layout: PoolLayout, host: tuple[int, int]) -> Counts:
    """Return the number of places of each space in a decode's host memory; see `Variety.host`."""
    return tuple(host[space.in_rows] for space in layout.spaces)
