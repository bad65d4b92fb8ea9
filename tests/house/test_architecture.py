"""ARCHITECTURE.md says what the tables say."""

from __future__ import annotations

from pathlib import Path

from kvflow.protocols.machines.diagrams import MERMAID, render

DOCUMENT = Path(__file__).parents[2] / "ARCHITECTURE.md"


def test_diagrams_are_fresh() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert render(text) == text, "run: python -m kvflow.protocols.machines.diagrams ARCHITECTURE.md"


def test_every_machine_is_drawn() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->" in text for name in MERMAID)


def test_a_stale_diagram_is_noticed() -> None:
    stale = "<!-- table: loan -->\n```mermaid\nstateDiagram-v2\n```\n<!-- end -->"
    assert render(stale) != stale
