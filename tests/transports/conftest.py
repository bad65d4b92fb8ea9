"""A side and a peer over the plane that a test module names in PLANE."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.transports.peer_process import Peer, Side, spawned


@pytest.fixture
async def side(request: pytest.FixtureRequest) -> AsyncIterator[Side]:
    made = Side(request.module.PLANE, "page_first", None)
    yield made
    await made.close()


@pytest.fixture
async def peer(request: pytest.FixtureRequest) -> AsyncIterator[Peer]:
    async with spawned(request.module.PLANE) as made:
        yield made
