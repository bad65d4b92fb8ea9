"""SGLang's allocation of a KV cache, moved into a shared segment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvflow.connectors.sglang import shared_pools
from kvflow.connectors.sglang.shared_pools import allocate_in_segment, segment_with
from tests.fakes import sglang

# SGLang gives a shape as a tuple, and may give a single length as a number.
SHAPES: list[Any] = [(2, 33, 4, 8), (2, 33, 4, 8), (7, 3), 11]


class Pool:
    """It allocates as `MHATokenToKVPool._create_buffers_normal` does."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.buffers: list[torch.Tensor] = []

    def create(self) -> None:
        self.buffers = [
            torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for shape in SHAPES
        ]
        self.halves = [self.buffers[0][0, :32], self.buffers[0][1, :32]]


@pytest.fixture
def disagg(monkeypatch: pytest.MonkeyPatch) -> Any:
    modules: Any = sglang.install(monkeypatch)
    monkeypatch.setattr(shared_pools, "_segments", [])
    return modules["sglang.srt.runtime_context"].get_disagg()


def test_all_tensors_lie_in_one_segment(disagg: Any) -> None:
    pool = Pool()
    allocate_in_segment(Pool.create, pool)
    segment = segment_with(pool.buffers[0].data_ptr())
    assert segment is not None and segment.fd >= 0
    ends: list[int] = []
    for buffer, shape in zip(pool.buffers, SHAPES, strict=True):
        assert (
            buffer.shape == torch.empty(shape).shape
            and buffer.dtype == torch.bfloat16
            and buffer.is_contiguous()
        )
        assert buffer.device.type == "cpu" and not buffer.any()
        start = buffer.data_ptr() - segment.address
        assert start % 4096 == 0 and start >= (ends[-1] if ends else 0)
        ends.append(start + buffer.nbytes)
    assert ends[-1] <= segment.size_bytes
    pool.halves[1][3] = 1.0
    assert pool.buffers[0][1, 3].all() and pool.buffers[0].sum() == 32
    assert segment_with(segment.address + segment.size_bytes) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("disaggregation_mode", "prefill"), ("disaggregation_transfer_backend", "mooncake")],
)
def test_others_allocate_as_usual(disagg: Any, name: str, value: str) -> None:
    setattr(disagg, name, value)
    pool = Pool()
    allocate_in_segment(Pool.create, pool)
    assert segment_with(pool.buffers[0].data_ptr()) is None and not pool.buffers[0].any()


def test_a_decode_on_a_device_allocates_there(disagg: Any) -> None:
    pool = Pool("meta")
    allocate_in_segment(Pool.create, pool)
    assert {each.device.type for each in pool.buffers} == {"meta"} and not shared_pools._segments
