"""The routes for routers and operators: health, what is served here, load, rooms, metrics."""

from __future__ import annotations

import msgspec
from aiohttp import web

import kvflow
from kvflow.config import Settings
from kvflow.server.http.errors import Failure, RequestError
from kvflow.server.http.pipeline import Front, json_response

MAX_WHY = 200


def server_info(front: Front, settings: Settings, bootstrap_port: int | None) -> dict[str, object]:
    """/server_info: the keys routers read, then ours."""
    service, report = front.service, front.service.report()
    card = service.card
    return {
        "model_path": card.path,
        "served_model_name": card.name,
        "tp_size": 1,
        "dp_size": 1,
        "load_balance_method": "round_robin",
        "disaggregation_mode": service.role,
        "disaggregation_bootstrap_port": bootstrap_port,
        "disaggregation_transfer_backend": report.data_plane,
        "page_size": report.pool.page_size,
        "max_model_len": card.context_length,
        "version": kvflow.__version__,
        "role": service.role,
        "model": card.name,
        "dtype": card.dtype,
        "host": settings.host,
        "control_endpoint": report.control_endpoint,
        "data_plane": report.data_plane,
        "incarnation": f"{report.incarnation:016x}",
        "pool": msgspec.to_builtins(report.pool),
        "pages": {
            "free": report.pages_free,
            "total": report.pages_total,
            "home": report.pages_home,
            **report.pages_by_kind,
        },
        "quarantine_pages": report.quarantine_pages,
        "quarantine_limit_pages": report.quarantine_limit_pages,
        "rooms": report.rooms_by_state,
        "rooms_ended": report.rooms_ended,
        "bytes_moved": report.bytes_moved,
        "running": report.running,
        "waiting": report.waiting,
        "draining": front.draining,
    }


def routes(front: Front, settings: Settings, bootstrap_port: int | None) -> list[web.RouteDef]:
    """Everything but completions."""
    return [*_description(front, settings, bootstrap_port), *_state(front), *_peers(front, settings)]


def _description(front: Front, settings: Settings, bootstrap_port: int | None) -> list[web.RouteDef]:
    """What is served here."""
    service = front.service

    async def info(_: web.Request) -> web.StreamResponse:
        return json_response(server_info(front, settings, bootstrap_port))

    async def model_info(_: web.Request) -> web.StreamResponse:
        card = service.card
        return json_response(
            {
                "model_path": card.path,
                "served_model_name": card.name,
                "tokenizer_path": card.path,
                "is_generation": True,
                "model_type": card.model_type,
                "architectures": list(card.architectures),
                "max_context_length": card.context_length,
            }
        )

    return [
        *(web.get(path, info) for path in ("/server_info", "/get_server_info")),
        *(web.get(path, model_info) for path in ("/model_info", "/get_model_info")),
    ]


def _state(front: Front) -> list[web.RouteDef]:
    """How it is doing."""
    service = front.service

    async def health(_: web.Request) -> web.StreamResponse:
        if front.draining:
            return Failure(503, "draining", "this server is shutting down").response()
        if trouble := service.trouble:  # routers are to send their requests elsewhere
            return Failure(503, "degraded", trouble).response()
        return json_response({"status": "ok", "quarantine_pages": service.report().quarantine_pages})

    async def load(_: web.Request) -> web.StreamResponse:
        report = service.report()
        tokens = (report.pages_total - report.pages_free) * report.pool.page_size
        requests = max(front.running, report.running + report.waiting)
        line = {"dp_rank": 0, "num_reqs": requests, "num_waiting_reqs": report.waiting, "num_tokens": tokens}
        return json_response([line])

    async def flush(_: web.Request) -> web.StreamResponse:
        await service.flush_cache()
        return web.Response(text="Cache flushed.\n")

    async def metrics(_: web.Request) -> web.StreamResponse:
        return front.metrics.response()

    async def rooms(_: web.Request) -> web.StreamResponse:
        return json_response({"rooms": list(service.rooms())})

    async def story(http: web.Request) -> web.StreamResponse:
        try:
            room = int(http.match_info["room"])
        except ValueError:
            raise RequestError(f"{http.match_info['room'][:40]!r} is no room number") from None
        told = service.story(room)
        return (
            Failure(404, "unknown_room", f"room {room} is not known here").response()
            if told is None
            else json_response(told)
        )

    return [
        *(web.get(path, health) for path in ("/health", "/health_generate")),
        *(web.get(path, load) for path in ("/get_load", "/get_loads")),
        *(method("/flush_cache", flush) for method in (web.post, web.get)),
        web.get("/metrics", metrics),
        web.get("/rooms", rooms),
        web.get("/rooms/{room}", story),
    ]


def _peers(front: Front, settings: Settings) -> list[web.RouteDef]:
    """Who the other side is, and an operator's word about it."""
    service = front.service

    async def peers(_: web.Request) -> web.StreamResponse:
        return json_response({"peers": list(service.peers())})

    async def declare_dead(http: web.Request) -> web.StreamResponse:
        if not settings.api_key:  # with one, `app` has asked for it
            return Failure(403, "forbidden", "declaring a peer dead needs a server with --api-key").response()
        try:
            incarnation = int(http.match_info["incarnation"], 16)
        except ValueError:
            raise RequestError(f"{http.match_info['incarnation'][:40]!r} is no incarnation (16 hex digits)") from None
        why = http.query.get("why", "no reason given")[:MAX_WHY]
        service.declare_dead(incarnation, f"operator at {http.remote}: {why!r}")
        return json_response({"declared_dead": f"{incarnation:016x}", "peers": list(service.peers())})

    return [web.get("/peers", peers), web.post("/peers/{incarnation}/declare_dead", declare_dead)]
