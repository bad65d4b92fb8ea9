"""What a worker answers over HTTP, over real nodes."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

import kvflow
from kvflow.connectors.vllm import status
from kvflow.connectors.vllm.status import StatusServer
from tests.connectors.vllm.worker_pair import NAME, Pair, pair
from tests.fakes.servers import Client

KEY = "sesame"


@pytest.fixture
def each() -> Iterator[Pair]:
    with pair(lost_after_s=60) as found:
        yield found


@asynccontextmanager
async def served(each: Pair, *roles: str, api_key: str = "") -> AsyncIterator[Client]:
    prefill = each.prefill.thread if "prefill" in roles else None
    server = StatusServer(
        prefill, each.decode.thread if "decode" in roles else None, engine="e-1", dp_rank=2
    )
    port = server.start("127.0.0.1", 0, api_key)
    try:
        async with Client(port) as client:
            yield client
    finally:
        server.close()


async def test_a_decode_finds_the_prefill_and_a_proxy_its_engine(each: Pair) -> None:
    async with served(each, "prefill") as worker:
        (info,) = await kvflow.RegistryClient().resolve(worker.url.removeprefix("http://"))
        assert info == each.prefill.thread.info
        assert await worker.get("/query") == {"2": {"engine_id": "e-1"}}
        answer = await worker.call("GET", "/elsewhere")
        assert answer.status == 404 and "GET /metrics" in answer.text


async def test_a_key_is_needed_for_all_but_health(each: Pair) -> None:
    async with (
        served(each, "prefill", api_key=KEY) as stranger,
        Client(stranger.port, KEY) as friend,
    ):
        for path, status in (("/health", 200), ("/ranks", 401), ("/query", 401), ("/metrics", 401)):
            assert (await stranger.call("GET", path)).status == status, path
            assert (await friend.call("GET", path)).status == 200, path


async def test_health_counts_what_is_lent_and_metrics_are_of_each_role(each: Pair) -> None:
    each.gate.open.clear()
    each.step_prefill(sources=[each.source()])
    each.load(9, 4, 7)
    async with served(each, "prefill", "decode") as worker:
        found = await worker.get("/health")
        counted = {"pinned_blocks", "quarantined_blocks", "overdue_blocks", "limit"}
        assert found.keys() == {"status"} | counted
        assert (found["status"], found["quarantined_blocks"]) == ("ok", 0)
        for path, lent in (("", 0), ("/prefill", 0), ("/decode", 3)):
            answer = await worker.call("GET", f"/metrics{path}")
            assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain")
            assert f'kvflow_pages{{owner="transfer"}} {lent:.1f}' in answer.text.splitlines(), path
    each.gate.open.set()
    each.step_decode(abandoned=[NAME])
    each.step_prefill(finished={NAME: True})


def test_a_port_that_is_taken_is_refused_and_nothing_is_left(each: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = StatusServer(None, each.decode.thread, engine="e-1")
        with pytest.raises(kvflow.MisuseError, match=f"127.0.0.1:{port}"):
            server.start("127.0.0.1", port)
        server.close()
    server = StatusServer(None, each.decode.thread, engine="e-1")
    assert server.start("127.0.0.1", 0) > 0
    server.close()


@pytest.mark.parametrize(
    ("role", "counted"),
    [("prefill", {"pinned_blocks"}), ("decode", {"quarantined_blocks", "overdue_blocks", "limit"})],
)
async def test_health_counts_what_its_roles_have(each: Pair, role: str, counted: set[str]) -> None:
    async with served(each, role) as worker:
        assert (await worker.get("/health")).keys() == {"status"} | counted


async def test_health_says_why_a_worker_cannot_serve(
    each: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = status._state
    monkeypatch.setattr(
        status, "_state", lambda thread: ("its quarantine is full", state(thread)[1])
    )
    async with served(each, "decode") as worker:
        assert (await worker.get("/health", status=503))["status"] == "its quarantine is full"


def test_a_rank_that_its_leader_refuses_asks_again(
    each: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    leader, follower = (StatusServer(each.prefill.thread, None, engine="e-1") for _ in range(2))
    port = leader.start("127.0.0.1", 0, KEY)
    follower.start("127.0.0.1", 0)
    with caplog.at_level(logging.INFO):
        follower.join(f"127.0.0.1:{port}", "another key")
        each.until(lambda: f"waits for the registry of rank 0 at 127.0.0.1:{port}: " in caplog.text)
    assert "answered 401" in caplog.text
    for server in (follower, leader):
        server.close()


def test_closing_ends_what_still_waits_for_its_leader(each: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it answers nobody
        server = StatusServer(each.prefill.thread, None, engine="e-1")
        port = server.start("127.0.0.1", 0)
        server.join(f"127.0.0.1:{silent.getsockname()[1]}", KEY)
        connection, _ = silent.accept()
        with connection:
            server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 10)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvflow-status"]
    server.close()
