"""POST /tokenize and /detokenize, compatible with SGLang and vLLM. Both also exist under /v1."""

from __future__ import annotations

from typing import Any, TypeVar

from aiohttp import web

from kvflow.aio import in_turns
from kvflow.http.errors import RequestError
from kvflow.http.growing import GrowingArray
from kvflow.http.large_bodies import take_apart
from kvflow.http.model_length import served_length
from kvflow.http.paths import TOKENIZE_PATHS
from kvflow.http.prompt_fields import PromptIds, template_variables
from kvflow.http.responses import long_json_response
from kvflow.serve.http.generation_requests import prompt_ids
from kvflow.serve.http.pipeline import CompletionPipeline
from kvflow.serve.http.schemas import Body, DetokenizeRequest, TokenizeRequest, parse
from kvflow.serve.http.tools.choice import functions_of

B = TypeVar("B", bound=Body)

MAX_LISTS = 4096  # lists of token ids in one body; each takes a call of the tokenizer


def routes(pipeline: CompletionPipeline) -> list[web.RouteDef]:
    tokenizer, card = pipeline.tokenizer, pipeline.service.card

    async def tokenize(http: web.Request) -> web.StreamResponse:
        body = await read_body(http, TokenizeRequest)
        pipeline.check_model(body.model)
        found = await _ids(pipeline, body)
        counts, tokens, texts = [len(ids) for ids in found], GrowingArray(), GrowingArray()
        async for ids in in_turns(found):
            tokens.add(ids.tolist())
            if body.return_token_strs:
                texts.add([tokenizer.token_text(one) async for one in in_turns(ids.tolist())])
        several = isinstance(body.prompt, list)
        most = served_length(http, pipeline.service.limits.max_tokens)
        answer: dict[str, Any] = {"count": counts if several else counts[0], "max_model_len": most}
        answer["tokens"] = tokens if several else tokens.only()
        if body.return_token_strs:
            answer["token_strs"] = texts if several else texts.only()
        return await long_json_response(http, answer)

    async def detokenize(http: web.Request) -> web.StreamResponse:
        body = await read_body(http, DetokenizeRequest)
        pipeline.check_model(body.model)
        lists, several = prompt_ids(body.tokens, MAX_LISTS)
        async for ids in in_turns(lists):
            if len(ids) and ids.max() >= card.vocab_size:
                error = (
                    f"tokens: {ids.max()} is outside the model's vocabulary, "
                    f"0..{card.vocab_size - 1}"
                )
                raise RequestError(error, param="tokens")
        special = body.skip_special_tokens is False
        texts = [
            await tokenizer.decode(ids.tolist(), skip_special_tokens=not special) for ids in lists
        ]
        found = GrowingArray()
        async for text in in_turns(texts):
            found.add(text)
        named = found if several else found.only()
        # SGLang's clients read the first of these keys, and vLLM's the second.
        return await long_json_response(http, {"text": named, "prompt": named})

    return [
        *(web.post(path, tokenize) for path in TOKENIZE_PATHS[:2]),
        *(web.post(path, detokenize) for path in TOKENIZE_PATHS[2:]),
    ]


async def read_body(http: web.Request, kind: type[B]) -> B:
    raw, long_values = await take_apart(await http.read())
    return long_values.put_back(parse(raw, kind))


async def _ids(pipeline: CompletionPipeline, body: TokenizeRequest) -> list[PromptIds]:
    functions_of(body.tools)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.messages is not None:
        prompted = body.add_generation_prompt is not False
        variables = template_variables(body)
        return [
            await pipeline.tokenizer.encode_chat(
                body.messages, variables, body.tools or (), add_generation_prompt=prompted
            )
        ]
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    special = body.add_special_tokens is not False
    return [
        await pipeline.tokenizer.encode(text, param="prompt", add_special_tokens=special)
        for text in texts
    ]
