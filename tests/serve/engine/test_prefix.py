"""Cached prefixes are neither computed nor sent again, and change no token."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import numpy as np
import pytest

from kvflow.protocols.cache.hashes import Namespace
from kvflow.protocols.errors import KvflowError
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.params import SamplingParams
from tests.serve.engine.pair import (
    EnginePair,
    FakeRoom,
    Watched,
    greedy,
    prompt_of,
    tokens_of,
    until,
)
from tests.serve.engine.tiny_models import Generated, Loaded


async def test_what_is_cached_is_neither_computed_nor_sent_again(
    llama: LoadedModel, generated: Generated
) -> None:
    prompt = prompt_of(30)
    plain = generated("llama", prompt, 7)
    longer = prompt + plain + prompt_of(9, 2)
    async with EnginePair(llama, page_size=4, chunk_tokens=16, cache="lru") as pair:
        steps = Watched(pair.prefill.steps.runner)
        first = await pair.outputs(prompt, greedy(7))
        assert [out.token_id for out in first] == plain and first[0].cached_tokens == 0
        steps.steps.clear()
        found = await pair.outputs(longer, greedy(5))
        assert [out.token_id for out in found] == generated("llama", longer, 5)
        # Prefill has the 7 whole pages of the prompt; decode those of all that was fed to it: 36
        # tokens, 9 pages.
        assert found[0].cached_tokens == 28 and sum(map(sum, steps.new)) == len(longer) - 28
        assert sum(count for count, _ in pair.rooms[-1].sends) == -(-len(longer) // 4) - 9


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "gpt2", "mixtral"])
async def test_latents_indexers_and_experts_are_cached_too(
    family: str, loaded: Loaded, generated: Generated
) -> None:
    prompt, cached = prompt_of(37), []
    async with EnginePair(loaded(family), page_size=4, chunk_tokens=16, cache="lru") as pair:
        for turn in range(3):
            outputs = await pair.outputs(prompt, greedy(6))
            answer = [out.token_id for out in outputs]
            assert answer == generated(family, prompt, 6)
            cached.append(outputs[0].cached_tokens)
            prompt = prompt + answer + prompt_of(5 + turn, 9 + turn)
    assert cached == [0, 36, 48]


async def test_a_prompt_that_decode_has_whole_moves_nothing(llama: LoadedModel) -> None:
    prompt = prompt_of(16)
    async with EnginePair(llama, page_size=4, cache="lru") as pair:
        first = await pair.tokens(prompt, greedy(6))
        again = await pair.outputs(prompt, greedy(6))
        assert [out.token_id for out in again] == first
        assert again[0].cached_tokens == 12, "the last token's logits are wanted"
        assert pair.rooms[-1].sends[-1] == (0, True) and not pair.rooms[-1].pages.size


@pytest.mark.parametrize(("family", "saved"), [("llama", [7, 9]), ("lfm2", [7, 7])])
async def test_what_was_evicted_comes_back_from_the_host(
    family: str, saved: list[int], loaded: Loaded, generated: Generated
) -> None:
    """Every byte of both pools, rows too, is poison in between."""
    prompt = prompt_of(30)
    expected = generated(family, prompt, 7)
    longer = prompt + expected + prompt_of(9, 2)
    options = {"page_size": 4, "chunk_tokens": 16, "cache_host_pages": 64, "num_pages": 40}
    async with EnginePair(loaded(family), cache="lru", **options) as pair:
        assert await pair.tokens(prompt, greedy(7)) == expected
        await until(lambda: [cache.stats().saved_pages for cache in pair.caches] == saved)
        await pair.evict_all()
        found = await pair.outputs(longer, greedy(5))
        assert [out.token_id for out in found] == generated(family, longer, 5)
        assert found[0].cached_tokens == 28
        assert [cache.stats().loaded_pages for cache in pair.caches] == saved


async def test_what_was_read_up_to_a_stop_string_is_cached(
    llama: LoadedModel, generated: Generated
) -> None:
    prompt = prompt_of(22)
    expected = generated("llama", prompt, 20)
    for read in (1, 2, 3, 7, 11):
        longer = prompt + expected[:read] + prompt_of(9, 2)
        async with EnginePair(llama, page_size=4, cache="lru") as pair:
            async with aclosing(pair.stream(prompt, greedy(20))) as tokens:
                found = [(await anext(tokens)).token_id for _ in range(read)]
            assert found == expected[:read]
            assert pair.caches[1].stats().pages >= (22 + read - 1) // 4
            assert await pair.tokens(longer, greedy(5)) == generated("llama", longer, 5)


async def test_who_was_not_admitted_asks_for_no_page_that_the_cache_has(llama: LoadedModel) -> None:
    """A pool of 10 pages: the cache has 5 of the prompt, and 5 are left for the rest."""
    prompt = prompt_of(23)
    async with EnginePair(llama, page_size=4, num_pages=10, source_pages=64, cache="lru") as pair:
        want = await pair.tokens(prompt, greedy(18))
        await until(lambda: pair.home)
        pair.caches[1].flush()
        await pair.tokens(prompt, greedy(1))
        await until(lambda: pair.home)
        prefix = await pair.decode.cached(prompt)
        assert prefix is not None and prefix.tokens == 20
        assert await tokens_of(pair.not_admitted(prompt, greedy(18), prefix)) == want


async def test_namespaces_share_nothing(llama: LoadedModel) -> None:
    prompt, mine, other = prompt_of(20), Namespace(salt="mine"), Namespace(salt="other")
    async with EnginePair(llama, page_size=4, cache="lru") as pair:
        found = [
            (await pair.send(pair.room(prompt), prompt, greedy(1), namespace=name)).cached_tokens
            for name in (mine, mine, other)
        ]
        assert found == [0, 16, 0]


async def test_scores_of_cached_tokens_are_computed(llama: LoadedModel) -> None:
    prompt = prompt_of(40)
    for start in (0, 13):
        params = SamplingParams(
            temperature=0, max_new_tokens=2, logprobs=2, prompt_logprobs_from=start
        )
        async with EnginePair(llama, page_size=4) as pair:
            expected = (await pair.outputs(prompt, params))[0].prompt_logprobs
        async with EnginePair(llama, page_size=4, cache="lru") as pair:
            await pair.tokens(prompt, greedy(2))
            found = (await pair.outputs(prompt, params))[0]
            assert found.cached_tokens == start // 4 * 4
            assert found.prompt_logprobs is not None and expected is not None
            mine, want = (
                [s.logprob or 0.0 for s in scores.tokens(prompt)][1:]
                for scores in (found.prompt_logprobs, expected)
            )
            assert len(mine) == 39 - start and np.allclose(mine, want, atol=1e-4)


async def test_a_request_whose_room_fails_locks_nothing_any_more(llama: LoadedModel) -> None:
    prompt = prompt_of(30)
    async with EnginePair(llama, page_size=4, cache="lru") as pair:
        await pair.tokens(prompt, greedy(3))
        pair.on_room = FakeRoom.fail
        with pytest.raises(KvflowError):
            await pair.tokens(prompt, greedy(3))
        assert pair.rooms[-1].pages.size == 1, "decode has locked the other seven"


async def test_a_flush_leaves_alone_who_reads(llama: LoadedModel) -> None:
    prompt = prompt_of(30)
    async with EnginePair(llama, page_size=4, cache="lru") as pair:
        expected = await pair.tokens(prompt, greedy(12))
        tokens = []
        async for out in pair.stream(prompt, greedy(12)):
            tokens.append(out.token_id)
            for cache in pair.caches:
                cache.flush()
        assert pair.rooms[-1].pages.size == 1, "decode reads the other seven"
        assert tokens == expected
        await until(lambda: pair.home)
        assert not any(cache.stats().pages for cache in pair.caches)


class Chats:
    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        system = prompt_of(21, rng.randrange(100))
        self.begun = [system + prompt_of(rng.randrange(1, 12), 10 + user) for user in range(6)]
        self._lengths = [[rng.randrange(1, 9) for _ in range(3)] for _ in self.begun]

    async def talk(self, pair: EnginePair, user: int) -> list[list[int]]:
        prompt, answers = list(self.begun[user]), []
        for turn, length in enumerate(self._lengths[user]):
            answers.append(await pair.tokens(prompt, greedy(length)))
            prompt += answers[-1] + prompt_of(1 + turn, 50 + user)
        return answers


_without_a_cache: dict[int, list[list[list[int]]]] = {}


@pytest.mark.parametrize(
    ("pages", "options"),
    [
        (400, {}),
        (30, {"cache_host_pages": 400}),
        (30, {"cache_host_pages": 30}),
        (
            30,
            {"cache_host_pages": 400, "cache_options": {"write_policy": "write_through_selective"}},
        ),
        (
            30,
            {
                "cache_host_pages": 400,
                "prefetch": "best_effort",
                "new_token_ratio": 0.2,
                "host_pages": 64,
            },
        ),
        (30, {}),
        (30, {"new_token_ratio": 0.2, "host_pages": 64}),
        (30, {"new_token_ratio": 0.2}),
        (60, {"optimistic_tries": 2}),
    ],
)
@pytest.mark.parametrize("policy", ["lru", "depth"])
async def test_chats_get_the_tokens_that_they_get_without_a_cache(
    pages: int, options: dict[str, object], policy: str, llama: LoadedModel, seed: int
) -> None:
    # Of these, no two tokens of a choice are as likely as rounding errors are large, and all need
    # more than 30 pages.
    seed %= 500
    chats = Chats(seed)
    users = range(len(chats.begun))
    if seed not in _without_a_cache:
        async with EnginePair(llama, page_size=4, num_pages=400) as pair:
            _without_a_cache[seed] = [await chats.talk(pair, user) for user in users]
    async with EnginePair(llama, page_size=4, num_pages=pages, cache=policy, **options) as pair:
        found = await asyncio.gather(*(chats.talk(pair, user) for user in users))
        assert found == _without_a_cache[seed]
        hits = [cache.stats().hit_tokens for cache in pair.caches]
        assert all(hits), "nothing was found in the cache"
        if pages == 30:
            assert any(cache.stats().evicted_pages for cache in pair.caches)
