"""A breaker opens after failures in a row, and a store that is back has to prove it."""

from __future__ import annotations

import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.serve.cache.storage.breaker import Breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(3)
    for _ in range(5):
        assert not breaker.fail()
        assert not breaker.fail()
        breaker.succeed()
    assert [breaker.fail() for _ in range(4)] == [False, False, True, False]
    assert breaker.is_open


def test_it_pauses_twice_as_long_after_every_probe_that_fails() -> None:
    breaker = Breaker(1, pause_s=1, max_pause_s=5)
    assert breaker.open()
    pauses = [breaker.pause_s]
    for _ in range(4):
        breaker.probed(False)
        pauses.append(breaker.pause_s)
    assert pauses == [1, 2, 4, 5, 5]


def test_after_a_probe_one_failure_opens_it_for_longer_and_one_success_makes_it_as_new() -> None:
    breaker = Breaker(3, pause_s=1)
    breaker.open()
    breaker.probed(True)
    assert not breaker.is_open
    assert breaker.fail()
    assert breaker.pause_s == 2
    breaker.probed(True)
    breaker.succeed()
    assert not breaker.fail()
    assert breaker.open()
    assert breaker.pause_s == 1


def test_late_news_change_nothing_while_it_is_open() -> None:
    breaker = Breaker(1, pause_s=1)
    assert breaker.fail()
    breaker.succeed()
    assert breaker.is_open
    assert not breaker.fail()
    assert not breaker.open()
    assert breaker.pause_s == 1


@pytest.mark.parametrize(
    ("failures", "pause_s", "text"),
    [(0, 1.0, "failures 0 is below 1"), (1, 0.0, r"pause_s 0 is outside 0\.\.30")],
)
def test_limits_are_checked(failures: int, pause_s: float, text: str) -> None:
    with pytest.raises(MisuseError, match=text):
        Breaker(failures, pause_s)
