"""The bootstrap registry, behind aiohttp and bare, and its client: real HTTP."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvflow.http.authorization import Keys
from kvflow.protocols.errors import LostError, MisuseError, PeerError, WireError
from kvflow.protocols.wire.ranks import (
    PoolShape,
    RankInfo,
    check_ranks,
    group_for,
    rank_from_json,
    rank_to_json,
)
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.registry import registry_app
from kvflow.transports.control import rank_server
from kvflow.transports.control.rank_server import serve_ranks
from kvflow.transports.control.registry import (
    MAX_ANSWER_BYTES,
    RankTable,
    RegistryClient,
    _parsed,
)
from tests.fakes.servers import Client, Server

RANK = RankInfo(0, 1, (1 << 64) - 1, "tcp://127.0.0.1:5", "local", "m", PoolShape(16, 8, 1024, 2))


@pytest.fixture
async def table() -> RankTable:
    return RankTable()


Serving = Callable[..., AbstractAsyncContextManager[Client]]


def application(table: RankTable, api_key: str = "") -> Server:
    return Server(registry_app(table, RoleMetrics(), Keys(admin=api_key)))


@asynccontextmanager
async def bare(table: RankTable, api_key: str = "") -> AsyncIterator[Client]:
    async with serve_ranks(table, "127.0.0.1", 0, api_key) as port, Client(port) as client:
        yield client


@pytest.fixture(params=[application, bare])
def serving(request: pytest.FixtureRequest) -> Serving:
    """Every test that takes this runs against both registries."""
    made: Serving = request.param
    return made


@pytest.fixture
async def registry(table: RankTable, serving: Serving) -> AsyncIterator[Client]:
    async with serving(table) as server:
        yield server


@pytest.fixture
def client() -> RegistryClient:
    return RegistryClient()


def place(server: Client) -> str:
    return f"127.0.0.1:{server.port}"


async def test_what_is_registered_is_resolved_until_the_rank_restarts(
    registry: Client, client: RegistryClient
) -> None:
    for info in (RANK, replace(RANK, incarnation=5, control="tcp://127.0.0.1:6")):
        await client.register(place(registry), info)
        assert await client.resolve(place(registry)) == [info]


async def test_with_the_key_a_new_world_size_forgets_the_old_world(
    table: RankTable, serving: Serving
) -> None:
    client = RegistryClient("sesame")
    async with serving(table, "sesame") as registry:
        for rank in (1, 0):
            await client.register(place(registry), replace(RANK, rank=rank, world_size=2))
        assert [info.rank for info in await client.resolve(place(registry))] == [0, 1]
        await client.register(place(registry), RANK)
        assert await client.resolve(place(registry)) == [RANK]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"world_size": 3}, "of a prefill of 3 ranks"),
        ({"backend": "mooncake"}, "over mooncake"),
        ({"model": "another"}, "model 'another'"),
        ({"control": "tcp://10.0.0.66:5"}, "with an API key only"),
    ],
)
async def test_a_stranger_cannot_put_ranks_of_another_world(
    registry: Client, client: RegistryClient, changes: dict[str, Any], why: str
) -> None:
    ranks = [replace(RANK, rank=rank, world_size=2) for rank in range(2)]
    for info in ranks:
        await client.register(place(registry), info)
    lie = replace(ranks[1], incarnation=66, **changes)
    answer = await registry.call("PUT", "/ranks/1", rank_to_json(lie))
    assert answer.status == 409 and why in answer.json["error"]["message"]
    assert await client.resolve(place(registry)) == ranks


@pytest.mark.parametrize("key", ["", "sesame"])
async def test_a_rank_of_the_process_itself_is_not_replaced_from_outside(
    key: str, table: RankTable, serving: Serving
) -> None:
    table.put(RANK)
    client = RegistryClient(key)
    async with serving(table, key) as registry:
        for lie in (
            replace(RANK, incarnation=66),
            replace(RANK, rank=1, world_size=2),
            replace(RANK, rank=3, world_size=7),
        ):
            with pytest.raises(WireError, match="answered 409"):
                await client.register(place(registry), lie)
        assert await client.resolve(place(registry)) == [RANK]
    again = replace(RANK, incarnation=5)
    table.put(again)
    assert table.all() == [again]


async def test_missing_ranks_are_not_served_as_complete(
    registry: Client, client: RegistryClient
) -> None:
    with pytest.raises(LostError, match="0 ranks"):
        await client.resolve(place(registry))
    await client.register(place(registry), replace(RANK, rank=1, world_size=2))
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
    registry: Client, table: RankTable, changes: dict[str, Any]
) -> None:
    answer = await registry.call("PUT", "/ranks/0", {**rank_to_json(RANK), **changes})
    assert answer.status == 400
    assert answer.json["error"]["message"]
    assert table.all() == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'"\xff"', b"[" * 4000])
async def test_malformed_puts_are_refused(registry: Client, raw: bytes) -> None:
    answer = await registry.call("PUT", "/ranks/0", data=raw)
    assert answer.status == 400


async def test_a_rank_can_only_put_itself(registry: Client) -> None:
    answer = await registry.call("PUT", "/ranks/1", rank_to_json(RANK))
    assert answer.status == 400
    answer = await registry.call("PUT", "/ranks/0", rank_to_json(RANK))
    assert (answer.status, answer.json) == (200, {"ranks": 1})


async def test_the_key_is_asked_for(table: RankTable, serving: Serving) -> None:
    stranger, friend = RegistryClient(), RegistryClient("sesame")
    async with serving(table, "sesame") as server:
        with pytest.raises(WireError, match="401"):
            await stranger.register(place(server), RANK)
        await friend.register(place(server), RANK)
        assert await friend.resolve(place(server)) == [RANK]


@asynccontextmanager
async def answering(*parts: bytes, then: str = "close") -> AsyncIterator[str]:
    """A server that answers every request with `parts`, and then closes or keeps silent."""

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


REDIRECTED = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"", LostError, "closed without an answer"),
        (OK + b"Content-Length: 50\r\n\r\n{}", LostError, "closed before the end of the answer"),
        (b"SSH-2.0-OpenSSH\r\n", WireError, "not HTTP"),
        (OK + b"Content-Length: 4\r\n\r\nnope", WireError, "JSON"),
        (OK + b"\r\n" + b"[" * 100_000, WireError, "/ranks: "),
        (OK + b'\r\n{"ranks": 7}', WireError, "no list of ranks"),
        (OK + b'\r\n{"ranks": [7]}', WireError, "rank: "),
        (REDIRECTED, WireError, "answered 302"),
        (OK + b"\r\n" + b" " * (MAX_ANSWER_BYTES + 1), WireError, "limit of 4194304 bytes"),
    ],
)
async def test_an_answer_that_breaks_off_is_lost_and_one_that_makes_no_sense_is_refused(
    client: RegistryClient, answer: bytes, error: type[Exception], text: str
) -> None:
    async with answering(answer) as where:
        with pytest.raises(error, match=text):
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
            await asyncio.wait_for(asking, 20)


@pytest.mark.parametrize(
    "word",
    [
        *("", "10.0.0.1", "10.0.0.1:", "h:0", "h:65536", "h:80/x", "h:80 ", "u@h:80", "::1:80"),
        *("h:80\r\nX: y", "é:80"),
        # What DNS cannot carry.
        *("x" * 64 + ":80", "a..b:80", ".:80", ".".join(["x" * 60] * 5) + ":80"),
        *("[]:80", "[h]:80", "[::zz]:80", "[::1..2]:80", "[1:2]:80", "[::1%]:80", "[::1%a..b]:80"),
        "[::1%" + "x" * 60 + "]:80",
    ],
)
async def test_a_word_that_names_no_registry_is_misuse(client: RegistryClient, word: str) -> None:
    with pytest.raises(MisuseError, match='not "host:port"'):
        await client.resolve(word)


async def test_settings_of_the_client_are_checked() -> None:
    with pytest.raises(MisuseError, match="api_key"):
        RegistryClient("key\r\nX: y")
    with pytest.raises(MisuseError, match="timeout_s 0"):
        RegistryClient(timeout_s=0)


def test_neither_client_nor_bare_registry_needs_a_server_package() -> None:
    program = "import sys, kvflow.transports.control.rank_server; print('aiohttp' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


# --- the bare library's registry


SIZED = b"PUT /ranks/0 HTTP/1.1\r\nContent-Length: %b\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET /ranks?x=1 HTTP/1.0\r\nHost: x\r\n\r\n", b"200 OK"),
        (b"GET /elsewhere HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"DELETE /ranks/0 HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", b"400 Bad Request"),
        (b"GET /ranks HTTP/2\r\n\r\n", b"400 Bad Request"),
        (b"\xff \xff \xff\r\n\r\n", b"400 Bad Request"),
        (b"GET /ranks HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"400 Bad Request"),
        (b"GET /ranks HTTP/1.1\r\nX: " + b"y" * (17 << 10) + b"\r\n\r\n", b"431 Request Header"),
        (b"PUT /ranks/0 HTTP/1.1\r\n\r\n", b"411 Length Required"),
        (SIZED % b"3" + b'"\xff"', b"400 Bad Request"),
        (SIZED % b"-1", b"411 Length Required"),
        (SIZED % b"65537", b"413 Request Entity Too Large"),
        (SIZED % (b"9" * 5000), b"413 Request Entity Too Large"),
    ],
)
async def test_strange_requests_are_answered(
    table: RankTable, request_bytes: bytes, answer: bytes
) -> None:
    async with bare(table) as server:
        assert (await server.exchanged(request_bytes)).startswith(b"HTTP/1.1 " + answer)
        await RegistryClient().register(place(server), RANK)  # and the next good one works
        assert table.all() == [RANK]


async def test_other_documents_are_got_and_nothing_else(table: RankTable) -> None:
    documents = {"/metrics": lambda: rank_server.json_answer({"rooms": 3})}
    async with serve_ranks(table, "127.0.0.1", documents=documents) as port:
        got = await Client(port).exchanged(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200 OK") and got.endswith(b'{"rooms":3}')
        posted = await Client(port).exchanged(b"POST /metrics HTTP/1.1\r\n\r\n")
        assert posted.startswith(b"HTTP/1.1 404 Not Found")
        assert b"GET /ranks, GET /metrics and PUT" in posted


async def test_a_body_that_breaks_off_registers_nothing(table: RankTable) -> None:
    async with bare(table) as server:
        assert await server.exchanged(SIZED % b"50", b"{}", half_close=True) == b""
    assert table.all() == []


async def test_a_client_that_says_nothing_is_cut_off(
    table: RankTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_server, "REQUEST_S", 0.05)
    async with bare(table) as server:
        assert await server.exchanged(b"GET /ranks HTTP/1.1\r\n") == b""


async def test_connections_are_bounded_and_ended(
    table: RankTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_server, "MAX_CONNECTIONS", 2)
    others = asyncio.all_tasks()
    async with bare(table) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        assert await server.exchanged(b"GET /health HTTP/1.1\r\n\r\n") == b""
    assert asyncio.all_tasks() == others
    for reader, writer in silent:  # leaving the block does not wait for them
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.transport.abort()


async def test_a_connection_that_comes_at_the_end_is_closed(
    table: RankTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task is cancelled before it has begun."""
    accepted: list[asyncio.StreamWriter] = []
    honest = rank_server._Connections.accept

    def accept(self: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        honest(self, reader, writer)
        accepted.append(writer)

    monkeypatch.setattr(rank_server._Connections, "accept", accept)
    async with bare(table) as server:
        client = socket.create_connection(("127.0.0.1", server.port))
        while not accepted:
            await asyncio.sleep(0)
    with client, suppress(ConnectionResetError):
        client.settimeout(10)
        assert await asyncio.to_thread(client.recv, 1) == b""


def test_a_connection_that_is_accepted_as_the_server_closes_is_closed(table: RankTable) -> None:
    """asyncio's own loop accepts a connection one turn before it makes its transport."""

    async def close_between() -> socket.socket:
        async with rank_server.serve_ranks(table, "127.0.0.1") as port:
            client = socket.create_connection(("127.0.0.1", port))
            while not any("_accept_connection2" in repr(task) for task in asyncio.all_tasks()):
                await asyncio.sleep(0)
        return client

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        client = runner.run(close_between())
        with client, suppress(ConnectionResetError):
            client.settimeout(10)
            assert client.recv(1) == b""
    gc.collect()  # a socket that nobody has closed is an error


async def test_a_port_that_is_taken_is_named(table: RankTable) -> None:
    async with bare(table) as server:
        with pytest.raises(MisuseError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            async with serve_ranks(table, "127.0.0.1", server.port):
                pass


def of_group(dp_rank: int, rank: int, dp_size: int = 3) -> RankInfo:
    control = f"tcp://127.0.0.1:{10 + 2 * dp_rank + rank}"
    group = {"dp_rank": dp_rank, "dp_size": dp_size}
    return replace(RANK, rank=rank, world_size=2, control=control, **group)


async def test_a_data_parallel_prefill_has_its_groups_in_one_registry(
    registry: Client, client: RegistryClient
) -> None:
    every = [of_group(dp_rank, rank) for dp_rank in range(3) for rank in range(2)]
    for info in every[::-1]:
        with pytest.raises(LostError, match="ranks have registered so far"):
            await client.resolve(place(registry))
        await client.register(place(registry), info)
    assert await client.resolve(place(registry)) == every
    for room in (0, 1, 5, (1 << 63) + 1):
        assert await client.resolve(place(registry), room) == every[2 * (room % 3) :][:2]
    assert await client.resolve(place(registry), 5, dp_rank=0) == every[:2]
    with pytest.raises(
        MisuseError, match=r"dp_rank 3 is outside 0\.\.2, the groups of prefill tcp://127.0.0.1:10"
    ):
        await client.resolve(place(registry), 5, dp_rank=3)
    with pytest.raises(LostError, match="no rank of group 2"):
        group_for(every[:4], 5)
    assert group_for(every[:2], 5) == every[:2], "chosen already"
    assert group_for([RANK], 5) == group_for([RANK], 5, 0) == [RANK] and not group_for([], 5)


def test_ranks_of_two_groups_serve_no_room_together() -> None:
    with pytest.raises(
        PeerError, match=r"10 is of group 0 of 3, and tcp://127\.0\.0\.1:13 of group 1 of 3"
    ):
        check_ranks([of_group(1, 1), of_group(0, 0)])


def test_a_registry_of_before_knows_one_group() -> None:
    document = rank_to_json(RANK)
    assert (document.pop("dp_rank"), document.pop("dp_size")) == (0, 1)
    assert rank_from_json(document) == RANK
    assert rank_from_json(rank_to_json(of_group(2, 1))) == of_group(2, 1)
    for wrong in ({"dp_rank": 3}, {"dp_rank": -1}, {"dp_size": 0}, {"dp_size": 1 << 20}):
        with pytest.raises(WireError, match="rank: dp_rank"):
            rank_from_json(rank_to_json(of_group(2, 1)) | wrong)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("a-host:80", ("a-host", 80)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:1", ("::1", 1)),
    ],
)
def test_where_a_registry_is(address: str, found: tuple[str, int]) -> None:
    assert _parsed(address) == found
