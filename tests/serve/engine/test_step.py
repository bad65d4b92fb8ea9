"""How a step divides decoding rows into attention calls, and what each of them reads."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import Order, build_layout
from kvflow.serve.engine.model import ahead
from kvflow.serve.engine.model.ahead import DecodeSteps, KeptMemory
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.runner import Runner
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row
from tests.serve.engine import tiny_models
from tests.serve.engine.pair import poisoned_pool, prompt_of
from tests.serve.engine.tiny_models import Tiny

PAGE = 4
ORDERS: tuple[Order, ...] = ("page_first", "layer_first")


def decoding(lengths: list[int], num_pages: int = 4096) -> list[Sequence]:
    """Sequences of so many tokens, the last of which is new, over scattered pages."""
    pages = np.random.default_rng(1).permutation(num_pages).astype(np.int32)
    found = []
    for i, length in enumerate(lengths):
        s = Sequence(i, prompt_of(length, i), 8, PAGE)
        count = s.pages_missing(length)
        s.add_pages(pages[:count])
        s.rows = np.array([i], dtype=np.int32)
        pages, s.computed = pages[count:], length - 1
        found.append(s)
    return found


def computed(runner: Runner, sequences: list[Sequence]) -> None:
    for s in sequences:
        s.computed = 0
        runner.forward([Row(s, s.length - 1, 0)])
        s.computed = s.length - 1


def appended(sequences: list[Sequence], token: int) -> None:
    """Append the token that the last step of all sequences chose."""
    for s in sequences:
        s.computed += 1
        s.append(token)


def packed(sequences: list[Sequence]) -> DecodeSteps:
    return DecodeSteps([Row(s, 1) for s in sequences], PAGE)


def gathered_by(step: DecodeSteps) -> torch.Tensor:
    rows = step.gather(PAGE, 1)
    assert rows is not None
    return rows


def test_rows_of_similar_lengths_are_one_call() -> None:
    step = packed(decoding([70, 64, 90, 81]))
    assert [(b.q0, b.q1, b.k0, b.keys) for b in step.batches] == [(0, 4, 0, 90)]
    assert step.last == [1, 0, 3, 2], "ordered by length"
    assert step.ids.tolist() == [
        prompt_of(n, i)[-1] for n, i in ((64, 1), (70, 0), (81, 3), (90, 2))
    ]
    assert step.positions.tolist() == [63, 69, 80, 89]


@pytest.mark.parametrize(
    "lengths", [[2, 4000, 2, 2], [10, 5000, 600, 30, 5, 5001], [7] * 20 + [3000], [100, 90, 1500]]
)
def test_a_long_row_does_not_pad_all_the_others(lengths: list[int]) -> None:
    step = packed(decoding(lengths))
    assert 1 < len(step.batches) <= len(set(lengths))
    assert step.batches[-1].q1 == len(lengths) and [b.q0 for b in step.batches[1:]] == [
        b.q1 for b in step.batches[:-1]
    ]
    gathered = gathered_by(step)
    assert gathered.numel() == step.batches[-1].k1
    assert gathered.numel() <= 1.25 * sum(lengths) + 512 * len(step.batches)


def test_what_is_gathered_is_each_rows_own_and_in_order() -> None:
    sequences = decoding([5, 17, 16, 1 + PAGE])
    step = packed(sequences)
    gathered = gathered_by(step)
    (batch,) = step.batches
    for s, row in zip(
        sorted(sequences, key=lambda s: s.length), gathered.view(-1, batch.keys), strict=True
    ):
        own = (s.pages.astype(np.int64)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[: s.length]
        assert row[batch.keys - s.length :].tolist() == own.tolist()
        assert set(row[: batch.keys - s.length].tolist()) <= {int(own[0])}
    mask = batch.mask(batch.keys, torch.float32)
    assert mask is not None and torch.isneginf(mask).sum(-1).flatten().tolist() == [12, 12, 1, 0]
    assert batch.mask(5, torch.float32) is None, "a window that every row fills needs no mask"


def test_a_step_that_was_planned_ahead_equals_one_made_anew() -> None:
    sequences = decoding([5, 170, 16, 1 + PAGE, 1200])
    for s in sequences:
        s.add_pages(np.array([4000 + s.owner], dtype=np.int32))  # type: ignore[operator]
    step, steps = packed(sequences), 1
    while True:
        for s in sequences:
            s.append(int(s.length) % 500)
            s.computed += 1
        if not step.advance([Row(s, 1) for s in sequences]):
            break
        steps += 1
        anew = packed(sequences)
        assert step.last == anew.last and step.past == anew.past
        for name in ("ids", "positions", "write_pages", "write_slots"):
            assert torch.equal(getattr(step, name), getattr(anew, name)), name
        assert torch.equal(gathered_by(step), gathered_by(anew))
        for one, other in zip(step.batches, anew.batches, strict=True):
            for name in ("q0", "q1", "k0", "k1", "keys"):
                assert getattr(one, name) == getattr(other, name), name
            for last in (1, 7, one.keys):
                mine, theirs = one.mask(last, torch.float32), other.mask(last, torch.float32)
                assert (mine is None) == (theirs is None)
                assert mine is None or theirs is None or torch.equal(mine, theirs)
    computed_at_first = (4, 169, 15, PAGE, 1199)
    room = [s.page_count * PAGE - n for s, n in zip(sequences, computed_at_first, strict=True)]
    assert steps == min(room) > 2


def test_another_batch_is_not_what_was_planned() -> None:
    a, b, c = decoding([9, 13, 9])
    step = packed([a, b])
    assert not step.advance([Row(a, 1), Row(b, 1)]), "not computed yet"
    appended([a, b, c], 3)
    for others in ([a], [b, a], [a, c], [a, b, c]):
        assert not step.advance([Row(s, 1) for s in others])
    assert step.advance([Row(a, 1), Row(b, 1)])


@pytest.mark.parametrize("attention", ["packed", "pad"])
@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, "gpt_oss", "gemma4_shared_kv"])
def test_a_batch_equals_its_rows_alone(family: str, attention: str, tiny: Tiny) -> None:
    model = load_model(str(tiny(family)), attention=attention)
    for order in ORDERS:
        check_rows(model, attention, order)


def check_rows(model: LoadedModel, attention: str, order: Order) -> None:
    *sequences, chunk = decoding([3, 30, 300, 17, 40, 18, 31, 16, 9, 2, 21], 400)
    runner = model.runner(poisoned_pool(model, 400, order=order, num_rows=12))
    computed(runner, sequences)
    alone = torch.cat([runner.forward([Row(s, 1)]) for s in sequences])
    together = runner.forward([Row(s, 1) for s in sequences])
    assert bool(torch.isfinite(together).all())
    assert torch.allclose(together, alone, atol=2e-3, rtol=1e-3)
    assert (
        together.argmax(-1).tolist() == alone.argmax(-1).tolist()
        and len(set(alone.argmax(-1).tolist())) > 3
    )
    chunk.computed = 0
    among = runner.forward([*(Row(s, 1) for s in sequences), Row(chunk, 21)])[:-1]
    assert torch.allclose(among, alone, atol=2e-3, rtol=1e-3), "they attend one by one"
    if attention == "packed":
        assert len(packed(sequences).batches) > 1
        some = runner.forward([Row(s, 1, i % 2 == 0) for i, s in enumerate(sequences)])
        assert torch.allclose(some, alone[::2], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "rings"),
    [
        ("llama", "never"),
        ("deepseek_v3", "never"),
        ("gpt_oss", "never"),
        ("gpt_oss", "always"),
        ("gemma4_shared_kv", "never"),
        ("gemma4_shared_kv", "always"),
    ],
)
def test_steps_over_kept_states_equal_steps_that_gather(
    family: str, rings: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(tiny(family)), attention="packed", sliding_window_rows=rings)
    for order in ORDERS:
        for share in (0, 0.5, 1):
            check_kept(model, order, share, monkeypatch)


def check_kept(
    model: LoadedModel, order: Order, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = build_layout(
        model.streams, page_size=PAGE, num_pages=400, num_rows=6 * model.has_rows, order=order
    )
    streams = len(model.streams)
    found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for planned in (True, False):
        pool = PagedPool.allocate(layout, shared=False)
        for component in layout.components:
            pool.tensor(component.name).zero_()
        runner = model.runner(pool)
        sequences = decoding([3, 30, 300, 17, 40, 18], 380)
        for i, s in enumerate(sequences):
            s.add_pages(np.array([380 + 2 * i, 381 + 2 * i], dtype=np.int32))
        computed(runner, sequences)
        monkeypatch.setattr(ahead, "_MOST_KEPT_BYTES", 1 << 30)
        runner.forward([Row(s, 1) for s in sequences])
        monkeypatch.setattr(ahead, "_MOST_KEPT_BYTES", int(share * sum(kept_by(runner))))
        runner.rest()
        steps: list[torch.Tensor] = []
        for token in range(1, 6):
            steps.append(runner.forward([Row(s, 1) for s in sequences]))
            kept = len(kept_by(runner))
            assert not planned or (0 < kept < streams if share == 0.5 else kept == share * streams)
            appended(sequences, token)
            if not planned:
                runner.rest()
        found.append((torch.stack(steps), [pool.tensor(c.name) for c in layout.components]))
    (ahead_logits, ahead_states), (anew_logits, anew_states) = found
    assert torch.allclose(ahead_logits, anew_logits, atol=1e-4, rtol=1e-4)
    assert ahead_logits.argmax(-1).tolist() == anew_logits.argmax(-1).tolist()
    for mine, theirs in zip(ahead_states, anew_states, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)


def kept_by(runner: Runner) -> list[int]:
    """Bytes of every stream that the steps ahead have kept."""
    assert runner._ahead is not None
    rings = [states for planned in runner._ahead._planned for states in planned._kept.values()]
    return [
        states.nbytes
        for states in (*(kept.states for kept in runner._ahead._kept.values()), *rings)
    ]


def test_no_page_is_read_twice_within_a_plan(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = build_layout(llama.streams, page_size=PAGE, num_pages=20)
    pool = PagedPool.allocate(layout, shared=False)
    runner, sequences = llama.runner(pool), decoding([5, 9], 20)
    reads, read = list[object](), DecodeSteps.read
    computed(runner, sequences)

    def counted(self: DecodeSteps, stream: Hashable, *rest: Any) -> torch.Tensor:
        reads.append(stream)
        return read(self, stream, *rest)

    monkeypatch.setattr(DecodeSteps, "read", counted)
    for _ in range(3):  # what its last page has room for
        runner.forward([Row(s, 1) for s in sequences])
        assert len(reads) == len(set(reads)) == len(llama.streams)
        appended(sequences, 7)
    pool.close()


def test_plans_share_the_memory_that_they_gather_into() -> None:
    memory, like = KeptMemory(), torch.zeros(1)
    first = memory.of("k", 1000, like)
    assert first is not None and first.shape == (1000,) and first.dtype == like.dtype
    again, other = memory.of("k", 1250, like), memory.of("v", 10, like)
    assert again is not None and other is not None
    assert again.data_ptr() == first.data_ptr() != other.data_ptr() and again.shape == (1250,)
    more = memory.of("k", 1251, like)
    assert more is not None and more.shape == (1251,)


def test_no_more_is_kept_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_MOST_KEPT_BYTES", 400)
    memory, like = KeptMemory(), torch.zeros(1)
    assert memory.of("a", 60, like) is not None and memory.of("b", 40, like) is not None
    assert memory.of("b", 41, like) is None, "101 of 100"
    assert memory.of("c", 40, like) is not None, "it has what the other one has given up"
    assert memory.of("a", 101, like) is None and set(memory._streams) == {"c"}
    assert memory.of("b", 60, like) is not None
