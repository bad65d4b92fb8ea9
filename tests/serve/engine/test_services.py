"""The services of both roles over real engines and nodes, with one rank or two."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.http.completion_service import CompletionService, GenerationRequest, ModelCard
from kvflow.serve.http.engine_services import DecodeService, PrefillService
from kvflow.serve.http.group_service import GroupPrefillService, ShardedDecodeService
from kvflow.testing.pair import until
from tests.serve.engine.nodes import nodes
from tests.serve.engine.pair import greedy, prompt_of
from tests.serve.engine.stages import PAGES, Grouped, Stages

CARD = ModelCard(path="m", name="m", context_length=256, vocab_size=512)
NEVER_S = 60.0


class Pair(NamedTuple):
    """A prefill and a decode service over the local plane."""

    prefill: PrefillService
    decode: DecodeService
    page_bytes: int

    async def tokens(self, room: int, prompt: list[int], count: int) -> list[int]:
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
    async with nodes(model, rendezvous_s=rendezvous_s) as found:
        yield Pair(
            PrefillService(CARD, found.prefill, found.sending, NEVER_S),
            decode_service(CARD, found.decode, found.landing, NEVER_S, **more),
            found.decode.pool.layout.page_bytes,
        )


async def begun(service: CompletionService, room: int = 7) -> asyncio.Task[Code]:
    """Begin a request whose other half does not come; return how it ends."""
    leg = asyncio.create_task(code_of(service, request(room, prompt_of(5))))
    await until(lambda: service.report().rooms_by_state != {})
    return leg


async def test_both_report_what_a_request_has_moved(llama: LoadedModel) -> None:
    async with services(llama) as pair:
        before = time.time()
        assert len(await pair.tokens(7, prompt_of(13), 5)) == 5
        await until(
            lambda: pair.prefill.report().pages_at_rest and pair.decode.report().pages_at_rest
        )
        for service in (pair.prefill, pair.decode):
            report = service.report()
            assert report.rooms_ended == {"success": 1}
            assert report.internal_errors == {"handler": 0, "step": 0}
            assert (report.pages_free, report.pages_total, report.rows_total) == (64, 64, 0)
            assert report.bytes_moved == 4 * pair.page_bytes
            assert report.peers_declared_dead == 0 and report.rooms_failed == {}
            [summary] = service.rooms()
            told = [summary[name] for name in ("room", "phase", "ended", "cause")]
            assert told == [7, "success", True, None]
            assert 0 < summary["opened_ago_s"] <= time.time() - before + 1
            assert service.rooms(0) == []
            # Between two looks, it may have got a millisecond older.
            [first], [second] = service.rooms(1), service.rooms(9)
            assert first | {"opened_ago_s": 0} == second | {"opened_ago_s": 0}
            story = service.story(7)
            assert story is not None and story["room"] == 7 and service.story(8) is None
            assert before <= story["opened_unix_s"] <= time.time()
            times = [event["at_s"] for event in story["events"]]
            assert times == sorted(times) == [round(at_s, 6) for at_s in times]
            assert 0 <= times[-1] < NEVER_S
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
        leg = await begun(pair.prefill)
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
        leg = await begun(service)
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
        leg = await begun(pair.decode)
        assert len(pair.decode.rooms(0)) == 1, "an open room was left out"
        pair.decode.break_off(Cause(Code.ENGINE_ERROR, "a shard is gone"))
        assert await leg is Code.ENGINE_ERROR
        [summary] = pair.decode.rooms()
        assert summary["cause"] == "engine_error: a shard is gone"
        after = await code_of(pair.decode, request(8, prompt_of(5)))
        assert after in (Code.SHUTDOWN, Code.ENGINE_ERROR)


@asynccontextmanager
async def of_a_group(
    grouped: Grouped, others: dict[int, Any]
) -> AsyncIterator[tuple[Stages, GroupPrefillService]]:
    async with grouped() as ranks:
        statuses: dict[str, Any] = {"own_status": ranks._status, "others": others}
        yield (
            ranks,
            GroupPrefillService(
                CARD,
                ranks.nodes[0],
                ranks.engine,
                NEVER_S,
                group=ranks.group,
                world=(2, 1),
                **statuses,
            ),
        )


async def test_the_ranks_of_a_prefill_are_reported(grouped: Grouped) -> None:
    statuses: dict[int, Any] = {}
    async with of_a_group(grouped, statuses) as (ranks, service):
        first, second = service.report().ranks
        assert (first.rank, first.up, first.pages_total) == (0, True, PAGES)
        assert (second.rank, second.up) == (1, False)
        counts = {"handler_errors": 4, "failed_steps": 5, "pinned_pages": 6, "tickets": 7}
        statuses[1] = msgspec.structs.replace(ranks._status(), pages_free=3, **counts)
        first, second = service.report().ranks
        assert (second.rank, second.up, second.pid) == (1, True, 1)
        assert (second.pages_free, second.pages_total, second.pinned_pages) == (3, PAGES, 6)
        assert second.internal_errors == {"handler": 4, "step": 5} and second.tickets == 7
        assert (service.report().pp_size, service.report().tp_size) == (2, 1)


async def test_a_group_that_ends_its_requests_ends_those_that_wait_for_their_decode(
    grouped: Grouped,
) -> None:
    async with of_a_group(grouped, {}) as (_, service):
        leg = asyncio.create_task(code_of(service, request(7, prompt_of(5))))
        await until(lambda: bool(service._open))
        service.end_requests()
        assert await leg is Code.SHUTDOWN
        assert await code_of(service, request(8, prompt_of(5))) is Code.SHUTDOWN
        assert service.report().requests_refused == {}
