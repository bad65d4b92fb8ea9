"""What silence means: a peer that hangs is silent, one that is loaded or slow to open is not."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import Code, LostError, RefusedError
from kvflow.testing.pair import QUICK, Pair, pair, small_layout, until
from kvflow.transports.data.fake import Fault
from kvflow.transports.data.local import LocalPlane
from tests.handlers.scenes import PROMPT, code_of, ledger, matched, sending, slow_way, success

IMPATIENT = msgspec.structs.replace(QUICK, lost_after_s=0.5)


@pytest.mark.parametrize("stalled_s", [0.6, float("inf")])
async def test_a_prefill_whose_worker_hangs_falls_silent(stalled_s: float) -> None:
    async with pair(timing=IMPATIENT) as p:
        # As a worker that hangs leaves its writes: not even cancelled ones end.
        _, target = await sending(p, Fault.STUCK)
        assert p.prefill.unavailable_reason == ""
        p.plane(p.prefill).stalled_s = stalled_s
        assert "worker of the fake data plane" in p.prefill.unavailable_reason
        assert await code_of(target.landed()) is Code.PEER_LOST
        # Nothing proves that it is over.
        assert p.decode.quarantined_pages == 5 and len(ledger(p.decode)) == 1
        with pytest.raises(LostError, match="silent"):
            await p.decode.room(8, "sim", PROMPT)
        other = await p.add_decode()
        with pytest.raises(RefusedError, match="worker of the fake data plane"):
            await other.room(9, "sim", PROMPT)
        p.plane(p.prefill).stalled_s = 0.0
        p.plane(p.prefill).release()
        await p.rest()
        await success(p, 10)


async def test_a_loaded_prefill_is_not_dead() -> None:
    """Writes wait in line three times as long as silence is borne."""
    pools = [PagedPool.allocate(small_layout(256)) for _ in range(2)]
    rooms, page_bytes = 40, pools[0].layout.page_bytes
    rate = rooms * page_bytes / (3 * IMPATIENT.lost_after_s)
    prefill = PrefillNode(pools[0], LocalPlane(pools[0].segment, rate), timing=IMPATIENT)
    decode = DecodeNode(pools[1], LocalPlane(pools[1].segment), timing=IMPATIENT)
    async with prefill, decode:
        step = asyncio.get_running_loop().run_in_executor(
            None, time.sleep, 3 * IMPATIENT.lost_after_s
        )
        sources = [prefill.room(room, [1]) for room in range(rooms)]
        targets = [await decode.room(room, [prefill.info], [1]) for room in range(rooms)]
        mine = prefill.pages.take(1, "engine")
        for source in sources:
            await source.matched()
            source.send(mine, last=True)
        for target in targets:
            await target.landed()
            target.close()
        await step
        assert decode.counts.endings == {"success": rooms} and decode.peers_by_phase() == {"up": 1}
        prefill.pages.give_back(mine, "engine")
    for pool in pools:
        pool.close()


async def test_a_way_that_takes_long_to_open_is_waited_for(p: Pair) -> None:
    go_on = slow_way(p)
    opening = asyncio.create_task(matched(p))
    await until(p.decode.peers)
    for _ in range(3):
        p.clock(p.decode).advance(0.9 * p.timing.register_s)
        await until(lambda: p.decode.peers()[0]["heard_ago_s"] < 1)
    go_on.set()
    _, target = await opening
    target.close()
