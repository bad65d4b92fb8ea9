"""Rooms with one half only, or with halves that do not fit (I4)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvflow.protocols.errors import Cause, Code, LostError, RefusedError
from kvflow.protocols.machines.rendezvous import Rendezvous, Side
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire.messages import MAX_TEXT, Abort, Bootstrap, RoomId
from kvflow.testing.pair import PAGE_SIZE, Pair, pair, small_layout, until
from tests.handlers.scenes import PROMPT, WHY, code_of, links, offered, success


async def test_decode_never_comes(p: Pair) -> None:
    source = p.prefill.room(7, PROMPT)
    p.clock(p.prefill).advance(p.timing.rendezvous_s - 1)
    assert not source.ended
    p.clock(p.prefill).advance(2)
    assert await code_of(source.matched()) is Code.RENDEZVOUS
    target = p.decode.room(7, "sim", PROMPT)  # late, and told so
    assert await code_of(target.landed()) is Code.RENDEZVOUS


async def test_prefill_never_comes(p: Pair) -> None:
    target = await offered(p)
    p.clock(p.prefill).advance(p.timing.rendezvous_s + 1)
    p.clock(p.decode).advance(1)
    assert await code_of(target.landed()) is Code.RENDEZVOUS
    source = p.prefill.room(7, PROMPT)
    assert await code_of(source.matched()) is Code.RENDEZVOUS


async def test_prefill_refuses_before_decode_comes(p: Pair) -> None:
    p.prefill.room(7, PROMPT).close(WHY)
    target = p.decode.room(7, "sim", PROMPT)
    assert await code_of(target.landed()) is WHY.code
    assert target.cause == WHY
    await success(p, 7)  # told once: the id is free again


async def test_the_same_half_may_begin_afresh(p: Pair) -> None:
    p.prefill.room(7, PROMPT).close(WHY)
    await success(p, 7)
    assert not len(p.prefill.shell.endpoint.core.rendezvous)


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize(
    "other",
    [range(1, 5 * PAGE_SIZE + 1), range(5 * PAGE_SIZE - 1), [0] * (5 * PAGE_SIZE)],
    ids=["ids", "length", "zeros"],
)
async def test_halves_that_mean_different_prompts(p: Pair, first: str, other: list[int]) -> None:
    if first == "prefill":
        source = p.prefill.room(7, PROMPT)
        target = await p.decode.room(7, "sim", other)
    else:
        target = await p.decode.room(7, "sim", other)
        await until(lambda: 7 in p.prefill.shell.endpoint.rooms)
        source = p.prefill.room(7, PROMPT)
    assert await code_of(source.matched()) is await code_of(target.landed()) is Code.PROMPT_MISMATCH
    await p.rest()
    assert not p.plane(p.prefill).started


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_decode_has_no_pages(p: Pair, first: str) -> None:
    await success(p, 1)
    taken = p.decode.pages.take(60, "somebody")
    source = p.prefill.room(7, PROMPT) if first == "prefill" else None
    assert await code_of(p.decode.room(7, "sim", PROMPT)) is Code.CAPACITY
    if source is None:
        await until(lambda: p.network.seen["AbortAck"])
        source = p.prefill.room(7, PROMPT)
    assert await code_of(source.matched()) is Code.CAPACITY
    p.decode.pages.give_back(taken, "somebody")
    await success(p, 7)


async def test_pools_that_do_not_fit_are_told_what_differs(p: Pair) -> None:
    other = await p.add_decode(small_layout(page_size=6))
    for _ in range(2):
        with pytest.raises(RefusedError, match="page_size: prefill 4, decode 6"):
            await other.room(7, "sim", PROMPT)
    await until(lambda: not links(other))
    await success(p, 8)


async def test_data_planes_that_differ_are_told_by_name(p: Pair) -> None:
    other = await p.add_decode()
    links_of = other.shell.endpoint.core.links
    address = msgspec.structs.replace(links_of._identity.address, backend="pigeon")
    links_of._identity = msgspec.structs.replace(links_of._identity, address=address)
    with pytest.raises(RefusedError, match="data planes differ: prefill fake, decode pigeon"):
        await other.room(7, "sim", PROMPT)


async def test_pools_that_differ_in_everything_are_told_some_of_it() -> None:
    name = f"layer of a model with a {'very ' * 40}long name"
    layers = [(f"{name} {i}.{kv}", "uint8", (8,)) for i in range(100) for kv in "kv"]
    theirs = [(name, dtype, (16,)) for name, dtype, _ in layers]
    source = build_layout(layers, page_size=4, num_pages=2)
    async with pair(
        source_layout=source, target_layout=build_layout(theirs, page_size=4, num_pages=2)
    ) as p:
        with pytest.raises(RefusedError, match="shape") as caught:
            await p.decode.room(7, "sim", [1])
        assert "and 195 more" in str(caught.value) and len(str(caught.value)) < MAX_TEXT


async def test_nobody_answers(p: Pair) -> None:
    p.network.cut()
    task = asyncio.ensure_future(p.decode.room(7, "sim", PROMPT))
    await until(lambda: links(p.decode))
    p.clock(p.decode).advance(p.timing.register_s + 1)
    with pytest.raises(LostError, match="did not answer"):
        await task
    p.network.mend()
    await success(p)


def test_outcomes_are_bounded_and_told_once_to_the_other_side() -> None:
    meeting: Rendezvous[str] = Rendezvous(limit=2)
    one, two, three, four = (RoomId(number) for number in range(1, 5))
    for room in (one, two, three):
        meeting.record_outcome(room, Side.ENGINE, Cause(Code.DEADLINE, str(room)), forget_at_s=room)
    assert len(meeting) == 2 and meeting.take(one, Side.DECODE) is None
    assert meeting.take(two, Side.DECODE) == Cause(Code.DEADLINE, "2")
    assert meeting.take(two, Side.DECODE) is None
    assert meeting.take(three, Side.ENGINE) is None and not len(meeting)
    meeting.record_outcome(four, Side.DECODE, WHY, 4.0)
    meeting.expire(3.9)
    assert len(meeting) == 1 and meeting.next_expiry_s() == 4.0
    meeting.expire(4.0)
    assert not len(meeting) and meeting.next_expiry_s() == float("inf")


def test_a_half_that_never_comes_is_kept_for_the_other_unless_that_has_ended_too() -> None:
    meeting: Rendezvous[str] = Rendezvous(limit=2)
    one, two, three = (RoomId(number) for number in range(1, 4))
    meeting.record_outcome(one, Side.ENGINE, WHY, 9.0)
    assert len(meeting) == 1
    meeting.record_outcome(one, Side.DECODE, WHY, 9.0)
    assert not len(meeting), "both know"
    meeting.record_outcome(two, Side.ENGINE, WHY, 9.0)
    meeting.record_outcome(three, Side.ENGINE, WHY, 9.0)
    again = Cause(Code.DEADLINE, "of another room of that id")
    meeting.record_outcome(two, Side.ENGINE, again, 10.0)
    meeting.expire(9.0)
    assert len(meeting) == 1 and meeting.take(two, Side.DECODE) == again, (
        "the newest is the last to be forgotten"
    )


async def test_a_late_abort_for_a_room_both_of_whose_halves_have_ended(p: Pair) -> None:
    p.network.hold(Abort)
    p.network.hold(Bootstrap)
    source, target = await p.open(7, PROMPT)
    target.close(WHY)
    source.close(WHY)
    p.network.release(list.reverse)
    await p.rest()
    await success(p, 7)
