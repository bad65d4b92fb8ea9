"""A real Mooncake Store: what the death and the silence of its master cost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvflow.serve.cache.storage import mooncake
from kvflow.serve.cache.storage.call import Call
from kvflow.serve.cache.storage.guarded import GuardedStorage, Limits
from kvflow.serve.cache.storage.mooncake import MooncakeBackend
from kvflow.serve.cache.storage.port import Result
from kvflow.serve.cache.storage.record import HEADER_BYTES
from kvflow.testing.freezing import freeze
from tests.ports import free_port
from tests.serve.cache.storage.files import IDENTITY, empty, ended, key, keys, value
from tests.serve.engine.pair import until

SIZE = 256 << 10
LENT_BYTES = 64 << 20
DONE, ABSENT, DAMAGED = Result.DONE, Result.ABSENT, Result.DAMAGED
PATIENT = Limits(slow_s=10, stall_s=10, pause_s=0.1, max_pause_s=0.4)
USUAL = msgspec.structs.replace(Limits(), pause_s=0.1, max_pause_s=0.4)
"""The waits that users have; asked again more often than they do."""

pytest.importorskip("mooncake")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


class Master:
    """A `mooncake_master` that can be killed, and started again at the same port."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = [free_port() for _ in range(2)]
        self.address = f"127.0.0.1:{self._ports[0]}"

    def start(self) -> None:
        rpc, metrics = self._ports
        options = [f"--rpc_port={rpc}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}"]
        options += ["--metrics_host=127.0.0.1", "--enable_metric_reporting=false"]
        program = Path(sys.executable).with_name("mooncake_master")
        with self._log.open("ab") as log:
            process = self._process = subprocess.Popen([program, *options], stdout=log, stderr=log)
        ends_s = time.monotonic() + 20
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", rpc), 1).close()
                return
            assert process.poll() is None, self._log.read_text()
            assert time.monotonic() < ends_s
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    made = Master(tmp_path / "master.log")
    yield made
    made.kill()


def backend(
    master: Master, *, identity: bytes = IDENTITY, lent_bytes: int = LENT_BYTES
) -> MooncakeBackend:
    return MooncakeBackend(master.address, identity, SIZE, lent_bytes=lent_bytes)


@asynccontextmanager
async def store(master: Master, limits: Limits) -> AsyncIterator[GuardedStorage]:
    made = await GuardedStorage.open(backend(master), limits)
    try:
        yield made
    finally:
        await made.close()


def values(*numbers: int) -> list[memoryview]:
    return [value(number, SIZE) for number in numbers]


def test_pages_come_back_whole_and_what_is_damaged_is_removed_and_heals(master: Master) -> None:
    master.start()
    store = backend(master)
    store.open()
    other = backend(master, identity=bytes(32), lent_bytes=0)
    other.open()
    numbers = range(40)  # more than a batch
    assert store.put(keys(*numbers), values(*numbers)) == [DONE] * 40
    assert store.put(keys(1), values(1)) == [DONE]
    assert store.exists(keys(3, 99, 4)) == [DONE, ABSENT, DONE]
    into = empty(41, SIZE)
    assert store.get(keys(*numbers, 99), into) == [*[DONE] * 40, ABSENT]
    assert into[:40] == values(*numbers)
    assert other.exists(keys(1)) == [ABSENT]
    assert other.get(keys(1), empty(1, SIZE)) == [ABSENT]

    garbage = np.random.default_rng(1).integers(0, 256, 2 * SIZE, dtype=np.uint8)
    for n, size in ((50, HEADER_BYTES + SIZE), (51, SIZE), (52, HEADER_BYTES + SIZE + 8)):
        name = f"{store._prefix}{key(n).hex()}"
        assert store._client.batch_put_from([name], [garbage.ctypes.data], [size]) == [0]
        assert store.put(keys(n), values(n)) == [DONE]  # the store believes to have it
        assert store.get(keys(n, 1), into[:2]) == [DAMAGED, DONE]
        assert into[1] == value(1, SIZE)
        assert store.exists(keys(n)) == [ABSENT]
        assert store.put(keys(n), values(n)) == [DONE]
        assert store.get(keys(n), into[:1]) == [DONE]
        assert into[0] == value(n, SIZE)

    copied = f"{other._prefix}{key(1).hex()}"  # a record of ours under a name of theirs
    record = np.zeros(HEADER_BYTES + SIZE, dtype=np.uint8)
    mine = f"{store._prefix}{key(1).hex()}"
    assert store._client.batch_get_into([mine], [record.ctypes.data], [record.nbytes]) == [
        record.nbytes
    ]
    assert other._client.batch_put_from([copied], [record.ctypes.data], [record.nbytes]) == [0]
    assert other.get(keys(1), empty(1, SIZE)) == [DAMAGED]
    other.close()
    store.close()


