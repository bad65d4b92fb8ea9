"""The floors hold: imports go downward only, and the two lowest know no framework."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {"kvflow.protocols": {"msgspec", "numpy"}, "kvflow.handlers": {"msgspec", "numpy"}}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("kvflow", include_external_packages=True, cache_dir=None)


def test_contracts_hold() -> None:
    tool = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert tool, "lint-imports is not installed beside this interpreter"
    result = subprocess.run(
        [tool, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_contracts_are_those_of_the_design() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in settings["contracts"] if c["type"] == "layers")
    order = [name.strip(" ()") for layer in layers for name in layer.split("|")]
    floors = ["cli", "proof", "serve", "router", "http", "node", "handlers", "memory", "protocols"]
    assert floors == sorted(floors, key=order.index)
    assert order[-3:] == ["protocols", "aio", "extras"]


@pytest.mark.parametrize("floor", sorted(ALLOWED))
def test_low_floor_imports_only_what_it_may(graph: grimp.ImportGraph, floor: str) -> None:
    members = {floor, *graph.find_descendants(floor)} if floor in graph.modules else set()
    imported = {
        name.split(".")[0]
        for member in members
        for name in graph.find_modules_directly_imported_by(member)
    }
    assert imported - set(sys.stdlib_module_names) - ALLOWED[floor] <= {"kvflow"}


def test_handlers_know_the_floors_below_only(graph: grimp.ImportGraph) -> None:
    floor = "kvflow.handlers"
    members = {floor, *graph.find_descendants(floor)} if floor in graph.modules else set()
    inside = {
        n
        for m in members
        for n in graph.find_modules_directly_imported_by(m)
        if n.startswith("kvflow")
    }
    below = {"kvflow.handlers", "kvflow.protocols", "kvflow.telemetry", "kvflow.aio"}
    assert {".".join(name.split(".")[:2]) for name in inside} <= below


def test_importing_protocols_is_light() -> None:
    program = (
        "import sys, kvflow.protocols; print(*({'torch', 'zmq', 'aiohttp', 'transformers'} & "
        "set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd="/", capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
