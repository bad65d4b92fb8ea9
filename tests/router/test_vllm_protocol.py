"""The router's requests to vLLM servers, read by vLLM's own protocol; only its API is imported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.vllm import CHAT, MESSAGES, RESPONSES, FakeVllm, fleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]
LIMITS = {
    "max_tokens": 50,
    "min_tokens": 9,
    "stream": True,
    "stream_options": {"include_usage": True},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 40},
}


@pytest.mark.parametrize("path", BODIES)
async def test_vllm_takes_both_requests_for_what_they_are(path: str) -> None:
    chats = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    completions = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    p, d = FakeVllm(), FakeVllm()
    body = {"model": "m", **LIMITS, **BODIES[path], "kv_transfer_params": {"remote_host": "evil"}}
    async with fleet([p], [d]) as front:
        answer = await front.call("POST", path, body)
        assert answer.status == 200
    kind = chats.ChatCompletionRequest if path == CHAT else completions.CompletionRequest
    first, second = (kind.model_validate(json.loads(fake.raw[0])) for fake in (p, d))
    assert (first.stream, first.stream_options) == (False, None)
    sampling = first.to_sampling_params(first.max_tokens, {})
    assert (sampling.max_tokens, sampling.min_tokens) == (1, 0)
    assert sampling.extra_args["kv_transfer_params"]["do_remote_decode"]
    assert (second.stream, second.max_tokens, second.min_tokens) == (True, 50, 9)
    if path == CHAT:
        assert (first.max_completion_tokens, second.max_completion_tokens) == (1, 40)
    assert second.kv_transfer_params == p._given(p.bodies[0])


async def test_vllm_takes_messages_and_responses_for_what_they_are() -> None:
    anthropic = pytest.importorskip("vllm.entrypoints.anthropic.protocol")
    responses = pytest.importorskip("vllm.entrypoints.openai.responses.protocol")
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1040}
    bodies: dict[str, dict[str, Any]] = {
        MESSAGES: {"messages": [{"role": "user", "content": "a"}], **thinking},
        RESPONSES: {"input": "a", "max_output_tokens": 1040},
    }
    kinds = {
        MESSAGES: anthropic.AnthropicMessagesRequest,
        RESPONSES: responses.ResponsesRequest,
    }
    limits = {MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
    for path, body in bodies.items():
        p, d = FakeVllm(), FakeVllm()
        async with fleet([p], [d]) as front:
            answer = await front.call("POST", path, {"model": "m", "stream": True, **body})
            assert answer.status == 200
        first, second = (kinds[path].model_validate(json.loads(fake.raw[0])) for fake in (p, d))
        assert (first.stream, second.stream) == (False, True)
        assert (getattr(first, limits[path]), getattr(second, limits[path])) == (1, 1040)
        assert first.kv_transfer_params["do_remote_decode"]
        assert second.kv_transfer_params == p._given(p.bodies[0])
