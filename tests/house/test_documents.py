"""What the pages of this repository say of it is so, and what the code cites is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from docs.scripts.reference import CONFIGURATION, METRICS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    (
        *ROOT.glob("*.md"),
        *ROOT.joinpath("docs").rglob("*.md"),
        *ROOT.joinpath("examples").rglob("*.md"),
        *ROOT.joinpath("tests").rglob("*.md"),
        *ROOT.joinpath(".github").rglob("*.md"),
    )
)
SOURCES = sorted(
    path
    for folder in ("kvflow", "tests", "examples", "docs")
    for path in ROOT.joinpath(folder).rglob("*.py")
)
GENERATED = {Path(page).name for page in (CONFIGURATION, METRICS)}  # while the site is built
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


THERE = {path.name for path in (*PAGES, *ROOT.joinpath("kvflow").rglob("*.md"))} | GENERATED


def missing_pages(text: str) -> list[str]:
    """Return the Markdown pages that `text` names and that are not in the repository."""
    # The pattern takes long over a text that has no page to find.
    if ".md" not in text:
        return []
    named = re.findall(r"(?<![\w./-])[\w./-]*\w\.md\b", text)
    return [page for page in named if Path(page).name not in THERE]


def test_every_cited_page_is_in_the_repository() -> None:
    missing = {
        str(path.relative_to(ROOT)): pages
        for path in (
            *SOURCES,
            *PAGES,
            ROOT / "Makefile",
            ROOT / "pyproject.toml",
            ROOT / "mkdocs.yml",
        )
        if path != Path(__file__) and (pages := missing_pages(path.read_text(encoding="utf-8")))
    }
    assert missing == {}


def test_a_page_that_is_elsewhere_is_found() -> None:
    text = (
        "See ARCHITECTURE.md, kvflow/serve/demo_model/PROVENANCE.md, [it](plan.md) and "
        "../elsewhere/notes.md."
    )
    assert missing_pages(text) == ["plan.md", "../elsewhere/notes.md"]


def test_every_invariant_that_is_cited_is_defined() -> None:
    defined = re.findall(
        r"^- \*\*(I\d+) ", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert defined == [f"I{number}" for number in range(1, 15)]
    cited = {
        name
        for path in SOURCES
        for name in re.findall(r"\bI[1-9]\d?\b", path.read_text(encoding="utf-8"))
    }
    assert cited and cited <= set(defined)


def test_ci_runs_every_python_that_is_promised() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    promised = [
        c.rpartition(" ")[2]
        for c in classifiers
        if re.fullmatch(r"Programming Language .* :: 3\.\d+", c)
    ]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    (matrix,) = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert promised and re.findall(r"[\d.]+", matrix) == promised


def test_every_change_is_of_a_known_kind() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert kinds and set(kinds) <= CHANGES
    for release in text.split("\n## ")[1:]:
        headings = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert len(headings) == len(set(headings)), f"a heading twice in {release.splitlines()[0]}"


@pytest.mark.parametrize("link", ["protocols", "handlers"])
def test_the_two_folders_to_read_first_are_linked_at_the_root(link: str) -> None:
    assert (ROOT / link).resolve() == ROOT / "kvflow" / link
