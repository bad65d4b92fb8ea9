"""Forked processes, a few at a time, each with one mutant in it."""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from tests.proof.mutants.forks import SHOW_OUTPUT, fork, own_time_s
from tests.proof.mutants.mutant import Mutant

MEMORY_BYTES = 8 << 30
SETTING_UP_S = 60.0  # to import and collect what a mutant needs, before its first judge


class Verdict(NamedTuple):
    """`outcome`: killed, survived, unreached by any judge, or cold: only an import shows it."""

    outcome: str
    by: str = ""
    seconds: float = 0.0
    is_hung: bool = False


class Say:
    """Tells the parent process which judge starts, and the outcome."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def starts(self, judge: str) -> None:
        os.write(self._pipe, f"> {judge}\n".encode())

    def ends(self, outcome: str, by: str = "") -> None:
        os.write(self._pipe, f"{outcome} {by}\n".encode())


class _Child:
    def __init__(self, mutant: Mutant, pid: int, pipe: int) -> None:
        self.mutant, self.pid, self.pipe = mutant, pid, pipe
        self.began_at = monotonic()
        self.due_at = own_time_s(pid) + SETTING_UP_S
        self.judge, self.verdict, self._rest = "", Verdict("killed", "it could not be run"), b""

    def read(self, patience_s: Callable[[str], float]) -> bool:
        data = os.read(self.pipe, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            word, _, text = line.decode().partition(" ")
            if word == ">":
                self.judge, self.due_at = text, own_time_s(self.pid) + patience_s(text)
                self.verdict = Verdict("killed", text)  # should it end without another word
            else:
                self.verdict = Verdict(word, text)
        return bool(data)

    def is_due(self) -> bool:
        return own_time_s(self.pid) > self.due_at

    def end(self) -> Verdict:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # also what its tests may have left running
        os.waitpid(self.pid, 0)
        os.close(self.pipe)
        return self.verdict._replace(seconds=monotonic() - self.began_at)


def judged(
    waiting: Iterator[Mutant],
    work: Callable[[Mutant, Say], None],
    patience_s: Callable[[str], float],
    workers: int,
    until_s: float = float("inf"),
) -> Iterator[tuple[Mutant, Verdict]]:
    """Fork a process for every mutant and `work` in it; yield the verdicts as they end.

    At `until_s` the running ones end without a verdict. A child whose judge takes longer than
    `patience_s` is killed by that judge.
    """
    running: dict[int, _Child] = {}
    try:
        while monotonic() < until_s:
            while len(running) < workers and (mutant := next(waiting, None)) is not None:
                child = _fork(mutant, work, list(running))
                running[child.pipe] = child
            if not running:
                return
            for pipe in select.select(list(running), [], [], 0.5)[0]:
                if not running[pipe].read(patience_s):
                    child = running.pop(pipe)
                    yield child.mutant, child.end()
            for child in [child for child in running.values() if child.is_due()]:
                del running[child.pipe]
                child.verdict = Verdict("killed", child.judge, is_hung=True)
                yield child.mutant, child.end()
    finally:
        for child in running.values():
            child.end()


def _fork(mutant: Mutant, work: Callable[[Mutant, Say], None], others: list[int]) -> _Child:
    reading, writing = os.pipe()

    def alone() -> None:
        os.setpgid(0, 0)
        for pipe in (reading, *others):
            os.close(pipe)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        if not os.environ.get(SHOW_OUTPUT):
            os.dup2(1, 2)  # a mutant's complaints are expected
        work(mutant, Say(writing))

    pid = fork(alone)
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)  # by whom comes first: it must have happened before the group is ended
    os.close(writing)
    return _Child(mutant, pid, reading)
