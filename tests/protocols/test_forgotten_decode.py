"""What had ended for a forgotten, refused or dead decode does not begin when it is back (I6)."""

from __future__ import annotations

from typing import Any

import pytest

from kvflow.protocols.errors import Code
from kvflow.protocols.limits import Bounds
from kvflow.protocols.wire import messages as wire
from tests.protocols.alone import DECODE, LonePrefill, announce


@pytest.fixture
def prefill() -> LonePrefill:
    """The way to a decode that has announced a room as grant 3 is being opened."""
    made = LonePrefill()
    made.register()
    made.hear(announce(7, 3))
    return made


def refuse_route(prefill: LonePrefill) -> list[Any]:
    prefill.endpoint.route_refused(DECODE, "no descriptor is left", prefill.now)
    return prefill.asked()


def assert_stale(told: list[Any]) -> None:
    failed, acknowledged = told
    assert isinstance(failed, wire.RoomFailed) and failed.cause.code is Code.STALE_GRANT
    assert isinstance(acknowledged, wire.AbortAck) and acknowledged.drained


def test_the_refusal_ends_the_announcement(prefill: LonePrefill) -> None:
    acks = [word for word in refuse_route(prefill) if isinstance(word, wire.AbortAck)]
    assert [(word.grant, word.drained) for word in acks] == [(3, True)]


REFUSED = 0


@pytest.mark.parametrize(
    ("steps", "stale", "fresh"),
    [
        pytest.param([REFUSED, 1], [3], [4], id="refused"),
        pytest.param([REFUSED, 1, REFUSED, 1], [3], [], id="refused-twice"),
        # Decode comes back, asks for later grants only and is refused; its first Register arrives
        # once more.
        pytest.param([REFUSED, 9, REFUSED, 1], [3, 8], [9], id="refused-as-it-asks-for-later-ones"),
        pytest.param([9, REFUSED, 1], [3], [], id="refused-after-it-asked-for-later-ones"),
    ],
)
def test_what_ended_with_a_refusal_does_not_begin_again(
    prefill: LonePrefill, steps: list[int], stale: list[int], fresh: list[int]
) -> None:
    """Each step is a refusal, or a Register with the first grant that it asks for."""
    for step in steps:
        refuse_route(prefill) if step == REFUSED else prefill.register(fresh_from=step)
    for grant in stale:
        assert_stale(prefill.hear(announce(7, grant)))
    for grant in fresh:
        assert prefill.hear(announce(7, grant)) == []


def test_what_a_dead_decode_had_sent_before_begins_nothing(prefill: LonePrefill) -> None:
    """Its death is observed before the last of its messages has been read."""
    prefill.endpoint.route_opened(DECODE, prefill.now)
    prefill.endpoint.peer_died(DECODE, prefill.now)
    prefill.asked()
    assert not prefill.core.peers
    prefill.register()
    assert_stale(prefill.hear(announce(7, 3)))


def test_nothing_is_kept_of_a_decode_that_announced_nothing_and_little_of_the_others() -> None:
    prefill = LonePrefill(bounds=Bounds(closed_grants=2))
    prefill.register()
    refuse_route(prefill)
    assert not prefill.core.former.displaced
    prefill.register()
    prefill.hear(announce(7, 1))
    refuse_route(prefill)
    assert prefill.core.former.displaced == {DECODE: 2}
