"""Nodes that close in a process that lives on: all ends by their word (I2, I5, I6)."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import Code, TransferError
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import (
    AbortAck,
    Bootstrap,
    Goodbye,
    GoodbyeAck,
    Heartbeat,
    RoomFailed,
)
from kvflow.testing.pair import QUICK, Pair, pair, until
from kvflow.transports.control.memory import LOST
from kvflow.transports.data.local import LocalPlane, LocalRoute
from tests.handlers.scenes import PROMPT, all_read, code_of, finish, known, links, matched, success


# The fence of the local plane is the end of the process, which proves nothing here.
def local(pool: PagedPool) -> LocalPlane:
    return LocalPlane(pool.segment)


@asynccontextmanager
async def living(**options: int) -> AsyncIterator[Pair]:
    async with pair(open_plane=local, **options) as p:  # type: ignore[arg-type]
        yield p


@pytest.fixture
async def p() -> AsyncIterator[Pair]:
    async with living() as made:
        yield made


async def linked(p: Pair) -> None:
    await success(p, 1)
    await p.rest()


async def forgotten(p: Pair) -> None:
    await p.rest()
    assert not links(p.decode) and not p.decode.quarantined_pages


async def test_what_is_still_in_the_socket_when_prefill_closes(p: Pair) -> None:
    await linked(p)
    p.network.hold(Bootstrap)
    lent = await p.decode.room(7, "sim", PROMPT)
    announced = p.decode.announce(8, "sim", PROMPT)
    await all_read()
    await p.prefills.pop().close()
    p.network.release()
    assert await code_of(lent.landed()) is await code_of(announced.landed()) is Code.SHUTDOWN
    await forgotten(p)


async def test_a_prefill_that_comes_back_at_its_address_serves(p: Pair) -> None:
    await linked(p)
    p.network.hold(Bootstrap)
    lent = await p.decode.room(7, "sim", PROMPT)
    port = int(p.prefill.control.rsplit(":", 1)[1])
    await p.prefills.pop().close()
    p.network.release()
    assert await code_of(lent.landed()) is Code.SHUTDOWN
    await p.add_prefill(port)
    await success(p, 9)
    await p.rest()
    assert [peer.phase for peer in links(p.decode)] == [LinkPhase.UP]


@pytest.mark.parametrize("lost", [Goodbye, GoodbyeAck])
async def test_a_goodbye_of_prefill_or_its_answer_is_lost(p: Pair, lost: type) -> None:
    """Decode hung up when it answered, so its answer is waited for a while only."""
    await linked(p)
    p.network.hold(Bootstrap)
    await p.decode.room(7, "sim", PROMPT)
    await all_read()
    p.network.drop(lost)
    await p.prefills.pop().close()
    assert p.network.seen["Goodbye"] == (2 if lost is Goodbye else 1)
    await forgotten(p)


async def test_a_decode_that_was_silent_hears_it_when_it_comes_back(p: Pair) -> None:
    await linked(p)
    p.network.hold(Bootstrap)
    lent = await p.decode.room(7, "sim", PROMPT)
    p.network.cut()
    p.clock(p.decode).advance(p.timing.lost_after_s + 1)
    assert await code_of(lent.landed()) is Code.PEER_LOST
    await until(lambda: p.decode.quarantined_pages == len(lent.pages))
    p.network.mend()
    await p.prefills.pop().close()
    await forgotten(p)


# --- decode closes


async def test_a_decode_that_closes_is_forgotten_at_once(p: Pair) -> None:
    await linked(p)
    (peer,) = known(p.prefill)
    route = p.prefill.shell.routes[peer.incarnation]
    await p.decodes.pop().close()
    assert not known(p.prefill) and not p.prefill.shell.routes
    assert isinstance(route, LocalRoute) and route.closed
    assert not p.prefill.shell.endpoint.core.deadlines


async def test_a_decode_that_closes_with_an_announced_room_ends_the_engines_half(p: Pair) -> None:
    await linked(p)
    p.decode.announce(7, "sim", PROMPT)
    source = p.prefill.room(7, PROMPT)
    await all_read()
    await p.decodes.pop().close()
    assert await code_of(source.matched()) is Code.SHUTDOWN
    await p.rest()


@pytest.mark.parametrize("lost", [Goodbye, GoodbyeAck])
async def test_a_goodbye_of_decode_that_is_lost_is_said_again(lost: type) -> None:
    async with pair(timing=PATIENT, open_plane=local) as p:
        await linked(p)
        p.network.drop(lost)
        await p.decodes.pop().close()
        assert p.network.seen["Goodbye"] >= 2 and not known(p.prefill)


async def test_a_decode_does_not_wait_for_a_prefill_that_does_not_answer(p: Pair) -> None:
    await linked(p)
    p.network.drop(Goodbye, times=1 << 30)
    p.network.drop(Heartbeat, times=1 << 30)
    await p.decodes.pop().close()
    assert p.network.seen["Goodbye"] >= 2 and known(p.prefill)
    p.network.mend()


async def test_both_close_at_once(p: Pair) -> None:
    await linked(p)
    p.decode.leave()
    p.prefill.leave()
    for node in (p.decodes.pop(), p.prefills.pop()):
        await node.close()


# --- decodes that vanish without a word, and whose death cannot be observed


async def vanish(p: Pair) -> None:
    """The newest decode is out of reach, and prefill takes it for lost."""
    node = p.decodes.pop()
    p.network.rules.insert(
        0, lambda frame: LOST if frame.peer == routing_id(node.incarnation) else None
    )
    await all_read()  # a heartbeat that comes after the silence would end it
    p.clock(p.prefill).advance(p.timing.lost_after_s + 1)
    await until(lambda: not any(peer.is_up for peer in known(p.prefill)))


async def one_room(p: Pair, room: int) -> None:
    source = p.prefill.room(room, PROMPT)
    target = p.decodes[-1].room(room, "sim", PROMPT)
    await finish(p, source, target)
    await source.done()


async def test_shares_of_the_staging_that_lost_decodes_hold_go_to_new_ones() -> None:
    async with living(source_staging_bytes=0) as p:
        closing = []
        await one_room(p, 0)
        for room in range(1, 20):
            closing.append(p.decode)
            await vanish(p)
            await p.add_decode()
            await one_room(p, room)
        assert len(known(p.prefill)) < 12, "the staging is divided into so many shares"
        for node in closing:
            await node.close()


class FewDescriptors(LocalPlane):
    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> LocalRoute:
        if self._routes:
            raise TransferError("cannot open the pool") from OSError(
                errno.EMFILE, "Too many open files"
            )
        return await super().connect(address, layout)


async def test_descriptors_that_lost_decodes_hold_go_to_new_ones() -> None:
    async with pair(open_plane=lambda pool: FewDescriptors(pool.segment)) as p:
        await one_room(p, 0)
        lost = p.decode
        await vanish(p)
        await p.add_decode()
        await one_room(p, 1)
        assert [peer.incarnation for peer in known(p.prefill)] == [p.decode.incarnation]
        third = await p.add_decode()
        refused = third.room(3, "sim", PROMPT)
        assert await code_of(refused.landed()) is Code.REFUSED, "none that is up gives way"
        await lost.close()


# --- what prefill says last

PATIENT = msgspec.structs.replace(QUICK, heartbeat_s=1.0, repeat_after_s=0.02)


async def test_last_words_that_are_lost_are_said_again(caplog: pytest.LogCaptureFixture) -> None:
    async with pair(timing=PATIENT) as p:
        _, target = await matched(p)
        p.network.drop(RoomFailed)
        p.network.drop(AbortAck)
        with caplog.at_level(logging.WARNING, "kvflow"):
            async with asyncio.timeout(20):
                await p.prefill.close()
        assert await code_of(target.landed()) is Code.SHUTDOWN
        assert "not confirmed" not in caplog.text
        target.close()


async def test_the_wait_for_a_decode_that_hears_nothing_is_bounded_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair(timing=QUICK) as p:
        _, target = await matched(p)
        p.network.cut()
        with caplog.at_level(logging.WARNING, "kvflow"):
            async with asyncio.timeout(20):
                await p.prefill.close()
        assert (
            f"the ends of 1 rooms are not confirmed by decode {p.decode.incarnation:016x}"
            in caplog.text
        )
        target.close()
