"""Mutation proof: `python -m tests.proof.mutants --help`, or `make mutants ARGS="..."`."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from time import monotonic

from tests.proof.mutants import lists
from tests.proof.mutants.changed import Lines, changed_lines, importing, touched
from tests.proof.mutants.judge import Suite, import_what_lasts
from tests.proof.mutants.mutant import CannotBegin, Mutant
from tests.proof.mutants.plan import Plan
from tests.proof.mutants.report import Report
from tests.proof.mutants.run import Run
from tests.proof.mutants.scout import survey
from tests.proof.mutants.source import mutants_of

ROOT = Path(__file__).parents[3]
LEAST_S = 40.0  # for an area: to import its tests takes ten of them
MOST_CHANGED = 16  # mutants of changed lines of an area, unless `--sample` says otherwise


def main(arguments: list[str] | None = None, root: Path = ROOT, here: Path = lists.HERE) -> int:
    """Exit status: 0 all killed, 1 some survived or a list is out of date, 2 it could not begin."""
    given, began = parser().parse_args(arguments), monotonic()
    try:
        report = judged(given, root, here)
    except CannotBegin as error:
        print(error, file=sys.stderr)
        return 2
    report.seconds = monotonic() - began
    print(report.text(given.stubs))
    if given.json:
        given.json.write_text(json.dumps(report.as_dict(), indent=1), encoding="utf-8")
    return 0 if report.is_clean or given.changed is not None else 1


def judged(given: argparse.Namespace, root: Path, here: Path) -> Report:
    """Raises: CannotBegin."""
    scopes = lists.read_scopes(here / "mutants.toml")
    lists.check_named(root, scopes, given.files)
    equivalent = lists.read_equivalent(here / "equivalent.toml")
    named = lists.read_named(root, here / "named.toml")
    lines = None if given.changed is None else changed_lines(root, given.changed)
    import_what_lasts()
    whole = Report([], {}, set())
    areas = [scope for scope in scopes if _files(root, scope, given, lines)]
    if lines is not None:  # in case that time runs out
        areas.sort(
            key=lambda scope: -sum(len(lines[file]) for file in _files(root, scope, given, lines))
        )
    until_s = monotonic() + given.within_s
    for number, scope in enumerate(areas):
        left_s = until_s - monotonic()
        if left_s < LEAST_S:
            print(f"{scope.name}: not judged, for want of time", file=sys.stderr)
            continue
        share_s = max(LEAST_S, left_s / (len(areas) - number))
        whole.add(
            _judged_area(given, root, scope, (equivalent, named, lines), monotonic() + share_s)
        )
    return whole


def _files(
    root: Path, scope: lists.Scope, given: argparse.Namespace, lines: Lines | None
) -> list[str]:
    files = lists.files_of(root, scope, given.files)
    return files if lines is None else [file for file in files if file in lines]


def _judged_area(
    given: argparse.Namespace,
    root: Path,
    scope: lists.Scope,
    known: tuple[dict[str, str], list[Mutant], Lines | None],
    until_s: float,
) -> Report:
    """`known`: equivalent and named mutants, changed lines. Raises: CannotBegin."""
    equivalent, named, lines = known
    files = _files(root, scope, given, lines)
    mutants = [mutant for file in files for mutant in mutants_of(root, file, scope.texts)]
    judges = tuple(given.judges) or (
        scope.judges if lines is None else importing(root, scope.judges, files)
    )
    if not judges:
        print(
            f"{scope.name}: no test imports {', '.join(files)} by name: not judged", file=sys.stderr
        )
        return Report([], {}, set())
    suite = Suite(root, judges, tuple(f"--deselect={path}" for path in scope.deselect))
    # Of what is bounded in time, half goes to finding out which judges there are.
    half_s = monotonic() + (until_s - monotonic()) / 2
    found = survey(suite, lists.files_of(root, scope, []), files, given.workers, half_s)
    text = f"{scope.name}: {len(found.seconds)} judges, {sum(found.seconds.values()):.0f} s traced"
    print(text, file=sys.stderr, flush=True)
    if found.failed and not found.seconds:
        raise CannotBegin("\n  ".join(["all judges fail without any mutant:", *found.failed]))
    mine = [mutant for mutant in named if mutant.file in files]
    report = Report([*found.cell_mutants, *mutants, *mine], equivalent, set(files))
    wanted = report.to_judge(given.recheck)
    wanted = chosen(wanted if lines is None else touched(wanted, lines), given)
    report.wanted, report.no_judges = len(wanted), found.failed
    plan = Plan(root, found, given.patience_s, scope.most_s)
    report.verdicts = Run(suite, plan, given.workers, until_s).judge(wanted)
    # Other tests may reach the line, which had no time, or do not name its module.
    if lines is not None:
        report.verdicts = [
            (mutant, found) for mutant, found in report.verdicts if found.outcome != "unreached"
        ]
    return report


def chosen(mutants: list[Mutant], given: argparse.Namespace) -> list[Mutant]:
    found = [mutant for mutant in mutants if all(part in mutant.key for part in given.only)]
    most = given.sample or (len(found) if given.changed is None else MOST_CHANGED)
    return random.Random(given.seed).sample(found, most) if most < len(found) else found


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m tests.proof.mutants", description=__doc__)
    add = options.add_argument
    add(
        "--files",
        "--under",
        nargs="*",
        default=[],
        metavar="PATH",
        help="only these files or folders of mutants.toml",
    )
    add(
        "--changed",
        nargs="?",
        const="",
        metavar="COMMIT",
        help=(
            "only lines changed since COMMIT (by default since the branch began, on main since the "
            "last commit), before the tests that import their modules by name; survivors are no "
            "failure"
        ),
    )
    add(
        "--within-s",
        type=float,
        default=float("inf"),
        metavar="S",
        help="begin nothing after so many seconds",
    )
    add(
        "--judges",
        nargs="*",
        default=[],
        metavar="PATH",
        help="only these tests: what does the walk alone find?",
    )
    add(
        "--only",
        nargs="*",
        default=[],
        metavar="TEXT",
        help="only mutants whose key has all of these texts in it",
    )
    add("--sample", type=int, default=0, metavar="N", help="only N of each area, drawn by chance")
    add("--seed", type=int, default=0, help="of that chance")
    add("--workers", type=int, default=2, help="processes at a time")
    add(
        "--patience-s",
        type=float,
        default=5.0,
        metavar="S",
        help="a judge hangs that takes so long, and ten times its usual time",
    )
    add(
        "--recheck",
        action="store_true",
        help="judge the mutants of equivalent.toml too: one that is killed is not",
    )
    add("--stubs", action="store_true", help="print survivors as entries for equivalent.toml")
    add("--json", type=Path, metavar="FILE", help="write every mutant and its verdict")
    return options


if __name__ == "__main__":
    sys.exit(main())
