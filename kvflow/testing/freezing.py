"""Freezes a process, for tests of a peer that hangs.

SIGSTOP is asynchronous: `kill` returns at once. On a busy machine, a thread of the process may
still run for milliseconds, long enough to answer the test's next message.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

POLL_S = 0.001
STOPPED = {"T", "t"}


async def freeze(pid: int, *, within_s: float = 20.0) -> None:
    """Stop process `pid`, and return when all its threads are stopped.

    `os.kill(pid, signal.SIGCONT)` continues it.

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
    """Return True if every thread of the process is stopped.

    A running thread may start another one while the states are read. So the threads are listed a
    second time. If every thread was stopped and the list has not changed, no thread is running.
    """
    states = thread_states(pid)
    return (
        bool(states)
        and STOPPED.issuperset(states.values())
        and thread_states(pid).keys() == states.keys()
    )


def thread_states(pid: int) -> dict[str, str]:
    """Return the state letter of each thread (proc_pid_stat(5)); empty if the process is gone."""
    states = {}
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            # The thread's name precedes the state, in parentheses. A name may contain parentheses.
            stat = Path(f"/proc/{pid}/task/{task}/stat").read_text()
            states[task] = stat.rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        # A thread ended while the loop ran. The empty result makes the caller try again.
        return {}
    return states
