"""A decode that closes with loans out says so, and the next node over its pool keeps their pages until the proof."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvflow.handlers.rooms import DecodeRoom
from kvflow.node import DecodeNode
from kvflow.protocols.errors import Code, QuarantineError
from kvflow.protocols.limits import Bounds
from kvflow.testing.pair import QUICK, Pair, fill, pair, until
from kvflow.transports.data.fake import FakePlane, Fault
from tests.handlers.scenes import PROMPT, code_of, every_rank_writes, matched

OLD, NEW = 0x11, 0xAA
TIMING = msgspec.structs.replace(QUICK, lost_after_s=0.5)


async def closed_with_a_loan(p: Pair, fault: Fault = Fault.STUCK) -> DecodeRoom:
    """Prefill's data plane stands still in the middle of a write; the decode node over the pool is closed."""
    p.plane(p.prefill).script(fault)
    source, target = await matched(p)
    sent = p.send_all(source)
    fill(p.prefill.pool, sent, OLD)
    (loan,) = await p.decode.close()
    assert await code_of(target.landed()) in (Code.SHUTDOWN, Code.TRANSFER_ERROR)
    assert loan.writer == p.prefill.exported[0] and list(loan.pages) == list(target.pages)
    assert p.decode.pool.unproven == [loan] == list(await p.decode.close())
    assert p.decode.pages.free_pages == 59
    return target


@asynccontextmanager
async def heir(p: Pair, bounds: Bounds | None = None) -> AsyncIterator[DecodeNode]:
    """The next node over the pool of the decode that was closed."""
    node = DecodeNode(p.decode.pool, FakePlane(p.planes), connect=p.network.connect, timing=TIMING, bounds=bounds)
    async with node:
        yield node


async def test_the_late_write_finds_its_pages_kept() -> None:
    async with pair(timing=TIMING) as p:
        old = await closed_with_a_loan(p, Fault.LATE)
        async with heir(p) as node:
            assert node.quarantined_pages == 5 and not p.decode.pool.unproven
            mine = node.pages.take(node.pages.free_pages, "the next user")
            assert len(mine) == 59 and not set(mine) & set(old.pages)
            fill(p.decode.pool, mine, NEW)
            assert p.plane(p.prefill).land_late()  # the old write moves on
            assert (p.decode.pool.pages_bytes(old.pages) == OLD).all()
            assert (p.decode.pool.pages_bytes(mine) == NEW).all()
            node.pages.give_back(mine, "the next user")
            assert node.quarantined_pages == 5, "a write that was seen to land proves nothing to this node"
            await p.crash(p.prefill)
            await until(p.decode.pool.pages.at_rest)
            assert node.quarantined_pages == 0
        p.decodes.clear()


async def test_rooms_go_on_beside_what_was_taken_over() -> None:
    async with pair(timing=TIMING) as p:
        old = await closed_with_a_loan(p)
        async with (
            heir(p) as node,
            p.prefill.room(8, PROMPT) as source,
            node.room(8, p.ranks, PROMPT) as target,
        ):
            await source.matched()
            pages = p.prefill.pages.take(5, "engine")
            fill(p.prefill.pool, pages, NEW)
            source.send(pages, last=True)
            await target.landed()
            assert not set(target.pages) & set(old.pages)
            assert (p.decode.pool.pages_bytes(target.pages) == NEW).all()
            p.prefill.pages.give_back(pages, "engine")
        p.decodes.clear()


async def test_what_is_taken_over_counts_as_quarantine() -> None:
    async with pair(timing=TIMING) as p:
        await closed_with_a_loan(p)
        async with heir(p, Bounds(quarantine_share=4 / 64)) as node:
            with pytest.raises(QuarantineError, match="5 pages are in quarantine, more than 4"):
                await node.room(8, p.ranks, PROMPT)
        p.decodes.clear()


async def test_it_is_handed_on_until_there_is_proof() -> None:
    async with pair(timing=TIMING) as p:
        old = await closed_with_a_loan(p)
        for _ in range(2):
            async with heir(p) as node:
                assert node.quarantined_pages == 5
            (loan,) = await node.close()
            assert list(loan.pages) == list(old.pages) and p.decode.pool.unproven == [loan]
            assert p.decode.pages.free_pages == 59
        async with heir(p) as node:
            await p.crash(p.prefill)
            await until(p.decode.pool.pages.at_rest)
        assert not await node.close() and not p.decode.pool.unproven
        p.decodes.clear()


async def test_pages_that_several_ranks_hold_wait_for_all_of_them() -> None:
    async with pair(timing=TIMING, ranks=2) as p:
        for node in p.prefills:
            p.plane(node).script(Fault.STUCK)
        _, target = await every_rank_writes(p)
        loans = await p.decode.close()
        assert {loan.writer for loan in loans} == {node.exported[0] for node in p.prefills}
        async with heir(p) as node:
            assert node.quarantined_pages == 5
            await p.crash(p.prefills[0])
            mine = node.pages.take(node.pages.free_pages, "the next user")
            assert len(mine) == 59 and not set(mine) & set(target.pages) and node.quarantined_pages == 5
            node.pages.give_back(mine, "the next user")
            await p.crash(p.prefills[0])
            await until(p.decode.pool.pages.at_rest)
            assert node.quarantined_pages == 0
        p.decodes.clear()


async def test_a_node_that_could_prove_everything_leaves_nothing() -> None:
    async with pair(timing=TIMING) as p:
        source, target = await matched(p)
        p.send_all(source)
        await target.landed()
        target.close()
        other = await p.decode.room(8, "sim", PROMPT)
        assert await p.decode.close() == [] == p.decode.pool.unproven
        assert await code_of(other.landed()) is Code.SHUTDOWN
        assert p.decode.pool.pages.at_rest()
        p.decodes.clear()