def test_a_full_store_takes_no_more_and_returns_nothing_wrong(master: Master) -> None:
    master.start()
    store = backend(master, lent_bytes=16 << 20)
    store.open()
    stored = [n for n in range(200) if store.put(keys(n), values(n)) == [DONE]]
    assert 16 <= len(stored) < 200
    into = empty(200, SIZE)
    results = store.get(keys(*range(200)), into)
    assert set(results) == {DONE, ABSENT}  # some of it has been evicted
    assert all(into[n] == value(n, SIZE) for n in range(200) if results[n] is DONE)
    store.probe_writes()
    store.close()


async def test_serving_goes_on_without_a_master_and_with_it_when_it_is_back(master: Master) -> None:
    master.start()
    calls: list[Call] = []

    async def read(pages: GuardedStorage, into: list[memoryview]) -> None:
        """As a request does: a lookup, and what it finds."""
        assert await pages.exists_prefix(keys(0, 1)) == 0
        calls.append(pages.get(keys(*range(8)), into))
        assert not any(await asyncio.shield(calls[-1].done))

    async def write(pages: GuardedStorage, number: int) -> None:
        calls.append(pages.put(keys(number), values(number)))
        assert await asyncio.shield(calls[-1].done) == [False]

    async with store(master, USUAL) as pages:
        assert await ended(pages.put(keys(*range(8)), values(*range(8)))) == [True] * 8
        for _ in range(2):
            master.kill()
            for n in range(30):  # each with buffers of its own: those of the others are held
                await asyncio.gather(read(pages, empty(8, SIZE)), write(pages, 100 + n))
            assert not pages.readable
            assert not pages.writable
            master.start()
            await until(lambda: pages.readable and pages.writable)
            into = empty(8, SIZE)
            assert not any(await ended(pages.get(keys(*range(8)), into)))  # it has lost everything
            async with asyncio.timeout(20):
                while not all(await ended(pages.put(keys(*range(8)), values(*range(8))))):
                    await asyncio.sleep(0.05)  # it has no room yet: this process lends it again
            assert await ended(pages.get(keys(*range(8)), into)) == [True] * 8
            assert into == values(*range(8))
        for call in calls:
            await ended(call)
        assert pages.counts.stalls <= 2 * 2, (
            "one read and one write of each time without a master may wait for it"
        )


async def test_a_frozen_master_keeps_buffers_and_nobody_waiting(master: Master) -> None:
    master.start()
    async with store(master, USUAL) as pages:
        assert await ended(pages.put(keys(1), values(1))) == [True]
        await freeze(master.pid)
        call = pages.get(keys(1), into := empty(1, SIZE))
        assert await asyncio.shield(call.done) == [False]
        assert await pages.exists_prefix(keys(1)) == 0
        assert not call.released.done()
        os.kill(master.pid, signal.SIGCONT)
        await ended(call)
        await until(lambda: pages.readable)
        assert await ended(pages.get(keys(1), into)) == [True]
        assert into == values(1)


async def test_a_master_that_comes_later_is_found(master: Master) -> None:
    async with store(master, PATIENT) as pages:
        for n in range(PATIENT.failures):
            assert await ended(pages.put(keys(n), values(n))) == [False]
            assert await pages.exists_prefix(keys(n)) == 0
        assert not pages.writable
        assert pages.counts.stalls == 0
        master.start()
        await until(lambda: pages.writable and pages.readable)
        assert await ended(pages.put(keys(1), values(1))) == [True]
        assert await pages.exists_prefix(keys(1)) == 1


def test_a_metadata_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "ASK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        store = MooncakeBackend(
            address, IDENTITY, SIZE, metadata_server="http://nowhere:1/metadata"
        )
        with pytest.raises(
            OSError, match=r"metadata server http://nowhere:1/metadata: a child .* within 0\.2 s$"
        ):
            store.probe_reads()
