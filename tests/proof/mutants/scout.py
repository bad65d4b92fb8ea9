"""One run of all judges over the code as it ships: do they pass, how long does each take, and what does it reach."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from tests.proof.mutants.cells import cell_mutants, tables_of
from tests.proof.mutants.forks import in_a_child, own_time_s
from tests.proof.mutants.install import module_name
from tests.proof.mutants.judge import Judges, Suite
from tests.proof.mutants.mutant import CannotBegin, Mutant
from tests.proof.mutants.reach import Tracer


class Survey(NamedTuple):
    """`reach` is judges by file and line, `cells` by module, phase and kind; `imported` the lines run before any."""

    files: tuple[str, ...]
    seconds: dict[str, float]
    failed: list[str]
    imported: dict[str, set[int]]
    reach: dict[str, dict[int, set[str]]]
    cells: dict[tuple[str, str, str], set[str]]
    cell_mutants: list[Mutant]


def survey(suite: Suite, files: Sequence[str], mutated: Sequence[str], workers: int) -> Survey:
    """`files` are traced, the tables of `mutated` give the mutants of cells.

    Raises: CannotBegin when the judges cannot be imported.
    """

    def part(number: int) -> Callable[[], Survey | None]:
        return lambda: _survey_part(suite, files, mutated, slice(number, None, workers))

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


def _survey_part(suite: Suite, files: Sequence[str], mutated: Sequence[str], share: slice) -> Survey | None:
    """What `share` of the judges reaches."""
    tracer = Tracer({str(suite.root / file): file for file in files})
    found = Survey(tuple(files), {}, [], {}, {}, {}, [])

    def work(judges: Judges) -> None:
        sys.settrace(None)
        modules = {file: importlib.import_module(module_name(file)) for file in mutated}
        found.cell_mutants.extend(m for file, module in modules.items() for m in cell_mutants(file, module))
        kinds = {
            (type(table), type(table.moves)) for module in modules.values() for table in tables_of(module).values()
        }
        for file, line in tracer.lines:
            found.imported.setdefault(file, set()).add(line)
        with ExitStack() as stack:
            for table, moves in kinds:
                stack.enter_context(tracer.watching(table, moves))
            for name in list(judges.items)[share]:
                _measure(judges, name, tracer, found)

    with tracer.tracing():
        has_worked = suite.collected(work)
    return found if has_worked else None


def _measure(judges: Judges, name: str, tracer: Tracer, found: Survey) -> None:
    tracer.fresh()
    began = own_time_s(os.getpid())
    with tracer.tracing():
        passed = judges.passes(name)
    found.seconds[name] = own_time_s(os.getpid()) - began
    if not passed:
        found.failed.append(name)
    for file, line in tracer.lines:
        found.reach.setdefault(file, {}).setdefault(line, set()).add(name)
    for cell in tracer.cells:
        found.cells.setdefault(cell, set()).add(name)
