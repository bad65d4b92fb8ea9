"""Pages of other origins: only those that the flag names, on every role,
with a key as without one.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from kvflow.http.app import build_app
from kvflow.http.authorization import Keys
from kvflow.serve.config.sources import resolve
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.operations import routes
from tests.server.fake_service import FakeService, Meeting, Role, served

PAGE = "https://page.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


def app_of(meeting: Meeting, origins: tuple[str, ...]) -> Any:
    role = Role(FakeService("decode", meeting))
    listed = routes(role.pipeline, host="h", role_switch=role.role_switch)
    return build_app(listed, RoleMetrics(), Keys("sesame"), origins)


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((PAGE,), PAGE), (("*",), "*"), (("https://other.example", PAGE), PAGE)],
)
async def test_a_named_origin(
    meeting: Meeting, session: aiohttp.ClientSession, origins: tuple[str, ...], allowed: str
) -> None:
    async with served(app_of(meeting, origins)) as server:
        async with session.options(server.make_url("/model_info"), headers=PREFLIGHT) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == allowed
            assert answer.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
            assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        key = {"Origin": PAGE, "Authorization": "Bearer sesame"}
        # A page can read why it is refused.
        for headers, status in ((key, 200), ({"Origin": PAGE}, 401)):
            async with session.get(server.make_url("/model_info"), headers=headers) as answer:
                assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (
                    status,
                    allowed,
                )
                assert (answer.headers.get("Vary") == "Origin") == (allowed != "*")
        async with session.get(
            server.make_url("/model_info"), headers={"Authorization": "Bearer sesame"}
        ) as answer:
            assert answer.status == 200 and "Access-Control-Allow-Origin" not in answer.headers, (
                "of no page"
            )


@pytest.mark.parametrize("origins", [(), ("https://other.example",)])
async def test_any_other_origin(
    meeting: Meeting, session: aiohttp.ClientSession, origins: tuple[str, ...]
) -> None:
    async with served(app_of(meeting, origins)) as server:
        async with session.options(server.make_url("/model_info"), headers=PREFLIGHT) as answer:
            assert answer.status == 401
            assert not [name for name in answer.headers if name.startswith("Access-Control")]
        async with session.get(server.make_url("/health"), headers={"Origin": PAGE}) as answer:
            assert answer.status == 200
            assert not [name for name in answer.headers if name.startswith("Access-Control")]


def test_the_flag() -> None:
    given = {"prefill": ("http://a",), "decode": ("http://b",)}
    assert resolve("router", given, env={}).allowed_origins == ()
    assert resolve(
        "router", given, env={"KVFLOW_ALLOWED_ORIGINS": f"{PAGE}, *"}
    ).allowed_origins == (PAGE, "*")


async def test_a_page_that_names_a_method_in_a_request_of_its_own_is_answered(
    meeting: Meeting, session: aiohttp.ClientSession
) -> None:
    async with (
        served(app_of(meeting, (PAGE,))) as server,
        session.get(server.make_url("/health"), headers=PREFLIGHT) as answer,
    ):
        assert answer.status == 200 and (await answer.json())["status"] == "ok"
