"""Requests that the router sends to decode alone: which ones, and what happens when decode refuses
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvflow.protocols.errors import Cause, Code
from kvflow.router.blocks import BlockHashes
from kvflow.router.cache_view import CacheView, Prompts
from kvflow.router.feed import Source
from kvflow.router.kvflow_engine import read_identity
from kvflow.router.prefixes import KnownPrefixes
from kvflow.router.prompts import FINE_CHUNKS
from kvflow.serve.engine.scheduler.params import EngineLocalPrompts
from kvflow.testing.pair import until
from tests.fakes.servers import Front, labelled
from tests.fakes.service import NO_CACHE, FakeService, Meeting, Role
from tests.fakes.vllm import FakeVllm, ask, fleet

MOST = 64
SHORT, LONG = list(range(10, 40)), [10 + i % 80 for i in range(100)]  # estimated: 32 and 112
CACHED = {"cache": NO_CACHE, "pages_total": 4096}


class Pair:
    """A prefill and a decode that computes prompts, behind a router that lets it."""

    def __init__(self, prefill: Role, decode: Role, front: Front) -> None:
        self.prefill, self.decode, self.front = prefill, decode, front

    async def send(self, prompt: list[int], **more: Any) -> bool:
        """Return True if decode got this request alone."""
        before = len(self.prefill.service.requests), len(self.decode.service.requests)
        sampling = {"max_new_tokens": 2}
        answer = await self.front.call(
            "POST", "/generate", {"input_ids": prompt, "sampling_params": sampling, **more}
        )
        assert answer.status == 200, answer
        asked = self.decode.service.requests[before[1] :]
        alone = len(self.prefill.service.requests) == before[0]
        assert asked and all((one.room is None) == alone for one in asked)
        assert ("X-Kvflow-Room" in answer.headers) != alone
        return alone

    async def counted(self) -> dict[str, float]:
        text = await self.front.metrics()
        return {
            name: sum(labelled(text, f"kvflow_router_worker_{name}").values())
            for name in ("local_prompts_total", "computing_tokens")
        }


@pytest.fixture
async def local() -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        meeting = Meeting()
        roles = [
            Role(FakeService(role, meeting, pool_tokens=128)) for role in ("prefill", "decode")
        ]
        for role in roles:
            role.service.changed_report = dict(CACHED)
            await stack.enter_async_context(role)
        roles[1].service.changed_report["local_prompts"] = EngineLocalPrompts(chunk=16)
        front = Front(roles[:1], roles[1:], retry_timeout_s=0, local_prefill_tokens=MOST)
        await stack.enter_async_context(front)
        yield Pair(roles[0], roles[1], front)


async def test_short_prompts_stay_at_decode(local: Pair) -> None:
    assert await local.send(SHORT)
    assert not await local.send(LONG)
    assert await local.counted() == {"local_prompts_total": 1, "computing_tokens": 0}


async def test_short_prompts_are_served_without_any_prefill(local: Pair) -> None:
    await local.prefill.stop()
    # The first try finds out. Its prompt is not taken for cached by the tries that follow.
    sampling = {"max_new_tokens": 2}
    for prompt, status in ((LONG, 502), (LONG[1:], 503)):
        document = {"input_ids": prompt, "sampling_params": sampling}
        error = await local.front.refused(status, "/generate", document)
        assert ("no prefill worker is up" in error["message"]) == (status == 503)
    assert all(one.room is not None for one in local.decode.service.requests), "alone"
    for _ in range(2):
        assert await local.send(SHORT)
    local.decode.service.failure = Cause(Code.CAPACITY, "no pages")
    document = {"input_ids": SHORT, "sampling_params": sampling}
    error = await local.front.refused(503, "/generate", document)
    assert "no prefill worker is up" in error["message"]


async def test_a_cached_prompt_counts_by_what_is_not_cached(local: Pair) -> None:
    assert not await local.send(LONG)
    assert await local.send([*LONG, 7, 8, 9])
    local.front.router.workers.of("decode")[0].cache.forget()
    assert not await local.send(LONG)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_that_decode_still_computes_count_too(local: Pair, stream: bool) -> None:
    """A stream's count until its first token, other ones until their answer."""
    service = local.decode.service
    service.gate.clear()
    first = asyncio.create_task(local.front.call("POST", "/generate", _body(SHORT, stream)))
    second = asyncio.create_task(local.front.call("POST", "/generate", _body([9, *SHORT], stream)))
    await until(lambda: service.held == 2)
    assert all(request.room is None for request in service.requests)
    worker = local.front.router.workers.of("decode")[0]
    if stream:
        await until(lambda: not worker.computing)
    else:
        assert worker.computing == 64
    third = asyncio.create_task(local.front.call("POST", "/generate", _body([8, *SHORT], stream)))
    await until(lambda: len(service.requests) == 3)
    assert (service.requests[2].room is None) == stream
    service.gate.set()
    for answer in await asyncio.gather(first, second, third):
        assert answer.status == 200
    assert worker.computing == 0


def _body(prompt: list[int], stream: bool) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}, "stream": stream}


