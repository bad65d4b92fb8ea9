"""The keys of clients and of operators, over every route of every role: what each opens, and what
none does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvflow.http.app import build_app
from kvflow.http.authorization import NO_KEYS, ROUTES, Access, Keys, bearer, routes_of
from kvflow.router.router import Router
from kvflow.router.routes import router_app
from kvflow.router.vllm_engine import VllmEngine
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.registry import registry_app
from kvflow.transports.control.registry import RankTable
from tests.server.fake_service import FakeService, Meeting, Role, served

Session = aiohttp.ClientSession
CLIENT, ADMIN = "sesame", "open sesame"
NAMES = ("prefill", "decode", "router", "router of vllm", "registry")
CONFIGURED = {
    "none": NO_KEYS,
    "api": Keys(CLIENT),
    "admin": Keys(admin=ADMIN),
    "both": Keys(CLIENT, ADMIN),
}
STRANGERS = [
    {},
    bearer("open"),
    {"Authorization": CLIENT},
    {"Authorization": f"Basic {ADMIN}"},
    bearer(f"{CLIENT}x"),
    bearer(ADMIN[:-1]),
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer \xe9"},
]
# Whom each class lets in, by the keys that are configured: strangers, clients, operators.
LETS_IN = {
    Access.OPEN: {"none": "sco", "api": "sco", "admin": "sco", "both": "sco"},
    Access.CLIENT: {"none": "sco", "api": "c", "admin": "sco", "both": "co"},
    Access.OPERATOR: {"none": "sco", "api": "", "admin": "o", "both": "o"},
    Access.CONTROL: {"none": "", "api": "", "admin": "o", "both": "o"},
}
# By hand, and not by `ROUTES`: who moves a route from one class to another has to say so twice.
FOR_OPERATORS = {
    *(
        "GET /flush_cache",
        "POST /flush_cache",
        "POST /abort_request",
        "GET /rooms",
        "GET /rooms/{room}",
        "GET /peers",
    ),
    *("GET /workers", "GET /workers/{worker_id}", "PUT /ranks/{rank}"),
}
ONLY_WITH_A_KEY = {
    *("POST /workers", "DELETE /workers/{worker_id}", "POST /switch_role"),
    "POST /peers/{incarnation}/declare_dead",
}


async def app_of(name: str, keys: Keys, meeting: Meeting) -> AsyncIterator[web.Application]:
    if name in ("prefill", "decode"):
        yield Role(FakeService(name, meeting), keys=keys).app
    elif name == "registry":
        yield registry_app(RankTable(), RoleMetrics(), keys)
    else:
        engine = VllmEngine() if name == "router of vllm" else None
        router = Router(
            ["http://127.0.0.1:1"],
            ["http://127.0.0.1:1"],
            keys=keys,
            engine=engine,
            retry_timeout_s=0,
        )
        yield router_app(router)
        await router.close()


def class_of(route: str) -> Access:
    if route.partition(" ")[2] in ("/livez", "/health", "/health_generate", "/metrics"):
        return Access.OPEN
    if route in ONLY_WITH_A_KEY:
        return Access.CONTROL
    return Access.OPERATOR if route in FOR_OPERATORS else Access.CLIENT


@pytest.mark.parametrize("configured", CONFIGURED)
@pytest.mark.parametrize("name", NAMES)
async def test_each_key_opens_its_own_routes_and_no_other(
    name: str, configured: str, meeting: Meeting, session: Session
) -> None:
    callers = [
        *(("s", headers) for headers in STRANGERS),
        ("c", bearer(CLIENT)),
        ("o", bearer(ADMIN)),
    ]
    callers.append(("o", {"Authorization": f"bearer {ADMIN}"}))
    async for app in app_of(name, CONFIGURED[configured], meeting):
        routes = [
            *routes_of(app),
            "GET /nowhere",
            "DELETE /generate",
            "POST //generate",
            "GET /livez/../server_info",
        ]
        assert len(routes) > 6
        async with served(app) as server:
            for route in routes:
                method, path = route.split()
                place = server.make_url(re.sub(r"\{\w+\}", "1", path))
                for who, headers in callers:
                    async with session.request(
                        method, place, headers=headers, data=b"{}"
                    ) as answer:
                        refused = answer.status in (401, 403)
                        lets_in = LETS_IN[class_of(route)][configured]
                        assert refused == (who not in lets_in), (route, who, headers, answer.status)


@pytest.mark.parametrize("key", [b"\xff", b"\xed\xa0\x80", b"sesame\xff"])
async def test_a_key_that_is_no_utf8_is_a_key_as_others_are(key: bytes, meeting: Meeting) -> None:
    """The server answered 500 to every request, as it could not compare such a key with what it was
    given.
    """
    configured = Keys(key.decode("utf-8", "surrogateescape"))
    async with served(Role(FakeService("decode", meeting), keys=configured).app) as server:
        for given, status in (
            (key, 200),
            (key + b"x", 401),
            (b"sesame", 401),
            (b"\xfe", 401),
            (b"?", 401),
            (b"", 401),
        ):
            assert await status_of_bearer(server.url, given) == status, given


@pytest.mark.parametrize("given", [b"\xff", b"\xed\xa0\x80", b"sesame\xff"])
async def test_a_header_that_is_no_utf8_is_a_wrong_key(given: bytes, meeting: Meeting) -> None:
    async with served(Role(FakeService("decode", meeting), keys=Keys(CLIENT)).app) as server:
        assert await status_of_bearer(server.url, given) == 401


async def status_of_bearer(url: str, key: bytes) -> int:
    """The status that /get_load answers to a key which no HTTP client would send."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"GET /get_load HTTP/1.1\r\nHost: kvflow\r\nAuthorization: Bearer %s\r\n\r\n" % key
    )
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return int(line.split()[1])


