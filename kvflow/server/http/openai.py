"""The OpenAI routes: chat completions, completions, models."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from aiohttp import web

from kvflow.engine.scheduler.params import TokenOut
from kvflow.server.http.completion import Completion, Delta
from kvflow.server.http.orders import orders, params_of_chat, params_of_completion, prompt_ids
from kvflow.server.http.pipeline import Front, json_response
from kvflow.server.http.schemas import ChatRequest, CompletionRequest, StreamOptions
from kvflow.server.http.service import Order

TokenText = Callable[[int], str]


class _OpenAIJob:
    """What chat and completions share: ids, choices, usage."""

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(self, request: ChatRequest | CompletionRequest, model: str, token_text: TokenText) -> None:
        self.stream = bool(request.stream)
        self._token_text = token_text
        self._orders: list[Order] = []
        self._with_usage = (request.stream_options or StreamOptions()).include_usage
        self._head = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def answer(self, completions: list[Completion]) -> Any:
        """The whole body."""
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(completions)}

    def opening(self) -> list[Any]:
        return []

    def closing(self, completions: list[Completion]) -> list[Any]:
        """The usage event, when it was asked for."""
        return [{**self._chunk([]), "usage": self._usage(completions)}] if self._with_usage else []

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        return {**chunk, "usage": None} if self._with_usage else chunk

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        raise NotImplementedError

    def _usage(self, completions: list[Completion]) -> dict[str, Any]:
        prompts = sum(len(order.prompt) for order in self._orders)
        generated = sum(len(completion.tokens) for completion in completions)
        return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}


class ChatJob(_OpenAIJob):
    """One chat completion."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, request: ChatRequest, model: str, token_text: TokenText) -> None:
        super().__init__(request, model, token_text)
        self.request = request

    async def orders(self, front: Front) -> list[Order]:
        """The conversation through the chat template."""
        request = self.request
        prompt = await front.wording.encode_chat(request.messages)
        params = params_of_chat(request, prompt, front.menu)
        self._orders = orders(request, [prompt], [params], request.n or 1, front.menu)
        return self._orders

    def opening(self) -> list[Any]:
        """The role of each choice."""
        start = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": start, "logprobs": None, "finish_reason": None}])
            for i in range(len(self._orders))
        ]

    def event(self, index: int, delta: Delta, completion: Completion) -> Any:
        choice = {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs([delta.token]),
            "finish_reason": delta.finish,
        }
        return self._chunk([choice])

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.tokens),
            "finish_reason": completion.finish,
        }

    def _logprobs(self, tokens: list[TokenOut]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return {"content": [self._logprob(token) for token in tokens], "refusal": None}

    def _logprob(self, token: TokenOut) -> dict[str, Any]:
        top = [_spelled(self._token_text(token_id), logprob) for token_id, logprob in token.top_logprobs]
        return {**_spelled(self._token_text(token.token_id), token.logprob), "top_logprobs": top}


def _spelled(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class CompletionJob(_OpenAIJob):
    """One text completion, of one prompt or several."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, request: CompletionRequest, model: str, token_text: TokenText) -> None:
        super().__init__(request, model, token_text)
        self.request = request
        self._echoes: list[str] = []
        self._offsets: dict[int, int] = {}

    async def orders(self, front: Front) -> list[Order]:
        """Text, a list of texts, token ids, or a list of those."""
        request = self.request
        given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        if given and all(isinstance(item, str) for item in given):
            prompts = [await front.wording.encode(str(text)) for text in given]
            texts = [str(text) for text in given]
        else:
            prompts = prompt_ids(given)
            texts = ["".join(map(self._token_text, prompt)) for prompt in prompts] if request.echo else []
        choices = request.n or 1
        params = [params_of_completion(request, prompt, front.menu) for prompt in prompts]
        self._echoes = [text for text in texts for _ in range(choices)] if request.echo else []
        self._orders = orders(request, prompts, params, choices, front.menu)
        return self._orders

    def opening(self) -> list[Any]:
        """The prompt, when it is to be echoed."""
        return [
            self._chunk([{"index": i, "text": text, "logprobs": None, "finish_reason": None}])
            for i, text in enumerate(self._echoes)
        ]

    def event(self, index: int, delta: Delta, completion: Completion) -> Any:
        offset = self._offsets.get(index, 0)
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs([delta.token], offset),
            "finish_reason": delta.finish,
        }
        self._offsets[index] = offset + len(self._token_text(delta.token.token_id))
        return self._chunk([choice])

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "text": (self._echoes[index] if self._echoes else "") + completion.text,
            "logprobs": self._logprobs(completion.tokens, 0),
            "finish_reason": completion.finish,
        }

    def _logprobs(self, tokens: list[TokenOut], offset: int) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        texts = [self._token_text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._token_text(i): p for i, p in token.top_logprobs} for token in tokens],
            "text_offset": offsets,
        }


def routes(front: Front) -> list[web.RouteDef]:
    """/v1/chat/completions, /v1/completions, /v1/models."""
    name = front.service.card.name

    async def chat(http: web.Request) -> web.StreamResponse:
        request = front.read(await http.read(), ChatRequest)
        return await front.serve(http, ChatJob(request, name, front.wording.token_text))

    async def completions(http: web.Request) -> web.StreamResponse:
        request = front.read(await http.read(), CompletionRequest)
        return await front.serve(http, CompletionJob(request, name, front.wording.token_text))

    async def models(http: web.Request) -> web.StreamResponse:
        card = front.service.card
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "kvflow", "root": card.path}
        return json_response({"object": "list", "data": [{**entry, "max_model_len": card.context_length}]})

    return [
        web.post("/v1/chat/completions", chat),
        web.post("/v1/completions", completions),
        web.get("/v1/models", models),
    ]
