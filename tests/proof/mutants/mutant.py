"""One mutant: a small change of the shipped code that the judges must notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class CannotBegin(Exception):  # noqa: N818
    """The lists or the judges do not fit the tree as it is."""


class Edit(NamedTuple):
    start: int
    end: int
    new: bytes

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new + source[self.end :]


class CellChange(NamedTuple):
    """A cell of a table that becomes "IGNORE", "ERROR", or a move to `to` with `commands`."""

    table: str
    phase: str
    kind: str
    to: str
    commands: tuple[str, ...] = ()


class Mutant(NamedTuple):
    """Exactly one of `edit` and `cell` is set.

    `scope` is the qualified name of the function or class around the change ("" at the top of a
    module), `text` the source line, or the cell as it is. Neither says where in its file the change
    stands, so that a mutant keeps its key when other lines are edited; `occurrence` counts those
    that would have the same key otherwise.
    """

    file: str
    scope: str
    operator: str
    text: str
    occurrence: int = 0
    first_line: int = 0  # of the innermost statement around the change
    last_line: int = 0
    edit: Edit | None = None
    cell: CellChange | None = None
    function: str = ""  # the outermost function whose body holds the change; "" when import runs it
    names: frozenset[str] = frozenset()  # what a change outside functions is known by elsewhere
    is_named: bool = False  # written by hand

    @property
    def key(self) -> str:
        if self.is_named:
            return f"named {self.operator}"
        return (
            f"{self.file} :: {self.scope or '(module)'} :: {self.operator} :: {self.text} :: "
            f"{self.occurrence}"
        )


def numbered(mutants: Iterable[Mutant]) -> list[Mutant]:
    """The same mutants, told apart by `occurrence` where all else is equal."""
    seen: Counter[str] = Counter()
    result = []
    for mutant in mutants:
        result.append(mutant._replace(occurrence=seen[mutant.key]))
        seen[mutant.key] += 1
    return result
