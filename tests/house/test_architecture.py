"""The drawings of the machines are those of the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.scripts.room import TITLES, Story, drawings
from kvflow.protocols.machines.diagrams import MERMAID, render
from kvflow.protocols.machines.prefill_room import PrefillKind
from kvflow.protocols.machines.tables import TransitionError

ROOT = Path(__file__).parents[2]
MACHINES = "docs/internals/machines.md"


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", MACHINES])
def test_diagrams_are_fresh(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert "```mermaid" in text
    assert render(text) == text, f"run: python -m kvflow.protocols.machines.diagrams {document}"


def test_every_machine_is_drawn() -> None:
    text = (ROOT / MACHINES).read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->" in text for name in MERMAID)


def test_a_stale_diagram_is_noticed() -> None:
    stale = "<!-- table: loan -->\n```mermaid\nstateDiagram-v2\n```\n<!-- end -->"
    assert render(stale) != stale


def test_the_picture_of_a_room_is_fresh() -> None:
    for path, drawing in drawings().items():
        assert path.read_text(encoding="utf-8") == drawing, "run: python -m docs.scripts.room"
        assert [text for text in (*TITLES, "recalled", "success") if text not in drawing] == []


def test_the_picture_shows_nothing_that_a_table_forbids() -> None:
    with pytest.raises(TransitionError, match=r"DRAINED.* cannot happen in .*EXPECTED"):
        Story().happens("prefill", PrefillKind.DRAINED)
