"""/tokenize and /detokenize, asked through the router."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from tests.server.fake_service import Role, Server, WordTokenizer

Session = aiohttp.ClientSession


async def post(
    session: Session, server: Server, path: str, body: dict[str, Any]
) -> tuple[int, Any]:
    async with session.post(server.make_url(path), json=body) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_there_and_back(server: Server, session: Session, prefix: str) -> None:
    for text, ids, count in (("w7 w9", [7, 9], 2), (["w7", "w1 w2"], [[7], [1, 2]], [1, 2])):
        status, answer = await post(
            session, server, f"{prefix}/tokenize", {"model": "fake", "prompt": text}
        )
        assert (status, answer) == (200, {"tokens": ids, "count": count, "max_model_len": 65})
        status, back = await post(session, server, f"{prefix}/detokenize", {"tokens": ids})
        assert (status, back) == (200, {"text": text, "prompt": text})


async def test_special_tokens_are_left_out_unless_they_are_asked_for(
    decode: Role, decode_server: Server, session: Session
) -> None:
    words = decode.tokenizer._tokenizer
    assert isinstance(words, WordTokenizer)
    words.backend_tokenizer.add_special_tokens(["w3"])
    for given, text in (
        ({}, "w1"),
        ({"skip_special_tokens": True}, "w1"),
        ({"skip_special_tokens": False}, "w1 w3"),
    ):
        _, answer = await post(session, decode_server, "/detokenize", {"tokens": [1, 3], **given})
        assert answer["text"] == text


async def test_a_conversation_as_its_completion_would_see_it(
    server: Server, session: Session, decode: Role
) -> None:
    messages = [{"role": "user", "content": "w1"}]
    body = {"messages": messages, "chat_template_kwargs": {"lead": "w9"}, "return_token_strs": True}
    _, answer = await post(session, server, "/tokenize", body)
    assert answer == {"tokens": [9, 1], "token_strs": ["w9", "w1"], "count": 2, "max_model_len": 65}
    chat = {"messages": messages, "chat_template_kwargs": {"lead": "w9"}, "max_tokens": 1}
    assert (await post(session, server, "/v1/chat/completions", chat))[0] == 200
    assert decode.service.requests[0].prompt == answer["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        (
            "/tokenize",
            {"prompt": "w1", "messages": [{"role": "user", "content": "w1"}]},
            400,
            "prompt",
        ),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "w1", "tools": [{"type": "function"}]}, 400, "tools"),
        ("/tokenize", {"prompt": "w1", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [1, [2]]}, 400, None),
        ("/detokenize", {"tokens": [100]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_what_is_wrong_is_named(
    server: Server,
    session: Session,
    path: str,
    body: dict[str, Any],
    status: int,
    param: str | None,
) -> None:
    found, answer = await post(session, server, path, body)
    assert (found, answer["error"]["param"]) == (status, param), answer


async def test_nothing_is_nothing(server: Server, session: Session) -> None:
    assert (await post(session, server, "/tokenize", {"prompt": ""}))[1]["tokens"] == []
    assert (await post(session, server, "/tokenize", {"prompt": []}))[1]["count"] == []
    assert (await post(session, server, "/detokenize", {"tokens": []}))[1]["text"] == ""


async def test_many_texts_are_answered_in_short_turns(
    decode: Role, decode_server: Server, session: Session
) -> None:
    """Of the event loop: the spellings of two million tokens took one turn of three seconds."""
    spelled, turns = decode.tokenizer.token_text, 0
    longest = 0

    def counted(token_id: int) -> str:
        nonlocal turns
        turns += 1
        time.sleep(1e-4)  # so that a turn of the loop has room for ten
        return spelled(token_id)

    decode.tokenizer.token_text = counted  # type: ignore[method-assign]

    async def watch() -> None:
        nonlocal longest
        while True:
            before = turns
            await asyncio.sleep(0)
            longest = max(longest, turns - before)

    watching = asyncio.create_task(watch())
    texts = [" ".join(["w1"] * 50)] * 40
    status, answer = await post(
        session, decode_server, "/tokenize", {"prompt": texts, "return_token_strs": True}
    )
    watching.cancel()
    assert (status, answer["token_strs"], answer["count"]) == (200, [["w1"] * 50] * 40, [50] * 40)
    assert turns == 2000
    assert 0 < longest <= 50


async def test_a_conversation_is_tokenized_with_the_opening_of_an_answer_unless_it_is_refused(
    server: Server, session: Session, decode: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    encode = type(decode.pipeline.tokenizer).encode_chat

    async def encode_chat(
        self: Any, messages: Any, variables: Any, *, add_generation_prompt: bool = True
    ) -> Any:
        asked.append(add_generation_prompt)
        return await encode(self, messages, variables, add_generation_prompt=add_generation_prompt)

    monkeypatch.setattr(type(decode.pipeline.tokenizer), "encode_chat", encode_chat)
    body = {"messages": [{"role": "user", "content": "w1"}], "chat_template_kwargs": {"lead": "w9"}}
    for more in ({}, {"add_generation_prompt": True}, {"add_generation_prompt": False}):
        assert (await post(session, server, "/tokenize", body | more))[0] == 200
    assert asked == [True, True, False]
