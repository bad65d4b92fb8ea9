"""What the seeded simulator found in endpoints and shells, as the shortest run that shows it."""

from __future__ import annotations

import asyncio

import pytest

from kvflow.protocols.errors import AbortedError, Cause, Code
from kvflow.protocols.limits import Timing
from kvflow.protocols.wire.messages import Abort, AbortAck, Bootstrap
from kvflow.testing.pair import Pair, pair, until
from tests.handlers.scenes import finish, matched, more

PROMPT = list(range(20))
AGAIN = list(range(1, 21))


async def test_a_lost_offer_of_an_announced_room_is_made_again(p: Pair) -> None:
    """Seed 203: the Bootstrap is lost; asked by Resync, prefill answered nothing."""
    source = p.prefill.room(7, PROMPT)
    target = p.decode.announce(7, "sim", PROMPT)
    await until(lambda: source.phase.name == "ANNOUNCED")
    p.network.drop(Bootstrap)
    await target.offer()
    await finish(p, source, target)
    await p.rest()


async def test_an_end_that_both_halves_know_is_not_for_the_next_room_of_that_id(p: Pair) -> None:
    """Seed 5: decode withdraws a room, and the engine's half comes late and is told."""
    first = p.decode.announce(7, "sim", PROMPT)
    await until(lambda: p.network.seen["Announce"])
    first.close(Cause(Code.CLIENT_GONE, "retracted"))
    await until(lambda: p.network.seen["AbortAck"])
    late = p.prefill.room(7, PROMPT)
    with pytest.raises(AbortedError, match="retracted"):
        await late.matched()
    target = await p.decode.room(7, "sim", AGAIN)
    await until(lambda: p.prefill.shell.endpoint.rooms or p.network.seen["RoomFailed"])
    source = p.prefill.room(7, AGAIN)
    await finish(p, source, target)


async def test_a_prefill_that_answers_is_asked_soon_for_what_it_has_missed() -> None:
    """Seed 422: an unanswered Abort is repeated less often, until any answer comes."""
    timing = Timing(
        heartbeat_s=300, lost_after_s=900, repeat_after_s=0.5, rendezvous_s=900, register_s=900
    )
    async with pair(timing=timing) as p:
        clock = p.clock(p.decode)
        targets = [(await p.open(room, PROMPT))[1] for room in (7, 8, 9)]
        p.network.drop(AbortAck, times=5)
        targets[0].close()
        for after_s in (0.5, 1.0, 2.0, 4.0):
            clock.advance(after_s + 0.1)
            await more(p, "AbortAck")
        p.network.drop(Abort)
        targets[1].close()  # lost, while the next repetition is 8 s away
        targets[2].close()
        await targets[2].released()
        clock.advance(0.6)
        async with asyncio.timeout(4):
            await targets[0].released()
            await targets[1].released()


async def test_a_stall_is_not_credited_for_what_was_read_since(p: Pair) -> None:
    """Seed 1225: a peer heard again after a stall was found silent 1 s too late."""
    _, target = await matched(p)
    for node in p.nodes:
        (peer,) = node.shell.endpoint.peers
        received_at_s = peer.received_at_s
        node.shell.endpoint.credit_stall(60.0, received_at_s + 1.0)
        assert peer.received_at_s == received_at_s + 1.0
    target.close()
