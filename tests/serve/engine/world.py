"""Processes that each run a part of a model on the same requests."""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LostError
from kvflow.protocols.pages.kinds import StateKind
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.paged_cache import memory_of
from kvflow.serve.engine.model.parallel.part import Meeting, ModelPart
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row

PROMPTS = [[(i * i * 7 + i * 13 + n * 5 + 3) % 251 + 3 for i in range(n)] for n in (53, 21)]
NEW, PAGE_SIZE, CHUNK = 12, 4, 16
TIMEOUT_S = 30.0

Tell = Callable[[list[int] | None], list[int]]
"""Takes the tokens that were chosen here, None without logits; returns what was chosen anywhere."""


class Ran(NamedTuple):
    """The tokens of each prompt, their logits by step, and the pool's contents in the end."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]
    kept: dict[str, torch.Tensor]
    streams: list[StateKind]
    mode: str
    fingerprint: str
    parameters: int
    weights: int


def run(model: LoadedModel, tell: Tell | None = None, pool: PagedPool | None = None) -> Ran:
    """Compute both prompts in chunks, then decode them in one batch, greedy."""
    count = sum(-(-(len(p) + NEW) // PAGE_SIZE) for p in PROMPTS)
    num_rows = len(PROMPTS) if model.has_rows else 0
    given = pool
    pool = given or PagedPool.allocate(
        build_layout(model.streams, page_size=PAGE_SIZE, num_pages=count, num_rows=num_rows),
        device=model.device,
    )
    runner = model.runner(pool)
    order = (
        torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(torch.int32).numpy()
    )
    sequences = [Sequence(i, p, NEW, PAGE_SIZE) for i, p in enumerate(PROMPTS)]
    for i, s in enumerate(sequences):
        s.add_pages(order[: s.pages_missing(s.tokens.size)])
        order = order[s.page_count :]
        s.rows = np.array([i] if num_rows else [], dtype=np.int32)
    logits = []
    try:
        while running := [s for s in sequences if s.length < s.tokens.size]:
            counts = [model.chunk(s.length - s.computed, CHUNK) for s in running]
            rows = [
                Row(s, n, int(n == s.length - s.computed))
                for s, n in zip(running, counts, strict=True)
            ]
            found = runner.forward(rows)
            if found.shape[0]:
                logits.append(found.float().cpu())
            for row in rows:
                row.sequence.computed += row.new
            chosen = found.argmax(-1).tolist() if found.shape[0] else None
            asked = [row.sequence for row in rows if row.logits]
            if asked:
                for s, token in zip(asked, (tell(chosen) if tell else chosen) or [], strict=True):
                    s.append(token)
        kept = {kind.name: memory_of(kind, pool).clone().cpu() for kind in model.streams}
    finally:
        if given is None:
            pool.close()
    weights = sum(local(p).untyped_storage().nbytes() for p in model.model.parameters())
    tokens = [s.tokens[s.prompt_length :].tolist() for s in sequences]
    parameters = sum(local(p).numel() for p in model.model.parameters())
    return Ran(
        tokens, logits, kept, model.streams, model.mode, model.fingerprint, parameters, weights
    )


def local(parameter: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return found


class Job(NamedTuple):
    """`killed`: the process dies after so many tokens, or with 0 while it loads.

    `idle`: True for the one shard that begins no step until the others are aborted.
    """

    path: str
    part: ModelPart
    meeting: Meeting
    options: dict[str, Any]
    killed: int | None
    idle: bool | None


class World:
    """`size` processes, which run one job after another. A killed one is started again."""

    def __init__(self, size: int, directory: Path) -> None:
        # Each job has a folder of its own: torch's store writes there until the model is collected.
        self._meetings = (directory / str(n) for n in itertools.count())
        started = [_start() for _ in range(size)]
        self.processes, self.jobs, self.aborts = (
            list(column) for column in zip(*started, strict=True)
        )

    def run(self, path: Path, stages: int, shards: int, **options: Any) -> list[Ran]:
        """Run a model's prompts on stages x shards of the processes; return the results by rank."""
        found = self.outcomes(path, stages, shards, **options)
        if failed := [outcome for outcome in found if not isinstance(outcome, Ran)]:
            raise AssertionError("\n".join(map(str, failed)))
        return found

    def outcomes(self, path: Path, stages: int, shards: int, **options: Any) -> list[Any]:
        """Return what `_outcomes` does, and run the job once more if glibc aborted a process.

        About once in a thousand groups of shards, a thread of gloo (torch 2.13) finds its heap
        damaged in the first collective. The cause is not found; a role starts such a rank again,
        too.
        """
        found = self._outcomes(path, stages, shards, **options)
        if self._was_aborted(found):
            print("glibc has aborted a process: the job is run again")
            found = self._outcomes(path, stages, shards, **options)
        return found

    def _was_aborted(self, found: list[Any]) -> bool:
        ended = [p for p, one in zip(self.processes, found, strict=False) if one == "ended"]
        for process in ended:
            process.join(1)
        return any(process.exitcode == -signal.SIGABRT for process in ended)

    def _outcomes(
        self,
        path: Path,
        stages: int,
        shards: int,
        killed: dict[int, int] | None = None,
        idle: int | None = None,
        **options: Any,
    ) -> list[Any]:
        """Return by rank: `Ran`, the text of the error, or "ended" for a process that died.

        `killed` maps ranks to tokens. Other stages are told to abort when one ended; shards notice.
        """
        for n, process in enumerate(self.processes):
            if not process.is_alive():
                self.processes[n], self.jobs[n], self.aborts[n] = _start()
        used, found = self.jobs[: stages * shards], dict[Any, Any]()
        directory = next(self._meetings)
        directory.mkdir(mode=0o700)
        meeting = Meeting(directory, load_timeout_s=TIMEOUT_S, collective_timeout_s=TIMEOUT_S)
        for rank, job in enumerate(used):
            part = ModelPart(rank // shards, stages, rank % shards, shards)
            job.send(
                Job(
                    str(path),
                    part,
                    meeting,
                    options,
                    (killed or {}).get(rank),
                    None if idle is None else rank == idle,
                )
            )
        while waited := [job for job in used if job not in found]:
            ended = wait(waited, timeout=2 * TIMEOUT_S)
            assert ended, f"{len(waited)} processes do not answer"
            for ready in [job for job in waited if job in ended]:
                try:
                    kind, value = ready.recv()
                except (EOFError, ConnectionResetError):
                    kind, value = "ended", "ended"
                if kind == "tokens":
                    for job in used:
                        with suppress(OSError):
                            job.send(value)
                    continue
                found[ready] = value
                if kind == "ended" and shards == 1:
                    for abort in self.aborts:
                        with suppress(OSError):
                            abort.send(True)
        return [found[job] for job in used]

    def close(self) -> None:
        for connection in (*self.jobs, *self.aborts):
            connection.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _start() -> tuple[BaseProcess, Connection, Connection]:
    # Forked from a process that has imported what takes each of them four seconds of CPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])
    (job, their_job), (abort, their_abort) = context.Pipe(), context.Pipe()
    process = context.Process(target=_work, args=(their_job, their_abort), daemon=True)
    process.start()
    for there in (their_job, their_abort):
        there.close()
    return process, job, abort


@contextmanager
def world(size: int) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as directory:
        found = World(size, Path(directory))
        try:
            yield found
        finally:
            found.close()


# --- in the processes


class _Running:
    model: LoadedModel | None = None


def _work(jobs: Connection, aborts: Connection) -> None:
    faulthandler.enable()  # a process that glibc or a signal ends says where it was
    torch.set_num_threads(1)
    threading.Thread(target=_abort, args=(aborts,), daemon=True).start()
    while True:
        try:
            job: Job = jobs.recv()
        except EOFError:
            os._exit(0)  # the end of an interpreter with torch takes a second
        try:
            jobs.send(("done", _run(jobs, job)))
        except Exception as error:  # noqa: BLE001
            jobs.send(("failed", "".join(traceback.format_exception(error))))


def _abort(aborts: Connection) -> None:
    try:
        while aborts.recv():
            if _Running.model is not None:
                _Running.model.neighbours.abort()
    except EOFError:
        return


def _run(jobs: Connection, job: Job) -> Ran:
    told = 0

    def tell(chosen: list[int] | None) -> list[int]:
        nonlocal told
        told += 1
        if told == job.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.part.is_last and job.part.shard == job.part.shards - 1:
            jobs.send(("tokens", chosen))
        found: list[int] = jobs.recv()
        return found

    def progress(stage: str, _: float) -> None:
        if job.killed == 0 and stage == "self-test":
            os.kill(os.getpid(), signal.SIGKILL)

    model = _Running.model = load_model(
        job.path, progress=progress, part=job.part, meeting=job.meeting, **job.options
    )
    try:
        if job.idle is not None:
            _abort_a_wait(jobs, model, idle=job.idle)
        return run(model, tell)
    finally:
        _Running.model = None
        model.neighbours.close()


def _abort_a_wait(jobs: Connection, model: LoadedModel, *, idle: bool) -> None:
    """Abort one shard's step, which the idle one runs only afterwards. Raises: LostError."""
    if idle:
        jobs.recv()
    else:
        threading.Thread(target=_abort_when_asleep, args=(model, threading.get_native_id())).start()
    with pytest.raises(LostError):
        run(model)
    if not idle:
        jobs.send(("tokens", []))
        jobs.recv()
    model.neighbours.begin(1)


def _abort_when_asleep(model: LoadedModel, thread: int) -> None:
    status = Path(f"/proc/self/task/{thread}/wchan")
    while "futex" not in status.read_text():
        pass
    model.neighbours.abort()
