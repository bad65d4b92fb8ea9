"""Host names that nothing resolves: they keep nobody waiting but who asks for them."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from kvflow.protocols.errors import LostError, TransferError
from kvflow.transports.control.registry import RegistryClient
from kvflow.transports.data.mooncake.handshake import check_answers
from kvflow.transports.host.names import LOOKUPS, HostNames


class DeadServer:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting, self.end = threading.Semaphore(0), threading.Event()
        self.asked: list[str] = []
        monkeypatch.setattr(socket, "getaddrinfo", self._ask)

    def _ask(self, host: str, *_: Any, **__: Any) -> Any:
        self.asked.append(host)
        self.waiting.release()
        assert self.end.wait(20)
        raise socket.gaierror(socket.EAI_NONAME, "nobody knows it")


async def test_names_nobody_resolves_take_no_thread_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, names = DeadServer(monkeypatch), HostNames("test")
    client = RegistryClient(timeout_s=0.2)
    try:
        asking: list[asyncio.Future[Any]] = []
        asking += [asyncio.ensure_future(client.resolve(f"host-{i}.invalid:80")) for i in range(20)]
        asking += [
            asyncio.ensure_future(check_answers(f"host-{i}:80", names, 0.2)) for i in range(20)
        ]
        for _ in range(2 * LOOKUPS):
            # The default threads are free.
            assert await asyncio.to_thread(server.waiting.acquire, timeout=10)
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(error) for error in found] == [LostError] * 20 + [TransferError] * 20
        assert len(server.asked) == 2 * LOOKUPS, "their threads hang, and no more are started"
    finally:
        server.end.set()


async def test_an_address_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    server = DeadServer(monkeypatch)
    for address in ("127.0.0.1", "::1", "fe80::1%eth0"):
        assert await HostNames("test").addresses(address, 1.0) == [address]
    assert not server.asked


async def test_each_address_of_a_name_stands_once_in_the_systems_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(host: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        places = [("10.0.0.2", 0), ("10.0.0.1", 0), ("10.0.0.2", 0), ("::1", 0, 0, 0)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    found = await HostNames("test").addresses("a-name", 5.0)
    assert found == ["10.0.0.2", "10.0.0.1", "::1"]


async def test_a_name_is_tried_at_each_of_its_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        _, writer = await HostNames("test").connect("localhost", port, 5.0)
        writer.transport.abort()
    with pytest.raises(OSError):
        await HostNames("test").connect("localhost", port, 5.0)
