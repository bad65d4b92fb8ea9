"""Observation of other processes on this host. With a pidfd, a death is known, not assumed.

A pid alone does not identify a process, because the kernel re-uses pids. An identity therefore also
carries the process's start time, and the boot and the pid namespace in which the pid is valid. It
carries the time namespace too, because the kernel shifts start times between time namespaces. The
death of a process outside this boot and these namespaces can never be proven.
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

# A retry would fail with these errors again. Other errors are raised unchanged, so that the caller
# can retry.
_NEVER = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM})


def own_identity() -> ProcessIdentity:
    """Return what other processes need to observe this process's death.

    The result is not cached: a forked child is another process, and may be in another namespace.
    """
    pid = os.getpid()
    _, ticks = _stat(pid)
    return ProcessIdentity(
        _boot_id(), _namespace("pid"), pid, ticks, _namespace("time"), _namespace("net")
    )


def check_same_host(identity: ProcessIdentity) -> None:
    """Check that `identity` is from this boot and from our pid and time namespaces.

    Raises: TransferError.
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
    """Return True while exactly this process runs; a zombie counts as ended.

    Raises: TransferError when it is on another host or in another namespace.
    """
    check_same_host(identity)
    state, ticks = _stat(identity.pid)
    return ticks == identity.start_ticks and state not in b"ZXx"


def is_seen_alive(identity: ProcessIdentity) -> bool:
    """Return True if this process is known to run; False if it has ended or cannot be observed."""
    try:
        return is_alive(identity)
    except TransferError:
        return False


class DeathWatch:
    """An open pidfd on one process.

    Close it, or use it in an `async with`; closing cancels `died`.
    """

    def __init__(self, identity: ProcessIdentity) -> None:
        """Open the pidfd; call this on the event loop.

        Raises: TransferError when the process can never be observed from here; OSError when it
        cannot be observed right now.
        """
        self._loop = asyncio.get_running_loop()
        self._fd = open_process(identity)
        # Resolves when the process ends.
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
        """Stop watching. Idempotent."""
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
    """Watch a process: `async with watch(w) as death: await asyncio.shield(death.died)`."""
    return DeathWatch(identity)


async def wait_dead(identity: ProcessIdentity) -> None:
    """Wait until the process ends; return at once if it already ended. Raises: see `DeathWatch`."""
    async with watch(identity) as death:
        await asyncio.shield(death.died)


def has_ended(pidfd: int) -> bool:
    """Return True when the process of an open pidfd has ended, with all of its threads."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def open_process(identity: ProcessIdentity) -> int:
    """Return a pidfd of exactly this process; -1 if it is gone. Raises: see `DeathWatch`."""
    # The pid of a process on another host, or in another namespace, means nothing to our kernel.
    check_same_host(identity)
    try:
        fd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return -1
    except OverflowError as error:
        # The pid was received over the wire, and may be out of range.
        raise TransferError(f"cannot observe process {identity.pid}: {error}") from error
    except OSError as error:
        if error.errno not in _NEVER:
            raise
        raise TransferError(f"cannot observe process {identity.pid}: {error}") from error
    try:
        # The start time is read after the pidfd is open. If it matches, the descriptor belongs to
        # this process and not to a later one with its pid. A zombie counts as living: its other
        # threads may still run, and only the pidfd shows when the last one ends.
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
    """Return the name of this process's namespace of one kind; empty if the kernel lacks it."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except FileNotFoundError:
        return ""


def _stat(pid: int) -> tuple[bytes, int]:
    """Return the state and the start time of a process (fields 3 and 22 of /proc/pid/stat).

    The time is -1 when there is no such process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return b"X", -1
    return fields[0], int(fields[19])
