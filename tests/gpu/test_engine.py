"""Models and pools on a CUDA device, beside the same on the CPU."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from kvflow.aio import Threads
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.kinds import ROW
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.scheduler.params import SamplingParams
from tests.memory.kinds import KINDS, layout_of, names_of
from tests.serve.engine import tiny_models
from tests.serve.engine.pair import prompt_of
from tests.serve.engine.single import SingleEngine
from tests.serve.engine.tiny_models import INDEXED, STATEFUL

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)


async def generated(model: LoadedModel, params: SamplingParams) -> list[list[int]]:
    """Eight prompts of unlike lengths at once, in chunks of 7 tokens."""
    num_rows = 16 if any(stream.unit == ROW for stream in model.streams) else 0
    layout = build_layout(model.streams, page_size=4, num_pages=256, num_rows=num_rows)
    pool = PagedPool.allocate(
        layout, shared=False, device=None if model.device.type == "cpu" else model.device
    )
    with Threads("model") as executor:
        engine = SingleEngine(model, pool, pool.pages, executor, chunk_tokens=7)
        await engine.start()

        async def tokens(n: int) -> list[int]:
            return [out.token_id async for out in engine.generate(prompt_of(3 + 5 * n, n), params)]

        found = await asyncio.gather(*(tokens(n) for n in range(8)))
        await engine.close()
        assert pool.pages.at_rest()
    pool.close()
    return found


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "packed"),
        ("llama", "pad"),
        ("gemma2", "packed"),
        ("gemma2", "pad"),
        *(
            (family, "auto")
            for family in ("deepseek_v3", "gpt_oss", "mixtral", *INDEXED, *STATEFUL)
        ),
    ],
)
async def test_tokens_are_those_of_the_cpu(family: str, attention: str, tmp_path: Path) -> None:
    path = str(tiny_models.build(family, tmp_path))
    both = [load_model(path, "float32", attention, None, device) for device in ("cpu", "cuda")]
    assert str(both[1].device) == "cuda:0"
    on_cpu, on_cuda = [await generated(model, GREEDY) for model in both]
    assert on_cuda == on_cpu


async def test_every_way_of_sampling_runs(tmp_path: Path) -> None:
    model = load_model(str(tiny_models.build("llama", tmp_path)), "float32", device="cuda")
    for params in (
        SamplingParams(
            temperature=0.8, top_p=0.9, seed=3, max_new_tokens=8, logprobs=3, prompt_logprobs_from=0
        ),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.02, seed=4, max_new_tokens=8),
        SamplingParams(
            temperature=0,
            max_new_tokens=8,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            min_new_tokens=4,
            logit_bias=((5, 2.0),),
            bad_words=((7,),),
        ),
    ):
        first, again = [await generated(model, params) for _ in range(2)]
        assert first == again and all(first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_is_laid_out_as_on_the_host_and_frees_every_buffer(kind: str) -> None:
    gc.collect()  # what earlier tests have left
    before = torch.cuda.memory_allocated()
    pool = PagedPool.allocate(layout_of(kind, 16, 64, 5, "layer_first"), device="cuda")
    host = PagedPool.allocate(layout_of(kind, 16, 64, 5, "layer_first"), shared=False)
    assert torch.cuda.memory_allocated() - before >= pool.layout.size_bytes
    described = [
        [(t.shape, t.stride(), t.dtype) for t in map(p.tensor, names_of(kind))]
        for p in (pool, host)
    ]
    assert described[0] == described[1]
    assert not any(bool(pool.tensor(name).float().any()) for name in names_of(kind))
    pool.close()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_streams_on_two_devices_are_refused() -> None:
    host, device = np.ones((2, 4, 3), np.float32), torch.ones(2, 4, 3, device="cuda")
    assert PagedPool.wrap({"k": device}, page_size=4).device == "cuda:0"
    with pytest.raises(LayoutError, match="'k' is on cpu and 'v' on cuda:0"):
        PagedPool.wrap({"k": host, "v": device}, page_size=4)
