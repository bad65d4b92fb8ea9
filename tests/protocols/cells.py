"""What the tests of every table share."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest

from kvflow.protocols.machines.tables import ERROR, IGNORE, Table, TransitionError


def check_cell(table: Table[Any, Any, Any], phase: IntEnum, kind: IntEnum, wanted: object) -> None:
    """The cell is `wanted` (a Move, IGNORE or ERROR), and an ERROR raises."""
    cell = table.cell(phase, kind)
    assert cell is wanted if wanted in (IGNORE, ERROR) else cell == wanted
    if wanted is ERROR:
        with pytest.raises(TransitionError):
            table.moves[phase, kind]
