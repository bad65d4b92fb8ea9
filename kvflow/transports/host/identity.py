"""Observe the death of another process of this host, so that it is known and not assumed (Linux pidfd).

A pid alone proves nothing: it may be re-used. A witness carries the process's start time too, and the boot and the pid
namespace in which the pid means something; outside of them a death can never be proven.
"""

from __future__ import annotations

import asyncio
import functools
import os
from types import TracebackType
from typing import Self

from kvflow.protocols.errors import TransferError
from kvflow.protocols.ports import Witness


@functools.cache
def _place() -> tuple[str, str]:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return boot_id, os.readlink("/proc/self/ns/pid")


def own_witness() -> Witness:
    """What others need to observe this process's death. Not cached: a forked child is another process."""
    boot_id, namespace = _place()
    pid = os.getpid()
    _, ticks = _stat(pid)
    return Witness(boot_id, namespace, pid, ticks)


def check_same_host(witness: Witness) -> None:
    """Raises: TransferError when `witness` belongs to another boot or pid namespace, where nothing can be observed."""
    if (witness.boot_id, witness.pid_namespace) != _place():
        raise TransferError(f"process {witness.pid} is on another host or in another pid namespace: cannot be observed")


def is_alive(witness: Witness) -> bool:
    """Whether that very process still runs; a zombie does not. Raises: TransferError (another host)."""
    check_same_host(witness)
    state, ticks = _stat(witness.pid)
    return ticks == witness.start_ticks and state not in b"ZXx"


class DeathWatch:
    """An open pidfd on one process. Close it, or use it as an `async with`; closing cancels `died`."""

    def __init__(self, witness: Witness) -> None:
        """Call on the event loop. Raises: TransferError when that process cannot be observed from here."""
        check_same_host(witness)
        self._loop = asyncio.get_running_loop()
        self.died: asyncio.Future[None] = self._loop.create_future()  # resolves when the process has ended
        self._fd = -1
        try:
            self._fd = os.pidfd_open(witness.pid)
        except ProcessLookupError:
            self.died.set_result(None)
            return
        except (OSError, OverflowError) as error:  # the pid came over the wire: it may be no pid at all
            raise TransferError(f"cannot observe process {witness.pid}: {error}") from error
        # Read after opening: if the start time still fits now, the descriptor can only be that process's.
        # A zombie counts as living: its other threads may still run, and only the pidfd knows when the last has ended.
        if _stat(witness.pid)[1] != witness.start_ticks:
            self._release()
            self.died.set_result(None)
            return
        self._loop.add_reader(self._fd, self._ended)

    @property
    def dead(self) -> bool:
        return self.died.done() and not self.died.cancelled()

    def close(self) -> None:
        """Idempotent."""
        self._release()
        self.died.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ended(self) -> None:
        self._release()
        if not self.died.done():
            self.died.set_result(None)

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)


def watch(witness: Witness) -> DeathWatch:
    """Begin to observe a process: `async with watch(w) as death: await asyncio.shield(death.died)`."""
    return DeathWatch(witness)


async def wait_dead(witness: Witness) -> None:
    """Return once that process has ended. Raises: TransferError when it cannot be observed from here."""
    async with watch(witness) as death:
        await asyncio.shield(death.died)


def _stat(pid: int) -> tuple[bytes, int]:
    """State and start time (fields 3 and 22 of /proc/pid/stat); -1 for the time when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return b"X", -1
    return fields[0], int(fields[19])
