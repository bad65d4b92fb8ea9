"""A large body taken apart in short steps is the body that decoding it at once gives."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.http import large_bodies
from kvflow.http.errors import RequestError
from kvflow.http.large_bodies import LARGE_BYTES, take_apart
from kvflow.protocols.wire.json_text import MAX_NESTING
from kvflow.serve.http.completion_service import GenerationRequest
from kvflow.serve.http.schemas import ChatRequest, CompletionRequest, GenerateRequest, parse
from tests.fakes.service import META, Role, body

IDS = [i * 7919 % 100_000 for i in range(40_000)]
TEXT = 'Grüße "an" alle\\ \n\t€ 😀 \u0000 ' * 8_000


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return value


BODIES: list[tuple[Any, dict[str, Any]]] = [
    (GenerateRequest, {"input_ids": IDS, "rid": "x" * 5000, "unknown": IDS, "stream": True}),
    (
        GenerateRequest,
        {"input_ids": [IDS, [1, 2], IDS[:300], []], "sampling_params": {"stop_token_ids": IDS}},
    ),
    (
        GenerateRequest,
        {"text": TEXT, "sampling_params": {"stop": ["y" * 3000, "z"]}, "image": "A" * 200_000},
    ),
    (GenerateRequest, {"text": ["short", TEXT, "[1, 2, 3, " + ", 4" * 40_000 + "]"]}),
    (CompletionRequest, {"prompt": IDS, "logprobs": 3}),
    (CompletionRequest, {"prompt": [TEXT, "b"], "stop": None}),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}], "odd": IDS}]},
    ),
    (
        ChatRequest,
        {"messages": [{}], "chat_template_kwargs": {"odd": [1, TEXT], "even": [True, [2, TEXT]]}},
    ),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": f"{i}: [1, 2]"} for i in range(5_000)]},
    ),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
@pytest.mark.parametrize(
    "options", [{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}]
)
async def test_it_is_the_same_body(
    kind: Any, body: dict[str, Any], options: dict[str, Any]
) -> None:
    raw = json.dumps(body, **options).encode()
    assert len(raw) > LARGE_BYTES
    condensed, values = await take_apart(raw)
    restored = values.put_back(msgspec.json.decode(condensed, type=kind))
    assert plain(restored) == plain(msgspec.json.decode(raw, type=kind))
    if kind is not ChatRequest or "odd" in body["messages"][0]:
        assert len(condensed) < 20_000


@given(
    st.text(st.characters(codec="utf-8") | st.sampled_from('"\\[]{}😀é\n')),
    st.booleans(),
    st.integers(1, 40),
)
@settings(max_examples=300)
def test_any_text_survives_cuts_at_any_place(text: str, ascii_only: bool, step: int) -> None:
    raw = json.dumps({"a": [text, [1, 2, 3]], "b": text}, ensure_ascii=ascii_only).encode()

    class _Any(msgspec.Struct):
        a: Any
        b: Any

    async def taken() -> Any:
        condensed, values = await take_apart(raw)
        return values.put_back(msgspec.json.decode(condensed, type=_Any))

    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("LARGE_BYTES", 0), ("LONG_BYTES", 4), ("_STEP_BYTES", max(step, 12))):
            patched.setattr(large_bodies, name, value)
        found = asyncio.run(taken())
    assert (found.a, found.b) == ([text, [1, 2, 3]], text)


LONG_TEXT = b'{"text": "' + b"a" * LARGE_BYTES
LONG_IDS = b'{"input_ids": [' + b"1," * LARGE_BYTES


@pytest.mark.parametrize(
    "raw",
    [
        *(LONG_TEXT + end for end in (b"", b"\\", b'\n"}', b'\\ud83d"}')),
        *(b'{"text": "' + odd * LARGE_BYTES + b'"}' for odd in (b"\xa0", b"\\x")),
        *(LONG_IDS + end for end in (b"]}", b",1]}", b"1.5]}", b"-1]}", b"1")),
        *(odd * LARGE_BYTES for odd in (b"[", b"]", b"nope")),
    ],
    ids=range(14),
)
async def test_what_is_no_body_is_refused_as_it_is(decode: Role, raw: bytes) -> None:
    condensed, values = await take_apart(raw)
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        values.put_back(msgspec.json.decode(condensed, type=GenerateRequest))
    await decode.refused(400, "/generate", data=raw)


async def test_strings_without_end_are_too_many() -> None:
    with pytest.raises(RequestError, match="more than 262144 strings and lists"):
        await take_apart(b'["a"' + b',"a"' * 300_000 + b"]")


async def test_a_marker_of_another_body_is_a_text_like_any_other() -> None:
    first, _ = await take_apart(json.dumps({"text": "a" * LARGE_BYTES}).encode())
    forged = json.loads(first)["text"]
    condensed, values = await take_apart(json.dumps({"text": [forged, "b" * LARGE_BYTES]}).encode())
    assert values.put_back(msgspec.json.decode(condensed, type=GenerateRequest)).text == [
        forged,
        "b" * LARGE_BYTES,
    ]


async def test_a_body_of_many_short_values_is_refused_before_it_is_decoded(decode: Role) -> None:
    """What is not long is decoded at once: 8 MiB of it took 80 ms of the event loop."""
    raw = json.dumps({"input_ids": [[12345] * 30] * 20_000}).encode()
    assert large_bodies.MAX_REST_BYTES < len(raw) < 8 << 20
    error = await decode.refused(400, "/generate", data=io.BytesIO(raw))
    assert f"limit {large_bodies.MAX_REST_BYTES}" in error["message"]


async def test_no_call_of_the_decoder_is_long(
    decode: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight MiB of token ids took 80 ms of the event loop, and were decoded twice."""
    sizes: list[int] = []

    def counting(decode: Any) -> Any:
        def counted(raw: bytes, **options: Any) -> Any:
            sizes.append(len(raw))
            return decode(raw, **options)

        return counted

    monkeypatch.setattr(msgspec.json, "decode", counting(msgspec.json.decode))
    monkeypatch.setattr(large_bodies, "_ids_of", counting(large_bodies._ids_of))
    monkeypatch.setattr(large_bodies, "_text_of", counting(large_bodies._text_of))
    for long in ({"input_ids": IDS * 20}, {"input_ids": [IDS] * 20}, {"text": TEXT * 12}):
        raw = json.dumps({**long, "bootstrap_room": 7}).encode()
        assert 3 << 20 < len(raw) < 8 << 20
        error = await decode.refused(400, "/generate", data=io.BytesIO(raw))
        assert "limit 127" in error["message"] or "at most" in error["message"]
    assert 0 < max(sizes) <= 2 * large_bodies._STEP_BYTES


