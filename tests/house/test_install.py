"""What a user installs: one wheel, one top-level name, a command that runs from anywhere."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from kvflow.extras import CORE, EXTRAS

ROOT = Path(__file__).parents[2]
PACKAGE_DATA = [
    "py.typed",
    *("router/page/" + name for name in ("index.html", "page.js", "style.css", "icon.svg")),
    *(
        "serve/demo_model/" + name
        for name in ("config.json", "model.safetensors", "tokenizer.json", "PROVENANCE.md")
    ),
]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "dist", "*.egg-info"
)
CORE_DISTRIBUTIONS = ("msgspec", "numpy", "pyzmq", "xxhash")
# One process makes the build, so that it is made once.
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("build"), pytest.mark.slow]


def finished(*command: str | Path, cwd: Path = Path("/")) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without the paths that a developer's environment adds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [str(part) for part in command]
    return subprocess.run(
        arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def run(*command: str | Path, cwd: Path = Path("/")) -> str:
    """Run a command and return what it printed; its whole output explains a failure."""
    result = finished(*command, cwd=cwd)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def made_venv(home: Path, built: Path) -> Path:
    """A new environment with the wheel, and nothing else, in it. Returns its folder of packages."""
    venv.create(home)
    (wheel,) = built.glob("*.whl")
    # With the pip of this environment: a new one in each costs several seconds.
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        home / "bin/python",
        "install",
        "--no-deps",
        "--no-index",
        wheel,
    )
    return Path(
        run(
            home / "bin/python",
            "-c",
            "import sysconfig; print(sysconfig.get_path('purelib'), end='')",
        )
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel made from that sdist (so that a file missing in it
    shows).

    Made from a copy: a build writes egg-info and sdist folders into its source tree, where two at
    once would meet.
    """
    out, copy = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source") / "kvflow"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_SOURCE)
    # Without isolation: the build tool of this environment serves, and no network is needed.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel in it.

    The dependencies are those of this environment, added by path: downloading them again proves
    nothing about us. A path added as a folder does not run the .pth files in it, so the editable
    install here stays invisible.
    """
    home = tmp_path_factory.mktemp("installed")
    (made_venv(home, built) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install kvflow` makes: the wheel, and links to the packages it requires without any
    extra.
    """
    home = tmp_path_factory.mktemp("bare")
    target = made_venv(home, built)
    for name in CORE_DISTRIBUTIONS:
        files = importlib.metadata.files(name)
        assert files
        for top in {file.parts[0] for file in files} - {".."}:
            link = target / top
            if not link.exists():
                link.symlink_to(Path(str(importlib.metadata.distribution(name).locate_file(top))))
    return home


def test_wheel_installs_one_name(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"kvflow"}


def test_both_archives_hold_the_model_and_its_provenance(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for names in (set(zipfile.ZipFile(wheel).namelist()), in_sdist):
        assert {f"kvflow/{name}" for name in PACKAGE_DATA} <= names


def test_command_runs_from_the_root_folder(installed: Path) -> None:
    assert "Usage" in run(installed / "bin/kvflow", "--help")


def test_import_is_the_installed_one(installed: Path) -> None:
    where = run(installed / "bin/python", "-c", "import kvflow; print(kvflow.__file__)")
    assert Path(where).is_relative_to(installed)


def required(lines: list[str]) -> set[str]:
    return {line.split(">")[0].split("<")[0].strip() for line in lines}


def test_extras_are_those_of_the_project_file() -> None:
    """`kvflow.extras` says which extra brings a module; it has to agree with what is installed for
    it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert required(project["dependencies"]) == set(CORE_DISTRIBUTIONS)
    modules = importlib.metadata.packages_distributions()
    assert {modules[name][0].lower() for name in CORE} == set(CORE_DISTRIBUTIONS)
    optional = project["optional-dependencies"]
    for extra, names in EXTRAS.items():
        brought = {modules[name][0].lower().replace("_", "-") for name in names}
        assert brought == required(optional[extra]), extra


def test_the_bare_library_has_only_what_it_requires(bare: Path) -> None:
    names = sorted(name for modules in EXTRAS.values() for name in modules)
    ask = f"import importlib.util as u; print([n for n in {names!r} if u.find_spec(n)])"
    assert run(bare / "bin/python", "-c", ask) == "[]\n"


@pytest.mark.parametrize("example", ["one_room.py", "sync_engine.py", "bare_endpoints.py"])
def test_the_bare_library_moves_a_room(bare: Path, example: str) -> None:
    out = run(bare / "bin/python", "-W", "error", ROOT / "examples" / example)
    assert "identical: True" in out


def test_the_bare_library_plays_the_simulator(bare: Path) -> None:
    play = "from kvflow.proof.sim.run import simulate; print(simulate(7).violation)"
    assert run(bare / "bin/python", "-c", play) == "None\n"


@pytest.mark.parametrize("arguments", [("--help",), ("prefill", "--model-path", "m"), ()])
def test_the_command_line_names_the_extra_it_needs(bare: Path, arguments: tuple[str, ...]) -> None:
    for command in ([bare / "bin/kvflow"], [bare / "bin/python", "-m", "kvflow"]):
        done = finished(*command, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert (
            done.stderr == "kvflow: error: typer is not installed: pip install 'kvflow[server]'\n"
        )
