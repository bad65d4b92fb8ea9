"""Several steps per call of the model thread: when tokens leave, and what ends a burst."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from kvflow.protocols.errors import KvflowError
from kvflow.serve.engine.model.ahead import MOST_STEPS
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler import burst, decode
from kvflow.serve.engine.scheduler.burst import DecodeRequest
from kvflow.serve.engine.scheduler.params import TokenOut
from tests.serve.engine.pair import EnginePair, Watched, greedy, prompt_of, tokens_of, until

Tokens = AsyncGenerator[TokenOut, None]


class Stepped(Watched):
    """Counts the calls of a decode's model thread; with `gated`, a step ends when allowed."""

    def __init__(self, pair: EnginePair, *, gated: bool = False) -> None:
        super().__init__(pair.decode._runner)
        self.calls = 0
        self._allowed = threading.Semaphore(0)
        run = pair.decode._thread.run

        async def counted(*arguments: Any) -> Any:
            self.calls += 1
            return await run(*arguments)

        pair.decode._thread.run = counted  # type: ignore[method-assign,assignment]
        if gated:
            self.before = self._wait

    def _wait(self) -> None:
        assert self._allowed.acquire(timeout=20)

    @property
    def widths(self) -> list[int]:
        return list(map(len, self.steps))

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    async def at_step(self, number: int) -> None:
        """Wait until that step begins; it does not end before it is allowed."""
        await until(lambda: len(self.steps) >= number)


async def started(pair: EnginePair, prompt: list[int], count: int) -> Tokens:
    stream, _ = await pair.begun(prompt, greedy(count))
    return stream


def fail_at(watched: Watched, step: int) -> None:
    if len(watched.steps) == step:
        raise RuntimeError("out of something")


