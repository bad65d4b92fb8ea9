"""Roles as processes (routers, the quickest): what they print, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvflow.memory.past_caches import copying_environment
from kvflow.protocols.errors import MisuseError
from kvflow.serve.config.settings import Settings
from kvflow.serve.config.sources import ConfigError
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.launch import supervisor
from kvflow.serve.launch.child import Child, ChildEndedError, end_process
from kvflow.serve.launch.supervisor import Fleet, run_up
from kvflow.testing.freezing import freeze
from tests.ports import free_neighbours

NOBODY = "http://127.0.0.1:1"
ROUTER = ["--port", "0", "--prefill", NOBODY, "--decode", NOBODY]
_ENDS_BEFORE_ITS_HELPER = """#!{python}
import os, sys
helper = os.fork()
if helper == 0:
    os.close(int(os.environ["KVFLOW_READY_FD"]))
    os.execvp("sleep", ["sleep", "60"])
sys.stderr.write("the last line\\n")
with open("{found}.new", "w") as file:
    file.write(str(helper))
os.rename("{found}.new", "{found}")
os._exit(3)
"""


async def test_a_second_signal_kills_what_does_not_end() -> None:
    fleet = Fleet(Settings(drain_timeout_s=3000), {}, quiet=True)
    fleet.router = Child("router", "router", ROUTER, quiet=True)
    await fleet.router.start(os.environ, 30)
    forced = asyncio.Event()
    await freeze(fleet.router.process.pid)
    stopping = asyncio.create_task(fleet.stop(forced))
    await asyncio.sleep(0)
    forced.set()
    async with asyncio.timeout(60):
        await stopping
    assert fleet.router.process.returncode == -signal.SIGKILL


async def test_a_line_longer_than_the_reader_holds_does_not_end_it() -> None:
    word = "x" * 100_000
    child = Child(
        "router", "router", ["--port", "0", "--decode", NOBODY, "--prefill", word], quiet=True
    )
    with pytest.raises(ChildEndedError) as caught:
        await child.start(os.environ, 30)
    assert caught.value.status == 2
    assert sum(map(len, child.last_lines)) > len(word)
    assert await child.stop(1) == 2


@contextlib.asynccontextmanager
async def ended_before_its_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Child, asyncio.Task[None]]]:
    """Yield a child that has ended, and the task that starts it.

    In the context, a process that it has started still has its stderr.
    """
    program, found = tmp_path / "program", tmp_path / "pid"
    program.write_text(_ENDS_BEFORE_ITS_HELPER.format(python=sys.executable, found=found))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    child = Child("router", "router", [], quiet=True)
    starting = asyncio.create_task(child.start(os.environ, 30))
    try:
        while not (found.exists() and child._process) or child.process.returncode is None:
            await asyncio.sleep(0.01)
        yield child, starting
    finally:
        os.kill(int(found.read_text()), signal.SIGKILL)


async def test_a_wait_that_is_cancelled_leaves_the_last_lines_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ended_before_its_helper(tmp_path, monkeypatch) as (child, starting):
        waiting = asyncio.create_task(child.wait_for_end())
        await asyncio.sleep(0)
        for wait in (starting, waiting):
            wait.cancel()
        await asyncio.wait([starting, waiting])
        assert starting.cancelled() and waiting.cancelled()
    assert await child.stop(5) == 3
    assert child.last_lines[-1] == "the last line"


async def test_a_process_that_has_ended_gets_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid may be another process's. asyncio may send to the pid until all pipes are closed."""
    sent: list[int] = []
    async with ended_before_its_helper(tmp_path, monkeypatch) as (child, starting):
        monkeypatch.setattr(child.process, "send_signal", sent.append)
        child.kill()
        assert await end_process(child.process, 5)
    with pytest.raises(ChildEndedError):
        await starting
    assert await child.stop(5) == 3 and not sent


async def test_a_role_that_cannot_be_started_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    opened = []
    pipe = os.pipe

    def noted() -> tuple[int, int]:
        opened.append(pipe())
        return opened[-1]

    monkeypatch.setattr(os, "pipe", noted)
    with pytest.raises(FileNotFoundError):
        await Child("router", "router", ROUTER, quiet=True).start(os.environ, 30)
    for descriptor in opened[0]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


async def test_what_the_user_can_mend_is_told_without_ceremony(
    capfd: pytest.CaptureFixture[str],
) -> None:
    child = Child("router", "router", ["--port", "0"], quiet=False)
    needed = (
        "at least one --prefill URL and one --decode URL, or an --admin-api-key, with which "
        "workers join it"
    )
    with pytest.raises(ChildEndedError, match=f"^router: router needs {needed}$"):
        await child.start(os.environ, 30)
    assert capfd.readouterr().err == ""


def test_a_setting_of_several_values_is_several_flags() -> None:
    origins = ["https://a.example", "*"]
    fleet = Fleet(Settings(), {"allowed_origins": tuple(origins)}, quiet=True)
    assert fleet._arguments("router") == [
        "--allowed-origins",
        origins[0],
        "--allowed-origins",
        origins[1],
    ]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_two_workers_have_one_port_when_all_of_them_are_prefills(role: str) -> None:
    """A decode that becomes a prefill by a switch has a registry, as its neighbour may have."""
    arguments = Fleet(Settings(), {}, quiet=True)._worker(role, 0)._arguments
    assert arguments[arguments.index("--disaggregation-bootstrap-port") + 1] == "0"


