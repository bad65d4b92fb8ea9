"""The bootstrap registry and its client, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from kvflow.protocols.errors import LostError, WireError
from kvflow.protocols.wire.ranks import PoolShape, RankInfo, rank_to_json
from kvflow.server.http.metrics import Metrics
from kvflow.server.http.registry import RankTable, RegistryClient, registry_app
from tests.server.fake_service import Server, served

RANK = RankInfo(0, 1, (1 << 64) - 1, "tcp://127.0.0.1:5", "local", "m", PoolShape(16, 8, 1024, 2))


@pytest.fixture
async def table() -> RankTable:
    return RankTable()


@pytest.fixture
async def registry(table: RankTable) -> AsyncIterator[Server]:
    async with served(registry_app(table, Metrics())) as server:
        yield server


@pytest.fixture
async def client() -> AsyncIterator[RegistryClient]:
    made = RegistryClient()
    yield made
    await made.close()


def place(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


async def test_what_is_registered_is_resolved(registry: Server, client: RegistryClient) -> None:
    await client.register(place(registry), RANK)
    assert await client.resolve(place(registry)) == [RANK]


async def test_a_restarted_rank_replaces_itself(registry: Server, client: RegistryClient) -> None:
    await client.register(place(registry), RANK)
    again = msgspec.structs.replace(RANK, incarnation=5, control="tcp://127.0.0.1:6")
    await client.register(place(registry), again)
    assert await client.resolve(place(registry)) == [again]


async def test_a_new_world_size_forgets_the_old_world(registry: Server, client: RegistryClient) -> None:
    for rank in (1, 0):
        await client.register(place(registry), msgspec.structs.replace(RANK, rank=rank, world_size=2))
    assert [info.rank for info in await client.resolve(place(registry))] == [0, 1]
    await client.register(place(registry), RANK)
    assert await client.resolve(place(registry)) == [RANK]


async def test_missing_ranks_are_not_served_as_complete(registry: Server, client: RegistryClient) -> None:
    with pytest.raises(LostError, match="0 ranks"):
        await client.resolve(place(registry))
    await client.register(place(registry), msgspec.structs.replace(RANK, rank=1, world_size=2))
    with pytest.raises(LostError, match="1 ranks"):
        await client.resolve(place(registry))


async def test_nobody_there_is_lost(client: RegistryClient) -> None:
    with pytest.raises(LostError, match=r"127\.0\.0\.1:1"):
        await client.resolve("127.0.0.1:1")


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": "x"},
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
        {"incarnation": "xyz"},
        {"incarnation": "1" * 17},
        {"control": "http://x"},
        {"pool": []},
        {"model": None},
    ],
)
async def test_bad_ranks_are_refused_and_change_nothing(
    registry: Server, table: RankTable, session: aiohttp.ClientSession, changes: dict[str, Any]
) -> None:
    async with session.put(registry.make_url("/ranks/0"), json={**rank_to_json(RANK), **changes}) as answer:
        assert answer.status == 400
        assert json.loads(await answer.read())["error"]["message"]
    assert table.all() == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 4000])
async def test_malformed_puts_are_refused(registry: Server, session: aiohttp.ClientSession, raw: bytes) -> None:
    async with session.put(registry.make_url("/ranks/0"), data=raw) as answer:
        assert answer.status == 400


async def test_a_rank_can_only_put_itself(registry: Server, session: aiohttp.ClientSession) -> None:
    async with session.put(registry.make_url("/ranks/1"), json=rank_to_json(RANK)) as answer:
        assert answer.status == 400


async def test_the_key_is_asked_for(table: RankTable) -> None:
    stranger, friend = RegistryClient(), RegistryClient("sesame")
    try:
        async with served(registry_app(table, Metrics(), "sesame")) as server:
            with pytest.raises(WireError, match="401"):
                await stranger.register(place(server), RANK)
            await friend.register(place(server), RANK)
            assert await friend.resolve(place(server)) == [RANK]
    finally:
        await stranger.close()
        await friend.close()
