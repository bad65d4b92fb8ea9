"""Prompts that decode computes itself have the tokens of a pair, and make no other request wait."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.protocols.errors import CapacityError, HostMemoryError, MisuseError, RefusedError
from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.engine.model.grammars import Grammar
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.scheduler import decode
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from tests.near import Near
from tests.serve.engine.pair import EnginePair, Watched, greedy, prompt_of, tokens_of, until
from tests.serve.engine.tiny_models import Generated, Loaded, Tiny
from tests.soak import sized

LOCAL: dict[str, Any] = {"page_size": 4, "local_prefill_chunk": 16}
LENGTHS = 1, 4, 17, 61
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.9, seed=7, max_new_tokens=9, ignore_eos=True, logprobs=2
)


async def computed(pair: EnginePair, prompt: list[int], params: SamplingParams) -> list[TokenOut]:
    return [out async for out in pair.decode.compute(prompt, params)]


def told(outputs: list[TokenOut]) -> list[Any]:
    """Everything of some tokens that has to be equal, with logprobs that are near."""

    def near(value: float | None) -> float | None:
        return None if value is None else Near(value)

    return [
        (
            out.token_id,
            near(out.logprob),
            [(i, near(p)) for i, p in out.top_logprobs],
            [(i, near(p)) for i, p in out.asked_logprobs],
            out.finish_reason,
            out.matched_stop,
        )
        for out in outputs
    ]


def retract_within(pair: EnginePair, tokens: int) -> None:
    """Retract every request once, when decode has computed so many tokens of prompts."""
    engine, done = pair.decode, False

    def retract() -> None:
        nonlocal done
        if not done and engine.local.tokens >= tokens:
            done = True
            engine.retract_all()

    Watched(engine._runner, retract)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
async def test_tokens_are_those_of_the_model(
    family: str, loaded: Loaded, generated: Generated
) -> None:
    async with EnginePair(loaded(family), **LOCAL, cache="lru") as pair:
        for length in LENGTHS:
            prompt = prompt_of(length, length)
            found = await computed(pair, prompt, greedy(7))
            assert [out.token_id for out in found] == generated(family, prompt, 7)
            assert found[0].cached_tokens == 0 and found[-1].finish_reason == "length"
        assert pair.decode.local.report().prompts == len(LENGTHS)
        assert pair.decode.local.report().tokens == sum(LENGTHS)
        assert not pair.rooms


async def test_rings_are_computed_from_the_beginning(tiny: Tiny, generated: Generated) -> None:
    """The window is in a row, which the cache of decode does not keep."""
    model = load_model(str(tiny("gemma3")), "float32", sliding_window_rows="always")
    assert model.has_rows and not model.has_states
    prompt = prompt_of(45)
    async with EnginePair(model, **LOCAL, cache="lru") as pair:
        for _ in range(2):
            found = await computed(pair, prompt, greedy(12))
            assert [out.token_id for out in found] == generated("gemma3", prompt, 12)
            assert found[0].cached_tokens == 0


@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        msgspec.structs.replace(SAMPLED, seed=-3, top_k=5),
        msgspec.structs.replace(SAMPLED, min_new_tokens=4, repetition_penalty=1.3),
        msgspec.structs.replace(SAMPLED, logprob_token_ids=(3, 9), frequency_penalty=0.7),
        greedy(0),
        greedy(1),
    ],
)
async def test_a_pair_says_the_same(llama: LoadedModel, params: SamplingParams) -> None:
    prompt = prompt_of(37)
    async with EnginePair(llama, **LOCAL) as pair:
        assert told(await computed(pair, prompt, params)) == told(
            await pair.outputs(prompt, params)
        )


async def test_grammars_bind_answers_as_those_of_a_pair() -> None:
    demo = load_model(str(DEMO_MODEL_DIR))
    prompt = list(demo.tokenizer.encode(DEMO_PROMPTS[0]))
    params = greedy(30, grammar=Grammar("regex", "(red|green|blue)( (red|green|blue)){2}"))
    async with EnginePair(demo, **LOCAL, cache="lru") as pair:
        found = await computed(pair, prompt, params)
        assert told(found) == told(await pair.outputs(prompt, params))
        assert found[-1].finish_reason == "stop"
        with pytest.raises(MisuseError, match="regex cannot be compiled"):
            await computed(pair, prompt, greedy(5, grammar=Grammar("regex", "(")))
    demo.grammars.close()


async def test_a_grammar_that_fails_late_leaves_no_pages(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MisuseError("no longer")

    monkeypatch.setattr(decode, "adjustments_of", fails)
    prompt = prompt_of(37)
    async with EnginePair(llama, **LOCAL) as pair:
        with pytest.raises(MisuseError, match="no longer"):
            await computed(pair, prompt, greedy(5))
        with pytest.raises(MisuseError, match="no longer"):
            await pair.outputs(prompt, greedy(5))


async def test_hidden_states_are_those_of_a_pair(llama: LoadedModel) -> None:
    prompt, params = prompt_of(37), greedy(3, hidden_states=True)
    async with EnginePair(llama, **LOCAL) as pair:
        both = await computed(pair, prompt, params), await pair.outputs(prompt, params)
        for ours, theirs in zip(*both, strict=True):
            assert ours.hidden_states is not None and theirs.hidden_states is not None
            np.testing.assert_allclose(
                ours.hidden_states.array(), theirs.hidden_states.array(), atol=1e-5
            )


async def test_a_stop_token_and_an_eos_end_it_at_the_first_token(
    llama: LoadedModel, generated: Generated
) -> None:
    prompt = prompt_of(20)
    first = generated("llama", prompt, 1)[0]
    async with EnginePair(llama, **LOCAL, cache="lru") as pair:
        (out,) = await computed(pair, prompt, greedy(9, stop_token_ids=(first,)))
        assert (out.token_id, out.finish_reason, out.matched_stop) == (first, "stop", first)
        await until(lambda: pair.home)
        assert pair.caches[1].stats().pages == 5


async def test_only_what_is_not_cached_is_computed(
    llama: LoadedModel, generated: Generated
) -> None:
    prompt = prompt_of(30)
    async with EnginePair(llama, **LOCAL, cache="lru") as pair:
        first = await pair.tokens(prompt, greedy(7))
        longer = prompt + first + prompt_of(9, 2)
        found = await computed(pair, longer, greedy(5))
        assert [out.token_id for out in found] == generated("llama", longer, 5)
        # Decode has the whole pages of the 36 tokens that were fed to it.
        assert found[0].cached_tokens == 36
        assert pair.decode.local.tokens == len(longer) - 36
        # What it computed is found by pairs and by later prompts of its own.
        again = await computed(pair, longer, greedy(5))
        assert again[0].cached_tokens == 44 and told(again) == told(found)
        rooms = len(pair.rooms)
        whole = await pair.outputs(longer, greedy(5))
        assert told(whole) == told(found) and len(pair.rooms) == rooms + 1
        assert sum(count for count, _ in pair.rooms[-1].sends) == 1


async def test_a_prompt_that_is_cached_whole_computes_its_last_page(llama: LoadedModel) -> None:
    prompt = prompt_of(16)
    async with EnginePair(llama, **LOCAL, cache="lru") as pair:
        first = await computed(pair, prompt, greedy(6))
        again = await computed(pair, prompt, greedy(6))
        assert told(again) == told(first) and again[0].cached_tokens == 12


async def test_steps_of_others_are_as_long_as_the_chunk_allows(
    llama: LoadedModel, generated: Generated
) -> None:
    """Three long prompts come while a request decodes. It goes on in every step."""
    prompts = [prompt_of(90, n) for n in range(3)]
    async with EnginePair(llama, **LOCAL) as pair:
        stream, first = await pair.begun(prompt_of(9, 7), greedy(40))
        steps = Watched(pair.decode._runner)
        pair.decode.pause()
        tasks = [asyncio.create_task(computed(pair, p, greedy(3))) for p in prompts]
        await until(lambda: len(pair.decode._running) == 4)
        pair.decode.resume()
        rest = [out.token_id async for out in stream]
        assert [first.token_id, *rest] == generated("llama", prompt_of(9, 7), 40)
        for task, prompt in zip(tasks, prompts, strict=True):
            assert [out.token_id for out in await task] == generated("llama", prompt, 3)
        beside = [step for step in steps.new if len(step) > 1]
        assert beside and all(1 in step for step in beside)
        assert max(map(sum, steps.new)) <= LOCAL["local_prefill_chunk"] + 4
        # The first prompt is not held back by the later ones.
        assert sum(steps.new[0]) == 17 and steps.new[0] == [1, 16]


async def test_alone_a_prompt_takes_large_steps(llama: LoadedModel) -> None:
    async with EnginePair(llama, **LOCAL) as pair:
        steps = Watched(pair.decode._runner)
        await computed(pair, prompt_of(90), greedy(2))
        assert steps.new == [[90], [1]]


async def test_a_small_pool_gives_the_same_tokens(llama: LoadedModel, generated: Generated) -> None:
    """Prompts of both kinds are retracted, some of them before their first token."""
    prompts = [prompt_of(8 + n, n) for n in range(9)]
    small = {"num_pages": 18, "source_pages": 512, "new_token_ratio": 0.2}
    async with EnginePair(llama, **LOCAL, **small, host_pages=12, cache="lru") as pair:
        runs = (
            tokens_of(pair.decode.compute(p, greedy(28))) if n % 3 else pair.tokens(p, greedy(28))
            for n, p in enumerate(prompts)
        )
        assert await asyncio.gather(*runs) == [generated("llama", p, 28) for p in prompts]
        report = pair.decode.retraction
        assert report.retracts > 0 and report.resumes + report.recomputes == report.retracts
        await until(lambda: pair.home)


@pytest.mark.parametrize("host", [{"host_pages": 200}, {}])
async def test_a_retraction_in_the_middle_of_a_prompt(
    llama: LoadedModel, host: dict[str, int], generated: Generated
) -> None:
    prompt = prompt_of(90)
    async with EnginePair(llama, **LOCAL, **host, cache="lru") as pair:
        await computed(pair, prompt[:12], greedy(1))
        stream, _ = await pair.begun(prompt_of(9, 7), greedy(60))
        retract_within(pair, 40)
        found = await computed(pair, prompt, greedy(9))
        assert [out.token_id for out in found] == generated("llama", prompt, 9)
        assert found[0].cached_tokens == 12
        assert pair.decode.retraction.retracts == 2
        rest = [out async for out in stream]
        assert len(rest) == 59


async def test_a_retracted_prompt_with_rings(tiny: Tiny, generated: Generated) -> None:
    """The row comes back with its copy."""
    model = load_model(str(tiny("gemma3")), "float32", sliding_window_rows="always")
    prompt = prompt_of(90)
    async with EnginePair(model, **LOCAL, host_pages=200, cache="lru") as pair:
        stream, _ = await pair.begun(prompt_of(9, 7), greedy(60))
        retract_within(pair, 40)
        found = await computed(pair, prompt, greedy(9))
        assert [out.token_id for out in found] == generated("gemma3", prompt, 9)
        assert pair.decode.retraction.retracts == 2
        assert len(await tokens_of(stream)) == 59


async def test_what_was_evicted_comes_back_from_the_host(
    llama: LoadedModel, generated: Generated
) -> None:
    prompt = prompt_of(32)
    options = {"cache_host_pages": 64, "num_pages": 40}
    async with EnginePair(llama, **LOCAL, cache="lru", **options) as pair:
        await computed(pair, prompt, greedy(2))
        await until(lambda: pair.caches[1].stats().saved_pages == 8)
        await pair.evict_all()
        for longer, cached in ((prompt, 28), (prompt + prompt_of(9, 2), 32)):
            found = await computed(pair, longer, greedy(5))
            assert [out.token_id for out in found] == generated("llama", longer, 5)
            assert found[0].cached_tokens == cached


@pytest.mark.parametrize("seed", range(sized(1, 20)))
async def test_a_storm(llama: LoadedModel, generated: Generated, seed: int) -> None:
    """Requests of both kinds in a pool that is too small. Some share beginnings, some are left at
    any time, and all are retracted now and then.
    """
    dice = random.Random(seed)
    system = prompt_of(24, 99)
    options = {"num_pages": 30, "source_pages": 200, "new_token_ratio": 0.3, "host_pages": 20}
    async with EnginePair(llama, **LOCAL, **options, cache="lru") as pair:

        async def one(number: int) -> None:
            prompt = system[: dice.choice((0, 24))] + prompt_of(dice.randrange(1, 50), number)
            new, read = dice.randrange(1, 20), dice.randrange(1, 30)
            ours = dice.random() < 0.6
            kind = pair.decode.compute if ours else pair.stream
            found: list[int] = []
            async with aclosing(kind(prompt, greedy(new, ignore_eos=True))) as tokens:
                async for out in tokens:
                    found.append(out.token_id)
                    if len(found) >= read:
                        break
            assert found == generated("llama", prompt, new)[: len(found)]
            assert len(found) == min(new, read)

        async def left(number: int) -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(dice.random() / 50):
                    await one(number)
                    raise TimeoutError

        tasks = [asyncio.create_task(left(n) if dice.random() < 0.3 else one(n)) for n in range(24)]
        for _ in range(3):
            enough = pair.decode.steps + 6
            while pair.decode.steps < enough and not all(task.done() for task in tasks):
                await asyncio.sleep(0.001)
            pair.decode.retract_all()
        await asyncio.gather(*tasks)
        await until(lambda: pair.home)


async def test_without_memory_to_come_back_it_says_so(llama: LoadedModel) -> None:
    async with EnginePair(llama, **LOCAL, recompute=False) as pair:
        stream, _ = await pair.begun(prompt_of(9, 7), greedy(60))
        retract_within(pair, 40)
        with pytest.raises(HostMemoryError):
            await computed(pair, prompt_of(90), greedy(9))
        with pytest.raises(HostMemoryError):
            await tokens_of(stream)


async def test_a_reader_that_leaves_in_the_middle_leaves_nothing(
    llama: LoadedModel, generated: Generated
) -> None:
    """At whatever point it leaves, every page comes home, and what is cached is right."""
    dice = random.Random(5)
    for _ in range(sized(5, 30)):
        prompt, most = prompt_of(120, dice.randrange(99)), dice.randrange(120)
        async with EnginePair(llama, **LOCAL, cache="lru") as pair:
            stream, _ = await pair.begun(prompt_of(9, 7), greedy(80))
            task = asyncio.create_task(computed(pair, prompt, greedy(9)))
            await until(lambda: pair.decode.local.tokens >= most)  # noqa: B023
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await stream.aclose()
            await until(lambda: pair.home)
            assert await pair.tokens(prompt, greedy(5)) == generated("llama", prompt, 5)


async def test_a_reader_that_stops_keeps_what_was_computed(
    llama: LoadedModel, generated: Generated
) -> None:
    prompt = prompt_of(22)
    expected = generated("llama", prompt, 20)
    for read in (1, 2, 3, 7):
        longer = prompt + expected[:read] + prompt_of(9, 2)
        async with EnginePair(llama, **LOCAL, cache="lru") as pair:
            async with aclosing(pair.decode.compute(prompt, greedy(20))) as tokens:
                found = [(await anext(tokens)).token_id for _ in range(read)]
            assert found == expected[:read]
            assert pair.caches[1].stats().pages >= (22 + read - 1) // 4
            assert await pair.tokens(longer, greedy(5)) == generated("llama", longer, 5)


async def test_it_waits_for_pages_in_turn(llama: LoadedModel, generated: Generated) -> None:
    prompts = [prompt_of(40, n) for n in range(4)]
    async with EnginePair(llama, **LOCAL, num_pages=14, new_token_ratio=1.0) as pair:
        found = await asyncio.gather(*(computed(pair, p, greedy(8)) for p in prompts))
        assert [[out.token_id for out in one] for one in found] == [
            generated("llama", p, 8) for p in prompts
        ]
        assert pair.decode.retraction.retracts == 0
        with pytest.raises(CapacityError, match="asked for 64"):
            await computed(pair, prompt_of(50), greedy(14))


async def test_what_a_pair_has_to_serve_is_refused(llama: LoadedModel, loaded: Loaded) -> None:
    async with EnginePair(llama, page_size=4) as pair:
        with pytest.raises(RefusedError, match="computes no prompts"):
            await computed(pair, prompt_of(9), greedy(2))
    async with EnginePair(llama, **LOCAL) as pair:
        with pytest.raises(RefusedError, match="logprobs of a prompt"):
            await computed(pair, prompt_of(9), greedy(2, logprobs=0, prompt_logprobs_from=0))
    async with EnginePair(loaded("lfm2"), **LOCAL) as pair:
        assert pair.decode.local.chunk == 0
        with pytest.raises(RefusedError, match="computes no prompts"):
            await computed(pair, prompt_of(9), greedy(2))
