"""Models with sliding windows whose K and V lie in rings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.kinds import ROW, SLOT, StateKind
from kvflow.protocols.pages.layout import Places, build_layout
from kvflow.serve.engine.model import selftest
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.paged_cache import RingStream
from kvflow.serve.engine.model.probe import LayerStreams
from kvflow.serve.engine.model.runner import Runner
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row, Step
from kvflow.serve.engine.model.windows import choose_rings
from tests.serve.engine import tiny_models
from tests.serve.engine.pair import (
    EnginePair,
    Watched,
    greedy,
    poisoned_pool,
    prompt_of,
)
from tests.serve.engine.tiny_models import Generated, Loaded, Tiny

WINDOW, NEW = 16, 24
FAMILIES = ["gpt_oss", "gemma2", "gemma3", "gemma4_shared_kv", "mistral"]


def units(model: LoadedModel) -> list[set[str]]:
    return [{kind.unit for kind in layer.kinds} if layer else set() for layer in model.layers]


def test_windows_are_kept_in_rows_and_the_rest_in_pages(loaded: Loaded) -> None:
    model = loaded("gpt_oss")
    assert model.mode == "packed" and units(model) == [{ROW}, {SLOT}, {ROW}, {SLOT}]
    assert model.streams[0] == StateKind(
        "layer0.k.sliding_window_rows", "float32", (WINDOW, 2, 16), ROW, axis=1
    )
    assert model.has_rows and not model.has_states, "its chunks may be of any size"
    assert model.chunk(41, 40) == 40 and model.chunk(9, 1) == 1
    assert model.ring_bytes == 2 * 2 * WINDOW * 2 * 16 * 4
    assert (loaded("falcon_h1").has_rows, loaded("falcon_h1").has_states) == (True, True)
    assert (
        loaded("llama").has_rows,
        loaded("falcon_h1").ring_bytes,
        loaded("llama").ring_bytes,
    ) == (False, 0, 0)


def test_a_request_takes_fewer_bytes(loaded: Loaded, tiny: Tiny) -> None:
    """Of 4,096 tokens, half of the layers keep 16."""

    def bytes_of(model: LoadedModel, tokens: int) -> int:
        layout = build_layout(
            model.streams, page_size=16, num_pages=1, num_rows=int(model.has_rows)
        )
        return layout.row_bytes + layout.page_bytes * -(-tokens // 16)

    in_pages = bytes_of(load_model(str(tiny("gpt_oss")), sliding_window_rows="never"), 4096)
    assert bytes_of(loaded("gpt_oss"), 4096) == in_pages * (4096 + WINDOW) // (2 * 4096)
    in_pages = bytes_of(load_model(str(tiny("mistral")), sliding_window_rows="never"), 4096)
    assert bytes_of(loaded("mistral"), 4096) == in_pages * WINDOW // 4096


@pytest.mark.parametrize(
    ("setting", "attention", "window", "context", "choice"),
    [
        ("auto", "auto", 256, 2048, "try"),
        ("auto", "packed", 128, 131_072, "try"),
        ("auto", "auto", 256, 2047, "never"),
        ("auto", "auto", 257, 1 << 20, "never"),
        ("auto", "pad", 128, 131_072, "never"),
        ("never", "auto", 128, 131_072, "never"),
        ("always", "auto", 4096, 4096, "need"),
        ("always", "packed", 0, 4096, "never"),
        ("always", "pad", 0, 4096, "never"),
    ],
)
def test_auto_asks_nothing_but_the_model(
    setting: str, attention: str, window: int, context: int, choice: str
) -> None:
    keys = StateKind("k", "float32", (2, 16))
    layers = (LayerStreams(keys, keys, window=window), LayerStreams(keys, keys), None)
    assert choose_rings(layers, setting, attention, context) == choice


def test_what_is_asked_for_is_done_or_refused(tiny: Tiny) -> None:
    def load(family: str, setting: str, attention: str = "auto") -> LoadedModel:
        return load_model(str(tiny(family)), "float32", attention, sliding_window_rows=setting)

    assert not load("gemma2", "never").has_rows
    assert not load("gemma2", "auto", "pad").has_rows
    assert not load("llama", "always").has_rows, "it has no windows"
    assert units(load("mistral", "always")) == [{ROW}] * 4
    with pytest.raises(
        MisuseError,
        match=r"^--sliding-window-rows always: only --attention packed keeps windows in",
    ):
        load("gemma2", "always", "pad")
    with pytest.raises(
        MisuseError,
        match=(
            r"^--sliding-window-rows always: model \S+ fails its self-test so \(packed, windows in "
            r"rows: "
        ),
    ) as refusal:
        load("llama4_chunked", "always")
    assert "\n" not in str(refusal.value)
    assert load("llama4_chunked", "auto").mode == "pad"
    with pytest.raises(
        MisuseError, match="sliding_window_rows 'some' is not one of auto, always, never"
    ):
        load("gemma2", "some")


class Stuck(RingStream):
    """A ring that keeps what it has when it is full."""

    def exchange(self, step: Step, new: torch.Tensor) -> torch.Tensor:
        before = self._pages.clone()
        found = super().exchange(step, new)
        if int(step.positions.max()) >= self._window:
            self._pages.copy_(before)
        return found


@pytest.mark.parametrize("window", [WINDOW, 23, 40])
def test_the_self_test_fills_the_rings_it_tests(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts are longer than the window, so that a fault behind the first shows."""
    path = str(tiny_models.build("gemma2", tmp_path, sliding_window=window))
    assert load_model(path).has_rows
    monkeypatch.setattr("kvflow.serve.engine.model.paged_cache.RingStream", Stuck)
    assert (load_model(path).has_rows, load_model(path).mode) == (False, "packed")
    with pytest.raises(MisuseError, match=r"windows in rows: logits differ by"):
        load_model(path, sliding_window_rows="always")


