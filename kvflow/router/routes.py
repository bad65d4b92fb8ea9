"""The routes of a router: completions, its own state, and requests that its workers answer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from aiohttp import web

from kvflow.http import aborts
from kvflow.http.app import MAX_BODY_BYTES, build_app
from kvflow.http.bodies import decoded
from kvflow.http.errors import Failure
from kvflow.http.responses import json_response
from kvflow.http.tracing import Tracing
from kvflow.router import worker_metrics, worker_routes
from kvflow.router.overview import routes as overview
from kvflow.router.router import Router
from kvflow.router.workers import ROLES


def routes(router: Router) -> list[web.RouteDef]:
    """Return all routes of a router, except those by which workers join and leave."""
    completions = [web.post(path, router.serve) for path in router.engine.completion_paths]
    operations = _operations(router) if router.engine.has_operations else []
    return [*completions, *_own(router), *_forwarded(router), *operations]


def _own(router: Router) -> list[web.RouteDef]:
    """Return the routes that the router answers from its own state."""

    async def health(_: web.Request) -> web.StreamResponse:
        if router.draining:
            return Failure(503, "draining", "this router is shutting down").response()
        if not router.workers.complete():
            missing = [
                f"no {role} worker is known" for role in ROLES if not router.workers.of(role)
            ]
            troubles = router.workers.troubles()
            told = (
                f"{worker.role} {worker.url}: {trouble}"
                for worker, trouble in troubles.items()
                if trouble
            )
            reasons = "; ".join([*missing, *told])
            return Failure(503, "no_workers", reasons).response()
        return json_response({"status": "ok"})

    async def info(_: web.Request) -> web.StreamResponse:
        summaries = [
            worker.summary(trouble) for worker, trouble in router.workers.troubles().items()
        ]
        state = {"draining": router.draining, "running": router.running, "waiting": router.waiting}
        return json_response(
            {
                "role": "router",
                "served_model_name": router.workers.model,
                "max_model_len": router.workers.max_model_len,
                **state,
                "workers": summaries,
            }
        )

    async def metrics(_: web.Request) -> web.StreamResponse:
        return router.metrics.response()

    async def of_workers(_: web.Request) -> web.StreamResponse:
        return await router.worker_metrics.response()

    return [
        *(web.get(path, health) for path in ("/health", "/health_generate")),
        *(web.get(path, info) for path in ("/server_info", "/get_server_info")),
        web.get("/metrics", metrics),
        web.get(worker_metrics.PATH, of_workers),
    ]


def _forwarded(router: Router) -> list[web.RouteDef]:
    """Return the routes that any decode can answer."""

    async def forward(http: web.Request) -> web.StreamResponse:
        return await router.forward(router.workers.ranked("decode", {})[0], http)

    return [web.route(method, path, forward) for method, path in router.engine.decode_routes]


def _operations(router: Router) -> list[web.RouteDef]:
    """Return the routes for which the router asks all workers."""

    async def load(_: web.Request) -> web.StreamResponse:
        answers = await asyncio.gather(
            *(router.ask(worker, "/get_load") for worker in router.workers.all)
        )
        return json_response([entry for answer in answers for entry in (answer or [])])

    async def flush(_: web.Request) -> web.StreamResponse:
        workers = router.workers.all
        await asyncio.gather(
            *(router.ask_as_operator(worker, "/flush_cache", "POST") for worker in workers)
        )
        # The workers' caches are empty now, so the router forgets which prompts were in them.
        for worker in router.workers.all:
            worker.cache.forget()
        return web.Response(text="Cache flushed.\n")

    async def abort(http: web.Request) -> web.StreamResponse:
        """Abort at decode first, because decode answers with an error if prefill ends a room."""
        raw = await http.read()
        decoded(raw, aborts.AbortRequest)
        found: dict[str, int] = {}
        for role in ("decode", "prefill"):
            workers = router.workers.of(role)
            asked = (router.ask_as_operator(worker, aborts.PATH, "POST", raw) for worker in workers)
            found[role] = sum(
                answer["aborted"] for answer in await asyncio.gather(*asked) if answer
            )
        # A request counts at its prefill and at its decode, so a sum would count it twice.
        return json_response({"aborted": max(found.values())})

    async def story(http: web.Request) -> web.StreamResponse:
        workers = router.workers.all
        # All at once: a frozen worker delays the others' answer by no more than its own timeout.
        answers = await asyncio.gather(
            *(router.ask_as_operator(worker, http.path) for worker in workers)
        )
        found = zip(workers, answers, strict=True)
        sides = {worker.role: answer for worker, answer in found if answer is not None}
        if sides:
            return json_response(sides)
        return Failure(404, "unknown_room", "no worker knows this room").response()

    return [
        web.get("/get_load", load),
        web.post("/flush_cache", flush),
        web.post(aborts.PATH, abort),
        web.get(r"/rooms/{room:\d+}", story),
    ]


def router_app(
    router: Router, origins: Collection[str] = (), tracing: Tracing | None = None
) -> web.Application:
    """Return the router's application, which accepts the same API keys as its workers."""
    looks = overview.routes(router.overview)
    found = [*routes(router), *worker_routes.routes(router), *looks]
    return build_app(
        found,
        router.metrics,
        router.keys,
        origins,
        max_body_bytes=MAX_BODY_BYTES,
        tracing=tracing,
    )
