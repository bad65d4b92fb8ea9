"""What prefill keeps for decode goes when the pair has settled it; false claims are refused."""

from __future__ import annotations

from kvflow.protocols.errors import Code
from kvflow.protocols.wire.messages import GrantId, Heartbeat
from kvflow.testing.pair import Pair, until
from tests.handlers.scenes import (
    PROMPT,
    between,
    code_of,
    finish,
    header,
    known,
    ledger,
    matched,
    more,
    to_prefill,
)


async def one_room(p: Pair, room: int, which: int) -> None:
    node = p.prefills[which]
    async with (
        node.room(room, PROMPT) as source,
        p.decode.room(room, [p.ranks[which]], PROMPT) as target,
    ):
        await source.matched()
        p.send_all(source, node=node, handoff=b"h" * 10_000)
        await target.landed()


async def test_a_loan_without_proof_at_one_prefill_keeps_nothing_at_another(p: Pair) -> None:
    healthy, lost = p.prefill, await p.add_prefill(alone=True)
    for number in (0, 1):
        await one_room(p, number, number)
    source = lost.room(7, PROMPT)
    target = await p.decode.room(7, [lost.info], PROMPT)
    await source.matched()
    p.network.cut(lost.info.control)
    p.clock(p.decode).advance(p.timing.lost_after_s + 1)
    await until(lambda: target.ended)
    assert await code_of(target.landed()) is Code.PEER_LOST
    for room in range(20, 30):
        await one_room(p, room, 0)
    (peer,) = known(healthy)
    await until(lambda: not peer.grants.remembered)
    assert len(ledger(p.decode)) == 1 and p.decode.quarantined_pages == 5
    p.network.mend()
    await p.rest()


async def test_one_room_that_waits_keeps_no_hand_over_of_others(p: Pair) -> None:
    waiting, half = p.decode.announce(1, "sim", PROMPT), p.prefill.room(1, PROMPT)
    for room in range(20, 30):
        await one_room(p, room, 0)
    (peer,) = known(p.prefill)
    await until(lambda: not peer.grants.remembered)
    assert p.prefill.shell.endpoint.core.kept.total == 0 and not half.record.ended
    waiting.offer()
    await finish(p, half, waiting)


async def test_a_claim_about_grants_that_are_open_changes_nothing_for_them(p: Pair) -> None:
    source, target = await matched(p, 1)
    to_prefill(p, Heartbeat(settled_below=GrantId(target.grant + 1), **between(p)))
    await more(p, "Heartbeat", 3)
    p.send_all(source)
    assert await target.landed() == b"handoff" and not source.record.half
    target.close()
    assert header(p, 1, target.grant)["grant"] == 1
