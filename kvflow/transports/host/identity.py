"""Observe the death of another process of this host, so that it is known and not assumed (Linux
pidfd).

A pid alone proves nothing: it may be re-used. An identity carries the process's start time too, the
boot and the pid namespace in which the pid means something, and the time namespace in which the
start time does (elsewhere the kernel shifts it); outside of them a death can never be proven.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import select
from types import TracebackType
from typing import Self

from kvflow.protocols.errors import TransferError
from kvflow.protocols.ports import ProcessIdentity

# What will not change by waiting; anything else (no descriptors, no memory) is raised as it is, to
# be tried again.
_NEVER = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM})


def own_identity() -> ProcessIdentity:
    """What others need to observe this process's death.

    Not cached: a forked child is another process, and may be in another namespace."""
    pid = os.getpid()
    _, ticks = _stat(pid)
    return ProcessIdentity(
        _boot_id(), _namespace("pid"), pid, ticks, _namespace("time"), _namespace("net")
    )


def check_same_host(identity: ProcessIdentity) -> None:
    """Raises: TransferError when `identity` belongs to another boot, or to a pid or time namespace
    other than ours.
    """
    if (identity.boot_id, identity.pid_namespace) != (_boot_id(), _namespace("pid")):
        raise TransferError(
            f"process {identity.pid} is on another host or in another pid namespace: cannot be "
            "observed"
        )
    if identity.time_namespace != (ours := _namespace("time")):
        raise TransferError(
            f"process {identity.pid} is in time namespace {identity.time_namespace!r:.80}, this "
            f"one in {ours!r}: its start time cannot be compared, so it cannot be observed; run "
            "both in one time namespace"
        )


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether that very process still runs; a zombie does not.

    Raises: TransferError (another host).
    """
    check_same_host(identity)
    state, ticks = _stat(identity.pid)
    return ticks == identity.start_ticks and state not in b"ZXx"


def is_seen_alive(identity: ProcessIdentity) -> bool:
    """Whether that very process is seen to run; False also where it could not be seen."""
    try:
        return is_alive(identity)
    except TransferError:
        return False


class DeathWatch:
    """An open pidfd on one process.

    Close it, or use it as an `async with`; closing cancels `died`.
    """

    def __init__(self, identity: ProcessIdentity) -> None:
        """Call on the event loop.

        Raises: TransferError when that process can never be observed from here; OSError when it
        cannot be just now.
        """
        self._loop = asyncio.get_running_loop()
        self._fd = open_process(identity)
        # Resolves when the process has ended.
        self.died: asyncio.Future[None] = self._loop.create_future()
        if self._fd < 0:
            self.died.set_result(None)
            return
        try:
            self._loop.add_reader(self._fd, self._ended)
        except OSError:
            os.close(self._fd)
            raise

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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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


def watch(identity: ProcessIdentity) -> DeathWatch:
    """Begin to observe a process.

    `async with watch(w) as death: await asyncio.shield(death.died)`
    """
    return DeathWatch(identity)


async def wait_dead(identity: ProcessIdentity) -> None:
    """Return once that process has ended. Raises: as DeathWatch."""
    async with watch(identity) as death:
        await asyncio.shield(death.died)


def has_ended(pidfd: int) -> bool:
    """Whether the process of an open pidfd has ended, all of its threads included."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def open_process(identity: ProcessIdentity) -> int:
    """A pidfd of exactly that process; -1 when it has ended. Raises: as DeathWatch."""
    check_same_host(identity)  # elsewhere its pid means another process, or none
    try:
        fd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return -1
    except OverflowError as error:  # the pid came over the wire: it may be no pid at all
        raise TransferError(f"cannot observe process {identity.pid}: {error}") from error
    except OSError as error:
        if error.errno not in _NEVER:
            raise
        raise TransferError(f"cannot observe process {identity.pid}: {error}") from error
    try:
        # Read after opening: if the start time still fits now, the descriptor can only be that
        # process's. A zombie counts as living: its other threads may still run, and only the pidfd
        # knows when the last has ended.
        _, ticks = _stat(identity.pid)
        if ticks == identity.start_ticks:
            return fd
        if ticks < 0 and not has_ended(fd):
            raise TransferError(
                f"cannot observe process {identity.pid}: /proc does not show it to this user "
                "(hidepid); run both processes as one user"
            )
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return -1


@functools.cache
def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _namespace(kind: str) -> str:
    """Which namespace this process is in; empty on a kernel that has none of that kind."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except FileNotFoundError:
        return ""


def _stat(pid: int) -> tuple[bytes, int]:
    """State and start time (fields 3 and 22 of /proc/pid/stat); -1 for the time when there is no
    such process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return b"X", -1
    return fields[0], int(fields[19])