@pytest.mark.parametrize(
    ("keys", "given", "status", "part"),
    [
        (
            Keys(CLIENT),
            CLIENT,
            403,
            "this server has no key for them; start it with --admin-api-key",
        ),
        (NO_KEYS, "", 403, "this server has no key for them; start it with --admin-api-key"),
        (
            Keys(CLIENT, ADMIN),
            CLIENT,
            401,
            "the operator's key (--admin-api-key) is missing or wrong",
        ),
    ],
)
async def test_who_is_refused_learns_which_key_is_needed(
    keys: Keys, given: str, status: int, part: str, meeting: Meeting, session: Session
) -> None:
    async with served(Role(FakeService("decode", meeting), keys=keys).app) as server:
        url = server.make_url("/switch_role")
        async with session.post(url, json={"role": "prefill"}, headers=bearer(given)) as answer:
            document: Any = await answer.json()
            assert (answer.status, part in document["error"]["message"]) == (status, True), document


async def test_a_route_in_no_class_is_not_served() -> None:
    async def nothing(_: web.Request) -> web.StreamResponse:
        return web.Response()

    for route in (
        web.get("/forgotten", nothing),
        web.delete("/generate", nothing),
        web.get("/workers/{id}", nothing),
    ):
        with pytest.raises(AssertionError, match=f"no class .*: {route.method} {route.path}"):
            build_app([route], RoleMetrics())


async def test_every_route_of_a_class_is_served_by_some_role(meeting: Meeting) -> None:
    served_by_some = {
        route
        for name in NAMES
        async for app in app_of(name, NO_KEYS, meeting)
        for route in routes_of(app)
    }
    assert served_by_some == set().union(*ROUTES.values())


async def test_a_router_is_its_workers_operator(meeting: Meeting, session: Session) -> None:
    """It flushes and aborts with the operator's key, and asks for load with the clients'."""
    keys = Keys(CLIENT, ADMIN)
    roles = [Role(FakeService(role, meeting), keys=keys) for role in ("prefill", "decode")]
    async with served(roles[0].app) as prefill, served(roles[1].app) as decode:
        router = Router([prefill.url], [decode.url], keys=keys, poll_s=3600)
        await router.start()
        async with served(router_app(router)) as front:
            for method, path, key in (
                ("POST", "/flush_cache", ADMIN),
                ("GET", "/get_load", CLIENT),
            ):
                async with session.request(
                    method, front.make_url(path), headers=bearer(key)
                ) as answer:
                    assert answer.status == 200, (path, await answer.text())
            url, body = front.make_url("/abort_request"), {"abort_all": True}
            async with session.post(url, json=body, headers=bearer(ADMIN)) as answer:
                assert (answer.status, await answer.json()) == (200, {"aborted": 0})
        await router.close()


async def test_workers_with_another_operator_s_key_are_named(
    meeting: Meeting, session: Session
) -> None:
    """A cache was said to be flushed that none of the workers had flushed."""
    roles = [
        Role(FakeService(role, meeting), keys=Keys(CLIENT, "another"))
        for role in ("prefill", "decode")
    ]
    async with served(roles[0].app) as prefill, served(roles[1].app) as decode:
        router = Router([prefill.url], [decode.url], keys=Keys(CLIENT, ADMIN), poll_s=3600)
        await router.start()
        async with (
            served(router_app(router)) as front,
            session.post(front.make_url("/flush_cache"), headers=bearer(ADMIN)) as answer,
        ):
            document: Any = await answer.json()
            assert (
                answer.status == 502
                and "has other keys than this router" in document["error"]["message"]
            )
        await router.close()
