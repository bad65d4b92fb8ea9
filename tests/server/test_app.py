"""The bearer key in front of every route of every role."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from kvflow.server.http.metrics import Metrics
from kvflow.server.http.registry import registry_app
from kvflow.server.router.router import Router
from kvflow.server.router.routes import router_app
from kvflow.transports.control.registry import RankTable
from tests.server.fake_service import FakeService, Meeting, Role, served

KEY = "sesame"
OPEN_PATHS = {"/livez", "/health", "/health_generate", "/metrics"}
STRANGERS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer open"},
    {"Authorization": KEY},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": "Bearer "},
]


@pytest.fixture
async def apps(meeting: Meeting) -> AsyncIterator[dict[str, web.Application]]:
    router = Router(["http://127.0.0.1:1"], ["http://127.0.0.1:1"], api_key=KEY)
    yield {
        "prefill": Role(FakeService("prefill", meeting), api_key=KEY).app,
        "decode": Role(FakeService("decode", meeting), api_key=KEY).app,
        "router": router_app(router, KEY),
        "registry": registry_app(RankTable(), Metrics(), KEY),
    }
    await router.close()


@pytest.mark.parametrize("name", ["prefill", "decode", "router", "registry"])
async def test_no_route_is_open_without_the_key(
    apps: dict[str, web.Application], name: str, session: aiohttp.ClientSession
) -> None:
    app = apps[name]
    routes = [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None]
    assert len(routes) > 3
    async with served(app) as server:
        for method, path in [*routes, ("GET", "/nowhere"), ("DELETE", "/generate"), ("POST", "//generate")]:
            place = server.make_url(path.replace("{", "").replace("}", ""))
            for headers in STRANGERS:
                async with session.request(method, place, headers=headers, data=b"{}") as answer:
                    if path in OPEN_PATHS:
                        assert answer.status in (200, 503), (method, path)
                    else:
                        assert answer.status == 401, (method, path, headers)
