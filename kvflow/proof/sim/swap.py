"""Temporary replacement of attributes, items and table cells, for observers and planted bugs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from kvflow.protocols.machines.tables import Table

Swap = tuple[object, str, object]
"""An owner, the name of one of its attributes, and the replacement."""


@contextmanager
def swapped(owner: object, name: str, replacement: object) -> Iterator[None]:
    """Replace `owner.name` while the context lasts. Raises: AttributeError if it does not exist."""
    # An inherited name is deleted at the end, so that the owner keeps no copy of it.
    mine = name in vars(owner)
    original = getattr(owner, name) if not mine else vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if mine:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def swaps(replacements: Iterable[Swap]) -> Iterator[None]:
    with ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(swapped(*replacement))
        yield


@contextmanager
def swapped_item(table: dict[Any, Any], key: object, replacement: object) -> Iterator[None]:
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
    originals = {key: table.cell(*key) for key in cells}
    for (phase, kind), cell in cells.items():
        table.put(phase, kind, cell)
    try:
        yield
    finally:
        for (phase, kind), cell in originals.items():
            table.put(phase, kind, cell)
