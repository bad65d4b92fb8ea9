"""A refusal, before any page is taken, reaches the other client with its reason (I4)."""

from __future__ import annotations

from typing import Any

import pytest

from kvflow.protocols.errors import Cause, Code, RefusedError
from kvflow.protocols.wire.messages import Abort, Announce, RoomFailed
from kvflow.testing.pair import Pair, small_layout, until
from tests.handlers.in_virtual_time import Ending, closed, in_virtual_time
from tests.handlers.scenes import (
    PROMPT,
    WHY,
    announced,
    code_of,
    finish,
    known,
    links,
    matched,
    more,
    success,
)

FULL = Cause(Code.CAPACITY, "no page is free")


# --- decode refuses, prefill's client is told


async def decode_refuses_a_room_that_waits(p: Pair) -> Any:
    source = p.prefill.room(7, PROMPT)
    p.decode.refuse(7, "sim", FULL)
    return source.matched(), FULL.code, FULL.text


async def decode_refuses_before_the_engines_half_comes(p: Pair) -> Any:
    p.decode.refuse(7, "sim", FULL)
    await until(lambda: p.network.seen["AbortAck"])
    return p.prefill.room(7, PROMPT).matched(), FULL.code, FULL.text


async def decode_refuses_on_a_link_that_is_up(p: Pair) -> Any:
    await matched(p, 1)
    source = p.prefill.room(7, PROMPT)
    p.decode.refuse(7, "sim", FULL)
    return source.matched(), FULL.code, FULL.text


async def an_announced_room_runs_out_of_time(p: Pair) -> Any:
    source = p.prefill.room(7, PROMPT)
    p.decode.announce(7, "sim", PROMPT, deadline_s=0.5)
    return source.matched(), Code.DEADLINE, "deadline of 0.5 s has passed"


async def an_announced_room_finds_no_pages(p: Pair) -> Any:
    source = p.prefill.room(7, PROMPT)
    target = p.decode.announce(7, "sim", PROMPT)
    p.decode.pages.take(60, "another user")
    target.offer()
    assert await code_of(target.landed()) is Code.CAPACITY
    return source.matched(), Code.CAPACITY, "asked for 5, limit 4"


async def decode_closes_with_an_announced_room(p: Pair) -> Any:
    source, _ = await announced(p)
    await p.decodes.pop().close()
    return source.matched(), Code.SHUTDOWN, "decode is shutting down"


# --- prefill refuses, decode's client is told


async def prefill_refuses_an_announced_room(p: Pair) -> Any:
    target = p.decode.announce(7, "sim", PROMPT)
    await until(lambda: p.prefill.shell.endpoint.core.rendezvous.announced)
    p.prefill.refuse(7, FULL)
    return target.landed(), FULL.code, FULL.text


async def prefill_refuses_before_the_announcement(p: Pair) -> Any:
    p.prefill.refuse(7, FULL)
    return p.decode.announce(7, "sim", PROMPT).landed(), FULL.code, FULL.text


async def prefill_closes_with_an_announced_room(p: Pair) -> Any:
    target = p.decode.announce(7, "sim", PROMPT)
    await until(lambda: p.prefill.shell.endpoint.core.rendezvous.announced)
    await p.prefills.pop().close()
    return target.landed(), Code.SHUTDOWN, "prefill is shutting down"


# --- the registration is refused: both clients are told


async def a_pool_that_does_not_fit_is_told_to_the_engine(p: Pair) -> Any:
    other = await p.add_decode(small_layout(page_size=6))
    source = p.prefill.room(7, PROMPT)
    other.room(7, "sim", PROMPT)
    return source.matched(), Code.REFUSED, "page_size: prefill 4, decode 6"


async def a_pool_that_does_not_fit_is_told_to_the_engine_that_comes_late(p: Pair) -> Any:
    other = await p.add_decode(small_layout(page_size=6))
    target = other.room(7, "sim", PROMPT)
    await until(lambda: target.ended)
    return p.prefill.room(7, PROMPT).matched(), Code.REFUSED, "page_size: prefill 4, decode 6"


async def a_pool_that_does_not_fit_is_told_to_decode(p: Pair) -> Any:
    other = await p.add_decode(small_layout(page_size=6))
    return other.room(7, "sim", PROMPT).landed(), Code.REFUSED, "page_size: prefill 4, decode 6"


# A node that has closed, and a decode that is not let in, do not send it again.
SENT_ONCE: list[Ending] = [
    decode_closes_with_an_announced_room,
    prefill_closes_with_an_announced_room,
    a_pool_that_does_not_fit_is_told_to_the_engine,
    a_pool_that_does_not_fit_is_told_to_the_engine_that_comes_late,
]
REPEATED: list[Ending] = [
    decode_refuses_a_room_that_waits,
    decode_refuses_before_the_engines_half_comes,
    decode_refuses_on_a_link_that_is_up,
    closed("decode", announced),
    an_announced_room_runs_out_of_time,
    an_announced_room_finds_no_pages,
    prefill_refuses_an_announced_room,
    prefill_refuses_before_the_announcement,
    closed("prefill", announced),
    a_pool_that_does_not_fit_is_told_to_decode,
]


@pytest.mark.parametrize("ending", [*REPEATED, *SENT_ONCE])
def test_the_other_client_is_told_why(
    ending: Ending, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_virtual_time(ending, (), seed, monkeypatch)


@pytest.mark.parametrize("lost", [Announce, Abort, RoomFailed], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("ending", REPEATED)
def test_also_when_the_first_message_is_lost(
    ending: Ending, lost: type, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_virtual_time(ending, (lost,), seed, monkeypatch)


async def test_a_refusal_takes_no_page_and_leaves_nothing_behind(p: Pair) -> None:
    source = p.prefill.room(7, PROMPT)
    p.decode.refuse(7, "sim", WHY)
    assert p.decode.pool.pages.at_rest()
    with pytest.raises(RefusedError, match=WHY.text):
        await source.matched()
    await p.rest()
    assert not p.network.seen["Bootstrap"] and not p.decode.counts.rooms_opened
    await success(p, 7)  # it was told once: the id is free again


async def test_a_refusal_touches_no_room_of_another_decode(p: Pair) -> None:
    other = await p.add_decode()
    source, target = await announced(p)
    other.refuse(7, "sim", WHY)
    await more(p, "AbortAck")
    assert not source.ended
    await target.offer()
    await finish(p, source, target)


async def test_a_decode_that_was_refused_may_come_again(p: Pair) -> None:
    core = p.prefill.shell.endpoint.core
    core.bounds = type(core.bounds)(targets=0)
    assert await code_of(p.decode.room(7, "sim", PROMPT).landed()) is Code.REFUSED
    await until(lambda: not links(p.decode))
    assert not known(p.prefill) and not p.decode.shell.rooms
    core.bounds = type(core.bounds)()
    await success(p, 8)
    assert not core.refused
