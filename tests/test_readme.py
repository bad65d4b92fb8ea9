"""The README holds: its Python runs as printed, and what it installs and calls exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert blocks("python") and blocks("sh")


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split("\n", 1)[0])
def test_python_runs_as_printed(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "identical: True" in done.stdout


def test_every_extra_it_installs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line.partition("#")[0] for block in blocks("sh") for line in block.splitlines() if "pip install" in line]
    named = {extra for line in lines for extras in re.findall(r"\[([\w,-]+)\]", line) for extra in extras.split(",")}
    assert {"server", "engine", "mooncake"} <= named <= set(project["optional-dependencies"])


def test_every_command_it_shows_exists() -> None:
    shown = {match for block in blocks("sh") for match in re.findall(r"^kvflow ([a-z-]+)", block, re.MULTILINE)}
    done = subprocess.run([sys.executable, "-m", "kvflow", "--help"], capture_output=True, text=True, check=True)
    assert {"up", "prefill", "decode", "router"} <= shown <= set(re.findall(r"[a-z-]+", done.stdout))


def test_every_file_it_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
