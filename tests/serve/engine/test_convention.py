"""The output of the placeholders for layers of other stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.parallel.stage import _Convention, keep_layers


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


class Layer(nn.Module):
    """Adds 1, and returns `more` other tensors beside."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    def forward(self, hidden_states: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        added = hidden_states + 1
        return (added, *(torch.zeros(1) for _ in range(self.more))) if self.more else added


class Model(nn.Module):
    """Three layers; with `hands_on`, each receives the other outputs of the one before."""

    def __init__(self, more: int, *, hands_on: bool = False) -> None:
        super().__init__()
        text = SimpleNamespace(num_hidden_layers=3)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.layers = nn.ModuleList(Layer(more) for _ in range(3))
        self.hands_on = hands_on

    def get_decoder(self) -> nn.Module:
        return self

    def forward(self, hidden: torch.Tensor) -> list[Any]:
        found: list[Any] = []
        for layer in self.layers:
            bias = found[-1][1] if found and self.hands_on else None
            found.append(layer(hidden, bias=bias))
            hidden = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
        return found


@pytest.mark.parametrize("more", [0, 1, 2])
def test_layers_of_other_stages_return_what_those_of_this_one_do(more: int) -> None:
    model = Model(more)
    keep_layers(model, range(1), "model")
    found = model(torch.zeros(1))
    assert [len(out) if isinstance(out, tuple) else 0 for out in found] == [more and more + 1] * 3
    last = found[-1][0] if more else found[-1]
    assert last.tolist() == [1.0], "one layer has computed"


def test_a_model_whose_layers_hand_on_more_than_hidden_states_is_refused() -> None:
    model = Model(1, hands_on=True)
    keep_layers(model, range(2), "model")
    with pytest.raises(MisuseError, match="its layers hand on more than hidden states"):
        model(torch.zeros(1))
