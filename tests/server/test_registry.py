"""The bootstrap registry and its client, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from kvflow.protocols.errors import LostError, MisuseError, WireError
from kvflow.protocols.wire.ranks import PoolShape, RankInfo, rank_to_json
from kvflow.server.http.metrics import Metrics
from kvflow.server.http.registry import registry_app
from kvflow.transports.control.registry import MAX_ANSWER_BYTES, RankTable, RegistryClient
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
def client() -> RegistryClient:
    return RegistryClient()


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
    async with served(registry_app(table, Metrics(), "sesame")) as server:
        with pytest.raises(WireError, match="401"):
            await stranger.register(place(server), RANK)
        await friend.register(place(server), RANK)
        assert await friend.resolve(place(server)) == [RANK]


@asynccontextmanager
async def answering(*parts: bytes, then: str = "close") -> AsyncIterator[str]:
    """A server that answers every request with `parts`, and closes the connection, or keeps it open."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
        if then == "silence":
            await reader.read()  # until the client has had enough
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


OK = b"HTTP/1.1 200 OK\r\n"


async def test_an_answer_in_chunks_is_understood(client: RegistryClient) -> None:
    body = msgspec.json.encode({"ranks": [rank_to_json(RANK)]})
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:10], body[10:])]
    async with answering(OK, b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n") as where:
        assert await client.resolve(where) == [RANK]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "closed without an answer"),
        (OK + b"Content-Length: 50\r\n\r\n{}", "closed in the middle of the answer"),
    ],
)
async def test_an_answer_that_breaks_off_is_lost(client: RegistryClient, answer: bytes, text: str) -> None:
    async with answering(answer) as where:
        with pytest.raises(LostError, match=text):
            await client.resolve(where)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (OK + b"Content-Length: 4\r\n\r\nnope", "JSON"),
        (OK + b"\r\n" + b"[" * 100_000, "/ranks: "),
        (OK + b'\r\n{"ranks": 7}', "no list of ranks"),
        (OK + b'\r\n{"ranks": [7]}', "rank: "),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "answered 302"),
        (OK + b"\r\n" + b" " * (MAX_ANSWER_BYTES + 1), "over the limit of 4194304 bytes"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_refused(client: RegistryClient, answer: bytes, text: str) -> None:
    async with answering(answer) as where:
        with pytest.raises(WireError, match=text):
            await client.resolve(where)


async def test_silence_is_lost_in_time() -> None:
    async with answering(OK, then="silence") as where:
        with pytest.raises(LostError, match=r"no answer within 0\.05 s"):
            await RegistryClient(timeout_s=0.05).resolve(where)


async def test_cancelling_does_not_wait_for_the_answer() -> None:
    async with answering(then="silence") as where:
        asking = asyncio.ensure_future(RegistryClient(timeout_s=60).resolve(where))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asking, 5)


@pytest.mark.parametrize(
    "word",
    ["", "10.0.0.1", "10.0.0.1:", "h:0", "h:65536", "h:80/x", "h:80 ", "u@h:80", "::1:80", "h:80\r\nX: y", "é:80"],
)
async def test_a_word_that_names_no_registry_is_misuse(client: RegistryClient, word: str) -> None:
    with pytest.raises(MisuseError, match='not "host:port"'):
        await client.resolve(word)


async def test_settings_of_the_client_are_checked() -> None:
    with pytest.raises(MisuseError, match="api_key"):
        RegistryClient("key\r\nX: y")
    with pytest.raises(MisuseError, match="timeout_s 0"):
        RegistryClient(timeout_s=0)


def test_the_client_needs_no_server_package() -> None:
    program = "import sys, kvflow.transports.control.registry; print('aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