async def test_each_choice_of_each_prompt_is_computed(local: Pair) -> None:
    assert await local.send(SHORT, sampling_params={"max_new_tokens": 1, "n": 2})
    assert len(local.decode.service.requests) == 2
    local.front.router.workers.of("decode")[0].cache.forget()
    assert not await local.send(SHORT, sampling_params={"max_new_tokens": 1, "n": 3})
    local.front.router.workers.of("decode")[0].cache.forget()
    assert await local.send(SHORT, input_ids=[[5, *SHORT[:20]], [6, *SHORT[:20]]])


async def test_logprobs_of_prompts_need_a_pair(local: Pair) -> None:
    assert not await local.send(SHORT, return_logprob=True, logprob_start_len=0)
    assert await local.send(SHORT, return_logprob=True, logprob_start_len=-1)
    await local.front.post("/v1/completions", {"prompt": SHORT, "echo": True, "max_tokens": 1})
    assert local.decode.service.requests[-1].room is not None


async def test_a_client_cannot_choose(local: Pair) -> None:
    assert not await local.send(LONG, compute_prompt=True)
    assert await local.send(SHORT, compute_prompt=False, bootstrap_room=3, bootstrap_host="evil")


@pytest.mark.parametrize("code", [Code.REFUSED, Code.CAPACITY, Code.SHUTDOWN])
async def test_a_pair_serves_what_decode_refuses(local: Pair, code: Code) -> None:
    service = local.decode.service
    honest = service.tokens

    async def refusing(request: Any) -> Any:
        service.failure = Cause(code, "not alone") if request.room is None else None
        async for token in honest(request):
            yield token

    service.tokens = refusing  # type: ignore[method-assign]
    answer = await local.front.call("POST", "/generate", _body(SHORT, False))
    assert answer.status == 200 and answer.json["output_ids"] == [40, 41]
    assert [request.room is None for request in service.requests] == [True, False]
    assert (await local.counted())["computing_tokens"] == 0


@pytest.mark.parametrize(("code", "status"), [(Code.BAD_REQUEST, 400), (Code.ENGINE_ERROR, 500)])
async def test_what_a_pair_would_repeat_is_the_answer(local: Pair, code: Code, status: int) -> None:
    local.decode.service.failure = Cause(code, "so it is")
    answer = await local.front.call("POST", "/generate", _body(SHORT, False))
    assert answer.status == status and not local.prefill.service.requests


async def test_a_client_that_leaves_ends_it_at_decode(local: Pair) -> None:
    service = local.decode.service
    service.gate.clear()
    asking = asyncio.create_task(local.front.call("POST", "/generate", _body(SHORT, False)))
    await until(lambda: service.held == 1)
    asking.cancel()
    assert await asyncio.wait_for(service.ended.get(), 20) == 0
    worker = local.front.router.workers.of("decode")[0]
    await until(lambda: not worker.computing and not worker.running)


async def test_a_decode_that_does_not_compute_gets_rooms(local: Pair) -> None:
    """An old one tells nothing of local prompts."""
    for found in (None, EngineLocalPrompts(chunk=0)):
        local.decode.service.changed_report["local_prompts"] = found
        worker = await local.front.checked(local.decode)
        assert not worker.computes_prompts
        assert not await local.send(SHORT)


@pytest.mark.parametrize("told", [None, 7, {}, {"chunk": None}, {"chunk": "8"}, {"chunk": True}])
def test_what_any_program_says_of_local_prompts(told: Any) -> None:
    assert not read_identity({"local_prompts": told}).computes_prompts
    assert read_identity({"local_prompts": {"chunk": 8}}).computes_prompts


def test_tokens_behind_the_known_chunks() -> None:
    known = KnownPrefixes()
    known.resize(1 << 20)
    short, long = list(range(5)), list(range(100, 100 + FINE_CHUNKS + 3))
    # Each prompt ends with a part of a chunk, which counts as a whole one.
    assert known.missing_tokens([short]) == 6 * 16
    assert known.missing_tokens([short, long]) == 6 * 16 + FINE_CHUNKS * 16 + 4 * 256
    known.note([short[:3], long[:-1]])
    assert known.missing_tokens([short]) == 3 * 16
    assert known.missing_tokens([short, long]) == 3 * 16 + 2 * 256


async def test_with_events_blocks_count() -> None:
    view = CacheView("a worker")
    view.follow(Source("tcp://127.0.0.1:9", None, 16))
    assert view.feed is not None
    hashes: BlockHashes = [1, 2, 3]
    prompts = Prompts([list(range(9))], {16: [hashes]})
    assert view.missing(prompts) == 10 * 16, "the events are not followed yet"
    view.feed.live = True
    assert view.missing(prompts) == 4 * 16
    view.feed.blocks.expect(hashes[:2])
    assert view.missing(prompts) == 2 * 16
    await view.close()


async def test_vllm_decodes_compute_prompts_too() -> None:
    prefill, decode = FakeVllm(), FakeVllm()
    async with fleet([prefill], [decode], local_prefill_tokens=MOST) as front:
        await ask(front)
        assert not prefill.bodies and decode.bodies[0]["kv_transfer_params"] is None
        counted = labelled(await front.metrics(), "kvflow_router_decoded_alone_total")
        assert counted == {("local_prefill",): 1}
