"""A decode and a prefill on fakes, a router in front of them, and clients."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.fakes.servers import Front
from tests.fakes.service import FakeService, Meeting, Role


@pytest.fixture
async def meeting() -> Meeting:
    return Meeting()


@pytest.fixture
async def met(meeting: Meeting) -> None:
    """Prefill has been in the rooms that a test of a decode alone asks for."""
    meeting.come(*range(7, 12))


@pytest.fixture
async def prefill(meeting: Meeting) -> AsyncIterator[Role]:
    async with Role(FakeService("prefill", meeting)) as made:
        yield made


@pytest.fixture
async def decode(meeting: Meeting) -> AsyncIterator[Role]:
    async with Role(FakeService("decode", meeting)) as made:
        yield made


@pytest.fixture
async def spare(meeting: Meeting) -> AsyncIterator[Role]:
    async with Role(FakeService("decode", meeting)) as made:
        yield made


@pytest.fixture
async def front(prefill: Role, decode: Role) -> AsyncIterator[Front]:
    """The router, which does not wait where no pair can serve."""
    async with Front([prefill], [decode], retry_timeout_s=0) as made:
        yield made


@pytest.fixture
async def client(front: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{front.url}/v1", api_key="none", max_retries=0
    ) as made:
        yield made
