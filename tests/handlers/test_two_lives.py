"""Two lives of one address, a memory that was too short, a link lost while another opens."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvflow.protocols.commands import PeerKey
from kvflow.protocols.errors import AbortedError, Cause, Code, LostError
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import ChunkDone, Incarnation, Register
from kvflow.testing.pair import Pair, pair, until
from kvflow.transports.control.memory import HELD, LOST, Fate, Frame
from tests.handlers.scenes import (
    PROMPT,
    code_of,
    finish,
    ledger,
    links,
    midway,
    registered,
    sending,
    success,
)


def answer(p: Pair, control: str, source: int, asked: int) -> None:
    text = "another incarnation serves here now"
    said = registered(p, source=source, refusal=text, address=p.prefill.exported[0], asked=asked)
    p.network.inject(Frame(control, routing_id(p.decode.incarnation), False, encode(said)))


async def test_a_room_whose_prefill_has_forgotten_it_fails(p: Pair) -> None:
    """Its last message was lost, and too many grants were closed since."""
    core = p.prefill.shell.endpoint.core
    core.bounds = msgspec.structs.replace(core.bounds, closed_grants=1)

    def lose_the_last_word(frame: Frame) -> Fate | None:
        message = frame.message
        return (
            LOST if isinstance(message, ChunkDone) and message.room == 7 and message.last else None
        )

    p.network.rules.append(lose_the_last_word)
    source, target = await sending(p, chunks=2)
    await source.done()
    for room in (8, 9):
        await success(p, room)
    assert await code_of(target.landed()) is Code.STALE_GRANT


async def test_a_link_hears_of_its_replacement_through_the_next_one_and_gives_up_its_name(
    p: Pair,
) -> None:
    """Both sockets have one routing id: what is sent to the old link arrives at the new one."""
    await midway(p)
    old, control = p.prefill, p.prefill.info.control
    (first,) = links(p.decode)
    p.network.leave(old.shell.socket)  # type: ignore[arg-type]
    p.prefills.clear()
    p.network.cut(control)
    await p.add_prefill(int(control.rsplit(":", 1)[1]))
    opening = asyncio.ensure_future(p.decode.room(8, p.ranks, PROMPT).opened())
    await until(lambda: len(links(p.decode)) == 2)
    p.network.mend()
    (await opening).close()
    await until(lambda: first.phase is LinkPhase.GONE)
    await success(p, 9)
    await until(lambda: len(ledger(p.decode)) == 1)
    assert ledger(p.decode).quarantined_pages == 5, "its loans still wait for proof"
    p.plane(old).die()
    await old.close()
    await p.rest()


async def test_a_link_that_is_lost_while_another_rank_registers_opens_no_room() -> None:
    async with pair(ranks=2) as p:
        first, second = p.ranks

        def hold_rank_1(frame: Frame) -> Fate | None:
            return (
                HELD
                if frame.control == second.control and isinstance(frame.message, Register)
                else None
            )

        p.network.rules.append(hold_rank_1)
        opening = asyncio.ensure_future(p.decode.room(7, "sim", PROMPT).opened())
        peers, key = (
            p.decode.shell.endpoint.core.links.peers,
            PeerKey(Incarnation(first.incarnation), first.control),
        )
        await until(lambda: key in peers and peers[key].phase is LinkPhase.UP)
        lost = peers[key]  # it is forgotten as soon as it is lost
        answer(p, first.control, 12345, asked=first.incarnation)
        await until(lambda: lost.phase is LinkPhase.GONE)
        p.network.rules.clear()
        p.network.release()
        with pytest.raises(LostError):
            await opening
        assert p.decode.pool.pages.at_rest()
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
    again = range(1, 21)
    target = await p.decode.room(7, "sim", again)
    await until(lambda: p.prefill.shell.endpoint.rooms or p.network.seen["RoomFailed"])
    source = p.prefill.room(7, again)
    await finish(p, source, target)
