"""The routes by which workers join and leave a router."""

from __future__ import annotations

from aiohttp import web

from kvflow.http.bodies import decoded
from kvflow.http.errors import Failure
from kvflow.http.paths import WORKERS_PATH
from kvflow.http.responses import json_response
from kvflow.router.membership import JoinRequest, described
from kvflow.router.router import Router
from kvflow.router.workers import ROLES, Worker


def routes(router: Router) -> list[web.RouteDef]:
    """Return the routes for joining and leaving. A router has these routes with any engine."""
    membership = router.membership

    async def all_workers(_: web.Request) -> web.StreamResponse:
        counts = {f"{role}_count": len(router.workers.of(role)) for role in ROLES}
        found = [
            described(worker, trouble) for worker, trouble in router.workers.troubles().items()
        ]
        return json_response(
            {"workers": found, "total": len(found), "stats": {**counts, "regular_count": 0}}
        )

    async def one(http: web.Request) -> web.StreamResponse:
        worker = membership.find(http.match_info["worker_id"])
        if worker is None:
            return _unknown(http)
        return json_response(described(worker, router.workers.trouble(worker)))

    async def join(http: web.Request) -> web.StreamResponse:
        worker = await membership.join(decoded(await http.read(), JoinRequest))
        location = f"{WORKERS_PATH}/{worker.id}"
        answer = _accepted(
            worker,
            router.workers.trouble(worker) or "it gets requests",
            url=worker.url,
            location=location,
        )
        answer.headers["Location"] = location
        return answer

    async def leave(http: web.Request) -> web.StreamResponse:
        worker = membership.find(http.match_info["worker_id"])
        if worker is None:
            return _unknown(http)
        membership.leave(worker, http.query.get("incarnation"))
        return _accepted(
            worker, f"it gets no more requests, and has left when {worker.running} are answered"
        )

    return [
        web.get(WORKERS_PATH, all_workers),
        web.post(WORKERS_PATH, join),
        web.get(f"{WORKERS_PATH}/{{worker_id}}", one),
        web.delete(f"{WORKERS_PATH}/{{worker_id}}", leave),
    ]


def _accepted(worker: Worker, message: str, **more: str) -> web.Response:
    return json_response(
        {"status": "accepted", "worker_id": worker.id, **more, "message": message}, 202
    )


def _unknown(http: web.Request) -> web.Response:
    return Failure(
        404, "unknown_worker", f"no worker has the id {http.match_info['worker_id'][:40]!r}"
    ).response()
