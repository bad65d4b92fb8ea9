"""The `mooncake_master` of `kvflow up --l3 mooncake`: one process on the loopback for one fleet.

It ends with the fleet, even after kill -9. If it ends early, it is started again on the same port,
where the workers find it. The stored pages are lost then, but the workers continue to serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
import time
from collections import deque
from pathlib import Path

from kvflow.protocols.errors import MisuseError
from kvflow.serve.launch.child import KEPT_LINES, ChildEndedError, all_read, end_process

NAME = "mooncake_master"
START_TIMEOUT_S, STOP_TIMEOUT_S = 20.0, 5.0
# Number of tries to start the master. Another process may take the chosen port before it does.
TRIES = 3
# Pause before a new start. It doubles each time, until a process has run for `LIVED_S`.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
LIVED_S = 60.0
# The kernel kills the process when the supervisor's main thread, which started it, ends. This
# setting survives an exec. If the parent ended before the call, no signal comes, so the process
# checks its parent.
_EXEC = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_log = logging.getLogger("kvflow.up")


def find_program() -> str | None:
    """Return the path of `mooncake_master`, next to this Python or on the PATH, or None."""
    beside = Path(sys.executable).with_name(NAME)
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(NAME)


class MooncakeMaster:
    """The `mooncake_master` process. `start` sets `address`, which then stays the same."""

    def __init__(self) -> None:
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._program = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process. Return when it accepts connections.

        Raises: MisuseError if it is not installed; ChildEndedError, TimeoutError.
        """
        if (program := find_program()) is None:
            raise MisuseError(f"--l3 mooncake: there is no {NAME}: pip install 'kvflow[mooncake]'")
        self._program = program
        for left in reversed(range(TRIES)):
            ports = _free_port(), _free_port()
            try:
                await self._launch(ports)
            except ChildEndedError:
                if not left:
                    raise
                continue
            self.address = f"127.0.0.1:{ports[0]}"
            self._watching = asyncio.create_task(self._keep(ports), name="kvflow-mooncake-master")
            return

    async def stop(self) -> None:
        """End the process, and do not start it again. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._end()

    async def _end(self) -> None:
        if self._process is not None:
            await end_process(self._process, STOP_TIMEOUT_S)
            await all_read(self._reading)

    async def _keep(self, ports: tuple[int, int]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            assert self._process is not None
            began_s = time.monotonic()
            error: Exception = await self._ended(await self._process.wait())
            if time.monotonic() - began_s > LIVED_S:
                pause_s = FIRST_PAUSE_S
            _log.warning(
                "%s; what was stored is gone, and it is started again in %g s", error, pause_s
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            try:
                await self._launch(ports)
                _log.warning("%s runs again at %s", NAME, self.address)
            except (ChildEndedError, TimeoutError, OSError) as again:
                _log.warning("%s does not start: %s", NAME, again)

    async def _launch(self, ports: tuple[int, int]) -> None:
        options = [
            f"--rpc_port={ports[0]}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={ports[1]}",
            "--metrics_host=127.0.0.1",
            "--enable_metric_reporting=false",
            "--logtostderr",
            "--minloglevel=1",
        ]
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-c",
            _EXEC,
            str(os.getpid()),
            self._program,
            *options,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # Ctrl-C must reach only the supervisor, which ends this process last.
            start_new_session=True,
        )
        assert process.stderr is not None
        self._reading = asyncio.create_task(self._read(process.stderr))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while process.returncode is None:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", ports[0])
                        writer.close()
                        return
                    await asyncio.sleep(0.02)
        except BaseException:
            await self._end()
            raise
        raise await self._ended(process.returncode)

    async def _ended(self, status: int) -> ChildEndedError:
        await all_read(self._reading)
        return ChildEndedError(NAME, status, self._lines[-1] if self._lines else "")

    async def _read(self, stream: asyncio.StreamReader) -> None:
        self._lines.clear()
        while data := await stream.read(1 << 16):
            self._lines.extend(
                line for line in data.decode(errors="replace").splitlines() if line.strip()
            )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
