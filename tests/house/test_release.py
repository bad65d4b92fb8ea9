"""A release needs a tag, a version and a section of the changelog that agree."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGES = """# Changelog

## [Unreleased]

### Added

- Not yet out.

## [1.2.0] - 2030-01-02

### Fixed

- A page that was lost.

## [1.2.0rc1] - 2030-01-01

- Older.
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the script reads, of a project whose version is 1.2.0."""
    for folder in (".ci", "kvflow"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci/release-notes", tmp_path / ".ci")
    (tmp_path / "kvflow/__init__.py").write_text('import os\n\n__version__ = "1.2.0"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    return tmp_path


def notes_of(checkout: Path, tag: str) -> subprocess.CompletedProcess[str]:
    command = [str(checkout / ".ci/release-notes"), tag]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


def refusal(checkout: Path, tag: str) -> str:
    done = notes_of(checkout, tag)
    assert done.returncode == 1 and not done.stdout
    return done.stderr


def test_the_notes_are_the_section_of_the_version(checkout: Path) -> None:
    done = notes_of(checkout, "v1.2.0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "### Fixed\n\n- A page that was lost."


def test_the_last_section_ends_with_the_file(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("## [1.2.0] - 2030-01-02\n\n- First.\n")
    assert notes_of(checkout, "v1.2.0").stdout.strip() == "- First."


@pytest.mark.parametrize("tag", ["1.2.0", "v1.2", "v1.2.0rc1", "v1.2.00"])
def test_another_tag_is_refused(checkout: Path, tag: str) -> None:
    assert f"the tag is {tag}, and kvflow/__init__.py has version 1.2.0" in refusal(checkout, tag)


def test_another_version_of_the_package_is_refused(checkout: Path) -> None:
    (checkout / "pyproject.toml").write_text('[project]\nversion = "1.2.1"\n')
    assert "pyproject.toml has another version than 1.2.0" in refusal(checkout, "v1.2.0")


@pytest.mark.parametrize("heading", ["## [Unreleased]", "## [1.2.0]\n\n## [1.1.0]", "## 1.2.0"])
def test_a_version_without_a_section_is_refused(checkout: Path, heading: str) -> None:
    (checkout / "CHANGELOG.md").write_text(f"{heading}\n\n- Something.\n")
    assert 'CHANGELOG.md has no section "## [1.2.0]"' in refusal(checkout, "v1.2.0")


def test_this_tree_has_one_version() -> None:
    """The changelog may still say "Unreleased": only its refusal comes after the versions."""
    import kvflow

    done = notes_of(ROOT, f"v{kvflow.__version__}")
    assert done.returncode == 0 or "CHANGELOG.md has no section" in done.stderr, done.stderr
