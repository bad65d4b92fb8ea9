"""What steps read of rings and write to them, with numbers in place of states."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.serve.engine.model import ahead
from kvflow.serve.engine.model.ahead import DecodeSteps
from kvflow.serve.engine.model.paged_cache import RingStream
from kvflow.serve.engine.model.probe import LayerStreams
from kvflow.serve.engine.model.rings import RingLayers
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row, Step

PAGE, TOKENS, MANY = 4, 1200, 10_000


class Requests:
    """Requests over one stream of rings; a token keeps `MANY` * its request + its position."""

    def __init__(self, window: int, count: int) -> None:
        self.window, self.rows = window, torch.full((count + 3, window, 1, 1), float("nan"))
        self.stream = RingStream(self.rows)
        places = np.random.default_rng(window).permutation(count + 3)
        self.sequences = [Sequence(i, range(TOKENS), 0, PAGE) for i in range(count)]
        for i, s in enumerate(self.sequences):
            s.add_pages(np.arange(TOKENS // PAGE, dtype=np.int32) + TOKENS // PAGE * i)
            s.rows = np.array([places[i]], dtype=np.int32)
        self._ahead: DecodeSteps | None = None

    def value(self, owner: object, position: int) -> float:
        assert isinstance(owner, int)
        return float(MANY * (owner + 1) + position)

    def step(self, rows: list[Row]) -> None:
        """Run one step, in which every query must see the last tokens of its own request."""
        step = self._step(rows)
        ordered = [rows[i] for i in step.order]
        wrote = [
            self.value(r.sequence.owner, p)
            for r in ordered
            for p in range(r.sequence.computed, r.end)
        ]
        keys = self.stream.exchange(step, torch.tensor(wrote)[None, None, :, None])[0, 0, :, 0]
        rings = step.rings(self.window)
        places = list(zip(rings.write_rows.tolist(), rings.write_slots.tolist(), strict=True))
        assert len(set(places)) == len(places), "two tokens for one slot"
        seen: list[torch.Tensor] = []
        for batch in rings.batches:
            lent = batch.region(keys[None, :, None])[0, :, : batch.keys, 0]
            assert bool(torch.isfinite(lent).all()), "masked keys are multiplied with 0"
            mask = batch.mask(batch.keys, torch.float32)
            masks = torch.zeros_like(lent) if mask is None else mask[:, 0, 0]
            seen += [row[m == 0] for row, m in zip(lent, masks, strict=True)]
        for span in [] if rings.batches else rings.spans:
            lent = keys[span.k0 : span.k1]
            assert bool(torch.isfinite(lent).all())
            mask = step.mask(span.q1 - span.q0, span.k1 - span.k0, self.window)
            seen += [lent[m] for m in mask]
        queries = [
            (r.sequence.owner, p) for r in ordered for p in range(r.sequence.computed, r.end)
        ]
        for (owner, position), found in zip(queries, seen, strict=True):
            window = range(max(0, position + 1 - self.window), position + 1)
            assert sorted(found.tolist()) == [self.value(owner, p) for p in window], (
                owner,
                position,
            )
        for r in rows:
            r.sequence.computed += r.new
        self._check_slots()

    def _step(self, rows: list[Row]) -> Step:
        if self._ahead is not None and self._ahead.advance(rows):
            return self._ahead
        self._ahead = None
        if all(r.new == 1 and r.sequence.computed for r in rows):
            self._ahead = DecodeSteps(rows, PAGE)
            return self._ahead
        step = Step(rows, PAGE)
        step.pack()
        return step

    def _check_slots(self) -> None:
        """Check that each ring has its request's last tokens, and other rows are untouched."""
        for s in self.sequences:
            last = range(max(0, s.computed - self.window), s.computed)
            ring = self.rows[int(s.rows[0]), :, 0, 0]
            assert [float(ring[p % self.window]) for p in last] == [
                self.value(s.owner, p) for p in last
            ]
        others = sorted({*range(len(self.rows))} - {int(s.rows[0]) for s in self.sequences})
        assert bool(torch.isnan(self.rows[others]).all())


