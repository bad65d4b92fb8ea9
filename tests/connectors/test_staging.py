"""The staging of an engine's KV cache: where there is one, how large it is, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import kvflow
from kvflow.connectors import staging
from kvflow.connectors.staging import close_staging, make_staging
from kvflow.connectors.vllm.memory import shared_allocation, staging_bytes
from kvflow.memory.copies import host_layout
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.pages.spaces import counts_fit
from tests.connectors.vllm.worker_pair import (
    BLOCK_BYTES,
    MANY_GROUPS,
    PAGES,
    new_pool,
    pool_of,
)
from tests.memory.kinds import layout_of

log = logging.getLogger(__name__)


@contextmanager
def staged(
    pool: kvflow.PagedPool, mode: str, size_bytes: int = 0, default_bytes: int = 0
) -> Iterator[kvflow.Staging | None]:
    found = make_staging(pool, mode, size_bytes, default_bytes, setting="staging_bytes", log=log)
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def test_a_pool_in_host_memory_has_a_staging_only_where_it_is_asked_for() -> None:
    pool = new_pool()
    with staged(pool, "auto") as none, staged(pool, "always") as found:
        assert none is None and found is not None
        assert found.pool is pool and found.host.layout.num_pages == PAGES


@pytest.mark.parametrize(("size_bytes", "default_bytes"), [(512, 0), (0, 512), (512, 1024)])
def test_its_size_is_bounded(size_bytes: int, default_bytes: int) -> None:
    with staged(new_pool(), "always", size_bytes, default_bytes) as found:
        assert found is not None and found.host.layout.size_bytes == 512


def test_a_size_without_place_for_a_page_names_the_setting() -> None:
    text = "^staging_bytes 63: 63 bytes of host memory do not hold a page of 64 bytes; 64 are"
    with pytest.raises(MisuseError, match=text), staged(new_pool(), "always", 63):
        pass


def test_a_pool_on_a_device_is_never_used_as_it_is() -> None:
    """This one is on a device that cannot be copied either."""
    pool = kvflow.PagedPool.allocate(layout_of("mha", 16, 64, 6, "layer_first"), device="meta")
    with (
        pytest.raises(LayoutError, match=r"^memory of meta cannot be copied"),
        staged(pool, "auto", 4096),
    ):
        pass


def test_too_little_memory_for_the_default_names_the_setting_alone() -> None:
    text = "^staging_bytes: 63 bytes of host memory do not hold a page of 64 bytes"
    with pytest.raises(MisuseError, match=text), staged(new_pool(), "always", 0, 63):
        pass


def test_without_proof_the_memory_stays() -> None:
    with staged(new_pool(), "always") as found:
        assert found is not None
        close_staging(found, is_proven=False)
        assert found.host.array("k").nbytes == PAGES * BLOCK_BYTES and staging._kept.pop() is found
        close_staging(found, is_proven=True)
        with pytest.raises(LayoutError, match="closed"):
            found.host.array("k")
        assert not staging._kept


def holds(layout: PoolLayout, size_bytes: int, tokens: int) -> bool:
    whole = size_bytes >= layout.room_bytes(layout.counts)
    counts = layout.counts if whole else host_layout(layout, size_bytes).counts
    return counts_fit(layout.wanted(tokens), counts)


def test_groups_that_share_their_memory_are_counted_once() -> None:
    layout, memory_bytes = pool_of(MANY_GROUPS).layout, PAGES * BLOCK_BYTES
    assert layout.room_bytes(layout.counts) == 3 * memory_bytes
    assert staging_bytes(layout, 10) == memory_bytes
    assert staging_bytes(new_pool().layout, 10) == memory_bytes


@pytest.mark.parametrize("tokens", [60, 120, 250, 256])
def test_a_prompt_of_the_greatest_length_fits(tokens: int) -> None:
    """The largest one fills all blocks of full attention."""
    layout = pool_of(MANY_GROUPS).layout
    found = staging_bytes(layout, tokens)
    assert holds(layout, found, tokens)
    least = found == PAGES * BLOCK_BYTES
    assert least or not holds(layout, found // 2, tokens), "half of it is enough"


def test_vllms_cache_on_a_device_is_allocated_there() -> None:
    found: list[kvflow.SharedSegment] = []
    with shared_allocation(found):
        cache = torch.zeros(4096, dtype=torch.int8, device="meta")
    assert cache.device.type == "meta" and not found
