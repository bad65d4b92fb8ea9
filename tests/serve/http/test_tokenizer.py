"""Long texts: encoded as short ones are, and refused before a token of theirs is an object."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvflow.http.errors import RequestError
from kvflow.protocols.wire.json_text import MAX_NESTING
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.http.tokenizer import NullDetokenizer, ThreadedTokenizer

TEXT = "The with statement is used to wrap the execution of a block. " * 40


@pytest.fixture(scope="module")
def fast() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(DEMO_MODEL_DIR / "tokenizer.json"))


@pytest.mark.parametrize("special", [False, True])
async def test_a_long_text_has_the_tokens_that_transformers_gives_it(
    special: bool,
) -> None:
    opening = PreTrainedTokenizerFast(tokenizer_file=str(DEMO_MODEL_DIR / "tokenizer.json"))
    opening.add_special_tokens({"bos_token": "<s>"})
    first = opening.get_vocab()["<s>"]
    opening.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", first)]
    )
    expected = opening.encode(TEXT, add_special_tokens=special)
    assert (expected[0] == first) == special
    for context_length in (len(TEXT) - 1, len(TEXT)):  # the long way and the short one
        tokenizer = ThreadedTokenizer(opening, context_length)
        assert tokenizer._is_long(TEXT) == (context_length < len(TEXT))
        assert (
            await tokenizer.encode(TEXT, param="text", add_special_tokens=special)
        ).tolist() == expected
        if special:
            assert (await tokenizer.encode(TEXT, param="text")).tolist() == expected, (
                "as /generate asks for"
            )
        tokenizer.close()


@pytest.mark.parametrize("skip", [True, False])
async def test_special_tokens_are_in_the_text_where_a_request_wants_them(skip: bool) -> None:
    special = PreTrainedTokenizerFast(tokenizer_file=str(DEMO_MODEL_DIR / "tokenizer.json"))
    special.add_special_tokens({"pad_token": "<pad>"})
    tokenizer = ThreadedTokenizer(special, 400)
    text = tokenizer.detokenizer(SamplingParams(max_new_tokens=1, skip_special_tokens=skip))
    assert text.feed(special.get_vocab()["<pad>"]) + text.finish() == ("" if skip else "<pad>")
    tokenizer.close()


async def test_a_text_that_cannot_fit_is_refused_with_its_tokens(
    fast: PreTrainedTokenizerFast,
) -> None:
    tokens = len(fast.encode(TEXT))
    tokenizer = ThreadedTokenizer(fast, 100)
    with pytest.raises(
        RequestError, match=rf"the text has {tokens} tokens; at most 100 fit the model's context"
    ):
        await tokenizer.encode(TEXT, param="text")
    tokenizer.close()


async def test_a_conversation_that_cannot_fit_is_refused_before_it_is_rendered(
    fast: PreTrainedTokenizerFast,
) -> None:
    class Chats:
        chat_template = "present"

        def get_vocab(self) -> dict[str, int]:
            return fast.get_vocab()

    tokenizer = ThreadedTokenizer(Chats(), context_length=64)
    with pytest.raises(RequestError, match="characters") as refused:
        await tokenizer.encode_chat([{"role": "user", "content": "x" * 1_000_000}], {})
    assert refused.value.param == "messages"
    tokenizer.close()


def test_without_a_tokenizer_stop_strings_are_refused_and_tokens_have_no_text() -> None:
    tokenizer = ThreadedTokenizer(None)
    with pytest.raises(
        RequestError, match="stop strings need a tokenizer, and this model has none"
    ) as refused:
        tokenizer.detokenizer(SamplingParams(stop=("x",)))
    assert refused.value.param == "stop"
    assert isinstance(tokenizer.detokenizer(SamplingParams()), NullDetokenizer)
    tokenizer.close()


def test_a_stop_string_among_the_least_tokens_ends_nothing(fast: PreTrainedTokenizerFast) -> None:
    ids = fast.encode("The with statement")
    tokenizer = ThreadedTokenizer(fast)
    for least, stops in ((0, True), (len(ids) + 1, False)):
        stream = tokenizer.detokenizer(
            SamplingParams(stop=("with",), max_new_tokens=64, min_new_tokens=least)
        )
        for token_id in ids:
            stream.feed(token_id)
        assert (stream.stopped == "with") == stops
    tokenizer.close()


async def test_a_tokenizer_that_cuts_texts_by_itself_is_left_to_transformers(
    fast: PreTrainedTokenizerFast,
) -> None:
    cutting = PreTrainedTokenizerFast(tokenizer_file=str(DEMO_MODEL_DIR / "tokenizer.json"))
    cutting.backend_tokenizer.enable_truncation(8)
    tokenizer = ThreadedTokenizer(cutting, 400)
    assert len(await tokenizer.encode(TEXT, param="text")) == len(fast.encode(TEXT))
    tokenizer.close()


async def test_what_is_nested_as_deep_as_a_body_may_be_is_rendered(
    fast: PreTrainedTokenizerFast,
) -> None:
    fast.chat_template = "{{ messages }}{{ y }}{{ tools | tojson }}"
    deep: Any = "x"
    for _ in range(MAX_NESTING):
        deep = [deep]
    tokenizer = ThreadedTokenizer(fast, 4000)
    chat = [{"role": "user", "content": "x", "y": deep}]
    assert len(await tokenizer.encode_chat(chat, {"y": deep}, [{"y": deep}])) > 3
    tokenizer.close()


async def test_a_template_without_an_end_has_refused_the_messages(
    fast: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*_: Any, **__: Any) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    fast.chat_template = "{{ messages }}"
    monkeypatch.setattr(fast, "apply_chat_template", endless)
    tokenizer = ThreadedTokenizer(fast)
    with pytest.raises(RequestError, match="the chat template refused the messages: maximum"):
        await tokenizer.encode_chat([{"role": "user", "content": "x"}], {})
    tokenizer.close()


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ raise_exception('no') }}", "{{ [][1].x }}"],
)
async def test_a_template_that_fails_has_refused_the_messages(
    fast: PreTrainedTokenizerFast, template: str
) -> None:
    fast.chat_template = template
    tokenizer = ThreadedTokenizer(fast)
    with pytest.raises(RequestError, match="the chat template refused the messages") as refused:
        await tokenizer.encode_chat([{"role": "user", "content": "x"}], {})
    assert refused.value.param == "messages"
    tokenizer.close()


async def test_closing_waits_for_no_text_that_is_being_encoded(
    fast: PreTrainedTokenizerFast,
) -> None:
    """It is closed on the event loop."""
    begun, may_end = threading.Event(), threading.Event()

    class Slow:
        chat_template = None

        def get_vocab(self) -> dict[str, int]:
            return fast.get_vocab()

        def __call__(self, *_: Any, **__: Any) -> Any:
            begun.set()
            may_end.wait(10)
            return {"input_ids": [1]}

        encode = __call__

    tokenizer = ThreadedTokenizer(Slow())
    encoding = asyncio.ensure_future(tokenizer.encode("x", param="text"))
    await asyncio.to_thread(begun.wait, 10)
    tokenizer.close()
    assert not may_end.is_set() and not encoding.done()
    may_end.set()
    await asyncio.wait([encoding])
    encoding.exception()
