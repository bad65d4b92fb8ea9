"""`import kvflow` is the front page: nothing is loaded before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import grimp
import pytest

import kvflow

ROOT = Path(__file__).parents[1]
HEAVY = ("numpy", "msgspec", "zmq", "asyncio", "torch", "aiohttp")


def python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dir_is_the_front_page() -> None:
    assert set(dir(kvflow)) == {*kvflow.__all__, "__version__"}


@pytest.mark.parametrize("name", kvflow.__all__)
def test_every_name_can_be_imported(name: str) -> None:
    found = getattr(kvflow, name)
    assert found is getattr(kvflow, name)
    assert found.__module__.startswith("kvflow.") and found.__doc__


def test_a_star_import_brings_the_front_page() -> None:
    assert (
        python(f"from kvflow import *; print(set({kvflow.__all__!r}) <= set(globals()))")
        == "True\n"
    )


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'kvflow' has no attribute 'PagedPol'"):
        _ = kvflow.PagedPol  # type: ignore[attr-defined]


def test_importing_kvflow_loads_nothing() -> None:
    program = f"import sys, kvflow; dir(kvflow); print([n for n in {HEAVY!r} if n in sys.modules])"
    assert python(program) == "[]\n"


def test_an_error_is_named_without_loading_a_socket_library() -> None:
    program = (
        f"import sys, kvflow; kvflow.MisuseError; print([n for n in {HEAVY!r} if n in sys.modules])"
    )
    assert python(program) == "['msgspec']\n"


def test_type_checkers_are_told_the_same_homes() -> None:
    (guarded,) = (
        node
        for node in ast.parse(Path(kvflow.__file__).read_text()).body
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.test, ast.Name)
    )
    told = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(told) == set(kvflow.__all__)
    for name, place in told.items():
        module, _, there = place.partition(":")
        assert getattr(import_module(module), there) is getattr(kvflow, name)


@pytest.mark.slow
def test_type_checkers_see_every_name(tmp_path: Path) -> None:
    lines = [
        "import kvflow",
        *(f"reveal_type(kvflow.{name})" for name in kvflow.__all__),
        "kvflow.PagedPol",
    ]
    (tmp_path / "page.py").write_text("\n".join(lines) + "\n")
    # With the settings of this repository, so that what `make check` has left of kvflow is read.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(tmp_path / "page.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    notes = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert len(notes) == len(kvflow.__all__), done.stdout + done.stderr
    assert not [line for line in notes if '"Any"' in line or '"object"' in line]
    # The lazy lookup does not make every name good.
    assert 'has no attribute "PagedPol"' in done.stdout


def test_the_front_page_stands_above_what_it_shows() -> None:
    """Nothing it imports may import it back: its imports for type checkers count."""
    graph = grimp.build_graph("kvflow", cache_dir=None)
    shown = graph.find_modules_directly_imported_by("kvflow")
    assert "kvflow.node" in shown
    assert [m for m in shown if graph.chain_exists(importer=m, imported="kvflow")] == []
