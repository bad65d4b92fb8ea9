"""A model's streams over the ranks of a group, and what a request must find in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.components import Component
from kvflow.protocols.pages.kinds import PAGE, ROW, SLOT, StateKind
from kvflow.protocols.pages.layout import Places

PAGE_SIZE = 4
Truth = dict[str, NDArray[Any]]
"""By stream, [tokens, pages or rows of the request, *whole shape]."""


class Whole(NamedTuple):
    """A stream of layer `layer`, divided among shards along `axis`, or held by each (None)."""

    layer: int
    kind: StateKind
    axis: int | None = 0


def heads(layers: int, count: int, dim: int = 8) -> list[Whole]:
    return [
        Whole(i, StateKind(f"{i}.{x}", "uint8", (count, dim))) for i in range(layers) for x in "kv"
    ]


def latents(layers: int) -> list[Whole]:
    """What MLA keeps: the same on every shard."""
    return [Whole(i, StateKind(f"{i}.latent", "uint8", (1, 24)), None) for i in range(layers)]


def everything(layers: int) -> list[Whole]:
    """K/V heads, a scale per page, a state with heads, a ring split along axis 1, and index_k."""
    found = heads(layers, 8)
    for i in range(layers):
        found += [
            Whole(i, StateKind(f"{i}.scale", "uint8", (8, 1), PAGE)),
            Whole(i, StateKind(f"{i}.state", "uint8", (8, 3, 2), ROW)),
            Whole(i, StateKind(f"{i}.ring", "uint8", (5, 8, 2), ROW, axis=1), 1),
            Whole(i, StateKind(f"{i}.index_k", "uint8", (6,)), None),
        ]
    return found


def shard_of(
    streams: Sequence[Whole], shard: int, shards: int, stage: int = 0, stages: int = 1
) -> list[StateKind]:
    """What one rank has: its layers, and of each its own heads or a shared one."""
    layers = 1 + max(s.layer for s in streams)
    mine = range(stage * layers // stages, (stage + 1) * layers // stages)
    return [_part(s, shard, shards) for s in streams if s.layer in mine]


def _part(s: Whole, shard: int, shards: int) -> StateKind:
    shape, axis = [int(n) for n in s.kind.shape], s.axis
    if axis is None:
        return s.kind._replace(replica=shard, replicas=shards)
    whole = shape[axis]
    share, copies = max(1, whole // shards), max(1, shards // whole)
    shape[axis] = share
    return s.kind._replace(
        shape=tuple(shape),
        start=shard // copies * share,
        whole=whole,
        replica=shard % copies,
        replicas=copies,
        axis=axis,
    )


def truth_of(streams: Sequence[Whole], tokens: int, seed: int) -> Truth:
    rng, pages = np.random.default_rng(seed), -(-tokens // PAGE_SIZE)
    counts = {SLOT: pages * PAGE_SIZE, PAGE: pages, ROW: 1}
    return {
        s.kind.name: rng.integers(
            1, 255, (counts[s.kind.unit], *(int(n) for n in s.kind.shape)), dtype=np.uint8
        )
        for s in streams
    }


def _own(truth: Truth, c: Component) -> NDArray[Any]:
    entries = [slice(None)] * (len(c.shape) + 1)
    entries[1 + c.axis] = slice(c.start, c.end)
    found = truth[c.name][tuple(entries)]
    return found.reshape(-1, PAGE_SIZE, *c.shape) if c.unit == SLOT else found


def fill(pool: PagedPool, places: Places, truth: Truth) -> None:
    for c in pool.layout.components:
        array = pool.array(c.name, start=c.start, replica=c.replica)
        array[...] = 255  # what of it is sent by mistake shows
        array[places[c.space]] = _own(truth, c)


def check(pool: PagedPool, places: Places, truth: Truth) -> None:
    """Every byte of the request is right, in each copy, and no other byte has changed."""
    for c in pool.layout.components:
        array = pool.array(c.name, start=c.start, replica=c.replica)
        assert (array[places[c.space]] == _own(truth, c)).all(), c.label
        others = np.setdiff1d(np.arange(len(array)), places[c.space])
        assert not array[others].any(), f"{c.label}: foreign bytes"
