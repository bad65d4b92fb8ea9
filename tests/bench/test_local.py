"""The figures of `kvflow bench local`, and the mix of prompts that it sends."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvflow.bench import local
from kvflow.bench.local import (
    KINDS,
    LOCAL,
    PAIRS,
    LocalPlan,
    _Answer,
    _check_same,
    _figures,
    _mix,
    bench_local,
)
from kvflow.protocols.errors import KvflowError
from tests.bench.fleets import serving


def test_the_mix_has_every_kind_and_comes_at_the_rate() -> None:
    plan = LocalPlan(requests=1000, rate=20)
    documents = [[7] * 300]
    asked = _mix(plan, documents, random.Random(2))
    assert [one.at_s for one in asked] == sorted(one.at_s for one in asked)
    assert asked[-1].at_s == pytest.approx(50, rel=0.15)
    kinds = Counter(one.kind for one in asked)
    assert set(kinds) == set(KINDS) and kinds["long"] == pytest.approx(200, rel=0.2)
    assert all(one.prompt[:300] == documents[0] for one in asked if one.kind == "repeated")


def test_figures_are_of_all_answers_and_of_each_kind() -> None:
    answers = [_Answer("short", [1], 10.0, [1.0, 3.0]), _Answer("long", [1], 30.0, [2.0])]
    found = _figures(answers)
    assert (found["ttft_p50"], found["itl_p50"]) == (20.0, 2.0)
    assert (found["short_p50"], found["long_p50"], found["repeated_p50"]) == (10.0, 30.0, 0.0)


def test_answers_that_differ_end_it() -> None:
    one, other = _Answer("short", [1, 2], 1.0, []), _Answer("short", [1, 3], 1.0, [])
    _check_same({PAIRS: [one, one], LOCAL: [one, one]})
    with pytest.raises(KvflowError, match="1 answers of the two routers differ"):
        _check_same({PAIRS: [one, one], LOCAL: [one, other]})


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_both_routers_answer_alike(
    forked_roles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "serving", serving)
    said: list[str] = []
    plan = LocalPlan(requests=12, rate=12, new_tokens=6, workers=1, turns=1)
    report = await bench_local(plan, said.append)
    assert [row["router"] for row in report["table"]] == [PAIRS, LOCAL] and len(said) == 2
    assert all(row["ttft_p50"] > 0 < row["itl_p95"] for row in report["table"])
    assert all(0 < ratio["q1"] <= ratio["q3"] for ratio in report["ratio"].values())
    assert 0 < report["alone"] <= report["asked"] == 24
