"""Deaths are observed, never assumed."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import re
import shutil
import subprocess
import sys
from typing import BinaryIO, cast

import msgspec
import pytest

from kvflow.protocols.errors import TransferError
from kvflow.protocols.ports import ProcessIdentity
from kvflow.transports.host import identity
from kvflow.transports.host.identity import is_alive, is_seen_alive, own_identity, wait_dead, watch
from kvflow.transports.host.peer_process import PeerProcess

pytest_plugins = ["kvflow.testing.fixtures"]

SAY = (
    "import sys, msgspec; from kvflow.transports.host.identity import own_identity;"
    "print(msgspec.json.encode(own_identity()).decode(), flush=True); sys.stdin.read()"
)


async def child() -> tuple[asyncio.subprocess.Process, ProcessIdentity]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SAY, stdin=pipe, stdout=pipe
    )
    assert process.stdout is not None
    return process, msgspec.json.decode(await process.stdout.readline(), type=ProcessIdentity)


def sleeping() -> tuple[subprocess.Popen[bytes], ProcessIdentity]:
    process = subprocess.Popen(["sleep", "60"])
    _, ticks = identity._stat(process.pid)
    return process, msgspec.structs.replace(own_identity(), pid=process.pid, start_ticks=ticks)


@pytest.mark.usefixtures("kvflow_clean_loop")
async def test_a_death_is_seen_by_every_watcher() -> None:
    process, observed = await child()
    async with watch(observed) as first, watch(observed) as second, watch(observed) as given_up:
        given_up.died.cancel()  # by one that awaited it without a shield
        assert is_alive(observed)
        assert [first.dead, second.dead] == [False, False]
        process.kill()
        await asyncio.wait_for(
            asyncio.gather(asyncio.shield(first.died), asyncio.shield(second.died)), 20
        )
        assert [first.dead, second.dead, given_up.dead] == [True, True, False]
    await process.wait()
    assert not is_alive(observed)
    await asyncio.wait_for(wait_dead(observed), 20)


def test_a_zombie_is_dead() -> None:
    process, observed = sleeping()
    assert is_alive(observed)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still listed
    assert identity._stat(process.pid) == (b"Z", observed.start_ticks) and not is_alive(observed)
    process.wait()


def test_the_process_of_a_route_is_seen_to_end() -> None:
    process, observed = sleeping()
    elsewhere = PeerProcess(msgspec.structs.replace(observed, boot_id="another host's"))
    peer = PeerProcess(observed)
    assert [peer.is_gone, elsewhere.is_gone] == [False, False]
    peer.check()
    process.kill()
    process.wait()
    assert [peer.is_gone, elsewhere.is_gone] == [True, False], "another host's is not observed"
    with pytest.raises(TransferError, match="has ended"):
        peer.check()
    with pytest.raises(TransferError, match="has ended"):
        PeerProcess(observed)
    for each in (peer, elsewhere):
        each.close()
        each.close()
    assert [peer.is_gone, elsewhere.is_gone] == [False, False], "nobody looks any more"


async def test_a_reused_pid_is_a_death() -> None:
    stranger = msgspec.structs.replace(own_identity(), start_ticks=own_identity().start_ticks - 1)
    await asyncio.wait_for(wait_dead(stranger), 20)
    assert is_alive(own_identity()) and not is_alive(stranger)


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
async def test_elsewhere_nothing_can_be_observed(field: str) -> None:
    elsewhere = msgspec.structs.replace(own_identity(), **{field: "elsewhere"})
    with pytest.raises(TransferError, match="another host"):
        watch(elsewhere)
    with pytest.raises(TransferError, match="another host"):
        is_alive(elsewhere)
    assert not is_seen_alive(elsewhere) and is_seen_alive(own_identity())


async def test_a_process_that_proc_does_not_show_is_not_said_to_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with `hidepid`, for processes of another user."""
    observed = own_identity()
    gc.collect()  # what earlier tests have left behind may not be closed in between
    before = len(os.listdir("/proc/self/fd"))

    def hidden(path: str, *_: object, **__: object) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(identity, "open", hidden, raising=False)
    with pytest.raises(TransferError, match=r"does not show it to this user \(hidepid\)"):
        watch(observed)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_ends_while_it_is_looked_at_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, observed = sleeping()
    assert is_alive(observed)

    def opened(path: str, mode: str) -> BinaryIO:
        file = cast(BinaryIO, open(path, mode))  # noqa: SIM115 - the caller closes it
        process.kill()
        process.wait()  # it is gone before the file is read
        return file

    monkeypatch.setattr(identity, "open", opened, raising=False)
    assert not is_alive(observed) and process.returncode is not None


