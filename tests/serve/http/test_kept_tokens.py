"""A completion keeps the JSON of its tokens, and no objects beside it."""

from __future__ import annotations

import gc
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest

from kvflow.http.growing import encode
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.serve.http.completion import Completion, Delta
from kvflow.serve.http.completion_service import GenerationRequest
from kvflow.serve.http.generate import GenerateCall, _Grown
from kvflow.serve.http.openai import ChatCall, TextCompletionCall
from kvflow.serve.http.pipeline import CompletionCall
from kvflow.serve.http.schemas import ChatRequest, CompletionRequest, GenerateRequest

TOKENS = 2000
REQUEST = GenerationRequest(
    room=1, prefill="", prompt=np.arange(3, dtype=np.uint32), params=SamplingParams(logprobs=20)
)


def spelled(token_id: int) -> bytes:
    return b"%d" % token_id


def made_call(kind: str, stream: bool) -> CompletionCall:
    call: Any
    if kind == "chat":
        call = ChatCall(
            ChatRequest(messages=[{}], logprobs=True, top_logprobs=20, stream=stream), "m", spelled
        )
    elif kind == "completions":
        call = TextCompletionCall(
            CompletionRequest(prompt="", logprobs=20, stream=stream), "m", spelled
        )
    else:
        call = GenerateCall(
            GenerateRequest(text="", return_logprob=True, top_logprobs_num=20, stream=stream)
        )
        call._grown = [_Grown(None)]
    call._requests = [REQUEST]
    return call  # type: ignore[no-any-return]


def some_delta(chooser: random.Random) -> Delta:
    top = tuple((chooser.randrange(300, 4000), -20 * chooser.random()) for _ in range(20))
    return Delta("word ", (TokenOut(chooser.randrange(300, 4000), -chooser.random(), top),))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completions", "generate"])
def test_no_token_is_kept_but_as_the_json_of_an_answer(kind: str, stream: bool, seed: int) -> None:
    chooser = random.Random(seed)
    call, completion = made_call(kind, stream), Completion()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for delta in (some_delta(chooser) for _ in range(TOKENS)):
            completion.add(delta)
            call.add(0, delta)
            call.events(0, [delta], completion)
        # Only what is referred to is kept; cycles wait for a collection that may come later.
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    answer = sum(map(len, encode(call.answer([completion]))))
    assert (completion.generated, completion.text) == (TOKENS, "word " * TOKENS)
    assert kept < 100 * TOKENS + 1.3 * answer
    events_alone = stream and kind != "generate"  # its last event repeats all
    assert (answer > 100 * TOKENS) != events_alone, "what a stream has sent is not kept"
