"""One run of all judges over the code as it ships: do they pass, how long does each take, and what does it reach."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from tests.proof.mutants.cells import cell_mutants, tables_of
from tests.proof.mutants.install import module_name
from tests.proof.mutants.judge import Judges, collected
from tests.proof.mutants.mutant import Mutant
from tests.proof.mutants.reach import Tracer

T = TypeVar("T")


class Survey(NamedTuple):
    """`reach` is judges by file and line, `cells` by module, phase and kind; `imported` the lines run before any."""

    files: tuple[str, ...]
    seconds: dict[str, float]
    failed: list[str]
    imported: dict[str, set[int]]
    reach: dict[str, dict[int, set[str]]]
    cells: dict[tuple[str, str, str], set[str]]
    cell_mutants: list[Mutant]


def survey(
    root: Path, files: Sequence[str], mutated: Sequence[str], paths: Sequence[str], options: Sequence[str], workers: int
) -> Survey:
    """`files` are traced, the tables of `mutated` give the mutants of cells. Raises: RuntimeError when a judge cannot
    be imported."""

    def part(number: int) -> Callable[[], Survey | None]:
        return lambda: _survey_part(root, files, mutated, paths, options, number, workers)

    parts = [wait() for wait in [in_a_child(part(number)) for number in range(workers)]]
    whole = parts[0]
    if whole is None:
        raise RuntimeError("the judges could not be collected; run pytest on them to see why")
    for other in parts[1:]:
        assert other is not None
        whole.seconds.update(other.seconds)
        whole.failed.extend(other.failed)
        for file, lines in other.reach.items():
            for line, judges in lines.items():
                whole.reach.setdefault(file, {}).setdefault(line, set()).update(judges)
        for cell, judges in other.cells.items():
            whole.cells.setdefault(cell, set()).update(judges)
    return whole


def _survey_part(
    root: Path,
    files: Sequence[str],
    mutated: Sequence[str],
    paths: Sequence[str],
    options: Sequence[str],
    number: int,
    workers: int,
) -> Survey | None:
    tracer = Tracer({str(root / file): file for file in files})
    found = Survey(tuple(files), {}, [], {}, {}, {}, [])

    def work(judges: Judges) -> None:
        sys.settrace(None)
        modules = {file: importlib.import_module(module_name(file)) for file in mutated}
        found.cell_mutants.extend(m for file, module in modules.items() for m in cell_mutants(file, module))
        kinds = {type(table) for module in modules.values() for table in tables_of(module).values()}
        for file, line in tracer.lines:
            found.imported.setdefault(file, set()).add(line)
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(tracer.watching(kind))
            for name in list(judges.items)[number::workers]:
                _measure(judges, name, tracer, found)

    with tracer.tracing():
        has_worked = collected(root, paths, work, options)
    return found if has_worked else None


def _measure(judges: Judges, name: str, tracer: Tracer, found: Survey) -> None:
    tracer.fresh()
    began = monotonic()
    with tracer.tracing():
        passed = judges.passes(name)
    found.seconds[name] = monotonic() - began
    if not passed:
        found.failed.append(name)
    for file, line in tracer.lines:
        found.reach.setdefault(file, {}).setdefault(line, set()).add(name)
    for cell in tracer.cells:
        found.cells.setdefault(cell, set()).add(name)


def in_a_child(work: Callable[[], T]) -> Callable[[], T]:
    """Start `work` in a forked process, silently; what is returned waits for its result.

    Raises: RuntimeError, when waited for, if the process died.
    """
    result = tempfile.TemporaryFile()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            if not os.environ.get("MUTANTS_SHOW_OUTPUT"):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            pickle.dump(work(), result)
            result.flush()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)

    def wait() -> Any:
        if os.waitpid(pid, 0)[1]:
            raise RuntimeError("a process of the tool died; what it printed stands above")
        with result:
            result.seek(0)
            return pickle.load(result)

    return wait
