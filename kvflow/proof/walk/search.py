"""A breadth-first search through every state of the joined machines, and a check that each can come
to rest.

Safety: the search visits a state once for every set of remaining faults. It skips a set if it
visited the state with more faults left, since whatever can happen with fewer can happen with more.
The search is exact, because it stores whole states, not hashes of them.

Rest: a `fair` step happens sooner or later, without a new fault. A state from which no path of fair
steps leads to rest is a violation. If every state has such a path, no run can avoid rest forever:
it would have to stay in a finite set of states, but a fair step leads out of the set, and that step
happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.proof.walk.states import States
from kvflow.proof.walk.tables import Tables
from kvflow.proof.walk.world import UNLIMITED, Bounds, Price

_BLOCK = 1 << 16  # number of states whose steps are computed at once, to limit memory


class Level(NamedTuple):
    """States that the search reaches after the same number of steps.

    `left` holds, for each state, the number of its set of remaining faults (see `Faults`).
    """

    states: States
    left: NDArray[np.uint8]

    def blocks(self) -> Iterator[Level]:
        for start in range(0, len(self.states), _BLOCK):
            yield Level(self.states[start : start + _BLOCK], self.left[start : start + _BLOCK])


class Faults:
    """A numbering of the sets of remaining faults. It omits crashes, which a state itself shows."""

    def __init__(self, bounds: Bounds) -> None:
        limits = {price: bounds.limit(price) for price in Price if price is not Price.CRASH}
        limits = {price: limit for price, limit in limits.items() if limit != UNLIMITED}
        sets = list(itertools.product(*(range(limit + 1) for limit in limits.values())))
        self.count = len(sets)
        if self.count > 64:
            raise ValueError(f"{self.count} sets of faults, at most 64 fit a mask")
        number = {left: n for n, left in enumerate(sets)}
        # [faults left, price] -> faults left after paying it, or -1 if they do not cover it.
        self.after = np.tile(np.arange(self.count)[:, None], (1, len(Price)))
        for column, price in enumerate(limits):
            for left, n in number.items():
                paid = (*left[:column], left[column] - 1, *left[column + 1 :])
                self.after[n, price] = number.get(paid, -1)
        fewer = [[all(x <= y for x, y in zip(a, b, strict=True)) for a in sets] for b in sets]
        self.within = np.array(
            [sum(1 << i for i, yes in enumerate(row) if yes) for row in fewer], np.uint64
        )

    def only_richest(self, masks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return `masks` without the sets that another set of the same mask contains."""
        kept = masks.copy()
        for n in range(self.count):
            has = masks >> np.uint64(n) & np.uint64(1) > 0
            kept[has] &= ~(self.within[n] & ~np.uint64(1 << n))
        return kept

    def closed(self, masks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return `masks`, extended by every subset of their sets."""
        full = masks.copy()
        for n in range(self.count):
            full[masks >> np.uint64(n) & np.uint64(1) > 0] |= self.within[n]
        return full


class Found(NamedTuple):
    broken: str
    path: list[str]


class Walk:
    """A walk through one world. `run` records every state that it visits."""

    def __init__(self, bounds: Bounds) -> None:
        self.tables, self.faults = Tables(bounds), Faults(bounds)
        self.states: States = np.empty(0, np.uint64)  # sorted
        # For each state, the sets of remaining faults with which it was visited, and their subsets.
        self.masks: NDArray[np.uint64] = np.empty(0, np.uint64)
        self.levels: list[Level] = []
        self.steps = 0
        self.rest_states = 0

    def run(self, say: Callable[[str], None] = lambda _: None) -> Found | None:
        """Visit every state. Returns a violation of safety or of rest, or None if there is none."""
        start = Level(self.tables.start(), np.array([self.faults.count - 1], np.uint8))
        self._merge(start.states, self.faults.within[-1:])
        level = start
        while len(level.states):
            self.levels.append(level)
            if len(self.levels) % 5 == 0:
                counts = f"{len(self.states):,} states, {self.steps:,} transitions"
                say(f"depth {len(self.levels)}: {counts}")
            if found := self._unsafe(level):
                return found
            reached: list[tuple[States, NDArray[np.uint64]]] = []
            for block in level.blocks():
                if found := self._expand(block, reached):
                    return found
            level = self._next(*_joined(reached))
        return self._restless()

    def _expand(
        self, block: Level, reached: list[tuple[States, NDArray[np.uint64]]]
    ) -> Found | None:
        states, masks = [], []
        for moves in self.tables.moves(block.states):
            left = self.faults.after[block.left[moves.source], moves.price]
            can = left >= 0
            if (moves.broken & can).any():
                first = int(np.flatnonzero(moves.broken & can)[0])
                source = int(moves.source[first])
                text, broken = self.tables.texts.values[int(moves.text[first])]
                state, budget = block.states[source], int(block.left[source])
                return Found(broken, [*self.path(len(self.levels) - 1, state, budget), text])
            states.append(moves.state[can])
            masks.append(np.uint64(1) << left[can].astype(np.uint64))
        self.steps += sum(map(len, states))
        reached.append(_joined(list(zip(states, masks, strict=True))))
        return None

    def _next(self, states: States, masks: NDArray[np.uint64]) -> Level:
        place = np.searchsorted(self.states, states)
        known = self.states[np.minimum(place, len(self.states) - 1)] == states
        old = np.where(known, self.masks[np.minimum(place, len(self.states) - 1)], np.uint64(0))
        fresh = self.faults.only_richest(masks & ~old)
        full = old | self.faults.closed(fresh)
        self.masks[place[known]] = full[known]
        self._merge(states[~known], full[~known])
        found = [
            (n, states[fresh >> np.uint64(n) & np.uint64(1) > 0]) for n in range(self.faults.count)
        ]
        left = [np.full(len(members), n, np.uint8) for n, members in found]
        return Level(np.concatenate([members for _, members in found]), np.concatenate(left))

    def _merge(self, states: States, masks: NDArray[np.uint64]) -> None:
        both = np.concatenate([self.states, states])
        # A stable sort merges two sorted runs in linear time.
        order = np.argsort(both, kind="stable")
        self.states = both[order]
        self.masks = np.concatenate([self.masks, masks])[order]

    def _unsafe(self, level: Level) -> Found | None:
        for block in level.blocks():
            unsafe = np.flatnonzero(self.tables.unsafe(self.tables.parts(block.states)))
            if len(unsafe):
                state, left = block.states[unsafe[0]], int(block.left[unsafe[0]])
                path = self.path(len(self.levels) - 1, state, left)
                return Found("I2: pages are free, and somebody may still write into them", path)
        return None

    # --- rest

    def _restless(self) -> Found | None:
        can = np.zeros(len(self.states), np.bool_)
        sources, targets = [], []
        for start in range(0, len(self.states), _BLOCK):
            block = self.states[start : start + _BLOCK]
            can[start : start + _BLOCK] = self.tables.at_rest(self.tables.parts(block))
            for moves in self.tables.moves(block, fair_only=True):
                sources.append((moves.source + start).astype(np.uint32))
                targets.append(np.searchsorted(self.states, moves.state).astype(np.uint32))
        # Follow fair steps backwards from the states of rest, until no step adds a state.
        source, target = np.concatenate(sources), np.concatenate(targets)
        self.rest_states = int(can.sum())
        while True:
            open_ = ~can[source]
            source, target = source[open_], target[open_]
            reach = source[can[target]]
            if not len(reach):
                break
            can[reach] = True
        stuck = self.states[~can]
        if not len(stuck):
            return None
        for depth, level in enumerate(self.levels):
            found = np.flatnonzero(np.isin(level.states, stuck))
            if len(found):
                state, left = np.uint64(level.states[found[0]]), int(level.left[found[0]])
                path = self.path(depth, state, left)
                return Found(f"rest: {len(stuck)} states can never come to rest", path)
        raise AssertionError("a state of no level")

    # --- a path in words

    def path(self, depth: int, state: np.uint64, left: int) -> list[str]:
        # Storing all predecessors would take too much memory, so find them again, level by level.
        texts: list[str] = []
        for level in reversed(self.levels[:depth]):
            text, state, left = self._came_from(level, state, left)
            texts.append(text)
        return texts[::-1]

    def _came_from(self, level: Level, state: np.uint64, left: int) -> tuple[str, np.uint64, int]:
        for block in level.blocks():
            for moves in self.tables.moves(block.states):
                after = self.faults.after[block.left[moves.source], moves.price]
                found = np.flatnonzero((moves.state == state) & (after == left))
                if len(found):
                    source = moves.source[found[0]]
                    text, _ = self.tables.texts.values[int(moves.text[found[0]])]
                    return text, block.states[source], int(block.left[source])
        raise AssertionError("a state nobody came from")


def _joined(parts: list[tuple[States, NDArray[np.uint64]]]) -> tuple[States, NDArray[np.uint64]]:
    """Merge `parts` into sorted, distinct states, each with the union of its masks."""
    states = np.concatenate([states for states, _ in parts])
    masks = np.concatenate([masks for _, masks in parts])
    order = np.argsort(states, kind="stable")
    states, masks = states[order], masks[order]
    if not len(states):
        return states, masks
    first = np.flatnonzero(np.append(True, states[1:] != states[:-1]))
    return states[first], np.bitwise_or.reduceat(masks, first)
