"""The OpenAI routes: chat completions, completions and models."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from typing import Any

from aiohttp import web

from kvflow.aio import in_turns
from kvflow.http.errors import UnknownModelError
from kvflow.http.growing import GrowingArray, GrowingText
from kvflow.http.model_length import served_length
from kvflow.http.prompt_fields import PromptIds
from kvflow.http.responses import json_response
from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.completion import Completion, Delta
from kvflow.serve.http.completion_service import GenerationRequest
from kvflow.serve.http.generation_requests import (
    check_count,
    generation_requests,
    params_of_completion,
    prompt_ids,
)
from kvflow.serve.http.pipeline import CompletionPipeline
from kvflow.serve.http.schemas import ChatRequest, CompletionRequest, StreamOptions
from kvflow.serve.http.text_logprobs import TextLogprobs, TokenBytes
from kvflow.serve.http.tools.turns import Turns, chat_delta, chat_message, chat_requests
from kvflow.telemetry.requests import CURRENT

_ECHO_CHARACTERS = 1 << 14  # characters encoded at once, in some 20 us


class _OpenAICall:
    """The base of chat and text completion calls: ids, choices and usage."""

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(
        self, body: ChatRequest | CompletionRequest, model: str, token_bytes: TokenBytes
    ) -> None:
        self.stream = bool(body.stream)
        self._token_bytes = token_bytes
        self._requests: list[GenerationRequest] = []
        self._choices = body.n or 1
        self._options = body.stream_options or StreamOptions()
        self._head = {"id": self._chosen_id(body), "created": int(time.time()), "model": model}

    def id_of(self, index: int) -> str:
        return str(self._head["id"])

    def _chosen_id(self, body: ChatRequest | CompletionRequest) -> str:
        rid = body.rid[0] if isinstance(body.rid, list) and body.rid else body.rid
        return str(
            rid or self.prefix + (body.request_id or CURRENT.get().request_id or uuid.uuid4().hex)
        )

    async def scored(self, index: int, scores: PromptLogprobs) -> None:
        """Do nothing: chat completions report no log-probabilities of the prompt."""

    def add(self, index: int, delta: Delta) -> None:
        """For an answer that is not streamed, encode each token when it arrives.

        Encoding all of them at the end would block the loop.
        """

    def answer(self, completions: list[Completion]) -> Any:
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        return {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "usage": self._usage(completions),
        }

    def opening(self) -> list[Any]:
        return []

    def events(self, index: int, deltas: list[Delta], completion: Completion) -> list[Any]:
        chunks = [self._event(index, delta) for delta in deltas]
        # `completion` counts all these deltas. A chunk's usage counts only those up to the chunk.
        count = completion.generated - sum(len(delta.tokens) for delta in deltas)
        for delta, chunk in zip(deltas, chunks, strict=True):
            count += len(delta.tokens)
            self._count(index, count, chunk, completion.cached_tokens)
        return chunks

    def _count(
        self, index: int, tokens: int, chunk: dict[str, Any], cached: int = 0
    ) -> dict[str, Any]:
        if self._options.continuous_usage_stats:
            chunk["usage"] = _usage(len(self._requests[index].prompt), tokens, cached)
        return chunk

    def closing(self, completions: list[Completion]) -> list[Any]:
        if self._options.include_usage:
            return [{**self._chunk([]), "usage": self._usage(completions)}]
        return []

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        return {**chunk, "usage": None} if self._options.include_usage else chunk

    def _event(self, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        raise NotImplementedError

    def _usage(self, completions: list[Completion]) -> dict[str, Any]:
        # A prompt and its cached tokens count once, in its first choice.
        prompts = sum(len(request.prompt) for request in self._requests[:: self._choices])
        cached = sum(completion.cached_tokens for completion in completions[:: self._choices])
        return _usage(prompts, sum(completion.generated for completion in completions), cached)


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class ChatCall(_OpenAICall):
    """One chat completion body and its answer."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, body: ChatRequest, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(body, model, token_bytes)
        self.body = body
        self._logprobs: defaultdict[int, GrowingArray] = defaultdict(GrowingArray)
        self._turns: Turns | None = None  # None if all text is content

    async def generation_requests(self, pipeline: CompletionPipeline) -> list[GenerationRequest]:
        self._requests, reading = await chat_requests(self.body, pipeline)
        if not reading.is_plain:
            self._turns = Turns(reading, self._choices, stream=self.stream)
        return self._requests

    def opening(self) -> list[Any]:
        start = {"role": "assistant", "content": ""}
        choices = [
            {"index": i, "delta": start, "logprobs": None, "finish_reason": None}
            for i in range(len(self._requests))
        ]
        return [self._count(i, 0, self._chunk([choice])) for i, choice in enumerate(choices)]

    def add(self, index: int, delta: Delta) -> None:
        if self.body.logprobs and not self.stream:
            for token in delta.tokens:
                self._logprobs[index].add(self._logprob(token))
        if self._turns is not None:
            self._turns.add(index, delta)

    def _event(self, index: int, delta: Delta) -> dict[str, Any]:
        content = [self._logprob(token) for token in delta.tokens] if self.body.logprobs else []
        if self._turns is None:
            piece, finish = {"content": delta.text} if delta.text else {}, delta.finish
        else:
            piece = chat_delta(self._turns.next_parts(index), self._turns.so_far(index))
            finish = self._turns.finish(index, delta.finish)
        choice = {
            "index": index,
            "delta": piece,
            "logprobs": {"content": content, "refusal": None} if self.body.logprobs else None,
            "finish_reason": finish,
        }
        return self._chunk([choice])

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        if self._turns is None:
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            finish = completion.finish
        else:
            message = chat_message(self._turns.so_far(index))
            finish = self._turns.finish(index, completion.finish)
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": self._logprobs[index], "refusal": None}
            if self.body.logprobs
            else None,
            "finish_reason": finish,
        }

    def _logprob(self, token: TokenOut) -> dict[str, Any]:
        top = [
            _spelled(self._token_bytes(token_id), logprob)
            for token_id, logprob in token.top_logprobs
        ]
        return {**_spelled(self._token_bytes(token.token_id), token.logprob), "top_logprobs": top}


