"""What a request may ask, and when it is over."""

from __future__ import annotations

from typing import Any

import pytest

from kvflow.node.handoff import HandOff
from kvflow.protocols.errors import MisuseError, WireError
from kvflow.serve.engine.scheduler.params import SamplingParams, finish


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("max_new_tokens", -1),
        ("logprobs", -1),
        ("logprobs", 1000),
        ("logprob_token_ids", (5,)),
        ("logprob_token_ids", (5,) * 129),
        ("priority", 1 << 63),
        ("priority", -(1 << 63) - 1),
        ("stop", ("",)),
        ("stop", ("x",) * 100),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(MisuseError, match=field.replace("logprob_token_ids", "token_ids_logprob")):
        SamplingParams(**{field: value})


def test_a_seed_is_kept_and_a_missing_one_is_fresh() -> None:
    assert SamplingParams(seed=0).seed_or_random() == 0
    assert SamplingParams().seed_or_random() != SamplingParams().seed_or_random()


@pytest.mark.parametrize(
    ("token", "generated", "params", "want"),
    [
        (5, 1, {}, (None, None)),
        (2, 1, {}, ("stop", 2)),
        (2, 1, {"ignore_eos": True}, (None, None)),
        (9, 1, {"stop_token_ids": (9,)}, ("stop", 9)),
        (9, 1, {"stop_token_ids": (9,), "ignore_eos": True}, ("stop", 9)),
        (5, 4, {}, ("length", None)),
        (2, 4, {}, ("stop", 2)),
    ],
)
def test_what_ends_a_request(token: int, generated: int, params: dict[str, Any], want: Any) -> None:
    assert finish(token, generated, 4, SamplingParams(**params), frozenset({2})) == want


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"x" * 100, b"\x81\xa4type\xa5other"])
def test_other_bytes_are_no_handoff(data: bytes) -> None:
    with pytest.raises(WireError, match="handoff"):
        HandOff.decode(data)
