"""Freezing of a process, for tests in which a peer stands still.

SIGSTOP is asynchronous: `kill` returns at once, and on a busy machine a thread of the process may
run on for milliseconds, long enough to answer the test's next message.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

POLL_S = 0.001
STOPPED = {"T", "t"}


async def freeze(pid: int, *, within_s: float = 20.0) -> None:
    """Stop process `pid`, and return when every thread of it stands still.

    `os.kill(pid, signal.SIGCONT)` thaws it.

    Raises: ProcessLookupError if there is no such process, AssertionError if a thread is not
    stopped after `within_s`.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(within_s):
            while not is_frozen(pid):  # noqa: ASYNC110 - what is observed is another process
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(
            f"process {pid} is not stopped {within_s} s after SIGSTOP: {thread_states(pid)}"
        ) from None


def is_frozen(pid: int) -> bool:
    """Return True when every thread of the process is stopped.

    A thread may start while the states of others are read. After one of them stops no thread
    starts, so a second look that finds the same threads covers all of them.
    """
    states = thread_states(pid)
    return (
        bool(states)
        and STOPPED.issuperset(states.values())
        and thread_states(pid).keys() == states.keys()
    )


def thread_states(pid: int) -> dict[str, str]:
    """Return the state letter of every thread by its id (source: proc_pid_stat(5)).

    Empty when the process is gone.
    """
    states = {}
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            # The name before the state stands in brackets and may itself hold brackets and blanks.
            stat = Path(f"/proc/{pid}/task/{task}/stat").read_text()
            states[task] = stat.rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        # A thread ended meanwhile: the caller looks again.
        return {}
    return states
