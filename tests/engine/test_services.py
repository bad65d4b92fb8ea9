"""The services of both roles over real engines and nodes: what they answer, refuse and report, with
one rank or two.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.aio import Threads
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.limits import Timing
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.decode import DecodeEngine
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from kvflow.serve.http.completion_service import CompletionService, GenerationRequest, ModelCard
from kvflow.serve.http.engine_services import DecodeService, PrefillService
from kvflow.serve.http.group_service import GroupPrefillService, ShardedDecodeService
from kvflow.testing.pair import until
from tests.engine.pair import greedy, prompt_of
from tests.engine.stages import PAGES, Stages, group

CARD = ModelCard(path="m", name="m", context_length=256, vocab_size=512)
NEVER_S = 60.0


class Pair:
    """A prefill and a decode service over the local plane."""

    def __init__(
        self, prefill: PrefillService, decode: DecodeService, pools: tuple[PagedPool, PagedPool]
    ) -> None:
        self.prefill, self.decode, self.pools = prefill, decode, pools

    async def tokens(self, room: int, prompt: list[int], count: int) -> list[int]:
        """Both legs of a request. Raises: what decode raises."""
        leg = asyncio.create_task(all_of(self.prefill, request(room, prompt, count)))
        try:
            found = await all_of(self.decode, request(room, prompt, count))
        finally:
            await asyncio.wait([leg])
        assert leg.result() == found[:1]
        return found


def request(room: int, prompt: list[int], count: int = 4, prefill: str = "p") -> GenerationRequest:
    ids = np.array(prompt, dtype=np.uint32)
    return GenerationRequest(room=room, prefill=prefill, prompt=ids, params=greedy(count))


async def all_of(service: CompletionService, asked: GenerationRequest) -> list[int]:
    return [out.token_id async for out in service.tokens(asked)]


async def code_of(service: CompletionService, asked: GenerationRequest) -> Code:
    with pytest.raises(KvflowError) as caught:
        await all_of(service, asked)
    return caught.value.code


@asynccontextmanager
async def services(
    model: LoadedModel,
    decode_service: Any = DecodeService,
    *,
    rendezvous_s: float = NEVER_S,
    **more: Any,
) -> AsyncIterator[Pair]:
    layout = build_layout(model.streams, page_size=4, num_pages=64, fingerprint=model.fingerprint)
    async with AsyncExitStack() as stack:
        pools = PagedPool.allocate(layout, shared=True), PagedPool.allocate(layout, shared=True)
        threads = Threads("model"), Threads("model")
        for one in (*pools, *threads):
            stack.callback(one.close)

        async def resolve(_: str) -> Sequence[RankInfo]:
            return [source.info]

        source = PrefillNode(pools[0], "local", timing=Timing(rendezvous_s=rendezvous_s))
        target = DecodeNode(pools[1], "local", resolve=resolve)
        engines = (
            PrefillEngine(model, pools[0], pools[0].pages, threads[0]),
            DecodeEngine(model, pools[1], pools[1].pages, threads[1]),
        )
        for part in (source, target, *engines):
            await part.start()
            stack.push_async_callback(part.close)
        yield Pair(
            PrefillService(CARD, source, engines[0], NEVER_S),
            decode_service(CARD, target, engines[1], NEVER_S, **more),
            pools,
        )


async def test_both_report_what_a_request_has_moved(llama: LoadedModel) -> None:
    async with services(llama) as pair:
        before = time.time()
        assert len(await pair.tokens(7, prompt_of(13), 5)) == 5
        await until(
            lambda: pair.prefill.report().pages_at_rest and pair.decode.report().pages_at_rest
        )
        for service in (pair.prefill, pair.decode):
            report = service.report()
            assert report.rooms_ended == {"success": 1} and report.internal_errors == {
                "handler": 0,
                "step": 0,
            }
            assert (report.pages_free, report.pages_total, report.rows_total) == (64, 64, 0)
            assert report.bytes_moved == 4 * pair.pools[0].layout.page_bytes
            assert report.peers_declared_dead == 0 and report.rooms_failed == {}
            [summary] = service.rooms()
            assert (summary["room"], summary["phase"], summary["ended"], summary["cause"]) == (
                7,
                "success",
                True,
                None,
            )
            story = service.story(7)
            assert story is not None and story["room"] == 7 and service.story(8) is None
            assert before <= story["opened_unix_s"] <= time.time()
            times = [event["at_s"] for event in story["events"]]
            assert (
                times == sorted(times) == [round(at_s, 6) for at_s in times]
                and 0 <= times[-1] < NEVER_S
            )
            assert all(event["what"] and event["phase"] for event in story["events"])
        assert pair.decode.report().decode_steps == 4 and pair.prefill.report().decode_steps is None


async def test_a_room_that_fails_is_counted_by_where_and_why(llama: LoadedModel) -> None:
    async with services(llama, rendezvous_s=0.01) as pair:
        pair.decode._node.counts.declared_dead = 2
        assert await code_of(pair.decode, request(7, prompt_of(5))) is Code.RENDEZVOUS
        report = pair.decode.report()
        assert report.peers_declared_dead == 2 and report.rooms_failed == {
            ("bootstrap", "rendezvous"): 1
        }


async def test_what_fails_before_it_has_a_room_is_counted_as_refused(llama: LoadedModel) -> None:
    async with services(llama) as pair:
        leg = asyncio.create_task(code_of(pair.prefill, request(7, prompt_of(5))))
        await until(lambda: pair.prefill.report().rooms_by_state != {})
        assert await code_of(pair.prefill, request(7, prompt_of(5))) is Code.ROOM_IN_USE
        assert pair.prefill.report().requests_refused == {"room_in_use": 1}
        assert await code_of(pair.decode, request(7, prompt_of(5), prefill="")) is Code.BAD_REQUEST
        assert pair.decode.report().requests_refused == {"bad_request": 1}
        pair.prefill.end_requests()
        assert await leg is Code.SHUTDOWN


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_when_a_worker_ends_its_requests_none_begins_any_more(
    llama: LoadedModel, role: str
) -> None:
    async with services(llama) as pair:
        service: CompletionService = pair.prefill if role == "prefill" else pair.decode
        leg = asyncio.create_task(code_of(service, request(7, prompt_of(5))))
        await until(lambda: service.report().rooms_by_state != {})
        service.end_requests()
        assert await leg is Code.SHUTDOWN
        assert await code_of(service, request(8, prompt_of(5))) is Code.SHUTDOWN


async def test_an_error_of_decodes_engine_is_counted_where_the_room_had_succeeded(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with services(llama) as pair:
        monkeypatch.setattr(pair.decode._engine._burst, "run", lambda *_: 1 / 0)
        leg = asyncio.create_task(all_of(pair.prefill, request(7, prompt_of(5))))
        assert await code_of(pair.decode, request(7, prompt_of(5))) is Code.ENGINE_ERROR
        await asyncio.wait([leg])
        assert pair.decode.report().rooms_failed == {("engine", "engine_error"): 1}
        await until(lambda: pair.decode.report().pages_at_rest)


async def test_the_shards_of_a_decode_are_reported_and_end_as_one(llama: LoadedModel) -> None:
    other = SimpleNamespace(number=1, is_up=False, pid=0)
    shards = SimpleNamespace(shards=[other], sequences=3)
    async with services(llama, ShardedDecodeService, shards=shards) as pair:
        assert isinstance(pair.decode, ShardedDecodeService)
        first, second = pair.decode.report().ranks
        assert (first.rank, first.up, first.pid, first.pages_total) == (0, True, os.getpid(), 64)
        assert (second.rank, second.up, second.pages_total) == (1, False, 0)
        other.is_up, other.pid = True, 42
        second = pair.decode.report().ranks[1]
        assert (second.up, second.pid, second.requests, second.pages_free) == (True, 42, 3, 64)
        leg = asyncio.create_task(code_of(pair.decode, request(7, prompt_of(5))))
        await until(lambda: pair.decode.report().rooms_by_state != {})
        pair.decode.break_off(Cause(Code.ENGINE_ERROR, "a shard is gone"))
        assert await leg is Code.ENGINE_ERROR
        [summary] = pair.decode.rooms()
        assert summary["cause"] == "engine_error: a shard is gone"
        assert await code_of(pair.decode, request(8, prompt_of(5))) in (
            Code.SHUTDOWN,
            Code.ENGINE_ERROR,
        )


@pytest.fixture
async def grouped(stages: list[LoadedModel], llama: LoadedModel) -> AsyncIterator[Stages]:
    async with group(stages, llama) as made:
        yield made


def service_of(grouped: Stages, others: dict[int, Any]) -> GroupPrefillService:
    node, engine, own = grouped.nodes[0], grouped.engine, grouped._status
    return GroupPrefillService(
        CARD,
        node,
        engine,
        NEVER_S,
        group=grouped.group,
        own_status=own,
        others=others,
        world=(2, 1),
    )


async def test_the_ranks_of_a_prefill_are_reported(grouped: Stages) -> None:
    statuses: dict[int, Any] = {}
    service = service_of(grouped, statuses)
    first, second = service.report().ranks
    assert (first.rank, first.up, first.pages_total) == (0, True, PAGES)
    assert (second.rank, second.up) == (1, False)
    statuses[1] = msgspec.structs.replace(
        grouped._status(), pages_free=3, handler_errors=4, failed_steps=5, pinned_pages=6, tickets=7
    )
    first, second = service.report().ranks
    assert (second.rank, second.up, second.pid) == (1, True, 1)
    assert (second.pages_free, second.pages_total, second.pinned_pages) == (3, PAGES, 6)
    assert second.internal_errors == {"handler": 4, "step": 5} and second.tickets == 7
    assert (service.report().pp_size, service.report().tp_size) == (2, 1)


async def test_a_group_that_ends_its_requests_ends_those_that_wait_for_their_decode(
    grouped: Stages,
) -> None:
    service = service_of(grouped, {})
    leg = asyncio.create_task(code_of(service, request(7, prompt_of(5))))
    await until(lambda: bool(service._open))
    service.end_requests()
    assert await leg is Code.SHUTDOWN
    assert await code_of(service, request(8, prompt_of(5))) is Code.SHUTDOWN
    assert service.report().requests_refused == {}, "it was opened, or refused by the group itself"
