"""Mutation proof: `python -m tests.proof.mutants --help`, or `make mutants ARGS="..."`."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from time import monotonic

from tests.proof.mutants import lists
from tests.proof.mutants.judge import Suite, import_what_lasts
from tests.proof.mutants.mutant import CannotBegin, Mutant
from tests.proof.mutants.plan import Plan
from tests.proof.mutants.report import Report
from tests.proof.mutants.run import Run
from tests.proof.mutants.scout import survey
from tests.proof.mutants.source import mutants_of

ROOT = Path(__file__).parents[3]


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
    return 0 if report.is_clean else 1


def judged(given: argparse.Namespace, root: Path, here: Path) -> Report:
    """Raises: CannotBegin."""
    scope = lists.read_scope(here / "mutants.toml")
    equivalent = lists.read_equivalent(here / "equivalent.toml")
    all_files, files = lists.files_of(root, scope, []), lists.files_of(root, scope, given.files)
    mutants = [mutant for file in files for mutant in mutants_of(root, file, scope.texts)]
    named = [mutant for mutant in lists.read_named(root, here / "named.toml") if mutant.file in files]
    import_what_lasts()
    suite = Suite(root, tuple(given.judges) or scope.judges, tuple(f"--deselect={path}" for path in scope.deselect))
    found = survey(suite, all_files, files, given.workers)
    print(f"{len(found.seconds)} judges, {sum(found.seconds.values()):.0f} s traced", file=sys.stderr)
    if found.failed:
        raise CannotBegin("\n  ".join(["judges fail without any mutant:", *found.failed]))
    report = Report([*found.cell_mutants, *mutants, *named], equivalent, set(files))
    wanted = chosen(report.to_judge(given.recheck), given)
    report.verdicts = Run(suite, Plan(root, found, given.patience_s), given.workers).judge(wanted)
    return report


def chosen(mutants: list[Mutant], given: argparse.Namespace) -> list[Mutant]:
    found = [mutant for mutant in mutants if all(part in mutant.key for part in given.only)]
    if given.sample and given.sample < len(found):
        return random.Random(given.seed).sample(found, given.sample)
    return found


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m tests.proof.mutants", description=__doc__)
    add = options.add_argument
    add("--files", nargs="*", default=[], metavar="PATH", help="only these files or folders of mutants.toml")
    add("--judges", nargs="*", default=[], metavar="PATH", help="only these tests: what does the walk alone find?")
    add("--only", nargs="*", default=[], metavar="TEXT", help="only mutants whose key has all of these texts in it")
    add("--sample", type=int, default=0, metavar="N", help="only N of them, drawn by chance")
    add("--seed", type=int, default=0, help="of that chance")
    add("--workers", type=int, default=2, help="processes at a time")
    add(
        "--patience-s",
        type=float,
        default=5.0,
        metavar="S",
        help="a judge hangs that takes so long, and ten times its usual time",
    )
    add("--recheck", action="store_true", help="judge the mutants of equivalent.toml too: one that is killed is not")
    add("--stubs", action="store_true", help="print survivors as entries for equivalent.toml")
    add("--json", type=Path, metavar="FILE", help="write every mutant and its verdict")
    return options


if __name__ == "__main__":
    sys.exit(main())
