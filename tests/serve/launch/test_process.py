"""A role as a process: ports, announcement, drain, signals, and its end with its parent's."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvflow.http.draining import Drainable
from kvflow.http.listening import bound_socket, listening_on, reachable, url_of
from kvflow.protocols.errors import MisuseError
from kvflow.serve.launch.process import StopSignals, drain_requests

# A role without a model: a router's life with a handler that takes until it is told.
ROLE = """
import asyncio, os, sys
from aiohttp import web
from kvflow.serve.launch.process import *
from kvflow.http.listening import *

class Requests(Drainable):
    def end_requests(self):
        pass

async def main(settings):
    made = bound_socket("127.0.0.1", 0, "--port")
    busy = Requests()
    async def work(http):
        with busy.count_running():
            await asyncio.sleep(float(http.query["s"]))
            return web.Response(text="done")
    async def health(http):
        return web.Response(status=503 if busy.draining else 200, text=str(busy.running))
    app = web.Application()
    app.add_routes([web.get("/work", work), web.get("/health", health)])
    ready = Ready("role", url_of(made, "127.0.0.1"), os.getpid())
    await serve_until_stopped(app, made, busy, ready, float(sys.argv[1]))

from kvflow.serve.config.settings import Settings
run_role("prefill", main, Settings())
"""


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def start_role(drain_s: float) -> tuple[asyncio.subprocess.Process, str]:
    reading, writing = os.pipe()
    environment = {**os.environ, "KVFLOW_READY_FD": str(writing)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        ROLE,
        str(drain_s),
        pass_fds=(writing,),
        env=environment,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        line = await asyncio.to_thread(pipe.readline)
    return process, str(msgspec.json.decode(line)["url"])


async def has_begun(session: aiohttp.ClientSession, url: str) -> None:
    running = ""
    while running != "1":
        async with session.get(f"{url}/health") as answer:
            assert answer.status == 200
            running = await answer.text()


@pytest.mark.parametrize("is_abstract", [True, False])
async def test_systemd_learns_when_a_role_serves_and_when_it_drains(
    is_abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of sd_notify(3): datagrams to a socket, whose abstract name begins with @."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        # An empty name makes the kernel choose an abstract one.
        manager.bind("" if is_abstract else str(tmp_path / "notify"))
        manager.settimeout(20)
        name = manager.getsockname()
        address = f"@{name[1:].decode()}" if is_abstract else name
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        process, _ = await start_role(5.0)
        assert await asyncio.to_thread(manager.recv, 100) == b"READY=1"
        process.terminate()
        assert await asyncio.to_thread(manager.recv, 100) == b"STOPPING=1"
        assert await process.wait() == 0


async def test_a_role_serves_also_where_systemd_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nowhere"))
    process, _ = await start_role(5.0)
    process.terminate()
    assert await process.wait() == 0


@pytest.mark.parametrize("hangs", [True, False])
def test_a_thread_that_hangs_does_not_hold_up_the_end_nor_abort_it(hangs: bool) -> None:
    role = f"""
import asyncio, atexit, threading, sys
from kvflow.aio import Threads
from kvflow.serve.config.settings import Settings
from kvflow.serve.launch import process
never = threading.Event()
async def main(settings):
    atexit.register(lambda: print("taken apart"))
    try:
        await Threads("test", 1).run(never.wait if {hangs} else int, within_s=0.1)
    except TimeoutError:
        pass
    print("over")
process.run_role("prefill", main, Settings())
"""
    ended = subprocess.run(
        [sys.executable, "-c", role], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == (["over"] if hangs else ["over", "taken", "apart"])
    assert ("not waiting for threads that hang: kvflow-test" in ended.stderr) is hangs


def test_a_taken_port_is_one_line_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MisuseError, match=rf"port {port} on 127\.0\.0\.1 is in use.*--port"):
            bound_socket("127.0.0.1", port, "--port")


async def test_a_port_somebody_else_listened_on_first_is_one_line_too() -> None:
    first = bound_socket("127.0.0.1", 0, "--port")
    port = first.getsockname()[1]
    second = bound_socket("127.0.0.1", port, "--port")
    async with listening_on(web.Application(), first):
        with pytest.raises(MisuseError, match=f"port {port} .* is in use"):
            async with listening_on(web.Application(), second):
                pass


def test_an_address_that_is_not_ours_is_one_line() -> None:
    with pytest.raises(MisuseError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bound_socket("192.0.2.1", 0, "--port")


class Busy(Drainable):
    """One request, which ends by itself when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()
        self._request = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        with self.count_running():
            await self.told.wait()

    def end_requests(self) -> None:
        self.told.set()

    async def begun(self) -> Self:
        await asyncio.sleep(0)
        assert self.running == 1
        return self