async def test_no_descriptor_is_left_behind() -> None:
    gc.collect()  # what earlier tests have left behind may not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    stranger = msgspec.structs.replace(own_identity(), start_ticks=0)
    for observed in (own_identity(), stranger):
        death = watch(observed)
        death.close()
        death.close()
    async with watch(own_identity()) as death:
        waiting = asyncio.ensure_future(wait_dead(own_identity()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert death.died.cancelled() and not death.dead
    assert len(os.listdir("/proc/self/fd")) == before


FIRST_DESCRIPTOR = """
import asyncio, os
from kvflow.transports.host.identity import own_identity, watch

async def main():
    os.close(0)  # as in a daemon that has no standard input
    death = watch(own_identity())
    print(os.readlink("/proc/self/fd/0"))
    death.close()
    print(os.path.lexists("/proc/self/fd/0"))

asyncio.run(main())
"""


def test_a_watch_gives_back_the_first_descriptor_too() -> None:
    told = subprocess.check_output(
        [sys.executable, "-c", FIRST_DESCRIPTOR], stdin=subprocess.DEVNULL, text=True
    )
    opened, is_left = told.split()
    assert "pidfd" in opened and is_left == "False"


PASSING = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES]
LASTING = [errno.EINVAL, errno.ENOSYS, errno.EPERM]


@pytest.mark.parametrize("code", [*PASSING, *LASTING], ids=errno.errorcode.get)
async def test_only_what_does_not_pass_ends_a_watch(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    # No TransferError where it passes: that would mean never.
    error, text = (
        (OSError, os.strerror(code)) if code in PASSING else (TransferError, "cannot observe")
    )
    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", fail)
        with pytest.raises(error, match=re.escape(text)):
            watch(own_identity())
    watch(own_identity()).close()


OUT_OF_DESCRIPTORS = """
import asyncio, msgspec, os, resource, subprocess, sys
from kvflow.protocols.errors import TransferError
from kvflow.protocols.ports import ProcessIdentity
from kvflow.transports.host import identity
from kvflow.transports.host.identity import wait_dead, watch

async def main():
    observed = msgspec.json.decode(sys.argv[1], type=ProcessIdentity)
    watch(observed).close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    spare = []
    try:
        while True:
            spare.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for free in range(3):  # none for the pidfd; one for it and none for /proc
        try:
            watch(observed).close()
        except TransferError:
            raise
        except OSError as error:
            print(error.errno, flush=True)
        os.close(spare.pop())
    waiting = asyncio.ensure_future(wait_dead(observed))
    await asyncio.sleep(0)
    print("watching", flush=True)
    await waiting
    print("dead", flush=True)

asyncio.run(main())
"""


async def test_a_death_is_seen_after_a_moment_without_descriptors() -> None:
    process, observed = await child()
    told = msgspec.json.encode(observed).decode()
    pipe = asyncio.subprocess.PIPE
    observer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OUT_OF_DESCRIPTORS, told, stdout=pipe
    )
    assert observer.stdout is not None
    lines = [(await observer.stdout.readline()).decode().strip() for _ in range(2)]
    assert lines[0] == str(errno.EMFILE)
    while lines[-1] == str(errno.EMFILE):
        lines.append((await observer.stdout.readline()).decode().strip())
    assert lines[-1] == "watching"
    process.kill()
    assert await asyncio.wait_for(observer.stdout.readline(), 10) == b"dead\n"
    await asyncio.gather(observer.wait(), process.wait())


async def test_a_living_process_of_another_time_namespace_is_not_dead() -> None:
    pipe = asyncio.subprocess.PIPE
    if shutil.which("unshare") is None or await _exit_status("unshare", "--time", "true"):
        pytest.skip("no right to make a time namespace")
    shifted = ("unshare", "--time", "--boottime", "100000", "--fork", "--kill-child")
    process = await asyncio.create_subprocess_exec(
        *shifted, sys.executable, "-c", SAY, stdin=pipe, stdout=pipe
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        observed = msgspec.json.decode(await process.stdout.readline(), type=ProcessIdentity)
        with pytest.raises(TransferError, match="time namespace"):
            await asyncio.wait_for(wait_dead(observed), 5)
        with pytest.raises(TransferError, match="time namespace"):
            is_alive(observed)
    finally:
        process.stdin.close()
        await process.wait()


async def _exit_status(*command: str) -> int:
    quiet = asyncio.subprocess.DEVNULL
    return await (await asyncio.create_subprocess_exec(*command, stderr=quiet)).wait()
