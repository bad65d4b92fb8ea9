"""The OpenAI routes: chat completions, completions, models."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from aiohttp import web

from kvflow.engine.scheduler.params import TokenOut
from kvflow.server.http.completion import Completion, Delta
from kvflow.server.http.completion_service import GenerationRequest
from kvflow.server.http.errors import UnknownModelError
from kvflow.server.http.generation_requests import (
    generation_requests,
    params_of_chat,
    params_of_completion,
    prompt_ids,
)
from kvflow.server.http.growing import GrowingArray
from kvflow.server.http.pipeline import CompletionPipeline
from kvflow.server.http.responses import json_response
from kvflow.server.http.schemas import ChatRequest, CompletionRequest, StreamOptions

TokenText = Callable[[int], str]


class _OpenAICall:
    """What chat and completions share: ids, choices, usage."""

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(self, body: ChatRequest | CompletionRequest, model: str, token_text: TokenText) -> None:
        self.stream = bool(body.stream)
        self._token_text = token_text
        self._requests: list[GenerationRequest] = []
        self._with_usage = (body.stream_options or StreamOptions()).include_usage
        self._head = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def add(self, index: int, delta: Delta) -> None:
        """Encode what only the whole body will need, token by token: all at once would hold up the event loop."""

    def answer(self, completions: list[Completion]) -> Any:
        """The whole body."""
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(completions)}

    def opening(self) -> list[Any]:
        return []

    def events(self, index: int, deltas: list[Delta], completion: Completion) -> list[Any]:
        """One chunk per delta."""
        return [self._event(index, delta) for delta in deltas]

    def closing(self, completions: list[Completion]) -> list[Any]:
        """The usage event, when the body asks for it."""
        return [{**self._chunk([]), "usage": self._usage(completions)}] if self._with_usage else []

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        return {**chunk, "usage": None} if self._with_usage else chunk

    def _event(self, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        raise NotImplementedError

    def _usage(self, completions: list[Completion]) -> dict[str, Any]:
        prompts = sum(len(request.prompt) for request in self._requests)
        generated = sum(len(completion.tokens) for completion in completions)
        return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}


class ChatCall(_OpenAICall):
    """One chat completion."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, body: ChatRequest, model: str, token_text: TokenText) -> None:
        super().__init__(body, model, token_text)
        self.body = body
        self._logprobs: defaultdict[int, GrowingArray] = defaultdict(GrowingArray)

    async def generation_requests(self, pipeline: CompletionPipeline) -> list[GenerationRequest]:
        """One per choice; the conversation is rendered by the chat template."""
        body = self.body
        prompt = await pipeline.tokenizer.encode_chat(body.messages)
        bad_words = await pipeline.tokenizer.encode_words(body.bad_words or ())
        params = params_of_chat(body, prompt, bad_words, pipeline.request_limits)
        self._requests = generation_requests(body, [prompt], [params], body.n or 1, pipeline.request_limits)
        return self._requests

    def opening(self) -> list[Any]:
        """The role of each choice."""
        start = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": start, "logprobs": None, "finish_reason": None}])
            for i in range(len(self._requests))
        ]

    def add(self, index: int, delta: Delta) -> None:
        if self.body.logprobs and not self.stream:
            self._logprobs[index].add(self._logprob(delta.token))

    def _event(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": {"content": [self._logprob(delta.token)], "refusal": None} if self.body.logprobs else None,
            "finish_reason": delta.finish,
        }
        return self._chunk([choice])

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": {"content": self._logprobs[index], "refusal": None} if self.body.logprobs else None,
            "finish_reason": completion.finish,
        }

    def _logprob(self, token: TokenOut) -> dict[str, Any]:
        top = [_spelled(self._token_text(token_id), logprob) for token_id, logprob in token.top_logprobs]
        return {**_spelled(self._token_text(token.token_id), token.logprob), "top_logprobs": top}


