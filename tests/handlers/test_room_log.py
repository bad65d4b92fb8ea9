"""A room's debug lines name the room and the request that it was opened for."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.protocols.errors import Code, LostError
from kvflow.protocols.machinery import STORY_LINES
from kvflow.telemetry.requests import CURRENT, RequestTrace
from kvflow.testing.pair import Pair
from tests.handlers.scenes import PROMPT, WHY, record_of


async def opened_for(p: Pair, room: int, request_id: str) -> tuple[PrefillRoom, DecodeRoom]:
    CURRENT.set(RequestTrace(request_id))
    return await p.open(room, PROMPT)


def lines(caplog: pytest.LogCaptureFixture, request_id: str) -> list[str]:
    records = [
        record
        for record in caplog.records
        if record.name == "kvflow.rooms" and vars(record)["request_id"] == request_id
    ]
    assert all(len(vars(record)["rooms"]) == 1 for record in records)
    return [record.getMessage() for record in records]


def heard(told: list[str], *words: str) -> bool:
    return any(all(word in line for word in words) for line in told)


async def test_both_sides_tell_what_happens_as_it_happens(
    p: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="kvflow.rooms")
    one, two = await asyncio.gather(
        *(asyncio.create_task(opened_for(p, n, f"request-{n}")) for n in (1, 2))
    )
    for source, _ in (one, two):
        await source.matched()
    p.send_all(one[0], chunks=3)
    await one[1].landed()
    await one[0].done()
    one[1].close()
    two[1].close(WHY)
    await p.rest()
    told = lines(caplog, "request-1")
    assert sum("opened" in line for line in told) == 2
    assert heard(told, "lent", "waiting_for_input") and heard(told, "matched")
    assert sum(" chunk_landed" in line for line in told) >= 3  # decode's, one by one
    assert heard(told, "write_ended", "success")
    other = lines(caplog, "request-2")
    assert heard(other, "ended_locally", "engine_error: the engine gave up")
    assert not heard(other, "chunk_landed")


async def test_nothing_is_followed_unless_it_is_asked_for(
    p: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvflow.rooms")
    source, target = await opened_for(p, 1, "request-1")
    assert source.record.story.follower is None
    assert record_of(target).story.follower is None
    assert lines(caplog, "request-1") == []
    target.close()


async def test_a_timer_armed_during_a_request_is_not_about_it(
    p: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers and tasks of a shell serve all requests, and outlive the one that started them."""
    seen, ticked = set[str](), asyncio.Event()
    shell = p.decode.shell
    tick = shell.tick

    def spy(now: float) -> None:
        seen.add(CURRENT.get().request_id)
        ticked.set()
        tick(now)

    monkeypatch.setattr(shell, "tick", spy)
    source, target = await asyncio.create_task(opened_for(p, 1, "request-1"))
    target.close()
    source.close()
    await p.rest()
    await asyncio.wait_for(ticked.wait(), 20)
    assert seen == {""}


async def test_a_follower_is_told_more_lines_than_a_story_keeps(p: Pair) -> None:
    _, target = await p.open(1, PROMPT)
    told: list[str] = []
    story = record_of(target).story
    story.follower = lambda line: told.append(line.what)
    for number in range(2 * STORY_LINES):
        story.tell(0.0, f"event {number}", target.phase)
    assert len(told) == 2 * STORY_LINES and len(story.lines()) == STORY_LINES + 1
    target.close()


async def test_a_room_that_is_refused_says_why(
    p: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(prefill: str) -> NoReturn:
        raise LostError(f"no registry answers at {prefill}")

    caplog.set_level(logging.DEBUG, logger="kvflow.rooms")
    monkeypatch.setattr(p.decode, "_resolve", resolve)
    CURRENT.set(RequestTrace("request-1"))
    with pytest.raises(LostError):
        await p.decode.room(1, "nowhere", PROMPT)
    assert heard(lines(caplog, "request-1"), "refused, peer_lost: no registry answers at nowhere")
    assert p.decode.counts.refusals == {Code.PEER_LOST: 1}
