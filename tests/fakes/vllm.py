"""A vLLM server as a router sees it: the wire of `vllm serve` 0.32.0, and no model behind it.

What it checks and answers was compared with vLLM 0.32.0:
entrypoints/openai/{completion,chat_completion,responses}/protocol.py and serving.py and
entrypoints/anthropic/{protocol,serving}.py (fields, order of a stream's events, errors inside of
one), entrypoints/serve/engine/protocol.py (errors, with a number as their code; the list of
models), entrypoints/serve/middleware/authenticate.py (what an API key guards), and
nixl/pull_scheduler.py (the `kv_transfer_params` that a prefill answers with).
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Literal

from aiohttp import web

from kvflow.connectors.vllm.params import prefill_answer
from kvflow.router.vllm_engine import VllmEngine
from tests.fakes.servers import Front, Server, answers

Connector = Literal["nixl", "kvflow", ""]
JSON = "application/json"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
REQUESTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "What is a page?", "max_tokens": 3},
    CHAT: {
        "model": "m",
        "messages": [{"role": "user", "content": "What is a page?"}],
        "max_completion_tokens": 3,
    },
    MESSAGES: {
        "model": "m",
        "messages": [{"role": "user", "content": "What is a page?"}],
        "max_tokens": 3,
    },
    RESPONSES: {"model": "m", "input": "What is a page?", "max_output_tokens": 3},
}
ROOM_OF_PREFILL = 4711  # which it draws where the router has not


def error(
    status: int, message: str, kind: str = "InternalServerError", param: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


class FakeVllm(Server):
    """One server. Completions count 1, 2, 3 up to `max_tokens`.

    `gate` holds every request until it is set; with kvflow's connector and a room, a decode waits
    for its prefill instead, in `rooms`, which a pair shares. `failures` are answered in the place
    of the next requests: a status, or 200 for a stream that begins as usual and has the error in
    the place of its first token.
    """

    def __init__(
        self, connector: Connector = "nixl", rooms: dict[int, asyncio.Event] | None = None
    ) -> None:
        self.connector, self.rooms = connector, rooms if rooms is not None else {}
        self.model, self.api_key = "m", ""
        self.healthy = True
        self.connector_port = 5600
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = asyncio.Event()
        self.failures: deque[int] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.request_ids: list[str | None] = []
        self.aborted: asyncio.Queue[str] = asyncio.Queue()
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", answers('{"version": "0.32.0"}', content_type=JSON)),
                web.get("/v1/models", self._models),
                *(web.post(path, self._serve) for path in REQUESTS),
                web.post(COUNT, self._count),
            ]
        )
        super().__init__(app)

    @property
    def params(self) -> list[Any]:
        return [body.get("kv_transfer_params") for body in self.bodies]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, http: web.Request) -> web.Response:
        if (refusal := self._unauthorized(http)) is not None:
            return refusal
        card = {
            "id": self.model,
            "object": "model",
            "created": 1,
            "owned_by": "vllm",
            "root": "/models/m",
            "parent": None,
            "max_model_len": 2048,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _count(self, http: web.Request) -> web.Response:
        if http.content_type != JSON:
            text = "Unsupported Media Type: Only 'application/json' is allowed"
            return web.json_response(error(400, text, "Bad Request"), status=400)
        return web.json_response({"input_tokens": len(await http.json())})

    def _unauthorized(self, http: web.Request) -> web.Response | None:
        if self.api_key and http.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return None

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        if (refusal := self._unauthorized(http)) is not None:
            return refusal
        assert http.content_type == "application/json"
        raw = await http.read()
        body: dict[str, Any] = json.loads(raw)  # of a field that comes twice, the last one
        self.bodies.append(body)
        self.raw.append(raw)
        self.request_ids.append(http.headers.get("X-Request-Id"))
        self.started.set()
        if (refused := self._refused(body)) is not None:
            return web.json_response(refused, status=refused["error"]["code"])
        failure = self.failures.popleft() if self.failures else 0
        if failure > 200:
            return web.json_response(error(failure, "so it is"), status=failure)
        with self._noting_abort(http.path):
            if not body.get("stream"):
                await self._computed(body)
                return web.json_response(self._answer(http.path, body))
            out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await out.prepare(http)  # at once: its generator has not run yet
            await self._computed(body)
            for event in self._events(http.path, body, failed=failure == 200):
                if http.path in (MESSAGES, RESPONSES):
                    await out.write(b"event: %b\n" % event["type"].encode())
                await out.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if http.path not in (MESSAGES, RESPONSES):
                await out.write(b"data: [DONE]\n\n")
            return out

    def _refused(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if body["model"] != self.model:
            text = f"The model `{body['model']}` does not exist."
            return error(404, text, "NotFoundError", "model")
        if body.get("stream_options") and not body.get("stream"):
            text = "Stream options can only be defined when `stream=True`."
            return error(400, text, "BadRequestError", "stream_options")
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if body.get("min_tokens", 0) > most:
            text = f"min_tokens must be less than or equal to max_tokens={most}"
            return error(400, text, "BadRequestError")
        return None

    @contextmanager
    def _noting_abort(self, path: str) -> Iterator[None]:
        """vLLM aborts a request when its connection is closed."""
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.put_nowait(path)
            raise

    async def _computed(self, body: dict[str, Any]) -> None:
        params = body.get("kv_transfer_params") or {}
        room = params.get("kvflow_room", 0)
        met = self.rooms.setdefault(room, asyncio.Event())
        if room not in (0, ROOM_OF_PREFILL) and params["do_remote_prefill"]:
            await met.wait()
            return
        await self.gate.wait()
        met.set()

    def _tokens(self, body: dict[str, Any]) -> list[str]:
        names = "max_completion_tokens", "max_output_tokens", "max_tokens"
        most = next((body[name] for name in names if body.get(name)), 16)
        return [f"{i + 1} " for i in range(most)]

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        text, count = "".join(self._tokens(body)), len(self._tokens(body))
        params = self._given(body)
        if path == MESSAGES:
            content = [{"type": "text", "text": text}]
            message = {"id": "msg-1", "type": "message", "role": "assistant", "content": content}
            return {**message, **({} if params is None else {"kv_transfer_params": params})}
        if path == RESPONSES:
            part = {"type": "output_text", "text": text, "annotations": []}
            item = {"id": "msg-1", "type": "message", "role": "assistant", "content": [part]}
            return {"id": "resp-1", "output": [item], "kv_transfer_params": params}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "stop_reason": None}
        choice["logprobs"] = None
        if path == CHAT:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        usage = _usage(count)
        kind = "chat.completion" if path == CHAT else "text_completion"
        head = {"id": "cmpl-1", "object": kind, "created": 1, "model": self.model}
        return {**head, "choices": [choice], "usage": usage, "kv_transfer_params": params}

    def _given(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """The params that a prefill answers with."""
        params = body.get("kv_transfer_params") or {}
        if not (self.connector and params.get("do_remote_decode")):
            return None
        found: dict[str, Any] = {
            "do_remote_prefill": True,
            # vLLM's scheduler adds it, of each request.
            "remote_prefill_cached_tokens": len(self.bodies),
            "do_remote_decode": False,
            "remote_host": "10.0.0.7",
            "remote_port": self.connector_port,
        }
        if self.connector == "kvflow":
            answer = prefill_answer(
                "10.0.0.7", self.connector_port, engine="e", workers=2, tensor_parallel=2
            )
            return {**found, **answer, "kvflow_room": params.get("kvflow_room", ROOM_OF_PREFILL)}
        return {
            **found,
            "remote_block_ids": [[3, 1, 4]],
            "remote_engine_id": "3c1fc5c8-1b0c-4f4a-a1c0-1f0e1c1d1e1f",
            "remote_request_id": "cmpl-1-0-1a2b3c4d",
            "remote_blocks_expiry_time": 12345.678901234567,
            "tp_size": 1,
        }

    def _events(self, path: str, body: dict[str, Any], *, failed: bool) -> Iterator[dict[str, Any]]:
        if path in (MESSAGES, RESPONSES):
            yield from self._named_events(path, body, failed=failed)
            return
        head = {
            "id": "cmpl-1",
            "object": "chat.completion.chunk" if path == CHAT else "text_completion",
            "model": self.model,
        }
        if path == CHAT:  # before it has looked whether the first result is an error
            delta = {"role": "assistant", "content": ""}
            opening = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**head, "choices": [opening]}
        if failed:
            yield error(500, "Internal server error")
            return
        tokens = self._tokens(body)
        for i, token in enumerate(tokens):
            reason = "length" if i + 1 == len(tokens) else None
            what = {"delta": {"content": token}} if path == CHAT else {"text": token}
            yield {**head, "choices": [{"index": 0, **what, "finish_reason": reason}]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": _usage(len(tokens))}

    def _named_events(
        self, path: str, body: dict[str, Any], *, failed: bool
    ) -> Iterator[dict[str, Any]]:
        """Each with its name as `type`. The first ones precede the look at the first result."""
        if path == MESSAGES:
            yield {"type": "message_start", "message": {"id": "msg-1", "content": []}}
        else:
            for name in ("response.created", "response.in_progress"):
                yield {"type": name, "response": {"id": "resp-1", "output": []}}
        if failed:
            yield {"type": "error", "error": {"type": "internal_error", "message": "so it is"}}
            return
        for token in self._tokens(body):
            if path == MESSAGES:
                delta = {"type": "text_delta", "text": token}
                yield {"type": "content_block_delta", "index": 0, "delta": delta}
            else:
                yield {"type": "response.output_text.delta", "delta": token}
        yield {"type": "message_stop" if path == MESSAGES else "response.completed"}


def _usage(completion: int) -> dict[str, int]:
    total = 3 + completion
    return {"prompt_tokens": 3, "completion_tokens": completion, "total_tokens": total}


@asynccontextmanager
async def fleet(
    prefills: list[FakeVllm],
    decodes: list[FakeVllm],
    legs: Literal["sequential", "together"] = "sequential",
    **options: Any,
) -> AsyncIterator[Front]:
    """A router in front of fake servers. Everything runs within the block."""
    async with AsyncExitStack() as stack:
        for fake in (*prefills, *decodes):
            await stack.enter_async_context(fake)
        options = {"engine": VllmEngine(legs), "retry_timeout_s": 5, **options}
        yield await stack.enter_async_context(Front(prefills, decodes, **options))


async def ask(front: Front, path: str = COMPLETIONS, *, stream: bool = False, **more: Any) -> Any:
    """Return the answer to a request with `more` fields, or its events."""
    document = {**REQUESTS[path], **more}
    answer: Any
    if stream:
        answer = await front.events(path, document)
    else:
        answer = await front.post(path, {**document, "stream": False})
    choices = [one for event in (answer if stream else [answer]) for one in event["choices"]]
    text = "".join(
        one.get("text") or one.get("delta", one.get("message", {})).get("content", "")
        for one in choices
    )
    assert text == "1 2 3 " * more.get("n", 1)
    return answer