def _spelled(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}


class TextCompletionCall(_OpenAICall):
    """One text completion body, with one prompt or several, and its answer."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, body: CompletionRequest, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(body, model, token_bytes)
        self.body = body
        # Echoes by choice. A stream removes each echo when it sends it.
        self._echoes: dict[int, GrowingText] = {}
        self._logprobs: defaultdict[int, TextLogprobs] = defaultdict(
            lambda: TextLogprobs(token_bytes)
        )

    async def generation_requests(self, pipeline: CompletionPipeline) -> list[GenerationRequest]:
        """Read a text, a list of texts, one list of token ids, or a list of such lists."""
        body = self.body
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if len(given) and all(isinstance(item, str) for item in given):
            check_count(len(given), self._choices)
            special = body.add_special_tokens is not False
            prompts = [
                await pipeline.tokenizer.encode(
                    str(text), param="prompt", add_special_tokens=special
                )
                for text in given
            ]
            texts = [str(text) for text in given]
        else:
            prompts, _ = prompt_ids(given)
            check_count(len(prompts), self._choices)
            texts = [await self._text_of(ids) for ids in prompts if body.echo]
        choices = self._choices
        bad_words = await pipeline.tokenizer.encode_words(body.bad_words or ())
        params = params_of_completion(body, prompts, bad_words, pipeline.request_limits)
        if body.echo:
            echoes = [await _encoded(text) for text in texts]
            self._echoes = dict(enumerate(echo for echo in echoes for _ in range(choices)))
        self._requests = generation_requests(
            body, prompts, params, choices, pipeline.request_limits
        )
        return self._requests

    async def _text_of(self, prompt: PromptIds) -> str:
        pieces = [self._token_bytes(token_id) async for token_id in in_turns(prompt.tolist())]
        return b"".join(pieces).decode(errors="replace")

    async def scored(self, index: int, scores: PromptLogprobs) -> None:
        await self._logprobs[index].add_prompt(scores, self._requests[index].prompt)

    def add(self, index: int, delta: Delta) -> None:
        if self.body.logprobs is not None and not self.stream:
            for token in delta.tokens:
                self._logprobs[index].add(token)

    def events(self, index: int, deltas: list[Delta], completion: Completion) -> list[Any]:
        """Return one chunk per delta. A chunk with the echoed prompt comes before the first."""
        chunks = super().events(index, deltas, completion)
        if (echo := self._echoes.pop(index, None)) is None:
            return chunks
        logprobs = None if self.body.logprobs is None else self._logprobs[index].all()
        choice = {"index": index, "text": echo, "logprobs": logprobs, "finish_reason": None}
        return [self._count(index, 0, self._chunk([choice])), *chunks]

    def _event(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = None if self.body.logprobs is None else self._logprobs[index].alone(delta.tokens)
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish,
        }
        return self._chunk([choice])

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoes[index].followed_by(completion.text)
            if index in self._echoes
            else completion.text,
            "logprobs": None if self.body.logprobs is None else self._logprobs[index].all(),
            "finish_reason": completion.finish,
        }


async def _encoded(text: str) -> GrowingText:
    """Encode an echoed prompt once for all its choices."""
    echo = GrowingText()
    async for start in in_turns(range(0, len(text), _ECHO_CHARACTERS)):
        echo.add(text[start : start + _ECHO_CHARACTERS])
    # All choices share a closed block. Each choice would copy an open one.
    echo.close_block()
    return echo


def routes(pipeline: CompletionPipeline) -> list[web.RouteDef]:
    name, began = pipeline.service.card.name, int(time.time())

    async def chat(http: web.Request) -> web.StreamResponse:
        body = await pipeline.read(http, ChatRequest)
        return await pipeline.serve(http, ChatCall(body, name, pipeline.tokenizer.token_bytes))

    async def completions(http: web.Request) -> web.StreamResponse:
        body = await pipeline.read(http, CompletionRequest)
        return await pipeline.serve(
            http, TextCompletionCall(body, name, pipeline.tokenizer.token_bytes)
        )

    def entry(http: web.Request) -> dict[str, Any]:
        card = pipeline.service.card
        about = {
            "id": name,
            "object": "model",
            "created": began,
            "owned_by": "kvflow",
            "root": card.path,
        }
        return {**about, "max_model_len": served_length(http, pipeline.service.limits.max_tokens)}

    async def models(http: web.Request) -> web.StreamResponse:
        return json_response({"object": "list", "data": [entry(http)]})

    async def model(http: web.Request) -> web.StreamResponse:
        if (asked := http.match_info["model"]) != name:
            raise UnknownModelError(asked, name)
        return json_response(entry(http))

    return [
        web.post("/v1/chat/completions", chat),
        web.post("/v1/completions", completions),
        web.get("/v1/models", models),
        web.get("/v1/models/{model:.+}", model),
    ]
