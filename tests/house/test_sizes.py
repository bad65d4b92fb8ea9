"""No file and no function of the package grows past what one reads in one go."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvflow"
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
COLUMNS_MAX = 100

FILES = sorted(PACKAGE.rglob("*.py"))
ALL_PYTHON = sorted(
    path
    for folder in ("kvflow", "tests", "examples")
    for path in ROOT.joinpath(folder).rglob("*.py")
)


def long_functions(source: str) -> list[str]:
    """Return `name: lines` of every function over the limit, nested ones and methods included.

    Lines that are comments do not count: a reason is not to be left out for want of a line.
    """
    comments = [line.lstrip().startswith("#") for line in source.splitlines()]
    functions = [
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    spans = [(f.name, f.lineno - 1, f.end_lineno or f.lineno) for f in functions]
    lengths = [(name, end - first - sum(comments[first:end])) for name, first, end in spans]
    return [f"{name}: {lines}" for name, lines in lengths if lines > FUNCTION_LINES_MAX]


def test_files_and_their_functions_are_short() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in FILES}
    lengths = {name: len(source.splitlines()) for name, source in sources.items()}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX} == {}
    functions = {name: long_functions(source) for name, source in sources.items()}
    assert len(functions) > 100
    assert {name: found for name, found in functions.items() if found} == {}


def test_a_long_function_is_found() -> None:
    body = "\n".join(["        pass"] * FUNCTION_LINES_MAX)
    assert long_functions(f"class Room:\n    async def close(self):\n{body}\n") == [
        f"close: {FUNCTION_LINES_MAX + 1}"
    ]


def test_comments_of_a_long_function_do_not_count() -> None:
    body = "\n".join(["    # why", "    pass"] * (FUNCTION_LINES_MAX - 1))
    assert long_functions(f"def close():\n{body}\n") == []
    assert long_functions(f"def close():\n{body}\n    pass\n") == [
        f"close: {FUNCTION_LINES_MAX + 1}"
    ]


def badly_laid_out(source: str) -> list[str]:
    """Return `number: line` of every line over the limit, and of every one that the formatter must
    leave alone.
    """
    lines = enumerate(source.splitlines(), 1)
    return [
        f"{number}: {line}"
        for number, line in lines
        if len(line) > COLUMNS_MAX or re.search(r"#\s*fmt:\s*(skip|off|on)\b", line)
    ]


def test_lines_are_short_and_laid_out_by_the_formatter() -> None:
    """Pragmas count too, which ruff does not count."""
    found = {str(path.relative_to(ROOT)): badly_laid_out(path.read_text()) for path in ALL_PYTHON}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_long_line_and_a_line_left_alone_are_found() -> None:
    source = "\n".join(["x" * COLUMNS_MAX, "y" * (COLUMNS_MAX + 1), "z = 1  # fmt: " + "skip"])
    assert [line.partition(":")[0] for line in badly_laid_out(source)] == ["2", "3"]
