"""Penalties, biases, bans and minimum lengths as each API names them, and what is refused before a
room opens.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest

from kvflow.protocols.errors import Code
from tests.server.fake_service import Meeting, Role, Server, served
from tests.server.test_generate import META, body, post

SHARED = {
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -1.5,
    "repetition_penalty": 1.2,
}
CHAT: Any = [{"role": "user", "content": "w1"}]


def told(role: Role, *names: str) -> dict[str, Any]:
    params = role.service.requests[-1].params
    return {name: getattr(params, name) for name in names}


async def test_the_official_clients_own_fields(
    client: openai.AsyncOpenAI, prefill: Role, decode: Role
) -> None:
    """With the extras that vLLM and SGLang know; both legs are told the same."""
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
    await client.chat.completions.create(
        model="fake", messages=CHAT, max_tokens=3, extra_body=extra, **own
    )
    await client.completions.create(
        model="fake", prompt="w1", max_tokens=3, n=2, extra_body=extra, **own
    )
    for role in (prefill, decode):
        assert len(role.service.requests) == 3
        for request in role.service.requests:
            params = request.params
            assert {name: getattr(params, name) for name in SHARED} == SHARED
            assert params.logit_bias == ((7, -100.0), (8, 2.5))
            assert params.min_new_tokens == 2
            assert params.bad_words == ((5,), (6, 7))
            assert params.priority == -3


async def test_generate_has_sglangs_names(
    prefill: Role, prefill_server: Server, session: aiohttp.ClientSession
) -> None:
    sampling = {**SHARED, "min_new_tokens": 1, "max_new_tokens": 1, "logit_bias": {"7": 1}}
    status, _ = await post(session, prefill_server, body(sampling_params=sampling))
    assert status == 200
    assert told(prefill, *SHARED, "min_new_tokens", "logit_bias") == {
        **SHARED,
        "min_new_tokens": 1,
        "logit_bias": ((7, 1.0),),
    }


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
async def test_defaults_change_nothing(
    prefill: Role, prefill_server: Server, session: aiohttp.ClientSession, defaults: dict[str, Any]
) -> None:
    status, _ = await post(
        session, prefill_server, body(sampling_params={"max_new_tokens": 1, **defaults})
    )
    assert status == 200
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
    prefill: Role,
    prefill_server: Server,
    session: aiohttp.ClientSession,
    path: str,
    fields: dict[str, Any],
    text: str,
) -> None:
    document = body(sampling_params={"max_new_tokens": 3, **fields})
    if path != "/generate":
        document = {"prompt": "w1", **META, **fields}
    status, answer = await post(session, prefill_server, document, path)
    assert status == 400
    assert text in answer["error"]["message"]
    assert prefill.service.requests == []
    ((room, cause),) = prefill.service.refused
    assert (room, cause.code) == (7, Code.BAD_REQUEST)
    assert text in cause.text


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["x"] * 65, "stop: 65 strings, limit 64"),
        ("x" * 2049, "stop: 2049 characters in all strings, limit 2048"),
        (["x" * 2000, "y" * 49], "stop: 2049 characters in all strings, limit 2048"),
    ],
)
@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/generate", {"text": "w1"}),
        ("/v1/completions", {"prompt": "w1"}),
        ("/v1/chat/completions", {"messages": CHAT}),
    ],
)
async def test_more_stop_strings_than_the_limit_are_named_and_end_both_legs(
    prefill: Role,
    prefill_server: Server,
    session: aiohttp.ClientSession,
    path: str,
    document: dict[str, Any],
    stop: Any,
    text: str,
) -> None:
    given = {"sampling_params": {"stop": stop}} if path == "/generate" else {"stop": stop}
    status, answer = await post(session, prefill_server, {**document, **META, **given}, path)
    assert (status, answer["error"]["param"], answer["error"]["message"]) == (400, "stop", text)
    ((room, cause),) = prefill.service.refused
    assert (room, cause.code) == (7, Code.BAD_REQUEST)


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
    prefill: Role,
    session: aiohttp.ClientSession,
    path: str,
    document: dict[str, Any],
    given: int | None,
) -> None:
    """Larger is sooner.

    Where the server runs with vLLM's order it is turned round, the extremes too.
    """
    turned = Role(prefill.service, low_priority_first=True)
    for role, sign, rooms in ((prefill, 1, [7, 8, 9, 10]), (turned, -1, [11, 12, 13, 14])):
        prefill.service.requests.clear()
        async with served(role.app) as server:
            made = {**document, **META, "bootstrap_room": rooms, "priority": given}
            status, _ = await post(session, server, made, path)
        assert status == 200
        want = given or 0 if sign == 1 else -(given or 0) - 1
        assert [request.params.priority for request in prefill.service.requests] == [want] * 4


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "given", [1 << 63, -(1 << 63) - 1, 1 << 80, -(1 << 80), 1.5, "5", "high", True, [1], {}]
)
async def test_a_priority_that_is_none_is_named_and_ends_both_legs(
    prefill: Role, prefill_server: Server, session: aiohttp.ClientSession, path: str, given: Any
) -> None:
    prompts: dict[str, dict[str, Any]] = {
        "/generate": {"text": "w1"},
        "/v1/completions": {"prompt": "w1"},
        "/v1/chat/completions": {"messages": CHAT},
    }
    status, answer = await post(
        session, prefill_server, {**prompts[path], **META, "priority": given}, path
    )
    assert status == 400
    error = answer["error"]
    assert error["param"] == "priority"
    assert "`priority`" in error["message"]
    if isinstance(given, int) and not isinstance(given, bool):
        assert str((1 << 63) - 1) in error["message"] or str(-(1 << 63)) in error["message"]
    ((room, cause),) = prefill.service.refused
    assert (room, cause.code) == (7, Code.BAD_REQUEST)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_what_a_body_says_once_is_checked_once(
    meeting: Meeting, decode: Role, decode_server: Server, session: aiohttp.ClientSession, path: str
) -> None:
    """Thousands of biases for hundreds of prompts and choices would hold up the event loop for
    seconds.
    """
    rooms = [7, 8, 9, 10]
    for room in rooms:
        meeting.of(room).set_result(None)
    sampling = {"n": 2, "seed": 3, "logit_bias": {"7": 1}, "stop": ["w70"]}
    document: dict[str, Any] = {"bootstrap_host": ["127.0.0.1"] * 4, "bootstrap_room": rooms}
    if path == "/generate":
        document |= {"input_ids": [[1], [2]], "sampling_params": {**sampling, "max_new_tokens": 1}}
    else:
        document |= {"prompt": [[1], [2]], "max_tokens": 1, "bad_words": ["w5"], **sampling}
    status, _ = await post(session, decode_server, document, path)
    params = [request.params for request in decode.service.requests]
    assert (status, len(params), {one.seed for one in params}) == (200, 4, {3, 4})
    assert [one.logit_bias for one in params] == [((7, 1.0),)] * 4
    assert len({id(one.logit_bias) for one in params}) == 1
    assert [one.stop for one in params] == [("w70",)] * 4
    assert len({id(one.stop) for one in params}) == 1
    if path != "/generate":
        assert [one.bad_words for one in params] == [((5,),)] * 4
        assert len({id(one.bad_words) for one in params}) == 1


async def test_too_many_prompts_are_refused_before_any_is_read(
    decode: Role,
    decode_server: Server,
    session: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode(*_: Any, **__: Any) -> Any:
        raise AssertionError("a prompt was encoded")

    monkeypatch.setattr(decode.tokenizer, "encode", encode)
    many = ["w1"] * 257
    for path, fields in (("/generate", {"text": many}), ("/v1/completions", {"prompt": many})):
        status, answer = await post(session, decode_server, {**META, **fields}, path)
        assert (status, "257 completions" in answer["error"]["message"]) == (400, True)
