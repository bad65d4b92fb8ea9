"""One role as a child process of the supervisor: its start, announcement, log lines and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvflow.memory.past_caches import copying_environment
from kvflow.protocols.errors import KvflowError
from kvflow.serve.launch.logs import LogFormat, relayed
from kvflow.serve.launch.process import NOTIFY_SOCKET, PARENT_PID, READY_FD, Ready

KEPT_LINES = 40
_ERROR_MARK = ": error: "  # `cli.main` writes this before an error
_log = logging.getLogger("kvflow.up")


class ChildEndedError(KvflowError):
    """The unexpected end of a role. `status` is its exit status, negative for a signal."""

    def __init__(self, name: str, status: int, last_line: str = "") -> None:
        how = f"{name} {_how(status)}"
        # Another process sent the signal, so the role's last line does not explain its end.
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            last_line = ""
        # After a usage error, the user needs only the child's message.
        if status == 2:
            how, last_line = name, last_line.partition(_ERROR_MARK)[2] or last_line
        super().__init__(f"{how}: {last_line}" if last_line else how)
        self.status = status


def _how(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


class Child:
    """One role as a process. `url` and `bootstrap_port` are set when it is ready."""

    def __init__(
        self,
        name: str,
        role: str,
        arguments: list[str],
        *,
        quiet: bool,
        log_format: LogFormat = "text",
        descriptors: tuple[int, ...] = (),
    ) -> None:
        """Describe a process. It inherits `descriptors` under the same numbers."""
        self.name, self.role = name, role
        self.url = ""
        self.bootstrap_port: int | None = None
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._arguments, self._quiet, self._log_format = arguments, quiet, log_format
        self._descriptors = descriptors
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process

    async def start(self, environment: Mapping[str, str], timeout_s: float) -> None:
        """Start the process, and return when it serves. Raises: ChildEndedError, TimeoutError."""
        reading, writing = os.pipe()
        try:
            self._process = await start_role(
                self.role,
                self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(writing, *self._descriptors),
                env=self._environment(environment)
                | {READY_FD: str(writing), PARENT_PID: str(os.getpid())},
                # Ctrl-C must reach only the supervisor, which then ends the roles in order.
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            # If the parent kept its copy open, the pipe would not close when the child ends.
            os.close(writing)
        self._reading = asyncio.create_task(self._read_stderr())
        async with asyncio.timeout(timeout_s):
            line = await _line_from(reading)
        if not line:
            raise await self._ended()
        ready = msgspec.json.decode(line, type=Ready)
        self.url, self.bootstrap_port = ready.url, ready.bootstrap_port

    def _environment(self, ours: Mapping[str, str]) -> dict[str, str]:
        made = dict(ours if self.role == "router" else copying_environment(ours))
        # systemd waits for this process, not for one of its roles.
        made.pop(NOTIFY_SOCKET, None)
        return made

    async def wait_for_end(self) -> ChildEndedError:
        """Wait until the process ends. Return how it ended."""
        await self.process.wait()
        return await self._ended()

    async def stop(self, timeout_s: float) -> int:
        """Send SIGTERM, and SIGKILL after `timeout_s`. Return the exit status."""
        if self._process is None:
            return 0
        if not await end_process(self.process, timeout_s):
            _log.warning("%s did not end within %g s of SIGTERM: killed", self.name, timeout_s)
        await all_read(self._reading)
        return self.process.returncode or 0

    def kill(self) -> None:
        """Send SIGKILL, so that a waiting `stop` returns."""
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)

    async def _ended(self) -> ChildEndedError:
        status = await self.process.wait()
        await all_read(self._reading)
        return ChildEndedError(self.name, status, self.last_lines[-1] if self.last_lines else "")

    async def _read_stderr(self) -> None:
        stream = self.process.stderr
        while stream is not None and (line := await _line_of(stream)):
            text = line.decode(errors="replace").rstrip("\n")
            if text:
                self.last_lines.append(text)
            # The supervisor includes this line in its own error, so it is not relayed.
            if not self._quiet and not text.startswith(f"kvflow {self.role}{_ERROR_MARK}"):
                if self._log_format == "json":
                    shown = relayed(text, self.role, self.name)
                else:
                    shown = f"[{self.name}] {text}"
                sys.stderr.write(f"{shown}\n")
                sys.stderr.flush()


async def start_role(role: str, arguments: Iterable[str], **how: Any) -> asyncio.subprocess.Process:
    """Start `kvflow ROLE` as a process. `how` is passed to `create_subprocess_exec`."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "kvflow.cli", role, *arguments, **how
    )


async def end_process(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Send SIGTERM, and SIGKILL after `timeout_s`. Return False if SIGKILL was necessary."""
    send_signal(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        send_signal(process, signal.SIGKILL)
        await process.wait()
        return False
    return True


def send_signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal, unless the process ended: its pid may be another process's by now."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


async def all_read(reading: asyncio.Task[None] | None) -> None:
    """Wait until stderr is read to its end. Cancelling this call does not cancel `reading`."""
    if reading is not None:
        await asyncio.wait([reading])


async def _line_of(stream: asyncio.StreamReader) -> bytes:
    """Return the next line, a piece of it if it exceeds the buffer, or b"" at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)


async def _line_from(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        return await reader.readline()
    finally:
        transport.close()


async def start_together(
    children: Iterable[tuple[Child, Mapping[str, str]]], timeout_s: float
) -> None:
    """Start children, each with its environment. If one fails, stop waiting for the others."""
    starts = [
        asyncio.create_task(child.start(environment, timeout_s)) for child, environment in children
    ]
    try:
        await asyncio.gather(*starts)
    finally:
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)


async def first_end(children: Iterable[Child]) -> ChildEndedError:
    """Wait until any of the children ends. Return how it ended."""
    waits = [asyncio.create_task(child.wait_for_end()) for child in children]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
