"""What a body says of the prefix cache, and what an answer tells of it."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from kvflow.protocols.cache.hashes import ANY, Namespace
from tests.server.fake_service import Role, Server
from tests.server.test_generate import body, met, post

__all__ = ["met"]  # a fixture
CHAT: Any = [{"role": "user", "content": "w1 w2 w3"}]


def namespaces(role: Role) -> list[Namespace]:
    return [request.namespace for request in role.service.requests]


async def test_both_legs_keep_the_same_prompts_apart(
    client: openai.AsyncOpenAI, prefill: Role, decode: Role
) -> None:
    salted: Any = {"cache_salt": "mine"}
    await client.chat.completions.create(
        model="fake", messages=CHAT, max_tokens=1, extra_body=salted
    )
    await client.completions.create(model="fake", prompt="w1", max_tokens=1, n=2, extra_body=salted)
    await client.completions.create(model="fake", prompt="w1", max_tokens=1)
    await client.completions.create(
        model="fake", prompt="w1", max_tokens=1, extra_body={"cache_salt": ""}
    )
    for role in (prefill, decode):
        assert namespaces(role) == [Namespace(salt="mine")] * 3 + [ANY] * 2


async def test_salts_and_keys_of_other_prompts_are_never_mistaken_for_each_other(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    pairs = [("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("b", "a")]
    for room, (salt, key) in enumerate(pairs[:5], 7):
        found = body(cache_salt=salt, extra_key=key, bootstrap_room=room)
        assert (await post(session, decode_server, found))[0] == 200
    assert len(set(namespaces(decode))) == 5 and ANY not in namespaces(decode)


async def test_each_prompt_of_a_body_has_its_own(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    rooms = {"bootstrap_room": [7, 8, 9, 10], "sampling_params": {"max_new_tokens": 1, "n": 2}}
    found = body(text=["w1", "w1"], cache_salt=["a", "b"], **rooms)
    status, _ = await post(session, decode_server, found)
    assert status == 200
    by_room = {request.room: request.namespace.salt for request in decode.service.requests}
    assert by_room == {7: "a", 8: "a", 9: "b", 10: "b"}


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
async def test_what_is_no_salt_is_refused(
    field: str,
    value: Any,
    why: str,
    decode: Role,
    decode_server: Server,
    session: aiohttp.ClientSession,
) -> None:
    status, answer = await post(session, decode_server, body(**{field: value}))
    assert (
        status == 400
        and why.format(field) in answer["error"]["message"]
        and field in answer["error"]["message"]
    )
    assert "\n" not in answer["error"]["message"] and not decode.service.requests
    assert (await post(session, decode_server, body(**{field: "x" * 512})))[0] == 200


async def test_answers_and_streams_say_how_many_tokens_were_cached(
    client: openai.AsyncOpenAI, decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    decode.service.cached_tokens = 2

    def cached(answer: Any) -> int:
        return answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[no-any-return]

    assert (
        cached(await client.chat.completions.create(model="fake", messages=CHAT, max_tokens=3)) == 2
    )
    both = await client.completions.create(
        model="fake", prompt=["w1 w2 w3", "w4 w5 w6"], max_tokens=3, n=2
    )
    assert cached(both) == 4, "once for each prompt, not for each of its choices"
    told: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(
        model="fake", prompt="w1 w2 w3", max_tokens=3, stream=True, stream_options=told
    )
    assert {cached(chunk) async for chunk in stream} == {2}
    _, answer = await post(session, decode_server, body())
    assert answer["meta_info"]["cached_tokens"] == 2
    async with session.post(
        decode_server.make_url("/generate"), json=body(bootstrap_room=8, stream=True)
    ) as found:
        lines = [
            line.removeprefix(b"data: ")
            for line in (await found.read()).split(b"\n\n")
            if b"{" in line
        ]
    assert {json.loads(line)["meta_info"]["cached_tokens"] for line in lines} == {2}
