"""Tests of one `xdist_group` run in one process: several start fleets, or share a build. And what
`make` sets reaches their roles.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvflow.serve.config.sources import unknown_variables

ROOT = Path(__file__).parents[2]
MODULE = """
import os
import pytest

@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("number", range(10))
def test_where(number):
    with open(os.environ["WORKERS_SEEN"], "a") as seen:
        print(os.environ["PYTEST_XDIST_WORKER"], file=seen)
"""


def test_a_group_stays_in_one_process(tmp_path: Path) -> None:
    """pytest and xdist of some versions do not fit: the marks are then ignored without a word."""
    (tmp_path / "test_two.py").write_text(MODULE)
    seen = tmp_path / "seen"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env={"WORKERS_SEEN": str(seen), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers = seen.read_text().split()
    assert len(workers) == 10
    assert len(set(workers)) == 1


def test_make_sets_no_variable_that_a_role_refuses() -> None:
    set_there = re.findall(r"\b(KVFLOW_\w+)=", (ROOT / "Makefile").read_text())
    assert unknown_variables(dict.fromkeys(set_there, "1")) == []
