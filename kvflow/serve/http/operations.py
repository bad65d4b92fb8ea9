"""Routes for routers and operators: health, description, load, rooms, metrics and peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from aiohttp import web

import kvflow
from kvflow.http.errors import Failure, RequestError
from kvflow.http.model_length import served_length
from kvflow.http.responses import json_response
from kvflow.protocols.wire.messages import WIRE_VERSION
from kvflow.serve.http.completion_service import Report
from kvflow.serve.http.measures import CompletionMeasures
from kvflow.serve.http.pipeline import CompletionPipeline
from kvflow.serve.http.role_switch import RoleSwitch
from kvflow.telemetry.histogram import Histogram

MAX_WHY_CHARACTERS = 200
MAX_DIGITS = 9  # of ?ended=


def _pool_info(report: Report) -> dict[str, object]:
    return {
        "pool": {
            **msgspec.to_builtins(report.pool),
            "tokens": report.pages_total * report.pool.page_size,
            "bytes": report.pool_bytes,
            "dtype": report.pool_dtype,
            "device": report.pool_device,
        },
        "pages": {
            "free": report.pages_free,
            "total": report.pages_total,
            "home": report.pages_at_rest,
            **report.pages_by_kind,
        },
        "rows": {"free": report.rows_free, "total": report.rows_total, **report.rows_by_kind},
        **({"spaces": msgspec.to_builtins(report.spaces)} if report.spaces else {}),
    }


def server_info(
    pipeline: CompletionPipeline, host: str, role_switch: RoleSwitch
) -> dict[str, object]:
    """Return the body of /server_info: first the keys that routers read, then kvflow's own."""
    service, report = pipeline.service, pipeline.service.report()
    card = service.card
    return {
        "model_path": card.path,
        "served_model_name": card.name,
        "tp_size": report.tp_size,
        "pp_size": report.pp_size,
        "dp_size": 1,
        "load_balance_method": "round_robin",
        "disaggregation_mode": service.role,
        "disaggregation_bootstrap_port": role_switch.bootstrap_port,
        "disaggregation_transfer_backend": report.data_plane,
        "page_size": report.pool.page_size,
        "max_model_len": service.limits.max_tokens,
        "version": kvflow.__version__,
        "role": service.role,
        "model": card.name,
        "dtype": card.dtype,
        "fingerprint": report.fingerprint,
        "sampling_defaults": card.sampling_defaults,
        "host": host,
        "control_endpoint": report.control_endpoint,
        "data_plane": report.data_plane,
        "wire_version": WIRE_VERSION,
        "incarnation": f"{report.incarnation:016x}",
        **_pool_info(report),
        "prefix_cache": msgspec.to_builtins(report.cache),
        "kv_events": report.kv_events,
        "optimistic_prefill": msgspec.to_builtins(report.optimism),
        "retraction": msgspec.to_builtins(report.retraction),
        "local_prompts": msgspec.to_builtins(report.local_prompts),
        "staging_waits": msgspec.to_builtins(report.staging_waits),
        "quarantine_pages": report.quarantine_pages,
        "quarantine_overdue_pages": report.quarantine_overdue_pages,
        "quarantine_limit_pages": report.quarantine_limit_pages,
        "pinned_pages": report.pinned_pages,
        "pinned_limit_pages": report.pinned_limit_pages,
        "rooms": report.rooms_by_state,
        "rooms_ended": report.rooms_ended,
        "ranks": [msgspec.to_builtins(rank) for rank in report.ranks],
        "bytes_moved": report.bytes_moved,
        "running": report.running,
        "waiting": report.waiting,
        "completions": _completions(pipeline.metrics.completions, report),
        "draining": pipeline.draining,
        **role_switch.describe(),
    }


def _completions(found: CompletionMeasures, report: Report) -> dict[str, object]:
    """Return counters since the start, and latencies as histograms that a reader can subtract."""
    outcomes: Counter[str] = Counter()
    for (outcome, _), count in found.outcomes.items():
        outcomes[outcome] += count
    latencies = {
        "time_to_first_token_s": tuple(found.first_token_seconds.values()),
        "inter_token_s": (found.inter_token_seconds,),
        "transfer_s": () if report.transfers is None else (report.transfers.transfer_seconds,),
    }
    return {
        **outcomes,
        "generated_tokens": found.tokens_sent.total(),
        "latencies": {name: _summed(them) for name, them in latencies.items() if them},
    }


def _summed(histograms: Sequence[Histogram]) -> dict[str, object]:
    """Return the upper bounds of the buckets, and the values in each; the last has no bound."""
    counts = [sum(counts) for counts in zip(*(one.buckets for one in histograms), strict=True)]
    return {"bounds": histograms[0].bounds, "counts": counts}


