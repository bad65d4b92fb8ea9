"""One run of all judges over the shipped code: their results, times and reach."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from time import monotonic
from types import ModuleType
from typing import NamedTuple

from tests.proof.mutants.cells import cell_mutants, tables_of
from tests.proof.mutants.forks import in_a_child, own_time_s
from tests.proof.mutants.install import module_name
from tests.proof.mutants.judge import Judges, Suite
from tests.proof.mutants.mutant import CannotBegin, Mutant
from tests.proof.mutants.reach import Tracer


class Survey(NamedTuple):
    """`reach` has judges by file and line, `imported` the lines that ran before any judge."""

    files: tuple[str, ...]
    seconds: dict[str, float]
    failed: list[str]
    imported: dict[str, set[int]]
    reach: dict[str, dict[int, set[str]]]
    cells: dict[tuple[str, str, str], set[str]]
    cell_mutants: list[Mutant]


def survey(
    suite: Suite,
    files: Sequence[str],
    mutated: Sequence[str],
    workers: int,
    until_s: float = float("inf"),
) -> Survey:
    """Trace `files`, and list the cell mutants of `mutated`. Raises: CannotBegin."""

    def part(number: int) -> Callable[[], Survey | None]:
        return lambda: _survey_part(suite, files, mutated, slice(number, None, workers), until_s)

    whole, *others = [wait() for wait in [in_a_child(part(number)) for number in range(workers)]]
    if whole is None:
        raise CannotBegin("the judges could not be collected; run pytest on them to see why")
    for other in filter(None, others):
        whole.seconds.update(other.seconds)
        whole.failed.extend(other.failed)
        for file, lines in other.reach.items():
            for line, judges in lines.items():
                whole.reach.setdefault(file, {}).setdefault(line, set()).update(judges)
        for cell, judges in other.cells.items():
            whole.cells.setdefault(cell, set()).update(judges)
    return whole


def _survey_part(
    suite: Suite, files: Sequence[str], mutated: Sequence[str], share: slice, until_s: float
) -> Survey | None:
    tracer = Tracer({str(suite.root / file): file for file in files})
    found = Survey(tuple(files), {}, [], {}, {}, {}, [])

    def work(judges: Judges) -> None:
        sys.settrace(None)
        modules = {file: module for file in mutated if (module := _imported(file)) is not None}
        found.cell_mutants.extend(
            m for file, module in modules.items() for m in cell_mutants(file, module)
        )
        kinds = {
            (type(table), type(table.moves))
            for module in modules.values()
            for table in tables_of(module).values()
        }
        for file, line in tracer.lines:
            found.imported.setdefault(file, set()).add(line)
        with ExitStack() as stack:
            for table, moves in kinds:
                stack.enter_context(tracer.watching(table, moves))
            by_file: dict[str, list[str]] = {}
            for name in judges.items:
                by_file.setdefault(name.partition("::")[0], []).append(name)
            for names in list(by_file.values())[share]:
                _measure_file(judges, names, tracer, found, until_s)

    with tracer.tracing():
        has_worked = suite.collected(work)
    return found if has_worked else None


def _imported(file: str) -> ModuleType | None:
    """None where it needs what is not installed here, as a connector needs its engine."""
    try:
        return importlib.import_module(module_name(file))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvflow"):
            raise
        return None


def _measure_file(
    judges: Judges, names: list[str], tracer: Tracer, found: Survey, until_s: float
) -> None:
    """One test after the other. They share fixtures: what any of them sets up counts for all."""
    shared: set[tuple[str, int]] = set()
    judges.on_set_up = lambda: shared.update(tracer.lines)
    measured = []
    for name, following in zip(names, [*names[1:], ""], strict=True):
        if monotonic() > until_s:
            break
        tracer.fresh()
        began = own_time_s(os.getpid())
        with tracer.tracing():
            passed = judges.passes(name, following)
        if not passed:
            found.failed.append(name)
            continue
        found.seconds[name] = own_time_s(os.getpid()) - began
        measured.append(name)
        _note(found, name, tracer.lines)
        for cell in tracer.cells:
            found.cells.setdefault(cell, set()).add(name)
    for name in measured:
        _note(found, name, shared)


def _note(found: Survey, judge: str, lines: Iterable[tuple[str, int]]) -> None:
    for file, line in lines:
        found.reach.setdefault(file, {}).setdefault(line, set()).add(judge)
