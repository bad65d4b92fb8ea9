"""The next node over a pool keeps the pages of loans that a closed node left, until the proof."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from kvflow.handlers import earlier
from kvflow.handlers.rooms import DecodeRoom
from kvflow.memory.external import ExternalPages
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import (
    Code,
    MisuseError,
    OwnershipError,
    QuarantineError,
    TransferError,
)
from kvflow.protocols.limits import Bounds
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import PageStore, PlaneAddress, UnprovenLoan
from kvflow.testing.pair import QUICK, Pair, fill, pair, until
from kvflow.transports.data.fake import FakePlane, Fault
from tests.handlers.scenes import PROMPT, all_read, code_of, every_rank_writes, finish, matched

OLD, NEW = 0x11, 0xAA
TIMING = msgspec.structs.replace(QUICK, lost_after_s=0.5)


@pytest.fixture
async def p() -> AsyncIterator[Pair]:
    async with pair(timing=TIMING) as made:
        yield made


async def closed_with_a_loan(p: Pair) -> DecodeRoom:
    p.plane(p.prefill).script(Fault.STUCK)
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
    node = DecodeNode(
        p.decode.pool, FakePlane(p.planes), connect=p.network.connect, timing=TIMING, bounds=bounds
    )
    async with node:
        yield node


async def test_rooms_go_on_beside_what_was_taken_over(p: Pair) -> None:
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


async def test_what_is_taken_over_counts_as_quarantine(p: Pair) -> None:
    await closed_with_a_loan(p)
    async with heir(p, Bounds(quarantine_share=4 / 64)) as node:
        with pytest.raises(QuarantineError, match="5 pages are in quarantine, more than 4"):
            await node.room(8, p.ranks, PROMPT)
    p.decodes.clear()


async def test_a_node_that_could_prove_everything_leaves_nothing(p: Pair) -> None:
    source, target = await matched(p)
    await finish(p, source, target)
    other = await p.decode.room(8, "sim", PROMPT)
    assert await p.decode.close() == [] == p.decode.pool.unproven
    assert await code_of(other.landed()) is Code.SHUTDOWN
    assert p.decode.pool.pages.at_rest()
    p.decodes.clear()


# --- another store, another role


def of_the_pool(pool: PagedPool) -> PageStore | None:
    return None


def of_the_engine(pool: PagedPool) -> PageStore:
    return ExternalPages(pool.layout.num_places)


STORES = [of_the_pool, of_the_engine]
Store = Callable[[PagedPool], PageStore | None]


async def leaves_a_loan(
    p: Pair, store: Store, fault: Fault = Fault.LATE, room: int = 7
) -> UnprovenLoan:
    """A decode node over the pool, the only one, with that store, closes with five pages lent."""
    await p.decode.close()
    pool = p.decode.pool
    pages, plane = store(pool), FakePlane(p.planes)
    mine = None
    if isinstance(pages, ExternalPages):
        pool.quarantine.keep_out_of(pages)
        mine = [page for page in range(64) if page not in pages.busy(range(64))][:5]
    p.plane(p.prefill).script(fault)
    node = DecodeNode(pool, plane, pages=pages, connect=p.network.connect, timing=TIMING)
    async with node:
        source = p.prefill.room(room, PROMPT)
        await node.room(room, p.ranks, PROMPT, pages=mine)
        await source.matched()
        fill(p.prefill.pool, p.send_all(source), OLD)
    *_, loan = await node.close()
    return loan


def withheld(store: PageStore) -> set[int]:
    """The pages of 64 that nobody is given, while none is in use."""
    if isinstance(store, ExternalPages):
        return set(store.busy(range(64)).tolist())
    mine = store.take(store.free_pages, "everybody")
    store.give_back(mine, "everybody")
    return set(range(64)) - set(mine.tolist())


@asynccontextmanager
async def next_node(
    p: Pair, role: str, pages: PageStore | None, plane: FakePlane | None = None
) -> AsyncIterator[DecodeNode | PrefillNode]:
    pool, plane = p.decode.pool, plane or FakePlane(p.planes)
    if role == "decode":
        node: DecodeNode | PrefillNode = DecodeNode(
            pool, plane, pages=pages, connect=p.network.connect, timing=TIMING
        )
    else:
        node = PrefillNode(pool, plane, pages=pages, bind=p.network.bind, timing=TIMING)
    async with node:
        yield node


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("second", STORES)
@pytest.mark.parametrize("first", STORES)
async def test_the_next_node_keeps_them_whatever_its_store_and_role(
    p: Pair, first: Store, second: Store, role: str
) -> None:
    loan = await leaves_a_loan(p, first)
    lent, pool = set(loan.pages.tolist()), p.decode.pool
    async with next_node(p, role, second(pool)) as node:
        assert withheld(node.pages) == withheld(pool.pages) == lent and len(lent) == 5
        assert node.quarantined_pages == 5
        assert node.quarantine_limit == 32
        assert not node.unavailable_reason
        [line] = node.peers()
        assert line["incarnation"] == f"{p.prefill.incarnation:016x}"
        assert line["control"] == p.prefill.control
        assert (line["phase"], line["loans"], line["quarantine_pages"]) == ("earlier", 1, 5)
        assert node.peers_by_phase() == {"earlier": 1}
        others = [page for page in range(64) if page not in lent]
        fill(pool, others, NEW)
        assert p.plane(p.prefill).land_late()
        assert (pool.pages_bytes(np.array(others)) == NEW).all()
        assert (pool.pages_bytes(loan.pages) == OLD).all() and node.quarantined_pages == 5
        await p.crash(p.prefill)
        await until(lambda: not node.quarantined_pages)
        assert not withheld(node.pages) and not withheld(pool.pages) and not node.peers()
        assert not pool.unproven
    assert not await node.close()


@pytest.mark.parametrize("first", STORES)
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_it_is_handed_on_by_either_role(p: Pair, first: Store, role: str) -> None:
    loan = await leaves_a_loan(p, first)
    for store in (of_the_engine, of_the_pool):
        async with next_node(p, role, store(p.decode.pool)) as node:
            assert node.quarantined_pages == 5
        assert await node.close() == [loan] == p.decode.pool.unproven
    await p.crash(p.prefill)
    async with next_node(p, "prefill", None) as node:
        await until(p.decode.pool.pages.at_rest)
        assert not node.quarantined_pages


async def nothing_in_quarantine(node: DecodeNode) -> None:
    await until(lambda: not node.quarantined_pages)


async def test_ten_rounds_of_late_writers_and_no_foreign_byte(p: Pair) -> None:
    pool, foreign, lost = p.decode.pool, 0, 0
    for round_ in range(10):
        writer = p.prefill
        await leaves_a_loan(p, STORES[round_ % 2], room=2 * round_ + 1)
        other = await p.add_prefill(alone=True)
        async with next_node(p, "decode", STORES[(round_ + 1) % 2](pool)) as node:
            assert isinstance(node, DecodeNode)
            free = [page for page in range(64) if page not in withheld(node.pages)]
            mine = free[:5] if isinstance(node.pages, ExternalPages) else None
            source = other.room(2 * round_ + 2, PROMPT)
            room = await node.room(2 * round_ + 2, [other.info], PROMPT, pages=mine)
            await source.matched()
            fill(other.pool, p.send_all(source, node=other), NEW)
            await room.landed()
            assert (pool.pages_bytes(room.pages) == NEW).all()
            assert p.plane(writer).land_late()
            foreign += int((pool.pages_bytes(room.pages) != NEW).any(axis=1).sum())
            await p.crash(writer)
            await nothing_in_quarantine(node)
            lost += len(withheld(node.pages) - set(room.pages.tolist()))
            room.close()
    assert (foreign, lost) == (0, 0) and pool.pages.at_rest()


async def test_a_room_that_names_one_of_them_is_refused(p: Pair) -> None:
    loan = await leaves_a_loan(p, of_the_pool)
    async with next_node(p, "decode", ExternalPages(64)) as node:
        assert isinstance(node, DecodeNode)
        why = (
            rf"page {loan.pages[0]} is in quarantine: .* at {p.prefill.control}, "
            r".*declare_dead\(0x"
        )
        with pytest.raises(OwnershipError, match=why):
            node.room(8, p.ranks, PROMPT, pages=loan.pages)
        room = node.announce(9, p.ranks, PROMPT)
        with pytest.raises(OwnershipError, match=why):
            room.offer([*range(20, 24), int(loan.pages[0])])
        assert withheld(node.pages) == set(loan.pages.tolist())
        room.close()


class Careless(ExternalPages):
    def take(self, count: int, owner: object) -> PageIndices:
        return np.arange(count, dtype=np.int32)

    def give_back(self, pages: PageIndices, owner: object) -> None: ...

    def move(self, pages: PageIndices, owner: object, new_owner: object) -> None: ...


async def test_a_store_of_somebody_s_own_cannot_lend_them_either(p: Pair) -> None:
    loan = await leaves_a_loan(p, of_the_engine)
    assert loan.pages.tolist() == list(range(5))
    async with next_node(p, "decode", Careless(64)) as node:
        assert isinstance(node, DecodeNode)
        with pytest.raises(OwnershipError, match="page 0 is in quarantine"):
            await node.room(8, p.ranks, PROMPT)
        assert not node.shell.rooms


async def test_a_send_that_names_one_of_them_is_refused(p: Pair) -> None:
    loan, other = await leaves_a_loan(p, of_the_engine), await p.add_decode()
    async with next_node(p, "prefill", ExternalPages(64)) as node:
        assert isinstance(node, PrefillNode)
        source = node.room(8, PROMPT)
        target = await other.room(8, [node.info], PROMPT)
        await source.matched()
        with pytest.raises(OwnershipError, match="page 0 is in quarantine"):
            source.send([0, 20, 21, 22, 23], last=True)
        assert withheld(node.pages) == set(loan.pages.tolist())
        source.send([19, 20, 21, 22, 23], last=True, handoff=b"x")
        assert await target.landed() == b"x"


# --- proof, and an operator's word


class Unseeing(FakePlane):
    """Sees no writer's end, as of another host; counts how often it is asked."""

    asked = 0

    async def fence(self, writer: PlaneAddress) -> None:
        self.asked += 1
        raise TransferError("on another host")


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_an_operator_ends_what_no_fence_proves(
    p: Pair, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool, plane = p.decode.pool, Unseeing(p.planes)
    for room in (7, 8, 9):
        await leaves_a_loan(p, of_the_pool, Fault.STUCK, room)
    assert len(pool.unproven) == 3
    async with next_node(p, role, None, plane) as node:
        await until(lambda: plane.asked)
        assert node.quarantined_pages == 15 and node.peers()[0]["loans"] == 3
        with pytest.raises(MisuseError, match="no prefill 0000000000000001"):
            node.declare_dead(1, "a slip")
        node.declare_dead(p.prefill.incarnation, "its machine is off")
        await until(lambda: not node.quarantined_pages)
        assert plane.asked == 1, "one watch, however many loans"
        assert pool.pages.at_rest() and not pool.unproven and not node.peers()
        assert node.counts.declared_dead == 1
        assert "3 loans end without proof, 15 pages" in caplog.text


async def test_a_writer_that_is_seen_to_run_is_not_declared_dead(
    p: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leaves_a_loan(p, of_the_pool)
    for role in ("decode", "prefill"):
        async with next_node(p, role, None) as node:
            monkeypatch.setattr(node.plane, "sees_alive", lambda writer: True)
            with pytest.raises(MisuseError, match="runs: it is process"):
                node.declare_dead(p.prefill.incarnation, "wrong")
            assert node.quarantined_pages == 5


async def test_another_kind_of_plane_proves_nothing(p: Pair) -> None:
    """How long a write may linger is known to the plane that made it."""
    await leaves_a_loan(p, of_the_pool)
    plane = FakePlane(p.planes)
    plane.name = "another"
    await p.crash(p.prefill)
    async with DecodeNode(p.decode.pool, plane, connect=p.network.connect, timing=TIMING) as node:
        await all_read()
        assert node.quarantined_pages == 5
        assert not any(task.get_name().startswith("kvflow-fence") for task in asyncio.all_tasks())
    async with heir(p) as node:
        await until(lambda: not node.quarantined_pages)


async def test_a_word_for_one_of_two_ranks_is_kept_by_the_pool() -> None:
    async with pair(timing=TIMING, ranks=2) as p:
        for rank in p.prefills:
            p.plane(rank).script(Fault.STUCK)
        await every_rank_writes(p)
        assert len(await p.decode.close()) == 2
        first, second = p.prefills
        async with heir(p) as node:
            node.declare_dead(first.incarnation, "its machine is off")
            await until(lambda: len(node.peers()) == 1)
        (loan,) = await node.close()
        assert loan.incarnation == second.incarnation and p.decode.pages.free_pages == 59
        async with heir(p) as node:
            await p.crash(second)
            await until(p.decode.pool.pages.at_rest)


async def test_above_the_limit_a_prefill_says_so(p: Pair) -> None:
    await leaves_a_loan(p, of_the_pool)
    plane, few = FakePlane(p.planes), Bounds(quarantine_share=4 / 64)
    async with PrefillNode(p.decode.pool, plane, bind=p.network.bind, bounds=few) as node:
        assert node.unavailable_reason.startswith("5 pages are in quarantine, more than 4")
        await p.crash(p.prefill)
        await until(lambda: not node.unavailable_reason)


# --- several nodes at once, and nodes that never run


def of_incarnation_9(p: Pair, grant: int, *pages: int, rank: int = 0) -> UnprovenLoan:
    """A loan that prefill's process had under an incarnation of its past."""
    return UnprovenLoan(
        writer=p.prefill.exported[0],
        incarnation=9,
        control=f"tcp://x:{rank}",
        rank=rank,
        room=7,
        lease=(5, grant),
        pages=np.array(pages, dtype=np.int32),
    )


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("second", STORES)
async def test_a_node_that_runs_beside_it_takes_them_over(
    p: Pair, second: Store, role: str
) -> None:
    pool = p.decode.pool
    async with (
        next_node(p, role, second(pool)) as beside,
        next_node(p, "prefill", None) as third,
    ):
        assert not withheld(beside.pages)
        loan = await leaves_a_loan(p, of_the_engine)
        assert withheld(beside.pages) == withheld(third.pages) == set(loan.pages.tolist())
        assert beside.quarantined_pages == third.quarantined_pages == 5
        third.declare_dead(p.prefill.incarnation, "one of them is told")
        await until(lambda: not beside.quarantined_pages and not third.quarantined_pages)
        assert not withheld(beside.pages) and not withheld(third.pages) and not beside.peers()
        assert not pool.unproven


async def test_the_one_that_closes_first_leaves_nothing_of_the_other_s(p: Pair) -> None:
    async with next_node(p, "prefill", None) as beside:
        pass
    loan = await leaves_a_loan(p, of_the_pool)
    assert await beside.close() == [] and p.decode.pool.unproven == [loan]
    async with heir(p) as node:
        assert node.quarantined_pages == 5


async def test_a_node_in_another_thread_leaves_them_to_one_that_runs_here(p: Pair) -> None:
    pool = p.decode.pool
    async with next_node(p, "decode", None) as node:
        loan = of_incarnation_9(p, 1, *range(5))
        await asyncio.to_thread(pool.quarantine.add, [loan], ExternalPages(64))
        assert withheld(node.pages) == set(range(5)), "at once, before the loop has heard of it"
        await until(lambda: node.quarantined_pages == 5)
        await asyncio.to_thread(pool.quarantine.forget, 9, loan.writer)
        await until(lambda: not node.quarantined_pages)
        assert not withheld(node.pages)


async def test_many_leases_are_taken_over_some_in_each_turn(
    p: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of all is declared dead in the first turn."""
    monkeypatch.setattr(earlier, "INHERIT_WORK", 2)
    pool = p.decode.pool
    async with next_node(p, "decode", None) as node:
        loans = [
            of_incarnation_9(p, grant, grant, rank=rank) for rank in range(2) for grant in range(5)
        ]
        pool.quarantine.add(loans, ExternalPages(64))
        assert withheld(node.pages) == set(range(5))
        seen = []
        for _ in range(4):
            seen.append(node.quarantined_pages)
            await asyncio.sleep(0)
        assert seen == [2, 4, 5, 5]
        pool.quarantine.add(
            [msgspec.structs.replace(loan, lease=(6, loan.lease[1])) for loan in loans],
            node.pages,
        )
        assert node.quarantined_pages == 7
        node.declare_dead(9, "the test says so")
        await until(lambda: not node.quarantined_pages and not pool.unproven)
        assert not withheld(node.pages) and not node.peers()


async def test_what_was_proven_before_the_loop_heard_of_it_is_not_taken_over(p: Pair) -> None:
    pool, loan = p.decode.pool, of_incarnation_9(p, 1, *range(5))
    async with next_node(p, "decode", None) as node:
        other = threading.Thread(target=pool.quarantine.add, args=([loan], ExternalPages(64)))
        other.start()
        other.join()  # the loop stands still meanwhile
        pool.quarantine.forget(9, loan.writer)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not node.quarantined_pages and not withheld(node.pages) and not pool.unproven


async def test_a_node_that_never_starts_changes_nothing(p: Pair) -> None:
    loan = await leaves_a_loan(p, of_the_pool)
    never = DecodeNode(
        p.decode.pool, FakePlane(p.planes), pages=ExternalPages(64), connect=p.network.connect
    )
    assert withheld(never.pages) == set(loan.pages.tolist())
    assert not await never.close()
    taken = PrefillNode(
        p.decode.pool, FakePlane(p.planes), bind=p.network.bind, port=p.prefill._port
    )
    with pytest.raises(MisuseError):
        await taken.start()
    assert not await taken.close()
    assert p.decode.pool.unproven == [loan]
    async with heir(p) as node:
        assert node.quarantined_pages == 5
        await p.crash(p.prefill)
        await until(lambda: not node.quarantined_pages)
    assert not withheld(never.pages) and p.decode.pool.pages.at_rest()