def routes(
    pipeline: CompletionPipeline, *, host: str, role_switch: RoleSwitch
) -> list[web.RouteDef]:
    """Return the routes of this module. `host` is the address that /server_info reports."""
    return [
        *_description(pipeline, host, role_switch),
        *_state(pipeline),
        *_rooms(pipeline),
        *_peers(pipeline),
    ]


def _description(
    pipeline: CompletionPipeline, host: str, role_switch: RoleSwitch
) -> list[web.RouteDef]:
    async def info(_: web.Request) -> web.StreamResponse:
        return json_response(server_info(pipeline, host, role_switch))

    async def model_info(http: web.Request) -> web.StreamResponse:
        card = pipeline.service.card
        return json_response(
            {
                "model_path": card.path,
                "served_model_name": card.name,
                "tokenizer_path": card.path,
                "is_generation": True,
                "model_type": card.model_type,
                "architectures": list(card.architectures),
                "max_context_length": served_length(http, pipeline.service.limits.max_tokens),
            }
        )

    return [
        *(web.get(path, info) for path in ("/server_info", "/get_server_info")),
        *(web.get(path, model_info) for path in ("/model_info", "/get_model_info")),
    ]


def _state(pipeline: CompletionPipeline) -> list[web.RouteDef]:
    async def health(_: web.Request) -> web.StreamResponse:
        if pipeline.draining:
            return Failure(503, "draining", pipeline.draining_reason).response()
        # Routers send no requests to a worker that answers 503 here.
        if reason := pipeline.service.unavailable_reason:
            return Failure(503, "degraded", reason).response()
        return json_response(
            {"status": "ok", "quarantine_pages": pipeline.service.report().quarantine_pages}
        )

    async def load(_: web.Request) -> web.StreamResponse:
        report = pipeline.service.report()
        pages = report.pages_total - report.pages_free
        requests = report.running + report.waiting
        waiting = report.waiting
        # A worker that drains reports a full load, so that routers choose another one.
        if pipeline.draining:
            pages = report.pages_total
            requests = pipeline.max_requests
            waiting = pipeline.max_requests
        line = {
            "dp_rank": 0,
            "num_reqs": max(pipeline.running, requests),
            "num_waiting_reqs": waiting,
        }
        return json_response([{**line, "num_tokens": pages * report.pool.page_size}])

    async def flush(_: web.Request) -> web.StreamResponse:
        await pipeline.service.flush_cache()
        return web.Response(text="Cache flushed.\n")

    async def metrics(_: web.Request) -> web.StreamResponse:
        return pipeline.metrics.response()

    return [
        *(web.get(path, health) for path in ("/health", "/health_generate")),
        *(web.get(path, load) for path in ("/get_load", "/get_loads")),
        *(method("/flush_cache", flush) for method in (web.post, web.get)),
        web.get("/metrics", metrics),
    ]


def _rooms(pipeline: CompletionPipeline) -> list[web.RouteDef]:
    async def rooms(http: web.Request) -> web.StreamResponse:
        if (ended := http.query.get("ended")) is None:
            return json_response({"rooms": list(pipeline.service.rooms())})
        if not (ended.isascii() and ended.isdigit() and len(ended) <= MAX_DIGITS):
            raise RequestError(
                f"ended is {ended[:40]!r}, and not a number of ended rooms, as in /rooms?ended=80",
                param="ended",
            )
        return json_response({"rooms": list(pipeline.service.rooms(int(ended)))})

    async def story(http: web.Request) -> web.StreamResponse:
        try:
            room = int(http.match_info["room"])
        except ValueError:
            raise RequestError(
                f"{http.match_info['room'][:40]!r} is not a room id (an unsigned 64-bit integer)"
            ) from None
        found = pipeline.service.story(room)
        if found is None:
            return Failure(404, "unknown_room", f"room {room} is not known here").response()
        return json_response(found)

    return [web.get("/rooms", rooms), web.get("/rooms/{room}", story)]


def _peers(pipeline: CompletionPipeline) -> list[web.RouteDef]:
    async def peers(_: web.Request) -> web.StreamResponse:
        return json_response({"peers": list(pipeline.service.peers())})

    async def declare_dead(http: web.Request) -> web.StreamResponse:
        try:
            incarnation = int(http.match_info["incarnation"], 16)
        except ValueError:
            given = http.match_info["incarnation"][:40]
            raise RequestError(f"{given!r} is not an incarnation (16 hexadecimal digits)") from None
        why = http.query.get("why", "no reason given")[:MAX_WHY_CHARACTERS]
        pipeline.service.declare_dead(incarnation, f"operator at {http.remote}: {why!r}")
        return json_response(
            {"declared_dead": f"{incarnation:016x}", "peers": list(pipeline.service.peers())}
        )

    return [web.get("/peers", peers), web.post("/peers/{incarnation}/declare_dead", declare_dead)]