@pytest.mark.parametrize(
    ("first", "ports"), [(0, ["0", "0", "0", "0"]), (30000, ["30000", "30001", "30002", "30003"])]
)
def test_the_workers_ports_follow_each_other_prefills_first(first: int, ports: list[str]) -> None:
    fleet = Fleet(Settings(worker_ports=first, prefill_workers=2, decode_workers=2), {})
    workers = [fleet._worker(role, index) for role in ("prefill", "decode") for index in (0, 1)]
    given = [worker._arguments for worker in workers]
    assert [arguments[arguments.index("--port") + 1] for arguments in given] == ports


async def test_a_workers_port_in_use_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "Fleet", None)
    first, port = free_neighbours()
    with socket.socket() as used:
        used.bind(("127.0.0.1", port))
        settings = Settings(worker_ports=first, prefill_workers=1, decode_workers=1)
        said = f"port {port} on 127.0.0.1 is in use; choose another one with --worker-ports"
        with pytest.raises(MisuseError, match=said):
            await run_up(settings, {}, None)


def test_workers_divide_the_memory_of_their_machine() -> None:
    settings = Settings(mem_fraction=0.8, prefill_workers=1, decode_workers=3)
    fleet = Fleet(settings, {"mem_fraction": "0.8"}, quiet=True)
    for role in ("prefill", "decode"):
        arguments = fleet._worker(role, 0)._arguments
        assert arguments.count("--mem-fraction") == 1
        assert arguments[arguments.index("--mem-fraction") + 1] == "0.2"
    assert "--mem-fraction" not in Fleet(Settings(), {}, quiet=True)._worker("decode", 0)._arguments


@pytest.mark.parametrize(("told", "tp", "passed"), [(0, 1, "1"), (0, 4, "4"), (2, 4, None)])
def test_a_decode_is_told_the_width_of_its_prefill(told: int, tp: int, passed: str | None) -> None:
    fleet = Fleet(Settings(disaggregation_prefill_tp=told, tp=tp), {}, quiet=True)
    arguments = fleet._worker("decode", 0)._arguments
    flag = "--disaggregation-prefill-tp"
    assert (arguments[arguments.index(flag) + 1] if flag in arguments else None) == passed
    assert flag not in fleet._worker("prefill", 0)._arguments


@pytest.mark.parametrize(
    ("given", "prefill", "decode"),
    [
        ({}, [], []),
        ({"tp": 2}, ["--tp", "2"], ["--tp", "1"]),
        ({"decode_tp": 2}, [], ["--tp", "2"]),
        ({"tp": 4, "pp": 2, "decode_tp": 2}, ["--tp", "4", "--pp", "2"], ["--tp", "2"]),
    ],
)
def test_each_role_has_its_own_shards(
    given: dict[str, Any], prefill: list[str], decode: list[str]
) -> None:
    """Also where the environment, which the roles read, has --tp of `up`."""
    fleet = Fleet(Settings(model_path="m", **given), {"model_path": "m", **given}, quiet=True)
    assert fleet._arguments("prefill") == ["--model-path", "m", *prefill]
    found = fleet._arguments("decode")
    assert sorted(found) == sorted(["--model-path", "m", *decode])


@pytest.mark.parametrize("own", ["", "mine"])
async def test_the_packaged_model_keeps_the_name_it_is_given(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the environment or the file too: what `kvflow up` passes on as a flag wins over both."""
    names = []

    def noted(_: Settings, given: Mapping[str, Any], config: str | None) -> Fleet:
        names.append(given["served_model_name"])
        raise ConfigError("not started")

    monkeypatch.setattr(supervisor, "Fleet", noted)
    with pytest.raises(ConfigError):
        await run_up(Settings(served_model_name=own), {"served_model_name": None}, None)
    assert names == [own or "kvflow-demo"]


def test_the_copying_role_stores_large_blocks_past_the_caches() -> None:
    ours = "glibc.cpu.x86_non_temporal_threshold=0x80000"
    assert copying_environment({"A": "b"}) == {"A": "b", "GLIBC_TUNABLES": ours}
    also = copying_environment({"GLIBC_TUNABLES": "glibc.malloc.check=3"})
    assert also["GLIBC_TUNABLES"] == f"glibc.malloc.check=3:{ours}"
    theirs = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x4000000"}
    assert copying_environment(theirs) == theirs


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_gets_it_before_it_starts(role: str) -> None:
    """Read from the process itself: glibc reads it before any line of Python runs."""
    child = Child(role, role, ["--port", "0", "--model-path", str(DEMO_MODEL_DIR)], quiet=True)
    starting = asyncio.create_task(child.start(os.environ, 30))
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(RuntimeError, OSError):
                    found = Path(f"/proc/{child.process.pid}/environ").read_bytes().split(b"\0")
                    if b"GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x80000" in found:
                        break
                await asyncio.sleep(0.01)
    finally:
        child.kill()
        await asyncio.wait([starting])
        await child.stop(5)
        starting.exception()
