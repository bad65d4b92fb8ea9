"""The printed seed is the one that tests get, in every process of the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = """
def test_one(seed): assert not seed, f"got {seed}"
def test_other(seed): assert not seed, f"got {seed}"
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_every_process_has_the_printed_seed(processes: int, tmp_path: Path) -> None:
    (tmp_path / "test_seeds.py").write_text(TEST)
    environment = {name: value for name, value in os.environ.items() if name != "KVFLOW_SEED"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest"),
            *("-n", str(processes), "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)),
        ],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    (printed,) = set(re.findall(r"^seed: (\d+)", done.stdout, re.MULTILINE))
    assert set(re.findall(r"got (\d+)", done.stdout)) == {printed}, done.stdout
    assert "2 failed" in done.stdout
