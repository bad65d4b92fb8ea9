"""POST /generate, SGLang's route: text or token ids in, text and token ids out.

A stream is cumulative: every event repeats the whole answer so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from kvflow.aio import in_turns
from kvflow.http.aborts import ABORT
from kvflow.http.errors import RequestError
from kvflow.http.growing import GrowingArray, GrowingText
from kvflow.http.prompt_fields import PromptIds
from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.http.completion import Completion, Delta
from kvflow.serve.http.completion_service import GenerationRequest
from kvflow.serve.http.generation_requests import (
    check_count,
    choices_of_generate,
    generation_requests,
    params_of_generate,
    prompt_ids,
)
from kvflow.serve.http.pipeline import CompletionPipeline
from kvflow.serve.http.schemas import GenerateRequest
from kvflow.telemetry.requests import CURRENT


class _Grown:
    """The part of a choice's answer that every event repeats. Each token is encoded only once."""

    def __init__(self, token_text: Callable[[int], str] | None) -> None:
        self._token_text = token_text
        self.text = GrowingText()
        self.ids = GrowingArray()
        self.logprobs = GrowingArray()
        self.top_logprobs = GrowingArray()
        self.input_logprobs = GrowingArray()
        self.asked_logprobs = GrowingArray()
        self.input_top_logprobs = GrowingArray()
        self.input_asked_logprobs = GrowingArray()

    def add(self, delta: Delta, params: SamplingParams) -> None:
        self.text.add(delta.text)
        for token in delta.tokens:
            self.ids.add(token.token_id)
            if params.logprobs is not None:
                self.logprobs.add(self._named(token.token_id, token.logprob))
            if params.logprobs:
                self.top_logprobs.add(self._all_named(token.top_logprobs))
            if params.logprob_token_ids:
                self.asked_logprobs.add(self._all_named(token.asked_logprobs))

    async def add_prompt(
        self, scores: PromptLogprobs, prompt: PromptIds, asked_ids: tuple[int, ...] = ()
    ) -> None:
        async for token in in_turns(scores.tokens(prompt, asked_ids)):
            self.input_logprobs.add(self._named(token.token_id, token.logprob))
            self.input_top_logprobs.add(self._all_named(token.top_logprobs) or None)
            self.input_asked_logprobs.add(self._all_named(token.asked_logprobs) or None)

    def _all_named(self, logprobs: Sequence[tuple[int, float]]) -> list[list[Any]]:
        return [self._named(*one) for one in logprobs]

    def _named(self, token_id: int, logprob: float | None) -> list[Any]:
        return [logprob, token_id, self._token_text and self._token_text(token_id)]


class GenerateCall:
    """One /generate body and its answer."""

    def __init__(self, body: GenerateRequest) -> None:
        self.body = body
        self.stream = bool(body.stream)
        self._request_id = CURRENT.get().request_id
        self._requests: list[GenerationRequest] = []
        self._grown: list[_Grown] = []
        self._is_list = False

    async def generation_requests(self, pipeline: CompletionPipeline) -> list[GenerationRequest]:
        body = self.body
        if body.text is not None and body.input_ids is not None:
            raise RequestError("text and input_ids are both given; send one of them")
        if body.input_ids is not None:
            prompts, several = prompt_ids(body.input_ids)
        elif body.text is not None:
            texts = [body.text] if isinstance(body.text, str) else body.text
            # This first check saves the work of tokenizing too many texts. `n` is known only later.
            check_count(len(texts), 1)
            prompts = [await pipeline.tokenizer.encode(text, param="text") for text in texts]
            several = isinstance(body.text, list)
        else:
            raise RequestError("neither text nor input_ids is given; send one of them")
        choices = choices_of_generate(body, len(prompts))
        check_count(len(prompts), choices)
        self._is_list = several or choices > 1
        params = await params_of_generate(body, prompts, pipeline.request_limits)
        self._requests = generation_requests(
            body, prompts, params, choices, pipeline.request_limits
        )
        token_text = pipeline.tokenizer.token_text if body.return_text_in_logprobs else None
        self._grown = [_Grown(token_text) for _ in self._requests]
        return self._requests

    async def scored(self, index: int, scores: PromptLogprobs) -> None:
        request = self._requests[index]
        await self._grown[index].add_prompt(
            scores, request.prompt, request.params.logprob_token_ids
        )

    def add(self, index: int, delta: Delta) -> None:
        self._grown[index].add(delta, self._requests[index].params)

    def answer(self, completions: list[Completion]) -> Any:
        answers = [self._one(i, completion) for i, completion in enumerate(completions)]
        return answers if self._is_list else answers[0]

    def opening(self) -> list[Any]:
        return []

    def events(self, index: int, deltas: list[Delta], completion: Completion) -> list[Any]:
        """Return one cumulative event for all `deltas`. SGLang does the same for slow clients."""
        event = self._one(index, completion)
        return [{**event, "index": index} if self._is_list else event]

    def closing(self, completions: list[Completion]) -> list[Any]:
        return []

    def _one(self, index: int, completion: Completion) -> dict[str, Any]:
        request, grown = self._requests[index], self._grown[index]
        meta: dict[str, Any] = {
            "id": self.id_of(index),
            "prompt_tokens": len(request.prompt),
            "completion_tokens": completion.generated,
            "cached_tokens": completion.cached_tokens,
            "finish_reason": _finish(completion),
        }
        if (hidden := completion.hidden_states) is not None:
            meta["hidden_states"] = hidden.floats()[0].tolist()
        if request.params.logprobs is not None:
            meta["input_token_logprobs"] = grown.input_logprobs
            meta["output_token_logprobs"] = grown.logprobs
            if request.params.logprobs:
                meta["input_top_logprobs"] = grown.input_top_logprobs
                meta["output_top_logprobs"] = grown.top_logprobs
            if request.params.logprob_token_ids:
                meta["input_token_ids_logprobs"] = grown.input_asked_logprobs
                meta["output_token_ids_logprobs"] = grown.asked_logprobs
        return {"text": grown.text, "output_ids": grown.ids, "meta_info": meta}

    def id_of(self, index: int) -> str:
        rid = self.body.rid
        if isinstance(rid, list):
            return rid[index] if index < len(rid) else f"{self._request_id}-{index}"
        return rid or (f"{self._request_id}-{index}" if self._is_list else self._request_id)


def _finish(completion: Completion) -> dict[str, Any] | None:
    if completion.finish is None:
        return None
    if completion.finish == "length":
        return {"type": "length", "length": completion.generated}
    if completion.finish == ABORT:
        return {"type": ABORT, "message": "ended by /abort_request"}
    return {"type": completion.finish, "matched": completion.matched}


def routes(pipeline: CompletionPipeline) -> list[web.RouteDef]:
    async def generate(http: web.Request) -> web.StreamResponse:
        body = await pipeline.read(http, GenerateRequest)
        return await pipeline.serve(http, GenerateCall(body))

    return [web.post("/generate", generate)]
