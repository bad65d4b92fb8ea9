"""What a body says of the prefix cache, and what an answer tells of it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from kvflow.protocols.cache.hashes import ANY, Namespace
from tests.fakes.service import Role, body

CHAT: Any = [{"role": "user", "content": "w1 w2 w3"}]


def namespaces(role: Role) -> list[Namespace]:
    return [request.namespace for request in role.service.requests]


async def test_both_legs_keep_the_same_prompts_apart(
    client: openai.AsyncOpenAI, prefill: Role, decode: Role
) -> None:
    salted: Any = {"model": "fake", "max_tokens": 1, "extra_body": {"cache_salt": "mine"}}
    await client.chat.completions.create(messages=CHAT, **salted)
    await client.completions.create(prompt="w1", n=2, **salted)
    for extra in ({}, {"cache_salt": ""}):
        await client.completions.create(prompt="w1", **salted | {"extra_body": extra})
    for role in (prefill, decode):
        assert namespaces(role) == [Namespace(salt="mine")] * 3 + [ANY] * 2


@pytest.mark.usefixtures("met")
async def test_salts_and_keys_of_other_prompts_are_never_mistaken_for_each_other(
    decode: Role,
) -> None:
    pairs = [("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab")]
    for room, (salt, key) in enumerate(pairs, 7):
        found = body(cache_salt=salt, extra_key=key, bootstrap_room=room)
        await decode.post("/generate", found)
    assert len(set(namespaces(decode))) == 5 and ANY not in namespaces(decode)


@pytest.mark.usefixtures("met")
async def test_each_prompt_of_a_body_has_its_own(decode: Role) -> None:
    rooms = {"bootstrap_room": [7, 8, 9, 10], "sampling_params": {"max_new_tokens": 1, "n": 2}}
    found = body(text=["w1", "w1"], cache_salt=["a", "b"], **rooms)
    await decode.post("/generate", found)
    by_room = {request.room: request.namespace.salt for request in decode.service.requests}
    assert by_room == {7: "a", 8: "a", 9: "b", 10: "b"}


@pytest.mark.usefixtures("met")
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (1, "Expected `str | array | null`"),
        ({}, "Expected `str | array | null`"),
        ([1], "Expected `str`"),
        (["a", "b"], "{}: 2 entries for 1 prompts; give one for each"),
        ("x" * 513, "{}: 513 characters, limit 512"),
        ("a\0b", "{}: it has a NUL character"),
    ],
)
async def test_what_is_no_salt_is_refused(field: str, value: Any, why: str, decode: Role) -> None:
    message = (await decode.refuses("/generate", body(**{field: value})))["message"]
    assert why.format(field) in message and field in message and "\n" not in message
    await decode.post("/generate", body(**{field: "x" * 512}))


async def test_answers_and_streams_say_how_many_tokens_were_cached(
    client: openai.AsyncOpenAI, decode: Role
) -> None:
    decode.service.cached_tokens = 2

    def cached(answer: Any) -> int:
        return answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[no-any-return]

    asked: Any = {"model": "fake", "max_tokens": 3}
    assert cached(await client.chat.completions.create(messages=CHAT, **asked)) == 2
    both = await client.completions.create(prompt=["w1 w2 w3", "w4 w5 w6"], n=2, **asked)
    assert cached(both) == 4, "once for each prompt, not for each of its choices"
    told: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(
        prompt="w1 w2 w3", stream=True, stream_options=told, **asked
    )
    assert {cached(chunk) async for chunk in stream} == {2}


@pytest.mark.usefixtures("met")
async def test_generate_says_how_many_tokens_were_cached_in_every_event_too(decode: Role) -> None:
    decode.service.cached_tokens = 2
    answers = [await decode.post("/generate", body())]
    answers += await decode.events("/generate", body(bootstrap_room=8))
    assert {one["meta_info"]["cached_tokens"] for one in answers} == {2}