def _spelled(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class _TextLogprobs:
    """The logprobs of a text completion, as it has them: four arrays."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._end = 0  # of the text so far, in characters
        self._arrays = {name: GrowingArray() for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}

    def add(self, token: TokenOut) -> None:
        for name, element in self._next(token).items():
            self._arrays[name].add(element)

    def alone(self, token: TokenOut) -> dict[str, Any]:
        """Those of the next token, for a chunk of its own."""
        return {name: [element] for name, element in self._next(token).items()}

    def all(self) -> dict[str, Any]:
        return dict(self._arrays)

    def _next(self, token: TokenOut) -> dict[str, Any]:
        text, start = self._token_text(token.token_id), self._end
        self._end += len(text)
        top = {self._token_text(token_id): logprob for token_id, logprob in token.top_logprobs}
        return {"tokens": text, "token_logprobs": token.logprob, "top_logprobs": top, "text_offset": start}


class TextCompletionCall(_OpenAICall):
    """One text completion, of one prompt or several."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, body: CompletionRequest, model: str, token_text: TokenText) -> None:
        super().__init__(body, model, token_text)
        self.body = body
        self._echoes: list[str] = []
        self._logprobs: defaultdict[int, _TextLogprobs] = defaultdict(lambda: _TextLogprobs(token_text))

    async def generation_requests(self, pipeline: CompletionPipeline) -> list[GenerationRequest]:
        """One per prompt and choice; prompts are a text, a list of texts, token ids, or a list of those."""
        body = self.body
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if given and all(isinstance(item, str) for item in given):
            prompts = [await pipeline.tokenizer.encode(str(text)) for text in given]
            texts = [str(text) for text in given]
        else:
            prompts = prompt_ids(given)
            texts = ["".join(map(self._token_text, prompt)) for prompt in prompts] if body.echo else []
        choices = body.n or 1
        bad_words = await pipeline.tokenizer.encode_words(body.bad_words or ())
        params = [params_of_completion(body, prompt, bad_words, pipeline.request_limits) for prompt in prompts]
        self._echoes = [text for text in texts for _ in range(choices)] if body.echo else []
        self._requests = generation_requests(body, prompts, params, choices, pipeline.request_limits)
        return self._requests

    def opening(self) -> list[Any]:
        """The prompts, when the body asks for an echo."""
        return [
            self._chunk([{"index": i, "text": text, "logprobs": None, "finish_reason": None}])
            for i, text in enumerate(self._echoes)
        ]

    def add(self, index: int, delta: Delta) -> None:
        if self.body.logprobs is not None and not self.stream:
            self._logprobs[index].add(delta.token)

    def _event(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": None if self.body.logprobs is None else self._logprobs[index].alone(delta.token),
            "finish_reason": delta.finish,
        }
        return self._chunk([choice])

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "text": (self._echoes[index] if self._echoes else "") + completion.text,
            "logprobs": None if self.body.logprobs is None else self._logprobs[index].all(),
            "finish_reason": completion.finish,
        }


def routes(pipeline: CompletionPipeline) -> list[web.RouteDef]:
    """/v1/chat/completions, /v1/completions, /v1/models."""
    name = pipeline.service.card.name

    async def chat(http: web.Request) -> web.StreamResponse:
        body = pipeline.read(await http.read(), ChatRequest)
        return await pipeline.serve(http, ChatCall(body, name, pipeline.tokenizer.token_text))

    async def completions(http: web.Request) -> web.StreamResponse:
        body = pipeline.read(await http.read(), CompletionRequest)
        return await pipeline.serve(http, TextCompletionCall(body, name, pipeline.tokenizer.token_text))

    def entry() -> dict[str, Any]:
        card = pipeline.service.card
        about = {"id": name, "object": "model", "created": 0, "owned_by": "kvflow", "root": card.path}
        return {**about, "max_model_len": card.context_length}

    async def models(_: web.Request) -> web.StreamResponse:
        return json_response({"object": "list", "data": [entry()]})

    async def model(http: web.Request) -> web.StreamResponse:
        if (asked := http.match_info["model"]) != name:
            raise UnknownModelError(asked, name)
        return json_response(entry())

    return [
        web.post("/v1/chat/completions", chat),
        web.post("/v1/completions", completions),
        web.get("/v1/models", models),
        web.get("/v1/models/{model:.+}", model),
    ]
