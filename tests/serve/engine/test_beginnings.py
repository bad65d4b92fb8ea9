"""Prompts without places begin in the order in which they came, as far as there are places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvflow.serve.engine.scheduler.beginnings import Beginnings


class Steps:
    def __init__(self) -> None:
        self.free = 0
        self.taken: list[Any] = []

    def start_again(self, request: Any) -> None:
        pass

    def short_of(self, request: Any) -> tuple[int, int]:
        return max(0, request.wants - self.free), 0

    def take_places(self, request: Any) -> None:
        self.free -= request.wants
        self.taken.append(request)

    def count(self, request: Any) -> None:
        pass


def asking(wants: int, **changes: Any) -> Any:
    """Return a request for `wants` places, whose prompt has eight cached tokens."""
    given = {"is_asking": True, "agreed": None, "cached_tokens": 8, **changes}
    return SimpleNamespace(wants=wants, sequence=SimpleNamespace(computed=8), **given)


def test_those_that_are_short_begin_in_order_and_no_later_one_passes() -> None:
    steps, begun = Steps(), list[Any]()
    beginnings = Beginnings(steps, None, begun.append)  # type: ignore[arg-type]
    requests = [asking(wants) for wants in (2, 5, 1)]
    first, large, small = requests
    for request in requests:
        beginnings.agreed(request, 0)
    assert begun == [] and beginnings.are_short
    steps.free = 4
    beginnings.take_missing()
    assert begun == [first] == steps.taken
    steps.free = 6
    beginnings.take_missing()
    assert begun == [first, large, small] and not beginnings.are_short


def test_one_that_has_ended_meanwhile_takes_no_places() -> None:
    steps, begun = Steps(), list[Any]()
    beginnings = Beginnings(steps, None, begun.append)  # type: ignore[arg-type]
    request = asking(2)
    beginnings.agreed(request, 0)
    beginnings.forget(request)
    beginnings.forget(request)
    steps.free = 9
    beginnings.take_missing()
    beginnings.agreed(request, 8)  # the answer of a rank that comes late
    assert begun == steps.taken == [] and not beginnings.are_short


def test_what_was_cached_of_a_prompt_that_no_step_has_named_is_computed_after_a_flush() -> None:
    steps, begun, flushes = Steps(), list[Any](), list[int]()
    lockstep: Any = SimpleNamespace(flush=lambda: flushes.append(1))
    beginnings = Beginnings(steps, lockstep, begun.append)  # type: ignore[arg-type]
    waits, runs, fresh = (
        asking(1, is_asking=not has_begun, has_begun=has_begun, cached_tokens=cached)
        for has_begun, cached in ((False, 8), (True, 8), (False, 0))
    )
    beginnings.flushed([waits, runs, fresh])
    assert (waits.agreed, waits.is_asking) == (0, True), "no step may name it yet"
    assert (runs.agreed, fresh.agreed, begun) == (None, None, [])
    steps.free = 1
    beginnings.take_missing()
    beginnings.agreed(waits, 8)  # asked before the flush
    assert begun == steps.taken == [waits] and flushes == [1]
