"""A frozen process has no thread left that runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvflow.testing.freezing import freeze, is_frozen, thread_states

THREADS = 8
# Reading a file releases the GIL, so that several threads really run; short ones come and go beside
# them.
BUSY = f"""
import threading

def spin() -> None:
    while True:
        with open("/dev/zero", "rb", buffering=0) as zeros:
            zeros.read(1 << 16)

for _ in range({THREADS}):
    threading.Thread(target=spin, daemon=True).start()
print("running", flush=True)
while True:
    passing = threading.Thread(target=int)
    passing.start()
    passing.join()
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        yield process
        process.kill()


async def test_no_thread_of_a_frozen_process_runs(busy: subprocess.Popen[str]) -> None:
    for _ in range(20):
        await freeze(busy.pid)
        states = thread_states(busy.pid)
        assert len(states) > THREADS and set(states.values()) == {"T"}
        os.kill(busy.pid, signal.SIGCONT)
        async with asyncio.timeout(20):
            while is_frozen(busy.pid):
                await asyncio.sleep(0.001)


async def test_a_process_that_does_not_stop_is_an_error(busy: subprocess.Popen[str]) -> None:
    busy.kill()
    # Ended, and not yet collected: no signal reaches it.
    os.waitid(os.P_PID, busy.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(
        AssertionError, match=f"process {busy.pid} is not stopped 0.2 s after SIGSTOP: .*'Z'"
    ):
        await freeze(busy.pid, within_s=0.2)


async def test_a_process_that_is_gone_is_an_error(busy: subprocess.Popen[str]) -> None:
    busy.kill()
    busy.wait()
    with pytest.raises(ProcessLookupError):
        await freeze(busy.pid)
