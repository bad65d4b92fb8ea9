"""What the tests of every table share."""

from __future__ import annotations

import itertools
from enum import IntEnum
from typing import Any, TypeVar

import pytest

from kvflow.protocols.machines.tables import ERROR, IGNORE, Table, TransitionError

P = TypeVar("P", bound=IntEnum)
K = TypeVar("K", bound=IntEnum)


def cells(table: Table[P, K, Any]) -> pytest.MarkDecorator:
    """Run the test for every `phase` and `kind` of the table."""
    every = list(itertools.product(table.phases, table.kinds))
    return pytest.mark.parametrize(("phase", "kind"), every, ids=lambda value: value.name)


def check_cell(table: Table[Any, Any, Any], phase: IntEnum, kind: IntEnum, wanted: object) -> None:
    """The cell is `wanted` (a Move, IGNORE or ERROR), and an ERROR raises."""
    cell = table.cell(phase, kind)
    assert cell is wanted if wanted in (IGNORE, ERROR) else cell == wanted
    if wanted is ERROR:
        with pytest.raises(TransitionError):
            table.moves[phase, kind]
