"""Asking whether a mooncake engine answers, of listeners that hang up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvflow.protocols.errors import TransferError
from kvflow.transports.data.mooncake import handshake
from kvflow.transports.host.names import HostNames

PATIENCE_S = 0.1
ANSWER = bytes([3]) + b"{}"


class Listener:
    """Hangs up on the first `silent` connections, as an engine does, and then answers."""

    def __init__(self, silent: int, after_s: float, answer: bytes = ANSWER) -> None:
        self.asked, self._silent, self._after_s, self._answer = 0, silent, after_s, answer
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def closed(self) -> None:
        await self._idle.wait()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        self._open += 1
        self._idle.clear()
        size_bytes = int.from_bytes(await reader.readexactly(8), "little")
        if size_bytes > 64 or await reader.readexactly(size_bytes) != bytes([3]) + b"{}":
            pass  # hung up on, at once
        elif self.asked <= self._silent:
            await asyncio.sleep(self._after_s)
        else:
            writer.write(len(self._answer).to_bytes(8, "little") + self._answer)
            await writer.drain()
        writer.close()
        self._open -= 1
        if not self._open:
            self._idle.set()


@pytest.mark.parametrize(
    ("silent", "after_s", "answers"), [(0, 0.0, True), (2, 2 * PATIENCE_S, True), (2, 0.0, False)]
)
async def test_only_who_hangs_up_late_is_asked_again(
    silent: int, after_s: float, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was held up for 5 s between connecting and asking was hung up on."""
    monkeypatch.setattr(handshake, "_PATIENCE_S", PATIENCE_S if answers else 60.0)
    listener = Listener(silent, after_s)
    async with listener.session() as session:
        asking = handshake.check_answers(session, HostNames("test"), 20.0)
        if answers:
            await asking
            assert listener.asked == silent + 1
        else:
            with pytest.raises(TransferError, match="no mooncake engine answers"):
                await asking
            assert listener.asked == 1


@pytest.mark.parametrize(
    ("answer", "is_engine"),
    [
        (b"\3", True),
        (b"\3" + bytes(4095), True),
        (b"\3" + bytes(4096), False),
        (b"\2{}", False),
        (b"", False),
    ],
    ids=["of its kind alone", "long", "too long", "another", "empty"],
)
async def test_an_answer_is_short_and_of_its_kind(answer: bytes, is_engine: bool) -> None:
    async with Listener(0, 0.0, answer).session() as session:
        asking = handshake.check_answers(session, HostNames("test"), 20.0)
        if is_engine:
            await asking
        else:
            with pytest.raises(TransferError, match="speaks another language"):
                await asking


async def test_who_always_hangs_up_late_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_PATIENCE_S", 0.01)
    listener, began_s = Listener(1 << 30, 0.02), time.monotonic()
    async with listener.session() as session:
        with pytest.raises(TransferError, match=f"{session} within 2 s"):
            await handshake.check_answers(session, HostNames("test"), 2.0)
        await listener.closed()
    assert time.monotonic() - began_s >= 2.0 and listener.asked > 1
