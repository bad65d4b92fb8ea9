"""Roles for tests, forked from a process that has imported what they import.

A role imports torch and transformers for four to five seconds of CPU, and the tests start hundreds
of them. `python -m tests.forked_roles DESCRIPTOR` imports once and forks for each request; what
runs from there on is `python -m kvflow.cli`, with the arguments, the environment and the
descriptors that `Child` would have given it. A forked role forks the other ranks of its worker in
the same way. Roles whose environment is not the tests' own are started as ever, and so is all that
starts from a command (test_cli_parity.py, test_killed.py, tests/test_printed.py).

PYTEST_PLANTED in its environment names a module that a forked role imports first: a bug.

The kernel kills a role when the process ends that started it. For a forked one that is this
process, so this one does so when the connection of the request closes.

The peers of the conformance suite are forked in the same way, from a process without torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from kvflow.memory.past_caches import copying_environment
from kvflow.serve.launch import child
from kvflow.serve.launch.process import PARENT_PID, die_with_parent
from kvflow.testing.conformance import peer

ROOT = Path(__file__).parents[1]
CLI = "kvflow.cli"
# All that a role imports until it is ready, but for the engines of planes other than `local`: they
# read their environment when they are imported.
PRELOADED = (
    "kvflow.serve.launch.roles",
    "kvflow.serve.launch.router",
    "kvflow.serve.launch.group",
    "kvflow.serve.launch.shards",
    "kvflow.serve.engine.model.load",
    "kvflow.serve.engine.scheduler.decode",
    "kvflow.transports.data.local",
    "kvflow.usage",
    "pydantic.type_adapter",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
    "uvloop",
)
# A peer imports the engine of its plane itself, because that reads the environment.
PRELOADED_FOR_PEERS = ("kvflow.testing.conformance", "kvflow.transports.data.local")
_HEAD = 8  # bytes with the size of a request
_MOST_DESCRIPTORS = 16
# Variables that no import in the nursery reads. torch sets its own in a process of tests, and so
# does the engine of a plane, which a forked role imports only after it has its environment.
_OWN = ("KVFLOW_", "PYTEST_", "TORCHINDUCTOR_", "MC_", "UCX_", "NIXL_")


class Nursery:
    """The process that forks, started for the first role."""

    def __init__(self, path: str = "", preloaded: Sequence[str] = PRELOADED) -> None:
        """`path` is the address of one that runs."""
        self._environment = copying_environment(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._path, self._preloaded = path, preloaded

    def may_fork(self, role: str, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return whether a forked role is what a started one would be."""
        return (
            role in ("prefill", "decode", "prefill-rank", "decode-rank", "router")
            and "--threads" not in arguments
            # A router has no need of this environment, and is not changed by it.
            and self.has_environment(copying_environment(environment))
        )

    def has_environment(self, environment: Mapping[str, str]) -> bool:
        """Return whether the variables that an import may read are those of the nursery."""
        return _of_others(environment) == _of_others(self._environment)

    def connect(self) -> socket.socket:
        """Return a connection for one role."""
        if not self._path:
            self._start()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        return connection

    def _start(self) -> None:
        self._path = f"\0kvflow-tests-{os.getpid()}-{id(self)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._path)
            listener.listen(64)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.forked_roles", str(listener.fileno())),
                    *self._preloaded,
                ],
                cwd=ROOT,
                pass_fds=[listener.fileno()],
                env={**self._environment, PARENT_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _of_others(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_OWN)}


