"""Bodies: what no client should send is a 400 that names it, and costs the event loop little."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.http.bodies import MAX_STRUCTURE
from kvflow.http.errors import RequestError
from kvflow.router.legs import with_fields
from kvflow.serve.http.schemas import ChatRequest, CompletionRequest, GenerateRequest, parse

Kind = type[GenerateRequest] | type[ChatRequest] | type[CompletionRequest]

KINDS = (GenerateRequest, ChatRequest, CompletionRequest)
GOOD: dict[Kind, bytes] = {
    GenerateRequest: (
        b'{"text":"a","sampling_params":{"temperature":0,"stop":["x"]},"tools":[],"stream":true}'
    ),
    ChatRequest: (
        b'{"messages":[{"role":"user","content":"a"}],"response_format":{"type":"text"},"n":1}'
    ),
    CompletionRequest: (
        b'{"prompt":[[1,2],[3]],"max_tokens":3,"best_of":1,"suffix":null,"logit_bias":{"5":-1}}'
    ),
}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data())
def test_a_body_is_a_request_or_a_request_error(kind: Kind, data: st.DataObject) -> None:
    document = msgspec.json.decode(GOOD[kind])
    names = [*document, *kind.__struct_fields__, "lora_path", "min_new_tokens", "regex"]
    document |= data.draw(st.dictionaries(st.sampled_from(names), values, max_size=2))
    raw = bytearray(msgspec.json.encode(document))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        raw = raw or bytearray(b" ")
    try:
        assert type(parse(bytes(raw), kind)) is kind
    except RequestError as error:
        assert len(str(error)) < 500


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bomb", [b"[],", b"{},", b'{"a":0},'], ids=str)
@pytest.mark.parametrize("field", ["messages", "input_ids", "prompt", "unheard_of"])
def test_a_body_of_a_million_objects_is_refused_unbuilt(
    kind: Kind, bomb: bytes, field: str
) -> None:
    many = bomb * (MAX_STRUCTURE + 1)
    raw = GOOD[kind][:-1] + f',"{field}":['.encode() + many[:-1] + b"]}"
    with pytest.raises(RequestError, match="lists, objects and fields"):
        parse(raw, kind)


@pytest.mark.parametrize("text", [":" * 200, '"[{' * 60, "\\" * 99 + '"'])
def test_what_texts_have_in_them_is_not_counted(text: str) -> None:
    messages = [{"role": "user", "content": text}] * 1000
    body = msgspec.json.encode({"messages": messages})
    assert sum(map(body.count, (b"[", b"{", b":"))) > 3 * len(messages)
    assert parse(body, ChatRequest).messages == messages


def test_a_million_token_ids_are_a_prompt() -> None:
    raw = b'{"input_ids":[' + b"12345," * 999_999 + b"7]}"
    assert len(parse(raw, GenerateRequest).input_ids or ()) == 1_000_000


def test_nesting_does_not_exhaust_the_stack() -> None:
    for bomb in (
        *(b'{"text":"a","unheard_of":' + b"[" * 99_999, b"[" * 100_000, b'{"a":' * 100_000),
        b'{"unheard_of":' + 99_999 * b"[" + 99_999 * b"]" + b',"text":"a"}',
    ):
        with pytest.raises(RequestError, match="lists, objects and fields"):
            parse(bomb, GenerateRequest)
    with pytest.raises(RequestError, match="the body is nested 1000 levels deep, limit 128"):
        parse(b'{"a":[],"b":' + b'{"\\"]]]":' * 999 + b"1" + b"}" * 1000, GenerateRequest)


def test_what_texts_have_in_them_does_not_nest() -> None:
    messages = [{"role": "user", "content": '[{"' * 200}, {"x": [[[]]] * 200}]
    body = msgspec.json.encode({"messages": messages})
    assert parse(body, ChatRequest).messages == messages


@pytest.mark.parametrize(
    "raw", [b"{}", b" { } \n", b'{"a":1}', b'{"a":{}}\r\n', b'{"b":[],"room":{"x":3} } ']
)
def test_added_fields_win_and_the_rest_stays(raw: bytes) -> None:
    before = msgspec.json.decode(raw)
    assert msgspec.json.decode(with_fields(raw, {"room": 7, "b": "c"})) == {
        **before,
        "room": 7,
        "b": "c",
    }
