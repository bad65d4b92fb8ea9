"""Workers at https:// URLs: whom the router trusts, and what it says about the others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvflow.http.app import build_app
from kvflow.http.listening import bound_socket, listening_on, url_of
from kvflow.http.tls import ClientContext, ServerContext
from kvflow.router.router import Router
from kvflow.serve.http.metrics import RoleMetrics
from tests.certificates import Authority

HOST = "127.0.0.1"


@asynccontextmanager
async def server(context: ServerContext | None) -> AsyncIterator[str]:
    """Yield the URL of a server that is alive, and no worker."""
    made = bound_socket(HOST, 0, "--port")
    async with listening_on(build_app([], RoleMetrics()), made, context):
        yield url_of(made, HOST, context)


async def reason_of(url: str, tls: ClientContext | None) -> str:
    router = Router([url], [url], tls=tls)
    try:
        await router.start()
        return router.workers.all[0].reason
    finally:
        await router.close()


@pytest.mark.parametrize(
    ("serves", "asks", "trusts", "why"),
    [
        ("https", "https", "ca.pem", "/health answered 404: this server has no GET /health"),
        ("https", "https", "other/ca.pem", "certificate verify failed: unable to get local issuer"),
        ("https", "https", "", "certificate verify failed: unable to get local issuer"),
        ("https", "http", "ca.pem", "/health answered 400: plain HTTP at a port that serves HTTPS"),
        ("http", "https", "ca.pem", "WRONG_VERSION_NUMBER"),
    ],
)
async def test_the_reason_says_why_a_worker_cannot_be_asked(
    tmp_path: Path, serves: str, asks: str, trusts: str, why: str
) -> None:
    files = Authority(tmp_path).issue("server", HOST)
    Authority(tmp_path / "other")
    context = ServerContext(files.certificate, files.key) if serves == "https" else None
    tls = ClientContext(str(tmp_path / trusts)) if trusts else None
    async with server(context) as url:
        reason = await reason_of(url.replace(serves, asks), tls)
    assert why in reason and " object at 0x" not in reason
