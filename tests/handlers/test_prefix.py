"""Decode has the beginning of the prompt already: only the rest travels, or no page at all."""

from __future__ import annotations

import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.protocols.errors import Code, KvflowError, MisuseError
from kvflow.protocols.wire.messages import Bootstrap, ChunkDone
from kvflow.testing.pair import PAGE_SIZE, Pair, pair, until
from tests.handlers.scenes import WHY, assert_same_bytes, code_of, finish, record_of


@pytest.mark.parametrize(
    ("tokens", "prefix", "pages"),
    [
        (5 * PAGE_SIZE, 0, 5),
        (5 * PAGE_SIZE, PAGE_SIZE, 4),
        (5 * PAGE_SIZE, 4 * PAGE_SIZE, 1),
        (5 * PAGE_SIZE - 1, 4 * PAGE_SIZE, 1),
        (5 * PAGE_SIZE, 5 * PAGE_SIZE, 0),
        (5 * PAGE_SIZE - 1, 5 * PAGE_SIZE - 1, 0),
        (1, 1, 0),
    ],
)
@pytest.mark.parametrize("chunks", [1, 2])
async def test_the_rest_travels(p: Pair, tokens: int, prefix: int, pages: int, chunks: int) -> None:
    source = p.prefill.room(7, range(tokens))
    target = await p.decode.room(7, "sim", range(tokens), prefix_tokens=prefix)
    assert await source.matched() == source.prefix_tokens == prefix
    assert len(target.pages) == pages
    assert source.bytes_total == pages * p.prefill.pool.layout.page_bytes
    sent = p.send_all(source, chunks=min(chunks, max(pages, 1)))
    assert await target.landed() == b"handoff"
    await source.done()
    if pages:
        assert_same_bytes(p, sent, target)
    assert len(target.keep("sequence")) == pages
    p.decode.pages.give_back(target.pages, "sequence")
    await target.released()
    await p.rest()
    assert p.decode.counts.endings == p.prefill.counts.endings == {"success": 1}


async def without_pages(p: Pair) -> tuple[PrefillRoom, DecodeRoom]:
    source = p.prefill.room(7, range(8))
    target = await p.decode.room(7, "sim", range(8), prefix_tokens=8)
    assert await source.matched() == source.prefix_tokens == 8
    return source, target


async def test_a_room_of_no_pages_ends_after_its_engines_send(p: Pair) -> None:
    ended = list[bool]()
    source, target = await without_pages(p)
    source.on_end(lambda: ended.append(source.ended))
    p.send_all(source)
    assert not source.ended and not ended
    await source.done()
    assert ended == [True] and await target.landed() == b"handoff"
    target.close()


@pytest.mark.parametrize("lost", [Bootstrap, ChunkDone], ids=lambda kind: kind.__name__)
async def test_a_room_of_no_pages_survives_a_lost_message(p: Pair, lost: type) -> None:
    p.network.drop(lost)
    source, target = await without_pages(p)
    await finish(p, source, target)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_room_of_no_pages_is_ended(p: Pair, side: str) -> None:
    source, target = await without_pages(p)
    (source if side == "prefill" else target).close(WHY)
    assert await code_of(source.done()) is await code_of(target.landed()) is WHY.code
    await target.released()
    await source.released()


async def test_a_room_of_no_pages_is_opened_on_a_full_pool(p: Pair) -> None:
    taken = p.decode.pages.take(64, "another user")
    source = p.prefill.room(7, range(8))
    target = await p.decode.room(7, "sim", range(8), prefix_tokens=8)
    await finish(p, source, target)
    p.decode.pages.give_back(taken, "another user")


async def test_a_lost_room_of_no_pages_quarantines_none(p: Pair) -> None:
    _, target = await without_pages(p)
    await p.crash(p.prefill)
    assert await code_of(target.landed()) is Code.PEER_LOST
    assert p.decode.quarantined_pages == 0
    await target.released()
    await until(lambda: not p.left())


async def test_every_rank_sends_the_rest() -> None:
    async with pair(ranks=2) as p:
        sources = [node.room(7, range(12)) for node in p.prefills]
        target = await p.decode.room(7, "sim", range(12), prefix_tokens=8)
        for node, source in zip(p.prefills, sources, strict=True):
            assert await source.matched() == 8
            p.send_all(source, node=node)
        assert await target.landed() == b"handoff" and len(target.pages) == 1
        target.close()
        await p.rest()


@pytest.mark.parametrize("pages", [0, 1, 2])
@pytest.mark.parametrize("linked", [False, True])
async def test_what_decode_finds_after_it_has_announced_a_room_need_not_travel(
    p: Pair, pages: int, linked: bool
) -> None:
    prompt = range(2 * PAGE_SIZE)
    source = p.prefill.room(7, prompt)
    target = p.decode.announce(7, "sim", prompt)
    if linked:
        await until(lambda: source.phase.name == "ANNOUNCED" and record_of(target).linked)
    assert target.num_pages == 2
    await target.offer(prefix_tokens=pages * PAGE_SIZE)
    assert await source.matched() == pages * PAGE_SIZE
    assert target.num_pages == len(target.pages) == 2 - pages
    sent = p.send_all(source)
    assert await target.landed() == b"handoff"
    await source.done()
    if pages < 2:
        assert_same_bytes(p, sent, target)
    target.close()


@pytest.mark.parametrize("prefix", [PAGE_SIZE - 1, 3 * PAGE_SIZE, -PAGE_SIZE])
@pytest.mark.parametrize("linked", [False, True])
async def test_a_prefix_that_cannot_be_ends_the_room_and_no_other(
    p: Pair, prefix: int, linked: bool
) -> None:
    prompt = range(2 * PAGE_SIZE)
    source, target = p.prefill.room(7, prompt), p.decode.announce(7, "sim", prompt)
    if linked:
        await until(lambda: source.phase.name == "ANNOUNCED" and record_of(target).linked)
    with pytest.raises(MisuseError, match="prefix"):
        await target.offer(prefix_tokens=prefix)
    with pytest.raises(KvflowError):
        await source.matched()
    target.close()
    other, theirs = p.prefill.room(8, prompt), await p.decode.room(8, "sim", prompt)
    await finish(p, other, theirs)
