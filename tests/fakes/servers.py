"""An application on a real port, as production serves it, and its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, Self

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvflow.http.authorization import NO_KEYS, Keys, bearer
from kvflow.http.listening import bound_socket, listening_on
from kvflow.http.tracing import Tracing
from kvflow.router.router import Router
from kvflow.router.routes import router_app
from kvflow.router.workers import Worker

EVENTS = "text/event-stream; charset=utf-8"


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


class Client:
    """Calls one address, with `key` where it has one."""

    def __init__(self, port: int = 0, key: str = "") -> None:
        self.port, self.key = port, key

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=bearer(self.key))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def make_url(self, path: str) -> str:
        return self.url + path

    async def call(self, method: str, path: str, document: Any = None, **options: Any) -> Answer:
        """`options`: `data` in the place of a document, `headers`."""
        options = {"json": document} | options if document is not None else options
        async with self._session.request(method, self.url + path, **options) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def status(self, method: str, path: str, **options: Any) -> int:
        """Return the status of an answer, whose body may be a stream that does not end."""
        async with self._session.request(method, self.url + path, **options) as answer:
            return answer.status

    async def get(self, path: str, *, status: int = 200, **options: Any) -> Any:
        answer = await self.call("GET", path, **options)
        assert answer.status == status, answer
        return answer.json

    async def post(
        self, path: str, document: Any = None, *, status: int = 200, **options: Any
    ) -> Any:
        answer = await self.call("POST", path, document, **options)
        assert answer.status == status, answer
        return answer.json

    async def refused(self, status: int, path: str, document: Any = None, **options: Any) -> Any:
        """Return the error that a POST is answered with, which has all that OpenAI's have."""
        error = (await self.post(path, document, status=status, **options))["error"]
        assert error.keys() == {"type", "code", "param", "message"}
        return error

    async def events(self, path: str, document: Any, **options: Any) -> list[Any]:
        answer = await self.call("POST", path, {**document, "stream": True}, **options)
        assert (answer.status, answer.headers["Content-Type"]) == (200, EVENTS), answer
        found = events_of(answer.body)
        assert answer.body.endswith(b"data: [DONE]\n\n") != ("error" in found[-1]), answer
        return found

    def opened(self, path: str, document: Any) -> Any:
        """Return the answer to a POST as aiohttp has it, for one that is read piece by piece."""
        return self._session.post(self.url + path, json=document)

    async def metrics(self) -> str:
        answer = await self.call("GET", "/metrics")
        assert answer.status == 200
        return answer.text

    async def exchanged(self, *parts: bytes, half_close: bool = False) -> bytes:
        """Send bytes that no HTTP client would. Return what comes until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for part in parts:
            writer.write(part)
        if half_close:
            writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionResetError:
            return b""
        finally:
            writer.transport.abort()


class Server(Client):
    """An application, served while the block lasts."""

    def __init__(self, app: web.Application, *, key: str = "", port: int = 0) -> None:
        super().__init__(port, key)
        self.app = app
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        made = bound_socket("127.0.0.1", self.port, "--port")
        self.port = made.getsockname()[1]
        await self._stack.enter_async_context(listening_on(self.app, made))
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Leave the port. The block around it then has nothing more to stop."""
        await self._session.close()
        await self._stack.aclose()


def serving(*routes: web.RouteDef) -> Server:
    """These routes, and no others."""
    app = web.Application()
    app.add_routes(routes)
    return Server(app)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Step = bytes | asyncio.Event | Callable[[], object] | None


def answers(text: str = "", *, status: int = 200, content_type: str = "text/plain") -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=text, content_type=content_type)

    return answer


def stream_of(*steps: Step) -> Handler:
    """A handler that streams pieces, waits for events and makes calls; None ends its connection."""

    async def stream(http: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": EVENTS})
        for step in steps:
            if isinstance(step, bytes):
                if not out.prepared:
                    await out.prepare(http)
                await out.write(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif step is not None:
                step()
            elif http.transport is not None:
                http.transport.abort()
        return out

    return stream


def scripted(generate: Handler, role: str = "decode") -> Server:
    """A healthy worker whose completions are `generate`."""
    info = json.dumps({"disaggregation_mode": role, "incarnation": "1"})
    return serving(
        web.get("/server_info", answers(info, content_type="application/json")),
        web.get("/health", answers()),
        web.post("/generate", generate),
    )


class Front(Server):
    """A router in front of workers, which it looks at when it is told to."""

    def __init__(
        self,
        prefills: Sequence[Client],
        decodes: Sequence[Client],
        *,
        keys: Keys = NO_KEYS,
        tracing: Tracing | None = None,
        **options: Any,
    ) -> None:
        urls = ([worker.url for worker in workers] for workers in (prefills, decodes))
        self.router = Router(*urls, keys=keys, **{"poll_s": 3600} | options)
        super().__init__(router_app(self.router, tracing=tracing), key=keys.of_operator)

    async def __aenter__(self) -> Self:
        self._stack.push_async_callback(self.router.close)
        await self.router.start()
        return await super().__aenter__()

    async def join(self, worker: Client, **more: Any) -> Any:
        return await self.post("/workers", {"url": worker.url, **more}, status=202)

    async def turned_away(self, status: int, worker: Client, **more: Any) -> str:
        error = await self.refused(status, "/workers", {"url": worker.url, **more})
        return str(error["message"])

    def worker(self, server: Client) -> Worker:
        return next(worker for worker in self.router.workers.all if worker.url == server.url)

    async def checked(self, server: Client) -> Worker:
        """The same, as after the next background check."""
        worker = self.worker(server)
        await self.router.workers._check(worker)
        return worker


def events_of(body: bytes) -> list[Any]:
    """The events of a stream, without the one that ends it."""
    lines = body.splitlines()
    return [json.loads(line[len(b"data: ") :]) for line in lines if line.startswith(b"data: {")]


def samples_of(text: str, prefix: str = "") -> list[Sample]:
    """The samples of a valid exposition whose names begin with `prefix`."""
    families = text_string_to_metric_families(text)
    every = [sample for family in families for sample in family.samples]
    return [sample for sample in every if sample.name.startswith(prefix)]


def summed(text: str) -> dict[str, float]:
    """Values by name, summed over their labels."""
    found: dict[str, float] = {}
    for sample in samples_of(text):
        if not sample.name.endswith("_bucket"):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def labelled(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Samples of one name by the values of their labels."""
    every = samples_of(text, name)
    return {tuple(s.labels.values()): s.value for s in every if s.name == name}
