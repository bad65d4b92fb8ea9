"""ARCHITECTURE.md says what the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.scripts.room import TITLES, Story, drawings
from kvflow.protocols.machines.diagrams import MERMAID, render
from kvflow.protocols.machines.prefill_room import PrefillKind
from kvflow.protocols.machines.tables import TransitionError

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


def test_the_picture_of_a_room_is_fresh() -> None:
    for path, drawing in drawings().items():
        assert path.read_text(encoding="utf-8") == drawing, "run: python -m docs.scripts.room"
        assert [text for text in (*TITLES, "recalled", "success") if text not in drawing] == []


def test_the_picture_shows_nothing_that_a_table_forbids() -> None:
    with pytest.raises(TransitionError, match=r"DRAINED.* cannot happen in .*EXPECTED"):
        Story().happens("prefill", PrefillKind.DRAINED)
