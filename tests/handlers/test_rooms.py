"""Rooms that succeed, what both ends guarantee, and the errors of misuse."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NoReturn

import pytest

from kvflow.protocols.errors import CapacityError, Code, LayoutError, MisuseError, TransferError
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.wire.messages import MAX_HANDOFF_BYTES
from kvflow.testing.pair import PAGE_SIZE, Pair, pair, until
from tests.handlers.scenes import (
    PROMPT,
    WHY,
    assert_same_bytes,
    code_of,
    finish,
    matched,
    midway,
    offered,
    success,
)


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_room_moves_its_pages(p: Pair, chunks: int, first: str) -> None:
    if first == "prefill":
        source, target = await p.open(7, PROMPT)
    else:
        target = await offered(p)
        source = p.prefill.room(7, PROMPT)
    assert await source.matched() == 0
    assert not any(half.ended for half in (source, target))
    pages = p.send_all(source, chunks=chunks)
    assert await target.landed() == await target.landed() == b"handoff"
    await source.done()
    assert source.ended and target.ended and source.bytes_landed == source.bytes_total > 0
    assert_same_bytes(p, pages, target)
    seen = p.network.seen  # told once, and again only when a slow decode asked
    assert chunks <= seen["ChunkDone"] <= chunks * (1 + seen["Resync"])
    target.close()
    await p.rest()
    assert p.decode.counts.endings == p.prefill.counts.endings == {"success": 1}
    assert p.decode.counts.bytes_moved == p.prefill.counts.bytes_moved == source.bytes_total


@pytest.mark.parametrize("tokens", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 64 * PAGE_SIZE])
async def test_a_page_for_each_page_of_the_prompt(p: Pair, tokens: int) -> None:
    source, target = await p.open(7, range(tokens))
    await source.matched()
    assert (
        len(target.pages)
        == -(-tokens // PAGE_SIZE)
        == source.bytes_total // p.prefill.pool.layout.page_bytes
    )
    await finish(p, source, target)


async def test_many_rooms_at_once_in_two_decodes(p: Pair) -> None:
    other = await p.add_decode()

    async def one(room: int) -> None:
        source = p.prefill.room(room, PROMPT)
        target = await (other if room % 2 else p.decode).room(room, "sim", PROMPT)
        await source.matched()
        pages = p.send_all(source, chunks=room % 3 + 1, handoff=str(room).encode())
        assert await target.landed() == str(room).encode()
        pool = (other if room % 2 else p.decode).pool
        assert (pool.pages_bytes(target.pages) == p.prefill.pool.pages_bytes(pages)).all()
        target.close()

    for _ in range(4):
        await asyncio.gather(*(one(room) for room in range(10)))
    assert p.prefill.counts.endings == {"success": 40}


async def test_every_rank_must_finish() -> None:
    async with pair(ranks=3) as p:
        sources = [node.room(7, PROMPT) for node in p.prefills]
        target = await p.decode.room(7, "sim", PROMPT)
        for node, source in zip(p.prefills, sources, strict=True):
            await source.matched()
            assert not target.ended
            p.send_all(
                source, node=node, handoff=b"" if node is p.prefill else b"from another rank"
            )
            await source.done()
        assert await target.landed() == b"from another rank"
        target.close()
        await p.rest()


async def test_kept_pages_belong_to_their_keeper(p: Pair) -> None:
    source, target = await matched(p)
    once = r"room 7: pages can be kept once, after landed\(\)"
    with pytest.raises(MisuseError, match=once):
        target.keep("sequence")
    p.send_all(source)
    await target.landed()
    pages = target.keep("sequence")
    assert p.decode.pool.pages.owned() == {"sequence": len(pages)}
    with pytest.raises(MisuseError, match=once):
        target.keep("another")
    target.close()
    assert p.decode.pool.pages.owned() == {"sequence": len(pages)}
    p.decode.pages.give_back(pages, "sequence")


async def test_leaving_the_context_closes(p: Pair) -> None:
    source, target = await matched(p)
    async with source, target:
        p.send_all(source)
        await target.landed()
    await p.rest()
    source, target = await matched(p, 8)
    async with target:
        pass
    assert target.ended or target.phase.name == "DRAINING"
    assert await code_of(source.done()) is Code.CLIENT_GONE


async def test_the_end_is_called_back_once_also_late(p: Pair) -> None:
    source, target = await matched(p)
    called: list[str] = []
    source.on_end(lambda: called.append("source"))
    target.on_end(lambda: called.append("target"))
    assert not called
    await finish(p, source, target)
    target.on_end(lambda: called.append("late target"))
    source.on_end(lambda: called.append("late source"))
    source.close()
    await p.rest()
    assert sorted(called) == ["late source", "late target", "source", "target"]


async def test_both_ends_tell_their_story(p: Pair) -> None:
    source, target = await midway(p)
    source.close(WHY)
    await code_of(target.landed())
    assert any(WHY.text in line.text for line in source.story())
    assert any(WHY.text in line.text for line in target.story())
    assert [line.at_s for line in source.story()] == sorted(line.at_s for line in source.story())


THREE_PAGES = range(10)  # in pages of 4 tokens
SENDS: list[tuple[Any, dict[str, Any], str]] = [
    ([5.0], {}, r"pages must be a list of integers, not shape \(1,\) of float64"),
    (["5"], {}, "pages must be a list of integers, not shape"),
    ([[5]], {}, r"pages must be a list of integers, not shape \(1, 1\) of int64"),
    (5, {}, r"pages must be a list of integers, not shape \(\) of int64"),
    ([64], {}, r"page 64 is outside 0\.\.63"),
    ([-1, 3], {}, r"page -1 is outside 0\.\.63"),
    ([1 << 40], {}, rf"page {1 << 40} is outside 0\.\.63"),
    ([0, 1, 2, 3], {}, "chunk of 4 pages, 3 pages of decode's are left"),
    ([0, 1], {"last": True}, "chunk of 2 pages, 3 pages of decode's are left"),
    ([], {}, "a chunk without pages that is not the last"),
    ([0, 1], {"handoff": b"early"}, "handoff of 5 bytes with a chunk that is not the last"),
]


@pytest.mark.parametrize(("pages", "more", "text"), SENDS)
async def test_a_chunk_that_cannot_be_sent(
    p: Pair, pages: Any, more: dict[str, Any], text: str
) -> None:
    source, target = await p.open(7, THREE_PAGES)
    await source.matched()
    mine = p.prefill.pages.take(4, "engine")
    with pytest.raises(MisuseError, match=f"room 7: {text}"):
        source.send(pages, **more)
    # Nothing was queued, and a list is as good as an array.
    source.send(mine[:3].tolist(), last=True)
    assert await target.landed() == b""
    p.prefill.pages.give_back(mine, "engine")
    target.close()


async def test_send_too_early_too_late_and_of_pages_without_an_owner(p: Pair) -> None:
    source = p.prefill.room(7, THREE_PAGES)
    with pytest.raises(MisuseError, match=r"room 7: send\(\) before matched\(\)"):
        source.send([0])
    with pytest.raises(MisuseError, match="room 7 is in use"):
        p.prefill.room(7, THREE_PAGES)
    target = await p.decode.room(7, p.ranks, THREE_PAGES)
    await source.matched()
    with pytest.raises(MisuseError, match="hold: page 0 has no owner"):
        source.send([0])
    mine = p.prefill.pages.take(3, "engine")
    source.send(mine, last=True)
    with pytest.raises(MisuseError, match=r"room 7: send\(\) after the last chunk"):
        source.send([0])
    await target.landed()
    target.close()
    await source.released()
    p.prefill.pages.give_back(mine, "engine")


async def test_the_largest_hand_over_is_sent_and_one_byte_more_is_refused(p: Pair) -> None:
    source, target = await matched(p)
    mine = p.prefill.pages.take(5, "engine")
    text = f"bytes of handoff: asked for {MAX_HANDOFF_BYTES + 1}, limit {MAX_HANDOFF_BYTES}"
    with pytest.raises(CapacityError, match=text):
        source.send(mine, last=True, handoff=b"x" * (MAX_HANDOFF_BYTES + 1))
    assert source.phase.name == "WAITING_FOR_INPUT"
    source.send(mine, last=True, handoff=b"x" * MAX_HANDOFF_BYTES)
    assert len(await target.landed()) == MAX_HANDOFF_BYTES
    target.close()
    await source.released()
    p.prefill.pages.give_back(mine, "engine")
    with pytest.raises(MisuseError):
        source.send(mine[:1])


async def test_a_write_the_plane_refuses_fails_the_room_and_leaves_nothing_behind(p: Pair) -> None:
    """What the caller can get wrong was checked before, so the room ends."""
    source, target = await matched(p)
    mine = p.prefill.pages.take(5, "engine")
    (route,) = p.prefill.shell.routes.values()
    write, route.write = route.write, _refuse  # type: ignore[method-assign]
    ended: list[bool] = []
    source.on_end(lambda: ended.append(source.ended))
    source.send(mine, last=True)
    assert not source.ended and not ended, "it ended inside of its engine's send"
    with pytest.raises(TransferError, match="planned badly"):
        await source.done()
    assert not p.prefill.pool.pages.held_pages
    assert source.phase.name == "ABORTED"
    assert ended == [True]
    with pytest.raises(TransferError, match="planned badly"):
        await target.landed()
    route.write = write  # type: ignore[method-assign]
    p.prefill.pages.give_back(mine, "engine")
    await p.rest()
    await success(p, 8)


def _refuse(source_pages: PageIndices, target_pages: PageIndices) -> NoReturn:
    raise LayoutError("planned badly")


async def test_a_callback_that_raises_ends_no_room_halfway(p: Pair) -> None:
    source, target = await matched(p)
    called: list[str] = []
    for session, name in ((source, "source"), (target, "target")):
        session.on_end(_raise)
        session.on_end(partial(called.append, name))
    await finish(p, source, target)
    await until(lambda: sorted(called) == ["source", "target"])
    for counts in (p.prefill.counts, p.decode.counts):
        assert counts.handler_errors == 1
        counts.handler_errors = 0


def _raise() -> None:
    raise ValueError("a user's mistake")
