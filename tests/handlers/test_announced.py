"""How long half a room waits: as long as the decode that announced it lives, or a set time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvflow.protocols.arguments import pack_pages
from kvflow.protocols.errors import Code
from kvflow.protocols.wire.messages import Abort, Announce, Begun, Bootstrap
from kvflow.testing.pair import Pair, pair, until
from tests.handlers.scenes import (
    PROMPT,
    WHY,
    announced,
    code_of,
    finish,
    header,
    known,
    success,
    to_prefill,
)


async def pass_time(p: Pair, seconds: float) -> None:
    """At prefill, in steps in which decode's heartbeats are received."""
    step_s = p.timing.lost_after_s / 2
    while seconds > 0:
        p.clock(p.prefill).advance(step_s)
        await until(lambda: all(line["heard_ago_s"] < 1 for line in p.prefill.peers()))
        seconds -= step_s


@pytest.mark.parametrize("first", ["engine", "decode"])
async def test_an_announced_partner_is_waited_for_as_long_as_it_lives(p: Pair, first: str) -> None:
    if first == "engine":
        source, target = await announced(p)
        await pass_time(p, 10 * p.timing.rendezvous_s)
    else:
        target = p.decode.announce(7, "sim", PROMPT)
        await until(lambda: p.prefill.shell.endpoint.core.rendezvous.announced)
        await pass_time(p, 10 * p.timing.rendezvous_s)
        source = p.prefill.room(7, PROMPT)
    assert not source.ended and p.decode.pool.pages.at_rest() and not p.network.seen["Bootstrap"]
    await target.offer()
    await finish(p, source, target)


async def test_a_partner_that_dies_is_waited_for_no_longer(p: Pair) -> None:
    waiting = p.prefill.room(7, PROMPT)
    p.decode.announce(7, "sim", PROMPT)
    p.decode.announce(8, "sim", PROMPT)
    await until(
        lambda: waiting.phase.name == "ANNOUNCED" and p.prefill.peers_by_phase() == {"up": 1}
    )
    await until(lambda: 8 in p.prefill.shell.endpoint.core.rendezvous.announced)
    await p.crash(p.decode)
    assert await code_of(waiting.matched()) is Code.PEER_LOST
    # Its half comes late.
    assert await code_of(p.prefill.room(8, PROMPT).matched()) is Code.PEER_LOST
    await until(lambda: not known(p.prefill))
    assert not p.left()


async def test_a_partner_that_falls_silent_is_waited_for_no_longer(p: Pair) -> None:
    source = p.prefill.room(7, PROMPT)
    target = p.decode.announce(7, "sim", PROMPT)
    await until(
        lambda: source.phase.name == "ANNOUNCED" and p.prefill.peers_by_phase() == {"up": 1}
    )
    p.network.cut()
    p.clock(p.prefill).advance(p.timing.lost_after_s + 1)
    assert await code_of(source.matched()) is Code.PEER_LOST
    p.network.mend()
    assert await code_of(target.landed()) is Code.PEER_LOST  # told when it asks again
    await p.rest()


@pytest.mark.parametrize("lost", [0, 3])
async def test_a_decode_may_wait_until_prefill_has_begun(p: Pair, lost: int) -> None:
    p.network.drop(Begun, times=lost)
    source, target = await announced(p)
    assert not target.when_begun.given
    source.begin()
    assert await target.begun()
    await target.offer()
    await finish(p, source, target)


@pytest.mark.parametrize("how", ["lent", "refused"])
async def test_the_wait_for_prefill_ends_with_what_comes_first(p: Pair, how: str) -> None:
    source, target = await announced(p)
    if how == "lent":
        await target.offer()
        assert not await target.begun()
    else:
        source.close(WHY)
        assert await code_of(target.begun()) is WHY.code
    target.close()


async def test_a_lost_announcement_is_repeated_while_there_are_no_pages(p: Pair) -> None:
    p.network.drop(Announce, times=3)
    source, target = await announced(p)
    target.close()
    assert await code_of(source.matched()) is Code.CLIENT_GONE


async def test_a_room_that_was_announced_is_offered_with_its_own_grant(p: Pair) -> None:
    """Another decode announces the number, and two offers are lost (found by seed 203)."""
    other = await p.add_decode()
    source, target = await announced(p)
    assert await code_of(other.announce(7, "sim", PROMPT).landed()) is Code.ROOM_IN_USE
    p.network.drop(Bootstrap, times=2)
    await target.offer()
    await finish(p, source, target)


@pytest.mark.parametrize("kind", [Abort, Bootstrap])
async def test_what_names_another_room_than_was_announced_ends_the_announcement(
    kind: type[Abort | Bootstrap],
) -> None:
    """Found by the hostile test of the wire, seed 20: the announcement stayed, under a grant that
    had ended. No engine could open the room that was announced, and the silence of that decode was
    an internal error."""
    async with pair() as p:
        await success(p, 1)
        other = await p.add_decode()
        offer = {
            "pages": pack_pages(np.zeros(1, np.int32)),
            "prompt_tokens": 4,
            "prompt_digest": b"d" * 32,
        }
        fields: dict[str, Any] = {"cause": WHY} if kind is Abort else offer
        to_prefill(
            p,
            Announce(**header(p, 7, 100)),
            kind(**fields, **header(p, 8, 100)),
            Announce(**header(p, 9, 101)),
        )
        await until(lambda: list(p.prefill.shell.endpoint.core.rendezvous.announced) == [9])
        source, target = p.prefill.room(7, PROMPT), await other.room(7, "sim", PROMPT)
        await source.matched()
        p.send_all(source)
        await target.landed()
        p.clock(p.prefill).advance(p.timing.lost_after_s + 1)
        await until(lambda: not p.prefill.shell.endpoint.core.rendezvous.announced)
        assert p.prefill.counts.handler_errors == 0