def test_the_self_test_of_a_long_window_is_not_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(
        tiny_models.build("gemma2", tmp_path, sliding_window=512, max_position_embeddings=4096)
    )
    lengths: set[int] = set()
    honest = selftest._stock

    def stock(model: Any, prompt: list[int], chunk: int) -> torch.Tensor:
        lengths.add(len(prompt))
        return honest(model, prompt, chunk)

    monkeypatch.setattr(selftest, "_stock", stock)
    assert load_model(path, sliding_window_rows="always").has_rows and lengths == set(
        selftest.LENGTHS
    )


def test_a_pool_with_windows_in_pages_is_refused(loaded: Loaded, tiny: Tiny) -> None:
    streams = load_model(str(tiny("gpt_oss")), sliding_window_rows="never").streams
    pool = PagedPool.allocate(build_layout(streams, page_size=4, num_pages=2), shared=False)
    with pytest.raises(
        LayoutError, match=r"does not fit the model: .*k\.sliding_window_rows: only model has it"
    ):
        loaded("gpt_oss").runner(pool)


def edges(chunk: int) -> list[list[int]]:
    around = (chunk - 1, chunk, chunk + 1, WINDOW - 1, WINDOW, WINDOW + 1)
    lengths = {1, 2, *around, 2 * WINDOW + 1, 2 * chunk + 7, 97}
    return [prompt_of(n, n) for n in sorted(lengths)]


@pytest.mark.parametrize(("page", "chunk"), [(4, 7), (16, 40), (64, 16)])
@pytest.mark.parametrize("family", FAMILIES)
async def test_fp32_equals_generate(
    family: str, page: int, chunk: int, loaded: Loaded, generated: Generated
) -> None:
    prompts = edges(chunk)
    counts = [NEW - 5 * (i % 3) for i in range(len(prompts))]
    async with EnginePair(
        loaded(family),
        page_size=page,
        num_pages=2048 // page,
        num_rows=7,
        chunk_tokens=chunk,
        max_batch_tokens=2 * chunk,
    ) as pair:
        runs = zip(prompts, counts, strict=True)
        found = await asyncio.gather(*(pair.tokens(p, greedy(count)) for p, count in runs))
    for prompt, count, tokens in zip(prompts, counts, found, strict=True):
        assert tokens == generated(family, prompt, count, tokens), f"prompt of {len(prompt)} tokens"


async def test_generated_tokens_are_computed_again_in_a_chunk(
    loaded: Loaded, generated: Generated
) -> None:
    """A ring depends on no division into steps, as states do."""
    prompt = prompt_of(30)
    async with EnginePair(loaded("gpt_oss")) as pair:
        steps = Watched(pair.decode._runner)
        steps.before = lambda: pair.decode.retract_all() if len(steps.steps) == 4 else None
        assert await pair.tokens(prompt, greedy(NEW)) == generated("gpt_oss", prompt, NEW)
        assert pair.decode.retraction.recomputes == 1
    assert steps.new[4] == [35]


def sequence_at(prompt: list[int], places: Places) -> Sequence:
    found = Sequence("test", prompt, 4 * places[0].size - len(prompt), 4)
    found.add(places)
    return found


def continued(runner: Runner, sequences: list[Sequence], steps: int) -> torch.Tensor:
    found: list[torch.Tensor] = []
    for _ in range(steps):
        found.append(runner.forward([Row(s, s.length - s.computed) for s in sequences]))
        for s, token in zip(sequences, found[-1].argmax(-1).tolist(), strict=True):
            s.computed = s.length
            s.append(token)
    return torch.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_an_earlier_request_is_read(family: str, loaded: Loaded) -> None:
    """Prompts are shorter than the window, so the row still holds the other's."""
    pool = poisoned_pool(loaded(family), 80)
    runner = loaded(family).runner(pool)
    prompts = [prompt_of(3, 1), prompt_of(9, 2)]
    places = [
        (np.arange(12 * i, 12 * i + 12, dtype=np.int32), np.array([i + 1], np.int32))
        for i in range(2)
    ]

    def of_both() -> torch.Tensor:
        both = [sequence_at(p, at) for p, at in zip(prompts, places, strict=True)]
        return continued(runner, both, 10)

    fresh = of_both()
    assert bool(torch.isfinite(fresh).all())
    continued(runner, [sequence_at(prompt_of(20, i), at) for i, at in enumerate(places)], 3)
    assert torch.equal(of_both(), fresh)
    for name in (kind.name for kind in loaded(family).streams if kind.unit == ROW):
        assert bool(torch.isnan(pool.tensor(name)[[0, 3, 4, 5]]).all())
