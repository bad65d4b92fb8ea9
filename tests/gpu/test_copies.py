"""Snapshots of pools in device memory: every kind of state comes back, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.protocols.pages.layout import NO_PLACES, Order, Places
from tests.memory.kinds import KINDS, has_rows, in_rows, layout_of, names_of

pytestmark = pytest.mark.gpu


def fill(pool: PagedPool, kind: str, seed: int) -> None:
    random = torch.Generator(device=pool.device).manual_seed(seed)
    for name in names_of(kind):
        view = pool.tensor(name).view(torch.uint8)
        view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, device=pool.device, generator=random))
    torch.cuda.synchronize()


def contents(pool: PagedPool, kind: str) -> dict[str, torch.Tensor]:
    return {name: pool.tensor(name).view(torch.uint8).cpu().clone() for name in names_of(kind)}


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_buffer_comes_back_and_no_neighbour_is_touched(kind: str, order: Order) -> None:
    pool = PagedPool.allocate(layout_of(kind, 16, 40, 6, order), device="cuda")
    store = SnapshotStore(pool, 1 << 22, slice_bytes=4096)
    fill(pool, kind, 1)
    before = contents(pool, kind)
    pages = pool.pages.take(17, "mine")
    rows = pool.rows.take(2, "mine") if has_rows(kind) else NO_PLACES
    held = await store.take(Places(pages, rows))
    pool.pages.give_back(pages, "mine")
    fill(pool, kind, 2)
    foreign = contents(pool, kind)
    theirs = np.random.default_rng(3).permutation(pool.pages.take(40, "again"))[:17]
    their_rows = pool.rows.take(3, "again")[::-1][:2].copy() if has_rows(kind) else NO_PLACES
    await store.restore(held, Places(theirs, their_rows))
    found = contents(pool, kind)
    for name in names_of(kind):
        here, there = (rows, their_rows) if in_rows(kind, name) else (pages, theirs)
        assert torch.equal(found[name][there.tolist()], before[name][here.tolist()]), name
        others = np.setdiff1d(np.arange(len(found[name])), there).tolist()
        assert torch.equal(found[name][others], foreign[name][others]), name
    held.close()
    await store.close()
    pool.close()
