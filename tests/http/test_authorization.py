"""The keys of clients and of operators, over every route of every role."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from kvflow.http.app import build_app
from kvflow.http.authorization import NO_KEYS, ROUTES, Access, Keys, bearer, routes_of
from kvflow.router.vllm_engine import VllmEngine
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.registry import registry_app
from kvflow.transports.control.registry import RankTable
from tests.fakes.servers import Client, Front, Server, answers
from tests.fakes.service import FakeService, Meeting, Role

Session = aiohttp.ClientSession
CLIENT, ADMIN = "sesame", "open sesame"
NAMES = ("prefill", "decode", "router", "router of vllm", "registry")
CONFIGURED = {"none": NO_KEYS, "api": Keys(CLIENT), "admin": Keys(admin=ADMIN)}
CONFIGURED["both"] = Keys(CLIENT, ADMIN)
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
OPEN = {
    *("/livez", "/health", "/health_generate", "/metrics", "/engine_metrics"),
    *("/ui", "/ui/{file}"),
}
# By hand, and not by `ROUTES`: who moves a route from one class to another has to say so twice.
FOR_OPERATORS = {
    *("GET /flush_cache", "POST /flush_cache", "POST /abort_request", "PUT /ranks/{rank}"),
    *("GET /rooms", "GET /rooms/{room}", "GET /peers", "GET /workers", "GET /workers/{worker_id}"),
    *("GET /overview", "GET /overview/events"),
}
ONLY_WITH_A_KEY = {
    *("POST /workers", "DELETE /workers/{worker_id}", "POST /switch_role"),
    "POST /peers/{incarnation}/declare_dead",
}


def server_of(name: str, keys: Keys) -> Server:
    """A role, whose client has no key."""
    made: Server
    if name in ("prefill", "decode"):
        made = Role(FakeService(name, Meeting()), keys=keys)
    elif name == "registry":
        made = Server(registry_app(RankTable(), RoleMetrics(), keys))
    else:
        engine = VllmEngine() if name == "router of vllm" else None
        nobody = [Client(1)]
        made = Front(nobody, nobody, keys=keys, engine=engine, retry_timeout_s=0)
    made.key = ""
    return made


def class_of(route: str) -> Access:
    if route.partition(" ")[2] in OPEN:
        return Access.OPEN
    if route in ONLY_WITH_A_KEY:
        return Access.CONTROL
    return Access.OPERATOR if route in FOR_OPERATORS else Access.CLIENT


@pytest.mark.parametrize("configured", CONFIGURED)
@pytest.mark.parametrize("name", NAMES)
async def test_each_key_opens_its_own_routes_and_no_other(name: str, configured: str) -> None:
    callers = [
        *(("s", headers) for headers in STRANGERS),
        ("c", bearer(CLIENT)),
        ("o", bearer(ADMIN)),
        ("o", {"Authorization": f"bearer {ADMIN}"}),
    ]
    odd = ["GET /nowhere", "DELETE /generate", "POST //generate", "GET /livez/../server_info"]
    async with server_of(name, CONFIGURED[configured]) as server:
        routes = [*routes_of(server.app), *odd]
        assert len(routes) > 6
        for route in routes:
            method, path = route.split()
            place = re.sub(r"\{\w+\}", "1", path)
            for who, headers in callers:
                status = await server.status(method, place, headers=headers, data=b"{}")
                refused = status in (401, 403)
                lets_in = LETS_IN[class_of(route)][configured]
                assert refused == (who not in lets_in), (route, who, headers, status)


NO_UTF8 = [b"\xff", b"\xed\xa0\x80", b"sesame\xff"]


@pytest.mark.parametrize("key", [b"sesame", *NO_UTF8])
async def test_a_key_that_is_no_utf8_is_a_key_as_others_are(key: bytes) -> None:
    """The server answered 500 to every request, as it could not compare such a key."""
    async with server_of("decode", Keys(key.decode("utf-8", "surrogateescape"))) as server:
        for given in (key, key + b"x", b"sesame", b"\xfe", b"?", b"", *NO_UTF8):
            head = b"GET /get_load HTTP/1.1\r\nHost: kvflow\r\nConnection: close\r\n"
            answer = await server.exchanged(head + b"Authorization: Bearer %s\r\n\r\n" % given)
            assert int(answer.split()[1]) == (200 if given == key else 401), given


NO_KEY = "this server has no key for them; start it with --admin-api-key"


@pytest.mark.parametrize(
    ("keys", "given", "status", "part"),
    [
        (Keys(CLIENT), CLIENT, 403, NO_KEY),
        (NO_KEYS, "", 403, NO_KEY),
        (Keys(CLIENT, ADMIN), CLIENT, 401, "the operator's key (--admin-api-key) is missing or"),
    ],
)
async def test_who_is_refused_learns_which_key_is_needed(
    keys: Keys, given: str, status: int, part: str
) -> None:
    async with server_of("decode", keys) as server:
        given_key = {"headers": bearer(given)}
        error = await server.refused(status, "/switch_role", {"role": "prefill"}, **given_key)
        assert part in error["message"]
        assert error["code"] == ("forbidden" if status == 403 else "unauthorized")


async def test_a_route_in_no_class_is_not_served() -> None:
    for route in (
        web.get("/forgotten", answers()),
        web.delete("/generate", answers()),
        web.get("/workers/{id}", answers()),
    ):
        with pytest.raises(AssertionError, match=f"no class .*: {route.method} {route.path}"):
            build_app([route], RoleMetrics())


async def test_every_route_of_a_class_is_served_by_some_role() -> None:
    served_by_some: set[str] = set()
    for name in NAMES:
        async with server_of(name, NO_KEYS) as server:
            served_by_some |= set(routes_of(server.app))
    assert served_by_some == set().union(*ROUTES.values())


@asynccontextmanager
async def keyed(of_router: Keys, of_workers: Keys) -> AsyncIterator[Front]:
    """A router and a pair of workers with their keys; the client is the router's operator."""
    meeting = Meeting()
    async with (
        Role(FakeService("prefill", meeting), keys=of_workers) as prefill,
        Role(FakeService("decode", meeting), keys=of_workers) as decode,
        Front([prefill], [decode], keys=of_router) as front,
    ):
        yield front


async def test_a_router_is_its_workers_operator() -> None:
    """It flushes and aborts with the operator's key, and asks for load with the clients'."""
    async with keyed(Keys(CLIENT, ADMIN), Keys(CLIENT, ADMIN)) as front:
        assert (await front.call("POST", "/flush_cache")).status == 200
        await front.get("/get_load", headers=bearer(CLIENT))
        assert await front.post("/abort_request", {"abort_all": True}) == {"aborted": 0}


async def test_workers_with_another_operator_s_key_are_named() -> None:
    """A cache was said to be flushed that none of the workers had flushed."""
    async with keyed(Keys(CLIENT, ADMIN), Keys(CLIENT, "another")) as front:
        error = await front.refused(502, "/flush_cache")
    assert "has other keys than this router" in error["message"]
