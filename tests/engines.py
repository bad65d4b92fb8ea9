"""Servers of other engines as processes that a test starts, freezes, kills, and ends by their ids,
and what all tests of such servers need.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from tests.ports import free_port

START_S = 300.0
STOP_S = 20.0
_WAIT_S = 30.0
Prompt = list[int]
T = TypeVar("T")


class EngineServer:
    """One server, which writes what it prints to `log` and answers at `url`."""

    def __init__(self, role: str, name: str, logs: Path) -> None:
        """The log is named like the server. A subclass sets its command and its environment."""
        self.role, self.name, self.log = role, name, logs / f"{name}.log"
        self.port, self.bootstrap_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command: list[str] = []
        self._environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self.family: list[psutil.Process] = []  # it and all that it had started when it was up

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} has not been started"
        return self._process

    def wait_up(self, deadline_s: float) -> None:
        """Return when it serves. Raises: AssertionError with the end of its log."""
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    self.family = self.find_family()
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert self.process.poll() is None, (
                    f"{self.name} ended with {self.process.returncode}:\n{self.tail()}"
                )
                assert time.monotonic() < deadline_s, f"{self.name} does not serve:\n{self.tail()}"
                time.sleep(0.2)

    def wait_end(self, timeout_s: float = START_S) -> int:
        """Of one that cannot start. Returns its exit status."""
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def find_family(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def start_all(servers: Iterable[EngineServer]) -> None:
    """Return when all serve. Raises: AssertionError with the end of a log."""
    servers, deadline_s = list(servers), time.monotonic() + START_S
    for server in servers:
        server.start()
    for server in servers:
        server.wait_up(deadline_s)


def stop_all(servers: Iterable[EngineServer]) -> None:
    """SIGTERM, and SIGKILL for those of their processes that are left after a while."""
    servers = [server for server in servers if server._process is not None]
    family = {each for server in servers for each in (*server.family, *server.find_family())}
    for each in family:
        _signal(each, signal.SIGCONT)  # a frozen one ends as well
    for server in servers:
        if server.process.poll() is None:
            server.process.terminate()
    gone = time.monotonic() + STOP_S
    for server in servers:
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(max(0.1, gone - time.monotonic()))
    _, alive = psutil.wait_procs(list(family), timeout=max(0.1, gone - time.monotonic()))
    for each in alive:
        _signal(each, signal.SIGKILL)
    for server in servers:
        server.process.wait()


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)  # psutil looks first whether the id is another process's by now


def random_prompt(rng: random.Random, length: int) -> Prompt:
    return [rng.randrange(3, 4000) for _ in range(length)]


async def at_once(count: int, jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Results of all jobs in their order, so many of them at a time."""
    gate = asyncio.Semaphore(count)

    async def gated(job: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await job()

    return list(await asyncio.gather(*map(gated, jobs)))


async def eventually(
    what: Callable[[], Awaitable[bool]], why: str, timeout_s: float = _WAIT_S
) -> None:
    """Ask until it is so. Raises: AssertionError."""
    ends_at = time.monotonic() + timeout_s
    while not await what():
        assert time.monotonic() < ends_at, f"{why}: not within {timeout_s:g} s"
        await asyncio.sleep(0.1)
