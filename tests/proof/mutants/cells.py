"""The mutants of a transition table, cell by cell."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tests.proof.mutants.mutant import CellChange, Mutant, numbered


def tables_of(module: ModuleType) -> dict[str, Any]:
    found = {name: value for name, value in vars(module).items() if _is_table(value)}
    return {
        name: table for name, table in found.items() if table.phases.__module__ == module.__name__
    }


def cell_mutants(file: str, module: ModuleType) -> list[Mutant]:
    """Return each cell of each table with another phase, command, order or constant."""
    found = []
    for name, table in tables_of(module).items():
        for phase in table.phases:
            for kind in table.kinds:
                cell = table.cell(phase, kind)
                text = f"{phase.name} x {kind.name}: {shown(cell)}"
                for operator, to, commands in _changes(table, phase, kind, _commands_of(table)):
                    change = CellChange(name, phase.name, kind.name, to, commands)
                    found.append(
                        Mutant(file, name, operator, text, cell=change, names=frozenset({name}))
                    )
    return numbered(found)


def change_cell(module: ModuleType, change: CellChange) -> None:
    """Change a table in place, so that all who hold it see the change."""
    table = getattr(module, change.table)
    phase, kind = table.phases[change.phase], table.kinds[change.kind]
    if change.to in ("IGNORE", "ERROR"):
        cell = _constants(table)[change.to]
    else:
        commands = {command.name: command for command in _commands_of(table)}
        cell = _move_of(table)(
            table.phases[change.to], tuple(commands[name] for name in change.commands)
        )
    table.put(phase, kind, cell)


def shown(cell: Any) -> str:
    return (
        " ".join([cell.phase.name, *(c.name for c in cell.commands)])
        if _is_move(cell)
        else repr(cell)
    )


def _changes(
    table: Any, phase: Any, kind: Any, commands: list[Any]
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    cell = table.cell(phase, kind)
    if not _is_move(cell):
        other = {"IGNORE": "ERROR", "ERROR": "IGNORE"}[repr(cell)]
        yield f"cell {other}", other, ()
        moves = [table.cell(p, kind) for p in table.phases if _is_move(table.cell(p, kind))]
        if moves:
            yield (
                f"cell {shown(moves[0])}",
                moves[0].phase.name,
                tuple(c.name for c in moves[0].commands),
            )
        return
    names = tuple(command.name for command in cell.commands)
    yield "cell IGNORE", "IGNORE", ()
    yield "cell ERROR", "ERROR", ()
    for other in table.phases:
        if other is not cell.phase:
            yield f"phase {other.name}", other.name, names
    for number, command in enumerate(names):
        yield f"without {command}", cell.phase.name, names[:number] + names[number + 1 :]
        if number:
            swapped = (*names[: number - 1], command, names[number - 1], *names[number + 1 :])
            yield f"{command} before {names[number - 1]}", cell.phase.name, swapped
    for command in commands:
        if command.name not in names:
            yield f"with {command.name}", cell.phase.name, (*names, command.name)


def _is_table(value: Any) -> bool:
    return all(
        hasattr(value, name) for name in ("phases", "kinds", "cell", "moves")
    ) and not isinstance(value, type)


def _is_move(cell: Any) -> bool:
    return hasattr(cell, "commands")


def _cells(table: Any) -> list[Any]:
    return [table.cell(phase, kind) for phase in table.phases for kind in table.kinds]


def _move_of(table: Any) -> Any:
    return next(type(cell) for cell in _cells(table) if _is_move(cell))


def _commands_of(table: Any) -> list[Any]:
    used = [command for cell in _cells(table) if _is_move(cell) for command in cell.commands]
    return list(used[0].__class__) if used else []


def _constants(table: Any) -> dict[str, Any]:
    """IGNORE and ERROR of the module that defines tables: a table need not use both."""
    module = sys.modules[type(table).__module__]
    return {"IGNORE": module.IGNORE, "ERROR": module.ERROR}
