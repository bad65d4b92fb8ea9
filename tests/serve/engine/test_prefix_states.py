"""Prefixes of models with states: usable where a copy of the state is, and never without."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.memory.available import Available
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import KvflowError, MisuseError
from kvflow.protocols.pages.kinds import ROW, SLOT, StateKind
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.cache.states import StateStore
from kvflow.serve.config.settings import Role
from kvflow.serve.config.sources import resolve
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from kvflow.serve.engine.scheduler.prefill_states import PromptStates
from kvflow.serve.launch.caching import prefix_cache
from kvflow.serve.launch.parts import Parts
from tests.serve.engine.pair import EnginePair, Watched, greedy, prompt_of, tokens_of, until
from tests.serve.engine.tiny_models import Generated, Loaded, Tiny

HOW: dict[str, Any] = {"page_size": 4, "chunk_tokens": 16}


def store_of(pair: EnginePair) -> StateStore:
    store = pair.caches[0].states
    assert store is not None
    return store


async def talk(model: LoadedModel, **options: Any) -> tuple[list[list[int]], list[int]]:
    """Return the answers and cached tokens of a conversation, and of two prompts that leave it."""
    prompt = prompt_of(37)
    prompts = [prompt_of(37), [], [], prompt[:29] + prompt_of(9, 3), prompt[:29] + prompt_of(6, 4)]
    answers, cached = [], []
    async with EnginePair(model, **HOW, **options) as pair:
        for turn, given in enumerate(prompts):
            outputs = await pair.outputs(given or prompt, greedy(6))
            answers.append([out.token_id for out in outputs])
            cached.append(outputs[0].cached_tokens)
            prompt = prompt + answers[-1] + prompt_of(5 + turn, 9 + turn)
        if "cache" in options and model.has_rows:
            assert pair.caches[0].stats().states and store_of(pair).slots.num_pages == 32
    assert len({tuple(answer) for answer in answers}) == 5
    return answers, cached


async def check(model: LoadedModel) -> None:
    expected, _ = await talk(model)
    # Of 37 tokens a model with states computes no last one alone. The second prompt has 48: 12
    # whole pages. The fourth shares 28 tokens with what is cached, where there is a state after 16,
    # and leaves one after 28; where windows are in pages, every prefix has what they need.
    cached = [0, 32 if model.has_states else 36, 48, 16 if model.has_rows else 28, 28]
    assert await talk(model, cache="lru") == (expected, cached)


@pytest.mark.parametrize(
    "family",
    ["qwen3_next", "falcon_h1", "lfm2", "bamba", "granitemoehybrid", "nemotron_h", "mamba2"],
)
async def test_a_conversation_goes_on_from_its_last_state(family: str, loaded: Loaded) -> None:
    await check(loaded(family))


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3"])
@pytest.mark.parametrize("rings", ["always", "never"])
async def test_a_conversation_goes_on_from_its_windows(family: str, rings: str, tiny: Tiny) -> None:
    model = load_model(str(tiny(family)), attention="packed", sliding_window_rows=rings)
    assert model.has_rows == (rings == "always")
    await check(model)


async def cached_of(pair: EnginePair, length: int, salt: int) -> int:
    return (await pair.outputs(prompt_of(length, salt), greedy(2)))[0].cached_tokens


async def test_a_prompt_is_divided_where_a_state_is_of_use(loaded: Loaded) -> None:
    async with EnginePair(loaded("lfm2"), page_size=4, chunk_tokens=18, cache="lru") as pair:
        steps = Watched(pair.prefill.steps.runner)
        await pair.tokens(prompt_of(40), greedy(1))
        assert steps.new == [[16], [16], [4], [4]], "18 tokens are no whole pages"
        assert pair.caches[0].stats().states == 4
        steps.steps.clear()
        await pair.tokens(prompt_of(25) + prompt_of(8, 1), greedy(1))
        assert steps.new == [[8], [4], [5]], "24 tokens are cached, and there is a state after 16"


async def test_what_was_evicted_is_computed_again(loaded: Loaded) -> None:
    async with EnginePair(loaded("lfm2"), **HOW, cache="lru", cache_states=1) as pair:
        found = [await cached_of(pair, 30, salt) for salt in (0, 0, 1, 0, 0)]
        assert found == [0, 28, 0, 0, 28]
        stats = pair.caches[0].stats()
        assert (stats.states, stats.limit_states, stats.pages) == (1, 1, 14)
        assert stats.evicted_states >= 2


async def test_a_long_prompt_leaves_slots_to_others(loaded: Loaded) -> None:
    async with EnginePair(loaded("lfm2"), **HOW, cache="lru", cache_states=8) as pair:
        for salt, length in enumerate((30, 30, 30, 110)):
            assert await cached_of(pair, length, salt) == 0
        stats = pair.caches[0].stats()
        assert (stats.states, stats.evicted_states) == (8, 0)
        assert (await cached_of(pair, 30, 0), await cached_of(pair, 110, 3)) == (28, 108)


async def test_a_prompt_that_decode_has_whole_moves_its_row(loaded: Loaded) -> None:
    prompt = prompt_of(32)
    async with EnginePair(loaded("qwen3_next"), **HOW, cache="lru") as pair:
        first = await pair.tokens(prompt, greedy(9))
        assert pair.caches[1].stats().pages == 8, "only pages of the prompt"
        again = await pair.outputs(prompt, greedy(9))
        assert [out.token_id for out in again] == first and again[0].cached_tokens == 28
        assert pair.rooms[-1].sends[-1] == (1, True) and pair.rooms[-1].pages.size == 1
        one_more = (await pair.outputs(prompt_of(33), greedy(1)))[0]
        assert one_more.cached_tokens == 28, "no token is computed alone"


@pytest.mark.parametrize("rings", [False, True])
@pytest.mark.parametrize("what", ["zeroed", "swapped"])
async def test_a_wrong_state_shows(what: str, rings: bool, loaded: Loaded, tiny: Tiny) -> None:
    """The negative control of the tests above."""
    model = (
        load_model(str(tiny("gpt_oss")), attention="packed", sliding_window_rows="always")
        if rings
        else loaded("lfm2")
    )
    prompt = prompt_of(30)
    async with EnginePair(model, **HOW, cache="lru") as pair:
        expected = await pair.tokens(prompt, greedy(8))
        assert await pair.tokens(prompt, greedy(8)) == expected
        await pair.tokens(prompt_of(30, 7), greedy(1))
        memory = store_of(pair).memory
        for component in memory.layout.components:
            stream = memory.array(component.name)
            stream[:] = 0 if what == "zeroed" else np.roll(stream, 2, axis=0)
        outputs = await pair.outputs(prompt, greedy(8))
        assert outputs[0].cached_tokens == 28 and [out.token_id for out in outputs] != expected


@pytest.mark.parametrize("host", [{"host_pages": 64}, {}], ids=["comes back", "is computed again"])
async def test_who_is_retracted_has_his_state(
    host: dict[str, int], loaded: Loaded, generated: Generated
) -> None:
    model, prompt = loaded("qwen3_next"), prompt_of(30)
    expected = generated("qwen3_next", prompt, 12)
    async with EnginePair(model, **HOW, cache="lru", new_token_ratio=0.5, **host) as pair:
        await pair.tokens(prompt, greedy(2))
        for step in (2, 5):
            found = []
            async for out in pair.stream(prompt, greedy(12)):
                found.append(out.token_id)
                if len(found) == step:
                    pair.decode.retract_all()
            assert found == expected
            assert pair.rooms[-1].pages.size == 2, "a page and the row: decode had the others"
        report = pair.decode.retraction
        assert (report.resumes, report.recomputes) == ((2, 0) if host else (0, 2))


async def test_a_prompt_is_computed_where_no_slot_is_to_be_had(loaded: Loaded) -> None:
    async with EnginePair(loaded("lfm2"), **HOW, cache="lru", cache_states=1) as pair:
        slots = store_of(pair).slots
        taken = slots.take(1, "another prompt")
        assert len(await pair.tokens(prompt_of(37), greedy(3))) == 3
        assert not pair.caches[0].stats().states and pair.prefill.failed_steps == 0
        slots.give_back(taken, "another prompt")


async def test_states_of_failed_rooms_are_not_cached(loaded: Loaded) -> None:
    prompt = prompt_of(30)
    async with EnginePair(loaded("lfm2"), **HOW, cache="lru") as pair:
        room = pair.room(prompt)
        room.gate.clear()  # all of it is computed and nothing lands
        leg = pair.send(room, prompt, greedy(1))
        await room.sent()
        assert store_of(pair).slots.free_pages == 32 - 2
        room.close()
        with pytest.raises(KvflowError):
            await leg
        assert not pair.caches[0].stats().states and not pair.caches[0].stats().pages
        assert store_of(pair).slots.free_pages == 32
        room.gate.set()
        assert (await pair.outputs(prompt, greedy(3)))[0].cached_tokens == 0


async def test_slots_of_a_running_step_are_not_used_again(loaded: Loaded) -> None:
    """The request is dropped while the step runs (I13)."""
    async with EnginePair(loaded("lfm2"), **HOW, cache="lru") as pair:
        await pair.tokens(prompt_of(30), greedy(1))
        slots = store_of(pair).slots
        seen: list[tuple[int, int]] = []
        legs: list[asyncio.Task[Any]] = []
        loop = asyncio.get_running_loop()

        async def drop() -> None:
            legs[0].cancel()
            pair.caches[0].flush()
            await asyncio.gather(*legs, return_exceptions=True)
            seen.append((slots.held_pages, slots.returning_pages))

        steps = Watched(pair.prefill.steps.runner)
        steps.before = lambda: asyncio.run_coroutine_threadsafe(drop(), loop).result(10)
        prompt = prompt_of(30) + prompt_of(9, 1)
        legs.append(pair.send(pair.room(prompt), prompt, greedy(1)))
        await until(lambda: bool(seen))
        assert seen == [(2, 2)], "one is read, the other written"
        await until(lambda: slots.free_pages == 32 and pair.source.places.at_rest())


async def test_who_gives_way_has_his_slots_no_more(loaded: Loaded, generated: Generated) -> None:
    early, other, params = prompt_of(30, 1), prompt_of(30, 2), greedy(4)
    async with EnginePair(
        loaded("lfm2"), **HOW, cache="lru", cache_states=4, source_pages=12, optimistic_tries=2
    ) as pair:
        slots, room = store_of(pair).slots, pair.room(early, late=True)
        leg = pair.send(room, early, params)
        await until(lambda: slots.free_pages == 3)
        assert await pair.tokens(other, params) == generated("lfm2", other, 4)
        assert pair.prefill.optimism.lost == 1
        room.meet()
        found = await tokens_of(pair.decode.generate(room, early, params))
        await leg
        again = [await pair.tokens(prompt, params) for prompt in (early, other, early)]
        assert [found, *again] == [generated("lfm2", p, 4) for p in (early, early, other, early)]


async def test_caches_that_would_do_without_states_are_refused(loaded: Loaded) -> None:
    async with EnginePair(loaded("lfm2"), **HOW, cache="lru") as pair:
        side, executor = pair.source, pair._threads[0]
        with pytest.raises(MisuseError, match="needs a cache with states"):
            PrefillEngine(loaded("lfm2"), side.pool, side.pages, executor, cache=pair.caches[1])
    async with EnginePair(loaded("jamba"), **HOW) as jamba:
        with pytest.raises(MisuseError, match="computes every prompt as a whole"):
            PrefillEngine(
                loaded("jamba"),
                jamba.source.pool,
                jamba.source.pages,
                executor,
                cache=pair.caches[0],
            )


@asynccontextmanager
async def configured(
    model: LoadedModel,
    role: Role = "prefill",
    ranks: int = 1,
    memory_bytes: int | None = None,
    **given: Any,
) -> AsyncIterator[PrefixCache | None]:
    """The cache of a role with these settings, on a machine with so many bytes."""
    computes = role == "prefill"
    settings = resolve(role, {"model_path": model.name, **given}, env={})
    async with EnginePair(model, **HOW) as pair:
        side = pair.source if computes else pair.target
        parts = Parts(model, side.pool, pair._threads[0])
        with pytest.MonkeyPatch.context() as patch:
            if memory_bytes is not None:
                available = Available(memory_bytes, "memory of the machine")
                patch.setattr("kvflow.memory.shared.available_memory", lambda: available)
            async with prefix_cache(settings, parts, computes=computes, ranks=ranks) as found:
                yield found


async def refusal(model: LoadedModel, **given: Any) -> str:
    with pytest.raises(MisuseError) as refused:
        async with configured(model, **given):
            pass
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("family", "ranks", "why"),
    [
        ("jamba", 1, "computes every prompt as a whole"),
        ("lfm2", 2, "keeps a state for each request, which the ranks of a prefill"),
        ("llama", 2, ""),
        ("lfm2", 1, ""),
    ],
)
async def test_by_default_a_prefill_caches_what_its_model_can_take(
    family: str, ranks: int, why: str, loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(family)
    caplog.set_level("INFO")
    async with configured(model, ranks=ranks) as found:
        assert (found is None) is bool(why)
    lines = [r.getMessage() for r in caplog.records if "not cached" in r.getMessage()]
    assert len(lines) == bool(why) and all(why in line for line in lines)
    async with configured(model, ranks=ranks, prefix_cache="off") as found:
        assert found is None
    for name, value in (("prefix_cache", "lru"), ("kv_events_config", "{}")) if why else ():
        said = await refusal(model, ranks=ranks, **{name: value})
        assert re.search(f"--{name.replace('_', '-')} .*{why}.*leave it out", said)


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        (
            "jamba",
            {},
            r"--prefix-cache lru: \S+ \(jamba\) computes every prompt as a whole; leave it out",
        ),
        (
            "lfm2",
            {"cache_state_bytes": 5},
            "--cache-state-bytes 5: 5 bytes do not hold the state of one request",
        ),
        (
            "mamba2",
            {"cache_host_bytes": 1 << 20},
            "--cache-host-bytes 1048576: .* those of this pool hold nothing",
        ),
    ],
)
async def test_what_a_prefill_cannot_cache_is_said_in_one_line(
    family: str, given: dict[str, Any], message: str, loaded: Loaded
) -> None:
    assert re.search(message, await refusal(loaded(family), prefix_cache="lru", **given))


async def test_a_prefill_starts_without_a_cache_where_states_have_no_memory(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    async with configured(loaded("lfm2"), memory_bytes=100) as found:
        assert found is None
    assert caplog.text.count("prefixes are not cached: --cache-state-bytes 1073741824: ") == 1
    said = await refusal(loaded("lfm2"), memory_bytes=100, prefix_cache="lru")
    assert re.search(r"--cache-state-bytes 1073741824: .*100 bytes are available", said)


async def test_a_prefill_leaves_storage_out_and_a_decode_keeps_no_states(
    loaded: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("lfm2")
    store: dict[str, Any] = {"l3": "file", "l3_dir": str(tmp_path), "l3_bytes": 1 << 20}
    async with configured(model, prefix_cache="lru", cache_host_bytes=1 << 20, **store) as found:
        assert found is not None and found.states is not None and found.stats().storage is None
        assert found.stats().limit_states == 256 + found.stats().host_limit_pages
    assert "states are not stored" in caplog.text
    async with configured(model, "decode", prefix_cache="lru") as found:
        assert found is not None and found.states is None


async def test_memory_for_states_of_a_model_without_any_is_said_to_be_of_no_use(
    llama: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    cases: list[tuple[dict[str, Any], int]] = [({}, 0), ({"cache_state_bytes": 5}, 1)]
    for given, lines in cases:
        async with configured(llama, prefix_cache="lru", **given) as found:
            assert found is not None and found.states is None
        assert caplog.text.count("--cache-state-bytes 5: ") == lines


def test_memory_for_no_state_is_refused() -> None:
    kinds = [StateKind("k", "int8", (1,), SLOT), StateKind("state", "int8", (8,), ROW)]
    pool = PagedPool.allocate(
        build_layout(kinds, page_size=2, num_pages=2, num_rows=2), shared=False
    )
    with pytest.raises(
        MisuseError, match="7 bytes do not hold the state of one request, which is 8 bytes"
    ):
        StateStore(pool, 7)
    pool.close()
    pool = PagedPool.allocate(build_layout(kinds[:1], page_size=2, num_pages=2), shared=False)
    with pytest.raises(MisuseError, match="the pool has no rows"):
        StateStore(pool, 7)
    pool.close()


@pytest.mark.parametrize("fewest", [1, 2])
def test_every_prompt_is_divided_into_chunks_that_the_model_takes(fewest: int, seed: int) -> None:
    rng = random.Random(seed)
    model: Any = SimpleNamespace(whole_prompts=False, has_states=fewest == 2)
    for _ in range(3000):
        size, length, most = rng.choice((1, 2, 3, 4, 16)), rng.randint(1, 60), rng.randint(1, 20)
        last = max(0, (length - fewest) // size * size)
        begin, branch = (rng.randint(0, last // size) for _ in range(2))
        cache: Any = SimpleNamespace(page_size=size)
        states = PromptStates(cache, cache, fewest, torch.device("cpu"))
        prefix = SimpleNamespace(branch_pages=max(begin, branch))
        sequence = SimpleNamespace(prompt_length=length, computed=begin * size)
        request: Any = SimpleNamespace(sequence=sequence, prefix=prefix)
        ends = [sequence.computed]
        while sequence.computed < length:
            count = states.chunk(request, most, partial(LoadedModel.chunk, model))
            assert min(fewest, length) <= count <= max(most, fewest + 1), (size, length, most, ends)
            sequence.computed += count
            ends.append(sequence.computed)
        assert sequence.computed == length
        # Too near to the last one.
        near = {prefix.branch_pages * size} - set(range(last - fewest + 1, last))
        for end in ({last} | near) - set(range(begin * size + fewest)):
            assert end in ends, (size, length, most, prefix.branch_pages, ends)
