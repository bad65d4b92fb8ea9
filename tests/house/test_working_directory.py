"""A file in the working directory is not code: neither the command nor any process that it starts
imports it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvflow.serve.launch.child import Child, ChildEndedError
from kvflow.serve.launch.doctor import _import_error

# Of the standard library: imported early, or by many.
MODULES = ("dataclasses", "pickle", "queue", "typing")
ROOT = Path(__file__).parents[2]
# They start no Python process: the path of a program beside Python's, and a process that starts
# itself again.
EXEMPT = {("serve/launch/mooncake_master.py", "with_name"), ("bench/commands.py", "orig_argv")}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists as soon as some process has imported one of `MODULES` from the working
    directory.
    """
    found = tmp_path / "imported"
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(found)!r}, 'w').close()\nraise SystemExit(9)\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return found


def commands() -> Iterator[tuple[str, int, list[str]]]:
    """Every place of the package that names the interpreter: file, line, and the source of what
    follows it.
    """
    for path in sorted((ROOT / "kvflow").rglob("*.py")):
        name = str(path.relative_to(ROOT / "kvflow"))
        source = path.read_text(encoding="utf-8")
        if "sys.executable" not in source:
            continue
        tree = ast.parse(source)
        followed = {}
        for node in ast.walk(tree):
            items = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
            for i, item in enumerate(items):
                followed[id(item)] = [ast.unparse(other) for other in items[i + 1 :]]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
                line = source.splitlines()[node.lineno - 1]
                if not any(name == file and word in line for file, word in EXEMPT):
                    yield name, node.lineno, followed.get(id(node), [])


def test_every_python_process_is_started_without_the_working_directory() -> None:
    found = list(commands())
    assert len(found) > 10
    assert [place for *place, arguments in found if arguments[:1] != ["'-P'"]] == []


async def test_a_role_does_not_import_from_there(marker: Path) -> None:
    child = Child("router", "router", ["--no-such-flag"], quiet=True)
    with pytest.raises(ChildEndedError, match="no-such-flag"):
        await child.start(os.environ, 60)
    await child.stop(5)
    assert not marker.exists()


def test_the_doctor_does_not_import_from_there(marker: Path) -> None:
    assert _import_error("queue") == ""
    assert not marker.exists()


def test_the_command_does_not_import_from_there_nor_do_processes_of_libraries(marker: Path) -> None:
    """`kvflow sim --jobs 2` starts processes by `multiprocessing`,
    whose command line is not ours.
    """
    command = Path(sysconfig.get_path("scripts")) / "kvflow"
    start = [str(command)] if command.exists() else [sys.executable, "-P", "-m", "kvflow"]
    arguments = ["sim", "--bare", "--seeds", "0:2", "--jobs", "2"]
    done = subprocess.run(
        [*start, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not marker.exists()
