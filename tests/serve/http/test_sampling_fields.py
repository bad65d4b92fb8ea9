"""Penalties, biases, bans and minimum lengths under the names of each API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import openai
import pytest

from tests.fakes.service import CHAT, META, PROMPTS, Meeting, Role, body

SHARED = {
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -1.5,
    "repetition_penalty": 1.2,
}


async def test_the_official_clients_own_fields(
    client: openai.AsyncOpenAI, prefill: Role, decode: Role
) -> None:
    extra = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "bad_words": ["w5", "w6 w7"],
        "priority": -3,
    }
    own: Any = {
        "frequency_penalty": 0.5,
        "presence_penalty": -1.5,
        "logit_bias": {"7": -100, "8": 2.5},
    }
    asked: Any = {"model": "fake", "max_tokens": 3, "extra_body": extra, **own}
    await client.chat.completions.create(messages=CHAT, **asked)
    await client.completions.create(prompt="w1", n=2, **asked)
    expected = {
        **SHARED,
        "logit_bias": ((7, -100.0), (8, 2.5)),
        "min_new_tokens": 2,
        "bad_words": ((5,), (6, 7)),
        "priority": -3,
    }
    for role in (prefill, decode):
        assert told(role, expected) == [expected] * 3


def told(role: Role, names: Iterable[str]) -> list[dict[str, Any]]:
    every = [request.params for request in role.service.requests]
    return [{name: getattr(params, name) for name in names} for params in every]


async def test_generate_has_sglangs_names(prefill: Role) -> None:
    sampling = {**SHARED, "min_new_tokens": 1, "max_new_tokens": 1}
    await prefill.post("/generate", body(sampling_params={**sampling, "logit_bias": {"7": 1}}))
    expected = {**sampling, "logit_bias": ((7, 1.0),)}
    assert told(prefill, expected) == [expected]


@pytest.mark.parametrize(
    "defaults",
    [
        dict.fromkeys([*SHARED, "min_new_tokens", "logit_bias"]),
        {
            "min_p": 0,
            "frequency_penalty": 0,
            "repetition_penalty": 1,
            "min_new_tokens": 0,
            "logit_bias": {},
        },
    ],
)
async def test_defaults_change_nothing(prefill: Role, defaults: dict[str, Any]) -> None:
    await prefill.post("/generate", body(sampling_params={"max_new_tokens": 1, **defaults}))
    params = prefill.service.requests[0].params
    assert not params.adjusts
    assert params.min_p == 0


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("/generate", {"min_p": 1.01}, "min_p 1.01 is outside 0..1"),
        ("/generate", {"frequency_penalty": 3}, "frequency_penalty 3.0 is outside -2..2"),
        ("/generate", {"repetition_penalty": 0}, "repetition_penalty 0.0 is outside 0.01..100"),
        (
            "/generate",
            {"min_new_tokens": 4},
            "min_new_tokens (min_tokens) 4 is outside 0..3 (max_new_tokens)",
        ),
        ("/generate", {"min_new_tokens": 1.5}, "sampling_params.min_new_tokens"),
        ("/generate", {"logit_bias": {"w7": 1}}, "logit_bias: key 'w7' is not a token id"),
        ("/generate", {"logit_bias": {"-7": 1}}, "logit_bias: key '-7' is not a token id"),
        (
            "/generate",
            {"logit_bias": {"100": 1}},
            "logit_bias: token id 100 is outside the model's vocabulary, 0..99",
        ),
        (
            "/generate",
            {"logit_bias": {"7": -101}},
            "logit_bias: -101.0 for token 7 is outside -100..100",
        ),
        ("/generate", {"logit_bias": [7]}, "sampling_params.logit_bias"),
        ("/generate", {"min_tokens": 2}, "sampling_params.min_tokens is not supported"),
        ("/generate", {"bad_words": ["w1"]}, "sampling_params.bad_words is not supported"),
        ("/v1/completions", {"presence_penalty": -2.5}, "presence_penalty -2.5 is outside -2..2"),
        (
            "/v1/completions",
            {"min_tokens": 17},
            "min_new_tokens (min_tokens) 17 is outside 0..16 (max_new_tokens)",
        ),
        ("/v1/completions", {"min_new_tokens": 2}, "min_new_tokens is not supported"),
        ("/v1/completions", {"bad_words": "w1"}, "bad_words"),
        ("/v1/completions", {"bad_words": [""]}, "bad_words: '' has no tokens"),
        ("/v1/completions", {"bad_words": ["w1"] * 1025}, "bad_words: 1025 entries, limit 1024"),
        (
            "/v1/completions",
            {"bad_words": [f"w{i}" for i in range(40)]},
            "may leave none of 100 tokens",
        ),
    ],
)
async def test_bad_values_are_named_and_end_both_legs(
    prefill: Role, path: str, fields: dict[str, Any], text: str
) -> None:
    document = body(sampling_params={"max_new_tokens": 3, **fields})
    if path != "/generate":
        document = {"prompt": "w1", **META, **fields}
    assert text in (await prefill.refuses(path, document))["message"]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["x"] * 65, "stop: 65 strings, limit 64"),
        ("x" * 2049, "stop: 2049 characters in all strings, limit 2048"),
        (["x" * 2000, "y" * 49], "stop: 2049 characters in all strings, limit 2048"),
    ],
)
@pytest.mark.parametrize("path", PROMPTS)
async def test_more_stop_strings_than_the_limit_are_named_and_end_both_legs(
    prefill: Role, path: str, stop: Any, text: str
) -> None:
    given = {"sampling_params": {"stop": stop}} if path == "/generate" else {"stop": stop}
    error = await prefill.refuses(path, {**PROMPTS[path], **META, **given})
    assert (error["param"], error["message"]) == ("stop", text)


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/generate", {"text": ["w1", "w2"], "sampling_params": {"n": 2, "max_new_tokens": 1}}),
        ("/v1/completions", {"prompt": ["w1", "w2"], "n": 2, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": CHAT, "n": 4, "max_tokens": 1}),
    ],
)
@pytest.mark.parametrize("given", [None, 0, 7, -(1 << 63), (1 << 63) - 1])
async def test_a_priority_is_that_of_every_choice(
    prefill: Role, path: str, document: dict[str, Any], given: int | None
) -> None:
    async with Role(prefill.service, low_priority_first=True) as turned:
        for role, rooms in ((prefill, [7, 8, 9, 10]), (turned, [11, 12, 13, 14])):
            made = {**document, **META, "bootstrap_room": rooms, "priority": given}
            await role.post(path, made)
    priorities = [request.params.priority for request in prefill.service.requests]
    assert priorities == [given or 0] * 4 + [-(given or 0) - 1] * 4


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    "given", [1 << 63, -(1 << 63) - 1, 1 << 80, -(1 << 80), 1.5, "5", "high", True, [1], {}]
)
async def test_a_priority_that_is_none_is_named_and_ends_both_legs(
    prefill: Role, path: str, given: Any
) -> None:
    error = await prefill.refuses(path, {**PROMPTS[path], **META, "priority": given})
    assert error["param"] == "priority"
    assert "`priority`" in error["message"]
    if isinstance(given, int) and not isinstance(given, bool):
        assert str((1 << 63) - 1) in error["message"] or str(-(1 << 63)) in error["message"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_what_a_body_says_once_is_checked_once(
    meeting: Meeting, decode: Role, path: str
) -> None:
    """Thousands of biases for hundreds of choices would hold up the event loop for seconds."""
    rooms = [7, 8, 9, 10]
    meeting.come(*rooms)
    sampling = {"n": 2, "seed": 3, "logit_bias": {"7": 1}, "stop": ["w70"]}
    document: dict[str, Any] = {"bootstrap_host": ["127.0.0.1"] * 4, "bootstrap_room": rooms}
    if path == "/generate":
        document |= {"input_ids": [[1], [2]], "sampling_params": {**sampling, "max_new_tokens": 1}}
    else:
        document |= {"prompt": [[1], [2]], "max_tokens": 1, "bad_words": ["w5"], **sampling}
    await decode.post(path, document)
    params = [request.params for request in decode.service.requests]
    assert [one.seed for one in params] == [3, 4, 3, 4]
    shared: dict[str, Any] = {"logit_bias": ((7, 1.0),), "stop": ("w70",)}
    if path != "/generate":
        shared["bad_words"] = ((5,),)
    assert told(decode, shared) == [shared] * 4
    for name in shared:
        assert len({id(getattr(one, name)) for one in params}) == 1, name


async def test_too_many_prompts_are_refused_before_any_is_read(
    decode: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: Any, **__: Any) -> Any:
        raise AssertionError("a prompt was encoded")

    monkeypatch.setattr(decode.tokenizer, "encode", encode)
    many = ["w1"] * 257
    for path, fields in (("/generate", {"text": many}), ("/v1/completions", {"prompt": many})):
        error = await decode.refused(400, path, {**META, **fields})
        assert "257 completions" in error["message"]
