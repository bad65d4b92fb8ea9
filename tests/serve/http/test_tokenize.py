"""/tokenize and /detokenize, asked through the router."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.fakes.servers import Front
from tests.fakes.service import CHAT, Role, WordTokenizer

CONVERSATION = {"messages": CHAT, "chat_template_kwargs": {"lead": "w9"}}


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_there_and_back(front: Front, prefix: str) -> None:
    for text, ids, count in (("w7 w9", [7, 9], 2), (["w7", "w1 w2"], [[7], [1, 2]], [1, 2])):
        answer = await front.post(f"{prefix}/tokenize", {"model": "fake", "prompt": text})
        assert answer == {"tokens": ids, "count": count, "max_model_len": 65}
        back = await front.post(f"{prefix}/detokenize", {"tokens": ids})
        assert back == {"text": text, "prompt": text}


async def test_special_tokens_are_left_out_unless_they_are_asked_for(decode: Role) -> None:
    words = decode.tokenizer._tokenizer
    assert isinstance(words, WordTokenizer)
    words.backend_tokenizer.add_special_tokens(["w3"])
    for given, text in (
        ({}, "w1"),
        ({"skip_special_tokens": True}, "w1"),
        ({"skip_special_tokens": False}, "w1 w3"),
    ):
        answer = await decode.post("/detokenize", {"tokens": [1, 3], **given})
        assert answer["text"] == text


async def test_a_conversation_as_its_completion_would_see_it(front: Front, decode: Role) -> None:
    answer = await front.post("/tokenize", {**CONVERSATION, "return_token_strs": True})
    assert answer == {"tokens": [9, 1], "token_strs": ["w9", "w1"], "count": 2, "max_model_len": 65}
    await front.post("/v1/chat/completions", {**CONVERSATION, "max_tokens": 1})
    assert decode.service.requests[0].prompt == answer["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "w1", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "w1", "tools": [{"type": "function"}]}, 400, "tools[0]"),
        ("/tokenize", {"prompt": "w1", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [1, [2]]}, 400, None),
        ("/detokenize", {"tokens": [100]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_what_is_wrong_is_named(
    front: Front, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    error = await front.refused(status, path, body)
    assert error["param"] == param


async def test_nothing_is_nothing(front: Front) -> None:
    assert (await front.post("/tokenize", {"prompt": ""}))["tokens"] == []
    assert (await front.post("/tokenize", {"prompt": []}))["count"] == []
    assert (await front.post("/detokenize", {"tokens": []}))["text"] == ""


async def test_many_texts_are_answered_in_short_turns(decode: Role) -> None:
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
    answer = await decode.post("/tokenize", {"prompt": texts, "return_token_strs": True})
    watching.cancel()
    assert (answer["token_strs"], answer["count"]) == ([["w1"] * 50] * 40, [50] * 40)
    assert turns == 2000
    assert 0 < longest <= 50


async def test_a_conversation_is_tokenized_with_the_opening_of_an_answer_unless_it_is_refused(
    front: Front, decode: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    encode = type(decode.pipeline.tokenizer).encode_chat

    async def encode_chat(self: Any, *given: Any, add_generation_prompt: bool = True) -> Any:
        asked.append(add_generation_prompt)
        return await encode(self, *given, add_generation_prompt=add_generation_prompt)

    monkeypatch.setattr(type(decode.pipeline.tokenizer), "encode_chat", encode_chat)
    for more in ({}, {"add_generation_prompt": True}, {"add_generation_prompt": False}):
        await front.post("/tokenize", CONVERSATION | more)
    assert asked == [True, True, False]