@pytest.mark.parametrize("kept", [0, 1 << 30], ids=["gathered anew", "kept"])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 16])
def test_every_query_sees_its_window(
    window: int, kept: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MOST_KEPT_BYTES", kept)
    dice = random.Random(seed)
    for _ in range(6):
        requests = Requests(window, 5)
        for _ in range(12):
            chosen = dice.sample(requests.sequences, dice.randint(1, 5))
            sizes = [
                dice.choice((1, 1, 2, window - 1 or 1, window, window + 1, 2 * window + 1))
                for _ in chosen
            ]
            requests.step([Row(s, n) for s, n in zip(chosen, sizes, strict=True)])
            decoding = [s for s in requests.sequences if s.computed]
            dice.shuffle(decoding)
            for _ in range(dice.choice((0, 1, 3, 10))):
                requests.step([Row(s, 1) for s in decoding])


@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 9, 15, 16, 17, 33])
def test_a_prompt_in_one_chunk_then_one_token_at_a_time(window: int, length: int) -> None:
    requests = Requests(window, 2)
    first, other = requests.sequences
    requests.step([Row(first, length)])
    requests.step([Row(first, 1), Row(other, 2)])
    for _ in range(2 * window):
        requests.step([Row(first, 1), Row(other, 1)])


def test_the_next_steps_of_rows_that_fill_their_rings_are_planned() -> None:
    requests = Requests(16, 3)
    requests.step([Row(s, n) for s, n in zip(requests.sequences, (2, 11, 40), strict=True)])
    planned: list[object] = []
    for _ in range(8):
        requests.step([Row(s, 1) for s in requests.sequences])
        planned.append(requests._ahead)
    assert len(set(map(id, planned))) == 1
    assert planned[0].rings(16)._kept  # type: ignore[attr-defined]


def test_what_an_earlier_request_has_left_is_not_read() -> None:
    requests = Requests(7, 2)
    first, other = requests.sequences
    requests.step([Row(first, 30), Row(other, 9)])
    again = Sequence(4, range(TOKENS), 0, PAGE)
    again.add_pages(first.pages)
    # NaN shows in other rows; what this one holds is found only by its value.
    again.rows = first.rows
    requests.sequences = [again, other]
    requests.step([Row(again, 2), Row(other, 1)])
    requests.step([Row(again, 3), Row(other, 1)])
    for _ in range(9):
        requests.step([Row(other, 1), Row(again, 1)])


def test_a_layer_without_keys_of_its_own_attends_to_those_of_its_kind() -> None:
    pages, ring = StateKind("k", "float32", (2, 4)), StateKind("k", "float32", (16, 2, 4), ROW)
    windowed, full = LayerStreams(ring, ring, window=16), LayerStreams(pages, pages)
    rings = RingLayers((windowed, full, LayerStreams(pages, pages, window=8), None, None))
    assert [rings.window_of(i, window) for i, window in enumerate((16, 0, 8, 16, 0))] == [
        16,
        0,
        0,
        16,
        0,
    ]
    assert RingLayers((full, None)).window_of(1, 16) == 0
    assert rings.window_of(1, 16) == 0, "its keys are in pages"


def test_a_row_with_a_full_ring_does_not_pad_all_the_others() -> None:
    requests = Requests(1000, 4)
    requests.step([Row(s, n) for s, n in zip(requests.sequences, (2, 1100, 2, 30), strict=True)])
    requests.step([Row(s, 1) for s in requests.sequences])
    assert requests._ahead is not None
    assert [(b.q0, b.q1, b.keys) for b in requests._ahead.rings(1000).batches] == [
        (0, 3, 31),
        (3, 4, 1000),
    ]
