"""The decode engine: batches, endings, admission, and pages that come home whatever happens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvflow.node.handoff import HandOff
from kvflow.protocols.errors import (
    AbortedError,
    CapacityError,
    Cause,
    Code,
    KvflowError,
    MisuseError,
    WireError,
)
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.loop import EngineLoop
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.telemetry.histogram import BOOTSTRAP_SECONDS, QUEUE_SECONDS
from tests.serve.engine.pair import EnginePair, Watched, greedy, prompt_of, tokens_of, until
from tests.serve.engine.tiny_models import Generated


def test_seconds_in_the_queue_are_counted_up_to_ascending_bounds() -> None:
    bounds = EngineLoop("decode").queue_seconds.bounds
    assert list(bounds) == sorted({*QUEUE_SECONDS, *BOOTSTRAP_SECONDS})


async def test_requests_join_and_leave_a_running_batch(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        alone = [await pair.tokens(prompt_of(n, n), greedy(n)) for n in (5, 30, 12)]
        steps = Watched(pair.decode._runner)
        among = await asyncio.gather(
            *(pair.tokens(prompt_of(n, n), greedy(n)) for n in (5, 30, 12))
        )
        assert among == alone
    widths = list(map(len, steps.steps))
    assert max(widths) > 1 and widths[-1] == 1 and sum(widths) == 4 + 29 + 11


async def test_every_request_owns_its_pages_alone(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        pair.decode.pause()
        asked = asyncio.create_task(
            pair.tokens_of_all([prompt_of(20, n) for n in range(3)], greedy(4))
        )
        await until(lambda: pair.decode.load().running == 3)
        assert sorted(pair.target.pages.owned().values()) == [2, 2, 2]
        pair.decode.resume()
        await asked


async def test_what_ends_a_request(llama: LoadedModel) -> None:
    prompt = prompt_of(20)
    async with EnginePair(llama) as pair:
        outs = await pair.outputs(prompt, greedy(8))
        tokens = [o.token_id for o in outs]
        assert [o.finish_reason for o in outs] == [None] * 7 + ["length"]
        (only,) = await pair.outputs(prompt, greedy(1))
        assert (only.token_id, only.finish_reason) == (tokens[0], "length")
        first = await pair.outputs(prompt, greedy(8, stop_token_ids=(tokens[0],)))
        assert [(o.finish_reason, o.matched_stop) for o in first] == [("stop", tokens[0])]
        third = await pair.outputs(prompt, greedy(8, stop_token_ids=(tokens[2],)))
        assert len(third) == tokens.index(tokens[2]) + 1 and third[-1].matched_stop == tokens[2]
    async with EnginePair(replace(llama, eos_ids=frozenset({tokens[1]}))) as pair:
        assert await pair.tokens(prompt, greedy(8)) == tokens[: tokens.index(tokens[1]) + 1]
        assert await pair.tokens(prompt, greedy(8, ignore_eos=True)) == tokens


async def test_new_tokens_are_cut_to_the_context(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        outs = await pair.outputs(prompt_of(505), greedy(100))
        assert len(outs) == 7 and outs[-1].finish_reason == "length"
        with pytest.raises(CapacityError, match="asked for 512, limit 511"):
            pair.decode.check(prompt_of(512), greedy(1))


async def test_what_can_never_run_is_refused_at_once(llama: LoadedModel) -> None:
    async with EnginePair(llama, num_pages=8) as pair:
        for length, count, said in (
            (200, 1, "prompt tokens in the KV pool .*: asked for 200, limit 128"),
            (100, 60, r"prompt \+ max_new_tokens in the KV pool .*: asked for 160, limit 129"),
            (100, 30, "asked for 130, limit 129"),
        ):
            with pytest.raises(CapacityError, match=said):
                await pair.decode.admit(prompt_of(length), greedy(count))
        assert pair.decode.limits.max_tokens == 129, "the last token is never fed back"
        assert len(await pair.tokens(prompt_of(100), greedy(29))) == 29, "8 pages exactly"


async def test_nobody_starves_in_a_small_pool(llama: LoadedModel, generated: Generated) -> None:
    prompts = [prompt_of(20 + n, n) for n in range(12)]
    # At most two of the requests fit at once, and none is retracted.
    async with EnginePair(llama, page_size=4, num_pages=32) as pair:
        found = await pair.tokens_of_all(prompts, greedy(30))
        assert not pair.decode.retraction.retracts
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == generated("llama", prompt, 30, tokens)


async def test_without_admission_a_full_pool_ends_a_request_instead_of_all(
    llama: LoadedModel,
) -> None:
    async with EnginePair(llama, page_size=4, num_pages=20, source_pages=64) as pair:

        async def one(n: int) -> int:
            prompt = prompt_of(20, n)
            room = pair.room(prompt)
            await asyncio.wait([pair.send(room, prompt, greedy(20))])
            return len(await tokens_of(pair.decode.generate(room, prompt, greedy(20))))

        found = await asyncio.gather(*(one(n) for n in range(4)), return_exceptions=True)
        assert 20 in found
        assert all(f == 20 or isinstance(f, CapacityError) for f in found)


@pytest.mark.parametrize("how", ["closed", "cancelled", "engine closed"])
async def test_pages_of_a_dropped_request_are_free_when_its_step_has_ended(
    how: str, llama: LoadedModel
) -> None:
    async with EnginePair(llama) as pair:
        steps = Watched(pair.decode._runner, held=True)
        stream, _ = await pair.begun(prompt_of(40), greedy(9))
        await until(steps.entered.is_set)
        closing: asyncio.Future[Any] | None = None
        if how == "closed":
            await stream.aclose()
        elif how == "cancelled":
            reader = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
            assert reader.cancelled()
        else:
            closing = asyncio.ensure_future(pair.decode.close())
            with pytest.raises(AbortedError, match="closing"):
                await anext(stream)
        assert pair.target.pages.returning_pages == 3 and pair.decode.load().running == 0
        steps.gate.set()
        if closing is not None:
            await closing
        await until(pair.target.pages.at_rest)
        assert pair.rooms[0].closed


async def test_a_failed_room_is_told_and_its_pages_come_home(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        room = pair.room(prompt_of(40))
        stream = pair.decode.generate(room, prompt_of(40), greedy(9))
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        room.fail(Cause(Code.TRANSFER_ERROR, "the wire broke"))
        with pytest.raises(KvflowError, match="the wire broke"):
            await reader


async def test_a_reader_that_leaves_before_landing_aborts_the_room(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        room = pair.room(prompt_of(40))
        admission = await pair.decode.admit(prompt_of(40), greedy(9))
        reader = asyncio.ensure_future(
            anext(pair.decode.generate(room, prompt_of(40), greedy(9), admission))
        )
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader])
        assert room.cause is not None and room.cause.code is Code.CLIENT_GONE


def handed_over(**changes: Any) -> bytes:
    return HandOff(**{"first_token": 1, "prompt_tokens": 40, **changes}).encode()


@pytest.mark.parametrize(
    ("handoff", "text"),
    [
        (b"junk", "cannot decode a 4-byte handoff"),
        (handed_over(prompt_tokens=39), "the handoff is for a prompt of 39 tokens, not 40"),
        (handed_over(first_token=512), r"the handoff's first token 512 is outside 0\.\.511"),
        (handed_over(top_logprobs=((-1, -0.5),)), r"tokens outside 0\.\.511"),
        (handed_over(top_logprobs=((512, -0.5),)), r"tokens outside 0\.\.511"),
    ],
)
async def test_a_handoff_for_something_else_ends_the_request(
    handoff: bytes, text: str, llama: LoadedModel
) -> None:
    async with EnginePair(llama) as pair:
        room = pair.room(prompt_of(40))
        room.hand_over(handoff)
        with pytest.raises(WireError, match=text):
            await tokens_of(pair.decode.generate(room, prompt_of(40), greedy(9)))
        assert room.closed


async def test_a_failing_step_ends_its_requests_and_nothing_else(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EnginePair(llama) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(pair.decode._runner, "forward", lambda rows: 1 // 0)
            with pytest.raises(
                KvflowError, match="decode step failed: ZeroDivisionError"
            ) as caught:
                await pair.tokens(prompt_of(30), greedy(5))
        assert caught.value.code is Code.ENGINE_ERROR
        assert len(await pair.tokens(prompt_of(30), greedy(5))) == 5
        assert pair.decode.failed_steps == 1 and pair.decode.healthy


async def test_what_is_refused_before_it_is_admitted(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        with pytest.raises(MisuseError, match="empty"):
            await pair.decode.admit([], SamplingParams())
        await pair.decode.close()
        assert not pair.decode.healthy
        with pytest.raises(AbortedError, match="closing"):
            await pair.decode.admit(prompt_of(3), SamplingParams())


@pytest.mark.parametrize("stage", ["waiting for pages", "landing", "loop gone"])
async def test_an_engine_that_ends_leaves_nobody_waiting(stage: str, llama: LoadedModel) -> None:
    async with EnginePair(llama, num_pages=8) as pair:
        room = pair.room(prompt_of(40))
        if stage == "waiting for pages":
            request: asyncio.Future[Any] = asyncio.ensure_future(
                pair.decode.admit(prompt_of(100), greedy(5))
            )
        else:
            request = asyncio.ensure_future(
                anext(pair.decode.generate(room, prompt_of(40), greedy(9)))
            )
        await asyncio.sleep(0)
        if stage == "loop gone":
            assert pair.decode._task is not None
            pair.decode._task.cancel()
            await asyncio.wait([pair.decode._task])
            pair.decode._task = None
        else:
            await pair.decode.close()
        if stage != "waiting for pages":
            room.hand_over(handed_over())
        with pytest.raises(AbortedError):
            await request
        assert not pair.decode.healthy


async def test_pages_of_a_finished_request_do_not_wait_for_its_reader(llama: LoadedModel) -> None:
    async with EnginePair(llama, num_pages=8) as pair:
        slow, _ = await pair.begun(prompt_of(40), greedy(20))
        await until(lambda: not pair.decode.load().running)
        await until(lambda: pair.home)  # its last token is made, though nobody has read it
        assert len(await pair.tokens(prompt_of(100), greedy(29))) == 29, "the whole pool"
        assert len(await tokens_of(slow)) == 19


async def test_the_share_of_new_tokens_decays_with_every_step(llama: LoadedModel) -> None:
    async with EnginePair(llama, new_token_ratio=0.5) as pair:
        counted, stepped = list[int](), pair.decode._ratio.stepped

        def counting(steps: int) -> None:
            counted.append(steps)
            stepped(steps)

        pair.decode._ratio.stepped = counting  # type: ignore[method-assign]
        await pair.tokens(prompt_of(8), greedy(12))
        assert sum(counted) == pair.decode.steps > 0
