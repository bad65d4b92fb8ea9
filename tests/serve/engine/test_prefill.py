"""The prefill engine: what leaves when, who shares a step, and how requests end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvflow.protocols.errors import AbortedError, CapacityError, Code, KvflowError, MisuseError
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.params import SamplingParams
from tests.serve.engine.pair import EnginePair, FakeRoom, Watched, greedy, prompt_of, until
from tests.serve.engine.tiny_models import Loaded


async def steps_of(
    model: LoadedModel, lengths: tuple[int, ...], *priorities: int, **options: Any
) -> list[list[int]]:
    async with EnginePair(model, **options) as pair:
        steps = Watched(pair.prefill.steps.runner)
        asked = priorities or (0,) * len(lengths)
        legs = [
            pair.send(pair.room(prompt), prompt, greedy(1, priority=priority))
            for prompt, priority in zip((prompt_of(n, n) for n in lengths), asked, strict=True)
        ]
        await asyncio.gather(*legs)
        return steps.new


async def test_prompts_that_cannot_be_divided_share_a_step_as_far_as_its_limit_allows(
    loaded: Loaded,
) -> None:
    found = await steps_of(loaded("jamba"), (30, 14, 9, 13), chunk_tokens=8, max_batch_tokens=24)
    assert found == [[30], [14, 9], [13]]


async def test_what_was_gathered_for_a_last_chunk_of_one_token_is_let_go_of(
    llama: LoadedModel,
) -> None:
    """Such a chunk looks like a decode step, and up to 64 MiB were kept for a next one."""
    async with EnginePair(llama, chunk_tokens=16) as pair:
        steps = Watched(pair.prefill.steps.runner)
        await pair.tokens(prompt_of(33), greedy(1))
        await until(lambda: pair.prefill.steps.runner._ahead is None)
    assert steps.new == [[16], [16], [1]]


@pytest.mark.parametrize(
    ("priorities", "rooms", "want"),
    [
        ((), None, [[16, 8], [4, 1, 16], [14]]),
        ((), 1, [[16], [4], [9], [16], [14]]),
        ((0, 1, 2), None, [[16, 8], [14, 1, 9], [11]]),
    ],
    ids=["within the budgets", "one room a step", "the more urgent prompt first"],
)
async def test_several_rooms_share_a_step(
    priorities: tuple[int, ...], rooms: int | None, want: list[list[int]], llama: LoadedModel
) -> None:
    options = {"chunk_tokens": 16, "max_batch_tokens": 24, "max_batch_rooms": rooms}
    assert await steps_of(llama, (20, 9, 30), *priorities, **options) == want


async def test_full_pages_leave_while_the_next_chunk_is_computed(llama: LoadedModel) -> None:
    async with EnginePair(llama, page_size=4, chunk_tokens=10) as pair:
        steps, room = Watched(pair.prefill.steps.runner), pair.room(prompt_of(27))
        room.gate.clear()
        leg = pair.send(room, prompt_of(27), greedy(1))
        await until(lambda: len(room.sends) == 3)
        assert steps.new == [[10], [10], [7]], "computing went on although nothing had landed"
        assert room.sends == [(2, False), (3, False), (2, True)]
        assert not leg.done() and pair.source.pages.held_pages == 7
        room.gate.set()
        first = await leg
        assert (room.handoff.first_token, room.handoff.prompt_tokens) == (first.token_id, 27)


async def test_a_prompt_waits_for_pages_in_its_turn(llama: LoadedModel) -> None:
    async with EnginePair(llama, page_size=4, source_pages=6, num_pages=64) as pair:
        prompts = [prompt_of(n, n) for n in (20, 16, 3)]
        rooms = [pair.room(prompt) for prompt in prompts]
        rooms[0].gate.clear()
        legs = [pair.send(r, p, greedy(1)) for r, p in zip(rooms, prompts, strict=True)]
        await rooms[0].sent()
        assert pair.prefill.load().waiting == 2, "the third would fit, but came after the second"
        rooms[0].gate.set()
        await asyncio.gather(*legs)


async def test_of_prompts_that_wait_for_pages_the_more_urgent_gets_them_first(
    llama: LoadedModel,
) -> None:
    priorities = [0, 0, -5, 3, 0, 7, 3]
    async with EnginePair(llama, page_size=4, source_pages=6, num_pages=64) as pair:
        rooms = [pair.room(prompt_of(24, n)) for n in range(len(priorities))]
        rooms[0].gate.clear()
        done: list[int] = []

        async def prefill(number: int) -> None:
            params = greedy(1, priority=priorities[number])
            await pair.send(rooms[number], prompt_of(24, number), params)
            done.append(number)

        legs = []
        for number in range(len(priorities)):
            legs.append(asyncio.ensure_future(prefill(number)))
            await until(
                lambda count=number: pair.prefill.load().waiting == count,  # type: ignore[misc]
            )
        legs[4].cancel()  # it leaves the queue in its middle
        rooms[0].gate.set()
        await asyncio.gather(*legs, return_exceptions=True)
        assert done == [0, 5, 3, 6, 1, 2]


@pytest.mark.parametrize("how", ["cancelled", "room ended", "engine closed"])
async def test_pages_of_an_ended_request_are_free_when_its_step_has_ended(
    how: str, llama: LoadedModel
) -> None:
    async with EnginePair(llama, page_size=4, chunk_tokens=8) as pair:
        steps = Watched(pair.prefill.steps.runner, held=True)
        room = pair.room(prompt_of(30))
        leg = pair.send(room, prompt_of(30), greedy(1))
        await until(steps.entered.is_set)
        closing: asyncio.Future[Any] | None = None
        if how == "cancelled":
            leg.cancel()
        elif how == "room ended":
            room.close()
        else:
            closing = asyncio.ensure_future(pair.prefill.close())
        await asyncio.wait([leg])
        assert pair.source.pages.returning_pages == 8 and pair.source.pages.free_pages == 248
        steps.gate.set()
        if closing is not None:
            await closing
        await until(pair.source.pages.at_rest)
        assert steps.new == [[8]] and not room.sends
        assert room.cause is not None
        assert room.cause.code is (Code.SHUTDOWN if how == "engine closed" else Code.CLIENT_GONE)
        assert leg.cancelled() or isinstance(leg.exception(), AbortedError)


@pytest.mark.parametrize(
    ("what", "fault", "said"),
    [
        ("step", RuntimeError("out of something"), "prefill step failed: RuntimeError"),
        ("room", OSError("no route"), "sending pages failed: OSError"),
    ],
)
async def test_what_breaks_ends_its_request_and_no_other(
    what: str, fault: Exception, said: str, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise fault

    async with EnginePair(llama) as pair:
        room = pair.room(prompt_of(30))
        with monkeypatch.context() as patch:
            if what == "step":
                patch.setattr(pair.prefill.steps.runner, "forward", broken)
            else:
                patch.setattr(room.prefill_half, "send", broken)
            with pytest.raises(KvflowError, match=said) as caught:
                await pair.send(room, prompt_of(30), greedy(1))
        assert caught.value.code is Code.ENGINE_ERROR and room.cause is not None
        room.close()
        assert len(await pair.tokens(prompt_of(30), greedy(3))) == 3
        assert pair.prefill.failed_steps == 1 and pair.prefill.healthy


@pytest.mark.parametrize(
    ("prompt", "error", "said"),
    [
        ([], MisuseError, "empty"),
        ([1, 512], MisuseError, "token id 512 is outside the model's vocabulary, 0..511"),
        ([-1], MisuseError, "token id -1 is outside the model's vocabulary, 0..511"),
        ([1.5], MisuseError, "integers"),
        (prompt_of(512), CapacityError, "the prompt is too long; .*: asked for 512, limit 511"),
        (
            prompt_of(300),
            CapacityError,
            "the prompt is too long; prompt tokens in the KV pool .*: asked for 300, limit 256",
        ),
    ],
)
async def test_prompts_that_cannot_be_are_refused_and_decode_is_told(
    prompt: list[Any], error: type[MisuseError], said: str, llama: LoadedModel
) -> None:
    async with EnginePair(llama, source_pages=16) as pair:
        room: FakeRoom = pair.room([1])
        with pytest.raises(error, match=said):
            pair.prefill.check(prompt, SamplingParams())
        with pytest.raises(error, match=said):
            await pair.send(room, prompt, SamplingParams())
        assert room.cause is not None and room.cause.code is error.code


async def test_a_match_that_comes_after_the_end_is_refused(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        room, met = pair.room(prompt_of(30)), asyncio.Event()

        async def matched() -> int:
            await met.wait()
            return 0

        room.prefill_half.matched = matched
        leg = pair.send(room, prompt_of(30), greedy(1))
        await asyncio.sleep(0)
        await pair.prefill.close()
        met.set()
        with pytest.raises(AbortedError, match="closing"):
            await leg
        assert room.cause is not None and room.cause.code is Code.SHUTDOWN


async def test_tokens_decode_has_already_are_not_sent(llama: LoadedModel) -> None:
    async with EnginePair(llama, page_size=4, chunk_tokens=10) as pair:
        room = pair.room(prompt_of(27), late=True)
        room.known(3)
        room.meet(12)
        await pair.send(room, prompt_of(27), greedy(1))
        assert room.sends == [(2, False), (2, True)], "the first chunk was known"


async def test_a_prompt_takes_no_places_while_what_others_gave_up_is_not_enough(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, given_up = prompt_of(9), list[object]()
    async with EnginePair(llama) as pair:
        engine, room = pair.prefill, pair.room(prompt)
        request = engine.expect(room.prefill_half, prompt, greedy(1), 1)
        with monkeypatch.context() as patched:
            patched.setattr(engine, "_short_of", lambda request: (1, 0, 0))
            patched.setattr(engine._early, "give_way", lambda *_: [request])
            patched.setattr(engine, "_preempt", given_up.append)
            assert not engine._place(request)
        assert given_up == [[request]] and not request.sequence.page_count
        with monkeypatch.context() as patched:
            # A cache could give them, but for those that a step still reads.
            patched.setattr(pair.source.pages, "reclaim", lambda count: 0)
            assert engine.steps.short_of(request) == (1, 0)
        assert max(engine.steps.short_of(request)) <= 0
        engine.drop(request)
        room.close()
        await until(lambda: pair.home)
