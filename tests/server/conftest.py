"""A decode and a prefill on fakes, a router in front of them, and clients."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from kvflow.router.router import Router
from kvflow.router.routes import router_app
from tests.server.fake_service import FakeService, Meeting, Role, Server, served


@pytest.fixture
async def meeting() -> Meeting:
    return Meeting()


@pytest.fixture
async def prefill(meeting: Meeting) -> Role:
    return Role(FakeService("prefill", meeting))


@pytest.fixture
async def decode(meeting: Meeting) -> Role:
    return Role(FakeService("decode", meeting))


@pytest.fixture
async def prefill_server(prefill: Role) -> AsyncIterator[Server]:
    async with served(prefill.app) as server:
        yield server


@pytest.fixture
async def decode_server(decode: Role) -> AsyncIterator[Server]:
    async with served(decode.app) as server:
        yield server


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


@pytest.fixture
async def server(prefill_server: Server, decode_server: Server) -> AsyncIterator[Server]:
    """The router."""
    router = Router([prefill_server.url], [decode_server.url], poll_s=3600)
    await router.start()
    async with served(router_app(router)) as made:
        yield made
    await router.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of the router."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as made:
        yield made
