"""The self-test at start, with layouts that are described rightly and wrongly."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
import torch

from kvflow.connectors.vllm.self_test import check_moves
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError

BLOCKS, HEADS, SLOTS, WIDTH = 8, 2, 4, 6
ORDERS = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3), "width first": (0, 3, 2, 1)}


def cache_of(order: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[blocks, heads, slots, width], whose bytes count up in memory in that order."""
    sizes = (BLOCKS, HEADS, SLOTS, WIDTH)
    shape = tuple(sizes[n] for n in order)
    size = BLOCKS * HEADS * SLOTS * WIDTH * dtype.itemsize
    memory = (torch.arange(size) % 251).to(torch.uint8).view(dtype).reshape(shape)
    return memory.permute(*(order.index(n) for n in range(4)))


def described(cache: torch.Tensor) -> torch.Tensor:
    """As its blocks lie in memory."""
    return cache.permute(0, *sorted(range(1, 4), key=cache.stride, reverse=True))


def pool_of(**caches: torch.Tensor) -> PagedPool:
    return PagedPool.wrap({}, SLOTS, per_page=caches)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str
)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_layouts_that_are_described_as_they_are_pass(
    order: tuple[int, ...], dtype: torch.dtype
) -> None:
    caches = {"layer.0": cache_of(order, dtype), "layer.1": cache_of(order, dtype)}
    before = {name: cache.contiguous().clone().view(torch.uint8) for name, cache in caches.items()}
    check_moves(
        caches, pool_of(**{name: described(cache) for name, cache in caches.items()}), BLOCKS
    )
    for name, cache in caches.items():
        assert torch.equal(cache.contiguous().clone().view(torch.uint8), before[name])


def test_blocks_of_all_layers_in_one_piece_pass() -> None:
    """Layers that interleave, block by block, and one that shares the cache of another."""
    whole = torch.zeros(BLOCKS, 2, HEADS, SLOTS, WIDTH)
    caches = {"a": whole[:, 0], "b": whole[:, 1], "like b": whole[:, 1]}
    check_moves(caches, pool_of(a=whole[:, 0], b=whole[:, 1]), BLOCKS)


def _half_a_block(cache: torch.Tensor) -> torch.Tensor:
    return cache.reshape(2 * BLOCKS, HEADS // 2, SLOTS, WIDTH)[:BLOCKS]


def _only_the_keys(cache: torch.Tensor) -> torch.Tensor:
    return cache.reshape(BLOCKS, 2, -1)[:, 0]


def _another_memory(cache: torch.Tensor) -> torch.Tensor:
    return cache.clone()


def _the_next_block(cache: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(cache, cache.shape, cache.stride(), cache[0].numel())


@pytest.mark.parametrize(
    "plant",
    [_half_a_block, _only_the_keys, _another_memory, _the_next_block],
    ids=lambda plant: plant.__name__,
)
def test_a_layout_that_is_described_wrongly_is_refused(
    plant: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    memory = torch.zeros(BLOCKS + 1, HEADS, SLOTS, WIDTH)
    right, wrong = cache_of((0, 1, 2, 3)), memory[:BLOCKS]
    with pytest.raises(LayoutError, match="not read back as it was written, in wrong: ") as raised:
        check_moves(
            {"right": right, "wrong": wrong}, pool_of(right=right, wrong=plant(wrong)), BLOCKS
        )
    assert "\n" not in str(raised.value)


def test_a_layer_that_is_left_out_is_named() -> None:
    caches = {f"layer.{n}": cache_of((0, 1, 2, 3)) for n in range(6)}
    with pytest.raises(LayoutError, match=r"in layer\.1, layer\.2, layer\.3 and 2 more"):
        check_moves(caches, pool_of(**{"layer.0": caches["layer.0"]}), BLOCKS)


def test_the_first_dimension_is_that_of_blocks() -> None:
    cache = cache_of((0, 1, 2, 3))
    with pytest.raises(LayoutError, match=r"k, \(8, 2, 4, 6\): its first .* not vLLM's 4 blocks"):
        check_moves({"k": cache}, pool_of(k=cache), 4)


def test_one_block_has_nowhere_to_go() -> None:
    cache = cache_of((0, 1, 2, 3))[:1]
    check_moves({"k": cache}, pool_of(k=cache), 1)


def test_a_pool_of_two_blocks_is_tested_too() -> None:
    cache = torch.zeros(2, HEADS, SLOTS, WIDTH)
    check_moves({"a": cache}, pool_of(a=cache), 2)
    with pytest.raises(LayoutError, match="does not read back as it was written, in a: "):
        check_moves({"a": cache}, pool_of(a=cache.clone()), 2)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_layout_by_which_a_neighbour_is_moved_too_is_refused(shift: int) -> None:
    memory = torch.zeros(BLOCKS + 2, HEADS, SLOTS, WIDTH)
    cache, beside = memory[1 : BLOCKS + 1], memory[1 + shift : 1 + shift + BLOCKS]
    with pytest.raises(LayoutError, match="does not read back as it was written, in a: "):
        check_moves({"a": cache}, pool_of(a=cache, beside=beside), BLOCKS)
