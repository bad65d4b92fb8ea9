"""POST /generate, SGLang's own route: text or token ids in, text and token ids out, streamed cumulatively."""

from __future__ import annotations

import uuid
from typing import Any

from aiohttp import web

from kvflow.engine.scheduler.params import TokenOut
from kvflow.server.http.completion import Completion, Delta
from kvflow.server.http.errors import RequestError
from kvflow.server.http.orders import orders, params_of_generate, prompt_ids
from kvflow.server.http.pipeline import Front
from kvflow.server.http.schemas import GenerateRequest
from kvflow.server.http.service import Order


class GenerateJob:
    """One /generate body."""

    def __init__(self, request: GenerateRequest, request_id: str | None) -> None:
        self.request = request
        self.stream = bool(request.stream)
        self._request_id = request_id or uuid.uuid4().hex
        self._orders: list[Order] = []
        self._is_list = False

    async def orders(self, front: Front) -> list[Order]:
        """Prompts of `text` or `input_ids`."""
        request = self.request
        if (request.text is None) == (request.input_ids is None):
            raise RequestError("give either text or input_ids")
        if request.input_ids is not None:
            prompts = prompt_ids(request.input_ids)
            several = bool(request.input_ids) and isinstance(request.input_ids[0], list)
        else:
            texts = [request.text] if isinstance(request.text, str) else list(request.text or ())
            prompts = [await front.wording.encode(text) for text in texts]
            several = isinstance(request.text, list)
        choices = (request.sampling_params.n if request.sampling_params else None) or 1
        self._is_list = several or choices > 1
        params = [params_of_generate(request, prompt, front.menu) for prompt in prompts]
        self._orders = orders(request, prompts, params, choices, front.menu)
        return self._orders

    def answer(self, completions: list[Completion]) -> Any:
        """One object, or a list of them."""
        answers = [self._one(i, completion) for i, completion in enumerate(completions)]
        return answers if self._is_list else answers[0]

    def opening(self) -> list[Any]:
        return []

    def event(self, index: int, delta: Delta, completion: Completion) -> Any:
        event = self._one(index, completion)
        return {**event, "index": index} if self._is_list else event

    def closing(self, completions: list[Completion]) -> list[Any]:
        return []

    def _one(self, index: int, completion: Completion) -> dict[str, Any]:
        order = self._orders[index]
        meta: dict[str, Any] = {
            "id": self._id_of(index),
            "prompt_tokens": len(order.prompt),
            "completion_tokens": len(completion.tokens),
            "cached_tokens": 0,
            "finish_reason": _finish(completion),
        }
        if order.params.logprobs is not None:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[t.logprob, t.token_id, None] for t in completion.tokens]
            if order.params.logprobs:
                meta["output_top_logprobs"] = [_top(token) for token in completion.tokens]
        return {"text": completion.text, "output_ids": completion.output_ids, "meta_info": meta}

    def _id_of(self, index: int) -> str:
        rid = self.request.rid
        if isinstance(rid, list):
            return rid[index] if index < len(rid) else f"{self._request_id}-{index}"
        return rid or (f"{self._request_id}-{index}" if self._is_list else self._request_id)


def _top(token: TokenOut) -> list[list[Any]]:
    return [[logprob, token_id, None] for token_id, logprob in token.top_logprobs]


def _finish(completion: Completion) -> dict[str, Any] | None:
    if completion.finish is None:
        return None
    if completion.finish == "length":
        return {"type": "length", "length": len(completion.tokens)}
    return {"type": completion.finish, "matched": completion.matched}


def routes(front: Front) -> list[web.RouteDef]:
    """/generate."""

    async def generate(http: web.Request) -> web.StreamResponse:
        request = front.read(await http.read(), GenerateRequest)
        return await front.serve(http, GenerateJob(request, http.headers.get("X-Request-ID")))

    return [web.post("/generate", generate)]
