"""What is measured fits into the fleet that is measured."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvflow.plan.fleet import prompt_of
from kvflow.plan.measure import (
    batches_of,
    fastest_s,
    groups_of,
    lengths_of,
    transfer_bytes_s,
)
from kvflow.plan.profile import Sizes
from kvflow.plan.trace import Request
from kvflow.protocols.errors import MisuseError
from tests.plan import profiles as known


def sizes(**changes: Any) -> Sizes:
    return msgspec.structs.replace(known.SIZES, **changes)


def test_batches_run_at_once() -> None:
    assert batches_of(sizes()) == [1, 2, 4, 8, 16, 32]
    assert batches_of(sizes(decode_pool=1024)) == [1, 2, 4, 8]
    assert batches_of(sizes(max_running=3)) == [1, 2]
    for small in ({"decode_pool": 127}, {"max_model_len": 127}):
        with pytest.raises(MisuseError, match="plan measures with requests of 128 tokens"):
            batches_of(sizes(**small))


def test_prompts_are_parts_of_a_chunk_and_several() -> None:
    assert lengths_of(sizes()) == [8, 16, 32, 64, 128, 256, 512]
    assert lengths_of(sizes(max_model_len=300)) == [8, 16, 32, 64, 128, 256, 298]
    assert lengths_of(sizes(prefill_pool=100, chunk_tokens=8)) == [1, 2, 4, 8, 16, 32]


def test_whole_chunks_fill_a_step_if_the_pools_hold_them() -> None:
    assert groups_of(sizes()) == [(32, 24), (128, 2)]
    assert groups_of(sizes(batch_tokens=1024)) == [(32, 24), (128, 8)]
    assert groups_of(sizes(batch_tokens=64)) == [(32, 24), (128, 2)]
    for small in ({"max_model_len": 128}, {"prefill_pool": 256}, {"decode_pool": 256}):
        assert groups_of(sizes(**small)) == [(32, 24)]


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ([5.0, 4.0, 4.1, 1.0], 3),
        ([9.0, 4.0, 6.0, 4.1, 1.0], 4),
        ([9.0, 8.0, 6.0, 5.0, 4.0, 1.0], 5),
    ],
)
async def test_turns_go_on_until_the_two_fastest_are_close(times: list[float], taken: int) -> None:
    left = iter(times)

    async def turn() -> float:
        return next(left)

    assert await fastest_s(turn) == 4.0
    assert len(list(left)) == len(times) - taken


def test_equal_blocks_have_equal_tokens() -> None:
    first, second = (prompt_of(Request(0, 40, 1, (7, 8, last)), 16) for last in (9, 10))
    assert len(first) == len(second) == 40
    assert first[:32] == second[:32] and first[32:] != second[32:]
    assert prompt_of(Request(0, 16, 1, (7,)), 16, salt=1) != first[:16]


async def test_a_transfer_is_measured_over_real_nodes() -> None:
    assert await transfer_bytes_s(sizes(), "local") > 1e6
