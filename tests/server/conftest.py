"""A decode and a prefill on fakes, and a client for them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

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
