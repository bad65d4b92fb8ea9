"""Recorded decode steps: they have the bits of the model's own, and some models have none."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.serve.engine.model import recorded as module
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.recorded import STEPS_BEFORE, RecordedSteps, Recording
from kvflow.serve.engine.model.runner import Runner
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row, current
from tests.serve.engine import tiny_models
from tests.serve.engine.pair import poisoned_pool, prompt_of
from tests.serve.engine.tiny_models import Loaded

PAGE, NEW = 4, 44
# Two recordings after the first steps, and one step that repeats them.
REPEATED = STEPS_BEFORE + 3


def decode(model: LoadedModel, lengths: list[int], *, record: bool) -> tuple[Runner, list[Any]]:
    """Return the logits of the steps of some sequences, one of which ends half-way."""
    pool = poisoned_pool(model, 16 * len(lengths), num_rows=len(lengths))
    runner = model.runner(pool)
    if not record:
        runner._recorded = runner._call_packed  # type: ignore[assignment]
    sequences = []
    for n, length in enumerate(lengths):
        sequence = Sequence("test", prompt_of(length, n), NEW, PAGE)
        count = -(-(length + NEW) // PAGE)
        sequence.add_pages(np.arange(16 * n, 16 * n + count, dtype=np.int32))
        sequence.rows = np.array([n], dtype=np.int32)
        sequences.append(sequence)
    found = [runner.forward([Row(s, s.length) for s in sequences])]
    for step in range(NEW - 1):
        for sequence, logits in zip(sequences, found[-1], strict=True):
            sequence.computed = sequence.length
            sequence.append(int(logits.argmax()))
        if step == NEW // 2:
            sequences.pop()
        if sequences:
            found.append(runner.forward([Row(s, 1) for s in sequences]))
            found[-1] = found[-1].clone()
            continue
        break
    pool.close()
    return runner, found


def repeated(runner: Runner) -> int:
    """Return the number of shapes whose steps are repeated."""
    return sum(shape.repeat is not None for shape in runner._recorded._shapes.values())


# These expand the states of all earlier tokens in every step, so their calls depend on the number.
MLA = ("deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, "gpt_oss", "gemma4_shared_kv"])
def test_repeated_steps_have_the_bits_of_the_models_own(
    family: str, dtype: str, loaded: Loaded
) -> None:
    model = loaded(family, dtype)
    for lengths in ([9], [5, 17, 11]):
        _, expected = decode(model, lengths, record=False)
        runner, found = decode(model, lengths, record=True)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
        if family in MLA:
            assert runner._recorded.why_not == "two steps of a shape make different calls"
        else:
            assert not runner._recorded.why_not
            assert repeated(runner) == min(2, len(lengths))


Forward = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
WEIGHT = torch.arange(12.0).view(3, 4)
IDS = torch.tensor([1, 2, 0])


def linear(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, WEIGHT) * positions[:, None]


@torch.inference_mode()
def run(forward: Forward, steps: int = REPEATED + 2) -> RecordedSteps:
    """Run steps with other values in each, and compare all results with those of `forward`."""
    recorded = RecordedSteps(forward)
    for step in range(steps):
        ids, positions = IDS.roll(step), torch.arange(3) + step
        expected = linear(ids, positions, 0)
        assert torch.equal(recorded(ids, positions, 0), expected), step
        assert current.recorder is None
    return recorded


def as_attention(function: Any, value: torch.Tensor) -> torch.Tensor:
    recorder = current.recorder
    found: torch.Tensor = function(value) if recorder is None else recorder.attend(function, value)
    return found


def as_cache(function: Any, value: torch.Tensor) -> torch.Tensor:
    recorder = current.recorder
    found: torch.Tensor = (
        function(value) if recorder is None else recorder.exchange(function, value)
    )
    return found


def test_a_step_is_repeated_without_the_model() -> None:
    calls = 0

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return linear(ids, positions, keep)

    recorded = run(forward)
    assert not recorded.why_not and calls == STEPS_BEFORE + 2


def branches(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
    found = linear(ids, positions, keep)
    return found.clone() if positions[0] < 5 else found


def lists(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
    return linear(torch.tensor(ids.tolist()), positions, keep)


def arrays(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
    return linear(torch.from_numpy(ids.numpy() + 0), positions, keep)


def chooses(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
    found = linear(ids, positions, keep)
    return torch.cat([found[ids >= 0]])


def counts(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
    counts.step += 1  # type: ignore[attr-defined]
    return linear(ids, torch.arange(3) + counts.step, keep)  # type: ignore[attr-defined]


def hides(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        hidden = positions + 0
    return linear(ids, hidden, keep)


def hides_all(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return linear(ids, positions, keep)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (branches, "looks at values: aten.item"),
        (lists, "looks at values: tolist"),
        (arrays, "looks at values: numpy"),
        (chooses, "looks at values: aten.index.Tensor"),
        (counts, "two steps of a shape make different calls"),
        (hides, "two steps of a shape make different calls"),
        (hides_all, "the logits come from a call that was not recorded"),
    ],
)
def test_a_step_that_depends_on_more_than_its_shape_is_not_repeated(
    forward: Forward, why: str
) -> None:
    counts.step = -1  # type: ignore[attr-defined]
    recorded = run(forward)
    assert why in recorded.why_not and not recorded._shapes


def test_results_that_differ_are_not_repeated() -> None:
    """Here the function that is recorded as one call counts."""
    calls = 0

    def unsteady(positions: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return positions + int(calls == STEPS_BEFORE + 3)

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        return linear(ids, as_attention(unsteady, positions), keep)

    assert run(forward).why_not == "the repeated calls have other results"


def test_states_are_the_models_own_after_a_repeat_with_other_results() -> None:
    """The calls of this model depend on a context, which a recording does not have."""
    states: list[torch.Tensor] = []
    weight = torch.full((4, 4), 0.1003)

    def put(value: torch.Tensor) -> torch.Tensor:
        states.append(value)
        return value + 0

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            keys = linear(ids, positions, keep) @ weight
        return as_cache(put, keys)

    recorded = RecordedSteps(forward)
    with torch.inference_mode():
        for step in range(REPEATED):
            recorded(IDS.roll(step), torch.arange(3) + step, 0)
            assert states[-1].dtype == torch.bfloat16, step
    assert recorded.why_not == "the repeated calls have other results"


def test_steps_of_equally_many_earlier_tokens_are_no_two_recordings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = torch.arange(64.0)[:, None]

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        return table[: current.step.past + 1][positions]  # type: ignore[union-attr]

    recorded = RecordedSteps(forward)
    for past in [9] * REPEATED + [10, 11]:
        monkeypatch.setattr(current, "step", SimpleNamespace(past=past), raising=False)
        assert recorded(IDS[:1], torch.tensor([past]), 0) == past
    assert recorded.why_not == "two steps of a shape make different calls"


def test_an_error_of_repeated_calls_is_none_of_the_step() -> None:
    """This model reads a table as long as the longest sequence so far."""
    table, size = torch.arange(64.0)[:, None], 16

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        return table[:size][positions]

    recorded = RecordedSteps(forward)
    for at in range(REPEATED):
        assert recorded(IDS[:1], torch.tensor([at]), 0) == at
    assert not recorded.why_not
    size = 32
    assert recorded(IDS[:1], torch.tensor([20]), 0) == 20
    assert "out of bounds" in recorded.why_not


def test_recorded_steps_call_the_kernels_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's decomposition of `matmul` in Python would call others for a batch of one matrix."""
    python = torch.ops.aten.matmul.default.py_kernels
    key = torch._C.DispatchKey.CompositeImplicitAutograd

    def fails(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setitem(python, key, fails)

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        return linear(ids, positions, keep)[:, None].matmul(torch.eye(4)[None])[:, 0]

    assert not run(forward).why_not


def test_calls_that_change_a_tensor_are_repeated() -> None:
    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        parts = linear(ids, positions, keep).split(2, dim=-1)
        found = torch.zeros(3, 4)
        found[:, 2:] = parts[1].contiguous().to(torch.float32)
        found[..., slice(None, 2)].add_(parts[0], alpha=1.0)
        return found.view(ids.shape[0], -1)[None][0]

    assert not run(forward).why_not


def test_memory_is_free_after_its_last_use() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def note(value: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(value))
        return value + 0

    def look(value: torch.Tensor) -> torch.Tensor:
        alive.append(seen[-1]() is not None)
        return value + 0

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        return as_attention(look, as_attention(note, linear(ids, positions, keep)))

    assert not run(forward).why_not
    assert not alive[-1]


@pytest.mark.parametrize("looks", [False, True], ids=["any number", "looks at it"])
def test_the_number_of_earlier_tokens_changes_from_step_to_step(*, looks: bool) -> None:
    """As in a plan of decode steps, it is the same for some steps, and then another."""
    calls = exchanges = 0

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        keys = as_cache(with_more, linear(ids, positions, keep))
        size = keys.shape[0] if looks else -1
        return keys.view(size, 4)[:3]

    def with_more(value: torch.Tensor) -> torch.Tensor:
        nonlocal exchanges
        exchanges += 1
        return torch.cat([value, value[:1].expand(exchanges // 8, -1)])

    recorded = run(forward, 60)
    assert bool(recorded.why_not) is looks
    assert (calls > 50) is looks


def test_each_shape_is_recorded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        found = linear(ids, positions, keep).view(len(ids), 4)
        return found if isinstance(keep, int) else found[keep]

    monkeypatch.setattr(module, "MOST_SHAPES", 5)
    recorded = RecordedSteps(forward)
    for _ in range(REPEATED + 1):
        for rows in (1, 2, 3):
            ids, positions = IDS[:rows], torch.arange(rows)
            for keep in (0, torch.tensor([0]), torch.arange(rows), torch.arange(0)):
                expected = forward(ids, positions, keep)
                assert torch.equal(recorded(ids, positions, keep), expected)
    assert len(recorded._shapes) == 5 and not recorded.why_not
    assert all(shape.repeat is not None for shape in recorded._shapes.values())


def test_an_error_of_the_recorder_is_none_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a function of torch that another version does not have."""

    def fails(*_: Any) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(Recording, "program", fails)
    assert run(linear).why_not == "no such thing"


def test_an_error_of_the_model_is_passed_on() -> None:
    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
        if fails:
            raise MemoryError
        return linear(ids, positions, keep)

    for before in range(STEPS_BEFORE + 2):
        recorded, fails = RecordedSteps(forward), False
        for _ in range(before):
            recorded(IDS, torch.arange(3), 0)
        fails = True
        with pytest.raises(MemoryError):
            recorded(IDS, torch.arange(3), 0)
        fails = False
        assert current.recorder is None
        for _ in range(REPEATED):
            assert torch.equal(recorded(IDS, torch.arange(3), 0), linear(IDS, torch.arange(3), 0))
        assert not recorded.why_not
