"""Lines changed since a commit, and the tests that import the changed files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.proof.mutants.install import module_name
from tests.proof.mutants.mutant import CannotBegin, Mutant

Lines = dict[str, set[int]]
"""Of each changed file, the numbers of the lines that are new or different."""


def changed_lines(root: Path, base: str) -> Lines:
    """Return the lines that differ from `base`, by default from where the branch began, on main
    from the last commit.

    Raises: CannotBegin where git does not know the commit.
    """
    told = _git(
        root, "diff", "--unified=0", "--no-ext-diff", base or _base(root), "--", "kvflow/*.py"
    )
    found: Lines = {}
    lines: set[int] = set()
    for line in told.splitlines():
        if line.startswith("+++ "):
            lines = found.setdefault(line.removeprefix("+++ b/"), set())
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            lines.update(range(first, first + count))
    return {file: lines for file, lines in found.items() if lines}


def touched(mutants: list[Mutant], lines: Lines) -> list[Mutant]:
    return [
        m for m in mutants if lines.get(m.file, set()) & set(range(m.first_line, m.last_line + 1))
    ]


def importing(root: Path, judges: tuple[str, ...], files: list[str]) -> tuple[str, ...]:
    """The judges' files that name a module of `files`, those that name most of them first."""
    names = [re.escape(module_name(file)) for file in files]
    parents = [
        r"\.import ".join(map(re.escape, module_name(file).rsplit(".", 1))).replace(r"\.", " ")
        for file in files
    ]
    word = re.compile(rf"\b(?:{'|'.join([*names, *parents])})\b")
    found: dict[str, int] = {}
    for given in judges:
        path = root / given.partition("::")[0]
        for test in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            if named := len(set(word.findall(test.read_text(encoding="utf-8")))):
                found[str(test.relative_to(root))] = named
    return tuple(sorted(found, key=lambda test: -found[test]))


def _base(root: Path) -> str:
    try:
        fork = _git(root, "merge-base", "origin/main", "HEAD").strip()
    except CannotBegin:
        fork = ""
    return fork if fork and fork != _git(root, "rev-parse", "HEAD").strip() else "HEAD~1"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotBegin(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
