"""Two network, process and mount namespaces as two machines, with a bad line between them.

Nothing has a name that could be left behind: a namespace lives as long as its first process, which
ends with its standard input, and so with the test, however that ends; everything that runs in it is
killed by the kernel then.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from pathlib import Path

import aiohttp

from kvflow.bench.pair import Process
from tests.chaos.relay import DEVICE, socket_in_network_of

ADDRESSES = ("10.197.0.1", "10.197.0.2")
LOSS, DELAY_S = 0.05, 0.02  # of every packet, each way
_NEW = ("unshare", "--net", "--pid", "--fork", "--mount-proc")


@cache
def unavailable_reason() -> str:
    """Why there cannot be two machines here; empty where there can."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if not shutil.which(tool)]:
        return f"no {', '.join(missing)} on this machine"
    if os.geteuid():
        return "only root may make network namespaces and interfaces"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    making = [*_NEW, "ip", "tuntap", "add", DEVICE, "mode", "tun"]
    tried = subprocess.run(making, capture_output=True, text=True, check=False)
    return f"no interface in a new namespace: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    """One of the two. `pid`: its first process, as seen from outside."""

    def __init__(self, pid: int, address: str) -> None:
        self.pid, self.address = pid, address

    def command(self, *argv: str) -> tuple[str, ...]:
        """`argv` as it has to be called to run there, in the working directory of the caller."""
        return (
            "nsenter",
            f"--target={self.pid}",
            "--net",
            "--pid",
            "--mount",
            f"--wd={os.getcwd()}",
            "--",
            *argv,
        )

    def connector(self) -> aiohttp.TCPConnector:
        """For a client that is on this machine."""
        return aiohttp.TCPConnector(
            socket_factory=lambda info: socket_in_network_of(self.pid, *info[:3])
        )

    @staticmethod
    def inner(pid: int) -> int:
        """The process that a running `command` of process `pid` has started,
        as seen from outside.
        """
        (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(found)

    async def run(self, *argv: str) -> None:
        """Raises: RuntimeError with what the command said."""
        process = await asyncio.create_subprocess_exec(
            *self.command(*argv), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {said.decode().strip()}")


class Line:
    """What connects the two."""

    def __init__(self, relay: Process) -> None:
        self._relay = relay
        self.counts = partial(relay.ask, "counts")

    async def set(self, loss: float = LOSS, delay_s: float = DELAY_S) -> None:
        await self._relay.ask("set", loss=loss, delay_s=delay_s)

    async def cut(self) -> None:
        """Nothing passes; `set` ends it."""
        await self.set(loss=1.0)


@asynccontextmanager
async def two_machines(seed: int) -> AsyncIterator[tuple[Machine, Machine, Line]]:
    """With a line of `LOSS` and `DELAY_S`.

    Raises: RuntimeError where that cannot be; see `unavailable_reason`.
    """
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(_machine(address)) for address in ADDRESSES
        ]
        relay = await Process.spawn(sys.executable, "-m", "tests.chaos.relay", name="relay")
        stack.push_async_callback(relay.close)
        await relay.ask("join", pids=[first.pid, second.pid], seed=seed)
        for machine, other in ((first, second), (second, first)):
            await machine.run("ip", "link", "set", "lo", "up")
            await machine.run(
                "ip", "address", "add", machine.address, "peer", other.address, "dev", DEVICE
            )
            await machine.run("ip", "link", "set", DEVICE, "up")
        line = Line(relay)
        await line.set()
        yield first, second, line


@asynccontextmanager
async def _machine(address: str) -> AsyncIterator[Machine]:
    # It says so when it is there, and then waits for the end of its input.
    holder = await asyncio.create_subprocess_exec(
        *_NEW,
        "sh",
        "-c",
        "echo here; exec cat",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        if await holder.stdout.readline() != b"here\n":
            raise RuntimeError(f"no namespaces: unshare ended with status {await holder.wait()}")
        yield Machine(Machine.inner(holder.pid), address)
    finally:
        holder.stdin.close()
        await holder.wait()


async def _stay(seed: int) -> None:
    """For the test of what is left: two machines with something that runs on each, until we are
    killed.
    """
    async with two_machines(seed) as (first, second, _):
        inside = [
            await asyncio.create_subprocess_exec(*machine.command("sleep", "600"))
            for machine in (first, second)
        ]
        sys.stdout.write(
            " ".join(str(pid) for pid in (first.pid, second.pid, *(one.pid for one in inside)))
            + "\n"
        )
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_stay(int(sys.argv[1])))
