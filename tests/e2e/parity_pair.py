"""The driver of two parity workers: what a test holds.

Everything waits with a deadline; whatever breaks is killed.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvflow.serve.launch.process import PARENT_PID

ROOT = Path(__file__).parents[2]
REPLY_S = 60.0
CHUNKS = {"chunk_tokens": 40, "max_batch_tokens": 64}


class WorkerError(Exception):
    """What a worker said went wrong."""


class Worker:
    """One role as a process that answers JSON lines with JSON lines."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._unread = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.parity_worker", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=ROOT,
            bufsize=0,
            env={**os.environ, PARENT_PID: str(os.getpid())},  # whoever kills us kills it
        )

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        line = memoryview(json.dumps({"do": do, **arguments}).encode() + b"\n")
        try:
            while line:
                line = line[self.process.stdin.write(line) :]
        except BrokenPipeError:
            raise AssertionError(f"{self.role} has ended:\n{self.last_words()}") from None

    def reply(self) -> dict[str, Any]:
        """Raises: WorkerError for what the worker could not do; AssertionError when it says nothing
        at all.
        """
        assert self.process.stdout is not None
        descriptor, until = self.process.stdout.fileno(), time.monotonic() + REPLY_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            read = os.read(descriptor, 1 << 20) if ready else b""
            if not read:
                raise AssertionError(
                    f"{self.role} said nothing in {REPLY_S:g} s, or ended:\n{self.last_words()}"
                )
            self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise WorkerError(found["error"])
        return found

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.reply()

    def last_words(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-4000:].decode(errors="replace")

    def kill(self) -> None:
        """By its process id, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._stderr):
            assert stream is not None
            stream.close()


class Model:
    """One model that both workers have loaded."""

    def __init__(
        self,
        prefill: Worker,
        decode: Worker,
        page_size: int,
        page_bytes: int,
        row_bytes: int,
        rooms: Iterator[int],
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.page_size, self.page_bytes, self.row_bytes = page_size, page_bytes, row_bytes
        self.bytes_sent = 0
        self._rooms = rooms

    def places_for(self, prompt: list[int]) -> int:
        """Pages, and a row where the model keeps states."""
        return -(-len(prompt) // self.page_size) + bool(self.row_bytes)

    def run(
        self,
        prompts: list[list[int]],
        params: dict[str, Any],
        *,
        lockstep: bool = False,
        retract: bool = False,
        zero: tuple[int, str] | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """All prompts at once through both processes: what prefill and what decode saw.

        Checks that pages came home.
        """
        requests = [
            {"room": next(self._rooms), "prompt": p, "params": params, "zero": zero}
            for p in prompts
        ]
        for prompt in prompts:
            self.bytes_sent += -(-len(prompt) // self.page_size) * self.page_bytes + self.row_bytes
        for worker in (self.prefill, self.decode):
            worker.tell("serve", requests=requests, lockstep=lockstep, retract=retract)
        decode, prefill = self.decode.reply(), self.prefill.reply()
        assert (prefill["at_rest"], decode["at_rest"]) == (True, True), (
            "pages are still away after the last token"
        )
        return prefill, decode

    def single(self, prompts: list[list[int]], params: dict[str, Any]) -> dict[str, Any]:
        """The same prompts in lockstep through one process."""
        requests = [{"room": 0, "prompt": prompt, "params": params} for prompt in prompts]
        found = self.decode.ask("single", requests=requests, lockstep=True)
        assert found["at_rest"]
        return found

    def close(self) -> None:
        """End both nodes: no page missing, nothing failed on the way, and every byte came through
        rooms.
        """
        # Prefill first: its answer to the last heartbeat of a decode that has just gone cannot be
        # delivered.
        for left in (self.prefill.ask("close"), self.decode.ask("close")):
            assert left["at_rest"] and not left["owned"], left
            assert not left["troubles"], left
            assert set(left["endings"]) <= {"success"}, left
            assert left["bytes_moved"] == self.bytes_sent, left


class ProcessPair:
    """A prefill and a decode process for many models, one after the other; new ones where the last
    ones broke.
    """

    def __init__(self) -> None:
        self._workers: tuple[Worker, ...] = ()
        self._rooms = itertools.count()  # room 0 is legal

    @property
    def workers(self) -> tuple[Worker, ...]:
        if not self._workers:
            self._workers = (Worker("prefill"), Worker("decode"))
        return self._workers

    @contextmanager
    def open(
        self,
        path: Path,
        *,
        page_size: int = 16,
        dtype: str = "float32",
        plane: str = "local",
        orders: tuple[str, str] = ("page_first", "page_first"),
        sliding_window_rows: str = "auto",
        **chunks: int,
    ) -> Iterator[Model]:
        """A model on both sides.

        Closes it with all of its checks; whoever fails inside costs the two processes.
        """
        prefill, decode = self.workers
        shape = {
            "path": str(path),
            "dtype": dtype,
            "page_size": page_size,
            "plane": plane,
            "chunks": CHUNKS | chunks,
        }
        shape["sliding_window_rows"] = sliding_window_rows
        try:
            prefill.tell("load", order=orders[0], ranks=[], **shape)
            ready = prefill.reply()
            there = decode.ask("load", order=orders[1], ranks=ready["ranks"], **shape)
            assert ready["pid"] != there["pid"]
            model = Model(
                prefill, decode, page_size, ready["page_bytes"], ready["row_bytes"], self._rooms
            )
            yield model
            model.close()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = ()