async def test_a_prompt_is_an_array_wherever_it_comes_from(decode: Role, met: None) -> None:
    requests = []
    tokens = decode.service.tokens

    def noted(request: GenerationRequest) -> Any:
        requests.append(request)
        return tokens(request)

    decode.service.tokens = noted  # type: ignore[method-assign]
    for path, prompt in (
        ("/generate", {"input_ids": [5, 6]}),
        ("/generate", {"text": "w5 w6"}),
        ("/v1/completions", {"prompt": [5, 6]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5 w6"}]}),
    ):
        await decode.post(path, {**prompt, **META, "max_tokens": 1})
        request = requests.pop()
        assert request.prompt.dtype == np.uint32
        assert request.prompt.tolist() == [5, 6]


async def test_rooms_of_a_body_that_no_leg_takes_are_not_looked_up(decode: Role) -> None:
    """Each would be a question to a registry; 900,000 of them took the event loop 15 s."""
    for count, refused in ((256, 256), (257, 0)):
        rooms = list(range(count))
        await decode.refused(400, "/generate", body(bootstrap_room=rooms))
        assert [room for room, _ in decode.service.refused] == rooms[:refused]
        decode.service.refused.clear()


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/generate", {"text": "w1", "sampling_params": [{}] * 257}),
        ("/generate", {"input_ids": [[1]] * 257}),
        ("/v1/completions", {"prompt": [[1]] * 257}),
        ("/detokenize", {"tokens": [[1]] * 4097}),
    ],
)
async def test_entries_are_counted_before_any_is_looked_at(
    decode: Role, path: str, document: dict[str, Any]
) -> None:
    text = (await decode.refused(400, path, document))["message"]
    assert "limit 256" in text or "limit 4096" in text


async def test_a_long_value_that_is_nested_as_deep_as_a_body_may_be_is_put_back() -> None:
    deep: Any = TEXT
    # The body, its list of messages and the message are three more.
    for _ in range(MAX_NESTING - 3):
        deep = [deep]
    message = {"role": "user", "x": deep}
    raw, long_values = await take_apart(msgspec.json.encode({"messages": [message]}))
    assert TEXT.encode() not in raw
    assert long_values.put_back(parse(raw, ChatRequest)).messages == [message]
    raw, _ = await take_apart(msgspec.json.encode({"messages": [{**message, "x": [deep]}]}))
    with pytest.raises(RequestError, match="the body is nested 129 levels deep, limit 128"):
        parse(raw, ChatRequest)
