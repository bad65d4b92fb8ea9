"""A side and a peer over the plane that a test module names in PLANE."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.forked_roles import PRELOADED_FOR_PEERS, Nursery, forking_peers
from tests.transports.peer_process import Peer, Side, spawned


@pytest.fixture(scope="session")
def peer_nursery() -> Iterator[Nursery]:
    made = Nursery(preloaded=PRELOADED_FOR_PEERS)
    yield made
    made.close()


@pytest.fixture(autouse=True, scope="module")
def _forked_peers(peer_nursery: Nursery) -> Iterator[None]:
    """Peers of the module's tests are forked, and import nothing anew."""
    with forking_peers(peer_nursery):
        yield


@pytest.fixture
async def side(request: pytest.FixtureRequest) -> AsyncIterator[Side]:
    made = Side(request.module.PLANE, "page_first", None)
    yield made
    await made.close()


@pytest.fixture
async def peer(request: pytest.FixtureRequest) -> AsyncIterator[Peer]:
    async with spawned(request.module.PLANE) as made:
        yield made