async def test_one_call_has_several_steps(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        want = await pair.tokens(prompt_of(20), greedy(50))
        watched = Stepped(pair)
        assert await pair.tokens(prompt_of(20), greedy(50)) == want
        assert len(watched.widths) == 49, "no step is computed in vain"
        assert watched.calls == -(-49 // MOST_STEPS)


async def test_the_token_of_a_step_that_is_not_short_leaves_when_it_has_ended(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burst, "DELIVER_EVERY_S", 0.0)
    async with EnginePair(llama) as pair:
        want = await pair.tokens(prompt_of(20), greedy(6))
        watched = Stepped(pair, gated=True)
        stream = await started(pair, prompt_of(20), 6)
        for number in range(1, 6):
            await watched.at_step(number)
            watched.allow(1)
            assert (await asyncio.wait_for(anext(stream), 20)).token_id == want[number]
        assert watched.calls == 1
        await stream.aclose()


async def test_short_steps_share_a_delivery(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burst, "DELIVER_EVERY_S", 60.0)
    async with EnginePair(llama) as pair:
        want = await pair.tokens(prompt_of(20), greedy(MOST_STEPS + 2))
        watched, before = Stepped(pair, gated=True), pair.decode.steps
        stream = await started(pair, prompt_of(20), MOST_STEPS + 2)
        watched.allow(MOST_STEPS - 1)
        await watched.at_step(MOST_STEPS)
        assert pair.decode.steps == before
        watched.allow(1)  # the burst ends, and all of its tokens leave
        found = [await anext(stream) for _ in range(MOST_STEPS)]
        assert [out.token_id for out in found] == want[
            1:-1
        ] and pair.decode.steps == before + MOST_STEPS
        watched.allow(1)  # a last token does not wait
        assert (await anext(stream)).finish_reason == "length"
        await stream.aclose()


async def test_a_turn_of_the_loop_wakes_few_readers(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "READERS_PER_TURN", 2)
    monkeypatch.setattr(burst, "DELIVER_EVERY_S", 60.0)
    prompts = [prompt_of(9 + i, i) for i in range(5)]
    async with EnginePair(llama) as pair:
        want = await pair.tokens_of_all(prompts, greedy(12))
        pair.decode.pause()
        turn = 0
        seen: list[tuple[int, int]] = []

        def watch(i: int, request: DecodeRequest) -> None:
            put = request.tokens.put_nowait

            def watched(item: TokenOut | KvflowError) -> None:
                seen.append((turn, i))
                put(item)

            request.tokens.put_nowait = watched  # type: ignore[method-assign]

        requests = [asyncio.create_task(pair.tokens(prompt, greedy(12))) for prompt in prompts]
        await until(lambda: len(pair.decode._running) == len(prompts))
        for i, request in enumerate(pair.decode._running.values()):
            watch(i, request)
        pair.decode.resume()
        while not all(request.done() for request in requests):
            await asyncio.sleep(0)
            turn += 1
        assert [await request for request in requests] == want
    readers = [{i for at, i in seen if at == turn} for turn in {at for at, _ in seen}]
    assert len(seen) == 5 * 11 and max(map(len, readers)) == 2
    assert sum(map(len, readers)) <= 5 * 3, "the tokens of one reader's steps come at once"


async def test_a_request_that_joins_is_in_the_next_step(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        watched = Stepped(pair, gated=True)
        first = await started(pair, prompt_of(20), 30)
        await watched.at_step(1)
        watched.allow(1)
        await watched.at_step(2)
        second = await started(pair, prompt_of(21, 1), 30)
        watched.allow(2)
        await watched.at_step(3)
        assert watched.widths[:3] == [1, 1, 2]
        watched.allow(100)
        for stream in (first, second):
            assert len(await tokens_of(stream)) == 29


async def test_a_request_that_leaves_is_not_in_the_next_step(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        want = await pair.tokens(prompt_of(21, 1), greedy(30))
        watched = Stepped(pair, gated=True)
        leaves = await started(pair, prompt_of(40), 30)
        stays = await started(pair, prompt_of(21, 1), 30)
        watched.allow(3)
        await watched.at_step(4)
        assert watched.widths[-1] == 2
        free = pair.target.pages.free_pages
        await leaves.aclose()
        assert pair.target.pages.returning_pages >= 3 and pair.target.pages.free_pages == free
        watched.allow(1)
        await watched.at_step(5)
        assert watched.widths[-1] == 1 and not pair.target.pages.returning_pages
        watched.allow(100)
        assert await tokens_of(stays) == want[1:]


async def test_several_steps_while_a_request_waits_which_is_granted_when_they_have_ended(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EnginePair(llama, page_size=4, num_pages=20, source_pages=64) as pair:
        watched = Stepped(pair, gated=True)
        first = await started(pair, prompt_of(20), MOST_STEPS + 4)
        await watched.at_step(1)
        waiting = asyncio.ensure_future(pair.tokens(prompt_of(20, 1), greedy(30)))
        await until(lambda: pair.decode.load().waiting == 1)
        watched.allow(100)
        assert len(await tokens_of(first)) == MOST_STEPS + 3
        assert watched.calls <= 2, "the first begins before it waits"
        assert len(await asyncio.wait_for(waiting, 20)) == 30


async def test_a_burst_ends_with_the_first_request_that_ends(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        want = await pair.tokens(prompt_of(21, 1), greedy(30))
        pair.decode.pause()
        ends = await started(pair, prompt_of(20), 4)
        stays = await started(pair, prompt_of(21, 1), 30)
        watched, returned = Stepped(pair), threading.Event()
        run = pair.decode._burst.run

        def noted(*arguments: Any) -> None:
            run(*arguments)
            returned.set()

        pair.decode._burst.run = noted  # type: ignore[method-assign,assignment]
        pair.decode.resume()
        await until(lambda: bool(watched.calls))
        assert returned.wait(20), "the event loop stands still"
        assert watched.widths == [2, 2, 2]
        assert len(await tokens_of(ends)) == 3
        assert await tokens_of(stays) == want[1:]


async def test_a_step_that_fails_ends_a_burst_after_the_tokens_before_it(
    llama: LoadedModel,
) -> None:
    async with EnginePair(llama) as pair:
        want = await pair.tokens(prompt_of(20), greedy(9))
        watched = Stepped(pair)
        watched.before = lambda: fail_at(watched, 4)
        stream = await started(pair, prompt_of(20), 9)
        assert [(await anext(stream)).token_id for _ in range(3)] == want[1:4]
        with pytest.raises(KvflowError, match="decode step failed: RuntimeError"):
            await anext(stream)
        await until(lambda: pair.home)
        assert pair.decode.failed_steps == 1 and watched.calls == 1


@pytest.mark.parametrize("fails", ["step", "close"])
async def test_readers_that_wait_for_their_turn_get_their_tokens_before_the_error(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(decode, "READERS_PER_TURN", 2)
    monkeypatch.setattr(burst, "DELIVER_EVERY_S", 60.0)
    found: list[int] = []
    async with EnginePair(llama) as pair:
        pair.decode.pause()
        requests = [await started(pair, prompt_of(9 + i, i), 30) for i in range(7)]
        watched, deliver = Watched(pair.decode._runner), pair.decode._deliver
        if fails == "step":
            watched.before = lambda: fail_at(watched, 5)

        def delivered(tokens: list[burst.Tokens]) -> None:
            deliver(tokens)
            if fails == "close":
                pair.decode.end_requests()

        async def read(stream: Tokens) -> None:
            count = 0
            with pytest.raises(KvflowError):
                async for _ in stream:
                    count += 1
            found.append(count)

        pair.decode._burst._deliver = delivered
        pair.decode.resume()
        await asyncio.gather(*(read(stream) for stream in requests))
    assert found == [4 if fails == "step" else MOST_STEPS] * 7


async def test_pause_and_close_end_a_burst(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        watched = Stepped(pair, gated=True)
        stream = await started(pair, prompt_of(20), 30)
        await watched.at_step(1)
        pair.decode.pause()
        watched.allow(1)
        await until(lambda: not pair.target.pages.held_pages)
        assert watched.widths == [1]
        pair.decode.resume()
        await watched.at_step(2)
        closing = asyncio.ensure_future(pair.decode.close())
        await asyncio.sleep(0)
        watched.allow(1)
        await closing
        assert watched.widths == [1, 1] and not pair.target.pages.held_pages
        await stream.aclose()