class ForkedRole:
    """What `Child` and the tests use of a process."""

    def __init__(
        self,
        pid: int,
        stderr: asyncio.StreamReader,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid, self.stderr = pid, stderr
        self.returncode: int | None = None
        self._reader, self._writer = reader, writer
        self._ended = asyncio.create_task(self._wait_for_status())

    async def _wait_for_status(self) -> None:
        try:
            line = await self._reader.readline()
            self.returncode = int(line) if line else -signal.SIGKILL
        finally:
            self._writer.close()

    async def wait(self) -> int:
        # A cancellation ends only this wait: others may wait too.
        await asyncio.wait([self._ended])
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        # The nursery reaps the process before it sends the status. On a busy machine the status may
        # be late, and the process is gone already.
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _PipeProtocol(asyncio.StreamReaderProtocol):
    """Closes the pipe when the role has closed its end."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


async def fork_role(
    nursery: Nursery, role: str, arguments: Sequence[str], **how: Any
) -> asyncio.subprocess.Process:
    """Fork a role, with what `Child` asks of its process. Return when it runs."""
    reading, writing = os.pipe()
    try:
        descriptors = {1: how["stdout"].fileno(), 2: writing} | {n: n for n in how["pass_fds"]}
        connection = _ask(nursery, [CLI, role, *arguments], how["env"], descriptors)
    finally:
        os.close(writing)
    reader, writer = await asyncio.open_connection(sock=connection)
    stderr = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: _PipeProtocol(stderr), os.fdopen(reading, "rb", buffering=0)
    )
    pid = int(await reader.readline())
    return cast("asyncio.subprocess.Process", ForkedRole(pid, stderr, reader, writer))


def _ask(
    nursery: Nursery, words: list[str], environment: Mapping[str, str], descriptors: dict[int, int]
) -> socket.socket:
    """Send a request for `python -m WORDS` with these descriptors, by the numbers that they get."""
    request = json.dumps([words, dict(environment), list(descriptors)]).encode()
    connection = nursery.connect()
    given = list(descriptors.values())
    socket.send_fds(connection, [len(request).to_bytes(_HEAD, "big")], given)
    connection.sendall(request)
    return connection


def run_cli(
    nursery: Nursery, *arguments: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `kvflow ARGUMENTS` in a forked process, to its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        words, descriptors = [CLI, *arguments], {1: out.fileno(), 2: errors.fileno()}
        connection = _ask(nursery, words, environment, descriptors)
        with connection, connection.makefile() as replies:
            _, status = replies
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, int(status), out.read(), errors.read())


class ForkedPeer(ForkedRole):
    """A peer of the conformance suite, with its standard input and output."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    _transport: asyncio.WriteTransport


async def fork_peer(nursery: Nursery, arguments: Sequence[str]) -> asyncio.subprocess.Process:
    ours, theirs = socket.socketpair()
    with theirs:
        numbers = dict.fromkeys((0, 1), theirs.fileno())
        connection = _ask(nursery, [peer.PROCESS, *arguments], peer.environment(), numbers)
    reader, writer = await asyncio.open_connection(sock=connection)
    pid = int(await reader.readline())
    made = ForkedPeer(pid, asyncio.StreamReader(), reader, writer)
    made.stdout, made.stdin = await asyncio.open_connection(sock=ours, limit=peer.LINE_LIMIT)
    made._transport = made.stdin.transport
    return cast("asyncio.subprocess.Process", made)


@contextlib.contextmanager
def forking_peers(nursery: Nursery) -> Iterator[None]:
    """Fork the peers that this process starts meanwhile, where that makes no difference to them."""
    start = peer._start

    async def fork(arguments: Sequence[str], prefix: Sequence[str]) -> asyncio.subprocess.Process:
        if prefix or not nursery.has_environment(os.environ):
            return await start(arguments, prefix)
        return await fork_peer(nursery, arguments)

    peer._start = fork
    try:
        yield
    finally:
        peer._start = start


@contextlib.contextmanager
def forking(nursery: Nursery) -> Iterator[None]:
    """Fork the roles that this process starts meanwhile, where that makes no difference to them."""
    start = child.start_role
    _fork_all(nursery)
    try:
        yield
    finally:
        child.start_role = start


def _fork_all(nursery: Nursery) -> None:
    start = child.start_role

    async def fork(role: str, arguments: Iterable[str], **how: Any) -> asyncio.subprocess.Process:
        given = list(arguments)
        if nursery.may_fork(role, given, how["env"]):
            return await fork_role(nursery, role, given, **how)
        assert "PYTEST_PLANTED" not in how["env"], "only a forked role imports a planted bug"
        return await start(role, given, **how)

    child.start_role = fork


# --- in the nursery


class _Forking:
    """Forks, and reports how the forked processes ended, until the tests end."""

    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener
        self._connections: dict[int, tuple[int, socket.socket]] = {}  # by a process's descriptor

    def next_role(self) -> list[str]:
        """Serve requests. Return in each forked process, with the words of its command."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    if (words := self._fork()) is not None:
                        return words
                elif isinstance(key.fileobj, socket.socket):
                    # Nothing follows a request, so whoever sent it has ended.
                    self._selector.unregister(key.fileobj)
                    signal.pidfd_send_signal(key.data, signal.SIGKILL)
                else:
                    self._report(cast("int", key.fileobj))

    def _fork(self) -> list[str] | None:
        connection, _ = self._listener.accept()
        head, descriptors, _, _ = socket.recv_fds(connection, _HEAD, _MOST_DESCRIPTORS)
        size = int.from_bytes(head, "big")
        received = b""
        while len(received) < size:
            received += connection.recv(size - len(received))
        words: list[str]
        words, environment, numbers = json.loads(received)
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            connection.close()
            self._become(descriptors, numbers)
            os.environ.clear()
            os.environ.update({**environment, PARENT_PID: str(nursery)})
            return words
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(b"%d\n" % pid)
        ended = os.pidfd_open(pid)
        self._connections[ended] = (pid, connection)
        self._selector.register(ended, selectors.EVENT_READ)
        self._selector.register(connection, selectors.EVENT_READ, ended)
        return None

    def _become(self, descriptors: list[int], numbers: list[int]) -> None:
        """Keep these descriptors, under these numbers, and none of the nursery's."""
        self._selector.close()
        self._listener.close()
        for ended, (_, connection) in self._connections.items():
            os.close(ended)
            connection.close()
        os.setsid()
        # A number that is wanted may be that of another one which was received.
        apart = [_moved_up(descriptor, max(numbers)) for descriptor in descriptors]
        for descriptor, number in zip(apart, numbers, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)

    def _report(self, ended: int) -> None:
        pid, connection = self._connections.pop(ended)
        self._selector.unregister(ended)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        with connection, contextlib.suppress(OSError):  # the test has ended
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _moved_up(descriptor: int, past: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, past + 1)
    finally:
        os.close(descriptor)


def main() -> NoReturn:
    die_with_parent()
    # As with -P, which a role is started with.
    sys.path.pop(0)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    listener = socket.socket(fileno=int(sys.argv[1]))
    path = listener.getsockname().decode()
    module, *words = _Forking(listener).next_role()
    if module == CLI:
        _fork_all(Nursery(path))
    else:
        sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.argv = [module, *words]
    if planted := os.environ.get("PYTEST_PLANTED"):
        importlib.import_module(planted)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main()