async def test_a_drain_waits_for_the_requests_that_run() -> None:
    busy = await Busy().begun()
    waiting = asyncio.create_task(drain_requests(busy, StopSignals(), 60))
    await asyncio.sleep(0)
    assert busy.draining
    assert not waiting.done()
    busy.told.set()
    await asyncio.wait_for(waiting, 20)


async def test_requests_that_do_not_finish_in_time_are_ended_and_have_their_say() -> None:
    busy = await Busy().begun()
    await asyncio.wait_for(drain_requests(busy, StopSignals(), 0.01), 20)
    assert busy.told.is_set() and not busy.running


async def test_a_second_signal_does_not_wait() -> None:
    busy = await Busy().begun()
    stop = StopSignals()
    stop.forced.set()
    await asyncio.wait_for(drain_requests(busy, stop, 60), 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_with_status_0(
    number: signal.Signals, session: aiohttp.ClientSession
) -> None:
    process, url = await start_role(30)
    work = asyncio.create_task(session.get(f"{url}/work?s=3"))
    async with asyncio.timeout(60):
        await has_begun(session, url)
        process.send_signal(number)
        status = 200
        while status == 200:
            async with session.get(f"{url}/health") as answer:
                status = answer.status
        assert status == 503
        async with await work as answer:
            assert await answer.text() == "done"
        assert await process.wait() == 0


async def test_what_does_not_finish_in_time_is_ended(session: aiohttp.ClientSession) -> None:
    process, url = await start_role(0.1)
    work = asyncio.create_task(session.get(f"{url}/work?s=600"))
    async with asyncio.timeout(60):
        await has_begun(session, url)
        process.terminate()
        with pytest.raises(aiohttp.ClientError):
            await work
        assert await process.wait() == 0


def test_a_child_dies_with_its_parent_however_that_dies() -> None:
    child = (
        "import time\n"
        "from kvflow.serve.launch.process import die_with_parent\n"
        "die_with_parent()\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "env = {**os.environ, 'KVFLOW_PARENT_PID': str(os.getpid())}\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], env=env, "
        "stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        descriptor = os.pidfd_open(pid)
        process.kill()
        readable, _, _ = select.select([descriptor], [], [], 10)
        os.close(descriptor)
        assert readable


@pytest.mark.parametrize("end", ["block", "_exit", "SIGKILL"])
def test_the_meeting_directory_of_a_model_goes_with_its_process(end: str, tmp_path: Path) -> None:
    code = (
        "import os, pathlib\n"
        "from kvflow.serve.launch.meeting import meeting_directory\n"
        "with meeting_directory() as found:\n"
        "    pathlib.Path(found, 'agreement').touch()\n"
        "    print(found, oct(os.stat(found).st_mode & 0o777), flush=True)\n"
        "    how = input()\n"
        "    os._exit(1) if how == '_exit' else None\n"
        "print('left', *os.listdir(os.path.dirname(found)))\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        found, mode = process.stdout.readline().split()
        assert (Path(found).parent, mode, os.listdir(found)) == (tmp_path, "0o700", ["agreement"])
        if end == "SIGKILL":
            process.kill()
        else:
            process.stdin.write(f"{end}\n")
            process.stdin.flush()
        assert process.stdout.read() == ("left\n" if end == "block" else "")
    until_s = time.monotonic() + 10
    while os.listdir(tmp_path) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert os.listdir(tmp_path) == []


def test_every_interface_is_told_as_an_address_peers_can_use() -> None:
    assert reachable("10.1.2.3") == "10.1.2.3"
    assert ipaddress.ip_address(reachable("0.0.0.0")) != ipaddress.ip_address("0.0.0.0")
    assert [ipaddress.ip_address(reachable(host)).version for host in ("0.0.0.0", "::")] == [4, 6]


def test_without_a_route_to_anywhere_peers_of_this_machine_get_its_own_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cut(socket.socket):
        def connect(self, address: Any) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Cut)
    assert [reachable(host) for host in ("0.0.0.0", "::")] == ["127.0.0.1", "::1"]


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("10.1.2.3", "10.1.2.3"),
        ("fd00::1", "[fd00::1]"),
        ("host", "host"),
    ],
)
def test_a_url_of_every_interface_is_one_that_this_machine_reaches(host: str, shown: str) -> None:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        assert url_of(made, host) == f"http://{shown}:{made.getsockname()[1]}"
