"""What a stage hands on in the place of layers that another one has."""

from __future__ import annotations

import pytest
import torch

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.parallel.stage import _Convention


def length_of(convention: _Convention) -> int | None:
    return convention.length


def test_a_layer_shows_whether_the_model_expects_a_tuple() -> None:
    hidden, weights = torch.zeros(2, 3), torch.zeros(1)
    convention = _Convention("model")
    assert length_of(convention) == 2, "before one has run"
    convention.learn((hidden, weights, None))
    assert length_of(convention) == 3
    convention.learn(hidden)
    assert length_of(convention) is None, "as many as a tensor has rows are no tuple"
    convention.learn((hidden,))
    assert length_of(convention) == 1
    assert convention.plain((hidden,)) is hidden and length_of(convention) is None


def test_a_layer_that_needs_more_than_hidden_states_cannot_follow_in_another_stage() -> None:
    hidden, more = torch.zeros(2, 3), torch.zeros(1)
    convention = _Convention("model")
    convention.learn((hidden, more, None))
    with pytest.raises(MisuseError, match="its layers hand on more than hidden states"):
        convention.check((hidden,), {"bias": more})
    convention.learn((hidden, more, None))
    convention.check((hidden,), {"bias": None})
    convention.check((hidden, more), {})  # of the layer before the last
