"""Pages of other origins: only those that the flag names, with a key as without one."""

from __future__ import annotations

import pytest

from kvflow.http.app import build_app
from kvflow.http.authorization import Keys
from kvflow.serve.config.sources import resolve
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.operations import routes
from tests.fakes.servers import Answer, Server
from tests.fakes.service import FakeService, Meeting, Role

PAGE = "https://page.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


KEY = {"Authorization": "Bearer sesame"}


def server_for(*origins: str) -> Server:
    role = Role(FakeService("decode", Meeting()))
    listed = routes(role.pipeline, host="h", role_switch=role.role_switch)
    return Server(build_app(listed, RoleMetrics(), Keys("sesame"), origins))


def granted(answer: Answer) -> list[str]:
    return [name for name in answer.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((PAGE,), PAGE), (("*",), "*"), (("https://other.example", PAGE), PAGE)],
)
async def test_a_named_origin(origins: tuple[str, ...], allowed: str) -> None:
    async with server_for(*origins) as server:
        answer = await server.call("OPTIONS", "/model_info", headers=PREFLIGHT)
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == allowed
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        # A page can read why it is refused.
        for key, status in ((KEY, 200), ({}, 401)):
            answer = await server.call("GET", "/model_info", headers={**key, "Origin": PAGE})
            assert answer.status == status
            assert answer.headers["Access-Control-Allow-Origin"] == allowed
            assert (answer.headers.get("Vary") == "Origin") == (allowed != "*")
        answer = await server.call("GET", "/model_info", headers=KEY)
        assert (answer.status, granted(answer)) == (200, []), "of no page"


@pytest.mark.parametrize("origins", [(), ("https://other.example",)])
async def test_any_other_origin(origins: tuple[str, ...]) -> None:
    async with server_for(*origins) as server:
        answer = await server.call("OPTIONS", "/model_info", headers=PREFLIGHT)
        assert (answer.status, granted(answer)) == (401, [])
        answer = await server.call("GET", "/health", headers={"Origin": PAGE})
        assert (answer.status, granted(answer)) == (200, [])


def test_the_flag() -> None:
    given = {"prefill": ("http://a",), "decode": ("http://b",)}
    assert resolve("router", given, env={}).allowed_origins == ()
    named = resolve("router", given, env={"KVFLOW_ALLOWED_ORIGINS": f"{PAGE}, *"})
    assert named.allowed_origins == (PAGE, "*")


async def test_a_page_that_names_a_method_in_a_request_of_its_own_is_answered() -> None:
    async with server_for(PAGE) as server:
        assert (await server.get("/health", headers=PREFLIGHT))["status"] == "ok"
