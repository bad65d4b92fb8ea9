"""Something else in the place of a part, from outside, for a while: how a simulation looks on, how
plants get in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvflow.protocols.machines.tables import Table


@contextmanager
def swapped(owner: object, name: str, replacement: object) -> Iterator[None]:
    """`owner.name` is something else in the meantime."""
    mine = name in vars(owner)
    original = vars(owner).get(name, getattr(owner, name, None))
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if mine:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def swapped_item(table: dict[Any, Any], key: object, replacement: object) -> Iterator[None]:
    """`table[key]` is something else in the meantime."""
    original = table[key]
    table[key] = replacement
    try:
        yield
    finally:
        table[key] = original


@contextmanager
def swapped_cells(
    table: Table[Any, Any, Any], cells: Mapping[tuple[Any, Any], Any]
) -> Iterator[None]:
    """The cells (phase, kind) of a machine's table are others in the meantime; every holder of the
    table sees them.
    """
    originals = {key: table.cell(*key) for key in cells}
    for (phase, kind), cell in cells.items():
        table.put(phase, kind, cell)
    try:
        yield
    finally:
        for (phase, kind), cell in originals.items():
            table.put(phase, kind, cell)
