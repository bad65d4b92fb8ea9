"""Parts of a benchmark's child process: its commands, its CPU time, and its loop's stalls."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from typing import Any, Protocol

import numpy as np

TICK_S = 0.001


def rss_kib() -> float:
    """Return the resident memory of this process, in KiB."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 1024


def cpu_s() -> float:
    """Return the CPU seconds used by all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class StallTicker:
    """A 1 ms ticker, which separates stalls of its event loop from other lateness.

    A tick is also late if the machine ran another process in the meantime. So the ticker reads the
    CPU time that the loop's thread took between two ticks: a stall is the smaller of lateness and
    CPU time.
    """

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.stall_s: list[float] = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        due, cpu_before_s = time.perf_counter() + TICK_S, time.thread_time()
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            now, cpu_now_s = time.perf_counter(), time.thread_time()
            self.late_s.append(now - due)
            self.stall_s.append(min(max(0.0, now - due), cpu_now_s - cpu_before_s))
            # The ticker skips the ticks that a stall made it miss, so one stall counts once.
            due, cpu_before_s = max(due + TICK_S, now), cpu_now_s

    def stop(self) -> float:
        """Stop, and return the 99th percentile of the lateness, in ms."""
        self._task.cancel()
        return float(np.percentile(self.late_s, 99) * 1e3) if self.late_s else 0.0

    def stalls(self) -> dict[str, float]:
        """Stop, and return percentiles of stalls and of all lateness, in ms."""
        self._task.cancel()
        found: dict[str, float] = {}
        for name, seconds in (("stall", self.stall_s), ("late", self.late_s)):
            for place, percent in (("p99", 99), ("max", 100)):
                at_s = float(np.percentile(seconds or [0.0], percent))
                found[f"{name}_{place}_ms"] = round(at_s * 1e3, 3)
        return found


class Commands(Protocol):
    """An object whose coroutine methods are the commands of a child."""

    async def close(self) -> None: ...


async def serve(commands: Commands) -> None:
    """Run the method that each command names, and write its reply, until `quit` or end of file."""
    loop = asyncio.get_running_loop()
    # A command with prompts may be far longer than the reader's default limit of 64 KiB.
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        name = command.pop("do")
        if name == "quit":
            break
        reply: dict[str, Any]
        try:
            reply = await getattr(commands, name)(**command)
        # The driver receives the error and decides what to do, so this process must survive it.
        except Exception as error:  # noqa: BLE001
            reply = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
    await commands.close()
