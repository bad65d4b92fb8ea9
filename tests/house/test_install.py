"""What a user installs: one wheel, one top-level name, a command that runs from anywhere."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE_DATA = [
    "py.typed",
    *("demo_model/" + name for name in ("config.json", "model.safetensors", "tokenizer.json", "PROVENANCE.md")),
]
pytestmark = pytest.mark.timeout(300)


def run(*command: str | Path, cwd: Path = Path("/")) -> str:
    """Run a command and return what it printed; its whole output explains a failure."""
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel made from that sdist (so that a file missing in it shows)."""
    out = tmp_path_factory.mktemp("dist")
    # Without isolation: the build tool of this environment serves, and no network is needed.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel in it.

    The dependencies are those of this environment, added by path: downloading them again proves nothing about us.
    A path added as a folder does not run the .pth files in it, so the editable install here stays invisible.
    """
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=True)
    (wheel,) = built.glob("*.whl")
    run(home / "bin/python", "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
    site_packages = Path(run(home / "bin/python", "-c", ask))
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
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
