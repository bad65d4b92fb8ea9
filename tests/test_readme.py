"""The README holds: its Python runs as printed, and what it installs, links to and shows exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.printed import README, blocks_of, commands_of
from tests.shells import ROOT

TEXT = (ROOT / README).read_text()
PYTHON = blocks_of(README, "python")
COMMANDS = [command for block in blocks_of(README) for command in commands_of(block)]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_every_target_of_make_exists(command: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *command.split()[1:]],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "kvflow" in done.stdout or "pytest" in done.stdout


def test_there_is_something_to_run() -> None:
    assert PYTHON and COMMANDS


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.split("\n", 1)[0])
def test_python_runs_as_printed(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "identical: True" in done.stdout


def test_every_extra_it_installs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [command for command in COMMANDS if "pip install" in command]
    named = {extra for line in lines for extras in re.findall(r"\[([\w,-]+)\]", line) for extra in extras.split(",")}
    assert {"server", "engine", "mooncake"} <= named <= set(project["optional-dependencies"])


def test_every_command_it_shows_exists() -> None:
    shown = {match[1] for command in COMMANDS if (match := re.match(r"kvflow ([a-z-]+)", command))}
    done = subprocess.run([sys.executable, "-m", "kvflow", "--help"], capture_output=True, text=True, check=True)
    assert {"up", "prefill", "decode", "router"} <= shown <= set(re.findall(r"[a-z-]+", done.stdout))


def test_every_file_it_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
