"""No file and no function of the package grows past what one reads in one go."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvflow"
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60

FILES = sorted(PACKAGE.rglob("*.py"))


def long_functions(source: str) -> list[str]:
    """Return `name: lines` of every function over the limit, nested ones and methods included."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions]
    return [f"{name}: {lines}" for name, lines in lengths if lines > FUNCTION_LINES_MAX]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_and_its_functions_are_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= FILE_LINES_MAX
    assert long_functions(source) == []


def test_a_long_function_is_found() -> None:
    body = "\n".join(["        pass"] * FUNCTION_LINES_MAX)
    assert long_functions(f"class Room:\n    async def close(self):\n{body}\n") == [f"close: {FUNCTION_LINES_MAX + 1}"]
