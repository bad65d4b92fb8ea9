"""The hashes of prompts' beginnings, and the prompts that a worker was sent."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.http.bodies import decoded
from kvflow.http.large_bodies import LARGE_BYTES, take_apart
from kvflow.router.prefixes import MAX_BYTES, KnownPrefixes
from kvflow.router.prompts import COARSE_BYTES, FINE_BYTES, FINE_CHUNKS, Chain, PromptFields

Body = dict[str, Any]


async def chains_of(body: Body) -> list[Chain]:
    """As the router reads a body that came over HTTP."""
    rest, long_values = await take_apart(json.dumps(body).encode())
    return await long_values.put_back(decoded(rest, PromptFields)).chains()


async def chain_of(body: Body) -> Chain:
    (chain,) = await chains_of(body)
    return chain


def said(role: str, content: Any) -> Body:
    return {"role": role, "content": content}


def words(seed: int, characters: int) -> str:
    dice = random.Random(seed)
    return "".join(dice.choice("abcdefgh ü\n") for _ in range(characters))


@pytest.mark.parametrize(
    "characters", [300, 20_000, LARGE_BYTES], ids=["small", "grows large", "large"]
)
async def test_the_next_turn_of_a_chat_goes_on_where_this_one_ends(
    characters: int, seed: int
) -> None:
    first = [said("system", words(seed, characters)), said("user", words(seed + 1, characters))]
    # What clients send back of an answer has its fields in any order.
    answer = {"content": words(seed + 2, characters), "refusal": None, "role": "assistant"}
    following = [*first, answer, said("user", [{"type": "text", "text": "and?"}])]
    before = await chain_of({"messages": first})
    after = await chain_of({"messages": following, "temperature": 0})
    assert before and after[: len(before)] == before and len(after) > len(before)
    assert len(set(after)) == len(after)
    turned = [{name: message[name] for name in reversed(message)} for message in following]
    assert await chain_of({"messages": turned}) == after


@pytest.mark.parametrize("name", ["input_ids", "prompt"])
async def test_the_next_turn_of_token_ids_goes_on_where_this_one_ends(name: str, seed: int) -> None:
    """Short lists come as lists, long ones as arrays."""
    dice = random.Random(seed)
    ids = [dice.randrange(1 << 31) for _ in range(20_000)]
    chains = [await chain_of({name: ids[:n]}) for n in (15, 16, 500, 20_000)]
    coarse = (80_000 - 65_536) // COARSE_BYTES
    assert [len(chain) for chain in chains] == [0, 1, 31, FINE_CHUNKS + coarse]
    assert all(chains[-1][: len(chain)] == chain for chain in chains)


async def test_text_is_cut_into_chunks_of_bytes(seed: int) -> None:
    text = words(seed, 90_000)
    whole = await chain_of({"text": text})
    extra = len(text.encode()) - FINE_CHUNKS * FINE_BYTES
    assert len(whole) == FINE_CHUNKS + extra // COARSE_BYTES
    assert await chain_of({"prompt": text}) == whole, "the same prompt by another route"
    other = await chain_of({"text": text[:30_000] + "?" + text[30_001:]})
    same = sum(a == b for a, b in zip(whole, other, strict=True))
    assert same == len(text[:30_000].encode()) // FINE_BYTES
    assert whole[:same] == other[:same]


async def test_a_conversation_of_responses_goes_on_where_this_turn_ends(seed: int) -> None:
    first = [said("user", words(seed, 300))]
    before = await chain_of({"input": first})
    assert before == (await chain_of({"input": [*first, said("user", "and?")]}))[: len(before)]
    assert await chain_of({"input": words(seed, 300)})


async def test_tools_that_a_template_does_not_get_separate_nothing(seed: int) -> None:
    chat = {"messages": [said("user", words(seed, 300))]}
    tools = [{"type": "function", "function": {"name": "a"}}]
    plain = await chain_of(chat)
    assert await chain_of({**chat, "tools": tools, "tool_choice": "auto"}) != plain
    for none in ("none", {"type": "none"}):
        assert await chain_of({**chat, "tools": tools, "tool_choice": none}) == plain


@pytest.mark.parametrize(
    "field",
    [
        {"cache_salt": "a"},
        {"extra_key": "a"},
        {"extra_key": ["a"]},
        {"model": "a"},
        {"reasoning_effort": "a"},
        {"tools": [{"type": "function"}]},
        {"system": "a"},
        {"instructions": "a"},
        {"chat_template_kwargs": {"a": 1}},
    ],
    ids=str,
)
async def test_what_separates_prompts_separates_their_hashes(field: Body) -> None:
    body = {"messages": [said("user", "x" * 200)]}
    plain, separate = await chain_of(body), await chain_of(body | field)
    assert plain and not set(plain) & set(separate)
    assert await chain_of(field | body) == separate


async def test_what_is_nested_otherwise_is_another_prompt() -> None:
    contents: list[Any] = [
        ["a", "b"],
        [["a"], "b"],
        [["a", "b"]],
        ["a", ["b"]],
        ["ab"],
        {"a": "b"},
        None,
        1,
        11,
        True,
    ]
    chains = [
        await chain_of({"messages": [said("user", one), said("user", "x" * 100)]})
        for one in contents
    ]
    assert len({tuple(chain) for chain in chains}) == len(contents) and all(chains)


async def test_a_body_has_as_many_chains_as_prompts(seed: int) -> None:
    texts = [words(seed + i, 200) for i in range(3)]
    assert await chains_of({"text": texts}) == [await chain_of({"text": text}) for text in texts]
    ids = [list(range(40)), list(range(1000, 1200))]
    assert await chains_of({"input_ids": ids}) == [
        await chain_of({"input_ids": one}) for one in ids
    ]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "x"},
        {"input_ids": [-1] * 99},
        {"input_ids": [1 << 40]},
        {"input_ids": [1, "x"]},
        {"input_ids": [[1.5] * 99]},
        {"prompt": [{"a": 1}, None]},
        {"text": 7},
        {"input_ids": []},
    ],
    ids=str,
)
async def test_what_a_worker_will_refuse_has_no_hashes(body: Body) -> None:
    assert [chain for chain in await chains_of(body) if chain] == []


async def test_a_long_prompt_lets_others_have_their_turn() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    fields = PromptFields(text="x" * (4 << 20))
    task = asyncio.create_task(others())
    (chain,) = await fields.chains()
    task.cancel()
    assert turns >= 60 and len(chain) == FINE_CHUNKS + 4032


def known(limit_tokens: int, *sent: Sequence[int]) -> KnownPrefixes:
    prefixes = KnownPrefixes()
    prefixes.resize(limit_tokens)
    for chain in sent:
        prefixes.note([list(chain)])
    return prefixes


def test_the_end_of_the_least_recently_used_prompt_goes_first() -> None:
    prefixes = known(16 * 4, [1, 2, 3], [1, 7])
    assert len(prefixes) == 4
    prefixes.note([[1, 2, 4]])
    assert prefixes.matched([[1, 2, 3]]) == 2, "3 was used before 7 was"
    assert prefixes.matched([[1, 7]]) == 2 and prefixes.matched([[1, 2, 4]]) == 3
    assert prefixes.matched([[1, 7], [1, 2], [9]]) == 4
    assert prefixes.bytes == prefixes.limit_bytes == 4 * FINE_BYTES


def test_a_prompt_longer_than_the_cache_is_known_by_its_beginning() -> None:
    prefixes = known(16 * 3, [1, 2, 3, 4, 5])
    assert prefixes.matched([[1, 2, 3, 4, 5]]) == 3


def test_late_chunks_count_for_what_they_are() -> None:
    prefixes = known(1 << 20, range(FINE_CHUNKS + 10))
    assert prefixes.bytes == FINE_CHUNKS * FINE_BYTES + 10 * COARSE_BYTES


def test_a_worker_without_a_cache_is_known_to_have_nothing() -> None:
    prefixes = known(0, [1, 2])
    assert len(prefixes) == prefixes.matched([[1, 2]]) == 0
    prefixes = known(1 << 40, [1, 2])
    assert prefixes.limit_bytes == MAX_BYTES
    prefixes.resize(0)
    assert len(prefixes) == prefixes.bytes == 0


PROMPTS = st.lists(st.integers(0, 2), max_size=8).map(
    lambda items: [hash(tuple(items[: n + 1])) for n in range(len(items))]
)
ACTIONS = st.lists(st.one_of(PROMPTS, st.just("forget"), st.integers(0, 12)), max_size=40)


@given(ACTIONS, st.integers(0, 12), st.lists(PROMPTS, min_size=1, max_size=5))
def test_what_is_known_was_sent_and_fits(
    actions: list[Any], chunks: int, asked: list[Chain]
) -> None:
    """Against the list of all prompts since the last flush."""
    prefixes = known(chunks * 16)
    sent: list[Chain] = []
    complete = True  # nothing had to go
    for action in actions:
        if action == "forget":
            prefixes.forget()
            sent, complete = [], True
        elif isinstance(action, int):
            prefixes.resize(action * 16)
        else:
            prefixes.note([action])
            sent.append(action)
            fits = min(len(action), prefixes.limit_bytes // FINE_BYTES)
            assert prefixes.matched([action]) == fits, "the newest prompt is known"
        complete &= len(set().union(*sent)) * FINE_BYTES <= prefixes.limit_bytes
        assert prefixes.bytes == len(prefixes) * FINE_BYTES <= prefixes.limit_bytes
        for prompt in asked:
            begins = max(
                (sum(a == b for a, b in zip(prompt, one, strict=False)) for one in sent), default=0
            )
            found = prefixes.matched([prompt])
            assert found == begins if complete else found <= begins
            # What is known of a prompt is its beginning, so that a search by halves finds its end.
            for n in range(len(prompt) + 1):
                assert prefixes.matched([prompt[:n]]) == min(n, found)
