"""Devices: which one is meant, and that all of a step is there; tests/gpu has the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvflow.aio import Threads
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.engine.model import device, thread
from kvflow.serve.engine.model.device import find_device
from kvflow.serve.engine.model.grammars import Grammars
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.runner import Runner
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler.adjustments import adjustments_of
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.engine.scheduler.sampling import Draw, choose
from kvflow.serve.engine.scheduler.scoring import PromptScorer
from tests.serve.engine.pair import prompt_of, sequence_of
from tests.serve.engine.tiny_models import Loaded


@pytest.mark.parametrize(
    ("wanted", "there", "found"),
    [
        ("auto", [], "cpu"),
        ("auto", ["one", "two"], "cuda:0"),
        ("cpu", ["one"], "cpu"),
        ("cuda", ["one"], "cuda:0"),
        ("cuda:1", ["one", "two"], "cuda:1"),
        ("cuda", [], r"--device cuda: it is not there; torch .* sees no CUDA device"),
        (
            "cuda:2",
            ["A", "B"],
            r"--device cuda:2: it is not there; torch .* sees cuda:0 \(A\), cuda:1 \(B\)",
        ),
        ("gpu", ["A"], "--device gpu: not auto, cpu, cuda or cuda:N"),
        ("cuda:", ["A"], "--device cuda:: not auto"),
        ("cuda:-1", ["A"], "--device cuda:-1: not auto"),
    ],
)
def test_a_device_is_found_or_refused_with_what_there_is(
    wanted: str, there: list[str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cuda_devices", lambda: there)
    if found.startswith("--device"):
        with pytest.raises(MisuseError, match=found):
            find_device(wanted)
    else:
        assert str(find_device(wanted)) == found


class OneDevice(TorchDispatchMode):
    """Checks that every operation finds its tensors on one device, unless it moves them."""

    def __init__(self, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where, self.operations = where, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        if function not in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            elsewhere = [t for t in tensors if t.device.type != self.where and t.dim()]
            if len(elsewhere) not in (0, len(tensors)):
                raise AssertionError(
                    f"{function} finds {tuple(elsewhere[0].shape)} on {elsewhere[0].device}"
                )
        return function(*args, **kwargs or {})


def elsewhere(model: LoadedModel, mode: str) -> Runner:
    """The model and a pool of 40 pages on torch's device `meta`, which computes shapes only."""
    layout = build_layout(model.streams, page_size=4, num_pages=40, num_rows=int(model.has_rows))
    pool = PagedPool.allocate(layout, device="meta")
    return Runner(
        copy.deepcopy(model.model).to("meta"), model.layers, pool, packed=mode == "packed"
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_every_tensor_of_a_step_is_where_the_model_is(family: str, loaded: Loaded) -> None:
    runner = elsewhere(loaded(family), "packed")
    rows = [
        sequence_of(prompt_of(n, n), list(range(at, at + (n + 11) // 4)))
        for n, at in ((9, 0), (3, 7), (22, 14))
    ]
    steps = [
        [Row(rows[0], 4), Row(rows[1], 3)],
        [Row(rows[0], 5, 2), Row(rows[1], 1), Row(rows[2], 22, 0)],
        *([[Row(s, 1) for s in rows]] * 3),
    ]
    rows[1].append(7)
    with OneDevice("meta") as seen:
        for step in steps:
            logits = runner.forward(step)
            assert logits.device.type == "meta" and logits.shape[0] == sum(
                row.logits for row in step
            )
            for row in step:
                row.sequence.computed += row.new
                while row.sequence.length <= row.sequence.computed:
                    row.sequence.append(1)
    assert seen.operations > 100


def test_a_tensor_that_is_left_behind_is_found(loaded: Loaded) -> None:
    runner = elsewhere(loaded("llama"), "packed")
    runner._place = torch.from_numpy
    with pytest.raises((AssertionError, RuntimeError)), OneDevice("meta"):
        runner.forward([Row(sequence_of(prompt_of(3), [1]), 3)])


MAKERS = torch.tensor, torch.arange, torch.zeros, torch.ones, torch.empty, torch.full


class Makers(torch.overrides.TorchFunctionMode):
    """Checks that every tensor made from numbers is given its device."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in MAKERS:
            assert kwargs.get("device") is not None, f"{function} makes a tensor on the CPU"
        return function(*args, **kwargs)


def test_sampling_makes_its_tensors_where_the_logits_are(seed: int) -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(seed))
    each = [
        SamplingParams(temperature=0.7, logprobs=2, logprob_token_ids=(5,)),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=40, min_p=0.01),
        SamplingParams(temperature=2.0, top_p=0.9999),
    ]
    with Makers():
        assert len(choose(logits, [Draw(p, 1, 2) for p in each])) == 4
        sequence = Sequence(0, [1, 2, 3], 8, 4)
        changing = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2, min_new_tokens=2)
        grammars = Grammars(None, 0, frozenset())
        adjust = adjustments_of(changing, sequence, frozenset([9]), grammars)
        assert adjust is not None
        adjust(logits[0], 3)
        sequence.computed = 0
        PromptScorer(sequence, 0, 2, ()).add(logits[:3], 3)


async def test_a_step_has_ended_when_its_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step queued still uses its pages, also after it failed (I13)."""
    pages = PageAllocator(2)
    sequence = Sequence("mine", [1], 0, 1)
    sequence.add_pages(pages.take(1, "mine"))
    gpu, seen = torch.device("cuda", 0), list[object]()

    def wait_for(found: torch.device) -> None:
        seen.append((found, pages.held_pages))

    def fail() -> None:
        raise ValueError("step")

    monkeypatch.setattr(device, "wait_for", wait_for)
    with Threads("model") as executor:
        layout = build_layout([("k", "uint8", (1,))], page_size=1, num_pages=2)
        steps = thread.ModelThread(executor, pages, layout, gpu)
        await steps.run([sequence], lambda: seen.append("computed"))
        with pytest.raises(ValueError, match="step"):
            await steps.run([sequence], fail)
    assert seen == ["computed", (gpu, 1), (gpu, 1)] and pages.held_pages == 0
