"""Peers that answer late, or again: nothing is lost by their absence."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvflow.protocols.errors import Code, LostError
from kvflow.protocols.limits import Bounds
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.wire.codec import routing_id
from kvflow.testing.pair import QUICK, Pair, pair, until
from kvflow.transports.control.memory import LOST, Fate, Frame
from tests.handlers.scenes import (
    PROMPT,
    all_read,
    code_of,
    finish,
    known,
    ledger,
    links,
    matched,
    more,
    success,
)

IMPATIENT = msgspec.structs.replace(QUICK, lost_after_s=5, register_s=600)


async def test_a_prefill_that_first_answers_after_the_time_of_silence() -> None:
    """Silence counts from the first answer, and not from when the link was dialled."""
    async with pair(timing=IMPATIENT) as p:
        p.network.cut()
        source = p.prefill.room(7, PROMPT)
        opening = asyncio.ensure_future(p.decode.room(7, "sim", PROMPT).opened())
        await until(lambda: links(p.decode))
        for _ in range(5):
            p.clock(p.decode).advance(IMPATIENT.lost_after_s + 1)
        p.network.mend()
        target = await opening
        await source.matched()
        await more(p, "Heartbeat", 5)
        assert p.decode.peers_by_phase() == {"up": 1} and not target.ended
        await finish(p, source, target)
        await p.rest()


async def forgotten(p: Pair) -> None:
    """Prefill gave the place of the silent `p.decode` to another; five pages are in doubt."""
    core = p.prefill.shell.endpoint.core
    core.bounds = Bounds(targets=1)
    source, target = await matched(p)
    (peer,) = known(p.prefill)

    def lost(frame: Frame) -> Fate | None:
        return LOST if frame.peer == routing_id(p.decode.incarnation) else None

    p.network.rules.append(lost)
    await all_read()  # a heartbeat that came after the silence would end it
    for node in (p.decode, p.prefill):
        p.clock(node).advance(p.timing.lost_after_s + 1)
    assert await code_of(target.landed()) is await code_of(source.done()) is Code.PEER_LOST
    assert peer.phase is PeerPhase.SILENT and p.decode.quarantined_pages == 5
    other = await p.add_decode()
    async with p.prefill.room(8, PROMPT) as source, other.room(8, "sim", PROMPT) as target:
        await source.matched()
        p.send_all(source)
        await target.landed()
    assert set(core.peers) == {other.incarnation}


async def test_a_forgotten_decode_comes_back_and_its_loan_ends(p: Pair) -> None:
    await forgotten(p)
    p.prefill.shell.endpoint.core.bounds = Bounds()
    p.network.mend()
    await until(lambda: not len(ledger(p.decode)))
    assert p.decode.quarantined_pages == 0 and p.decode.pool.pages.at_rest()
    await success(p, 9)


async def test_a_forgotten_decode_for_which_there_is_no_place_yet(p: Pair) -> None:
    await forgotten(p)
    p.network.mend()
    await more(p, "Registered", 4)  # refused
    assert p.decode.peers_by_phase() == {"silent": 1} and p.decode.quarantined_pages == 5
    with pytest.raises(LostError, match="silent"):
        await p.decode.room(9, "sim", PROMPT)
    p.prefill.shell.endpoint.core.bounds = Bounds()
    await until(lambda: not len(ledger(p.decode)))
    await success(p, 10)
